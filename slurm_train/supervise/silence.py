"""Whether a program that makes no marks is slow or dead, and who waits for whom. Pure.

From outside a rank shows what it has done in a stretch of time: how much its log has grown, what its processes have
read and written, how long they and its child processes have computed, what its GPU did, how many collectives are over.
Processor time alone proves nothing: a rank that waits for a collective on a GPU computes all the time. So it does not
count while the rank is in the same collective, at the same place, as before.

A program may be silent for good reasons: a server waits for requests, an evaluator for the next checkpoint. Silence of
all ranks is a hang only where something shows that a rank is waited for in vain: an exchange or a data loader that
another rank waits in, a stopped process, one that the kernel does not let go.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import NamedTuple

from slurm_train.formatting import duration
from slurm_train.rundir.signs import Signs
from slurm_train.supervise.hang import Flights, Hang, disagreement
from slurm_train.supervise.stragglers import ranks_in_words

# --- slow or dead ---

_BUSY_SHARE = 0.05
"""Of a core. Threads of loggers and monitors take 1 to 2 %, a rank that waits for gloo 0.3 % (measured)."""
_BUSY_BYTES_PER_S = 16384.0
"""A logger that samples the machine reads some 5 KB/s of /proc; a file system slower than this is no use either."""
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Counters of a rank's processes at one moment; all of them only grow, but for `gpu_memory_busy`."""

    time_s: float
    log_bytes: int = 0
    """Size of the file that the rank's stdout goes to; 0 where it is none."""
    io_bytes: int = 0
    """Read and written by the rank's processes."""
    own_cpu_s: float = 0.0
    """Processor time of the rank's own process, and time in which its main thread waited for a CPU."""
    child_cpu_s: float = 0.0
    """Of its descendants: compilers, data loaders."""
    collectives: int = 0
    """Begun and over, of all groups, as its flight record says; 0 where there is none."""
    written_back: int = 0
    """Pages that the node has written to its file systems, of whatever process."""
    is_held: bool = False
    """Whether the kernel holds the rank's process (state D), as in fsync."""
    gpu_memory_busy: bool = False
    """Whether its GPU reads or writes memory. A collective that waits keeps the GPU at 100 % without doing so."""


def sign_of_life(before: Sample, after: Sample, *, waits: bool) -> str:
    """Returns what a rank has done between two samples, "" for nothing that counts.

    Args:
        before: the earlier sample.
        after: the later one.
        waits: whether it is in the same collective, at the same place of the program, as at the earlier one.
    """
    seconds = max(after.time_s - before.time_s, 1e-3)
    if after.log_bytes != before.log_bytes:
        return "log"
    if after.io_bytes - before.io_bytes > _BUSY_BYTES_PER_S * seconds:
        return "files"
    # What an fsync of minutes writes is not counted for the process that waits for it.
    written_back = (after.written_back - before.written_back) * _PAGE_BYTES
    if before.is_held and after.is_held and written_back > _BUSY_BYTES_PER_S * seconds:
        return "files"
    if after.child_cpu_s - before.child_cpu_s > _BUSY_SHARE * seconds:
        return "children"
    if after.collectives != before.collectives:
        return "collectives"
    if waits:
        return ""
    if after.own_cpu_s - before.own_cpu_s > _BUSY_SHARE * seconds:
        return "processor"
    return "gpu" if after.gpu_memory_busy else ""


# --- what a stack says ---


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        line = f"{PurePath(self.file).name}:{self.line}"
        return line if self.function == "<module>" else f"{self.function} ({line})"


_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3[^/]*/|^<|/slurm_train/worker/")
_EXCHANGES = "/torch/distributed/"
_LOADER = "/torch/utils/data/dataloader.py"
# Wrappers of torch around its collectives.
_WRAPPERS = ("wrapper", "inner", "decorate_context")


def frames_of(stack: str) -> list[Frame]:
    """Returns the main thread's frames, innermost first; none where the stack is not there.

    Args:
        stack: "main thread 0x...", then faulthandler's dump of all threads.
    """
    main = re.match(r"main thread (0x[0-9a-f]+)", stack)
    if main is None:
        return []
    part = re.search(rf"hread {main[1]}[^\n]*\n((?:  [^\n]*\n?)+)", stack)
    matches = _FRAME.finditer(part[1]) if part else ()
    return [Frame(match["file"], int(match["line"]), match["function"]) for match in matches]


def waits_in(frames: Sequence[Frame]) -> str:
    """Returns what the innermost frames wait for, e.g. "barrier", "the data loader"; "" where they work."""
    for frame in frames:
        if _EXCHANGES in frame.file:
            if frame.function not in _WRAPPERS:
                return frame.function.lstrip("_")
        elif frame.file.endswith(_LOADER):
            return "the data loader"
        elif not _LIBRARY.search(frame.file):
            # The program's own code called nothing that waits.
            return ""
    return ""


def place_of(frames: Sequence[Frame]) -> str:
    """Returns where a rank is, "" if unknown: its innermost frame outside of libraries.

    E.g. "load (train.py:31)"; "train.py:80" for what is in no function.
    """
    outside = (frame for frame in frames if not _LIBRARY.search(frame.file))
    return str(next(outside, next(iter(frames), "")))


# --- who waits for whom ---


def is_evident(signs: Mapping[int, Signs]) -> bool:
    """Returns whether silent ranks wait for what cannot come, and are not silent for reasons of their own."""
    return any(rank.waits or rank.state in ("T", "t", "D") for rank in signs.values() if not rank.has_ended)


def explain(
    signs: Mapping[int, Signs], *, silent_s: float, stacks: Mapping[int, str], flights: Mapping[int, Flights]
) -> Hang:
    """Returns which ranks are waited for, and where they are.

    Args:
        signs: of all ranks; at least one has not ended.
        silent_s: how long no rank has shown a sign of life.
        stacks: what ranks have written down, by rank; a stopped one has none.
        flights: which collectives they have begun, where that is recorded.
    """
    working = {rank: its for rank, its in sorted(signs.items()) if not its.has_ended}
    frames = {rank: frames_of(stacks.get(rank, "")) for rank in working}
    waits = {rank: _wait_of(rank, working[rank], flights) for rank in working}
    behind = _behind(working, waits, flights)
    first = behind[0]
    others = [rank for rank in working if rank not in set(behind)]
    sentence = f"{_doing(working[first], frames[first], waits[first], several=len(behind) > 1)}"
    sentence += f", without a sign of life for {duration(silent_s)}"
    if others:
        names = [waits[rank] for rank in others if waits[rank]]
        name = max(set(names), key=names.count) if names else ""
        verb = "rank waits" if len(others) == 1 else "ranks wait"
        sentence += f"; {len(others)} {verb} for {'them' if len(behind) > 1 else 'it'}" + (
            f" in {name}" if name else ""
        )
    elif len(behind) > 1:
        sentence += "; no rank stands out"
    ended = [rank for rank, its in sorted(signs.items()) if its.has_ended]
    if ended:
        sentence += f"; {ranks_in_words(tuple(ended))} {'have' if len(ended) > 1 else 'has'} ended"
    differ = disagreement(flights)
    return Hang(
        ranks=tuple(behind),
        host=working[first].host,
        step=0,
        phase="script",
        what=sentence + (f"; {differ}" if differ else ""),
    )


def _wait_of(rank: int, signs: Signs, flights: Mapping[int, Flights]) -> str:
    open_ones = [flight.waits_in for flight in flights.get(rank, {}).values() if flight.waits_in is not None]
    # gloo's barrier and others have no record that is more telling than the stack.
    return str(max(open_ones, key=lambda collective: collective.number)) if open_ones else signs.waits


def _behind(working: Mapping[int, Signs], waits: Mapping[int, str], flights: Mapping[int, Flights]) -> list[int]:
    """Returns the ranks that the others wait for: stopped, held by the kernel, absent from a collective, or at work."""
    for states in (("T", "t"), ("D",)):
        held = [rank for rank, its in working.items() if its.state in states and (states != ("D",) or not waits[rank])]
        if held:
            return held
    furthest: dict[str, int] = {}
    for groups in flights.values():
        for key, flight in groups.items():
            if flight.waits_in is not None:
                furthest[key] = max(furthest.get(key, 0), flight.begun)
    absent = [
        rank
        for rank in working
        if any(flight.begun < furthest.get(key, 0) for key, flight in flights.get(rank, {}).items())
    ]
    # One that is waited for in a group may itself wait in another.
    free = [rank for rank in absent if not waits[rank]]
    elsewhere = [rank for rank in working if waits[rank] in ("", "the data loader")]
    return free or (absent if absent and not elsewhere else []) or elsewhere or list(working)


def _doing(signs: Signs, frames: Sequence[Frame], wait: str, *, several: bool) -> str:
    """Returns what a rank does, e.g. "does not run (stopped)", "is in load (train.py:31)"."""
    place = place_of(frames)
    verb = "are" if several else "is"
    if signs.state in ("T", "t"):
        return f"{'do' if several else 'does'} not run (stopped)"
    at = f" at {place}" if place else ""
    if wait:
        return f"{'wait' if several else 'waits'} in {wait}{at}"
    if signs.state == "D":
        return f"{verb} held by the kernel (a file system that does not answer?){at}"
    return f"{verb} in {place}" if place else f"{verb} at an unknown place (no stack)"


def idle_sentence(signs: Mapping[int, Signs], *, after_s: float) -> str:
    """Returns which ranks' GPUs have done nothing for so long, "" for none."""
    idle = {rank: its.gpu_idle_s for rank, its in signs.items() if its.gpu_idle_s is not None and not its.has_ended}
    long = [rank for rank, seconds in idle.items() if seconds is not None and seconds >= after_s]
    if not long:
        return ""
    least_s = min(seconds for rank, seconds in idle.items() if rank in long and seconds is not None)
    subject, verb = ("GPU", "has") if len(long) == 1 else ("GPUs", "have")
    return f"the {subject} of {ranks_in_words(tuple(long))} {verb} done nothing for {duration(least_s)}"
