"""Several people and jobs at once: an unprivileged user, and jobs that share nodes without sharing a port."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import light_training
from tests.support.command_line import Person, somebody_else
from tests.support.light_runs import active_jobs
from tests.support.light_training import undisturbed_losses
from tests.support.slurm_runs import losses, wait_until_finished, wait_until_step
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.full]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="slurm_train-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_an_unprivileged_user_submits_and_trains(slurm_cluster: object, open_folder: Path) -> None:
    person = somebody_else(open_folder / "project")
    if isinstance(person, str):
        pytest.skip(person)
    light_training.add_program(person)
    _, run = person.types("+cluster=2x2", *light_training.words(), "preflight.enabled=true").job_and_run
    wait_until_finished(run)
    assert losses(run) == undisturbed_losses()
    assert run.path.owner() == "nobody" and run.path.stat().st_mode & 0o077 == 0
    # The supervisor gives its lock back after the result; the folder is removed then.
    wait_for(lambda: not active_jobs(run), within_s=60, what=f"the end of the job of {run.path}")


def test_four_jobs_on_the_same_nodes_do_not_meet(person: Person) -> None:
    light_training.add_program(person)
    light_training.slow_down(person)
    words = ("+cluster=2x1", *light_training.words(), "cluster.nodelist=node[1-2]")
    seeds = range(4)
    runs = [person.types(*words, f"seed={seed}").job_and_run[1] for seed in seeds]
    for run in runs:
        wait_until_step(run, 2)
    light_training.speed_up(person)
    for run in runs:
        wait_until_finished(run)
    assert [losses(run) for run in runs] == [undisturbed_losses(seed=seed) for seed in seeds]
