"""The look for stragglers: a task of the supervisor that reads the ranks' heartbeats and writes what it finds.

It changes nothing about the run. The ranks pay for their own sampling only; a rank that is slow cannot keep this
task from saying so, since it runs outside of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from slurm_train.config.schema import RunConfig
from slurm_train.requeue.best_effort import say
from slurm_train.requeue.monitor import Task
from slurm_train.requeue.stragglers import Judge, WindowCutter
from slurm_train.rundir.events import append_event
from slurm_train.rundir.heartbeat import read_beats
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.rounds import newest_round, read_round
from slurm_train.rundir.stragglers import Finding, PaceWindow, append_window

_LONGEST_WINDOW_S = 60.0
# A line has some 40 bytes per rank: a thousand ranks get one in eight minutes.
_RANKS_PER_LONGEST = 128


def straggler_watch(
    run: RunDirectory,
    attempt: int,
    *,
    config: RunConfig,
    world_size: int,
    look_every_s: float = 2.0,
    first_window_s: float = 3.0,
) -> Task | None:
    """Returns the task that looks for stragglers among an attempt's ranks; None where nothing is measured.

    Args:
        run: the run.
        attempt: number of the attempt.
        config: says whether and how; a user's own function or script measures nothing.
        world_size: ranks; one alone has nobody to wait for.
        look_every_s: seconds between looks at the heartbeats.
        first_window_s: length of the first window; later ones grow.
    """
    if config.health.pace_every_steps is None or not config.trains:
        return None

    def build_cutter(of_attempt: int, ranks: int) -> WindowCutter:
        longest_s = _LONGEST_WINDOW_S * max(1.0, ranks / _RANKS_PER_LONGEST)
        return WindowCutter(of_attempt, world_size=ranks, first_s=first_window_s, longest_s=longest_s)

    watch = _Watch(run, attempt, config.health.straggler_excess, build_cutter, world_size)
    return Task(name="the look for stragglers", every_s=look_every_s, look=watch.look, end=watch.end)


class _Watch:
    """The task's state."""

    def __init__(
        self, run: RunDirectory, attempt: int, excess: float, build: Callable[[int, int], WindowCutter], world_size: int
    ) -> None:
        self._run, self._first, self._attempt, self._build, self._excess = run, attempt, attempt, build, excess
        self._cutter, self._judge = build(attempt, world_size), Judge(excess=excess)
        self._said: set[tuple[str, tuple[int, ...]]] = set()

    def end(self) -> None:
        """Takes what the ranks have left."""
        self.look()
        if (rest := self._cutter.rest()) is not None:
            # What is left is shorter than a window, so nothing is concluded from it.
            append_window(self._run, rest)

    def look(self) -> None:
        """Reads the heartbeats."""
        newest = newest_round(self._run, self._first)
        if newest != self._attempt and (begun := read_round(self._run, newest)) is not None:
            # torchrun has started the ranks again: other processes, and at times other numbers.
            self._attempt, self._judge = newest, Judge(excess=self._excess)
            self._cutter = self._build(newest, begun.world_size)
        self._take(self._cutter.look(read_beats(self._run, self._attempt), time.time()))

    def _take(self, window: PaceWindow | None) -> None:
        if window is None:
            return
        judged = self._judge.take(window)
        append_window(self._run, judged)
        for finding in judged.findings:
            if (finding.kind, finding.ranks) not in self._said:
                self._said.add((finding.kind, finding.ranks))
                self._say(finding)

    def _say(self, finding: Finding) -> None:
        facts: dict[str, Any] = {"kind": finding.kind, "ranks": list(finding.ranks), "hosts": list(finding.hosts)}
        facts |= {"factor": finding.factor, "lost_share": finding.lost_share}
        with contextlib.suppress(OSError):
            append_event(
                self._run, "slow", attempt=self._attempt, sentence=finding.sentence, advice=finding.advice, **facts
            )
        say(f"{finding.sentence}; {finding.advice}")
