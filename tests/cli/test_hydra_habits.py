"""What Hydra's words do to runs: links, files, sweeps, and what is refused before anything is written.

The rows of docs/hydra.md that composing alone decides are tested in tests/config/test_hydra.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slurm_train.rundir.lookup import list_runs
from slurm_train.rundir.paths import RunDirectory
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
    folder = shell.submits("-r +cluster=1x8 hydra.output_subdir=.hydra").path / ".hydra"
    assert (folder / "overrides.yaml").read_text() == "- +cluster=1x8\n"
    for seed, words in enumerate(("hydra.mode=MULTIRUN", "-m hydra/sweeper=basic"), start=1):
        assert len(read_table(shell.submits_sweep(f"{words} +cluster=1x8 seed={seed}1,{seed}2"))) == 2
    assert "--wait waits for the runs of a sweep" in shell.types("--wait hydra.mode=RUN").err


def test_a_run_is_found_at_the_path_that_was_asked_for(shell: Shell) -> None:
    words = "+cluster=1x8 hydra.run.dir=out/${hydra.job.override_dirname}"
    link = shell.folder / "out" / "+cluster=1x8"
    found = f"found at      {link}: a link to the run directory"
    assert found in shell.types(f"plan {words}").err and shell.left() == []
    done = shell.types(words)
    run = done.job_and_run[1]
    assert found in done.err and link.is_symlink() and link.resolve() == run.path
    assert [run.path for run in list_runs(shell.folder / "runs")] == [link.resolve()], "the link is no second run"
    shell.slurm.account("4711", "FAILED")
    assert shell.types(words).code == 0, "the same words again find the link in its place"


IN_THE_WAY = {
    "taken": "/taken is there already, and is left alone",
    "file": "/file is there already, and is left alone",
    "other": "/other is there already, and is left alone",
    "runs/mine": "/runs/mine lies among the runs",
    "file/x": "/file/x cannot be made",
}


def test_nothing_that_is_there_is_overwritten(shell: Shell) -> None:
    (shell.folder / "taken").mkdir()
    (shell.folder / "file").write_text("mine")
    (shell.folder / "other").symlink_to("/tmp")
    before = shell.left()
    for path, message in IN_THE_WAY.items():
        assert "hint: name " in shell.refuses(message, f"+cluster=1x8 hydra.run.dir={path}")
    assert shell.left() == before and shell.slurm.said("sbatch_words") is None
    assert (shell.folder / "file").read_text() == "mine"


# For real


@pytest.fixture
def person(tmp_path: Path) -> Person:
    return Person(new_project(tmp_path / "project"))


@habit("`hydra/launcher=basic`")
def test_runs_on_this_machine_are_found_at_their_paths_too(person: Person) -> None:
    (person.folder / "train.py").write_text("print('trained')\n")
    words = ["script=[train.py]", "run.processes=1"]
    done = person.types(*words, "hydra.run.dir=out/alone")
    assert done.code == 0 and RunDirectory(person.folder / "out" / "alone").result.exists(), done.err
    words += ["-m", "hydra/launcher=basic", "seed=1,2", "hydra.sweep.dir=out/both"]
    done = person.types(*words, "hydra.sweep.subdir=${hydra.job.override_dirname}")
    assert done.code == 0 and "2 of 2 runs are finished" in done.err
    names = sorted(path.name for path in (person.folder / "out" / "both").iterdir())
    assert names == ["run.processes=1,script=[train.py],seed=1", "run.processes=1,script=[train.py],seed=2"]


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
