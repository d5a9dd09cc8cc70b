"""Scores each checkpoint of a run as it appears, in place of a training.

A follower waits for the next checkpoint with its ranks in short exchanges, so a stop (preemption, time limit, cancel)
is acted upon within two seconds, and the hang watchdog sees that it lives. What is scored and what is next is on disk
alone (`evaluation.follower`): killed at any moment, it goes on where it was.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from slurm_train.checkpoint.agreement import on_rank_zero
from slurm_train.checkpoint.collect import discard_kept
from slurm_train.distributed.group import shutdown
from slurm_train.errors import EXIT_DONE, EXIT_REQUEUE, CheckpointError, UnknownCheckpointError
from slurm_train.evaluation.evaluate_checkpoint import load_weights, measure, require_same_samples
from slurm_train.evaluation.follower import Follower, Waiting
from slurm_train.rundir.files import create_empty
from slurm_train.rundir.pins import release_pins
from slurm_train.rundir.scores import Score, named
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.status.following import summary_of
from slurm_train.train.build import build_alone, join
from slurm_train.train.context import Rank
from slurm_train.train.ending import write_result
from slurm_train.train.metrics import format_measures
from slurm_train.train.stops import by_exchange

_LOOK_S = 0.5
_LONGEST_LOOK_S = 2.0


def follow_checkpoints(rank: Rank) -> int:
    """Scores each checkpoint of a run as it appears, oldest first, until the run is over. All ranks call it.

    Returns:
        EXIT_DONE when the run is over and all is scored, EXIT_REQUEUE when some rank was asked to stop.

    Raises:
        DataError: there are no held-out samples, or other ones than when this was asked for.
        RunError: the weights do not fit the model, or a newer attempt of the evaluator has taken over.
    """
    parts = join(*build_alone(rank))[0]
    rank = parts.rank
    require_same_samples(parts)
    group = dist.group.WORLD
    name = rank.config.train.follow or ""
    first = _First(rank) if rank.place.is_first else None
    while True:
        rank.heartbeat.mark("evaluate")
        found = on_rank_zero(group, first.find_next if first is not None else _nothing)
        if by_exchange(rank.stop):
            shutdown()
            return EXIT_REQUEUE
        if found.is_over:
            break
        if found.waiting is None:
            continue
        start_s = time.monotonic()
        try:
            _, manifest = load_weights(parts, found.waiting.save)
        except UnknownCheckpointError:
            raise
        except CheckpointError as err:
            score = found.waiting.not_scored(err.message)
        else:
            values = measure(parts)
            if values is None:
                shutdown()
                return EXIT_REQUEUE
            score = found.waiting.scored(
                named(values, name),
                attempt=manifest.attempt,
                parent=manifest.parent,
                start_s=start_s,
            )
        on_rank_zero(group, partial(first.record, score) if first is not None else _nothing)
    if first is not None:
        first.finish()
    shutdown()
    return EXIT_DONE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Next:
    """What rank 0 has found, for all ranks."""

    waiting: Waiting | None = None
    is_over: bool = False


def _nothing() -> Any:
    raise AssertionError("rank 0 alone looks and records")


class _First:
    """What rank 0 does besides: it looks for the next checkpoint and keeps the record."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        # What an attempt that was killed had pinned is pinned again when its turn comes.
        create_empty(rank.run.scores)
        self._follower = Follower(rank.run, rank.attempt, SlurmCommands(rank.env))
        self._pause_s = _LOOK_S
        self._says_waiting = True

    def find_next(self) -> _Next:
        """Returns the next checkpoint, or that the run is over; waits for a moment where there is none."""
        rank = self._rank
        rank.stop.check_file(rank.run.stop_file)
        is_over = self._follower.is_over()
        waiting = self._follower.next()
        if waiting is not None:
            self._pause_s = _LOOK_S
            self._says_waiting = True
            return _Next(waiting=waiting)
        if is_over:
            return _Next(is_over=True)
        if self._says_waiting:
            self._says_waiting = False
            rank.say(f"waits for the next checkpoint of {self._follower.run.path}")
        end_s = time.monotonic() + self._pause_s
        while time.monotonic() < end_s and not rank.stop.requested:
            time.sleep(0.05)
        self._pause_s = min(2 * self._pause_s, _LONGEST_LOOK_S)
        return _Next()

    def record(self, score: Score) -> None:
        """Writes the line of a score."""
        self._follower.record(score)
        numbers = {name: value for name, value in score.values.items() if value is not None}
        self._rank.say(f"step {score.step}: {score.problem or format_measures(numbers) or 'no finite number'}")

    def finish(self) -> None:
        """Writes the result, and lets go of what was kept."""
        scores = self._follower.finish()
        summary = summary_of(self._rank.run)
        facts: dict[str, Any] = {"scored": summary.num_scored, "missed": summary.num_missed}
        if summary.newest is not None:
            facts |= {"step": summary.newest.step, **summary.newest.values}
        write_result(self._rank, facts)
        release_pins(self._rank.run)
        discard_kept(self._follower.run, SlurmCommands(self._rank.env))
        self._rank.say(f"the run is over, and {len(scores)} of its checkpoints are done: {summary.words}")
