"""What the judges of a job of Slurm conclude: lost nodes, steps in the way, and when a run asks for more nodes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from slurm_train.rundir.attempts import open_attempt
from slurm_train.rundir.events import FailureMark, leave_mark, read_events
from slurm_train.rundir.heartbeat import Heartbeat
from slurm_train.rundir.ledger import Start
from slurm_train.rundir.paths import CheckpointName, RunDirectory
from slurm_train.rundir.timing import Spent
from slurm_train.slurm.allocation import Allocation
from slurm_train.slurm.refusals import TestVerdict
from slurm_train.supervise import job_judges
from slurm_train.supervise.growth import Growth
from slurm_train.supervise.job import SlurmJob
from slurm_train.supervise.job_judges import GrowthWatch, LostNodes, Room, StepsInTheWay, room_for
from slurm_train.supervise.nodes import NodePool
from tests.fakes.slurm_commands import FakeSlurmCommands, job_state
from tests.supervise.looks import Eyes
from tests.support.ledgers import close_attempt

RUNNING = {"JobState": "RUNNING", "Restarts": "0"}
NODES = ("node1", "node2", "node3")


def allocation(*nodes: str) -> Allocation:
    return Allocation(requeue_id="7", restart_count=0, nodes=nodes, tasks_per_node=(2,) * len(nodes))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmJob:
    run = RunDirectory(tmp_path)
    run.attempt_logs(0).mkdir(parents=True)
    monkeypatch.setattr(LostNodes, "_FAILED_S", 600.0)
    monkeypatch.setattr(LostNodes, "_SILENT_S", 600.0)
    return SlurmJob(run, allocation(*NODES), {}, retry_s=0.0)


def test_nodes_are_asked_when_ranks_have_failed_and_srun_waits(
    job: SlurmJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path)
    asked: list[bool] = []
    judge, eyes = LostNodes(lambda: asked.append(True)), Eyes(run)
    eyes.ask(judge)
    leave_mark(run, 0, FailureMark(rank=0, host="node1", exit_code=1, message="Connection reset by peer"))
    eyes.ask(judge)
    assert not asked, "srun ends by itself as a rule"
    monkeypatch.setattr(LostNodes, "_FAILED_S", 0.0)
    eyes.ask(judge)
    assert asked == [True]


def test_nodes_are_asked_when_the_heartbeats_of_one_stop(
    job: SlurmJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path)
    asked: list[bool] = []
    judge, eyes = LostNodes(lambda: asked.append(True)), Eyes(run)
    heart = Heartbeat()
    heart.start(run, 0, rank=2, host="node2", limits=None, local_rank=0)
    eyes.ask(judge)
    assert not asked
    heart.stop()
    eyes.ask(judge)
    assert not asked
    monkeypatch.setattr(LostNodes, "_SILENT_S", 0.0)
    eyes.ask(judge)
    assert asked == [True]


@pytest.mark.parametrize(
    ("steps", "is_blocked", "cancelled"),
    [
        pytest.param({"7.0": "attempt_1", "7.batch": "batch"}, True, ["7.0", "7.0"], id="it-stays"),
        pytest.param({"7.0": "attempt_1", "7.1": "attempt_2"}, False, [], id="the-ranks-have-begun"),
        pytest.param({"7.0": "python", "7.batch": "batch"}, False, [], id="somebody-elses"),
    ],
)
def test_a_step_that_slurm_keeps_is_found_when_the_ranks_cannot_begin(
    steps: dict[str, str], is_blocked: bool, cancelled: list[str], job: SlurmJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(job.commands, "steps", lambda _job_id: steps)
    monkeypatch.setattr(job.commands, "cancel_step", ended.append)
    earlier = {"attempt_0", "attempt_1"}
    judge, eyes = StepsInTheWay(job, "attempt_2", earlier=earlier), Eyes(job._run)
    for number in range(1, 5):
        eyes.ask(judge, time.monotonic() + 11 * number)
    assert judge.stuck_steps == ("7.0" if is_blocked else "")
    assert ended == cancelled


# --- more nodes ---


def growing_job(tmp_path: Path, **fields: str) -> tuple[Callable[..., Room], FakeSlurmCommands]:
    """Returns the question of job 7 of a run of 2 to 8 nodes, which has five; two others are free now."""
    nodes = tuple(f"node{number}" for number in range(1, 6))
    pool = replace(NodePool.whole(allocation(*nodes)), sizes=tuple(range(2, 9)))
    job = SlurmJob(RunDirectory(tmp_path), allocation(*nodes), {}, retry_s=0.0)
    commands = FakeSlurmCommands(fields={"7": {**RUNNING, "Requeue": "1", "NodeList": "node[1-5]", **fields}})
    commands.verdict = TestVerdict(is_accepted=True, start=str(int(time.time())), nodelist="node[6-7]")
    job.commands = commands  # type: ignore[assignment]

    def room(*left_out: str) -> Room:
        return room_for(RunDirectory(tmp_path), job, pool, left_out=left_out)

    return room, commands


def test_only_the_missing_nodes_are_asked_for_since_slurm_counts_the_jobs_own_as_taken(tmp_path: Path) -> None:
    room, commands = growing_job(tmp_path, ExcNodeList="node9")
    assert room() == Room(nodes=7)
    assert commands.test_flags == ("--nodes=1-3", "--exclude=node[1-5],node9")
    # One was lost, and Slurm has taken it from the job: it is a free node as any other once it is back.
    commands.fields["7"]["NodeList"] = "node[1-4]"
    assert room("node5") == Room(nodes=6) and commands.test_flags[0] == "--nodes=1-4"


def test_a_bad_node_of_the_job_is_not_counted_and_not_had_again(tmp_path: Path) -> None:
    room, commands = growing_job(tmp_path)
    assert room("node2") == Room(nodes=6, exclude=("node2",))
    assert commands.test_flags == ("--nodes=1-4", "--exclude=node[1-5]")


@pytest.mark.parametrize(
    ("fields", "verdict", "waiting", "why"),
    [
        pytest.param({"Requeue": "0"}, {}, {}, "may not be requeued", id="no requeue"),
        pytest.param({"ReqNodeList": "node[1-8]"}, {}, {}, "names its nodes", id="its nodes are named"),
        pytest.param({}, {"start": "later"}, {}, "no other node is free", id="not now"),
        pytest.param({}, {"start": ""}, {}, "no other node is free", id="no estimate"),
        pytest.param({}, {"preempts": True}, {}, "no other node is free", id="others would lose theirs"),
        pytest.param({}, {}, {"reason": "Resources"}, "job 8 waits", id="another job waits"),
        pytest.param({}, {}, {"reason": "BeginTime", "start": "soon"}, "job 8 waits", id="a requeued job waits"),
        pytest.param({}, {}, {"reason": "BeginTime", "start": "later"}, "", id="one that begins tomorrow"),
        pytest.param({}, {}, {"reason": "Dependency"}, "", id="one that waits for something else"),
        pytest.param({}, {}, {"reason": "Resources", "partition": "other"}, "", id="in another partition"),
    ],
)
def test_what_keeps_a_job_from_more_nodes(
    fields: dict[str, str], verdict: dict[str, Any], waiting: dict[str, str], why: str, tmp_path: Path
) -> None:
    times = {"soon": str(int(time.time()) + 100), "later": str(int(time.time()) + 86400)}
    room, commands = growing_job(tmp_path, **fields)
    commands.verdict = replace(commands.verdict, **{name: times.get(value, value) for name, value in verdict.items()})
    if waiting:
        waiting = {name: times.get(value, value) for name, value in waiting.items()}
        commands.jobs["8"] = job_state("8", "PENDING", **{"partition": "main", **waiting})
    found = room()
    assert (found.nodes, bool(found.limit_reason)) == ((5, True) if why else (7, False))
    assert why in found.limit_reason


class Clock:
    """`time` as the watch sees it: seconds pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return time.time() + self.now_s - 1000.0

    def ask(self, watch: GrowthWatch) -> None:
        """Asks after the pause between two looks."""
        self.now_s += 5.0
        Eyes(watch._run).ask(watch, self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(job_judges, "time", found)
    return found


class Shrunk:
    """A run of two to four nodes that has trained on three for a while, and its job, which could have four."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run = RunDirectory(folder)
        nodes = allocation(*NODES)
        self.pool = replace(NodePool.whole(nodes), sizes=(2, 3, 4), ranks_per_node=(2,) * 4, outlives_nodes=True)
        self.job = SlurmJob(self.run, nodes, {}, retry_s=0.0)
        self.start = Start(job_id="7", restart_count=0, nodes=NODES, world_size=6)
        self.room = Room(nodes=4)
        self.asked: list[Growth] = []
        self.questions = 0
        open_attempt(self.run, self.start)
        spent = Spent(begin_unix_s=time.time(), steps=100, step_s=200.0, longest_save_s=1.0, rendezvous_s=4.0)
        spent.write(self.run.account(0))
        self.run.plan.write_text(json.dumps({"max_steps": 100_000}))
        monkeypatch.setattr(job_judges, "room_for", self._room)
        monkeypatch.setattr(self.job, "requeue_delay_s", lambda: 120.0)
        monkeypatch.setattr(self.job, "may_be_preempted", lambda: True)

    def watch(self, attempt: int = 0, *, every_min: int | Literal["auto"] = 10) -> GrowthWatch:
        return GrowthWatch(
            *(self.run, attempt, self.job, self.pool),
            nodes=3,
            left_out=(),
            stop=self.asked.append,
            every_min=every_min,
        )

    def _room(self, *_: object, **__: object) -> Room:
        self.questions += 1
        return self.room

    def save(self, step: int) -> None:
        (self.run.checkpoints / str(CheckpointName(step, 0, "0123abcd"))).mkdir(parents=True)

    def events(self) -> list[str]:
        return [str(event["sentence"]) for event in read_events(self.run, "growth")]


@pytest.fixture
def shrunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shrunk:
    return Shrunk(tmp_path, monkeypatch)


def test_a_run_asks_for_more_nodes_at_a_save_and_not_more_often_than_it_should(shrunk: Shrunk, clock: Clock) -> None:
    shrunk.room = Room(nodes=3, limit_reason="no other node is free")
    watch = shrunk.watch()
    shrunk.save(4)
    clock.ask(watch)
    clock.now_s += 601
    clock.ask(watch)
    clock.ask(watch)
    assert shrunk.questions == 0, "the newest save is an old one"
    shrunk.save(8)
    clock.ask(watch)
    assert shrunk.questions == 1 and not shrunk.asked
    shrunk.save(12)
    clock.now_s += 300
    clock.ask(watch)
    assert shrunk.questions == 1
    shrunk.room = Room(nodes=4, exclude=("node9",))
    clock.now_s += 301
    clock.ask(watch)
    shrunk.save(16)
    clock.ask(watch)
    (growth,) = shrunk.asked
    assert (growth.nodes, growth.exclude) == (4, ("node9",))
    # 120 s of Slurm, 30 s in the queue, 4 s to meet, a save.
    assert "a step takes 1.5 s (estimated) instead of 2 s" in growth.sentence and "2 min 35 s" in growth.sentence
    assert [text.split(":")[0] for text in shrunk.events()] == ["it does not grow", "it grows"]
    clock.now_s += 10_000
    clock.ask(watch)
    assert shrunk.questions == 2, "it was asked to stop already"


def test_a_run_that_is_nearly_done_does_not_grow_and_says_why(shrunk: Shrunk, clock: Clock) -> None:
    shrunk.run.plan.write_text(json.dumps({"max_steps": 120}))
    watch = shrunk.watch()
    clock.now_s += 601
    clock.ask(watch)
    shrunk.save(8)
    clock.ask(watch)
    assert shrunk.asked == []
    assert "it does not grow: 4 nodes instead of 3" in shrunk.events()[0]


def test_by_default_a_run_that_may_be_preempted_does_not_grow(shrunk: Shrunk, clock: Clock) -> None:
    watch = shrunk.watch(every_min="auto")
    clock.now_s += 1801
    for step in (4, 8, 12):
        shrunk.save(step)
        clock.ask(watch)
        clock.now_s += 10_000
    assert shrunk.questions == 0 and "may be preempted" in shrunk.events()[0] and len(shrunk.events()) == 1


def test_a_failed_growth_is_remembered_by_the_next_attempt(shrunk: Shrunk, clock: Clock) -> None:
    close_attempt(shrunk.run, 0, {"reason": "growth", "action": "requeue", "grow_to": 4, "pays_after_s": 600.0})
    open_attempt(shrunk.run, replace(shrunk.start, restart_count=1))
    watch = shrunk.watch(1)
    clock.ask(watch)
    clock.now_s += 1180
    clock.ask(watch)
    assert watch._last_seen_step is None, "it waits for twice as long"
    clock.now_s += 20
    clock.ask(watch)
    assert watch._last_seen_step is not None
