from __future__ import annotations

import json
from typing import Any

import pytest

from slurm_train.rundir.timing import Spent, account_path
from tests.support.run_facts import attempt

STOPPED = attempt(0, reason="cancelled", action="stop")
SCRIPT = "#!/bin/bash\n#SBATCH --nodes=1\n"


def test_the_runs_own_script_is_submitted_again(shell: Any) -> None:
    run = shell.has_run(job_ids=("12",), ledger=STOPPED, script=SCRIPT)
    run.stop_file.touch()
    done = shell.types("resume", "3f9a1c07")
    assert (done.code, done.out) == (0, f"4711 {run.path}\n")
    assert shell.slurm.said("submitted.sh") == SCRIPT
    assert "--signal=USR2@120" in shell.slurm.said("submitted_words")
    assert json.loads(run.job.read_text())["job_ids"] == ["12", "4711"]
    assert not run.stop_file.exists(), "an old request to stop is not for the new job"
    assert "newest verified checkpoint" in done.err


def test_the_warning_of_a_resumed_run_comes_as_early_as_its_saves_need(shell: Any) -> None:
    run = shell.has_run(job_ids=("12",), ledger=STOPPED, script=SCRIPT)
    spent = Spent(begin_unix_s=0.0, longest_save_s=100.0, longest_step_s=2.0)
    run.attempt_logs(0).mkdir(parents=True, exist_ok=True)
    spent.write(account_path(run, 0))
    assert shell.types("resume", "3f9a1c07").code == 0
    assert "--signal=USR2@321" in shell.slurm.said("submitted_words")


def test_a_finished_run_has_nothing_to_resume(shell: Any) -> None:
    shell.has_run(result={})
    done = shell.types("resume", "gpt-stdlib")
    assert (done.code, done.out) == (2, "")
    assert "gpt-stdlib/3f9a1c07 is finished; there is nothing to resume" in done.err
    assert "run.name=NAME, or seed=N" in done.err


@pytest.mark.parametrize("word", ["PENDING", "RUNNING"])
def test_an_active_run_is_not_submitted_twice(word: str, shell: Any) -> None:
    shell.has_run(job_ids=("12",), script=SCRIPT)
    shell.slurm.queue("12", word)
    done = shell.types("resume", "gpt-stdlib")
    assert done.code == 2 and "is active already: Slurm job 12" in done.err
    assert shell.slurm.said("submitted.sh") is None


def test_what_slurm_refuses_leaves_the_run_as_it_was(shell: Any) -> None:
    run = shell.has_run(job_ids=("12",), script=SCRIPT)
    shell.slurm.refuse("sbatch: error: Batch job submission failed: Invalid account or account/partition combination")
    before = shell.left()
    done = shell.types("resume", "gpt-stdlib")
    assert done.code == 2 and "set cluster.account" in done.err
    assert shell.left() == before and json.loads(run.job.read_text())["job_ids"] == ["12"]


def test_a_missing_script_says_what_to_type(shell: Any) -> None:
    shell.has_run(script=None)
    done = shell.types("resume", "gpt-stdlib")
    assert done.code == 2 and "submit.sh is missing" in done.err and "first command again" in done.err


def test_a_job_that_a_newer_one_hides_counts_as_active(shell: Any) -> None:
    run = shell.has_run(job_ids=("12", "13"), script=SCRIPT)
    shell.slurm.queue("12", "RUNNING")
    shell.slurm.queue("13", "FAILED")
    done = shell.types("resume", "gpt-stdlib")
    assert done.code == 2 and "is active already: Slurm job 12," in done.err
    shell.slurm.has_script("14", run.submit_script)
    shell.slurm.queue("14", "PENDING")
    assert "Slurm job 12, 14," in shell.types("resume", "gpt-stdlib").err


@pytest.mark.parametrize(
    "words", [("--root", "{root}"), ("--root={root}",), ("--config-dir", "a=b", "--root", "{root}")]
)
def test_the_value_of_a_flag_is_no_setting(words: tuple[str, ...], shell: Any) -> None:
    shell.has_run(script=SCRIPT)
    root = shell.folder / "a=b"
    (shell.folder / "runs").rename(root)
    done = shell.types("resume", "gpt-stdlib", *(word.format(root=root) for word in words))
    assert done.code == 0, done.err
    again = shell.types("resume", str(root / "gpt-stdlib" / "3f9a1c07"))
    assert again.code == 0, again.err


def test_a_local_run_without_its_plan_says_what_to_type(shell: Any) -> None:
    run = shell.has_run(cluster=False)
    run.plan.write_text("{")
    done = shell.types("resume", "gpt-stdlib")
    assert done.code == 2 and "plan.json cannot be read" in done.err


def test_a_local_run_that_is_queued_on_slurm_is_not_started_here(shell: Any) -> None:
    shell.has_run(cluster=False, job_ids=("12",))
    shell.slurm.queue("12", "PENDING")
    done = shell.types("resume", "gpt-stdlib")
    assert done.code == 2 and "is active already: Slurm job 12" in done.err
