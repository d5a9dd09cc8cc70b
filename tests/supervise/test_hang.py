"""Who hangs: readings of heartbeats over time, and what is said about them."""

from __future__ import annotations

import faulthandler
import json
import tempfile
import threading
from typing import Any

import pytest

from slurm_train.rundir.heartbeat import Beat, Limits
from slurm_train.supervise.hang import (
    Collective,
    Flight,
    Flights,
    Observer,
    exchange_in,
    read_flights,
)

LIMITS = Limits(600.0, 300.0, 1800.0)
BACKWARD = """main thread 0x0000000000000002
Thread 0x0000000000000001 (most recent call first):
  File "/x/threading.py", line 1 in wait

Thread 0x0000000000000002 (most recent call first):
  File "/x/torch/autograd/graph.py", line 1 in _engine_run_backward
  File "/x/train/step.py", line 2 in step
"""
BUSY = BACKWARD.replace("_engine_run_backward", "decode")


def beat(
    rank: int, *, step: int = 7, phase: str = "step", marks: int = 20, beats: int = 1, settled: bool = True
) -> Beat:
    place = {"rank": rank, "host": f"node{rank // 2 + 1}", "pid": 1}
    return Beat(**place, step=step, marks=marks, phase=phase, settled=settled, beats=beats)


def observed(*beats: Beat, for_s: float, frozen: tuple[int, ...] = ()) -> Observer:
    """Returns an observer that has seen the same marks for so long, every 10 s."""
    observer = Observer(LIMITS, world_size=len(beats))
    for number in range(int(for_s // 10) + 1):
        readings = {}
        for one in beats:
            count = 1 if one.rank in frozen else number
            readings[one.rank] = Beat(**{f: getattr(one, f) for f in one.__slots__} | {"beats": count})
        observer.look(readings, began_s=10.0 * number, ended_s=10.0 * number)
    return observer


def test_nobody_hangs_while_anybody_makes_progress() -> None:
    assert observed(beat(0), beat(1), for_s=400).is_hung()
    observer = Observer(LIMITS, world_size=2)
    for now_s in range(0, 1000, 10):
        observer.look({0: beat(0, marks=now_s), 1: beat(1)}, began_s=now_s, ended_s=now_s)
    assert not observer.is_hung()


def test_ranks_are_silent_together_while_all_of_them_run() -> None:
    assert observed(beat(0), beat(1), for_s=400).silent_s() == 400
    assert observed(beat(0), beat(1), for_s=400, frozen=(1,)).silent_s() is None
    assert observed(beat(0, phase="end"), beat(1, phase="end"), for_s=400).silent_s() is None


IN_STEP, IN_SAVE = beat(1, phase="step"), beat(1, phase="save")
IN_NEXT_STEP = beat(1, phase="step", step=8)


@pytest.mark.parametrize(
    ("phase", "settled", "other", "frozen", "limit"),
    [
        ("step", True, None, (), 300),
        ("step", False, None, (), 600),
        ("start", True, None, (), 600),  # back to a checkpoint
        ("save", True, None, (), 1800),
        ("save", True, IN_SAVE, (), 1800),
        ("save", True, IN_SAVE, (1,), 300),  # no process, no bytes
        ("save", True, IN_NEXT_STEP, (), 1800),  # one that has saved waits for one that still does
        ("save", True, IN_STEP, (), 300),  # the others wait in the save for one that has not come
    ],
)
def test_the_limit_is_that_of_the_phase_of_whoever_is_behind(
    phase: str, settled: bool, other: Beat | None, frozen: tuple[int, ...], limit: int
) -> None:
    beats = [beat(0, phase=phase, settled=settled), *((other,) if other else ())]
    assert not observed(*beats, for_s=limit - 20, frozen=frozen).is_hung()
    assert observed(*beats, for_s=limit + 20, frozen=frozen).is_hung()


def test_a_rank_that_is_done_or_not_there_yet_is_no_hang() -> None:
    assert not observed(beat(0, phase="end"), for_s=900).is_hung()
    observer = Observer(LIMITS, world_size=2)
    for now in range(0, 1000, 10):
        observer.look({0: beat(0)}, began_s=now, ended_s=now)
    assert not observer.is_hung()


def moving(observer: Observer, *, steps: int, step_s: int, begin_s: int = 0, phase: str = "step") -> int:
    """Lets one rank take steps of so many seconds; returns when the last one has ended, with its mark seen."""
    for now_s in range(begin_s, begin_s + steps * step_s + 1, 10):
        done = (now_s - begin_s) // step_s
        marks = begin_s + done
        reading = beat(0, marks=marks, beats=now_s, settled=begin_s > 0 or done > 0, phase=phase)
        observer.look({0: reading}, began_s=now_s, ended_s=now_s)
        assert not observer.is_hung(), now_s
    return begin_s + steps * step_s


def found_after(observer: Observer, begin_s: int) -> int:
    """Returns after how many seconds without a mark a rank is taken to hang."""
    marks = begin_s * 1000
    now_s = begin_s
    while not observer.is_hung():
        now_s += 10
        observer.look({0: beat(0, marks=marks, beats=now_s)}, began_s=now_s, ended_s=now_s)
    return now_s - begin_s


def test_steps_that_are_longer_than_the_limit_are_no_hang() -> None:
    # As long as the first step may take, which is all that is known at the second.
    observer = Observer(LIMITS, world_size=1)
    end_s = moving(observer, steps=4, step_s=500)
    assert 1000 < found_after(observer, end_s) <= 1030
    # A first step that compiles is not what the others take.
    observer = Observer(LIMITS, world_size=1)
    end_s = moving(observer, steps=1, step_s=500)
    end_s = moving(observer, steps=20, step_s=20, begin_s=end_s)
    assert 300 < found_after(observer, end_s) <= 330
    # A save has a limit of its own.
    observer = Observer(LIMITS, world_size=1)
    end_s = moving(observer, steps=2, step_s=1000, phase="save")
    assert 300 < found_after(observer, end_s) <= 330


def test_ranks_that_were_stopped_from_outside_have_the_whole_limit_again() -> None:
    observer = observed(beat(0), beat(1), for_s=1000, frozen=(0, 1))
    assert observer.is_hung(), "nobody has asked whether they were stopped"
    observer.restart()
    assert not observer.is_hung()
    # Continued, but not one mark further yet.
    observer = observed(beat(0), beat(1), for_s=1000, frozen=(0, 1))
    for now_s in range(1010, 1310, 10):
        observer.look({0: beat(0, beats=now_s), 1: beat(1, beats=now_s)}, began_s=now_s, ended_s=now_s)
        assert not observer.is_hung() and (observer.silent_s() or 0.0) <= 300
    observer.look({0: beat(0, beats=1), 1: beat(1, beats=1)}, began_s=1320, ended_s=1320)
    assert observer.is_hung()
    # Heartbeats that a file server shows now and then are no stop: the marks are what counts.
    observer = Observer(LIMITS, world_size=1)
    for now_s in range(0, 400, 10):
        observer.look({0: beat(0, beats=now_s // 60)}, began_s=now_s, ended_s=now_s)
    assert observer.is_hung()


def test_ranks_that_an_outage_held_up_have_half_of_the_time_left() -> None:
    observer = observed(beat(0), beat(1), for_s=100)
    observer.look({0: beat(0), 1: beat(1)}, began_s=110, ended_s=4000)
    observer.look({0: beat(0), 1: beat(1)}, began_s=4003, ended_s=4003)
    assert not observer.is_hung()
    observer.look({0: beat(0), 1: beat(1)}, began_s=4050, ended_s=4050)
    assert observer.is_hung()
    # The same for a pause between two looks.
    observer = observed(beat(0), beat(1), for_s=100)
    observer.look({0: beat(0), 1: beat(1)}, began_s=4000, ended_s=4000)
    assert not observer.is_hung()


@pytest.mark.parametrize("look_s", [0.1, 12.0, 290.0, 301.0, 5000.0])
def test_a_hang_is_found_however_long_a_look_takes(look_s: float) -> None:
    observer, now_s, looks = Observer(LIMITS, world_size=1), 0.0, 0
    while not observer.is_hung():
        observer.look({0: beat(0)}, began_s=now_s, ended_s=now_s + look_s)
        now_s, looks = now_s + look_s + 3.0, looks + 1
        assert looks <= 4 + LIMITS.steady_s // (look_s + 3)
    assert now_s > LIMITS.steady_s


def test_while_nothing_can_be_read_no_time_passes() -> None:
    observer = observed(beat(0), beat(1), for_s=200)
    for now_s in range(210, 2000, 10):
        observer.look({}, began_s=now_s, ended_s=now_s)
    assert not observer.is_hung()
    # One rank alone that cannot be read stands still like the others.
    for now_s in range(2000, 2200, 10):
        observer.look({0: beat(0)}, began_s=now_s, ended_s=now_s)
    assert observer.is_hung()


def has_begun(begun: int, over: int, name: str = "all_reduce", group: str = "default_pg") -> Flights:
    newest = (Collective(over, "all_reduce", 64, group), Collective(begun, name, 64, group))
    return {f"nccl {group}": Flight(begun, over, newest)}


ALL = dict.fromkeys(range(8), BACKWARD)
EIGHT = [beat(rank) for rank in range(8)]
AT_STEP, IN_DATA = "in step at step 7 since 310 s", "in data loading at step 7 since 310 s"
EXPLAINED: dict[str, tuple[list[Beat], tuple[int, ...], dict[int, str], dict[int, Flights], str]] = {
    "a process that does not run comes first": (
        [beat(rank, phase="data" if rank == 5 else "step") for rank in range(8)],
        *((2,), ALL, {}),
        f"rank 2 on node2 does not run (stopped or lost), {AT_STEP}; 7 ranks wait for it in all_reduce",
    ),
    "then the rank at the earliest point": (
        [beat(rank, phase="data", marks=19) if rank == 5 else beat(rank) for rank in range(8)],
        *((), ALL, {}),
        f"rank 5 on node3 is {IN_DATA}; 7 ranks wait for it in all_reduce",
    ),
    # On a GPU the host waits for the device on all ranks, so stacks and phases show no difference. Then it is the one
    # that has not come.
    # Ranks 0 and 1 wait for rank 2 in the gradients' group, and that one for rank 3 in another: rank 3 is behind.
    "in any group, and of a chain its end": (
        EIGHT[:4],
        *(
            (),
            ALL,
            {rank: has_begun(8, 7) for rank in (0, 1)}
            | {
                2: has_begun(7, 7) | has_begun(5, 4, group="mesh_tp"),
                3: has_begun(7, 7) | has_begun(4, 4, group="mesh_tp"),
            },
        ),
        f"rank 3 on node2 is {AT_STEP}; 3 ranks wait for it in all_reduce #8 of 64 elements",
    ),
    "then the one outside an exchange": (
        EIGHT[:2],
        *((), {0: BACKWARD, 1: BUSY}, {}),
        f"rank 1 on node1 is {AT_STEP}; 1 rank waits for it in all_reduce",
    ),
    "different collectives": (
        EIGHT[:2],
        *((), {}, {0: has_begun(8, 7), 1: has_begun(8, 7, "broadcast")}),
        f"ranks 0, 1 on node1 are {AT_STEP}; no rank stands out; as collective #8 of all ranks rank 0 has begun "
        "all_reduce of 64 elements, but rank 1 has begun broadcast of 64 elements",
    ),
}


@pytest.mark.parametrize("case", EXPLAINED.values(), ids=EXPLAINED)
def test_who_is_behind_is_explained(
    case: tuple[list[Beat], tuple[int, ...], dict[int, str], dict[int, Flights], str],
) -> None:
    beats, frozen, stacks, flights, expected = case
    assert str(observed(*beats, for_s=310, frozen=frozen).explain(stacks, flights)) == expected


def test_the_main_thread_is_found_in_a_real_dump() -> None:
    def barrier(done: threading.Event) -> None:
        done.wait()

    with tempfile.TemporaryFile("w+") as file:
        done = threading.Event()
        thread = threading.Thread(target=barrier, args=(done,))
        thread.start()
        file.write(f"main thread {thread.ident:#018x}\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
        done.set()
        thread.join()
        file.seek(0)
        assert exchange_in(file.read()) == "barrier"
    assert exchange_in(BUSY) is None and exchange_in("") is None


# Records as torch 2.13 writes them between gloo ranks; the shape for NCCL is the same. None was run on a GPU.
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
    return json.dumps([{"entries": list(entries), "pg_status": {"0": status}}])


def test_a_record_tells_what_a_rank_waits_in() -> None:
    found = read_flights(record(entry(7), entry(8), entry(9, group="1"), begun=8, over=7))["gloo 0"]
    assert found == Flight(8, 7, (Collective(7, "all_reduce", 1310720), Collective(8, "all_reduce", 1310720)))
    assert found.waits_in == Collective(8, "all_reduce", 1310720)
    assert read_flights(record(entry(8), begun=8, over=8))["gloo 0"].waits_in is None


@pytest.mark.parametrize(
    "text", ["", "{}", '[{"pg_status": {}, "entries": []}]', '[{"pg_status": {"0": {}}, "entries": 3}]']
)
def test_what_is_no_record_is_passed_over(text: str) -> None:
    assert read_flights(text) == {}
