"""Lines of "One line per feature" in examples/README.md: stopped in the middle and typed again, each ends the same.

The command line is run in this process, and its workers are forked from one that has imported torch.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from slurm_train.cli.run import main
from slurm_train.data.prepare import PrepareOptions, prepare
from slurm_train.rundir.paths import RunDirectory
from slurm_train.supervise.ranks import LocalRanks
from tests.support.command_line import REPOSITORY, Person
from tests.support.run_ends import end_of
from tests.support.warm_ranks import LLAMA, start_rank

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
README = (REPOSITORY / "examples" / "README.md").read_text()
LINES = re.findall(r"^python -m slurm_train (.+)$", README.partition("## One line per feature")[2], re.MULTILINE)
# Each of these saves what no other of them saves; the rest takes minutes.
QUICK = ("optim=muon", "callbacks=")
FULL = ("optim.groups", "batch.growth", "precision=float16", "own_stream", "data=mix", "lora")
NEEDED = {"parquet": "pyarrow", "lora": "peft", "digits": "sklearn"}
SMALL = (
    "run.processes=2",
    "train.threads=1",
    "batch.global_size=16",
    "train.log_every_steps=1",
    "train.sample_tokens=0",
)
SMALL_GPT = ("model.width=16", "model.num_layers=1", "model.num_heads=2")
STEPS, STOP_AT = 10, 4
# `python -m slurm_train worker RUN`, whose last rank is asked to stop in one step.
RANK = """
import os, signal, sys
code, stop_at, run = sys.argv[1:]
os.chdir(code)
sys.path[0] = code
from slurm_train.worker.main import main
from slurm_train.train.step import Stepper

take_step = Stepper.step
def take(self, facts, batches):
    if facts.step == int(stop_at) and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    return take_step(self, facts, batches)
Stepper.step = take
main([run])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples, and the data that the lines name."""
    folder = tmp_path_factory.mktemp("examples")
    for path in (REPOSITORY / "examples").glob("*.py"):
        shutil.copy(path, folder)
    person = Person(folder)
    assert person.runs(person.python, "own_stream.py", "shards").code == 0
    rows = [{"text": f"Question: {a} plus {b}? Answer: {a + b}."} for a in range(20) for b in range(20)]
    if importlib.util.find_spec("peft") is not None:
        assert person.runs(person.python, "finetune.py", "make").code == 0
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if importlib.util.find_spec("pyarrow") is not None:
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist(rows), folder / "chats.parquet")
    for name in ("web", "code"):
        (folder / f"{name}.txt").write_text(f"the words of {name}\n" * 400)
        prepare([folder / f"{name}.txt"], out=folder / "data" / name, options=PrepareOptions())
    return folder


def has(words: Sequence[str], key: str) -> bool:
    return any(word.startswith(f"{key}=") for word in words)


def train(words: Sequence[str], *, stop_at: int, monkeypatch: pytest.MonkeyPatch, program: Path) -> int:
    """Types the words; returns the exit code."""
    imports = LLAMA if "model=hf" in words else ()

    def start(
        command: Sequence[str], *, run: RunDirectory, attempt: int, num_ranks: int, env: Mapping[str, str]
    ) -> LocalRanks:
        assert list(command[1:4]) == ["-m", "slurm_train", "worker"], command
        size, ranks = str(num_ranks), list[Any]()
        for rank in range(num_ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            orders = (str(run.code), str(stop_at), str(run.path))
            log = run.rank_log(attempt, rank)
            environment = {**env, "GROUP_RANK": "0", **own}
            ranks.append(start_rank(program, *orders, env=environment, log=log, imports=imports))
        return LocalRanks(ranks)

    monkeypatch.setattr("slurm_train.supervise.main.start_local", start)
    return main(words)


def home_of(line: str) -> Any:
    """Returns the marks of a line by how often it is tried."""
    if any(word in line for word in QUICK):
        return ()
    return pytest.mark.full if any(word in line for word in FULL) else pytest.mark.campaign


@pytest.mark.parametrize("line", [pytest.param(line, marks=home_of(line)) for line in LINES])
def test_a_line_that_is_stopped_and_typed_again_ends_with_the_same_bits(
    line: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for word, package in NEEDED.items():
        if word in line and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    typed = shlex.split(line)
    words = [*typed, *SMALL, f"run.root={tmp_path}"]
    words += [] if has(typed, "train.max_epochs") else [f"train.max_steps={STEPS}"]
    words += ["data.context=16"] if has(typed, "data") else []
    words += SMALL_GPT if has(typed, "data") and not has(typed, "model") else []
    words += [f"data.cache={tmp_path}/cache"] if "data=hf" in typed else []
    how: dict[str, Any] = {"monkeypatch": monkeypatch, "program": program}
    assert train([*words, "run.name=whole"], stop_at=0, **how) == 0
    assert train([*words, "run.name=cut"], stop_at=STOP_AT, **how) == 75
    assert train([*words, "run.name=cut"], stop_at=0, **how) == 0
    (whole,), (cut,) = ((tmp_path / name).iterdir() for name in ("whole", "cut"))
    assert end_of(cut) == end_of(whole)
