"""Two clusters over one folder of runs: a job of the other one is not known to be over, so nothing is taken from it."""

from __future__ import annotations

import json
import os

import pytest

from slurm_train.checkpoint.collect import collect_checkpoints
from slurm_train.request.arrays import find_lost_arrays
from slurm_train.rundir.attempts import open_attempt
from slurm_train.rundir.jobs import ask_to_stop, read_job, record_job
from slurm_train.rundir.ledger import Start
from slurm_train.rundir.paths import RunDirectory, list_checkpoints, name_of
from slurm_train.rundir.pins import pin_save
from slurm_train.rundir.sweep import existing_arrays, read_table
from slurm_train.slurm.commands import SlurmCommands
from tests.cli.conftest import Shell
from tests.fakes.slurm_commands import FakeSlurmCommands, job_state
from tests.support.ledgers import close_attempt
from tests.support.small_checkpoints import make_checkpoint, steps_in

START = Start(job_id="12", restart_count=0, nodes=("n1",), world_size=1)


def attempt_of(run: RunDirectory, state: str) -> None:
    """Brings a run of job 12 into a state."""
    if state in ("comes back", "stopped"):
        action = "stop" if state == "stopped" else "requeue"
        close_attempt(run, open_attempt(run, START), {"reason": "preempted", "action": action})
    elif state == "was killed":
        open_attempt(run, START)
    elif state == "finished":
        run.result.write_text("{}")


@pytest.mark.parametrize("state", ["waits", "comes back", "was killed", "stopped", "finished"])
@pytest.mark.parametrize("cluster", ["", "cluster", "other"])
def test_a_second_job_starts_only_beside_one_that_is_known_to_be_over(shell: Shell, cluster: str, state: str) -> None:
    run = shell.has_run(job_ids=())
    record_job(run, "12", cluster=cluster)
    attempt_of(run, state)
    done = shell.types("resume 3f9a1c07")
    if cluster == "other" and state not in ("stopped", "finished"):
        assert done.code == 2 and "job 12 of cluster other" in done.err and str(run.jobs / "12") in done.err
        assert shell.slurm.said("submitted") is None
        # As the message says, of a job that is known to be over.
        run.job.unlink()
        (run.jobs / "12").unlink()
        done = shell.types("resume 3f9a1c07")
    if state != "finished":
        assert done.job_and_run == ("4711", run)
        record = read_job(run)
        assert record is not None and record.clusters["4711"] == "cluster"


def test_a_job_here_with_the_id_of_the_other_clusters_job_says_nothing_about_the_run(shell: Shell) -> None:
    run = shell.has_run(job_ids=())
    record_job(run, "12", cluster="other")
    shell.slurm.queue("12", "RUNNING")
    (status,) = json.loads(shell.types("status 3f9a1c07 --json").out)
    assert (status["state"], status["job_id"], status["other_cluster"], status["slurm_state"]) == (
        *("unknown", "12", "other"),
        None,
    )
    assert "job 12 of cluster other" in status["note"]
    assert "touch" in shell.refuses("job 12 of cluster other", "cancel 3f9a1c07")
    assert shell.slurm.said("cancelled") is None and not run.stop_file.exists()


def test_after_a_job_was_cancelled_there_or_another_ran_here_nothing_is_left_to_ask_there(shell: Shell) -> None:
    run = shell.has_run(job_ids=())
    record_job(run, "12", cluster="other")
    ask_to_stop(run, ["12"], newest_job=12)
    assert shell.types("resume 3f9a1c07").job_and_run == ("4711", run)
    assert not run.stop_file.exists()
    # This cluster's job was killed without a word, which its own Slurm knows.
    shell.slurm.next_job(4712)
    assert shell.types("resume 3f9a1c07").job_and_run == ("4712", run)
    shell.slurm.queue("4712", "RUNNING")
    done = shell.types("cancel 3f9a1c07")
    assert done.code == 0 and "other" not in done.err + done.out


def test_of_a_sweep_the_runs_of_another_cluster_are_left_out(shell: Shell) -> None:
    sweep = shell.submits_sweep("-m +cluster=1x1 seed=1,2")
    run, here = (element.run for element in read_table(sweep))
    record_job(run, "12", cluster="other")
    shell.slurm.next_job(4800)
    done = shell.types("-m +cluster=1x1 seed=1,2")
    assert done.code == 0 and f"job 12 of cluster other of {run.name}/{run.run_id}" in done.err
    assert [read_job(one).job_id.partition("_")[0] for one in (run, here)] == ["12", "4800"]  # type: ignore[union-attr]
    shell.slurm.queue(read_job(here).job_id, "RUNNING")  # type: ignore[union-attr]
    done = shell.types(f"cancel {sweep.sweep_id}")
    assert done.code == 0 and "cancelled 1 runs" in done.out + done.err
    assert "not cancelled: job 12 of cluster other" in done.out + done.err


def test_of_a_sweep_that_is_resumed_the_runs_of_another_cluster_are_left_out(shell: Shell) -> None:
    sweep = shell.submits_sweep("-m +cluster=1x1 seed=1,2")
    run, here = (element.run for element in read_table(sweep))
    record_job(run, "12", cluster="other")
    shell.slurm.next_job(4800)
    assert shell.types(f"resume {sweep.sweep_id}").code == 0
    assert [read_job(one).job_id.partition("_")[0] for one in (run, here)] == ["12", "4800"]  # type: ignore[union-attr]
    shell.slurm.queue(read_job(here).job_id, "RUNNING")  # type: ignore[union-attr]
    shell.refuses("is to be continued", f"resume {sweep.sweep_id}")


@pytest.mark.parametrize("cluster", ["cluster", "other"])
def test_an_array_whose_id_was_not_recorded_is_removed_where_its_own_cluster_does_not_have_it(
    cluster: str, shell: Shell
) -> None:
    sweep = shell.submits_sweep("-m +cluster=1x1 seed=1,2")
    (array,) = existing_arrays(sweep)
    assert array.cluster.read_text() == "cluster\n"
    # The submitter was killed before it had recorded what sbatch said.
    array.job.unlink()
    array.cluster.write_text(f"{cluster}\n")
    find_lost_arrays(sweep, SlurmCommands(os.environ))
    assert array.runs.exists() == (cluster == "other")


@pytest.mark.parametrize(("cluster", "kept"), [("here", [30]), ("", [30]), ("other", [30, 10])])
def test_what_an_evaluation_of_another_cluster_needs_stays(shell: Shell, cluster: str, kept: list[int]) -> None:
    run = shell.has_run()
    for step in (10, 20, 30):
        make_checkpoint(run.checkpoints, step, attempt=0)
    evaluation = RunDirectory(run.path / "evaluations" / "7d434a1ed8a2")
    evaluation.path.mkdir(parents=True)
    evaluation.submit_script.write_text("#!/bin/bash\n")
    record_job(evaluation, "12", cluster=cluster)
    pin_save(run.checkpoints, name_of(list_checkpoints(run.checkpoints)[-1]).save_id, evaluation)
    commands = FakeSlurmCommands([job_state("99")])
    commands.config["ClusterName"] = "here"
    collect_checkpoints(run, commands, keep=1)  # type: ignore[arg-type]  # the fake
    assert steps_in(run.checkpoints) == kept
    evaluation.scores.touch()
    said = shell.types(f"status {run.run_id}")
    assert ("follower 7d434a1ed8a2: unknown (job 12 of cluster other)" in said.out + said.err) == (cluster == "other")
