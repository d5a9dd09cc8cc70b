"""What is seen of an attempt's ranks at one moment: the only reader of the files that they keep writing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from slurm_train.rundir.attempts import newest_round, read_round
from slurm_train.rundir.events import FailureMark, Finding, findings_of, first_mark, read_preflight
from slurm_train.rundir.heartbeat import Beat, read_beats
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.signs import Group, Signs, read_group, read_signs

_STOPPED_AFTER_S = 5.0


class CheckedClock:
    """A clock that stops while `tick` is not called, as in a suspended job, whose ranks are stopped as well.

    Args:
        monotonic: seconds that go on whatever happens to the process.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._away_s = 0.0
        self._ticked_s = monotonic()

    def tick(self) -> None:
        """Records that this process runs; called about once a second."""
        now_s = self._monotonic()
        self._away_s += max(0.0, now_s - self._ticked_s - _STOPPED_AFTER_S)
        self._ticked_s = now_s

    def __call__(self) -> float:
        """Returns the time."""
        return min(self._monotonic(), self._ticked_s + _STOPPED_AFTER_S) - self._away_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """One reading of what the ranks write about themselves."""

    attempt: int
    """Theirs; torchrun may have started the ranks of the step again as a later attempt of another size."""
    world_size: int
    began_s: float = 0.0
    """When the reading began, in seconds without those in which the job is suspended."""
    ended_s: float = 0.0
    unix_s: float = 0.0
    """When it ended, by the clock of this node."""
    beats: Mapping[int, Beat] = field(default_factory=dict)
    signs: Mapping[int, Signs] = field(default_factory=dict)
    """What the watchers beside the ranks of a user's own program have seen; none of a training."""
    group: Group | None = None

    def watched_beats(self) -> dict[int, Beat]:
        """Returns what the watchers beside the ranks have seen as heartbeats of these."""
        beats = {}
        for rank, rank_signs in self.signs.items():
            mark = self.beats.get(rank)
            beats[rank] = Beat(
                rank=rank,
                host=rank_signs.host,
                pid=rank_signs.pid,
                step_id=rank_signs.step_id,
                step=0 if mark is None else mark.step,
                # The end of a rank counts as progress, too.
                marks=rank_signs.signs + int(rank_signs.has_ended) + (0 if mark is None else mark.marks),
                phase="end" if rank_signs.has_ended else "script",
                settled=True,
                beats=rank_signs.looks,
            )
        return beats


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The newest reading of each kind of file."""

    ranks: Ranks
    """The same as in the look before, where it was not read again meanwhile."""
    mark: FailureMark | None = None
    """Of the rank that failed first."""
    findings: Sequence[Finding] = ()
    """Of the preflight."""
    now_s: float
    """Of a clock that never runs backwards."""
    now_unix_s: float


class LiveFiles:
    """Reads the files that the ranks of an attempt keep writing.

    Args:
        run: the run.
        attempt: number of the attempt.
        world_size: ranks that it begins with.
        clock: seconds, not counting those in which the job is suspended.
        has_watchers: whether the ranks are a user's own program, with watchers beside them.
    """

    def __init__(
        self, run: RunDirectory, attempt: int, *, world_size: int, clock: Callable[[], float], has_watchers: bool
    ) -> None:
        self._run = run
        self._attempt = attempt
        self._clock = clock
        self._has_watchers = has_watchers
        self._ranks = Ranks(attempt=attempt, world_size=world_size)
        self._mark: FailureMark | None = None
        self._findings: Sequence[Finding] = ()

    @property
    def readings(self) -> Mapping[str, Callable[[], None]]:
        """The kinds of files by name, and how each is read: any of them may be on a server that does not answer."""
        return {
            "the reading of the heartbeats": self._read_ranks,
            "the reading of the failures": self._read_mark,
            "the reading of the preflight": self._read_findings,
        }

    def look(self) -> Look:
        """Returns what was read last; never waits."""
        return Look(
            ranks=self._ranks,
            mark=self._mark,
            findings=self._findings,
            now_s=time.monotonic(),
            now_unix_s=time.time(),
        )

    def _read_ranks(self) -> None:
        run = self._run
        attempt = self._ranks.attempt
        world_size = self._ranks.world_size
        # If restarts cannot be read now, the known ranks are watched further.
        with contextlib.suppress(Exception):
            newest = newest_round(run, self._attempt)
            restart = read_round(run, newest) if newest != attempt else None
            if restart is not None:
                attempt = newest
                world_size = restart.world_size
        began_s = self._clock()
        beats = read_beats(run, attempt)
        signs = read_signs(run, attempt) if self._has_watchers else {}
        group = read_group(run, attempt) if self._has_watchers else None
        self._ranks = Ranks(
            attempt=attempt,
            world_size=world_size,
            began_s=began_s,
            ended_s=self._clock(),
            unix_s=time.time(),
            beats=beats,
            signs=signs,
            group=group,
        )

    def _read_mark(self) -> None:
        self._mark = first_mark(self._run, self._ranks.attempt)

    def _read_findings(self) -> None:
        self._findings = findings_of(read_preflight(self._run, self._attempt))
