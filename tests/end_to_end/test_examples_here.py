"""Examples on this machine: a loop of one's own that is interrupted, and an adapter that peft loads."""

from __future__ import annotations

import importlib.util
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slurm_train.checkpoint.load import load_tensors
from slurm_train.checkpoint.verify import verify
from slurm_train.rundir.files import parse_lines
from slurm_train.rundir.paths import RunDirectory, list_checkpoints
from slurm_train.session.signals import StopFlag
from tests.support.command_line import REPOSITORY, Person
from tests.support.extras import NEEDS_PEFT
from tests.support.joined_runs import joined, new_run
from tests.support.ledgers import ledger_lines
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.full]


def example(folder: Path, name: str) -> Person:
    shutil.copy(REPOSITORY / "examples" / name, folder)
    return Person(folder)


def interrupt_and_continue(person: Person, *words: str) -> None:
    """Runs `stopped`, interrupted after its first checkpoint and continued, and `whole`."""
    argv = [sys.executable, "-m", "slurm_train", *words, "run.name=stopped"]
    process = subprocess.Popen(
        argv, cwd=person.folder, env=person.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    folder = person.folder / "runs" / "stopped"
    wait_for(lambda: list(folder.glob("*/checkpoints/*/COMPLETE")), within_s=120, what="the first checkpoint")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    run = RunDirectory(next(folder.iterdir()))
    assert process.returncode == 75 and not run.result.exists(), out
    done = person.types(*words, "run.name=stopped")
    assert done.code == 0 and run.result.exists() and "resuming from" in done.out + done.err
    assert [line.get("exit_code") for line in ledger_lines(run)] == [75, 0]
    assert person.types(*words, "run.name=whole").code == 0


def weights(person: Person, name: str) -> dict[str, torch.Tensor]:
    (path,) = (person.folder / "runs" / name).iterdir()
    newest = list_checkpoints(RunDirectory(path).checkpoints)[0]
    assert verify(newest).step == 300
    shapes = {"0.weight": (32, 1), "0.bias": (32,), "2.weight": (1, 32), "2.bias": (1,)}
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    load_tensors(newest, tensors)
    return tensors


NEEDS_ACCELERATE = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed: pip install accelerate"
)


@pytest.mark.filterwarnings("ignore")  # of the library
@pytest.mark.parametrize("name", ["session_ddp", pytest.param("session_accelerate", marks=NEEDS_ACCELERATE)])
def test_later_epochs_have_their_own_order_after_a_resume(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(run: RunDirectory, stop_at: int | None = None) -> None:
        stop = StopFlag()
        with joined(run, stop) as session:
            report = session.report

            def report_and_stop(step: int, **numbers: object) -> None:
                report(step, **numbers)
                if step == stop_at:
                    stop.request("TERM")

            monkeypatch.setattr(session, "report", report_and_stop)
            try:
                runpy.run_path(str(REPOSITORY / "examples" / f"{name}.py"), run_name="__main__")
            except SystemExit as ended:
                assert ended.code == 75 and stop_at is not None

    def losses(run: RunDirectory) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in parse_lines(run.metrics.read_text().splitlines())}

    # Of session_accelerate an epoch has 64 steps, of session_ddp 16.
    monkeypatch.setattr(sys, "argv", [name, "--steps", "80"])
    whole = new_run(tmp_path / "whole")
    train(whole)
    stopped = new_run(tmp_path / "stopped")
    # Twice at the end: as if it had been killed between its last save and its end.
    for stop_at in (64, 70, None, None):
        train(stopped, stop_at)
    assert len(losses(whole)) == 80 and losses(stopped) == losses(whole)


@pytest.mark.campaign
def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    person = example(tmp_path, "own_loop.py")
    # Slow enough to be interrupted in the middle.
    path, step = tmp_path / "own_loop.py", "        step += 1\n"
    path.write_text(path.read_text().replace(step, f"{step}        __import__('time').sleep(0.02)\n"))
    interrupt_and_continue(
        person, "task._target_=own_loop.main", "task.steps=300", "task.save_every=20", "run.processes=2"
    )
    stopped, whole = weights(person, "stopped"), weights(person, "whole")
    assert all(torch.equal(stopped[name], whole[name]) for name in whole)


@NEEDS_PEFT
@pytest.mark.campaign
def test_a_fine_tuned_adapter_is_exported_and_loaded_by_peft(tmp_path: Path) -> None:
    person = example(tmp_path, "finetune.py")
    assert person.runs(sys.executable, "finetune.py", "make").code == 0
    short = ("run.name=a", "train.max_steps=60", "batch.global_size=8")
    alone = ("run.processes=1", "train.threads=1", "data.context=64", f"data.cache={tmp_path / 'cache'}")
    words = ("model=hf", "model.path=llama", "model.lora={r: 8}", "data=hf", "data.path=chats.jsonl")
    assert person.types(*words, *short, *alone).code == 0
    assert person.types("checkpoint", "export", "a", "adapter", "--format", "hf").code == 0
    asked = person.runs(sys.executable, "finetune.py", "ask")
    said = re.search(r"loss ([\d.]+) without the adapter, ([\d.]+) with it", asked.out)
    assert said is not None and float(said[2]) < float(said[1]), asked.err
