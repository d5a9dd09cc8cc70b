"""Who hangs: readings of heartbeats over time, and what is said about them."""

from __future__ import annotations

import faulthandler
import tempfile
import threading

import pytest

from slurm_train.rundir.heartbeat import Beat, BeatSource, Limits
from slurm_train.supervise.hang import Collective, Flight, Observer, exchange_in

LIMITS = Limits(600.0, 300.0)
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
    source = BeatSource(rank=rank, host=f"node{rank // 2 + 1}", pid=1)
    return Beat(source=source, step=step, marks=marks, phase=phase, settled=settled, beats=beats)


def observed(*beats: Beat, for_s: float, frozen: tuple[int, ...] = ()) -> Observer:
    """Returns an observer that has seen the same marks for so long, every 10 s."""
    observer = Observer(LIMITS, world_size=len(beats))
    for number in range(int(for_s // 10) + 1):
        readings = {}
        for one in beats:
            count = 1 if one.source.rank in frozen else number
            readings[one.source.rank] = Beat(**{f: getattr(one, f) for f in one.__slots__} | {"beats": count})
        observer.look(readings, began_s=10.0 * number, ended_s=10.0 * number)
    return observer


def test_nobody_hangs_while_anybody_makes_progress() -> None:
    observer = observed(beat(0), beat(1), for_s=400)
    assert observer.is_hung()
    observer.look({0: beat(0, marks=21), 1: beat(1)}, began_s=410, ended_s=410)
    assert not observer.is_hung()


@pytest.mark.parametrize(
    ("phase", "settled", "limit"),
    [("step", True, 300), ("step", False, 600), ("start", False, 600), ("save", True, 300)],
)
def test_the_limit_is_longer_before_the_first_step(phase: str, settled: bool, limit: int) -> None:
    one = beat(0, phase=phase, settled=settled)
    assert not observed(one, for_s=limit - 20).is_hung()
    assert observed(one, for_s=limit + 20).is_hung()


def test_a_rank_that_is_done_or_not_there_yet_is_no_hang() -> None:
    assert not observed(beat(0, phase="end"), for_s=900).is_hung()
    observer = Observer(LIMITS, world_size=2)
    for now in range(0, 1000, 10):
        observer.look({0: beat(0)}, began_s=now, ended_s=now)
    assert not observer.is_hung()


def test_ranks_that_an_outage_held_up_have_half_of_the_time_left() -> None:
    observer = observed(beat(0), beat(1), for_s=100)
    observer.look({0: beat(0), 1: beat(1)}, began_s=110, ended_s=4000)
    observer.look({0: beat(0), 1: beat(1)}, began_s=4003, ended_s=4003)
    assert not observer.is_hung()
    observer.look({0: beat(0), 1: beat(1)}, began_s=4050, ended_s=4050)
    assert observer.is_hung()


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


def test_a_process_that_does_not_run_is_named_first() -> None:
    beats = [beat(rank, phase="data" if rank == 5 else "step") for rank in range(8)]
    hang = observed(*beats, for_s=310, frozen=(2,)).explain(dict.fromkeys(range(8), BACKWARD))
    assert str(hang) == (
        "rank 2 on node2 does not run (stopped or lost), in step at step 7 since 310 s; "
        "7 ranks wait for it in all_reduce"
    )


def test_the_rank_at_the_earliest_point_is_named() -> None:
    beats = [beat(rank, phase="data", marks=19) if rank == 5 else beat(rank) for rank in range(8)]
    hang = observed(*beats, for_s=310).explain(dict.fromkeys(range(8), BACKWARD))
    assert str(hang) == "rank 5 on node3 is in data loading at step 7 since 310 s; 7 ranks wait for it in all_reduce"
    assert (hang.ranks, hang.host) == ((5,), "node3")


def test_of_ranks_at_one_point_the_one_outside_an_exchange_is_named() -> None:
    hang = observed(beat(0), beat(1), for_s=310).explain({0: BACKWARD, 1: BUSY})
    assert str(hang) == "rank 1 on node1 is in step at step 7 since 310 s; 1 rank waits for it in all_reduce"


def test_without_a_difference_it_says_so() -> None:
    hang = observed(beat(0), beat(1), for_s=310).explain({0: BACKWARD, 1: BACKWARD})
    assert str(hang) == "ranks 0, 1 on node1 are in step at step 7 since 310 s; no rank stands out"


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


def flight(begun: int, over: int, name: str = "all_reduce") -> Flight:
    return Flight(begun, over, (Collective(over, "all_reduce", 64), Collective(begun, name, 64)))


def test_where_all_stand_alike_the_one_that_has_not_come_is_behind() -> None:
    # On a GPU the host waits for the device on all ranks, so stacks and phases tell nothing.
    observer = observed(*(beat(rank) for rank in range(4)), for_s=400)
    flights = {rank: flight(8, 8 if rank == 2 else 7) for rank in range(4)} | {2: flight(7, 7)}
    hang = observer.explain(dict.fromkeys(range(4), BACKWARD), flights)
    assert str(hang) == (
        "rank 2 on node2 is in step at step 7 since 400 s; 3 ranks wait for it in all_reduce #8 of 64 elements"
    )


def test_ranks_that_wait_in_different_collectives_are_told() -> None:
    observer = observed(beat(0), beat(1), for_s=400)
    hang = observer.explain({}, {0: flight(8, 7), 1: flight(8, 7, "broadcast")})
    assert "as collective #8 of all ranks rank 0 has begun all_reduce of 64 elements, but rank 1 has begun" in str(hang)


def test_waiting_for_data_is_called_data_loading() -> None:
    observer = observed(beat(0, phase="data", marks=19), beat(1), for_s=400)
    assert str(observer.explain({1: BACKWARD})) == (
        "rank 0 on node1 is in data loading at step 7 since 400 s; 1 rank waits for it in all_reduce"
    )
