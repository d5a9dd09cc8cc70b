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
from tests.support.command_line import REPOSITORY, Person, new_project

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
    assert "Traceback" not in shell.types("plan optim.lrr=1").err
    shell.patch.setenv("HYDRA_FULL_ERROR", "1")
    err = shell.types("plan optim.lrr=1").err
    assert "Traceback" in err and "\nerror: there is no configuration key 'optim.lrr'\nhint: " in err


def test_the_short_help_and_the_page_speak_of_the_same_settings() -> None:
    page = (REPOSITORY / "docs" / "hydra.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:hydra[./][a-z_]+(?:\.[a-z_]+)*|--[a-z-]+)", HYDRA_HELP)) - {"hydra.md"}
    assert len(named) > 25
    assert [name for name in named if name not in page] == []


@habit("`-r`, `--run`")
@habit("`-m`, `--multirun`")
@habit("`hydra.mode=MULTIRUN`")
@habit("`hydra/sweeper=NAME`, `hydra.sweeper.*`")
def test_one_run_or_several_are_asked_for(shell: Shell) -> None:
    for flag in ("-r", "--run"):
        assert shell.submits(f"{flag} +cluster=1x8 run.name=a{flag[-1]}").config.exists()
    for seed, words in enumerate(("-m", "--multirun", "hydra.mode=MULTIRUN", "-m hydra/sweeper=basic"), start=1):
        assert len(read_table(shell.submits_sweep(f"{words} +cluster=1x8 seed={seed}1,{seed}2"))) == 2
    assert "--wait waits for the runs of a sweep" in shell.types("--wait hydra.mode=RUN").err


@habit("`hydra.run.dir=PATH`")
def test_a_run_is_found_at_the_path_that_was_asked_for(shell: Shell) -> None:
    words = "+cluster=1x8 hydra.run.dir=out/${hydra.job.override_dirname}"
    link = shell.folder / "out" / "+cluster=1x8"
    found = f"found at      {link}: a link to the run directory"
    assert found in shell.types(f"plan {words}").err and shell.left() == []
    done = shell.types(words)
    run = done.job_and_run[1]
    assert found in done.err and link.is_symlink() and link.resolve() == run.path
    assert [run.path for run in list_runs(shell.folder / "runs")] == [link.resolve()], "the link is no second run"
    assert "gpt-stdlib" in shell.types("status", str(link)).out
    shell.slurm.account("4711", "FAILED")
    assert shell.types(words).code == 0, "the same words again find the link in its place"
    shell.slurm.account("4711", "FAILED")
    done = shell.types("+cluster=1x8 hydra.run.dir=.")
    assert done.code == 0 and "found at" not in done.err, "the folder itself asks for nothing"
    run.result.write_text("{}")
    assert shell.types("+cluster=1x8 hydra.run.dir=out/x").code == 0
    assert (shell.folder / "out" / "x").resolve() == run.path, "a finished run gets its link too"


IN_THE_WAY = {
    "taken": "/taken is there already, and is left alone",
    "file": "/file is there already, and is left alone",
    "other": "/other is there already, and is left alone",
    "runs/mine": "/runs/mine lies among the runs",
    "file/x": "/file/x cannot be made",
}


@habit("`hydra.run.dir=PATH`")
def test_nothing_that_is_there_is_overwritten(shell: Shell) -> None:
    (shell.folder / "taken").mkdir()
    (shell.folder / "file").write_text("mine")
    (shell.folder / "other").symlink_to("/tmp")
    before = shell.left()
    for path, message in IN_THE_WAY.items():
        assert "hint: name " in shell.refuses(message, f"+cluster=1x8 hydra.run.dir={path}")
    assert shell.left() == before and shell.slurm.said("sbatch_words") is None
    assert (shell.folder / "file").read_text() == "mine"


@habit("`hydra.sweep.dir=PATH`, `hydra.sweep.subdir=NAME`")
def test_the_runs_of_a_sweep_are_found_below_the_path(shell: Shell) -> None:
    words = "-m +cluster=1x8 hydra.sweep.dir=out hydra.sweep.subdir=s${seed} seed=5,6"
    runs = [element.run.path for element in read_table(shell.submits_sweep(words))]
    assert [(shell.folder / "out" / name).resolve() for name in ("s5", "s6")] == runs
    shell.slurm.queue_many(["4711_0", "4711_1"], "RUNNING")
    shell.slurm.next_job(4720)
    assert shell.types(f"{words},7").code == 0, "a sweep is widened under the same path"
    assert sorted(path.name for path in (shell.folder / "out").iterdir()) == ["s5", "s6", "s7"]


@habit("`hydra.output_subdir=.hydra`")
def test_hydras_files_lie_in_the_run_directory(shell: Shell) -> None:
    folder = shell.submits("+cluster=1x8 optim.lr=0.5 hydra.output_subdir=.hydra").path / ".hydra"
    assert (folder / "overrides.yaml").read_text() == "- +cluster=1x8\n- optim.lr=0.5\n"
    assert "lr: 0.5" in (folder / "config.yaml").read_text()
    assert "output_subdir: .hydra" in (folder / "hydra.yaml").read_text()
    sweep = read_table(shell.submits_sweep("-m +cluster=1x8 seed=5,6 hydra.output_subdir=.hydra"))
    texts = [(element.run.path / ".hydra" / "overrides.yaml").read_text() for element in sweep]
    assert texts == ["- +cluster=1x8\n- seed=5\n", "- +cluster=1x8\n- seed=6\n"]


@habit("`hydra.job.name=NAME`")
def test_a_job_name_is_the_runs_name(shell: Shell) -> None:
    assert shell.submits("+cluster=1x8 hydra.job.name=ann").name == "ann"
    sweep = shell.submits_sweep("-m +cluster=1x8 hydra.job.name=bob seed=1,2")
    assert [element.run.name for element in read_table(sweep)] == ["bob", "bob"]


# For real


@pytest.fixture
def person(tmp_path: Path) -> Person:
    return Person(new_project(tmp_path / "project"))


@habit("`hydra/launcher=basic`")
@habit("`hydra.run.dir=PATH`")
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
