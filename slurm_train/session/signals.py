"""The stop flag, by which a rank is asked to save and end, and the watchdog that ends an orphaned rank.

The handlers are installed before torch is imported. They set the flag and nothing else: a print or a log call inside
a Python handler re-enters the buffered writer and kills the rank. Slurm sends TERM two or three times within a
millisecond, so a repeated request changes nothing. All ranks decide together at a step boundary what happens next.

If the slurmstepd of a rank was killed, Slurm can no longer end the rank. And a rank that survives the loss of its node
would train beside its successor. A thread that sleeps most of the time detects both, so that also a rank that waits in
a collective for ever ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import mmap
import multiprocessing
import multiprocessing.util
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from slurm_train.session.loader_workers import is_loader_worker, raise_in_rank

STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM)
"""USR2: the warning before the time limit (NCCL may catch USR1). TERM: preemption, scancel, `kill`."""
_IS_ASKED = 1
_LETS_END = 2
_handlers: list[Callable[[int, FrameType | None], None]] = []
"""What `install` has made in this process."""
_MOST_PENDING = 10
_PIPE_BYTES = 1 << 16
"""All that a pipe of Linux holds."""
_PATIENCE_S = 5.0
"""So long after a TERM a forked child looks whether its parent was asked to stop as well."""


class StopFlag:
    """Whether this process was asked to stop; `requested` is 0 or 1, and only `withdraw` resets it.

    Args:
        clock: monotonic seconds, for the interval between two looks at the STOP file.
    """

    __slots__ = (
        "_clock",
        "_descriptor",
        "_memory",
        "_next_look_s",
        "_seen_by_children",
        "asked_by",
        "handlers",
        "native_handlers",
        "requested",
        "signal_at",
        "signal_number",
    )

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.requested = 0
        self.signal_number = 0
        """The newest signal."""
        self.signal_at = 0.0
        """When the first signal of this number came, by `time.monotonic`."""
        self.asked_by = ""
        """Who asked, if it was not by a signal."""
        self.handlers: dict[int, Callable[[int, FrameType | None], None]] = {}
        self.native_handlers: dict[int, int | None] = {}
        """What `install` has installed, by the number of the signal."""
        self._clock = clock
        self._next_look_s = 0.0
        # Memory that forked children share, and that others open by its path.
        self._descriptor = os.memfd_create("slurm_train_stop")
        os.ftruncate(self._descriptor, 1)
        self._memory = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self._seen_by_children = mmap.mmap(self._descriptor, 1)

    def request(self, requester: str = "") -> None:
        """Asks for a stop; further requests change nothing.

        Args:
            requester: who asks, for the ledger, e.g. "clock".
        """
        if not self.requested:
            self.asked_by = requester
        self.requested = 1

    def withdraw(self, requester: str) -> None:
        """Cancels a request, unless another requester or a signal has asked first."""
        if self.requested and self.asked_by == requester:
            self.requested = 0
            # A signal may have come since the line above; it sets both attributes.
            self.requested = int(bool(self.signal_number))

    def receive(self, number: int) -> None:
        """Asks for a stop because of a signal; for the handler."""
        self.requested = 1
        # A warning may be followed by the TERM of the limit, which comes twice.
        if self.signal_number != number:
            self.signal_number = number
            self.signal_at = time.monotonic()
        if not self._seen_by_children[0]:
            self._seen_by_children[0] = _IS_ASKED

    def replaced(self) -> list[str]:
        """Returns the signals that something else handles by now, which this flag does not get, e.g. ["SIGTERM"]."""
        return [
            signal.Signals(number).name
            for number, handler in self.handlers.items()
            if signal.getsignal(number) is not handler or _native_handler(number) != self.native_handlers[number]
        ]

    def __del__(self) -> None:
        os.close(self._descriptor)

    def __reduce__(self) -> tuple[Callable[[str], StopFlag], tuple[str]]:
        """Pickles the flag for a process that this one starts, which installs the handlers when it reads it."""
        return _install_in_child, (self._memory,)

    def let_children_end(self) -> None:
        """Makes TERM end the forked children of this process again, as its exit does; they are needed no more."""
        self._seen_by_children[0] = _LETS_END

    def is_for_child(self) -> bool:
        """Returns whether a TERM is meant for this forked child alone, and is to end it.

        Slurm signals every process of a step, and `multiprocessing` ends a process by the same signal.
        """
        deadline_s = time.monotonic() + _PATIENCE_S
        while self._seen_by_children[0] != _LETS_END:
            if self._seen_by_children[0] == _IS_ASKED or is_loader_worker():
                return False
            if time.monotonic() >= deadline_s:
                break
            time.sleep(0.02)
        return True

    def ask(self) -> tuple[str, float]:
        """Returns how this process was asked to stop, e.g. "TERM" or "file", and how many seconds ago.

        A process that was not asked itself stops because of "another rank".
        """
        if self.signal_number:
            name = signal.Signals(self.signal_number).name.removeprefix("SIG")
            return name, max(0.0, time.monotonic() - self.signal_at)
        return self.asked_by or "another rank", 0.0

    def check_file(self, stop_file: Path, *, every_s: float = 1.0) -> None:
        """Asks for a stop if the file exists; looks at most once in `every_s` seconds."""
        now_s = self._clock()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + every_s
        if stop_file.exists():
            self.request("file")


class ReceivedSignals:
    """Which signals handlers in Python have got in this process from now on, whoever has installed them.

    Python writes the number of each such signal into a pipe. A program that sets a wake-up descriptor of its own, as
    asyncio does for handlers of a loop, takes it over; then nothing is known. Made in the main thread.
    """

    def __init__(self) -> None:
        self._reader, writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(writer, False)
        self._lock = threading.Lock()
        self._newest_stop = ""
        self._has_continued = False
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

        def leave_to_parent() -> None:
            replaced = signal.set_wakeup_fd(-1)
            if replaced != writer:
                signal.set_wakeup_fd(replaced)

        # A forked child gets signals of its own, e.g. the TERM by which a pool ends its processes.
        os.register_at_fork(after_in_child=leave_to_parent)

    @property
    def newest_stop(self) -> str:
        """The newest stop signal, e.g. "TERM"; "" for none."""
        with self._lock:
            self._read()
            return self._newest_stop

    def was_continued(self) -> bool:
        """Returns whether SIGCONT came since the last call; needs a handler of it."""
        with self._lock:
            self._read()
            has_continued = self._has_continued
            self._has_continued = False
            return has_continued

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._reader, _PIPE_BYTES):
                if number == signal.SIGCONT:
                    self._has_continued = True
                elif number in STOP_SIGNALS:
                    self._newest_stop = signal.Signals(number).name.removeprefix("SIG")


@functools.cache
def received_signals() -> ReceivedSignals:
    """Returns what this process has received since the first call, which the main thread makes."""
    return ReceivedSignals()


def note_continues() -> Callable[[], bool]:
    """Returns what says whether SIGCONT came since its last call, in a program of a user's own.

    Unlike `was_continued` it needs no blocked signal, which other threads of the program would take. A handler that the
    program has, or installs later, is left alone.
    """
    received = received_signals()
    if signal.getsignal(signal.SIGCONT) is signal.SIG_DFL:
        signal.signal(signal.SIGCONT, lambda *_: None)
        # Calls of C libraries go on.
        signal.siginterrupt(signal.SIGCONT, False)
    return received.was_continued


def handled() -> list[str]:
    """Returns the stop signals that a handler in Python waits for, e.g. ["SIGTERM"]."""
    return [number.name for number in STOP_SIGNALS if callable(signal.getsignal(number))]


def install(flag: StopFlag, *, signals: Iterable[signal.Signals] = STOP_SIGNALS) -> None:
    """Makes these signals set the flag, in this process only.

    A loader worker inherits the handler and gets the same TERM as its parent (Slurm signals every process of the
    step), but the batch it is working on is still needed for the last step: a child of `multiprocessing`, however it is
    started, ignores the signals that its parent gets as well. Another TERM ends it, a loader worker only after
    `let_children_end`.
    """
    # Private, as of 3.4. Where a later Python has other names, such children are ended by the signals.
    with contextlib.suppress(AttributeError):
        # A process that is started otherwise than by a fork reads a copy of it, and so the flag.
        multiprocessing.current_process()._config["slurm_train_stop"] = flag  # type: ignore[attr-defined]
    _install(flag, signals, rank_pid=os.getpid())


def _install_in_child(path: str) -> StopFlag:
    """Installs the handlers in a process that a rank has spawned, or had started by a fork server; returns the flag.

    Args:
        path: of the memory of the rank's flag.
    """
    flag = StopFlag()
    # Where the rank has ended, the signal is for the child.
    with contextlib.suppress(OSError), Path(path).open("r+b") as memory:
        flag._seen_by_children = mmap.mmap(memory.fileno(), 1)
        flag._memory = path
    _install(flag, STOP_SIGNALS, rank_pid=0)
    # What the process is to run is read after this, and torch with it.
    multiprocessing.util.register_after_fork(_keep_handler_in_loader_workers, lambda keep: keep())
    raise_in_rank()
    return flag


def _install(flag: StopFlag, signals: Iterable[signal.Signals], *, rank_pid: int) -> None:
    def set_flag(number: int, _frame: FrameType | None) -> None:
        if os.getpid() == rank_pid:
            flag.receive(number)
        elif number == signal.SIGTERM and flag.is_for_child():
            if is_loader_worker():
                # As torch's own handler does: of another end the loader would say that a worker has failed.
                os._exit(0)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    _handlers.append(set_flag)
    for number in signals:
        signal.signal(number, set_flag)
        flag.handlers[number] = set_flag
        flag.native_handlers[number] = _native_handler(number)
    _hold_signals_at_forks()
    _hold_signals_at_spawns()
    # A signal that came before this point is delivered now, if the parent had blocked it.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, list(signals))


def _native_handler(number: int) -> int | None:
    """Returns the address of the function that the kernel calls for a signal: C++ libraries replace Python's unseen.

    None where the C library does not tell. jax.distributed.initialize is such a library (0.10).
    """
    # The address comes first in the structure, on Linux whatever the processor; 256 bytes hold all of it.
    action = (ctypes.c_void_p * 32)()
    sigaction = _sigaction()
    return action[0] if sigaction is not None and sigaction(number, None, action) == 0 else None


@functools.cache
def _sigaction() -> Callable[[int, None, Any], int] | None:
    return getattr(ctypes.CDLL(None), "sigaction", None)


@functools.cache
def _hold_signals_at_forks() -> None:
    """Makes a signal that comes to a child while it is forked wait: Python forgets it, and it may be its only TERM."""
    of_thread = threading.local()

    def hold() -> None:
        of_thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, list(STOP_SIGNALS))

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, of_thread.mask)

    def begin_child() -> None:
        _keep_handler_in_loader_workers()
        release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=begin_child)


@functools.cache
def _hold_signals_at_spawns() -> None:
    """Makes signals to a process that `multiprocessing` starts as a program wait until it has read the flag.

    It imports the main module first, and torch with it, for seconds. A fork server never reads the flag: it outlives
    the signals, and the processes that it forks inherit that they wait.
    """
    # Without documentation, as of 3.4; Python's two ways to start such a process call it by this name.
    starting: Any = multiprocessing.util
    spawn = starting.spawnv_passfds

    def spawn_held(*arguments: Any) -> Any:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, list(STOP_SIGNALS))
        try:
            return spawn(*arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    starting.spawnv_passfds = spawn_held


def _keep_handler_in_loader_workers() -> None:
    """Has this forked child install its handler of TERM again where it becomes a worker of a loader of torch.

    Such a worker begins with torch's handler, which ends it (`_set_worker_signal_handlers`, torch 2.13). The rank then
    fails in the step at which it is to save, since Slurm signals every process of a step.
    """
    handling: Any = sys.modules.get("torch.utils.data._utils.signal_handling")
    handler = signal.getsignal(signal.SIGTERM)
    if handler not in _handlers or not hasattr(handling, "_set_worker_signal_handlers"):
        return
    set_handlers_of_torch = handling._set_worker_signal_handlers

    def set_handlers() -> None:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        set_handlers_of_torch()
        signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    handling._set_worker_signal_handlers = set_handlers


def ignore_ends_of_children() -> None:
    """Makes the end of a child process raise nothing any more, where a failure is about to be reported.

    torch's handler raises at each end of a child once a process of a loader has crashed: also while the failure is
    printed, so that no mark is left and the interpreter ends in its own way.
    """
    for _ in range(_MOST_PENDING):
        # Installing a handler first runs those of signals that are pending.
        with contextlib.suppress(Exception):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return


def ignore_handled_signals() -> None:
    """Makes signals do nothing for which a handler in Python waits, where the process is about to end."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)


def leave_to_program(flag: StopFlag) -> None:
    """Gives the stop signals their usual effect, before a program takes the place of this process.

    The program does not inherit handlers, so it would not know of a signal that has come before, and train on. Such a
    signal ends this process now, as it would end the program, which has not begun.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    if flag.signal_number:
        os.kill(os.getpid(), flag.signal_number)


def hold_stop_signals() -> None:
    """Blocks the stop signals for `next_stop_signal`; called before any other thread or process exists.

    Threads and processes inherit this: a rank gets signals that came meanwhile when it calls `install`.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, list(STOP_SIGNALS))


def next_stop_signal(within_s: float) -> int | None:
    """Returns the next stop signal, None where none comes in time; needs `hold_stop_signals`."""
    info = signal.sigtimedwait(list(STOP_SIGNALS), within_s)
    return None if info is None else info.si_signo


def hold_continue() -> None:
    """Blocks SIGCONT for `was_continued`; called before any other thread exists, since threads inherit it.

    A blocked SIGCONT still continues a stopped process.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCONT])


def release_continue() -> None:
    """Unblocks SIGCONT for a user's own function or script, which may use it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCONT])


def was_continued() -> bool:
    """Returns whether SIGCONT came since the last call; needs `hold_continue`."""
    return signal.sigtimedwait([signal.SIGCONT], 0) is not None


FENCE_EVERY_S = 4.0
"""A zombie must have ended 10 s after its successor began; listing a folder is cheap for the shared file system.
Counted by the clock, so a process that was stopped meanwhile looks as soon as it continues."""


class NodeLeader:
    """Election of one of a node's ranks that does something for all of them, without a shared file or an exchange.

    The process that binds the name of a socket leads until it ends. If that process is stopped, belongs to another
    user, or is not visible, as from another container, every rank leads: work done several times is better than never.

    Args:
        name: equal on all ranks of the node that share a leader, and on no others.
    """

    def __init__(self, name: str) -> None:
        self._name = b"\0slurm_train " + hashlib.sha256(name.encode(errors="surrogateescape")).digest()
        self._listener: socket.socket | None = None

    def leads(self) -> bool:
        """Returns whether this process leads now; to be called before each use."""
        if self._listener is None:
            self._listener = self._take_lead()
        if self._listener is None:
            return self._leader_state() != "running"
        with contextlib.suppress(OSError):
            while True:
                self._listener.accept()[0].close()  # ranks that checked whether a leader lives
        return True

    def keeps(self) -> bool:
        """Returns whether this process has the name for itself; one that is stopped keeps it, too."""
        self._listener = self._take_lead()
        return self._listener is not None or not self._leader_state()

    def close(self) -> None:
        """Lets another process lead."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _take_lead(self) -> socket.socket | None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self._name)
            listener.listen(256)
            listener.setblocking(False)
        except OSError:
            listener.close()
            return None
        return listener

    def _leader_state(self) -> str:
        """Returns "running", "stopped", "busy" where it has not answered for long, "" where there is no leader."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.setblocking(False)
                connection.connect(self._name)
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            pid, uid, _ = struct.unpack("3i", credentials)
            # A loader's worker may have inherited the socket of a leader that has ended.
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except BlockingIOError:
            return "busy"
        except OSError:
            return ""
        if uid != os.geteuid() or state in "ZX":
            return ""
        return "stopped" if state in "Tt" else "running"


def start_orphan_watchdog(
    *,
    parent: int,
    is_overtaken: Callable[[], bool],
    on_orphaned: Callable[[], None],
    on_overtaken: Callable[[], None],
    every_s: float = 1.0,
    parent_now: Callable[[], int] = os.getppid,
    clock: Callable[[], float] = time.monotonic,
    leader: NodeLeader | None = None,
) -> threading.Thread:
    """Starts the thread that ends a rank whose parent has ended, or whose run has a newer attempt.

    Args:
        parent: process id of the parent at the start.
        is_overtaken: whether a newer attempt of the run exists.
        on_orphaned: called once when the parent has ended; must end the process.
        on_overtaken: called once when a newer attempt exists; must end the process and write nothing to the run.
        every_s: seconds between two looks.
        parent_now: returns the process id of the parent.
        clock: monotonic seconds.
        leader: elects the rank that checks for a newer attempt for all ranks of the node. When it ends because of one,
            the next rank leads, and so all of them end. None: every rank checks.
    """

    def watch() -> None:
        pause = threading.Event()
        due_s = clock()
        while True:
            if parent_now() != parent:
                return on_orphaned()
            if clock() >= due_s and (leader is None or leader.leads()):
                # If the file system refuses now, the next look tries again.
                with contextlib.suppress(OSError):
                    if is_overtaken():
                        return on_overtaken()
                    due_s = clock() + FENCE_EVERY_S
            pause.wait(every_s)

    thread = threading.Thread(target=watch, name="orphan watchdog", daemon=True)
    thread.start()
    return thread
