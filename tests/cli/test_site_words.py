"""Whole command lines at sites that put scripts of their own in place of Slurm's commands."""

from __future__ import annotations

import json

import pytest

from slurm_train.rundir.jobs import read_job
from slurm_train.rundir.sweep import existing_arrays, list_sweeps, read_table
from tests.cli.conftest import Shell

SENTENCE = 'case $1 in --test-only) exec {real} "$@";; esac; id=$({real} "$@") || exit; '
SENTENCE_OF_THE_SITE = f'{SENTENCE} echo "Job no. $id is in the queue"'
NO_ARRAYS = """
for script; do :; done
grep -q '^#SBATCH --array' "$script" && {{ echo '  [*] Job arrays are not allowed here.'; exit 1; }}
exec {real} "$@"
"""


def test_a_run_and_a_sweep_whose_id_comes_in_a_sentence_are_recorded(shell: Shell) -> None:
    shell.slurm.queue_scripts()
    shell.slurm.wrap("sbatch", SENTENCE_OF_THE_SITE)
    job_id, run = shell.types("+cluster=1x1").job_and_run
    record = read_job(run)
    assert job_id == "4711" and record is not None and record.job_ids == ("4711",)
    sweep = shell.submits_sweep("-m +cluster=1x1 seed=1,2")
    assert [element.job for element in read_table(sweep)] == ["4711_0", "4711_1"]


@pytest.mark.parametrize("words", ["+cluster=1x1", "-m +cluster=1x1 seed=1,2"])
def test_a_wrapper_that_submits_a_copy_of_the_script_is_found_by_name_and_number(words: str, shell: Shell) -> None:
    name = "sed -n 's/^#SBATCH --job-name=//p' \"$script\""
    copy = f'for script; do :; done; echo "4711|$({name})" > {shell.slurm.folder}/names.out; echo "99|$({name})" >> '
    shell.slurm.wrap("sbatch", f"{SENTENCE_OF_THE_SITE}; {copy}{shell.slurm.folder}/names.out")
    shell.slurm.wrap("squeue", f'case "$*" in *"%i|%j") cat {shell.slurm.folder}/names.out; exit;; esac; {{real}} "$@"')
    assert shell.types(words).out.split()[0] == "4711"


def test_an_array_that_may_be_in_the_queue_keeps_its_files(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrapper submits a copy of the script, so that squeue does not have ours."""
    monkeypatch.setattr("slurm_train.request.submission._PAUSE_S", 0.0)
    shell.slurm.wrap("sbatch", SENTENCE_OF_THE_SITE)
    message = shell.refuses("whether Slurm has the job is not known", "-m +cluster=1x1 seed=1,2")
    assert "Job no. 4711 is in the queue" in message
    (script,) = shell.folder.glob("runs/sweeps/*/arrays/000/submit.sh")
    assert (script.parent / "runs.txt").exists()
    (shell.slurm.folder / "sbatch.real0").rename(shell.slurm.folder / "sbatch")
    shell.slurm.next_job(4712)
    sweep = shell.submits_sweep("-m +cluster=1x1 seed=1,2")
    assert [array.number for array in existing_arrays(sweep)] == [0, 1], "the first one is still there"


def test_where_the_site_takes_no_arrays_each_run_of_a_sweep_is_a_job(shell: Shell) -> None:
    shell.slurm.wrap("sbatch", NO_ARRAYS)
    words = "-m +cluster=1x1 seed=1,2 sweep.max_parallel=1"
    planned = shell.types(f"plan {words}")
    assert "this site takes none" in planned.err and "#SBATCH --array" not in planned.out
    done = shell.types(words)
    assert done.code == 0 and "this site takes no job arrays" in done.err
    assert [line.split()[0] for line in done.out.splitlines()] == ["4711", "4711"]
    said = (shell.slurm.said("sbatch_words") or "").splitlines()
    assert ["--dependency=afterany:4711" in line for line in said] == [False, True]
    (sweep,) = list_sweeps(shell.folder / "runs")
    assert [element.job for element in read_table(sweep)] == ["4711", "4711"]


@pytest.mark.parametrize("words", ["run.name=a cluster.time_limit_min=5", "-m seed=1,2"])
def test_a_line_before_and_after_every_answer_hides_nothing(words: str, shell: Shell) -> None:
    shell.slurm.talk("Welcome to the lab, quota=80%")
    assert shell.types(f"+cluster=1x1 {words}").code == 0
    (job_id,) = {job for path in shell.folder.glob("runs/*/*/jobs/*") for job in [path.name.partition("_")[0]]}
    assert job_id == "4711"


def test_the_doctor_hears_slurm_through_such_lines(shell: Shell) -> None:
    shell.slurm.talk("Welcome to the lab, quota=80%")
    done = shell.types("doctor")
    assert "CONTROLLER_AWAY" not in done.out and "main" in done.out


@pytest.mark.parametrize(
    ("lines", "stream"),
    [
        (["--> Verifying job request...FAILED", "    [*] Too many simultaneous jobs in queue."], 1),
        (["You may use several accounts.", "  lab-one, lab-two", "Use --account=NAME.", "Unspecified error"], 2),
    ],
)
def test_plan_and_submission_show_all_words_of_a_refusal(lines: list[str], stream: int, shell: Shell) -> None:
    text = "; ".join(f"echo '{line}' >&{stream}" for line in lines)
    shell.slurm.wrap("sbatch", f"{text}; exit 1")
    shown = shell.types("plan +cluster=1x1").err
    refused = shell.refuses("Slurm would not take this job", "+cluster=1x1")
    for line in lines:
        assert line.strip() in shown and line.strip() in refused
    advice = "cluster.account" if stream == 2 else "squeue --me"
    assert advice in shown and advice in refused


def test_the_id_is_found_beside_what_a_site_prints(shell: Shell) -> None:
    said = "echo 'Checking (TG-AST090040)...OK'; echo 'sbatch: error: invalid value, ignoring' >&2"
    shell.slurm.wrap("sbatch", f'{said}; {{real}} "$@"')
    assert shell.types("+cluster=1x1").job_and_run[0] == "4711"


def test_a_run_whose_job_a_wrapper_of_squeue_prints_otherwise_is_not_submitted_again(shell: Shell) -> None:
    shell.submits("+cluster=1x1")
    shell.slurm.wrap("squeue", "echo 'JOBID CLUSTER STATE'; echo '4711  c5  COMPLETININVALID  3  train'")
    (shell.slurm.folder / "sacct_fails").touch()
    shell.refuses("squeue prints other columns than it was asked for", "+cluster=1x1")


def test_a_job_behind_an_answer_that_was_not_read_is_shown_and_can_be_cancelled(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurm_train.request.submission._PAUSE_S", 0.0)
    shell.slurm.wrap("sbatch", 'case $1 in --test-only) exec {real} "$@";; esac; echo it is on its way')
    shell.refuses("whether Slurm has the job is not known", "+cluster=1x1")
    assert "submits it again" in shell.types("status").out
    (script,) = shell.folder.glob("runs/*/*/logs/submitted/.submission*")
    shell.slurm.has_script("4711", script)
    shell.slurm.queue("4711", "PENDING", reason="Priority")
    (status,) = json.loads(shell.types("status --json").out)
    assert (status["job_id"], status["state"], status["slurm_reason"]) == ("4711", "queued", "Priority")
    shell.refuses("is active already: Slurm job 4711", "+cluster=1x1")
    shell.types("cancel gpt-stdlib")
    assert "4711" in (shell.slurm.said("cancelled") or "")
