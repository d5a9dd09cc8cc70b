"""Whether a program that makes no marks is slow or dead, and which ranks wait for which. Pure.

From outside one can see what a rank has done during a time: how much its log has grown, what its processes have read
and written, how long they and its child processes have computed, what its GPU did, how many collectives have ended.
Processor time alone proves nothing: a rank that waits for a collective on a GPU computes all the time. So processor
time does not count while the rank is in the same collective, at the same place, as before.

A program may be silent for good reasons: a server waits for requests, an evaluator for the next checkpoint. Silence of
all ranks is a hang only if there is proof that a rank waits for something that cannot come: a rank that waits in an
exchange or a data loader, a stopped process, or a process that is blocked in the kernel.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import NamedTuple

from slurm_train.formatting import duration
from slurm_train.rundir.signs import Group, Signs
from slurm_train.supervise.hang import Flights, Hang, absent_ranks, disagreement, main_thread_of, odd_ranks
from slurm_train.supervise.stragglers import ranks_in_words

# --- slow or dead ---

_BUSY_SHARE = 0.05
"""Of a core. Threads of loggers and monitors take 1 to 2 %, a rank that waits for gloo 0.3 % (measured)."""
_BUSY_BYTES_PER_S = 16384.0
"""A logger that samples the machine reads some 5 KB/s of /proc; a slower file system counts as dead."""
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Counters of a rank's processes at one moment; all numbers only grow."""

    time_s: float
    log_bytes: int = 0
    """Size of the file that the rank's stdout goes to; 0 where it is none."""
    io_bytes: int = 0
    """Read and written by the rank's processes."""
    own_cpu_s: float = 0.0
    """Processor time of the rank's own process, plus the time in which its main thread waited for a CPU."""
    child_cpu_s: float = 0.0
    """The same of its descendants: compilers, data loaders."""
    collectives: int = 0
    """Collectives begun plus collectives ended, of all groups, by its flight record; 0 where there is none."""
    written_back: int = 0
    """Pages that the node has written to its file systems, for any process."""
    is_held: bool = False
    """Whether the rank's process is blocked in the kernel (state D), as in fsync."""
    gpu_memory_busy: bool = False
    """Whether its GPU reads or writes memory. A collective that waits keeps the GPU at 100 % without memory traffic."""


def sign_of_life(earlier: Sample, later: Sample, *, waits: bool) -> str:
    """Returns what a rank has done between two samples, "" for nothing that counts.

    Args:
        earlier: the earlier sample.
        later: the later one.
        waits: whether it is in the same collective, at the same place of the program, as at the earlier one.
    """
    seconds = max(later.time_s - earlier.time_s, 1e-3)
    if later.log_bytes != earlier.log_bytes:
        return "log"
    if later.io_bytes - earlier.io_bytes > _BUSY_BYTES_PER_S * seconds:
        return "files"
    # What a long fsync writes is not counted for the process that waits for it.
    written_back = (later.written_back - earlier.written_back) * _PAGE_BYTES
    if earlier.is_held and later.is_held and written_back > _BUSY_BYTES_PER_S * seconds:
        return "files"
    if later.child_cpu_s - earlier.child_cpu_s > _BUSY_SHARE * seconds:
        return "children"
    if later.collectives != earlier.collectives:
        return "collectives"
    if waits:
        return ""
    if later.own_cpu_s - earlier.own_cpu_s > _BUSY_SHARE * seconds:
        return "processor"
    return "gpu" if later.gpu_memory_busy else ""


# --- stacks ---


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
HANDLES = "The main thread handles "
"""Begin of the line in a rank's stacks that names the exception that it handles, e.g. while it closes its group."""
ENDED_THREAD = "An exception has ended thread "
"""Begin of the line that names a thread and what ended it, e.g. "Thread-1 (feed): OSError: ..."."""
_ENDED_THREAD = re.compile(rf"^{ENDED_THREAD}(.+)$", re.MULTILINE)
_HANDLED = re.compile(rf"^{HANDLES}(.+)$", re.MULTILINE)
_EXCHANGES = "/torch/distributed/"
_LOADER = "/torch/utils/data/dataloader.py"
# Wrappers of torch around its collectives.
_WRAPPERS = ("wrapper", "inner", "decorate_context")


def frames_of(stack: str) -> list[Frame]:
    """Returns the main thread's frames, innermost first; none where there is no stack.

    Args:
        stack: "main thread 0x...", then faulthandler's dump of all threads.
    """
    matches = _FRAME.finditer(main_thread_of(stack))
    return [Frame(match["file"], int(match["line"]), match["function"]) for match in matches]


def waits_in(frames: Sequence[Frame]) -> str:
    """Returns what the innermost frames wait for, e.g. "barrier", "the data loader"; "" where they do not wait."""
    for frame in frames:
        if _EXCHANGES in frame.file:
            if frame.function not in _WRAPPERS:
                return frame.function.lstrip("_")
        elif frame.file.endswith(_LOADER):
            return "the data loader"
        elif not _LIBRARY.search(frame.file):
            # The program's own code has not called anything that waits.
            return ""
    return ""


def place_of(frames: Sequence[Frame]) -> str:
    """Returns where a rank is, "" if unknown: its innermost frame outside of libraries, else its innermost frame.

    E.g. "load (train.py:31)"; "train.py:80" for code outside of functions.
    """
    for frame in frames:
        if not _LIBRARY.search(frame.file):
            return str(frame)
    return str(frames[0]) if frames else ""


# --- which ranks wait for which ---


def is_evident(signs: Mapping[int, Signs]) -> bool:
    """Returns whether it is proved that silent ranks wait for something that cannot come."""
    return any(rank.waits or rank.state in ("T", "t", "D") for rank in signs.values() if not rank.has_ended)


def explain(
    signs: Mapping[int, Signs], *, silent_s: float, stacks: Mapping[int, str], flights: Mapping[int, Flights]
) -> Hang:
    """Returns for which ranks the others wait, and where these ranks are.

    Args:
        signs: of all ranks; at least one has not ended.
        silent_s: how long no rank has shown a sign of life.
        stacks: stacks that ranks have written, by rank; a stopped rank has none.
        flights: which collectives they have begun, where that is recorded.
    """
    working = {rank: rank_signs for rank, rank_signs in sorted(signs.items()) if not rank_signs.has_ended}
    frames = {rank: frames_of(stacks.get(rank, "")) for rank in working}
    waits = {rank: _wait_of(rank, working[rank], flights) for rank in working}
    handled = {rank: match[1] for rank in working if (match := _HANDLED.search(stacks.get(rank, "")))}
    # Ranks that have failed, and have not ended, are what the others wait for. A program may train in a handler, too.
    have_failed = list(handled) if len(handled) < len(working) else []
    behind = have_failed or _behind(working, waits, flights)
    first_behind = behind[0]
    waiting = [rank for rank in working if rank not in set(behind)]
    sentence = _activity(working[first_behind], frames[first_behind], waits[first_behind], are_several=len(behind) > 1)
    if have_failed:
        sentence += f" while it handles {handled[first_behind]}"
    ended_thread = _ENDED_THREAD.search(stacks.get(first_behind, ""))
    if ended_thread:
        sentence += f", after an exception has ended its thread {ended_thread[1]}"
    sentence += f", without a sign of life for {duration(silent_s)}"
    if waiting:
        names = [waits[rank] for rank in waiting if waits[rank]]
        name = max(set(names), key=names.count) if names else ""
        verb = "rank waits" if len(waiting) == 1 else "ranks wait"
        sentence += f"; {len(waiting)} {verb} for {'them' if len(behind) > 1 else 'it'}"
        if name:
            sentence += f" in {name}"
    elif len(behind) > 1:
        sentence += "; no rank stands out"
    ended_ranks = [rank for rank, rank_signs in sorted(signs.items()) if rank_signs.has_ended]
    if ended_ranks:
        sentence += f"; {ranks_in_words(tuple(ended_ranks))} {'have' if len(ended_ranks) > 1 else 'has'} ended"
    difference = disagreement(flights)
    if difference:
        sentence += f"; {difference}"
    return Hang(
        ranks=tuple(behind),
        host=working[first_behind].host,
        step=0,
        phase="script",
        activity=sentence,
    )


def _wait_of(rank: int, signs: Signs, flights: Mapping[int, Flights]) -> str:
    unfinished = [flight.waits_in for flight in flights.get(rank, {}).values() if flight.waits_in is not None]
    # gloo's barrier and others have no record; for them the stack tells what the rank waits in.
    return str(max(unfinished, key=lambda collective: collective.number)) if unfinished else signs.waits


def _behind(working: Mapping[int, Signs], waits: Mapping[int, str], flights: Mapping[int, Flights]) -> list[int]:
    """Returns the ranks that the others wait for: stopped, blocked in the kernel, absent from a collective, or busy."""
    stopped = [rank for rank, signs in working.items() if signs.state in ("T", "t")]
    if stopped:
        return stopped
    blocked = [rank for rank, signs in working.items() if signs.state == "D" and not waits[rank]]
    if blocked:
        return blocked
    absent = absent_ranks(working, flights)
    # A rank that others wait for in one group may itself wait in another group.
    free = [rank for rank in absent if not waits[rank]]
    if free:
        return free
    elsewhere = [rank for rank in working if waits[rank] in ("", "the data loader")]
    odd = [rank for rank in odd_ranks(flights) if rank in working]
    return elsewhere or odd or absent or list(working)


def _activity(signs: Signs, frames: Sequence[Frame], wait: str, *, are_several: bool) -> str:
    """Returns what a rank does, e.g. "does not run (stopped)", "is in load (train.py:31)"."""
    place = place_of(frames)
    verb = "are" if are_several else "is"
    if signs.state in ("T", "t"):
        return f"{'do' if are_several else 'does'} not run (stopped)"
    at = f" at {place}" if place else ""
    if wait:
        return f"{'wait' if are_several else 'waits'} in {wait}{at}"
    if signs.state == "D":
        return f"{verb} held by the kernel (a file system that does not answer?){at}"
    return f"{verb} in {place}" if place else f"{verb} at an unknown place (no stack)"


def idle_sentence(signs: Mapping[int, Signs], *, after_s: float) -> str:
    """Returns which ranks' GPUs have been idle for at least `after_s`, in a sentence; "" for none."""
    idle_s: dict[int, float] = {}
    for rank, rank_signs in signs.items():
        seconds = rank_signs.gpu_idle_s
        if seconds is not None and seconds >= after_s and not rank_signs.has_ended:
            idle_s[rank] = seconds
    if not idle_s:
        return ""
    least_s = min(idle_s.values())
    subject = "GPU" if len(idle_s) == 1 else "GPUs"
    verb = "has" if len(idle_s) == 1 else "have"
    return f"the {subject} of {ranks_in_words(tuple(idle_s))} {verb} done nothing for {duration(least_s)}"


# --- one training or several ---


def apart_sentence(signs: Mapping[int, Signs], group: Group | None) -> str:
    """Returns why the ranks of a script do not train one model, in a sentence; "" where nothing says so.

    Ranks that a launcher has started below several ranks are several programs if two of these have an inner rank of the
    same number: launchers that make up one world give each number once. Where the program itself has joined its ranks
    by torch.distributed, processes of theirs are its own business.

    Args:
        signs: of all ranks.
        group: what rank 0 has of torch.distributed, None where it has not said.
    """
    if group is not None and (group.remark or group.size >= len(signs)):
        return group.remark
    starters = {rank: rank_signs for rank, rank_signs in signs.items() if rank_signs.launcher}
    numbers = Counter(rank_signs.inner_rank for rank_signs in starters.values())
    apart = [rank_signs for rank_signs in starters.values() if numbers[rank_signs.inner_rank] > 1]
    if not apart:
        return ""
    first = apart[0]
    by_launcher = f"ranks of their own by {first.launcher} (WORLD_SIZE={first.inner_size})"
    return (
        f"{len(apart)} of {len(signs)} ranks have each started {by_launcher if first.inner_size else first.launcher}: "
        f"{len(apart)} programs that do not know of each other, and if they train, each trains a model of its own; for "
        "one training, script= names the program itself, which finds the variables that torchrun sets"
    )
