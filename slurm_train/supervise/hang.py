"""Which rank hangs: heartbeats over time and the ranks' flight records, reduced to one sentence. Pure.

In synchronous training one rank that makes no progress stops all others at their next exchange. So in a hang no rank
makes progress, and the question is which rank is behind. Candidates in this order: a process that does not run at all;
the rank at the earliest point of the program; the rank that has not begun the collective in which others wait; the rank
whose stack is in no exchange. Every rank numbers the collectives of a group alike, so the others wait for a rank that
has begun fewer of them, and two ranks that have begun different collectives under the same number wait for ever.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from slurm_train.rundir.heartbeat import NOT_WATCHED, Beat, Limits
from slurm_train.supervise.stragglers import ranks_in_words

# torch's name of the first group.
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
    """torch's description of the group, e.g. "mesh_tp"."""

    def __str__(self) -> str:
        size = f" of {self.elements:,} elements" if self.elements else ""
        group = f" in {self.group}" if self.group not in ("", "undefined", _ALL_RANKS) else ""
        return f"{self.name} #{self.number}{size}{group}"

    @property
    def kind(self) -> str:
        """What must be equal on all ranks; in collectives that gather or scatter, sizes may differ."""
        return f"{self.name} of {self.elements:,} elements" if self.name in ("all_reduce", "broadcast") else self.name


@dataclass(frozen=True, slots=True)
class Flight:
    """The collectives of one group that one rank has begun."""

    last_begun: int
    """Number of the newest collective that it has begun."""
    last_ended: int
    """Number of the newest collective that has ended for it."""
    newest: tuple[Collective, ...]

    @property
    def waits_in(self) -> Collective | None:
        """The oldest collective that has begun and not ended, None where there is none."""
        unfinished = [collective for collective in self.newest if collective.number > self.last_ended]
        return min(unfinished, key=lambda collective: collective.number, default=None)


Flights = Mapping[str, Flight]
"""The collectives of one rank, by backend and name of the group, e.g. "nccl 0"."""


def read_flights(text: str | bytes) -> Flights:
    """Returns the flight records that a rank has left, {} where nothing can be read.

    Args:
        text: JSON as `distributed.group` writes it.
    """
    collectives: dict[str, list[Collective]] = {}
    states: dict[str, Mapping[str, Any] | None] = {}
    try:
        for record in json.loads(text):
            for entry in record["entries"]:
                # "nccl:all_reduce", "gloo:broadcast"; NCCL's coalesced ones have longer names.
                backend, _, name = entry["profiling_name"].rpartition(":")
                key = f"{backend} {entry['process_group'][0]}"
                elements = entry["input_sizes"] or []
                collectives.setdefault(key, []).append(
                    Collective(
                        int(entry["collective_seq_id"]),
                        name,
                        sum(math.prod(sizes) for sizes in elements),
                        str(entry["process_group"][1]),
                    )
                )
                # Each recorder numbers the groups of its process; their names are the same on all ranks.
                states[key] = record["pg_status"].get(str(entry["pg_id"]))
        return {
            key: Flight(
                int(state["last_enqueued_collective"]), int(state["last_completed_collective"]), tuple(collectives[key])
            )
            for key, state in states.items()
            if state is not None
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return {}


def disagreement(flights: Mapping[int, Flights]) -> str:
    """Returns which different collectives ranks have begun under the same number of a group, "" where they agree."""
    kinds_by_number: dict[tuple[str, int], dict[str, tuple[int, Collective]]] = {}
    for rank, groups in sorted(flights.items()):
        for key, flight in groups.items():
            for collective in flight.newest:
                kinds_by_number.setdefault((key, collective.number), {}).setdefault(collective.kind, (rank, collective))
    for (_, number), kinds in sorted(kinds_by_number.items()):
        if len(kinds) > 1:
            parts = [f"rank {rank} has begun {kind}" for kind, (rank, _) in kinds.items()]
            _, first_collective = next(iter(kinds.values()))
            group = first_collective.group
            members = "all ranks" if group in ("", _ALL_RANKS) else group
            return f"as collective #{number} of {members} " + ", but ".join(parts)
    return ""


def odd_ranks(flights: Mapping[int, Flights]) -> list[int]:
    """Returns the few ranks that have begun another collective than most under the same number of a group; [] for none.

    E.g. one that came to the end of its program, and waits there for all.
    """
    ranks_by_number: dict[tuple[str, int], dict[str, list[int]]] = {}
    for rank, groups in sorted(flights.items()):
        for key, flight in groups.items():
            for collective in flight.newest:
                ranks_by_number.setdefault((key, collective.number), {}).setdefault(collective.kind, []).append(rank)
    for _, ranks_by_kind in sorted(ranks_by_number.items()):
        if len(ranks_by_kind) > 1:
            fewest, *others = sorted(ranks_by_kind.values(), key=len)
            return fewest if len(fewest) < len(others[0]) else []
    return []


def recording_environment(torch_version: str) -> dict[str, str]:
    """Returns the variables that make torch keep flight records, {} for versions that do so by default.

    Args:
        torch_version: e.g. "2.6.0+cu124". From 2.9 on the variable has another name, and 2000 is its default.
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
"""Name of a phase in a message, where it differs from the name in the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """No rank makes progress."""

    ranks: tuple[int, ...]
    """The ranks that are behind; all ranks where they do not differ."""
    host: str
    """Node of the first of them."""
    step: int
    phase: str
    activity: str
    """What they do, e.g. "is in data loading at step 1204 since 310 s; 7 ranks wait for it in all_reduce"."""

    def __str__(self) -> str:
        return f"{ranks_in_words(self.ranks)} on {self.host} {self.activity}"


@dataclass(slots=True)
class _Observation:
    beat: Beat
    moved_s: float
    """When its marks last changed."""
    ran_s: float
    """When its count of beats last changed."""


class Observer:
    """Follows the heartbeats of an attempt.

    Args:
        limits: how long all ranks may make no progress.
        world_size: ranks; while some have no heartbeat yet, the rendezvous has a time-out of its own.
    """

    def __init__(self, limits: Limits, *, world_size: int) -> None:
        self._limits = limits
        self._world_size = world_size
        self._observations: dict[int, _Observation] = {}
        # Time that was watched until the newest look began, and until it ended.
        self._now_s = 0.0
        self._until_s = 0.0
        self._ended_s: float | None = None
        self._longest_s = 0.0
        """The longest time between two marks of a rank after its first step."""
        self._first_s = 0.0
        """The longest time between two marks of a rank before the end of its first step."""

    def look(self, beats: Mapping[int, Beat], *, began_s: float, ended_s: float) -> None:
        """Takes a reading; one that has no heartbeat, or was taken before, is ignored, and its time does not count.

        A value that is equal in two readings counts as unchanged from the end of the first reading to the start of
        the second, so a reading may take longer than the limit. One slow reading or pause counts as at most half of the
        limit: a stuck file server alone never looks like a hang.

        Args:
            beats: by rank.
            began_s: when the reading began, in seconds without those in which the job is suspended.
            ended_s: when it ended.
        """
        before_s = self._ended_s
        self._ended_s = ended_s
        if not beats or before_s == ended_s:
            return
        longest_s = self._limits.steady_s / 2
        self._now_s = self._until_s + (0.0 if before_s is None else min(began_s - before_s, longest_s))
        self._until_s = self._now_s + min(ended_s - began_s, longest_s)
        for rank, beat in beats.items():
            previous = self._observations.get(rank)
            moved = previous is None or (beat.marks, beat.step) != (previous.beat.marks, previous.beat.step)
            ran = previous is None or beat.beats != previous.beat.beats
            if previous is not None and moved:
                self._learn(previous.beat, self._until_s - previous.moved_s)
            # One that was stopped for longer than the limit, and is continued, has the whole limit again.
            is_back = previous is not None and ran and self._until_s - previous.ran_s > self._limits.steady_s
            moved_s = self._until_s if previous is None or moved or is_back else previous.moved_s
            ran_s = self._until_s if previous is None or ran else previous.ran_s
            self._observations[rank] = _Observation(beat, moved_s, ran_s)

    def restart(self) -> None:
        """Gives all ranks the whole limit again: they were stopped from outside."""
        for rank, observation in self._observations.items():
            self._observations[rank] = replace(observation, moved_s=self._until_s, ran_s=self._until_s)

    def is_hung(self) -> bool:
        """Returns whether no working rank has made progress for longer than the limit of the ranks that are behind."""
        working = self._working()
        if not working or len(self._observations) < self._world_size:
            return False
        frozen = self._frozen(working)
        earliest = min(_point(observation.beat) for observation in working.values())
        # A process that does not run moves no bytes either, whatever phase it is in.
        limits_s = []
        for rank, observation in working.items():
            beat = observation.beat
            if rank in frozen:
                limits_s.append(self._limits.of(settled=beat.settled, phase="step"))
            elif _point(beat) == earliest:
                limits_s.append(self._limits.of(settled=beat.settled, phase=beat.phase))
        limit_s = min(limits_s)
        # A program that has taken long and then continued may take as long again: its steps are longer than the limit.
        limit_s = max(limit_s, 2 * (self._longest_s or self._first_s))
        return all(self._now_s - observation.moved_s > limit_s for observation in working.values())

    def silent_s(self) -> float | None:
        """Returns for how long no rank has made progress; None while a working rank has had no new reading lately.

        For programs that are read through their watchers: a watcher that does not write says nothing about its rank.
        """
        working = self._working()
        if not working or len(self._observations) < self._world_size or self._frozen(working):
            return None
        return min(self._now_s - observation.moved_s for observation in self._observations.values())

    def explain(self, stacks: Mapping[int, str], flights: Mapping[int, Flights] | None = None) -> Hang:
        """Returns which ranks are behind, and where they are.

        Args:
            stacks: stacks that ranks have written, by rank; those that do not run have none.
            flights: which collectives they have begun, by rank, where that is recorded.
        """
        flights = flights or {}
        working = self._working()
        frozen = self._frozen(working)
        behind = frozen or _behind(working, stacks, flights)
        first_behind = working[behind[0]]
        named = set(behind)
        waiting = [rank for rank in working if rank not in named]
        are_several = len(behind) > 1
        if frozen:
            state = f"{'do' if are_several else 'does'} not run (stopped or lost), "
        else:
            state = "are " if are_several else "is "
        phase = _IN_WORDS.get(first_behind.beat.phase, first_behind.beat.phase)
        position = f"in {phase} at step {first_behind.beat.step} since {self._now_s - first_behind.moved_s:.0f} s"
        activity = f"{state}{position}{_waiting(waiting, stacks, flights, behind)}"
        difference = disagreement(flights)
        if difference:
            activity += f"; {difference}"
        return Hang(
            ranks=tuple(behind),
            host=first_behind.beat.host,
            step=first_behind.beat.step,
            phase=first_behind.beat.phase,
            activity=activity,
        )

    def _learn(self, beat: Beat, seconds: float) -> None:
        """Records the time of a rank between two marks; saves and starts have their own limits and do not count."""
        if beat.phase in ("start", "group", "save", *NOT_WATCHED):
            return
        if beat.settled:
            self._longest_s = max(self._longest_s, seconds)
        else:
            self._first_s = max(self._first_s, seconds)

    def _working(self) -> dict[int, _Observation]:
        return {
            rank: observation
            for rank, observation in self._observations.items()
            if observation.beat.phase not in NOT_WATCHED
        }

    def _frozen(self, working: Mapping[int, _Observation]) -> list[int]:
        limits = self._limits
        return [
            rank
            for rank, observation in working.items()
            if self._now_s - observation.ran_s > 0.5 * limits.of(settled=observation.beat.settled)
        ]


def _point(beat: Beat) -> tuple[int, int]:
    """Returns how far a rank is in the program."""
    return beat.step, _STAGES.get(beat.phase, 0)


def _behind(
    working: Mapping[int, _Observation], stacks: Mapping[int, str], flights: Mapping[int, Flights]
) -> list[int]:
    """Returns the ranks at the earliest point; of several, those absent from a collective, or not in an exchange."""
    points = {rank: (*_point(observation.beat), observation.beat.marks) for rank, observation in working.items()}
    earliest_point = min(points.values())
    earliest = [rank for rank, point in points.items() if point == earliest_point]
    absent = absent_ranks(earliest, flights)
    if absent:
        # A rank that others wait for in one group may itself wait in another group.
        free = []
        for rank in absent:
            if all(flight.waits_in is None for flight in flights.get(rank, {}).values()):
                free.append(rank)
        return sorted(free or absent)
    busy = [rank for rank in earliest if rank in stacks and exchange_in(stacks[rank]) is None]
    return busy or earliest


def absent_ranks(ranks: Iterable[int], flights: Mapping[int, Flights]) -> list[int]:
    """Returns those of some ranks that have begun fewer collectives of a group than others which wait in it."""
    furthest: dict[str, int] = {}
    for groups in flights.values():
        for key, flight in groups.items():
            if flight.waits_in is not None:
                furthest[key] = max(furthest.get(key, 0), flight.last_begun)
    absent = []
    for rank in ranks:
        if any(flight.last_begun < furthest.get(key, 0) for key, flight in flights.get(rank, {}).items()):
            absent.append(rank)
    return absent


def _waiting(waiting: list[int], stacks: Mapping[int, str], flights: Mapping[int, Flights], behind: list[int]) -> str:
    """Returns the part of the sentence about the ranks that wait."""
    if not waiting:
        return "; no rank stands out" if len(behind) > 1 else ""
    exchanges = []
    for rank in waiting:
        exchange = exchange_in(stacks[rank]) if rank in stacks else None
        if exchange is not None:
            exchanges.append(exchange)
    waits: set[tuple[str, Collective]] = set()
    for rank in waiting:
        for key, flight in flights.get(rank, {}).items():
            if flight.waits_in is not None:
                waits.add((key, flight.waits_in))
    name = max(set(exchanges), key=exchanges.count) if exchanges else None
    if waits:
        # Of several groups, one that has a rank which is behind; there, the collective of the most advanced ranks.
        keys_behind = {key for rank in behind for key in flights.get(rank, {})}
        relevant = {wait for wait in waits if wait[0] in keys_behind}
        name = str(max(relevant or waits, key=lambda wait: (wait[1].number, wait[0]))[1])
    verb = "rank waits" if len(waiting) == 1 else "ranks wait"
    return f"; {len(waiting)} {verb} for {'them' if len(behind) > 1 else 'it'}" + (f" in {name}" if name else "")


def exchange_in(stack: str) -> str | None:
    """Returns the exchange in which a rank's main thread waits, None where its innermost frames are in no exchange.

    Args:
        stack: what the rank wrote: "main thread 0x...", then faulthandler's dump.
    """
    names = re.findall(r"^  File .* in (\S+)$", main_thread_of(stack), re.MULTILINE)
    for name in names[:_INNERMOST]:
        if name in _EXCHANGES:
            return _EXCHANGES[name]
    return None


def main_thread_of(stack: str) -> str:
    """Returns the lines of the main thread's frames, innermost first; "" where there are none.

    Args:
        stack: what the rank wrote: "main thread 0x...", then faulthandler's dump of all threads.
    """
    main = re.match(r"main thread (0x[0-9a-f]+)", stack)
    if main is None:
        return ""
    # "Thread 0x..." or "Current thread 0x...", then indented lines.
    frames = re.search(rf"hread {main[1]}[^\n]*\n((?:  [^\n]*\n?)+)", stack)
    return frames[1] if frames else ""
