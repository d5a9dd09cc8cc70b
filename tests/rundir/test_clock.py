from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from slurm_train.rundir.heartbeat import AwakeClock
from slurm_train.supervise.signals import hold_continue, release_continue, was_continued


class Time:
    """A clock to be moved, and a process that may be stopped for a while."""

    def __init__(self) -> None:
        self.now, self.continued = 100.0, False
        self.clock = AwakeClock(was_continued=self._was_continued, monotonic=lambda: self.now)

    def _was_continued(self) -> bool:
        was, self.continued = self.continued, False
        return was

    def passes(self, seconds: float, *, stopped: bool = False, continued: bool = False) -> None:
        self.now += seconds
        self.continued = self.continued or stopped or continued


def test_stopped_time_is_left_out_and_kept_apart() -> None:
    time = Time()
    start = time.clock()
    time.passes(0.5)
    assert time.clock() - start == 0.5
    time.passes(600.0, stopped=True)
    assert time.clock() - start == 0.5 and time.clock.away_s == 600.0
    time.passes(1.0)
    assert time.clock() - start == 1.5


@pytest.mark.parametrize("continued", [False, True], ids=["busy", "TERM with its SIGCONT, then busy"])
def test_busy_time_is_no_stop(continued: bool) -> None:
    time = Time()
    start = time.clock()
    time.passes(0.5, continued=continued)
    time.clock()
    time.passes(60.0)
    assert time.clock() - start == 60.5 and time.clock.away_s == 0.0


def test_the_clock_never_runs_backwards() -> None:
    time = Time()
    seen = [time.clock()]
    for seconds, stopped in ((0.1, False), (3.0, True), (2.5, False), (0.0, False), (1.9, True), (9.0, True)):
        time.passes(seconds, stopped=stopped)
        seen.append(time.clock())
    assert seen == sorted(seen) and time.clock.away_s == 12.0


def test_a_continued_process_is_told_once() -> None:
    hold_continue()
    try:
        assert not was_continued()
        # To this thread: others of the tests' own process do not hold it.
        signal.pthread_kill(threading.get_ident(), signal.SIGCONT)
        assert was_continued() and not was_continued()
    finally:
        release_continue()


PROGRAM = """
import sys, threading, time
from slurm_train.supervise.signals import hold_continue, was_continued
from slurm_train.rundir.heartbeat import AwakeClock
hold_continue()
clock = AwakeClock(was_continued=was_continued)
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()  # a thread that could swallow the signal
print("ready", flush=True)
start = clock()
for line in sys.stdin:
    print(f"{clock() - start:.3f} {clock.away_s:.3f}", flush=True)
    break
"""


def test_a_process_that_was_really_stopped_knows_for_how_long() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=2.6)
    process.send_signal(signal.SIGCONT)
    process.stdin.write("tell\n")
    process.stdin.flush()
    awake_s, away_s = map(float, process.stdout.readline().split())
    assert away_s >= 2.6 and awake_s < 0.5
    process.kill()
    process.communicate()
