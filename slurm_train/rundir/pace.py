"""What a rank spends its steps on: sums over sampled steps, carried by its heartbeat, read while the run goes on.

In synchronous training all ranks take the same time for a step. What tells them apart is how much of it was their own
work and how much they waited for the others' gradients: whoever holds the others up waits least. Imports no torch.
"""

from __future__ import annotations

import math
import struct
from dataclasses import astuple, dataclass

PACE_RECORD = struct.Struct("<q5d")


@dataclass(frozen=True, slots=True)
class Pace:
    """Sums over the sampled steps of one rank in one attempt, in seconds."""

    samples: int = 0
    own_s: float = 0.0
    """Everything but the wait for others: data, forward, backward, update."""
    own_squared: float = 0.0
    own_by_wait: float = 0.0
    """Own time times wait: tells a rank's uneven batches from steps that are long for everybody."""
    wait_s: float = 0.0
    """From the last gradient of its own until the reduced ones were there."""
    data_s: float = 0.0
    """The part of the own time that waited for data."""

    def plus(self, *, own_s: float, wait_s: float, data_s: float) -> Pace:
        """Returns the sums with one more step in them."""
        return Pace(
            self.samples + 1,
            self.own_s + own_s,
            self.own_squared + own_s * own_s,
            self.own_by_wait + own_s * wait_s,
            self.wait_s + wait_s,
            self.data_s + data_s,
        )

    def since(self, earlier: Pace) -> Pace:
        """Returns the sums of the steps after an earlier reading."""
        return Pace(*(now - before for now, before in zip(astuple(self), astuple(earlier), strict=True)))

    def as_bytes(self) -> bytes:
        """Returns the sums as `pace_from` reads them."""
        return PACE_RECORD.pack(*astuple(self))

    @property
    def uneven_s(self) -> float:
        """How much the own time of a step differs from step to step for this rank alone (a standard deviation).

        Where a step is long for this rank only, it waits less in it; where it is long for all, it waits as ever. So
        the part of the spread that the waits follow is its own.
        """
        if self.samples < 2:
            return 0.0
        mean_own, mean_wait = self.own_s / self.samples, self.wait_s / self.samples
        spread = self.own_squared / self.samples - mean_own * mean_own
        together = self.own_by_wait / self.samples - mean_own * mean_wait
        return math.sqrt(min(max(-together, 0.0), max(spread, 0.0)))


def pace_from(content: bytes, offset: int) -> Pace:
    """Returns the sums at a place in a heartbeat.

    Raises:
        struct.error: there are none.
    """
    return Pace(*PACE_RECORD.unpack_from(content, offset))
