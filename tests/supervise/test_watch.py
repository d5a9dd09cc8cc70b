"""The watch goes on whatever a reading, a judge or its verdict meets, and none of them delays the others."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_train.rundir.events import FailureMark, leave_mark
from slurm_train.rundir.heartbeat import Beat
from slurm_train.rundir.paths import RunDirectory
from slurm_train.supervise import look as look_module
from slurm_train.supervise import watch as module
from slurm_train.supervise.look import Look
from slurm_train.supervise.watch import Judge, Verdict, Watch
from tests.support.waiting import wait_for


class Asks(Judge):
    """Asks for the same at each look."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self.name = name
        self._act = act
        self.looks: list[Look] = []

    def __call__(self, look: Look) -> Verdict | None:
        self.looks.append(look)
        return self._act

    def last(self, look: Look) -> Verdict | None:
        return self(look)


def watch_of(folder: Path, said: list[str], *judges: Judge, stuck_after_s: float = 60.0) -> Watch:
    run = RunDirectory(folder)
    run.attempt_logs(0).mkdir(parents=True)
    watch = Watch(run, 0, world_size=1, say=said.append, every_s=0.01, stuck_after_s=stuck_after_s)
    watch.add(*judges)
    return watch


def check_until(watch: Watch, is_so: Callable[[], object], *, what: str) -> None:
    def look() -> object:
        watch.check()
        return is_so()

    wait_for(look, within_s=60, what=what, poll_s=0.01)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_is_said_once_per_kind_and_the_judge_is_asked_again(tmp_path: Path) -> None:
    errors = iter([OSError(errno.ESTALE, "stale")] * 3 + [KeyError("x")] * 2 + [SystemExit()] + [None] * 9999)

    def act() -> None:
        if (error := next(errors)) is not None:
            raise error
        done.set()

    said, done = list[str](), threading.Event()
    watch = watch_of(tmp_path, said, Asks("the dog", act))
    with watch.running():
        check_until(watch, done.is_set, what="an act without an error")
    assert sorted(said) == ["the dog: KeyError: 'x'; it goes on", "the dog: OSError: [Errno 116] stale; it goes on"]


def test_a_judge_that_raises_keeps_nobody_from_being_asked(tmp_path: Path) -> None:
    class Raises(Judge):
        name = "the dog"

        def __call__(self, look: Look) -> Verdict | None:
            raise ValueError(look.ranks.attempt)

    said, acted = list[str](), threading.Event()
    watch = watch_of(tmp_path, said, Raises(), Asks("the notice", acted.set))
    with watch.running():
        check_until(watch, lambda: acted.is_set() and said, what="the other judge's act")
    assert said == ["the dog: ValueError: 0; it goes on"]


def test_what_does_not_return_is_said_and_delays_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_END_WITHIN_S", 0.2)
    said, acts, stuck = list[str](), [0], threading.Event()

    def count() -> None:
        acts[0] += 1

    notice = Asks("the notice", lambda: stuck.wait(30) and None)
    watch = watch_of(tmp_path, said, notice, Asks("the dog", count), stuck_after_s=0.1)
    began_s = time.monotonic()
    with watch.running():
        check_until(watch, lambda: said, what="a line")
        before = acts[0]
        check_until(watch, lambda: acts[0] > before + 3, what="acts of the other judge")
        assert len(notice.looks) == 1, "it is not asked again before its act has ended"
    assert time.monotonic() - began_s < 10
    wait_for(lambda: len(said) == 2, within_s=60, what="the second line", poll_s=0.01)
    assert "the notice has waited for 0 s for a file system or for Slurm" in said[0]
    assert said[1] == "the notice did not end in time and is abandoned"
    stuck.set()


def test_heartbeats_that_cannot_be_read_hide_no_failure_and_keep_no_judge_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_END_WITHIN_S", 4.0)
    answers = threading.Event()

    def read(_run: RunDirectory, _attempt: int) -> dict[int, Beat]:
        answers.wait(30)
        return {}

    monkeypatch.setattr(look_module, "read_beats", read)
    said, asked = list[str](), list[float]()
    notice = Asks("the notice", lambda: asked.append(time.monotonic()))
    watch = watch_of(tmp_path, said, notice, stuck_after_s=0.1)
    leave_mark(RunDirectory(tmp_path), 0, FailureMark(rank=3, host="here", exit_code=1, message="no"))
    began_s = time.monotonic()
    with watch.running():
        longest_s = 0.0

        def is_seen() -> bool:
            nonlocal longest_s
            check_s = time.monotonic()
            watch.check()
            longest_s = max(longest_s, time.monotonic() - check_s)
            return watch.look.mark is not None and len(asked) > 3 and bool(said)

        wait_for(is_seen, within_s=60, what="the mark", poll_s=0.01)
        end_s = time.monotonic()
    assert time.monotonic() - end_s < 3.5, "half of the time is for what the judges ask for at the end"
    assert longest_s < 1.0, "whoever waits for the ranks does not wait for files"
    assert time.monotonic() - began_s < 10
    assert "the reading of the heartbeats has waited" in said[0]
    answers.set()


def test_all_is_read_once_more_when_the_ranks_have_ended(tmp_path: Path) -> None:
    judge = Asks("the dog", lambda: None)
    watch = watch_of(tmp_path, [], judge)
    with watch.running():
        watch.check()
        leave_mark(RunDirectory(tmp_path), 0, FailureMark(rank=3, host="here", exit_code=1, message="no"))
    mark = judge.looks[-1].mark
    assert mark is not None and mark.rank == 3
