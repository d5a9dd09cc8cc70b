"""Saves a checkpoint: all ranks write into a fresh directory, and a leader publishes it when every byte is durable.

A checkpoint is saved at a place: the run directory, whose leader is rank 0 of the job, or the nodes' own disks, with
one leader for each node. There are three exchanges: the directory's name, with the number of each rank's plan; the
records of the files; and the outcome. Where a rank holds something else than at the save before, the plan is made in
two more; where nodes have a place of their own, all hear of the description in another one. If any rank fails, all
ranks raise the same error, the directory is removed and the previous checkpoint is untouched. Nothing here depends on
the calling thread, so a save in the background uses the same function with tensors and a group of its own.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from slurm_train.checkpoint.agreement import on_every_rank, rank_in
from slurm_train.checkpoint.commit import Fence, Place, no_fence
from slurm_train.checkpoint.division import weights_in
from slurm_train.checkpoint.filling import Records, Saved, begin_filling
from slurm_train.checkpoint.manifest import CheckpointHeader, require_tensors, write_file
from slurm_train.checkpoint.state import require_loadable
from slurm_train.checkpoint.verify import wait_until_visible
from slurm_train.errors import CheckpointError


def save_checkpoint(
    root: Path,
    *,
    tensors: dict[str, Any],
    rank_state: dict[str, Any],
    header: CheckpointHeader,
    group: ProcessGroup | None,
    keep: int,
    fence: Fence = no_fence,
) -> Saved:
    """Saves one checkpoint into a directory that all ranks see. Collective: all ranks call it with the same header.

    Where the step is saved already (the last step may be one of a periodic save), this costs one exchange, and no file
    is read.

    Args:
        root: the directory of checkpoints; made if absent, its parent must be private to the user.
        tensors: nested dictionary of tensors and plain values, equal on all ranks or DTensors; not changed meanwhile.
        rank_state: this rank's own state; only what torch.load(weights_only=True) reads back.
        header: the facts for the manifest.
        group: a gloo group of all ranks; None for one process without a group.
        keep: how many whole checkpoints stay, at least 1.
        fence: called by rank 0 before it gives or takes a checkpoint's name; raises if a newer attempt has taken over.

    Raises:
        CheckpointError: it could not be saved; the text names the rank, its node and the system's reason.
        SlurmTrainError: what the fence raised, on every rank.
    """
    place = Place(root=root, attempt=header.attempt, keep=keep, fence=fence, is_leader=rank_in(group) == 0)
    if not header.weights:
        # The model is equal on all ranks, or of DTensors, which know the whole.
        header = replace(header, weights=weights_in(tensors))
    return save_to(place, tensors=tensors, rank_state=rank_state, header=header, group=group)


def save_to(
    place: Place,
    *,
    tensors: dict[str, Any],
    rank_state: dict[str, Any],
    header: CheckpointHeader,
    group: ProcessGroup | None,
    protect: Collection[str] = (),
    expected: Mapping[str, str] | None = None,
) -> Saved:
    """Saves one checkpoint at a place. Collective; arguments and errors as for `save_checkpoint` and `begin_filling`.

    Args:
        expected: number type and shape of each tensor that some rank holds, by full name; rank 0's counts. What was
            planned and written must be the same. None: the `weights` of the header.
    """

    # Imported late, since it takes long.
    from slurm_train.checkpoint.tensors import TensorPlan, describe_tensors, write_tensors

    plans: list[TensorPlan] = []
    lengths: list[list[int]] = []

    def number_of_plan() -> str:
        plans.append(TensorPlan(tensors, group=group))
        return plans[0].number

    filling = begin_filling(place, header, group=group, protect=protect, answer=number_of_plan)
    (plan,) = plans
    rank = rank_in(group)

    def write_own() -> tuple[Records, list[int]]:
        if rank == 0:
            require_tensors(header.tensors if expected is None else expected, plan.described)
        wait_until_visible(filling.staging)
        name = rank_file(rank)
        records = {name: write_file(filling.staging / name, _to_bytes(rank_state))}
        of_tensors, own_lengths = write_tensors(filling.staging, plan)
        return records | of_tensors, own_lengths

    def write() -> list[Records]:
        plan.settle(filling.answers)
        written = on_every_rank(group, write_own)
        lengths.extend(of_rank for _, of_rank in written)
        return [records for records, _ in written]

    return filling.end(write, last=lambda: describe_tensors(filling.staging, plan, lengths))


def rank_file(rank: int) -> str:
    """Returns the name of a rank's own file, for example "rank_00007.pt"."""
    return f"rank_{rank:05d}.pt"


def _to_bytes(rank_state: dict[str, Any]) -> bytes:
    """Returns the content of the file, after checking that a resume can read it."""
    buffer = io.BytesIO()
    torch.save(rank_state, buffer)
    require_loadable(buffer, "rank state")
    return buffer.getvalue()


class Outcome(NamedTuple):
    """The outcome of a save.

    Attributes:
        step: the saved step.
        result: the checkpoint, or the error.
        duration_s: seconds from its start to its end.
    """

    step: int
    result: Saved | Exception
    duration_s: float

    @property
    def is_fatal(self) -> bool:
        """Whether the run cannot go on: a newer attempt has taken over, or an exchange between the ranks failed.

        A CheckpointError is not fatal: all ranks have agreed on it, and the previous checkpoint is untouched.
        """
        return isinstance(self.result, Exception) and not isinstance(self.result, CheckpointError)


class BackgroundSaver:
    """One thread that saves while training goes on, one save at a time; it lives as long as the process.

    All exchanges between ranks happen in this thread, on a group that nothing else uses, and every rank starts the same
    saves in the same order, so they cannot mix with exchanges of the training. A rank ends with os._exit, which does
    not wait for the thread; what the thread has written so far has no checkpoint's name.

    Args:
        clock: seconds that never run backwards.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._preparation: Future[None] | None = None
        self._save: Future[Outcome] | None = None

    def prepare(self, work: Callable[[], None]) -> None:
        """Runs in the thread what makes the first save faster; if it fails, that save is only slower."""
        assert self._save is None, "a save is under way"
        self._preparation = self._thread.submit(work)

    def start(self, work: Callable[[], Saved], *, step: int) -> None:
        """Begins a save; the outcome of the save before must have been read with `wait` or `poll`."""
        assert self._save is None, "a save is under way"
        self._save = self._thread.submit(self.run, work, step=step)

    def run(self, work: Callable[[], Saved], *, step: int) -> Outcome:
        """Saves in the calling thread; returns the outcome."""
        started_s = self._clock()
        try:
            result: Saved | Exception = work()
        except Exception as err:  # it is handed over with the outcome
            result = err
        return Outcome(step, result, self._clock() - started_s)

    def poll(self) -> Outcome | None:
        """Returns the outcome of a save once, when it has ended; None while it runs or where there is none."""
        if self._save is None or not self._save.done():
            return None
        return self.wait()

    def is_done_within(self, limit_s: float) -> bool:
        """Waits at most so long for the running save; returns whether it has ended, True where there is none."""
        return self._save is None or not wait_for_all([self._save], timeout=limit_s).not_done

    def wait(self) -> Outcome | None:
        """Waits for the save and a preparation; returns the outcome of the save, None where there is none."""
        if self._preparation is not None:
            self._preparation.exception()
            self._preparation = None
        save = self._save
        self._save = None
        return None if save is None else save.result()
