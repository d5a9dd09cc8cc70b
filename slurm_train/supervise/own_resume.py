"""Ends a script that was to resume by its own words and begins anew, before it has done all of its work again.

A misspelled folder, a flag that a later one overrides, a checkpoint that the script finds too old: it trains from its
first step, over the files of the attempt before. Two witnesses say whether it goes on: the mark that it has opened one
of its checkpoints, and the places in its log. Only a script that has opened none, and whose log repeats the start of
the attempt before, is ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from slurm_train.errors import ClusterError
from slurm_train.rundir.events import append_event
from slurm_train.rundir.files import read_tail
from slurm_train.rundir.heartbeat import Beat
from slurm_train.rundir.own_resume import BEGAN_ANEW, read_own_resume, was_taken
from slurm_train.rundir.paths import RunDirectory
from slurm_train.status.logs import LOG_BYTES, new_begin
from slurm_train.status.printed import newest_printed
from slurm_train.supervise.best_effort import say
from slurm_train.supervise.look import Look, Ranks
from slurm_train.supervise.watch import Judge, Verdict


class OwnResumeCheck(Judge):
    """Looks every few seconds whether a script goes on, until that is known.

    Args:
        run: the run.
        end_ranks: kills the ranks.
    """

    name = "the check of the script's own resume"
    _EVERY_S = 5.0

    def __init__(self, run: RunDirectory, *, end_ranks: Callable[[Mapping[int, Beat]], None]) -> None:
        self._run = run
        self._end_ranks = end_ranks
        self._settled_for = -1
        """The attempt of which it is known."""
        self._due_s = 0.0

    def __call__(self, look: Look) -> Verdict | None:
        """Reads record, mark and logs where that is due."""
        if look.now_s < self._due_s or look.ranks.attempt == self._settled_for:
            return None
        self._due_s = look.now_s + self._EVERY_S
        return partial(self._check, look.ranks, has_ended=False)

    def last(self, look: Look) -> Verdict | None:
        """Reads once more: the script may have ended within seconds."""
        return None if look.ranks.attempt == self._settled_for else partial(self._check, look.ranks, has_ended=True)

    def _check(self, ranks: Ranks, *, has_ended: bool) -> None:
        run = self._run
        attempt = ranks.attempt
        resume = read_own_resume(run, attempt)
        if resume is None:
            return  # not written yet, or the first start
        if not resume.words or was_taken(run, attempt):
            self._settled_for = attempt
            return
        given = f"the script got {' '.join(resume.words)!r} to go on from {resume.checkpoint}, and opened no checkpoint"
        begin = new_begin(run, attempt, attempt - 1)
        if not begin:
            # A log with progress goes on then; it is the only witness of a program that is no Python.
            if has_ended and newest_printed(read_tail(run.rank_log(attempt, 0), LOG_BYTES)) is None:
                say(f"{given}, as far as Python was asked to: see in its output whether it went on")
            return
        sentence = f"{given}: by its log it began anew: {begin}"
        append_event(run, BEGAN_ANEW, attempt=attempt, sentence=sentence)
        self._settled_for = attempt
        if has_ended:
            return
        say(f"{sentence}; it is ended")
        try:
            self._end_ranks(ranks.watched_beats())
        except ClusterError as err:
            say(f"it could not be ended: {err.message}")
