"""Several people and jobs at once: an unprivileged user, and jobs that share nodes without sharing a port."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command_line import TINY, Person, somebody_else
from tests.support.light_runs import active_jobs
from tests.support.slurm_runs import wait_until_finished
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


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
    _, run = person.types("+cluster=2x2", *TINY).job_and_run
    assert wait_until_finished(run)["world_size"] == 4
    assert run.path.owner() == "nobody" and run.path.stat().st_mode & 0o077 == 0
    # The supervisor gives its lock back after the result; the folder is removed then.
    wait_for(lambda: not active_jobs(run), within_s=60, what=f"the end of the job of {run.path}")


@pytest.mark.parametrize("pair", [0, pytest.param(1, marks=pytest.mark.campaign)])
def test_two_jobs_on_the_same_nodes_do_not_meet(person: Person, pair: int) -> None:
    seeds = (2 * pair, 2 * pair + 1)
    runs = [
        person.types("+cluster=2x1", *TINY, "cluster.nodelist=node[1-2]", f"seed={s}").job_and_run[1] for s in seeds
    ]
    assert [wait_until_finished(run)["world_size"] for run in runs] == [2, 2]
