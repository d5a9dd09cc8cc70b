"""A program that makes no marks: which signs are life, when silence is a hang, and what is said about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_train.rundir.signs import Group, Signs
from slurm_train.supervise.hang import Collective, Flight
from slurm_train.supervise.silence import (
    ENDED_THREAD,
    HANDLES,
    Sample,
    apart_sentence,
    explain,
    frames_of,
    idle_sentence,
    is_evident,
    place_of,
    sign_of_life,
    waits_in,
)

BEFORE = Sample(time_s=100.0, log_bytes=50, io_bytes=1000, own_cpu_s=7.0, child_cpu_s=3.0, collectives=8)
AFTER = replace(BEFORE, time_s=110.0)


@pytest.mark.parametrize(
    ("changes", "sign"),
    [
        ({}, ""),
        ({"log_bytes": 51}, "log"),
        # A log that was rotated has been written to as well.
        ({"log_bytes": 0}, "log"),
        ({"io_bytes": 1000 + 200_000}, "files"),
        # A thread that samples the machine, e.g. of wandb.
        ({"io_bytes": 1000 + 50_000}, ""),
        # A compiler, or the workers of a data loader.
        ({"child_cpu_s": 4.0}, "children"),
        ({"child_cpu_s": 3.2}, ""),
        ({"own_cpu_s": 8.0}, "processor"),
        ({"own_cpu_s": 7.2}, ""),
        ({"collectives": 9}, "collectives"),
        ({"gpu_memory_busy": True}, "gpu"),
        # The pages that others write are no sign of a process that is not held.
        ({"written_back": 10_000}, ""),
    ],
)
def test_what_a_rank_has_done_is_a_sign_of_life(changes: dict[str, float], sign: str) -> None:
    assert sign_of_life(BEFORE, replace(AFTER, **changes), waits=False) == sign


@pytest.mark.parametrize(
    ("changes", "sign"),
    [
        # A rank that waits on a GPU computes all the time.
        ({"own_cpu_s": 17.0}, ""),
        ({"gpu_memory_busy": True}, ""),
        ({"child_cpu_s": 13.0}, "children"),
        ({"io_bytes": 1 << 30}, "files"),
    ],
)
def test_computing_in_the_same_collective_as_before_is_waiting(changes: dict[str, float], sign: str) -> None:
    assert sign_of_life(BEFORE, replace(AFTER, **changes), waits=True) == sign


def test_an_fsync_of_minutes_is_alive_while_the_node_writes() -> None:
    before, after = replace(BEFORE, is_held=True), replace(AFTER, is_held=True)
    assert sign_of_life(before, after, waits=False) == ""
    assert sign_of_life(before, replace(after, written_back=1000), waits=False) == "files"
    assert sign_of_life(BEFORE, replace(after, written_back=1000), waits=False) == "", "it was not held all the time"


def stack(*frames: str) -> str:
    lines = "".join(f"  File {frame}\n" for frame in frames)
    other = 'Thread 0x01 (most recent call first):\n  File "/home/me/log.py", line 9 in beat\n'
    return f"main thread 0x02\n{other}\nCurrent thread 0x02 (most recent call first):\n{lines}"


TORCH = "/env/lib/python3.11/site-packages/torch"
IN_BARRIER = stack(
    f'"{TORCH}/distributed/distributed_c10d.py", line 5 in barrier',
    f'"{TORCH}/distributed/c10d_logger.py", line 83 in wrapper',
    '"/home/me/train.py", line 13 in <module>',
)
IN_LOADER = stack(
    '"/usr/lib/python3.11/threading.py", line 2 in wait',
    '"/usr/lib/python3.11/queue.py", line 1 in get',
    f'"{TORCH}/utils/data/dataloader.py", line 7 in _try_get_data',
    '"/home/me/train.py", line 12 in epoch',
)
AT_WORK = stack('"/home/me/train.py", line 3 in load', '"/home/me/train.py", line 13 in <module>')
IN_LIBRARY = stack(
    '"/env/lib/python3.11/site-packages/numpy/linalg.py", line 9 in svd', '"/home/me/train.py", line 4 in whiten'
)


@pytest.mark.parametrize(
    ("text", "wait", "place"),
    [
        (IN_BARRIER, "barrier", "train.py:13"),
        (IN_LOADER, "the data loader", "epoch (train.py:12)"),
        (AT_WORK, "", "load (train.py:3)"),
        (IN_LIBRARY, "", "whiten (train.py:4)"),
        ("", "", ""),
    ],
)
def test_a_stack_tells_what_a_rank_waits_for_and_where(text: str, wait: str, place: str) -> None:
    frames = frames_of(text)
    assert (waits_in(frames), place_of(frames)) == (wait, place)


def test_a_function_of_the_program_that_is_called_like_a_collective_is_none() -> None:
    assert waits_in(frames_of(stack('"/home/me/train.py", line 3 in barrier'))) == ""


def signs(rank: int, **changes: object) -> Signs:
    values: dict[str, object] = {"rank": rank, "host": f"node{rank // 2 + 1}", "pid": 9, "state": "S", **changes}
    return Signs(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "evident"),
    [
        # A server, an evaluator that waits for a checkpoint: silent for reasons of its own.
        ([signs(0)], False),
        ([signs(0), signs(1)], False),
        ([signs(0), signs(1, waits="barrier")], True),
        ([signs(0, waits="the data loader")], True),
        ([signs(0, state="T"), signs(1)], True),
        ([signs(0, state="D")], True),
        ([signs(0), signs(1, state="", waits="barrier")], False),
    ],
)
def test_silence_is_a_hang_only_where_a_rank_waits_in_vain(ranks: list[Signs], evident: bool) -> None:
    assert is_evident({its.rank: its for its in ranks}) is evident


WAITING = {rank: signs(rank, waits="barrier") for rank in range(4)}
SINCE = "without a sign of life for 5 min 10 s"


@pytest.mark.parametrize(
    ("changed", "stacks", "sentence"),
    [
        (
            {1: signs(1)},
            {1: AT_WORK},
            f"rank 1 on node1 is in load (train.py:3), {SINCE}; 3 ranks wait for it in barrier",
        ),
        (
            {3: signs(3, state="T")},
            {},
            f"rank 3 on node2 does not run (stopped), {SINCE}; 3 ranks wait for it in barrier",
        ),
        (
            {2: signs(2, state="D")},
            {2: AT_WORK},
            "rank 2 on node2 is held by the kernel (a file system that does not answer?) at load (train.py:3), "
            f"{SINCE}; 3 ranks wait for it in barrier",
        ),
        (
            # A rank that gloo lets wait in the kernel.
            {1: signs(1), 2: signs(2, state="D", waits="barrier")},
            {1: AT_WORK},
            f"rank 1 on node1 is in load (train.py:3), {SINCE}; 3 ranks wait for it in barrier",
        ),
        (
            {2: signs(2, waits="the data loader")},
            {2: IN_LOADER},
            f"rank 2 on node2 waits in the data loader at epoch (train.py:12), {SINCE}; 3 ranks wait for it in barrier",
        ),
        (
            {0: signs(0), 1: signs(1)},
            {},
            f"ranks 0, 1 on node1 are at an unknown place (no stack), {SINCE}; 2 ranks wait for them in barrier",
        ),
        (
            {0: signs(0, state="", waits="barrier"), 1: signs(1, state="")},
            {2: IN_BARRIER, 3: IN_BARRIER},
            f"ranks 2, 3 on node2 wait in barrier at train.py:13, {SINCE}; no rank stands out; ranks 0, 1 have ended",
        ),
        (
            {},
            {2: f"{IN_BARRIER}\n{HANDLES}ValueError: bad label 17\nTraceback"},
            f"rank 2 on node2 waits in barrier at train.py:13 while it handles ValueError: bad label 17, {SINCE}; "
            "3 ranks wait for it in barrier",
        ),
        (
            {1: signs(1)},
            {1: f"{AT_WORK}\n{ENDED_THREAD}feeder: OSError: no\n"},
            "rank 1 on node1 is in load (train.py:3), after an exception has ended its thread feeder: OSError: no, "
            f"{SINCE}; 3 ranks wait for it in barrier",
        ),
        (
            {},
            dict.fromkeys(range(4), f"{IN_BARRIER}\n{HANDLES}ImportError: no flash\n"),
            f"ranks 0, 1, 2, 3 on node1 wait in barrier at train.py:13, {SINCE}; no rank stands out",
        ),
    ],
)
def test_the_sentence_names_who_is_waited_for(changed: dict[int, Signs], stacks: dict[int, str], sentence: str) -> None:
    assert str(explain(WAITING | changed, silent_s=310.0, stacks=stacks, flights={})) == sentence


def test_a_rank_that_has_begun_fewer_collectives_is_the_one_that_is_waited_for() -> None:
    # On a GPU the stack shows an `.item()` on all ranks, and only the records differ.
    key, fifth = "nccl 0", Collective(5, "all_reduce", 1000)
    waits, behind = {key: Flight(5, 4, (fifth,))}, {key: Flight(4, 4, (Collective(4, "all_reduce", 1000),))}
    ranks = {rank: signs(rank, waits="all_reduce #5 of 1,000 elements") for rank in range(2)} | {2: signs(2)}
    hang = explain(ranks, silent_s=310.0, stacks={}, flights={0: waits, 1: waits, 2: behind})
    assert hang.ranks == (2,)
    assert hang.activity.endswith("2 ranks wait for it in all_reduce #5 of 1,000 elements")


def test_a_rank_in_another_collective_than_most_is_the_one_that_is_waited_for() -> None:
    def flight(name: str, number: int = 7) -> dict[str, Flight]:
        return {"gloo 0": Flight(number, number - 1, (Collective(number, name, 1),))}

    ranks = {rank: signs(rank, waits="all_reduce #7") for rank in range(3)} | {3: signs(3, waits="barrier #7")}
    flights = {rank: flight("all_reduce") for rank in range(3)}
    hang = explain(ranks, silent_s=310.0, stacks={3: IN_BARRIER}, flights=flights | {3: flight("barrier")})
    assert hang.ranks == (3,)
    assert hang.activity == (
        f"waits in barrier #7 of 1 elements at train.py:13, {SINCE}; 3 ranks wait for it in all_reduce #7 of 1 elements"
        "; as collective #7 of all ranks rank 0 has begun all_reduce of 1 elements, but rank 3 has begun barrier"
    )
    # Two against two: nobody knows who is wrong.
    halves = {rank: flight("barrier" if rank > 1 else "all_reduce") for rank in range(4)}
    assert explain(ranks, silent_s=310.0, stacks={}, flights=halves).ranks == (0, 1, 2, 3)


def test_gpus_that_do_nothing_are_named_after_half_an_hour() -> None:
    ranks = {0: signs(0, gpu_idle_s=0.0), 1: signs(1, gpu_idle_s=2000.0), 2: signs(2)}
    assert idle_sentence(ranks, after_s=1800.0) == "the GPU of rank 1 has done nothing for 33 min 20 s"
    assert idle_sentence({0: ranks[0], 2: ranks[2]}, after_s=1800.0) == ""
    assert idle_sentence({1: signs(1, state="", gpu_idle_s=2000.0)}, after_s=1800.0) == "", "it has ended"


def launched(rank: int, inner_rank: int, launcher: str = "torchrun", size: int = 2) -> Signs:
    return signs(rank, launcher=launcher, inner_rank=inner_rank, inner_size=size)


@pytest.mark.parametrize(
    ("ranks", "group", "said"),
    [
        ([launched(0, 0), launched(1, 0)], None, "2 of 2 ranks have each started ranks of their own by torchrun"),
        ([launched(0, 0, "srun", 0), launched(1, 0, "srun", 0)], None, "2 of 2 ranks have each started srun: "),
        ([launched(0, 0), launched(1, 0)], Group(size=0, remark=""), "2 of 2 ranks have each started ranks"),
        # One launcher per node, which make up one world; two worlds of two nodes each.
        ([launched(0, 0, size=16), launched(1, 8, size=16)], None, ""),
        ([launched(rank, number) for rank, number in enumerate((0, 2, 0, 2))], None, "4 of 4 ranks have each started"),
        # An evaluation that rank 0 starts; helpers of a program whose ranks are joined.
        ([launched(0, 0), signs(1)], None, ""),
        ([launched(0, 0), launched(1, 0)], Group(size=2, remark=""), ""),
        ([signs(0), signs(1)], Group(size=0, remark="the program trains"), "the program trains"),
        ([signs(0), signs(1)], None, ""),
    ],
)
def test_ranks_that_do_not_train_one_model_are_told(ranks: list[Signs], group: Group | None, said: str) -> None:
    sentence = apart_sentence(dict(enumerate(ranks)), group)
    assert sentence.startswith(said) and bool(sentence) == bool(said)
