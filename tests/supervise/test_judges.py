"""The judges of every launch: a hang is ended whatever the disk does, and slow ranks are named.

Stragglers whose ranks compute longer, and whole nodes, are tried by the campaign `stragglers`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from slurm_train.config.schema import ParallelSection
from slurm_train.errors import ClusterError
from slurm_train.rundir.attempts import begin_round, open_attempt
from slurm_train.rundir.events import Finding, first_mark, read_events, write_preflight
from slurm_train.rundir.files import write_atomic
from slurm_train.rundir.heartbeat import Beat, Heartbeat, Limits, read_beats
from slurm_train.rundir.ledger import Start
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.timing import Notice, read_notice, read_windows
from slurm_train.supervise import judges as module
from slurm_train.supervise import look
from slurm_train.supervise.hang import Flights, Hang
from slurm_train.supervise.judges import FindingsRelay, HangWatchdog, NoticeKeeper, StragglerSearch
from slurm_train.supervise.watch import Watch
from tests.supervise.looks import Eyes
from tests.support.command_line import TINY, TINY_MODULE, new_project
from tests.support.faulty_files import FaultyFiles
from tests.support.ledgers import ledger_lines
from tests.support.ports import free_port
from tests.support.waiting import wait_for
from tests.support.warm_commands import WarmPerson
from tests.support.warm_ranks import start_rank
from tests.train.small_runs import RANK_PROGRAM, config_of


def on_real_ranks(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.distributed(pytest.mark.faults(test))


LIMITS = Limits(0.5, 0.5)


def has_beat(run: RunDirectory) -> dict[int, Beat]:
    """Leaves the heartbeat of a rank that does not go on, and returns it."""
    heart = Heartbeat()
    heart.settled = True
    heart.mark("step")
    heart.start(run, 0, rank=0, host="here", step_id="7.0", limits=None)
    heart.stop()
    return read_beats(run, 0)


def looks_until(dog: HangWatchdog, run: RunDirectory, ended: list[Mapping[int, Beat]]) -> None:
    """Looks once a second, by the judge's clock, until ranks are ended."""
    now_s = 0.0
    eyes = Eyes(run, clock=lambda: now_s)
    for now_s in range(12):
        with contextlib.suppress(Exception):
            eyes.ask(dog, now_s)
        if ended:
            last = dog.last(eyes.look())
            assert last is not None
            last()
            return


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOSPC])
def test_an_error_at_any_call_does_not_keep_hung_ranks_alive(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # These ranks leave no stacks.
    monkeypatch.setattr(HangWatchdog, "_STACKS_WITHIN_S", 0.0)
    at = 0
    while True:
        at += 1
        run, ended = RunDirectory(tmp_path / f"run_{at}"), list[Mapping[int, Beat]]()
        run.path.mkdir()
        beats = has_beat(run)
        dog = HangWatchdog(run, LIMITS, end_ranks=ended.append)

        def fail(moment: str, name: str) -> None:
            if moment == "before":
                raise OSError(number, os.strerror(number), name)

        with FaultyFiles().installed(at=at, fault=fail) as files:
            looks_until(dog, run, ended)
        assert ended and dict(ended[0]).keys() == beats.keys(), f"call {at}: {files.names[at - 1 : at]}"
        if files.num_calls < at:
            break
    assert at > 15, "the mark and the event were among the calls"
    assert [event["ranks"] for event in read_events(run, "hang")] == [[0]]


def test_ranks_that_slurm_has_stopped_are_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HangWatchdog, "_STACKS_WITHIN_S", 0.0)
    run, ended, halted = RunDirectory(tmp_path), list[Mapping[int, Beat]](), [True]
    has_beat(run)
    dog = HangWatchdog(run, Limits(10.0, 10.0), end_ranks=ended.append, is_halted=lambda: halted[0])
    now_s = 0.0
    eyes = Eyes(run, clock=lambda: now_s)
    for now_s in range(0, 1000, 4):
        eyes.ask(dog, now_s)
    assert not ended
    halted[0] = False
    begin_s = now_s
    while not ended:
        now_s += 1
        eyes.ask(dog, now_s)
    assert now_s - begin_s <= 12 and read_events(run, "hang"), "once they are continued, a hang is found as ever"


def test_the_report_waits_for_stacks_that_are_written_late(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    ended = list[Mapping[int, Beat]]()
    seen = list[Mapping[int, str]]()

    class Dog(HangWatchdog):
        def explain(self, stacks: Mapping[int, str], flights: Mapping[int, Flights]) -> Hang:
            seen.append(stacks)
            return super().explain(stacks, flights)

    has_beat(run)
    dog = Dog(run, LIMITS, end_ranks=ended.append)
    eyes = Eyes(run)
    eyes.ask(dog)

    def write_late() -> None:
        wait_for(dog.is_hung, within_s=60, what="the time-out")
        run.stacks(0, 0).touch()
        time.sleep(0.3)
        write_atomic(run.stacks(0, 0), "in barrier")

    writer = threading.Thread(target=write_late)
    writer.start()
    while not ended:
        eyes.ask(dog)
    writer.join(60)
    assert seen == [{0: "in barrier"}]


def test_a_hang_quotes_the_error_at_the_end_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HangWatchdog, "_STACKS_WITHIN_S", 0.0)
    error = 'Traceback (most recent call last):\n  File "a.py", line 1, in send\nOSError: AF_UNIX path too long\n'
    for log, is_quoted in ((f"step 1\n{error}", True), (f"{error}step 1\n", False)):
        run = RunDirectory(tmp_path / str(is_quoted))
        run.path.mkdir()
        has_beat(run)
        run.rank_log(0, 0).parent.mkdir(parents=True, exist_ok=True)
        run.rank_log(0, 0).write_text(log)
        ended = list[Mapping[int, Beat]]()
        looks_until(HangWatchdog(run, LIMITS, end_ranks=ended.append), run, ended)
        (event,) = read_events(run, "hang")
        assert event["sentence"].endswith("its log ends with OSError: AF_UNIX path too long") is is_quoted


def test_a_hang_is_on_record_before_it_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HangWatchdog, "_STACKS_WITHIN_S", 0.0)
    run = RunDirectory(tmp_path)
    ended = list[Mapping[int, Beat]]()
    marks = list[Any]()
    monkeypatch.setattr(module, "say", lambda _text: marks.append(first_mark(run, 0)))
    has_beat(run)
    looks_until(HangWatchdog(run, LIMITS, end_ranks=ended.append), run, ended)
    assert ended and [mark.rank for mark in marks] == [0]


class Slurm:
    """Answers with the newest of some limits; ClusterError for None."""

    def __init__(self, *ends: float | None) -> None:
        self.ends, self.asked = list(ends), 0

    def __call__(self) -> Notice:
        end = self.ends[min(self.asked, len(self.ends) - 1)]
        self.asked += 1
        if end is None:
            raise ClusterError("away")
        return Notice(end_unix_s=end)


@contextlib.contextmanager
def checked(watch: Watch) -> Iterator[None]:
    """Checks the watch while the body runs, as whoever waits for the ranks does."""
    done = threading.Event()

    def check() -> None:
        while not done.wait(0.01):
            watch.check()

    thread = threading.Thread(target=check)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(60)


@contextlib.contextmanager
def keeping_time(run: RunDirectory, slurm: Slurm) -> Iterator[None]:
    watch = Watch(run, 0, world_size=1, every_s=0.01)
    watch.add(NoticeKeeper(run, ask=slurm))
    with watch.running(), checked(watch):
        yield


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path)
    run.attempt_logs(0).mkdir(parents=True)
    return run


def test_ranks_that_torchrun_starts_again_are_told_as_well(run: RunDirectory) -> None:
    start = Start(job_id="7", restart_count=0, nodes=("here",), world_size=1)
    begin_round(run, start, first=open_attempt(run, start))
    with keeping_time(run, Slurm(5e9)):
        wait_for(lambda: read_notice(run, 0).end_unix_s == 5e9, within_s=60, what="a notice", poll_s=0.01)
        assert begin_round(run, start, first=0) == 1
        wait_for(lambda: read_notice(run, 1).end_unix_s == 5e9, within_s=60, what="the next round's", poll_s=0.01)


def test_each_of_the_preflight_s_findings_is_printed_once_and_the_last_at_the_end(run: RunDirectory) -> None:
    said = list[str]()
    relay, eyes = FindingsRelay(say=said.append), Eyes(run)
    eyes.ask(relay)
    one, two, late = (Finding(code=code, level="note", seen="seen", todo="todo") for code in ("ONE", "TWO", "LATE"))
    for found in ([one], [one], [one, two]):
        write_preflight(run, 0, {"findings": [finding.as_json() for finding in found]})
        eyes.ask(relay)
        assert said == [finding.line for finding in found]
    write_preflight(run, 0, {"findings": [late.as_json()]})
    last = relay.last(eyes.look())
    assert last is not None
    last()
    assert said == [finding.line for finding in (one, two, late)]


def test_an_extended_limit_reaches_the_ranks_though_the_controller_was_away(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NoticeKeeper, "_ASK_AGAIN_S", 0.02)
    monkeypatch.setattr(NoticeKeeper, "_NEAR_S", 0.02)
    slurm = Slurm(None, time.time() + 100, time.time() + 900)
    with keeping_time(run, slurm):
        wait_for(lambda: read_notice(run, 0).end_unix_s == slurm.ends[1], within_s=60, what="a notice", poll_s=0.001)
        wait_for(lambda: read_notice(run, 0).end_unix_s == slurm.ends[2], within_s=60, what="the new one", poll_s=0.01)


TIMEOUT_S = 4.0


def the_run(person: WarmPerson) -> RunDirectory:
    paths = wait_for(lambda: list(person.folder.glob("runs/*/*/config.yaml")), within_s=60, what="a run directory")
    return RunDirectory(paths[0].parent)


def settled_beats(run: RunDirectory) -> dict[int, Beat]:
    beats = {rank: beat for rank, beat in read_beats(run, 0).items() if beat.step > 3 and beat.settled}
    return beats if len(beats) == 2 else {}


STUCK_READER = """
class StuckNumbers(Numbers):
    def __getitem__(self, index):
        if os.environ["RANK"] == "1" and os.path.exists("stick"):
            time.sleep(3600)
        return super().__getitem__(index)
"""
STOPPED = (
    r"rank 0 on \S+ does not run \(stopped or lost\), in (step|data loading|save) at step \d+ since \d+ s; "
    r"1 rank waits.*"
)
# Torch before 2.9 records nothing between gloo ranks.
READS = (
    r"rank 1 on \S+ is in data loading at step \d+ since \d+ s; 1 rank waits for it in all_reduce"
    r"( #\d+ of 1\d\d elements)?"
)


@on_real_ranks
@pytest.mark.parametrize(
    ("is_stopped", "rank", "sentence", "waits"),
    [(True, 0, STOPPED, "_engine_run_backward"), (False, 1, READS, "in __getitem__")],
    ids=["stopped", "reads for ever"],
)
def test_a_rank_that_hangs_is_named_and_the_ranks_are_ended(
    is_stopped: bool, rank: int, sentence: str, waits: str, tmp_path: Path
) -> None:
    person = WarmPerson(new_project(tmp_path / "project"))
    (person.folder / "tiny.py").write_text(TINY_MODULE + STUCK_READER)
    words = [*TINY, "run.processes=2", "model.step_s=0.1", "train.max_steps=2000", "checkpoint.every_steps=null"]
    words += [f"health.hang_timeout_s={TIMEOUT_S}", *([] if is_stopped else ["data._target_=tiny.StuckNumbers"])]
    trainer = person.begins(*words, log=tmp_path / "typed.log")
    run = the_run(person)
    try:
        beats = wait_for(lambda: settled_beats(run), within_s=120, what="steps")
        began_s = time.monotonic()
        if is_stopped:
            os.kill(beats[rank].pid, signal.SIGSTOP)
        else:
            (person.folder / "stick").touch()
        _, err = trainer.communicate(timeout=TIMEOUT_S + 60)
        assert not is_stopped or time.monotonic() - began_s < TIMEOUT_S + 10, err
    finally:
        for beat in read_beats(run, 0).values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(beat.pid, signal.SIGKILL)
        trainer.kill()
        trainer.communicate(timeout=20)
    assert trainer.returncode not in (0, 75)
    (event,) = read_events(run, "hang")
    assert event["ranks"] == [rank] and "StuckNumbers" not in err
    assert re.fullmatch(sentence, event["sentence"]), event["sentence"]
    assert event["sentence"] in err and event["sentence"] in ledger_lines(run)[0]["note"]
    mark = first_mark(run, 0)
    assert mark is not None and mark.rank == rank
    # A stopped rank writes nothing; the other one shows where it waits.
    assert waits in run.stacks(0, 1).read_text()


def test_ranks_that_torchrun_has_started_again_are_the_ones_that_are_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HangWatchdog, "_STACKS_WITHIN_S", 0.0)
    run = RunDirectory(tmp_path)
    start = Start(job_id="7", restart_count=0, nodes=("here",), world_size=1)
    begin_round(run, start, first=open_attempt(run, start))
    now_s = 0.0
    # By attempt. What is left of the round before looks hung, and is over.
    steps = {0: 3, 1: 0}
    ended = list[dict[int, int]]()

    def read(_run: RunDirectory, attempt: int) -> dict[int, Beat]:
        step = steps[attempt]
        facts = {"step": step, "marks": step, "beats": step}
        return {0: Beat(rank=0, host="here", pid=1, phase="step", settled=True, **facts)}

    monkeypatch.setattr(look, "read_beats", read)
    eyes = Eyes(run, clock=lambda: now_s)
    dog = HangWatchdog(
        *(run, Limits(600.0, 600.0)),
        end_ranks=lambda beats: ended.append({rank: beat.step for rank, beat in beats.items()}),
    )
    eyes.ask(dog, now_s)
    assert begin_round(run, start, first=0) == 1
    for steps[1] in range(1, 8):
        now_s += 200.0
        eyes.ask(dog, now_s)
    for _ in range(3):
        assert not ended, "it makes progress, and has 600 s after that"
        now_s += 200.0
        eyes.ask(dog, now_s)
    now_s += 1.0
    eyes.ask(dog, now_s)
    assert ended == [{0: 7}]
    assert [event["attempt"] for event in read_events(run, "hang")] == [1]
    assert first_mark(run, 0) is None and first_mark(run, 1) is not None


@on_real_ranks
def test_a_rank_whose_data_come_late_is_named_and_a_healthy_run_is_not(tmp_path: Path) -> None:
    run, late = RunDirectory(tmp_path / "run"), tmp_path / "late"
    run.path.mkdir()
    config = config_of(
        model={"step_s": 0.02},
        train={"max_steps": 100_000, "log_every_steps": 1000},
        data={"_target_": "small_training.LateData", "late_while": str(late)},
        health={"pace_every_steps": 2},
    )
    orders = {"run": str(run.path), "config": config, "port": free_port(), "attempt": 0, "beats": True}
    env = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        start_rank(RANK_PROGRAM, json.dumps(orders), env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    watch = Watch(run, 0, world_size=2, every_s=0.2)
    watch.add(StragglerSearch(run, excess=0.5, parallel=ParallelSection(), first_window_s=1.0))
    try:
        with watch.running(), checked(watch):
            wait_for(lambda: len(read_windows(run)) >= 3, within_s=120, what="windows of a healthy run")
            healthy = read_windows(run)
            late.touch()
            event = wait_for(lambda: read_events(run, "slow"), within_s=120, what="the finding")[0]
    finally:
        for rank in ranks:
            rank.kill()
    assert not any(window.findings for window in healthy), healthy
    assert healthy[-1].ranks[1].own_s > 0.02, "the forward pass sleeps so long"
    assert (event["kind"], event["ranks"]) == ("straggler", [1]), event
    assert event["sentence"].startswith(f"rank 1 on {os.uname().nodename}: "), event
    assert "because data come late" in event["sentence"], event
    assert event["advice"].startswith("read ahead with more workers: data.num_workers=N"), event
    window = next(window for window in read_windows(run) if window.findings)
    assert window.ranks[1].wait_s < window.ranks[0].wait_s, "whoever holds the others up waits least"
