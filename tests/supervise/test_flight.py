"""Flight records of ranks side by side: who has not come, and who has begun something else.

The records are made as torch 2.13 writes them between gloo ranks; the shape for NCCL is the same. None of this was run
on a GPU.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from slurm_train.supervise.hang import (
    Collective,
    Flight,
    disagreement,
    not_come,
    read_flight,
    recording_environment,
    waited_for_in,
)


def entry(number: int, name: str = "gloo:all_reduce", size: int = 1310720, group: str = "0") -> dict[str, Any]:
    return {
        "pg_id": int(group),
        "process_group": [group, "default_pg" if group == "0" else "gloo_side"],
        "collective_seq_id": number,
        "profiling_name": name,
        "input_sizes": [[size]],
        "input_dtypes": ["Float"],
    }


def record(*entries: dict[str, Any], begun: int, over: int) -> str:
    numbers = {"last_enqueued": begun, "last_started": -1, "last_completed": over}
    status = {f"{name}_collective": str(number) for name, number in numbers.items()}
    return json.dumps({"entries": list(entries), "pg_status": {"0": status}})


def flight(begun: int, over: int, *names: str) -> Flight:
    kinds = names or ("gloo:all_reduce",) * 3
    entries = [entry(begun - len(kinds) + 1 + place, name) for place, name in enumerate(kinds)]
    found = read_flight(record(*entries, begun=begun, over=over))
    assert found is not None
    return found


def test_a_record_tells_what_a_rank_waits_in() -> None:
    found = read_flight(record(entry(7), entry(8), entry(9, group="1"), begun=8, over=7))
    assert found == Flight(8, 7, (Collective(7, "all_reduce", 1310720), Collective(8, "all_reduce", 1310720)))
    assert found.waits_in == Collective(8, "all_reduce", 1310720)
    assert str(found.waits_in) == "all_reduce #8 of 1,310,720 elements"
    done = read_flight(record(entry(8), begun=8, over=8))
    assert done is not None and done.waits_in is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"pg_status": {}, "entries": []}', '{"pg_status": {"0": {}}, "entries": 3}']
)
def test_what_is_no_record_is_passed_over(text: str) -> None:
    assert read_flight(text) is None


def test_whoever_has_begun_fewer_has_not_come() -> None:
    flights = {0: flight(9, 8), 1: flight(8, 8), 2: flight(9, 8), 3: flight(9, 8)}
    assert not_come(flights) == (1,)
    assert str(waited_for_in(flights)).startswith("all_reduce #9")
    assert disagreement(flights) == ""


def test_nobody_is_missing_where_nobody_waits_or_all_have_come() -> None:
    assert not_come({0: flight(8, 8), 1: flight(7, 7)}) == ()
    assert not_come({0: flight(9, 8), 1: flight(9, 8)}) == ()
    assert not_come({}) == () and waited_for_in({}) is None


def test_ranks_that_have_begun_different_collectives_are_told() -> None:
    alike, other = ("nccl:all_reduce", "nccl:all_reduce"), ("nccl:all_reduce", "nccl:broadcast")
    assert disagreement({0: flight(9, 8, *alike), 1: flight(9, 8, *other)}) == (
        "as collective #9 of all ranks rank 0 has begun all_reduce of 1,310,720 elements, "
        "but rank 1 has begun broadcast of 1,310,720 elements"
    )


def test_sizes_count_only_where_they_have_to_be_alike() -> None:
    def of(name: str, size: int) -> Flight:
        found = read_flight(record(entry(3, name, size), begun=3, over=2))
        assert found is not None
        return found

    assert disagreement({0: of("nccl:all_gather", 5), 1: of("nccl:all_gather", 6)}) == ""
    assert "all_reduce of 5 elements, but rank 1" in disagreement({0: of("x:all_reduce", 5), 1: of("x:all_reduce", 6)})


@pytest.mark.parametrize(
    ("version", "is_asked"),
    [("2.6.0+cu124", True), ("2.8.1", True), ("2.9.0", False), ("2.13.0+cpu", False), ("x", False)],
)
def test_only_older_versions_of_torch_have_to_be_asked_to_record(version: str, is_asked: bool) -> None:
    assert bool(recording_environment(version)) == is_asked
