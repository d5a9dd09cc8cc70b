"""The saving thread: one save at a time, in order, and what went wrong is told where the outcome is asked for."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from slurm_train.checkpoint.background import BackgroundSaver
from slurm_train.checkpoint.directory import verify
from slurm_train.checkpoint.save import Saved, save_checkpoint
from slurm_train.checkpoint.staging import StagingBuffers
from slurm_train.errors import CheckpointError, RunError
from slurm_train.rundir.layout import list_checkpoints

DONE = Saved(Path("checkpoint_0000001"), num_bytes=1)


@pytest.fixture
def saver() -> BackgroundSaver:
    return BackgroundSaver()


def raising(error: BaseException):
    def work():
        raise error

    return work


def poll_until_told(saver: BackgroundSaver):
    deadline = time.monotonic() + 10
    while (outcome := saver.poll()) is None:
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)
    return outcome


def test_the_caller_goes_on_while_a_save_runs_and_hears_of_it_once(saver):
    may_end = threading.Event()
    saver.start(lambda: DONE if may_end.wait(10) else None, step=1)
    assert saver.poll() is None
    may_end.set()
    outcome = poll_until_told(saver)
    assert (outcome.step, outcome.result, outcome.is_fatal) == (1, DONE, False)
    assert saver.poll() is None and saver.wait() is None


def test_works_run_in_the_order_they_were_handed_over_in_one_thread(saver):
    seen: list[tuple[str, str]] = []
    saver.prepare(lambda: seen.append(("prepare", threading.current_thread().name)))
    saver.start(lambda: seen.append(("save", threading.current_thread().name)) or DONE, step=1)
    saver.wait()
    assert seen == [("prepare", "checkpoint"), ("save", "checkpoint")]


def test_a_second_save_must_wait_for_the_first(saver):
    may_end = threading.Event()
    saver.start(lambda: DONE if may_end.wait(10) else None, step=1)
    with pytest.raises(AssertionError, match="step 1 is under way"):
        saver.start(lambda: DONE, step=2)
    may_end.set()


@pytest.mark.parametrize(
    ("error", "is_fatal"),
    [(CheckpointError("full"), False), (RunError("overtaken"), True), (RuntimeError("connection closed"), True)],
)
def test_what_the_ranks_agreed_on_is_survivable_and_all_else_is_not(saver, error, is_fatal):
    saver.start(raising(error), step=4)
    outcome = saver.wait()
    assert (outcome.result, outcome.is_fatal) == (error, is_fatal)
    saver.start(lambda: DONE, step=5)
    assert saver.wait().result == DONE


def test_a_failed_preparation_is_no_failure(saver):
    saver.prepare(raising(MemoryError()))
    saver.start(lambda: DONE, step=1)
    assert saver.wait().result == DONE


def test_an_idle_thread_keeps_nothing_of_the_last_save(saver):
    tensor = torch.ones(3)
    seen = weakref.ref(tensor)
    saver.start(lambda tensor=tensor: Saved(Path("saved"), num_bytes=tensor.nbytes), step=1)
    saver.wait()
    del tensor
    deadline = time.monotonic() + 10
    while seen() is not None:  # the thread lets go of it right after it has told
        assert time.monotonic() < deadline
        gc.collect()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_does_not_grow_over_thirty_saves(saver, kit, root):
    state = {f"layer{number}": torch.randn(64, 1024) for number in range(16)}
    buffers = StagingBuffers(torch.device("cpu"))
    resident = []
    for step in range(1, 31):
        staged = buffers.stage(state)
        header = kit.header(step)

        def work(staged=staged, header=header) -> Saved:
            return save_checkpoint(root, tensors=staged, rank_state={}, header=header, group=None, keep=2)

        saver.start(work, step=step)
        outcome = saver.wait()
        assert isinstance(outcome.result, Saved), outcome
        resident.append(resident_bytes())
    assert buffers.num_bytes == 16 * 64 * 1024 * 4
    # One state is 4 MiB; a copy kept per save would be 80 MiB over the last twenty.
    assert resident[-1] - resident[9] < 8 << 20
    assert [verify(path).step for path in list_checkpoints(root)] == [30, 29]
