"""One process's part in a run, known before anything is built: who it is, which run, who stops it, how it speaks.

The built-in trainer and a program's session start from the same one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_train.config.program import program_of
from slurm_train.config.schema import RunConfig
from slurm_train.distributed.place import RankPlace
from slurm_train.metrics import SILENT, Display, open_display
from slurm_train.rundir.events import append_event
from slurm_train.rundir.heartbeat import AwakeClock, Heartbeat
from slurm_train.rundir.paths import RunDirectory
from slurm_train.session.signals import StopFlag

LONGEST_SUSPENSION_S = 7 * 86400.0
"""Time-out of exchanges where a watchdog, which notices suspensions of a job, ends ranks that hang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRun:
    """Who this rank is, and which attempt of which run it belongs to."""

    config: RunConfig
    """The frozen configuration."""
    run: RunDirectory
    """Where everything is kept."""
    place: RankPlace
    """Rank, local rank, node rank, world size."""
    attempt: int
    """Number of the attempt, counted over the run."""
    stop: StopFlag
    """Set by the signal handlers, which are installed already."""
    env: Mapping[str, str]
    """The process's environment."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    """What this rank says about its progress."""
    display: Display = SILENT
    """How rank 0 speaks to the user; silent on the others."""

    @property
    def clock(self) -> AwakeClock:
        """Seconds in which this process ran: time in which it was suspended is left out."""
        return self.heartbeat.clock

    def say(self, *notes: str | None) -> None:
        """Prints a line for each note, on rank 0; None and "" are no notes."""
        for note in filter(None, notes):
            self.display.say(note)

    def append_event(self, event: str, **facts: Any) -> None:
        """Writes a line of events@<host>.jsonl, which names the attempt."""
        append_event(self.run, event, attempt=self.attempt, **facts)


def display_of(config: RunConfig, place: RankPlace, env: Mapping[str, str]) -> Display:
    """Returns how a rank speaks to the user; the lines for a program stand among the program's own."""
    if not place.is_first:
        return SILENT
    program = program_of(config)
    if program.line_start:
        return Display(opening=program.line_start)
    return open_display(sys.stderr, max_steps=config.train.max_steps, env=env)
