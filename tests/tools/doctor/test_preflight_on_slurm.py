"""Every fault that has a code, caused on a real Slurm: one line with the right code, in time; and healthy runs.

The suite has a few of them, `make test-faults` all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from slurm_train.rundir.events import list_file
from slurm_train.rundir.files import read_shared
from tests.campaigns.preflight import try_fault
from tests.campaigns.preflight_faults import FAULTS, Fault, missing_for
from tests.support import cluster_faults as broken
from tests.support.command_line import TINY, Person
from tests.support.ledgers import ledger_lines
from tests.support.slurm_runs import at_work, wait_until_finished

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.faults]

_IN_THE_SUITE = ("PORT_BLOCKED-1", "CODE_DRIFT-1")


def _named(faults: Sequence[Fault]) -> Iterator[object]:
    """Yields each fault under its code and a number, e.g. "PORT_BLOCKED-2"."""
    count = Counter[str]()
    for fault in faults:
        count[fault.code] += 1
        name = f"{fault.code}-{count[fault.code]}"
        marks = [pytest.mark.full if name in _IN_THE_SUITE else pytest.mark.campaign]
        lacks = missing_for(fault)
        marks += [pytest.mark.skip(reason=f"this machine lacks {lacks}")] if lacks else []
        yield pytest.param(fault, id=name, marks=marks)


@pytest.fixture
def person(slurm_cluster: object, tmp_path: Path) -> Iterator[Person]:
    with at_work(tmp_path) as person:
        yield person


@pytest.mark.parametrize("fault", [*_named(FAULTS)])
def test_a_fault_is_named_in_one_line_within_half_a_minute(fault: Fault, person: Person) -> None:
    assert try_fault(person, fault, 0).problems == []


@pytest.mark.campaign
def test_a_bad_node_is_left_out_and_listed_until_it_is_well(person: Person, tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    words = (*TINY, "train.threads=1", "batch.global_size=24", "train.max_steps=4")
    local = f"checkpoint.local_dir={tmp_path / 'local'}"
    with broken.full_disk("node2", tmp_path / "local"):
        # Of idle nodes Slurm takes the first ones.
        _, run = person.types("+cluster=3x2", local, *words, "run.name=left-out").job_and_run
        wait_until_finished(run, within_s=300)
    first, second = ledger_lines(run)
    assert "node2" in first["nodes"] and "node2" not in second["nodes"]
    assert first["note"].startswith("DISK_FULL node2: ") and first["note"].endswith("requeue the job without node2")
    (line,) = read_shared(list_file(run))
    assert line["node"] == "node2" and line["until_unix_s"] > line["time_unix_s"]
    submitted = person.types("+cluster=3x1", *words, "run.name=next")
    assert "left out: node2 (until " in submitted.err and "DISK_FULL" in submitted.err
    _, run = submitted.job_and_run
    wait_until_finished(run, within_s=300)
    assert "node2" not in ledger_lines(run)[-1]["nodes"]
    # Asked for by name it is looked at again, and comes off the list.
    _, run = person.types("+cluster=2x1", "cluster.nodelist=node[2-3]", *words, "run.name=again").job_and_run
    wait_until_finished(run, within_s=300)
    assert "node2 passed; removed from the bad nodes" in (run.logs / "batch.log").read_text()
    assert "left out" not in person.types("+cluster=3x1", *words, "run.name=last", "cluster.sbatch.hold=true").err


@pytest.mark.full
def test_the_doctor_looks_at_nodes_on_request(person: Person) -> None:
    done = person.types("doctor", "+cluster=2x2", "cluster.nodelist=node[1-2]", timeout_s=120)
    assert done.code == 0, done.err
    head, *rows = done.out.splitlines()
    assert {"NODE", "WORK", "LINK", "LATENCY"} <= {*head.split()}
    assert [row.split()[0] for row in rows[:2]] == ["node1", "node2"]


@pytest.mark.campaign
def test_the_doctor_works_inside_an_allocation(person: Person) -> None:
    words = ("-m", "slurm_train", "doctor", "+cluster=2x2", "preflight.bandwidth=false")
    done = person.runs(
        "salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", person.python, *words
    )
    assert done.code == 0, done.err
    assert done.out.startswith("NODE") and "checking the nodes of this allocation" in done.err
