"""The stop flag: how a rank is asked to save itself and end; and the watchdog that ends an orphaned rank.

The handlers are installed before torch is imported and set one integer, nothing else: a print or a log call inside a
Python handler re-enters the buffered writer and kills the rank. Slurm sends TERM two or three times within a
millisecond, so asking is idempotent. What happens next is decided by all ranks together at a step boundary.

A rank whose slurmstepd was killed cannot be ended by Slurm any more, and one that lives on after its node was lost
would train beside its successor. Both are seen by a thread that sleeps most of the time, so a rank that waits in a
collective for ever leaves as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM)
"""USR2: the warning before the time limit (NCCL may catch USR1). TERM: preemption, scancel, `kill`."""


class StopFlag:
    """Whether this process was asked to stop; `requested` is 0 or 1, and goes back only by `withdraw`.

    Args:
        clock: seconds that never run backwards, for the pace of looking at the STOP file.
    """

    __slots__ = ("_clock", "_next_look", "asked_by", "requested", "signal_at", "signal_number")

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.requested = 0
        self.signal_number = 0
        """The newest signal."""
        self.signal_at = 0.0
        """When the first of its kind came, of `time.monotonic`."""
        self.asked_by = ""
        """Who asked without a signal."""
        self._clock = clock
        self._next_look = 0.0

    def request(self, by: str = "") -> None:
        """Asks for a stop; asking twice is asking once.

        Args:
            by: who asks, for the ledger, e.g. "clock".
        """
        if not self.requested:
            self.asked_by = by
        self.requested = 1

    def withdraw(self, by: str) -> None:
        """Takes back what `request` asked for, unless another caller or a signal has asked first."""
        if self.requested and self.asked_by == by:
            self.requested = 0
            # A signal may come at any moment; it sets both.
            self.requested = int(bool(self.signal_number))

    def ask(self) -> tuple[str, float]:
        """Returns how this process was asked to stop, e.g. "TERM" or "file", and how many seconds ago.

        One that was not asked itself follows "another rank".
        """
        if self.signal_number:
            name = signal.Signals(self.signal_number).name.removeprefix("SIG")
            return name, max(0.0, time.monotonic() - self.signal_at)
        return self.asked_by or "another rank", 0.0

    def look_at(self, stop_file: Path, *, every_s: float = 1.0) -> None:
        """Asks for a stop if the file exists; looks at most once in `every_s` seconds."""
        now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + every_s
        if stop_file.exists():
            self.request("file")


def install(flag: StopFlag, *, signals: Iterable[signal.Signals] = STOP_SIGNALS) -> None:
    """Makes these signals set the flag, in this process only; a forked child ignores them.

    A loader worker inherits the handler and gets the same TERM as its parent (Slurm signals every process of the
    step), but the batch it is working on is still needed for the last step.
    """
    own_pid = os.getpid()

    def set_flag(number: int, _frame: FrameType | None) -> None:
        if os.getpid() == own_pid:
            flag.requested = 1
            # A warning may be followed by the TERM of the limit, which comes twice.
            if flag.signal_number != number:
                flag.signal_number = number
                flag.signal_at = time.monotonic()

    for number in signals:
        signal.signal(number, set_flag)
    # A signal that came before this process was ready comes now, if its parent had blocked it.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, list(signals))


def hold_stop_signals() -> None:
    """Keeps the stop signals for `next_stop_signal`; called before any other thread or process exists.

    Both inherit it: a rank gets what came meanwhile when it calls `install`.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, list(STOP_SIGNALS))


def next_stop_signal(within_s: float) -> int | None:
    """Returns the next stop signal, None where none comes in time; needs `hold_stop_signals`."""
    found = signal.sigtimedwait(list(STOP_SIGNALS), within_s)
    return None if found is None else found.si_signo


def hold_continue() -> None:
    """Keeps SIGCONT for `was_continued`; called before any other thread exists, which inherits it.

    The signal continues a stopped process all the same.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCONT])


def release_continue() -> None:
    """Gives SIGCONT back to a user's own function or script, which may have use for it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCONT])


def was_continued() -> bool:
    """Returns whether SIGCONT came since this was last asked; needs `hold_continue`."""
    return signal.sigtimedwait([signal.SIGCONT], 0) is not None


FENCE_EVERY_S = 4.0
"""A zombie must be gone 10 s after its successor began; listing a folder costs the shared file system little. Counted
by the clock, so a process that was stopped meanwhile looks at once when it goes on."""


class NodeLeader:
    """Which one of a node's ranks does something for all of them; they share no file for it, and need no agreement.

    Whoever gets the name of a socket leads until its process ends. Where that process is stopped, belongs to somebody
    else, or cannot be seen, as from another container, every rank leads: done too often rather than never.

    Args:
        name: the same for all ranks of the node that share a leader, and for no others.
    """

    def __init__(self, name: str) -> None:
        self._name = b"\0slurm_train " + hashlib.sha256(name.encode(errors="surrogateescape")).digest()
        self._held: socket.socket | None = None

    def leads(self) -> bool:
        """Returns whether this process is to do it now; to be asked each time."""
        if self._held is None:
            self._held = self._take_lead()
        if self._held is None:
            return not self._another_leads()
        with contextlib.suppress(OSError):
            while True:
                self._held.accept()[0].close()  # those who asked who leads
        return True

    def close(self) -> None:
        """Lets another process lead."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def _take_lead(self) -> socket.socket | None:
        held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            held.bind(self._name)
            held.listen(256)
            held.setblocking(False)
        except OSError:
            held.close()
            return None
        return held

    def _another_leads(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
                asking.setblocking(False)
                asking.connect(self._name)
                credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            pid, uid, _ = struct.unpack("3i", credentials)
            # A loader's worker may have inherited the socket of a leader that has ended.
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return uid == os.geteuid() and state not in "TtZX"


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
    """Starts the thread that ends a rank whose parent is gone, or whose run has a newer attempt.

    Args:
        parent: process id of the parent at the start.
        is_overtaken: whether a newer attempt of the run exists.
        on_orphaned: called once when the parent is gone; must end the process.
        on_overtaken: called once when a newer attempt exists; must end the process and write nothing to the run.
        every_s: seconds between two looks.
        parent_now: gives the process id of the parent.
        clock: seconds that never run backwards.
        leader: asks for a newer attempt for all ranks of the node; where it ends for that, the next one leads, and so
            all of them end. None: every rank asks.
    """

    def watch() -> None:
        pause = threading.Event()
        due_s = clock()
        while True:
            if parent_now() != parent:
                return on_orphaned()
            if clock() >= due_s and (leader is None or leader.leads()):
                # A file system that refuses now is asked again in a moment.
                with contextlib.suppress(OSError):
                    if is_overtaken():
                        return on_overtaken()
                    due_s = clock() + FENCE_EVERY_S
            pause.wait(every_s)

    thread = threading.Thread(target=watch, name="orphan watchdog", daemon=True)
    thread.start()
    return thread
