"""`resume` of a run as it is; with changes in test_changes_of_a_run, of a sweep in test_sweep_verbs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from slurm_train.config.frozen import dump_config, load_config
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.sweep import read_table
from slurm_train.rundir.timing import Spent
from tests.cli.conftest import Shell
from tests.support.run_facts import attempt

STOPPED = attempt(0, reason="cancelled", action="stop")


def test_the_runs_own_script_is_submitted_again(shell: Shell) -> None:
    run = shell.has_run(job_ids=("12",), ledger=STOPPED)
    run.stop_file.touch()
    assert shell.submits("resume 3f9a1c07") == run
    assert shell.slurm.said("submitted.sh") == run.submit_script.read_text()
    assert "--signal=USR2@120" in shell.slurm.said("submitted_words")
    assert json.loads(run.job.read_text())["job_ids"] == ["12", "4711"]
    assert not run.stop_file.exists(), "an old request to stop is not for the new job"
    spent = Spent(begin_unix_s=0.0, longest_save_s=100.0, longest_step_s=2.0)
    spent.write(run.account(0))
    shell.submits("resume 3f9a1c07")
    assert "--signal=USR2@321" in shell.slurm.said("submitted_words"), "as early as its saves need"


def test_a_run_that_was_moved_gets_a_script_for_where_it_lies(shell: Shell) -> None:
    run = shell.submits("+cluster=2x1 run.name=mine")
    shell.slurm.queue("4711", "CANCELLED")
    moved = RunDirectory(shell.folder / "elsewhere" / "else" / run.run_id)
    moved.path.parent.mkdir(parents=True)
    run.path.rename(moved.path)
    assert shell.submits(f"resume {moved.path}").path == moved.path
    script = shell.slurm.said("submitted.sh")
    assert script == moved.submit_script.read_text()
    assert f"supervise {moved.path} --" in script and str(run.path) not in script


def test_a_run_whose_python_is_gone_goes_on_with_the_one_that_is_typed(shell: Shell) -> None:
    for run in (shell.submits("+cluster=2x1"), read_table(shell.submits_sweep("-m +cluster=2x1 seed=5,6"))[0].run):
        shell.slurm.queue("4711", "CANCELLED")
        script = run.submit_script.read_text()
        run.submit_script.write_text(script.replace(sys.executable, f"{shell.folder}/gone/bin/python"))
    done = shell.types("resume 29b25f39554e")
    assert (
        f"the Python of the run is gone: {shell.folder}/gone/bin/python; it goes on with {sys.executable}" in done.err
    )
    assert f"\nexec {sys.executable} -m slurm_train supervise" in (shell.slurm.said("submitted.sh") or "")
    (sweep,) = (shell.folder / "runs" / "sweeps").iterdir()
    shell.refuses(f"the Python of sweep {sweep.name} is gone", f"resume {sweep.name}")
    assert shell.types("-m +cluster=2x1 seed=5,6").code == 0
    assert run.submit_script.read_text() == script


def test_every_start_of_a_job_names_the_variables_that_stay_behind(shell: Shell) -> None:
    (shell.folder / "train.py").write_text('import os\nprint(os.environ.get("MY_LR"))\n')
    words = "script=[train.py] +cluster=1x1"
    shell.patch.setenv("MY_LR", "3e-4")
    said = "job does not get: MY_LR (train.py); to export them: cluster.export=[MY_LR]\n"
    assert said in shell.types(f"plan {words}").err
    done = shell.types(words)
    assert said in done.err
    shell.slurm.queue("4711", "CANCELLED")
    assert said in shell.types(f"resume {done.job_and_run[1].run_id}").err
    assert said in shell.types(f"plan -m {words} run.name=a,b").err
    sweep = shell.types(f"-m {words} run.name=a,b")
    assert said in sweep.err
    assert said in shell.types(f"resume {sweep.job_and_run[1].path.name}").err
    assert "does not get" not in shell.types(f"{words} run.name=c cluster.export=[MY_LR]").err


def test_an_active_run_is_not_submitted_twice(shell: Shell) -> None:
    run = shell.has_run(job_ids=("12", "13"))
    shell.slurm.queue("12", "RUNNING")
    shell.slurm.queue("13", "FAILED")
    shell.refuses("is active already: Slurm job 12,", "resume gpt-stdlib")
    shell.slurm.has_script("14", run.submit_script)
    shell.slurm.queue("14", "PENDING")
    shell.refuses("is active already: Slurm job 12, 14,", "resume gpt-stdlib")
    shell.has_run("here", "77aa0000", cluster=False, job_ids=("12",))
    shell.refuses("is active already: Slurm job 12", "resume here")
    assert shell.slurm.said("submitted.sh") is None


def test_what_cannot_go_on_says_what_to_type(shell: Shell) -> None:
    shell.has_run("done", "aaaa0000", result={})
    assert "run.name=NAME, or seed=N" in shell.refuses("is finished; there is nothing to resume", "resume done")
    script = shell.has_run("script", "dddd0000", result={})
    script.config.write_text(dump_config(replace(load_config(script.config), model=None, data=None, script=["a.py"])))
    assert "train.max_steps" not in shell.refuses("is finished; there is nothing to resume", "resume script")
    shell.has_run("lost", "bbbb0000", script=None)
    assert "first command again" in shell.refuses("submit.sh is missing", "resume lost")
    shell.has_run("here", "cccc0000", cluster=False).plan.write_text("{")
    shell.refuses("plan.json cannot be read", "resume here")
