"""The ranks of an attempt under srun: which nodes the run takes, and how a lost one is found."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_train.config.schema import ClusterSection, RunConfig
from slurm_train.distributed import interfaces
from slurm_train.errors import ClusterError
from slurm_train.rundir.attempts import close_attempt, open_attempt
from slurm_train.rundir.events import FailureMark, add_bad_nodes, leave_mark, read_events
from slurm_train.rundir.heartbeat import Heartbeat
from slurm_train.rundir.paths import CheckpointName, RunDirectory
from slurm_train.rundir.timing import Spent
from slurm_train.slurm.allocation import Allocation
from slurm_train.slurm.commands import Finished
from slurm_train.supervise import srun
from slurm_train.supervise.nodes import NodePool
from slurm_train.supervise.scheduler import Room, SlurmJob
from slurm_train.supervise.srun import pool_of, within_allocation

NODES = ("node1", "node2", "node3")


def allocation(*nodes: str) -> Allocation:
    return Allocation(requeue_id="7", restart_count=0, nodes=nodes, tasks_per_node=(2,) * len(nodes))


def test_the_nodes_of_a_run_are_those_of_its_plan_and_bad_ones_are_used_last(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "name" / "0123")
    run.path.mkdir(parents=True)
    run.plan.write_text(json.dumps({"world": {"ranks_per_node": [4, 4], "num_nodes": [1, 2]}}))
    add_bad_nodes(run, {"node1": "no GPU"}, hours=1, now_unix_s=time.time())
    pools = {
        launcher: pool_of(allocation(*NODES), run, RunConfig(cluster=ClusterSection(nodes="1-2", launcher=launcher)))
        for launcher in ("srun", "torchrun")
    }
    by_srun = pools["srun"]
    assert by_srun.choose() == ("node2", "node3") and by_srun.outlives_nodes and by_srun.sizes == (1, 2)
    assert by_srun.ranks_per_node == by_srun.tasks_per_node == (4, 4)
    # The agents of torchrun start their ranks again themselves.
    by_torchrun = pools["torchrun"]
    assert by_torchrun.choose() == ("node1", "node2") and not by_torchrun.outlives_nodes
    assert (by_torchrun.ranks_per_node, by_torchrun.tasks_per_node) == ((4, 4), (1, 1))


@pytest.mark.parametrize(
    ("cpus_per_node", "asked", "used"),
    [
        pytest.param("8(x3)", 4, 4, id="the-script's-own-job"),
        pytest.param("2(x3)", 4, 1, id="an-salloc-without-a-number"),
        pytest.param("8,4(x2)", 4, 2, id="uneven-nodes"),
        pytest.param("1(x3)", 4, 1, id="overcommitted"),
        pytest.param("", 4, 4, id="not-said"),
    ],
)
def test_ranks_ask_for_no_more_cpus_than_their_allocation_has(cpus_per_node: str, asked: int, used: int) -> None:
    words = ["srun", "--nodes=3", f"--cpus-per-task={asked}", "python"]
    found = within_allocation(words, {"SLURM_JOB_CPUS_PER_NODE": cpus_per_node}, tasks_per_node=2)
    assert found == ["srun", "--nodes=3", f"--cpus-per-task={used}", "python"]
    components = {"SLURM_HET_SIZE": "2", "SLURM_JOB_CPUS_PER_NODE": "1"}
    assert within_allocation(words, components, tasks_per_node=2) == words, "each component has a number of its own"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmJob:
    """A job whose second node does not answer."""
    run = RunDirectory(tmp_path)
    run.attempt_logs(0).mkdir(parents=True)
    monkeypatch.setattr(srun, "silent_nodes", lambda _run, nodes, _env: [nodes[1]])
    monkeypatch.setattr(srun._LostNodes, "_FAILED_S", 600.0)
    monkeypatch.setattr(srun._LostNodes, "_SILENT_S", 600.0)
    pool = replace(NodePool.whole(allocation(*NODES, "node4")), sizes=(3,), outlives_nodes=True)
    return SlurmJob(run, allocation(*NODES, "node4"), {}, pool=pool, retry_s=0.0)


def test_nodes_are_asked_when_ranks_have_failed_and_srun_waits(
    job: SlurmJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path)
    look = srun._LostNodes(run, 0, job, {}).look
    look()
    leave_mark(run, 0, FailureMark(rank=0, host="node1", exit_code=1, message="Connection reset by peer"))
    look()
    assert job.lost == set(), "srun ends by itself as a rule"
    monkeypatch.setattr(srun._LostNodes, "_FAILED_S", 0.0)
    look()
    assert job.lost == {"node2"}


def test_nodes_are_asked_when_the_heartbeats_of_one_stop(
    job: SlurmJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, task = RunDirectory(tmp_path), srun._LostNodes(RunDirectory(tmp_path), 0, job, {})
    heart = Heartbeat()
    heart.start(run, 0, rank=2, host="node2", limits=None, local_rank=0)
    task.look()
    assert job.lost == set()
    heart.stop()
    task.look()
    assert job.lost == set()
    monkeypatch.setattr(srun._LostNodes, "_SILENT_S", 0.0)
    task.look()
    assert job.lost == {"node2"}


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
    task = srun._StepsInTheWay(job._run, 2, job)
    for _ in range(4):
        task.look()
    assert task.stuck_steps == ("7.0" if is_blocked else "")
    assert ended == cancelled


# --- more nodes ---


class Clock:
    """`time` as the watch sees it: seconds pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return time.time() + self.now_s - 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(srun, "time", found)
    return found


class Shrunk:
    """A run of two to four nodes that has trained on three for a while, and its job, which could have four."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run = RunDirectory(folder)
        nodes = allocation(*NODES)
        pool = replace(NodePool.whole(nodes), sizes=(2, 3, 4), ranks_per_node=(2,) * 4, outlives_nodes=True)
        self.job = SlurmJob(self.run, nodes, {}, pool=pool, retry_s=0.0)
        self.room = Room(nodes=4)
        self.asked: list[int] = []
        self.questions = 0
        open_attempt(self.run, self.job.start)
        spent = Spent(begin_unix_s=time.time(), steps=100, step_s=200.0, longest_save_s=1.0, rendezvous_s=4.0)
        spent.write(self.run.account(0))
        self.run.plan.write_text(json.dumps({"max_steps": 100_000}))
        monkeypatch.setattr(self.job, "room", self._room)
        monkeypatch.setattr(self.job, "requeue_delay_s", lambda: 120.0)
        monkeypatch.setattr(self.job, "may_be_preempted", lambda: True)
        monkeypatch.setattr(self.job, "ask_ranks", self.asked.append)

    def _room(self) -> Room:
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
    watch = srun._GrowthWatch(shrunk.run, 0, shrunk.job, every_min=10)
    shrunk.save(4)
    watch.look()
    clock.now_s += 601
    watch.look()
    watch.look()
    assert shrunk.questions == 0, "the newest save is an old one"
    shrunk.save(8)
    watch.look()
    assert shrunk.questions == 1 and shrunk.job.growth is None
    shrunk.save(12)
    clock.now_s += 300
    watch.look()
    assert shrunk.questions == 1
    shrunk.room = Room(nodes=4, exclude=("node9",))
    clock.now_s += 301
    watch.look()
    shrunk.save(16)
    watch.look()
    growth = shrunk.job.growth
    assert growth is not None and shrunk.asked == [0] and (growth.nodes, growth.exclude) == (4, ("node9",))
    # 120 s of Slurm, 30 s in the queue, 4 s to meet, a save.
    assert "a step takes 1.5 s (estimated) instead of 2 s" in growth.sentence and "2 min 35 s" in growth.sentence
    assert [text.split(":")[0] for text in shrunk.events()] == ["it does not grow", "it grows"]
    clock.now_s += 10_000
    watch.look()
    assert shrunk.questions == 2, "it was asked to stop already"


def test_a_run_that_is_nearly_done_does_not_grow_and_says_why(shrunk: Shrunk, clock: Clock) -> None:
    shrunk.run.plan.write_text(json.dumps({"max_steps": 120}))
    watch = srun._GrowthWatch(shrunk.run, 0, shrunk.job, every_min=10)
    clock.now_s += 601
    watch.look()
    shrunk.save(8)
    watch.look()
    assert shrunk.asked == [] and shrunk.job.growth is None
    assert "it does not grow: 4 nodes instead of 3" in shrunk.events()[0]


def test_by_default_a_run_that_may_be_preempted_does_not_grow(shrunk: Shrunk, clock: Clock) -> None:
    watch = srun._GrowthWatch(shrunk.run, 0, shrunk.job, every_min="auto")
    clock.now_s += 1801
    for step in (4, 8, 12):
        shrunk.save(step)
        watch.look()
        clock.now_s += 10_000
    assert shrunk.questions == 0 and "may be preempted" in shrunk.events()[0] and len(shrunk.events()) == 1


def test_a_failed_growth_is_remembered_by_the_next_attempt(shrunk: Shrunk, clock: Clock) -> None:
    close_attempt(shrunk.run, 0, {"reason": "growth", "action": "requeue", "grow_to": 4, "pays_after_s": 600.0})
    open_attempt(shrunk.run, replace(shrunk.job.start, restart_count=1))
    watch = srun._GrowthWatch(shrunk.run, 1, shrunk.job, every_min=10)
    watch.look()
    clock.now_s += 1190
    watch.look()
    assert watch._last_seen_step is None, "it waits for twice as long"
    clock.now_s += 20
    watch.look()
    assert watch._last_seen_step is not None


def test_a_refused_question_is_asked_again_and_nothing_is_said_of_a_growth(
    shrunk: Shrunk, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_attempt: int) -> None:
        raise ClusterError("no answer")

    monkeypatch.setattr(shrunk.job, "ask_ranks", refuse)
    watch = srun._GrowthWatch(shrunk.run, 0, shrunk.job, every_min=10)
    clock.now_s += 601
    watch.look()
    shrunk.save(8)
    with pytest.raises(ClusterError):
        watch.look()
    assert shrunk.job.growth is None, "ranks that fail now have failed by themselves"


@pytest.mark.parametrize("here", ["node1", "login"])
def test_the_ranks_meet_at_the_interface_of_rank_0s_node(
    here: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []

    def ask(words: list[str], nodes: list[str], *_: object, **__: object) -> Finished:
        asked.append([words[-1], *nodes])
        return Finished(0, "10.79.0.11\n" if words[-1] == "ib0" else "\n", "")

    monkeypatch.setattr(interfaces, "interface_addresses", lambda: {"ib0": "10.79.0.11"})
    monkeypatch.setattr(srun, "run_on_each_node", ask)
    monkeypatch.setattr(srun.socket, "getaddrinfo", lambda *_: [])
    env = {"SLURMD_NODENAME": here}
    job: Any = None

    def address(**settings: str) -> str:
        return srun._address("node1", job, ClusterSection(**settings), env)  # type: ignore[arg-type]

    assert address(network_interface="ib0") == "10.79.0.11"
    assert asked == ([] if here == "node1" else [["ib0", "node1"]])
    assert address(rendezvous_address="%Ni") == "node1i" and address() == "node1"
    assert capfd.readouterr().err == ""
    assert address(rendezvous_address="ib7") == "node1"
    assert "node1 has no address on ib7" in capfd.readouterr().err
