"""Programs that are part of their run by the session, on this machine: stopped in the middle, resumed exactly."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import pytest

from slurm_train.checkpoint.verify import verify
from slurm_train.rundir.events import read_events
from slurm_train.rundir.paths import RunDirectory, list_checkpoints
from tests.support.command_line import REPOSITORY, TINY, TINY_MODULE, Person
from tests.support.ledgers import ledger_lines
from tests.support.own_programs import PROGRAMS, Program
from tests.support.slurm_runs import losses
from tests.support.waiting import wait_for
from tests.support.warm_commands import WarmPerson

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def run_of(person: Person, name: str) -> RunDirectory:
    (path,) = (person.folder / "runs" / name).iterdir()
    return RunDirectory(path)


# Shards; a plain loop is preempted on the cluster, and tests of the adapters have the libraries. The others take five
# minutes.
IN_SUITE = {"session_fsdp2"}


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(program, id=program.name, marks=[] if program.name in IN_SUITE else pytest.mark.campaign)
        for program in PROGRAMS
    ],
)
def test_a_stopped_program_has_the_losses_of_an_undisturbed_one(program: Program, tmp_path: Path) -> None:
    program.require()
    shutil.copy(REPOSITORY / "examples" / f"{program.name}.py", tmp_path)
    person = WarmPerson(tmp_path)
    whole = person.types(program.words(step_s=0.0), "run.processes=2", "run.name=whole", timeout_s=300)
    assert whole.code == 0, whole.out + whole.err

    # Four seconds from the first checkpoint to the end are enough to be stopped in.
    words = (program.words(step_s=0.1), "run.processes=2")
    process = person.begins(*words, "run.name=stopped", log=tmp_path / "typed.log")
    folder = tmp_path / "runs" / "stopped"
    wait_for(lambda: list(folder.glob("*/checkpoints/*/COMPLETE")), within_s=200, what="the first checkpoint")
    process.send_signal(signal.SIGINT)
    _, out = process.communicate(timeout=200)
    run = run_of(person, "stopped")
    assert process.returncode == 75 and not run.result.exists(), out
    (stop,) = read_events(run, "stop")
    newest = list_checkpoints(run.checkpoints)[0]
    assert verify(newest).step == stop["step"] < program.steps
    done = person.types(*words, "run.name=stopped", timeout_s=300)
    assert done.code == 0 and run.result.exists(), done.out + done.err
    first, second = ledger_lines(run)
    assert (first["exit_code"], second["exit_code"]) == (75, 0)
    assert first["last_step"] == second["first_step"] == stop["step"]
    assert losses(run) == losses(run_of(person, "whole")) and max(losses(run)) == program.steps


SLOW = """
import sys, time, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from slurm_train import session

run = session.join()
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
step = 0

class Data(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            time.sleep(0.1 * run.rank * ("reading" in sys.argv))
            yield torch.ones(8)

batches = iter(torch.utils.data.DataLoader(Data(), batch_size=1))
while not run.should_stop():
    loss = model(next(batches)).sum()
    time.sleep(0.03 + 0.1 * run.rank * ("computing" in sys.argv))
    loss.backward()
    step += 1
    run.report(step, loss=loss.item(), max_steps=100000)
with run.save(step) as folder:
    (folder / f"rank_{run.rank}").write_text("")
run.leave()
"""


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("computing", "computing takes longer"),
        pytest.param("reading", "data come late", marks=pytest.mark.full),
    ],
)
def test_a_slow_rank_of_a_program_is_named_and_its_pace_is_told(tmp_path: Path, kind: str, cause: str) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    person = WarmPerson(tmp_path)
    process = person.begins(f"script=[slow.py,{kind}]", "run.processes=2", "run.name=slow", log=tmp_path / "typed.log")
    folder = tmp_path / "runs" / "slow"
    try:
        wait_for(lambda: list(folder.glob("*/stragglers.jsonl")), within_s=200, what="the first window")
        run = run_of(person, "slow")
        # At least three windows of 3 s and more.
        wait_for(lambda: read_events(run, "slow"), within_s=200, what="the name of the slow rank")
        status = person.types("status", str(run.path), "--json").out
    finally:
        process.send_signal(signal.SIGINT)
        _, out = process.communicate(timeout=200)
    assert process.returncode == 75, out
    (slow, *_) = read_events(run, "slow")
    assert (slow["kind"], slow["ranks"]) == ("straggler", [1]) and cause in slow["sentence"]
    assert "rank 1" in out
    (told,) = json.loads(status)
    assert told["step_time_s"] > 0.13 and told["time_left_s"] > 1000, told


CRASHES = """
import ctypes
import os


def train(context=None):
    if os.environ["RANK"] == "1":
        ctypes.string_at(8)


if __name__ == "__main__":
    train()
"""


PEER = """
import os, sys, time, torch
import torch.distributed as dist

def train():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    try:
        for step in range(50):
            dist.all_reduce(torch.ones(1))
            if step == 3 and rank == 1:
                {act}
    finally:
        dist.destroy_process_group()
        time.sleep(0.5)

train()
"""


@pytest.mark.parametrize(
    ("act", "note"),
    [
        ('raise ValueError("bad label 17")', r"rank 1 on \S+: ValueError: bad label 17$"),
        (
            'print("no licence", file=sys.stderr, flush=True); os._exit(3)',
            r"rank 1 on \S+: ended with exit code 3; its last words: no licence$",
        ),
        (
            "sys.exit(0)",
            r"rank 1 had ended with exit code 0 while others went on.*; then rank 0 on \S+: RuntimeError: .*",
        ),
        ("sys.exit(4)", r"rank 1 on \S+: the script ended with code 4$"),
    ],
    ids=["raised", "os._exit", "ended too early", "sys.exit"],
)
def test_the_rank_that_its_peers_lost_is_named(tmp_path: Path, act: str, note: str) -> None:
    (tmp_path / "mine.py").write_text(PEER.format(act=act))
    person = WarmPerson(tmp_path)
    assert person.types("script=[mine.py]", "run.processes=2", "run.name=lost", timeout_s=120).code != 0
    (line,) = ledger_lines(run_of(person, "lost"))
    assert re.match(note, line["note"]), line


def test_a_data_set_that_crashes_in_a_process_of_the_loader_shows_where(tmp_path: Path) -> None:
    crashes = "import ctypes\n" + TINY_MODULE.replace(
        "        return self.x[index]",
        '        os.environ["RANK"] == "1" and ctypes.string_at(8)\n        return self.x[index]',
    )
    (tmp_path / "tiny.py").write_text(crashes)
    person = WarmPerson(tmp_path)
    words = (*TINY, "run.processes=2", "data.num_workers=1", "run.name=crashes")
    assert person.types(*words, timeout_s=120).code == 1
    (line,) = ledger_lines(run_of(person, "crashes"))
    assert re.search(r"by signal: Segmentation fault\. at tiny\.py:\d+ in __getitem__; the code of", line["note"]), line


LOADS = """
import ctypes
from torch.utils.data import DataLoader

class Numbers:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return ctypes.string_at(8)

def train(context=None):
    next(iter(DataLoader(Numbers(), num_workers=1)))

if __name__ == "__main__":
    train()
"""


@pytest.mark.parametrize("words", ["script=[mine.py]", "task._target_=mine.train"], ids=["script", "function"])
def test_a_loader_of_ones_own_that_crashes_shows_where(tmp_path: Path, words: str) -> None:
    (tmp_path / "mine.py").write_text(LOADS)
    person = WarmPerson(tmp_path)
    # Rank 0 writes to the terminal.
    ended = person.types(words, "run.processes=1", "run.name=loads", timeout_s=120)
    assert ended.code == 1 and re.search(r'mine\.py", line 10 in __getitem__', ended.out + ended.err), ended
    (line,) = ledger_lines(run_of(person, "loads"))
    assert "killed by signal: Segmentation fault." in line["note"], line


def test_a_model_that_ends_its_process_is_named(tmp_path: Path) -> None:
    ends = "\ndef exit_now():\n    raise SystemExit(0)\n"
    (tmp_path / "tiny.py").write_text(TINY_MODULE.replace("time.sleep(self.step_s)", "exit_now()") + ends)
    person = WarmPerson(tmp_path)
    assert person.types(*TINY, "run.processes=2", "run.name=ends", timeout_s=120).code == 1
    (line,) = ledger_lines(run_of(person, "ends"))
    assert re.search(r"sys.exit\(0\) was called in the training, at tiny.py:\d+ in exit_now$", line["note"])


@pytest.mark.parametrize("words", ["script=[mine.py]", "task._target_=mine.train"], ids=["script", "function"])
def test_a_rank_that_crashes_shows_where(tmp_path: Path, words: str) -> None:
    (tmp_path / "mine.py").write_text(CRASHES)
    person = WarmPerson(tmp_path)
    ended = person.types(words, "run.processes=2", "run.name=crash", timeout_s=120)
    assert ended.code != 0
    (line,) = ledger_lines(run_of(person, "crash"))
    assert "rank 1 on " in line["note"] and "mine.py:8 in train" in line["note"], line
    logs = person.types("logs", "crash")
    assert "Fatal Python error: Segmentation fault" in logs.out and "string_at" in logs.out, logs.err


ON_DISKS = """
import os, signal, sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from slurm_train import session

run = session.join()
dist.init_process_group("gloo")
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
training = run.training(model, optimizer)
for step in range(training.resume() + 1, 31):
    loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + run.rank))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.report(step, loss=loss.item())
    if training.is_due(step):
        training.save(step)
    if step == 17 and run.attempt == 0 and "--killed" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
if "--groups-end" in sys.argv:
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "ends",
    [
        pytest.param("", id="the program ends"),
        pytest.param(",--groups-end", id="its groups end first", marks=pytest.mark.full),
    ],
)
def test_a_program_goes_on_from_the_nodes_disks_and_leaves_nothing_there(tmp_path: Path, ends: str) -> None:
    (tmp_path / "mine.py").write_text(ON_DISKS)
    disk = tmp_path / "disk"
    disk.mkdir()
    person = WarmPerson(tmp_path)
    words = ["run.processes=2", "checkpoint.every_steps=5", "checkpoint.background=false"]
    whole = person.types(f"script=[mine.py{ends}]", *words, "run.name=whole")
    assert whole.code == 0, whole.out + whole.err

    words += [f"checkpoint.local_dir={disk}", "checkpoint.copy_every=1000"]
    killed = [f"script=[mine.py,--killed{ends}]", *words, "run.name=killed"]
    assert person.types(*killed).code == 137
    done = person.types(*killed)
    assert done.code == 0, done.out + done.err
    run = run_of(person, "killed")
    first, second = ledger_lines(run)
    assert ("last_committed" in first, second["first_step"]) == (False, 15), (first, second)
    assert "step 15 was on the nodes only; copied into the run directory" in done.out + done.err
    # No save was due to be copied, and the last one is there all the same.
    assert [verify(path).step for path in list_checkpoints(run.checkpoints)] == [30, 15]
    assert not list(disk.glob("*/*")), list(disk.rglob("*"))
    assert losses(run) == losses(run_of(person, "whole")) and max(losses(run)) == 30
