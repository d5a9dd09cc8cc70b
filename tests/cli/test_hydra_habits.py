"""What Hydra's words do to runs: sweeps, programs with @hydra.main, and what is printed.

The rows of docs/hydra.md that composing alone decides are tested in tests/config/test_hydra.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slurm_train.rundir.sweep import read_table
from slurm_train.verbs import HYDRA_HELP
from tests.cli.conftest import Shell
from tests.support.command_line import Person, new_project

habit = pytest.mark.habit


@habit("`--version`")
@habit("`-h`, `--help`")
@habit("`--hydra-help`")
@habit("`HYDRA_FULL_ERROR=1`")
def test_what_is_printed_about_the_program(shell: Shell) -> None:
    assert re.fullmatch(r"slurm_train \d+\.\d+\S*, Hydra 1\.3\.\d+\n", shell.types("--version").out)
    assert "--hydra-help" in shell.types("--help").out and shell.types("-h").code == 0
    done = shell.types("--hydra-help")
    assert (done.code, done.out) == (0, HYDRA_HELP)
    shell.patch.setenv("HYDRA_FULL_ERROR", "1")
    err = shell.types("plan optim.lrr=1").err
    assert "Traceback" in err and "\nerror: there is no configuration key 'optim.lrr'\nhint: " in err


@habit("`-r`, `--run`")
@habit("`-m`, `--multirun`")
@habit("`hydra/sweeper=NAME`, `hydra.sweeper.*`")
def test_one_run_or_several_are_asked_for(shell: Shell) -> None:
    assert shell.submits("-r +cluster=1x8").config.exists()
    for seed, words in enumerate(("hydra.mode=MULTIRUN", "-m hydra/sweeper=basic"), start=1):
        assert len(read_table(shell.submits_sweep(f"{words} +cluster=1x8 seed={seed}1,{seed}2"))) == 2
    assert "--wait waits for the runs of a sweep" in shell.types("--wait hydra.mode=RUN").err


@pytest.fixture
def person(tmp_path: Path) -> Person:
    return Person(new_project(tmp_path / "project"))


APP = """
import os
import hydra
@hydra.main(version_base="1.3", config_path=None)
def main(config):
    print("rank", os.environ["RANK"], "lr", config.lr, "cwd", os.getcwd())
main()
"""
TASK = """
import os
from hydra.core.hydra_config import HydraConfig
def main(context):
    print("hydra is set:", HydraConfig.initialized(), "seed", context.config.seed, "cwd", os.getcwd())
"""


@habit("a program with `@hydra.main`")
@habit("`HydraConfig.get()`, `get_original_cwd()` in a task or model")
def test_a_hydra_program_and_a_task_run_in_the_folder(person: Person) -> None:
    (person.folder / "app.py").write_text(APP)
    done = person.types("script=[app.py,+lr=3e-4,hydra.run.dir=out/own]", "run.processes=1")
    assert f"rank 0 lr 0.0003 cwd {person.folder}" in done.out + done.err
    assert (person.folder / "out" / "own" / ".hydra" / "config.yaml").read_text() == "lr: 0.0003\n"
    (person.folder / "own_task.py").write_text(TASK)
    done = person.types("task._target_=own_task.main", "seed=7", "run.processes=1")
    assert f"hydra is set: False seed 7 cwd {person.folder}" in done.out + done.err
