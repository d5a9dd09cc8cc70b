"""What Hydra's words do to runs: links, files, sweeps, and what is refused before anything is written.

The rows of docs/hydra.md that composing alone decides are tested in tests/config/test_hydra.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from slurm_train.rundir.lookup import list_runs
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.sweep import SweepDirectory, read_table
from slurm_train.verbs import HYDRA_HELP
from tests.support.command_line import REPOSITORY, Person, new_project

habit = pytest.mark.habit


def run_of(out: str) -> RunDirectory:
    return RunDirectory(Path(out.split()[1]))


@habit("`--version`")
def test_the_version_names_this_program_and_hydra(shell: Any) -> None:
    assert re.fullmatch(r"slurm_train \d+\.\d+\S*, Hydra 1\.3\.\d+\n", shell.types("--version").out)


@habit("`-h`, `--help`")
@habit("`--hydra-help`")
def test_both_helps_are_printed(shell: Any) -> None:
    assert "--hydra-help" in shell.types("--help").out and shell.types("-h").code == 0
    done = shell.types("--hydra-help")
    assert (done.code, done.out) == (0, HYDRA_HELP)


def test_the_short_help_and_the_page_speak_of_the_same_settings() -> None:
    page = (REPOSITORY / "docs" / "hydra.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:hydra[./][a-z_]+(?:\.[a-z_]+)*|--[a-z-]+)", HYDRA_HELP)) - {"hydra.md"}
    assert len(named) > 25
    assert [name for name in named if name not in page] == []


@habit("`HYDRA_FULL_ERROR=1`")
def test_a_full_error_has_a_traceback(shell: Any) -> None:
    assert "Traceback" not in shell.types("plan", "optim.lrr=1").err
    shell.patch.setenv("HYDRA_FULL_ERROR", "1")
    err = shell.types("plan", "optim.lrr=1").err
    assert "Traceback" in err and "\nerror: there is no configuration key 'optim.lrr'\nhint: " in err


@habit("`-r`, `--run`")
def test_one_run_may_be_asked_for_by_flag(shell: Any) -> None:
    for seed, flag in enumerate(("-r", "--run")):
        done = shell.types(flag, "+cluster=1x8", f"seed={seed}")
        assert done.code == 0 and run_of(done.out).config.exists()


@habit("`-m`, `--multirun`")
@pytest.mark.parametrize("words", [["-m"], ["--multirun"], ["hydra.mode=MULTIRUN"]])
def test_several_values_are_one_job_array(words: list[str], shell: Any) -> None:
    done = shell.types(*words, "+cluster=1x8", "seed=1,2")
    assert done.code == 0, done.err
    assert len(read_table(SweepDirectory(Path(done.out.split()[1])))) == 2


@habit("`hydra.mode=MULTIRUN`")
def test_waiting_is_for_sweeps_however_they_are_asked_for(shell: Any) -> None:
    assert "--wait waits for the runs of a sweep" in shell.types("--wait", "hydra.mode=RUN").err


@habit("`hydra.run.dir=PATH`")
def test_a_run_is_found_at_the_path_that_was_asked_for(shell: Any) -> None:
    words = ("+cluster=1x8", "hydra.run.dir=out/${hydra.job.override_dirname}")
    planned = shell.types("plan", *words)
    link = shell.folder / "out" / "+cluster=1x8"
    assert f"found at      {link}: a link to the run directory" in planned.err and shell.left() == []
    done = shell.types(*words)
    assert done.code == 0 and f"found at      {link}" in done.err
    assert link.is_symlink() and link.resolve() == run_of(done.out).path
    assert [run.path for run in list_runs(shell.folder / "runs")] == [link.resolve()], "the link is no second run"
    assert "gpt-stdlib" in shell.types("status", str(link)).out
    shell.slurm.account("4711", "FAILED")
    assert shell.types(*words).code == 0, "the same words again find the link in its place"


@habit("`hydra.run.dir=PATH`")
def test_a_finished_run_gets_its_link_too(shell: Any) -> None:
    run = run_of(shell.types("+cluster=1x8").out)
    run.result.write_text("{}")
    assert shell.types("+cluster=1x8", "hydra.run.dir=out/x").code == 0
    assert (shell.folder / "out" / "x").resolve() == run.path


@habit("`hydra.run.dir=PATH`")
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("taken", "/taken is there already, and is left alone"),
        ("file", "/file is there already, and is left alone"),
        ("other", "/other leads to "),
        ("runs/mine", "/runs/mine lies among the runs"),
        ("file/x", "/file/x cannot be made"),
    ],
)
def test_nothing_that_is_there_is_overwritten(path: str, message: str, shell: Any) -> None:
    (shell.folder / "taken").mkdir()
    (shell.folder / "file").write_text("mine")
    (shell.folder / "other").symlink_to("/tmp")
    before = shell.left()
    done = shell.types("+cluster=1x8", f"hydra.run.dir={path}")
    assert done.code == 2 and message in done.err and "hint: name " in done.err
    assert shell.left() == before and shell.slurm.said("sbatch_words") is None
    assert (shell.folder / "file").read_text() == "mine"


@habit("`hydra.run.dir=PATH`")
def test_the_folder_itself_asks_for_nothing(shell: Any) -> None:
    done = shell.types("+cluster=1x8", "hydra.run.dir=.")
    assert done.code == 0 and "found at" not in done.err


@habit("`hydra.sweep.dir=PATH`, `hydra.sweep.subdir=NAME`")
def test_the_runs_of_a_sweep_are_found_below_the_path(shell: Any) -> None:
    words = ("-m", "+cluster=1x8", "hydra.sweep.dir=out", "hydra.sweep.subdir=s${seed}")
    done = shell.types(*words, "seed=5,6")
    assert done.code == 0, done.err
    runs = [element.run.path for element in read_table(SweepDirectory(Path(done.out.split()[1])))]
    assert [(shell.folder / "out" / name).resolve() for name in ("s5", "s6")] == runs
    assert "(and 1 more)" in done.err
    shell.slurm.queue_many(["4711_0", "4711_1"], "RUNNING")
    (shell.slurm.folder / "job_id").write_text("4720\n")
    assert shell.types(*words, "seed=5,6,7").code == 0, "a sweep is widened under the same path"
    assert sorted(path.name for path in (shell.folder / "out").iterdir()) == ["s5", "s6", "s7"]


@habit("`hydra.sweep.dir=PATH`, `hydra.sweep.subdir=NAME`")
def test_two_runs_at_one_path_are_refused(shell: Any) -> None:
    done = shell.types("-m", "+cluster=1x8", "hydra.sweep.dir=out", "hydra.sweep.subdir=same", "seed=5,6")
    assert done.code == 2 and "two runs of the sweep would both be at" in done.err and "${hydra.job.num}" in done.err
    assert shell.left() == []


@habit("`hydra.output_subdir=.hydra`")
def test_hydras_files_lie_in_the_run_directory(shell: Any) -> None:
    run = run_of(shell.types("+cluster=1x8", "optim.lr=0.5", "hydra.output_subdir=.hydra").out)
    assert (run.path / ".hydra" / "overrides.yaml").read_text() == "- +cluster=1x8\n- optim.lr=0.5\n"
    assert "lr: 0.5" in (run.path / ".hydra" / "config.yaml").read_text()
    assert "output_subdir: .hydra" in (run.path / ".hydra" / "hydra.yaml").read_text()
    done = shell.types("-m", "+cluster=1x8", "seed=5,6", "hydra.output_subdir=.hydra")
    sweep = read_table(SweepDirectory(Path(done.out.split()[1])))
    texts = [(element.run.path / ".hydra" / "overrides.yaml").read_text() for element in sweep]
    assert texts == ["- +cluster=1x8\n- seed=5\n", "- +cluster=1x8\n- seed=6\n"]


@habit("`hydra.job.name=NAME`")
def test_a_job_name_is_the_runs_name(shell: Any) -> None:
    assert run_of(shell.types("+cluster=1x8", "hydra.job.name=ann").out).name == "ann"
    done = shell.types("-m", "+cluster=1x8", "hydra.job.name=bob", "seed=1,2")
    assert [element.run.name for element in read_table(SweepDirectory(Path(done.out.split()[1])))] == ["bob", "bob"]


@habit("`hydra/launcher=basic`")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["+cluster=1x8"], "hydra/launcher=basic runs here, but a cluster is asked for"),
        (["-m", "+cluster=1x8", "seed=1,2"], "hydra/launcher=basic runs here, but a cluster is asked for"),
        (["-m", "seed=1,2", "sweep.max_parallel=2"], "runs one after the other, but sweep.max_parallel=2"),
    ],
    ids=lambda value: " ".join(value) if type(value) is list else "",
)
def test_the_basic_launcher_beside_something_else_is_refused(words: list[str], message: str, shell: Any) -> None:
    done = shell.types("hydra/launcher=basic", *words)
    assert done.code == 2 and message in done.err and "hint: drop hydra/launcher=basic" in done.err
    assert shell.left() == []


@habit("`hydra/sweeper=NAME`, `hydra.sweeper.*`")
def test_the_basic_sweeper_may_be_named(shell: Any) -> None:
    assert "2 runs: seed (2)" in shell.types("plan", "-m", "hydra/sweeper=basic", "+cluster=1x8", "seed=1,2").err


def test_a_plan_is_no_way_to_print_a_configuration(shell: Any) -> None:
    done = shell.types("plan", "--cfg", "job")
    assert done.code == 2 and "hint: drop `plan`" in done.err


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


@habit("a program with `@hydra.main`")
def test_a_hydra_program_runs_unmodified(person: Person) -> None:
    (person.folder / "app.py").write_text(APP)
    done = person.types("script=[app.py,+lr=3e-4,hydra.run.dir=out/own]", "run.processes=1")
    assert done.code == 0, done.err
    assert f"rank 0 lr 0.0003 cwd {person.folder}" in done.out + done.err
    assert (person.folder / "out" / "own" / ".hydra" / "config.yaml").read_text() == "lr: 0.0003\n"


TASK = """
import os
from hydra.core.hydra_config import HydraConfig
def main(context):
    print("hydra is set:", HydraConfig.initialized(), "seed", context.config.seed, "cwd", os.getcwd())
"""


@habit("`HydraConfig.get()`, `get_original_cwd()` in a task or model")
def test_a_task_finds_its_configuration_in_its_context(person: Person) -> None:
    (person.folder / "own_task.py").write_text(TASK)
    done = person.types("task._target_=own_task.main", "seed=7", "run.processes=1")
    assert done.code == 0, done.err
    assert f"hydra is set: False seed 7 cwd {person.folder}" in done.out + done.err
