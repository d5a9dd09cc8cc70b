"""A process beside one rank of a script or function: watches it from outside and writes its signs of life.

It reads /proc, the size of the rank's log and, where there is NVML, its GPU. While processor time is the only sign of
life, it also requests the rank's stacks and flight record, since a rank that waits may use the processor. Answers from
shortly before the time-out are left in the run directory, as by ranks of the trainer. It ends with its rank. Started by
path by `watched.start_watcher`; imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import stat
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # The first entry is the folder of this file, whose names would hide others.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    if os.fork():
        os._exit(0)
    os.setsid()

from slurm_train.processes import descendants, environment_of
from slurm_train.rundir.events import first_mark
from slurm_train.rundir.files import write_atomic
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.signs import Signs, SignsFile
from slurm_train.slurm.devices import visible_gpus
from slurm_train.supervise.hang import Flights, read_flights
from slurm_train.supervise.silence import Frame, Sample, frames_of, sign_of_life, waits_in
from slurm_train.worker.watched import ASK

_LONGEST_STRETCH_S = 30.0
_LOOK_EVERY_S = 1.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LEAST_SHARE = 0.1
"""Smallest share of the time in which it could run that a working process gets, on the busiest node that is assumed. A
process that got less was asleep and woken for a moment, e.g. by the watcher's request, which costs 0.1 to 0.3 ms."""
_LONGEST_WAITS = 200
"""Characters of what a rank waits in: the name of a group may be any text, and a rank's record has 1,024 bytes."""
_HEADER = 64
"""Bytes reserved for the first line of the stacks, which names the main thread."""


# --- processes ---


@dataclass(frozen=True, slots=True)
class _Process:
    """One reading of a process."""

    state: str
    parent: int
    cpu_s: float
    main_cpu_s: float
    """Of its main thread; this and the next one are 0 where the kernel does not report them."""
    main_delay_s: float
    """How long its main thread was ready to run but had no CPU."""
    waited_s: float
    """Processor time of its children that have ended."""
    start: int

    def busy_s(self, earlier: _Process | None) -> float:
        """Returns its processor time since an earlier reading, plus what it would have had on a less busy node."""
        if earlier is None:
            return self.cpu_s
        delay_s = self.main_delay_s - earlier.main_delay_s
        computed_s = self.main_cpu_s - earlier.main_cpu_s
        return self.cpu_s - earlier.cpu_s + min(delay_s, computed_s / _LEAST_SHARE)


def read_process(pid: int) -> _Process | None:
    """Returns a process, None where there is none; a zombie has ended."""
    try:
        # The command name before the last ")" may contain blanks.
        words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    if words[0] in ("Z", "X"):
        return None
    user, system, waited_user, waited_system = map(int, words[11:15])
    main_cpu_s, main_delay_s = _main_thread_s(pid)
    return _Process(
        state=words[0],
        parent=int(words[1]),
        cpu_s=(user + system) / _TICKS_PER_S,
        main_cpu_s=main_cpu_s,
        main_delay_s=main_delay_s,
        waited_s=(waited_user + waited_system) / _TICKS_PER_S,
        start=int(words[19]),
    )


def signal_main_thread(pid: int, number: int) -> None:
    """Sends a signal to a process's main thread; the kernel may deliver a signal for the process to any of its threads.

    It is no error if the process has ended, except with glibc before 2.30.

    Raises:
        OSError: with glibc before 2.30: there is no such process.
    """
    send = getattr(ctypes.CDLL(None), "tgkill", None)
    if send is None:
        # glibc before 2.30: the kernel prefers the main thread.
        os.kill(pid, number)
    else:
        # If the thread has ended meanwhile, the next look notices it.
        send(pid, pid, number)


def _main_thread_s(pid: int) -> tuple[float, float]:
    """Returns how long the main thread of a process had a CPU, and how long it waited for one."""
    with contextlib.suppress(OSError, ValueError):
        computed_ns, delay_ns = map(int, Path(f"/proc/{pid}/schedstat").read_text().split()[:2])
        return computed_ns / 1e9, delay_ns / 1e9
    return 0.0, 0.0


def io_bytes(pid: int) -> int:
    """Returns how much a process has read and written, children that have ended included."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split(": ") for line in lines)
    return sum(int(values.get(name, 0)) for name in ("rchar", "wchar", "read_bytes", "write_bytes"))


def catches(pid: int, number: int) -> bool:
    """Returns whether a process has a handler for a signal."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        mask = int(next(line for line in lines if line.startswith("SigCgt:")).split()[1], 16)
        return bool(mask >> (number - 1) & 1)
    return False


def _pages_written_back() -> int:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/vmstat").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("nr_written ")).split()[1])
    return 0


class _Totals:
    """Adds up counters of processes that come and go."""

    def __init__(self) -> None:
        self.total = 0.0
        self._newest: dict[Any, float] = {}

    def add(self, values: dict[Any, float]) -> float:
        """Takes the present counters by process, and returns the sum over all processes and looks so far."""
        self.total += sum(max(0.0, value - self._newest.get(key, 0.0)) for key, value in values.items())
        self._newest = values
        return self.total


class _BusyTime:
    """Adds up the time in which processes that come and go computed, or would have on a less busy node."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._newest: dict[tuple[int, int], _Process] = {}

    def add(self, processes: dict[tuple[int, int], _Process]) -> float:
        """Takes the present readings by process, and returns the sum over all processes and looks so far."""
        self.total_s += sum(process.busy_s(self._newest.get(key)) for key, process in processes.items())
        self._newest = processes
        return self.total_s


@dataclass(slots=True)
class Counters:
    """The counters of a rank's processes."""

    pid: int
    """Process id of the rank."""
    log: Path
    """The file that gets the rank's output, if its stdout is not a file."""
    _main_busy: _BusyTime = field(default_factory=_BusyTime)
    _child_busy: _BusyTime = field(default_factory=_BusyTime)
    _ended_children: _Totals = field(default_factory=_Totals)
    _bytes: _Totals = field(default_factory=_Totals)

    def sample(self, process: _Process) -> Sample:
        """Returns the counters now; `process` is the newest reading of the rank's own process."""
        readings = ((pid, read_process(pid)) for pid in set(descendants(self.pid)))
        children = {(pid, child.start): child for pid, child in readings if child is not None}
        # Processes that ended between two looks are counted by the process that has waited for them.
        waited: dict[Any, float] = {key: child.waited_s for key, child in children.items()}
        waited[self.pid] = process.waited_s
        moved: dict[Any, float] = {(pid, start): float(io_bytes(pid)) for pid, start in children}
        moved[self.pid] = float(io_bytes(self.pid))
        return Sample(
            time_s=time.monotonic(),
            log_bytes=_log_size(self.pid, self.log),
            io_bytes=int(self._bytes.add(moved)),
            own_cpu_s=self._main_busy.add({(self.pid, process.start): process}),
            child_cpu_s=self._child_busy.add(children) + self._ended_children.add(waited),
            written_back=_pages_written_back(),
            is_held=process.state == "D",
        )


def _log_size(pid: int, log: Path) -> int:
    """Returns the size of the file that a rank prints to; srun may write that file for it."""
    for path in (Path(f"/proc/{pid}/fd/1"), log):
        with contextlib.suppress(OSError):
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                return status.st_size
    return 0


# --- ranks below the rank ---


@dataclass(frozen=True, slots=True)
class InnerRanks:
    """Ranks that a process of the rank has started: each has RANK and WORLD_SIZE of its own."""

    launcher: str
    rank: int
    """The lowest."""
    size: int
    """0 where it is not known."""


def inner_ranks(pid: int) -> InnerRanks | None:
    """Returns the ranks that processes of a rank have started, None for none.

    A launcher gives its processes other variables than it has itself. srun and mpirun start theirs elsewhere, so these
    programs are evidence by themselves.

    Args:
        pid: the rank.
    """
    own = environment_of(pid)
    below = sorted(set(descendants(pid)))
    found: dict[int, tuple[int, int]] = {}
    for child in below:
        env = environment_of(child)
        is_rank = env.get("RANK", "").isdigit() and env.get("WORLD_SIZE", "").isdigit() and "MASTER_PORT" in env
        if is_rank and any(env.get(name) != own.get(name, env.get(name)) for name in _OF_A_RANK):
            found[child] = int(env["RANK"]), int(env["WORLD_SIZE"])
    if found:
        first = min(found, key=lambda child: found[child])
        process = read_process(first)
        return InnerRanks(program_name(process.parent if process is not None else 0), *found[first])
    launcher = next((name for child in below if (name := program_name(child)) in _STARTS_ELSEWHERE), "")
    return InnerRanks(launcher, 0, 0) if launcher else None


_OF_A_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_STARTS_ELSEWHERE = ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "prun", "srun")
_LONGEST_NAME = 60
_RUNNER = "script_main.py"
"""What runs a script on a rank."""


def program_name(pid: int) -> str:
    """Returns what a process runs, e.g. "torchrun", "torch.distributed.run", "train.py"; "" where that is not known."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return ""
    if Path(words[0]).name.startswith("python"):
        # The file or module, behind options without a value.
        words = [word for word in words[1:] if word == "-m" or not word.startswith("-")] or words
        words = words[1:] if words[0] == "-m" and len(words) > 1 else words
        if Path(words[0]).name == _RUNNER:
            # It has the run directory before the script, or "-m" and the module.
            words = [word for word in words[2:] if word != "-m"] or words
    return Path(words[0]).name[:_LONGEST_NAME]


# --- the GPU ---


class _Gpu(threading.Thread):
    """Reads NVML in its own thread: a driver that does not answer must not stop the watch."""

    def __init__(self, *, local_rank: int) -> None:
        super().__init__(daemon=True)
        self._local_rank = local_rank
        self.memory_busy = False
        """Whether memory was read or written in any reading since the last reset."""
        self.idle_since_s: float | None = None
        self.is_there = False

    def run(self) -> None:
        """Reads once a second; ends where there is no NVML or it refuses."""
        with contextlib.suppress(Exception):  # no package, no driver, a lost GPU: each raises its own class
            import pynvml as nvml

            nvml.nvmlInit()
            names = visible_gpus(os.environ)
            name = str(self._local_rank) if not names else names[self._local_rank % len(names)]
            by_uuid = name.startswith(("GPU-", "MIG-"))
            handle = nvml.nvmlDeviceGetHandleByUUID(name) if by_uuid else nvml.nvmlDeviceGetHandleByIndex(int(name))
            while True:
                utilization = nvml.nvmlDeviceGetUtilizationRates(handle)
                self.is_there = True
                self.memory_busy |= utilization.memory > 0
                if utilization.gpu > 0:
                    self.idle_since_s = None
                elif self.idle_since_s is None:
                    self.idle_since_s = time.monotonic()
                time.sleep(_LOOK_EVERY_S)

    @property
    def idle_s(self) -> float | None:
        """How long it has been idle, None where it cannot be read."""
        if not self.is_there:
            return None
        return 0.0 if self.idle_since_s is None else time.monotonic() - self.idle_since_s


# --- the watch ---


class Watcher:
    """Watches one rank.

    Wide because it is a whole process: its settings, its readings, and its requests.

    Args:
        facts: the JSON object of `watched.start_watcher`.
    """

    def __init__(self, facts: dict[str, Any]) -> None:
        self._run = RunDirectory(Path(facts["run"]))
        self._attempt = int(facts["attempt"])
        self._rank = int(facts["rank"])
        self._pid = int(facts["pid"])
        self._limit_s = float(facts["limit_s"])
        self._stacks, self._threads, self._flight, self._requests = facts["descriptors"]
        self._stretch_s = min(max(self._limit_s / 10, 0.5), _LONGEST_STRETCH_S)
        local_rank = int(facts["local_rank"])
        self._file = SignsFile(self._run, self._attempt, rank=self._rank, local_rank=local_rank)
        self._signs = Signs(rank=self._rank, host=facts["host"], pid=self._pid, step_id=facts["step_id"])
        self._counters = Counters(self._pid, self._run.rank_log(self._attempt, self._rank))
        self._gpu = _Gpu(local_rank=local_rank)
        self._newest: Sample | None = None
        self._frames: list[Frame] = []
        self._last_place: tuple[list[Frame], list[str]] = ([], [])
        """Frames and unfinished collectives at the last answer."""
        self._sign_s = time.monotonic()
        self._has_report = False
        self._inner: InnerRanks | None = None
        """At the last look."""
        self._inner_due_s = time.monotonic() + _LOOK_EVERY_S
        self._inner_pause_s = _LOOK_EVERY_S

    def watch(self) -> None:
        """Watches until the rank has ended."""
        self._gpu.start()
        start = read_process(self._pid)
        end_of_rank = _EndOfProcess(self._pid)
        awaits_answer = False
        due_s = time.monotonic() + self._stretch_s
        while True:
            process = read_process(self._pid)
            if process is None or start is None or process.start != start.start:
                break
            if awaits_answer:
                awaits_answer = False
                self._judge(self._sample(process), self._read_answer())
            elif time.monotonic() >= due_s:
                due_s = time.monotonic() + self._stretch_s
                sample = self._sample(process)
                if self._has_clear_sign(sample):
                    self._keep(sample, self._sign(sample, waits=False))
                else:
                    awaits_answer = True
                    self._request_answer()
            self._look_below()
            self._write(process.state)
            end_of_rank.wait(min(_LOOK_EVERY_S, self._stretch_s / 2))
        self._write("")

    def _look_below(self) -> None:
        """Looks for ranks below the rank; two looks have to find them, since a program may use srun for a moment."""
        if self._signs.launcher or time.monotonic() < self._inner_due_s:
            return
        inner = inner_ranks(self._pid)
        if inner is not None and inner == self._inner:
            self._signs = replace(
                self._signs, launcher=inner.launcher or "a process", inner_rank=inner.rank, inner_size=inner.size
            )
        self._inner_pause_s = _LOOK_EVERY_S if inner != self._inner else min(2 * self._inner_pause_s, self._stretch_s)
        self._inner = inner
        self._inner_due_s = time.monotonic() + self._inner_pause_s

    def _sample(self, process: _Process) -> Sample:
        # The number of collectives is known only from an answer of the rank.
        collectives = 0 if self._newest is None else self._newest.collectives
        sample = self._counters.sample(process)
        return replace(sample, gpu_memory_busy=self._gpu.memory_busy, collectives=collectives)

    def _has_clear_sign(self, sample: Sample) -> bool:
        return self._sign(sample, waits=True) != ""

    def _sign(self, sample: Sample, *, waits: bool) -> str:
        return "" if self._newest is None else sign_of_life(self._newest, sample, waits=waits)

    def _request_answer(self) -> None:
        os.ftruncate(self._stacks, _HEADER)
        os.lseek(self._stacks, _HEADER, os.SEEK_SET)
        os.ftruncate(self._threads, 0)
        os.ftruncate(self._flight, 0)
        with contextlib.suppress(OSError):
            if catches(self._pid, ASK):
                signal_main_thread(self._pid, ASK)
                os.write(self._requests, b"?")

    def _read_answer(self) -> tuple[str, bytes]:
        header = os.pread(self._stacks, _HEADER, 0)
        dump = os.pread(self._stacks, 1 << 20, _HEADER)
        first_line = header.partition(b"\n")[0].strip(b"\0")
        stack = ""
        if dump:
            # Written as in a dump of all threads, where a line names each thread.
            thread_dump = dump.replace(b"Stack (", b"Thread " + first_line.rpartition(b" ")[2] + b" (", 1)
            stack = (first_line + b"\n" + thread_dump).decode(errors="replace")
        return stack, os.pread(self._flight, 1 << 24, 0)

    def _judge(self, sample: Sample, answer: tuple[str, bytes]) -> None:
        stack, record = answer
        frames = frames_of(stack)
        flights = read_flights(record) if record else {}
        collectives = sum(flight.last_begun + flight.last_ended for flight in flights.values())
        sample = replace(sample, collectives=collectives or sample.collectives)
        unfinished = _unfinished(flights)
        # In the same place and the same collective as before, its processor time is that of the waiting itself.
        is_stuck = bool(unfinished) and bool(frames) and self._last_place == (frames, unfinished)
        self._last_place = (frames, unfinished)
        sign = self._sign(sample, waits=is_stuck)
        self._keep(sample, sign)
        waits = unfinished[0] if unfinished else waits_in(frames)
        self._signs = replace(self._signs, waits=waits[:_LONGEST_WAITS])
        if not sign and time.monotonic() - self._sign_s > 0.6 * self._limit_s:
            self._write_report(stack, record)

    def _keep(self, sample: Sample, sign: str) -> None:
        self._gpu.memory_busy = False
        self._newest = sample
        if not sign:
            return
        self._sign_s = time.monotonic()
        self._signs = replace(self._signs, signs=self._signs.signs + 1, newest=sign, waits="")
        if self._has_report and first_mark(self._run, self._attempt) is None:
            # The rank continued, so the written stacks no longer show where it is. But if the hang is on record, the
            # rank is being ended, and its signs are no progress.
            self._has_report = False
            for path in self._report_paths:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)

    @property
    def _report_paths(self) -> tuple[Path, Path]:
        return self._run.stacks(self._attempt, self._rank), self._run.flight(self._attempt, self._rank)

    def _write_report(self, stack: str, record: bytes) -> None:
        self._has_report = True
        threads = os.pread(self._threads, 1 << 20, 0)
        if threads:
            stack = f"{stack}\nAll threads, at a moment close to it:\n{threads.decode(errors='replace')}"
        for path, content in zip(self._report_paths, (stack, record.decode(errors="replace")), strict=True):
            if content:
                # The supervisor may read at this moment.
                with contextlib.suppress(OSError):
                    write_atomic(path, content, durable=False)

    def _write(self, state: str) -> None:
        self._signs = replace(
            self._signs, looks=self._signs.looks + 1, state=state, gpu_idle_s=self._gpu.idle_s if state else None
        )
        # If the file system refuses, this look is not written.
        with contextlib.suppress(OSError):
            self._file.write(self._signs)


def _unfinished(flights: Flights) -> list[str]:
    """Returns the collectives that have begun and not ended, e.g. ["all_reduce #8 of 1,310,720 elements"]."""
    collectives = [flight.waits_in for flight in flights.values()]
    return sorted(str(collective) for collective in collectives if collective is not None)


class _EndOfProcess:
    """Waits for the end of a process, with a time limit for each wait."""

    def __init__(self, pid: int) -> None:
        self._poll: select.poll | None = None
        # Older kernels have no such descriptor; then the next look notices the end.
        with contextlib.suppress(OSError, AttributeError):
            descriptor = os.pidfd_open(pid)
            self._poll = select.poll()
            self._poll.register(descriptor, select.POLLIN)

    def wait(self, seconds: float) -> None:
        """Returns after this many seconds, or when the process has ended."""
        if self._poll is None:
            time.sleep(seconds)
        else:
            self._poll.poll(1e3 * seconds)


def main() -> None:
    """Watches the rank that the first argument describes."""
    # Signals to all processes of a step are meant for the rank; this process ends with the rank.
    signal.pthread_sigmask(
        signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    )
    Watcher(json.loads(sys.argv[1])).watch()


if __name__ == "__main__":
    main()
