"""The examples on a real Slurm: own model, own function, own script, peers' scripts."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.command_line import REPOSITORY, Person
from tests.support.slurm_runs import wait_until_finished

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.full]


@pytest.fixture(autouse=True)
def examples(person: Person) -> None:
    for example in (REPOSITORY / "examples").glob("*.py"):
        shutil.copy(example, person.folder)


def test_own_model_and_data(person: Person) -> None:
    own = ("model._target_=own_model.Regressor", "data._target_=own_model.Waves")
    _, run = person.types("+cluster=2x1", *own, "train.max_steps=150", "train.threads=1", "model.hidden=32").job_and_run
    assert wait_until_finished(run)["eval_loss"] < 0.1


def test_own_function_on_every_rank(person: Person) -> None:
    _, run = person.types("+cluster=2x1", "task._target_=own_task.main", "task.rounds=2").job_and_run
    wait_until_finished(run)
    assert "round 1: the ranks add up to 1" in run.rank_log(0, 0).read_text()


def test_torchrun_style_script(person: Person) -> None:
    _, run = person.types("+cluster=1x2", "script=[torchrun_script.py,--steps,5]").job_and_run
    wait_until_finished(run)
    for rank in range(2):
        assert f"rank {rank} of 2 (local rank {rank})" in run.rank_log(0, rank).read_text()


def test_packages_come_from_the_nodes_own_disk(person: Person, tmp_path_factory: pytest.TempPathFactory) -> None:
    """By a copy of this Python with few packages: what it is copied for is large."""
    small, disk = tmp_path_factory.mktemp("small"), tmp_path_factory.mktemp("disk")
    packages = Path(sysconfig.get_path("purelib"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", small], check=True)
    copied = small / packages.relative_to(sys.prefix)
    for name in ("hydra", "omegaconf", "antlr4", "yaml", "submitit", "cloudpickle", "xxhash", "packaging", "numpy"):
        shutil.copytree(packages / name, copied / name)
    for file in [*packages.glob("*.pth"), *packages.glob("typing_extensions.py")]:
        shutil.copy(file, copied)
    (person.folder / "where.py").write_text("import wave, yaml\nprint([one.__file__ for one in (wave, yaml)])\n")
    asked = (f"cluster.python={small}/bin/python", f"cluster.stage_python={disk}")
    _, run = person.types("+cluster=2x2", "script=[where.py]", *asked).job_and_run
    wait_until_finished(run)
    assert f"Python's packages are in {disk} on 2 of 2 nodes" in (run.logs / "batch.log").read_text()
    for rank in range(4):
        line = run.rank_log(0, rank).read_text().splitlines()[-1]
        assert line.count(f"'{disk}/slurm_train_") == 2, line


def test_a_script_that_fails_is_told_apart(person: Person) -> None:
    (person.folder / "fails.py").write_text("import os, sys\nsys.exit(3 if os.environ['RANK'] == '1' else 0)\n")
    _, run = person.types("+cluster=1x2", "script=[fails.py]").job_and_run
    with pytest.raises(AssertionError, match="'reason': 'failed'"):
        wait_until_finished(run)


@pytest.mark.parametrize(
    ("package", "words", "line"),
    [
        pytest.param(
            *("lightning", "lightning_script.py,--nodes,2,--devices,2", r"rank 0 of 4: 16 steps"),
            marks=pytest.mark.campaign,
        ),
        ("accelerate", "accelerate_script.py", r"rank 0 of 4: loss [0-9.]+"),
    ],
)
@pytest.mark.campaign
def test_peers_script_unmodified(person: Person, package: str, words: str, line: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed (pip install {package})")
    _, run = person.types("+cluster=2x2", f"script=[{words}]").job_and_run
    wait_until_finished(run, within_s=240)
    assert re.search(line, run.rank_log(0, 0).read_text())
