"""A lost node where other jobs wait, with and without an expedited requeue, on Slurm 25.11 or newer.

python -m tests.support.devcluster up --slurm 26.05
python -m tests.support.devcluster exec --slurm 26.05 -- python -m pytest -m campaign -s THIS_FILE
"""

from __future__ import annotations

import time
from contextlib import ExitStack, nullcontext

import pytest

from slurm_train.slurm.policy import expedites_requeues
from slurm_train.slurm.records import parse_config
from tests.support.cluster_faults import expedited_requeue, node_lost
from tests.support.command_line import TINY, Person
from tests.support.ledgers import ledger_lines
from tests.support.slurm_runs import command, job_state, step_lines, wait_for_state, wait_until_step
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.campaign]

_COMPETES_S = 90
_PATIENCE_S = 300.0
RUN = (
    "+cluster=2x1",
    *TINY,
    "train.max_steps=5000",
    "model.step_s=0.2",
    "cluster.sbatch.exclusive=true",
)


@pytest.fixture(autouse=True)
def _new_enough(slurm_cluster: object) -> None:
    with expedited_requeue():
        if not expedites_requeues(parse_config(command("scontrol", "show", "config"))):
            pytest.skip("--requeue=expedite needs Slurm 25.11")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_expedited", [True, False])
def test_a_run_whose_node_is_lost_comes_back_before_others_where_the_site_expedites(
    is_expedited: bool, person: Person
) -> None:
    with ExitStack() as stack:
        stack.enter_context(expedited_requeue() if is_expedited else nullcontext())
        job, run = person.types(*RUN).job_and_run
        assert ("ExpeditedRequeue=Yes" in command("scontrol", "show", "job", job)) == is_expedited
        wait_until_step(run, 10, within_s=_PATIENCE_S)
        size = ("--nodes=3", "--exclusive", "--time=10", "--output=/dev/null")
        other = command("sbatch", "--parsable", *size, f"--wrap=sleep {_COMPETES_S}")
        stack.callback(command, "scancel", other)
        lost = ledger_lines(run)[-1]["nodes"][-1]
        killed_unix_s = time.time()
        stack.enter_context(node_lost(lost))

        def next_step_unix_s() -> float:
            return max((line["time_unix_s"] for line in step_lines(run) if line["attempt"] > 0), default=0.0)

        next_unix_s = wait_for(next_step_unix_s, within_s=_PATIENCE_S, what="a step after the loss")
        print(f"expedited {is_expedited}: {next_unix_s - killed_unix_s:.1f} s from the kill to the next step")
        # Without it the other job has the nodes first where they are free before the pause of a requeue is over.
        print(f"the other job is {job_state(other)}")
        assert job_state(other) == "PENDING" or not is_expedited, "who had the nodes first"
        first, second = ledger_lines(run)[:2]
        assert (first["reason"], second["restart_count"]) == ("node_failure", 1)
        command("scancel", job)


@pytest.mark.timeout(300)
def test_a_run_that_fails_ends_and_is_not_held(person: Person) -> None:
    """Slurm holds an expedited job that fails by itself, where its nodes are well."""
    with expedited_requeue():
        job, _ = person.types(*RUN, "model.step_s=oops", "run.name=fails").job_and_run
        wait_for_state(job, "FAILED", within_s=120)
