"""The example with a training loop of its own, on this machine: interrupted and continued, it ends as if it was not."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slurm_train.checkpoint.directory import verify
from slurm_train.checkpoint.load import load_tensors
from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.paths import RunDirectory, list_checkpoints
from tests.support.command_line import REPOSITORY, Person
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

WORDS = ("task._target_=own_loop.main", "task.steps=300", "task.save_every=20", "run.processes=2")


@pytest.fixture
def person(tmp_path: Path) -> Person:
    shutil.copy(REPOSITORY / "examples" / "own_loop.py", tmp_path)
    return Person(tmp_path)


def the_run(person: Person, name: str) -> RunDirectory:
    (path,) = (person.folder / "runs" / name).iterdir()
    return RunDirectory(path)


def weights(run: RunDirectory) -> dict[str, torch.Tensor]:
    newest = list_checkpoints(run.checkpoints)[0]
    assert verify(newest).step == 300
    shapes = {"0.weight": (32, 1), "0.bias": (32,), "2.weight": (1, 32), "2.bias": (1,)}
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    load_tensors(newest, tensors)
    return tensors


def test_a_loop_of_ones_own_is_interrupted_and_continued(person: Person) -> None:
    # Slow enough to be met in the middle.
    example = person.folder / "own_loop.py"
    step = "        step += 1\n"
    example.write_text(example.read_text().replace(step, f"{step}        __import__('time').sleep(0.02)\n"))
    words = [sys.executable, "-m", "slurm_train", *WORDS, "run.name=stopped"]
    process = subprocess.Popen(
        words, cwd=person.folder, env=person.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    folder = person.folder / "runs" / "stopped"
    wait_for(lambda: list(folder.glob("*/checkpoints/*/COMPLETE")), within_s=120, what="the first checkpoint")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    run = the_run(person, "stopped")
    assert process.returncode == 75 and not run.result.exists(), out
    done = person.types(*WORDS, "run.name=stopped")
    assert done.code == 0 and run.result.exists() and "resuming from step" in done.out + done.err
    assert [line.get("exit_code") for line in read_ledger(run)] == [75, 0]
    assert person.types(*WORDS, "run.name=whole").code == 0
    stopped, whole = weights(run), weights(the_run(person, "whole"))
    assert all(torch.equal(stopped[name], whole[name]) for name in whole)
