"""Who hangs: heartbeats over time and the ranks' flight records, reduced to one sentence. Pure.

In synchronous training one rank that makes no progress stops all others at their next exchange, so a hang is when
nobody makes progress, and the question is who is behind: first a process that does not run at all, then the rank at
the earliest point of the program, then the one that has not begun the collective that others wait in, then the one
whose stack is in no exchange. Every rank counts the collectives of a group alike, so whoever has begun fewer of them
is waited for, and two ranks that have begun different ones under the same number will wait for ever.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurm_train.rundir.heartbeat import NOT_WATCHED, Beat, Limits
from slurm_train.supervise.stragglers import ranks_in_words

# What torch calls the first group.
_ALL_RANKS = "default_pg"


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective that a rank has begun."""

    number: int
    """Counted within the group, alike on all ranks."""
    name: str
    """E.g. "all_reduce"."""
    elements: int
    """Of its input."""
    group: str = _ALL_RANKS
    """What torch says of the group, e.g. "mesh_tp"."""

    def __str__(self) -> str:
        size = f" of {self.elements:,} elements" if self.elements else ""
        group = f" in {self.group}" if self.group not in ("", "undefined", _ALL_RANKS) else ""
        return f"{self.name} #{self.number}{size}{group}"

    @property
    def kind(self) -> str:
        """What must be alike on all ranks: sizes may differ by right in collectives that gather or scatter."""
        return f"{self.name} of {self.elements:,} elements" if self.name in ("all_reduce", "broadcast") else self.name


@dataclass(frozen=True, slots=True)
class Flight:
    """What one rank has begun of one group."""

    begun: int
    """Number of the newest collective that it has begun."""
    over: int
    """Number of the newest one that is over for it."""
    newest: tuple[Collective, ...]

    @property
    def waits_in(self) -> Collective | None:
        """The oldest collective that has begun and is not over, None where there is none."""
        open_ones = [collective for collective in self.newest if collective.number > self.over]
        return min(open_ones, key=lambda open_one: open_one.number, default=None)


Flights = Mapping[str, Flight]
"""What one rank has begun, by backend and name of the group, e.g. "nccl 0"."""


def read_flights(text: str | bytes) -> Flights:
    """Returns what a rank has left, {} where there is nothing that can be read.

    Args:
        text: JSON as `distributed.group` writes it.
    """
    begun: dict[str, list[Collective]] = {}
    states: dict[str, Mapping[str, Any] | None] = {}
    try:
        for record in json.loads(text):
            for entry in record["entries"]:
                # "nccl:all_reduce", "gloo:broadcast"; NCCL's coalesced ones have longer names.
                backend, _, name = entry["profiling_name"].rpartition(":")
                key = f"{backend} {entry['process_group'][0]}"
                elements = entry["input_sizes"] or []
                begun.setdefault(key, []).append(
                    Collective(
                        int(entry["collective_seq_id"]),
                        name,
                        sum(math.prod(sizes) for sizes in elements),
                        str(entry["process_group"][1]),
                    )
                )
                # Each recorder numbers the groups of its process; their names are alike on all ranks.
                states[key] = record["pg_status"].get(str(entry["pg_id"]))
        return {
            key: Flight(
                int(state["last_enqueued_collective"]), int(state["last_completed_collective"]), tuple(begun[key])
            )
            for key, state in states.items()
            if state is not None
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return {}


def disagreement(flights: Mapping[int, Flights]) -> str:
    """Returns what ranks have begun under the same number of a group but not alike, "" where they agree."""
    begun: dict[tuple[str, int], dict[str, tuple[int, Collective]]] = {}
    for rank, groups in sorted(flights.items()):
        for key, flight in groups.items():
            for collective in flight.newest:
                begun.setdefault((key, collective.number), {}).setdefault(collective.kind, (rank, collective))
    for (_, number), kinds in sorted(begun.items()):
        if len(kinds) > 1:
            parts = (f"rank {rank} has begun {kind}" for kind, (rank, _) in kinds.items())
            group = next(iter(kinds.values()))[1].group
            who = "all ranks" if group in ("", _ALL_RANKS) else group
            return f"as collective #{number} of {who} " + ", but ".join(parts)
    return ""


def recording_environment(torch_version: str) -> dict[str, str]:
    """Returns the variables that make torch keep flight records, {} for versions that do so by themselves.

    Args:
        torch_version: e.g. "2.6.0+cu124". From 2.9 on the variable has another name, and 2000 is what they keep anyway.
    """
    match = re.match(r"(\d+)\.(\d+)", torch_version)
    is_old = match is not None and (int(match[1]), int(match[2])) < (2, 9)
    return {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"} if is_old else {}


_STAGES = {"start": 0, "data": 1, "step": 1, "evaluate": 2, "gather": 3, "save": 4}
# Functions of the innermost frames that mean waiting for others; autograd's engine waits for the gradients' reduction.
_EXCHANGES = {
    "_engine_run_backward": "all_reduce",
    "all_reduce": "all_reduce",
    "all_gather_object": "all_gather",
    "all_gather": "all_gather",
    "broadcast_object_list": "broadcast",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "synchronize": "the device",
    "open_store": "the rendezvous",
    "init_process_group": "the rendezvous",
}
_INNERMOST = 8
_IN_WORDS = {
    "group": "the first connection of NCCL or gloo (COLLECTIVE)",
    "data": "data loading",
    "evaluate": "the evaluation",
    "gather": "the exchange after the evaluation",
}
"""What a phase is called in a message, where it is not its own name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """No rank makes progress."""

    ranks: tuple[int, ...]
    """Who is behind; all of them where they do not differ."""
    host: str
    """Node of the first of them."""
    step: int
    phase: str
    what: str
    """What they do, e.g. "is in data loading at step 1204 since 310 s; 7 ranks wait for it in all_reduce"."""

    def __str__(self) -> str:
        return f"{ranks_in_words(self.ranks)} on {self.host} {self.what}"


@dataclass(slots=True)
class _Seen:
    beat: Beat
    moved_s: float
    """When its marks were last seen to change."""
    ran_s: float
    """When it was last seen to beat."""


class Observer:
    """Follows the heartbeats of an attempt.

    Args:
        limits: how long all may make no progress.
        world_size: ranks; while some have no heartbeat yet, the rendezvous has a time-out of its own.
    """

    def __init__(self, limits: Limits, *, world_size: int) -> None:
        self._limits = limits
        self._world_size = world_size
        self._seen: dict[int, _Seen] = {}
        # Time that was watched until the newest look began, and until it ended.
        self._now_s = self._until_s = 0.0
        self._ended_s: float | None = None
        self._longest_s = self._first_s = 0.0
        """The longest time from a mark to the next one after the first step, and before it was done."""

    def look(self, beats: Mapping[int, Beat], *, began_s: float, ended_s: float) -> None:
        """Takes a reading; one in which nothing could be read is ignored, and its time does not count.

        A value that two readings find unchanged counts as unchanged from the end of the first reading to the start of
        the second, so a reading may take longer than the limit. One slow reading or pause counts as at most half of the
        limit: a stuck file server alone never looks like a hang.

        Args:
            beats: by rank.
            began_s: when the reading began, in seconds without those in which the job is suspended.
            ended_s: when it ended.
        """
        before_s = self._ended_s
        self._ended_s = ended_s
        if not beats:
            return
        longest_s = self._limits.steady_s / 2
        self._now_s = self._until_s + (0.0 if before_s is None else min(began_s - before_s, longest_s))
        self._until_s = self._now_s + min(ended_s - began_s, longest_s)
        for rank, beat in beats.items():
            old = self._seen.get(rank)
            moved = old is None or (beat.marks, beat.step) != (old.beat.marks, old.beat.step)
            ran = old is None or beat.beats != old.beat.beats
            if old is not None and moved:
                self._learn(old.beat, self._until_s - old.moved_s)
            self._seen[rank] = _Seen(
                beat,
                self._until_s if old is None or moved else old.moved_s,
                self._until_s if old is None or ran else old.ran_s,
            )

    def is_hung(self) -> bool:
        """Returns whether all ranks that are not done have stood still for longer than those may that are behind."""
        working = self._working()
        if not working or len(self._seen) < self._world_size:
            return False
        frozen = self._frozen(working)
        earliest = min(_point(seen.beat) for seen in working.values())
        # A process that does not run moves no bytes either, whatever phase it is in.
        limit_s = min(
            self._limits.of(settled=seen.beat.settled, phase="step" if rank in frozen else seen.beat.phase)
            for rank, seen in working.items()
            if rank in frozen or _point(seen.beat) == earliest
        )
        # What has taken long and went on may do so again: steps of a program that are longer than the limit.
        limit_s = max(limit_s, 2 * (self._longest_s or self._first_s))
        return all(self._now_s - seen.moved_s > limit_s for seen in working.values())

    def silent_s(self) -> float | None:
        """Returns for how long no rank has made progress; None while a rank that is at work has not been read lately.

        For programs whose watchers are read: one that does not write says nothing about its rank.
        """
        working = self._working()
        if not working or len(self._seen) < self._world_size or self._frozen(working):
            return None
        return min(self._now_s - seen.moved_s for seen in self._seen.values())

    def explain(self, stacks: Mapping[int, str], flights: Mapping[int, Flights] | None = None) -> Hang:
        """Returns who is behind and where.

        Args:
            stacks: what ranks have written down, by rank; those that do not run have none.
            flights: which collectives they have begun, where that is recorded; likewise.
        """
        flights = flights or {}
        working = self._working()
        frozen = self._frozen(working)
        behind = frozen or _behind(working, stacks, flights)
        first = working[behind[0]]
        named = set(behind)
        others = [rank for rank in working if rank not in named]
        several = len(behind) > 1
        state = f"{'do' if several else 'does'} not run (stopped or lost), " if frozen else "are " if several else "is "
        phase = _IN_WORDS.get(first.beat.phase, first.beat.phase)
        where = f"in {phase} at step {first.beat.step} since {self._now_s - first.moved_s:.0f} s"
        differ = disagreement(flights)
        return Hang(
            ranks=tuple(behind),
            host=first.beat.host,
            step=first.beat.step,
            phase=first.beat.phase,
            what=f"{state}{where}{_waiting(others, stacks, flights, behind)}{f'; {differ}' if differ else ''}",
        )

    def _learn(self, beat: Beat, seconds: float) -> None:
        """Takes note of how long a rank stood still between two marks; saves and starts have limits of their own."""
        if beat.phase in ("start", "group", "save", *NOT_WATCHED):
            return
        if beat.settled:
            self._longest_s = max(self._longest_s, seconds)
        else:
            self._first_s = max(self._first_s, seconds)

    def _working(self) -> dict[int, _Seen]:
        return {rank: seen for rank, seen in self._seen.items() if seen.beat.phase not in NOT_WATCHED}

    def _frozen(self, working: Mapping[int, _Seen]) -> list[int]:
        limits = self._limits
        return [
            rank
            for rank, seen in working.items()
            if self._now_s - seen.ran_s > 0.5 * limits.of(settled=seen.beat.settled)
        ]


def _point(beat: Beat) -> tuple[int, int]:
    """Returns how far a rank is in the program."""
    return beat.step, _STAGES.get(beat.phase, 0)


def _behind(working: Mapping[int, _Seen], stacks: Mapping[int, str], flights: Mapping[int, Flights]) -> list[int]:
    """Returns the ranks at the earliest point; of several, those that have not come, or that are not in an exchange."""
    points = {rank: (*_point(seen.beat), seen.beat.marks) for rank, seen in working.items()}
    first = min(points.values())
    earliest = [rank for rank, point in points.items() if point == first]
    # Ranks that have begun fewer collectives than others which wait.
    furthest: dict[str, int] = {}
    for groups in flights.values():
        for key, flight in groups.items():
            if flight.waits_in is not None:
                furthest[key] = max(furthest.get(key, 0), flight.begun)
    own = {rank: flights.get(rank, {}) for rank in earliest}
    absent = [
        rank
        for rank in earliest
        if any(collective.begun < furthest.get(key, 0) for key, collective in own[rank].items())
    ]
    # One that is waited for in a group may itself wait in another.
    free = [rank for rank in absent if all(collective.waits_in is None for collective in own[rank].values())]
    if absent:
        return sorted(free or absent)
    busy = [rank for rank in earliest if rank in stacks and exchange_in(stacks[rank]) is None]
    return busy or earliest


def _waiting(others: list[int], stacks: Mapping[int, str], flights: Mapping[int, Flights], behind: list[int]) -> str:
    if not others:
        return "; no rank stands out" if len(behind) > 1 else ""
    found = [name for rank in others if rank in stacks and (name := exchange_in(stacks[rank]))]
    waits = {
        (key, flight.waits_in)
        for rank in others
        for key, flight in flights.get(rank, {}).items()
        if flight.waits_in is not None
    }
    name = max(set(found), key=found.count) if found else None
    if waits:
        # Of several groups, one of those that are behind; there, what the most advanced ranks wait in.
        theirs = {
            (key, collective) for key, collective in waits if any(key in flights.get(rank, {}) for rank in behind)
        }
        name = str(max(theirs or waits, key=lambda wait: (wait[1].number, wait[0]))[1])
    verb = "rank waits" if len(others) == 1 else "ranks wait"
    return f"; {len(others)} {verb} for {'them' if len(behind) > 1 else 'it'}" + (f" in {name}" if name else "")


def exchange_in(stack: str) -> str | None:
    """Returns the exchange that a rank's main thread waits in, None where its innermost frames are in none.

    Args:
        stack: what the rank wrote: "main thread 0x...", then faulthandler's dump.
    """
    main = re.match(r"main thread (0x[0-9a-f]+)", stack)
    if main is None:
        return None
    part = re.search(rf"hread {main[1]}[^\n]*\n((?:  [^\n]*\n?)+)", stack)
    names = re.findall(r"^  File .* in (\S+)$", part[1], re.MULTILINE)[:_INNERMOST] if part else []
    return next((_EXCHANGES[name] for name in names if name in _EXCHANGES), None)
