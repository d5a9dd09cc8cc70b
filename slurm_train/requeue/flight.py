"""Who has not come to a collective that others wait in: the ranks' flight records, put side by side. Pure.

Every rank counts the collectives of a group alike. So whoever has begun fewer of them than the others is the one that
is waited for, and where two ranks have begun different ones under the same number, they will wait for ever.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

# What matters is the gradients' group; torch calls the first one, of all ranks, "0".
_ALL_RANKS = "0"


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective that a rank has begun."""

    number: int
    """Counted within the group, alike on all ranks."""
    name: str
    """E.g. "all_reduce"."""
    elements: int
    """Of its input."""

    def __str__(self) -> str:
        size = f" of {self.elements:,} elements" if self.elements else ""
        return f"{self.name} #{self.number}{size}"


@dataclass(frozen=True, slots=True)
class Flight:
    """What one rank has begun of the group of all ranks."""

    begun: int
    """Number of the newest collective that it has begun."""
    over: int
    """Number of the newest one that is over for it."""
    newest: tuple[Collective, ...]

    @property
    def waits_in(self) -> Collective | None:
        """The oldest collective that has begun and is not over, None where there is none."""
        open_ones = [one for one in self.newest if one.number > self.over]
        return min(open_ones, key=lambda one: one.number, default=None)


def read_flight(text: str | bytes) -> Flight | None:
    """Returns what a rank has left, None where it says nothing of the group of all ranks.

    Args:
        text: JSON as `distributed.flight` writes it.
    """
    try:
        record = json.loads(text)
        status = record["pg_status"][_ALL_RANKS]
        entries = [entry for entry in record["entries"] if str(entry["process_group"][0]) == _ALL_RANKS]
        newest = tuple(
            Collective(int(entry["collective_seq_id"]), _plain_name(entry["profiling_name"]), _elements(entry))
            for entry in entries
        )
        return Flight(int(status["last_enqueued_collective"]), int(status["last_completed_collective"]), newest)
    except (ValueError, KeyError, TypeError, IndexError):
        return None


def not_come(flights: Mapping[int, Flight]) -> tuple[int, ...]:
    """Returns the ranks that have begun fewer collectives than others which wait; () where all have begun the same."""
    waiting = [flight.begun for flight in flights.values() if flight.waits_in is not None]
    if not waiting:
        return ()
    return tuple(sorted(rank for rank, flight in flights.items() if flight.begun < max(waiting)))


def waited_for_in(flights: Mapping[int, Flight]) -> Collective | None:
    """Returns the collective that the most advanced ranks wait in, None where nobody waits."""
    waits = [flight.waits_in for flight in flights.values()]
    return max((one for one in waits if one is not None), key=lambda one: one.number, default=None)


def disagreement(flights: Mapping[int, Flight]) -> str:
    """Returns what ranks have begun under the same number but not alike, "" where they agree.

    Sizes may differ by right in collectives that gather or scatter; names never do.
    """
    begun: dict[int, dict[str, list[int]]] = {}
    for rank, flight in sorted(flights.items()):
        for one in flight.newest:
            begun.setdefault(one.number, {}).setdefault(_kind(one), []).append(rank)
    for number, kinds in sorted(begun.items()):
        if len(kinds) > 1:
            told = (f"rank {ranks[0]} has begun {kind}" for kind, ranks in kinds.items())
            return f"as collective #{number} of all ranks " + ", but ".join(told)
    return ""


def recording_environment(torch_version: str) -> dict[str, str]:
    """Returns the variables that make torch keep flight records, {} for versions that do so by themselves.

    Args:
        torch_version: e.g. "2.6.0+cu124". From 2.9 on the variable has another name, and 2000 is what they keep anyway.
    """
    match = re.match(r"(\d+)\.(\d+)", torch_version)
    is_old = match is not None and (int(match[1]), int(match[2])) < (2, 9)
    return {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"} if is_old else {}


def _kind(one: Collective) -> str:
    return f"{one.name} of {one.elements:,} elements" if one.name in ("all_reduce", "broadcast") else one.name


def _plain_name(name: str) -> str:
    # "nccl:all_reduce", "gloo:broadcast"; NCCL's coalesced ones have longer names.
    return name.rpartition(":")[2] or name


def _elements(entry: Mapping[str, list[list[int]]]) -> int:
    return sum(math.prod(sizes) for sizes in entry["input_sizes"] or [])
