"""How many processes read a map-style data set ahead where `data.num_workers=auto`.

The samples, their order and random numbers are the same for any number, so `auto` may go by what it finds when a run
starts: the CPUs of this rank, and what a trial process says that reads some samples as a worker would. Workers are
started only where they pay and nothing speaks against them. Without torch, for the plan.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

AUTO = "auto"
MOST_WORKERS = 8
"""Each is a copy of the training process with batches of its own; a file server has to serve those of all ranks."""
SPARE_CPUS = 2
"""Left to each rank: one for the training thread, one for NCCL and the threads that save."""
WORTH_S = 5e-3
"""Reading a micro-batch in less is left to the training thread: measured, workers on busy CPUs cost it as much."""
_HANDED_OVER_PER_S = 1e9
"""Bytes; a micro-batch of 10 MB that lay in memory took 14 ms to read, and 23 ms to get from a worker."""
TRIAL_LIMIT_S = 60.0
_TRIED = 8
"""Samples that the trial reads at most in each of two parts, after a first one that may open files."""
_BATCHES_AHEAD = 3
"""Micro-batches of each worker in shared memory: two that are ready, and one that is read."""
_SHARED_MEMORY = "/dev/shm"
T = TypeVar("T")


def cpus_of_rank(env: Mapping[str, str], *, ranks_on_node: int) -> int:
    """Returns the CPUs that this rank may use without taking those of another rank of its node.

    Args:
        env: of the process; Slurm's variables say what the job has of a node that does not bind tasks.
        ranks_on_node: ranks that share the node.
    """
    bound = len(os.sched_getaffinity(0))
    on_node = env.get("SLURM_CPUS_ON_NODE", "")
    if not on_node.isdecimal():
        # Nothing says whether the ranks are bound one by one.
        return bound // ranks_on_node
    # A process that may use the whole node is not bound.
    of_affinity = bound // ranks_on_node if bound == os.cpu_count() else bound
    limits = [of_affinity, int(on_node) // ranks_on_node]
    per_task = env.get("SLURM_CPUS_PER_TASK", "")
    if per_task.isdecimal():
        limits.append(int(per_task))
    return min(limits)


def most_workers(cpus: int) -> int:
    """Returns how many processes a rank with so many CPUs has at most."""
    return max(0, min(MOST_WORKERS, cpus - SPARE_CPUS))


class ReadingCost(NamedTuple):
    """What the trial process found of one micro-batch, or of one sample."""

    seconds: float
    num_bytes: float


@dataclass(frozen=True, kw_only=True)
class AutoWorkers:
    """Chooses the number of workers when the first micro-batch is asked for."""

    cpus: int
    """Of this rank."""
    ranks_on_node: int = 1
    """Ranks that share /dev/shm."""
    note: Callable[[str], None] = lambda _text: None
    """Gets a line about the choice, where there was one to make."""
    trial_limit_s: float = TRIAL_LIMIT_S
    """A trial process that takes longer is ended: a worker would hang, too."""

    def choose(
        self,
        read: Callable[[list[Any]], Any],
        keys: list[Any],
        *,
        num_bytes: Callable[[Any], int],
        prepare: Callable[[], None],
        obstacle: Callable[[], str | None],
    ) -> int:
        """See `data.mapstyle.WorkerChoice`. Starts a process that reads some samples and ends."""
        most = most_workers(self.cpus)
        # Workers of another start method import everything anew, and take a pickled copy of the data set.
        if not most or multiprocessing.get_start_method(allow_none=True) not in (None, "fork"):
            return 0
        problem = obstacle()
        if problem is not None:
            self.note(f"data.num_workers=auto: 0, since {problem}")
            return 0
        cost = _tried(read, keys, num_bytes=num_bytes, prepare=prepare, limit_s=self.trial_limit_s)
        if isinstance(cost, str):
            self.note(f"data.num_workers=auto: 0, since a trial process {cost}")
            return 0
        if cost.seconds < WORTH_S + cost.num_bytes / _HANDED_OVER_PER_S:
            return 0
        fitting = min(most, _fitting_workers(cost.num_bytes, ranks=self.ranks_on_node))
        limit = "" if fitting == most else f"; {_SHARED_MEMORY} has no room for more"
        self.note(
            f"data.num_workers=auto: {fitting}, since a micro-batch takes {1000 * cost.seconds:.3g} ms to read and "
            f"this rank has {self.cpus} CPUs{limit}"
        )
        return fitting


def _fitting_workers(num_bytes: float, *, ranks: int) -> int:
    """Returns for how many workers of each rank half of the free shared memory has room."""
    try:
        disk = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return 0
    free = disk.f_bavail * disk.f_frsize / 2 / ranks
    return int(free // max(1.0, _BATCHES_AHEAD * num_bytes))


def _tried(
    read: Callable[[list[Any]], Any],
    keys: list[Any],
    *,
    num_bytes: Callable[[Any], int],
    prepare: Callable[[], None],
    limit_s: float,
) -> ReadingCost | str:
    """Returns what a micro-batch costs a process that reads it, or in words why a process cannot."""

    def cost_of_batch() -> ReadingCost:
        read(keys[:1])
        costs = [_cost_of_one(read, part, num_bytes) for part in _parts(keys[1:] or keys)]
        # The least: a file server may have been busy meanwhile.
        return ReadingCost(*(len(keys) * min(values) for values in zip(*costs, strict=True)))

    outcome = in_trial_process(cost_of_batch, prepare=prepare, limit_s=limit_s)
    if outcome.value is not None:
        return outcome.value
    return outcome.problem or f"did not read {1 + 2 * _TRIED} samples within {limit_s:g} s"


@dataclass(frozen=True)
class TrialOutcome(Generic[T]):
    """What a trial process returned, or in words what became of it; nothing of both where it took too long."""

    value: T | None = None
    problem: str = ""


def in_trial_process(work: Callable[[], T], *, prepare: Callable[[], None], limit_s: float) -> TrialOutcome[T]:
    """Does work that reads a data set in a forked process.

    It is not read in this process: files that a data set opens at its first sample would be shared by all workers.

    Args:
        work: reads, and returns what can be pickled.
        prepare: called first in that process.
        limit_s: seconds after which it is ended.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def try_reading() -> None:
        try:
            prepare()
            sender.send(TrialOutcome(work()))
        except Exception as err:
            # If it is not for the process, the training thread meets it in its turn.
            sender.send(TrialOutcome(problem=f"could not read: {type(err).__name__}: {str(err)[:200]}"))

    process = context.Process(target=try_reading, daemon=True)
    process.start()
    sender.close()
    outcome: TrialOutcome[T] = TrialOutcome()
    try:
        if receiver.poll(limit_s):
            outcome = TrialOutcome(problem="ended without a word")
            with suppress(EOFError):
                outcome = receiver.recv()
    finally:
        receiver.close()
        process.join(1)
        if process.is_alive():
            process.kill()
            process.join()
    return outcome


def _parts(keys: list[Any]) -> list[list[Any]]:
    """Returns at most two parts of some samples; no sample is in both, which a cache would make cheap."""
    size = min(_TRIED, max(1, len(keys) // 2))
    return [part for part in (keys[:size], keys[size : 2 * size]) if part]


def _cost_of_one(read: Callable[[list[Any]], Any], keys: list[Any], num_bytes: Callable[[Any], int]) -> ReadingCost:
    """Returns what one of some samples costs that are read together."""
    waited_s = _waited_for_cpu_s()
    start_s = time.perf_counter()
    batch = read(keys)
    took_s = time.perf_counter() - start_s - (_waited_for_cpu_s() - waited_s)
    return ReadingCost(took_s / len(keys), num_bytes(batch) / len(keys))


def _waited_for_cpu_s() -> float:
    """Returns how long this thread could run and got no CPU, which workers would not change; 0 where nothing says it.

    The second number of `schedstat` is that time in nanoseconds (Documentation/scheduler/sched-stats.rst of Linux).
    """
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
