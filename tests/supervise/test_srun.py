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
from slurm_train.rundir.attempts import open_attempt
from slurm_train.rundir.events import add_bad_nodes
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.allocation import Allocation
from slurm_train.slurm.commands import Finished
from slurm_train.supervise import srun
from slurm_train.supervise.growth import Growth
from slurm_train.supervise.job import SlurmJob
from slurm_train.supervise.nodes import NodePool
from slurm_train.supervise.srun import SrunStep, pool_of, within_allocation
from tests.fakes.slurm_commands import FakeSlurmCommands

RUNNING = {"JobState": "RUNNING", "Restarts": "0"}
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


def flexible_step(tmp_path: Path, *, sizes: tuple[int, ...] = (3,), outlives_nodes: bool = True) -> SrunStep:
    """Returns the step of job 7 on five nodes with two ranks each, of which an attempt uses as many as `sizes` says."""
    nodes = tuple(f"node{number}" for number in range(1, 6))
    allocation = Allocation(requeue_id="7", restart_count=0, nodes=nodes, tasks_per_node=(2,) * 5)
    per_node = (2,) * sizes[-1]
    pool = replace(
        NodePool.whole(allocation),
        sizes=sizes,
        ranks_per_node=per_node,
        tasks_per_node=per_node,
        outlives_nodes=outlives_nodes,
    )
    job = SlurmJob(RunDirectory(tmp_path), allocation, {}, retry_s=0.0)
    job.commands = FakeSlurmCommands(fields={"7": {**RUNNING, "NodeList": "node[1-5]"}})  # type: ignore[assignment]
    return SrunStep(RunDirectory(tmp_path), RunConfig(), job, pool=pool, command=["srun"], env={})


def test_each_attempt_chooses_its_nodes_among_those_that_were_not_left(tmp_path: Path) -> None:
    step = flexible_step(tmp_path, sizes=(1, 2, 4))
    assert (step.start.nodes, step.start.world_size) == (("node1", "node2", "node3", "node4"), 8)
    assert step.lost_nodes(step.job.show()) == []
    step.lost = {"node1"}
    assert step.lost_nodes(step.job.show()) == ["node1"]
    step.use(step.nodes_without(["node1"]), without=["node1"])
    assert step.start.nodes == ("node2", "node3", "node4", "node5")
    # Three are left, and the run can use two of them; the third one is not forgotten.
    step.use(step.nodes_without(["node3"]), without=["node3"])
    assert (step.start.nodes, step.start.world_size) == (("node2", "node4"), 4)
    assert step.nodes_without(["node2"]) == ("node4", "node5")
    assert step.nodes_without(["node2", "node4", "node5"]) == () == step.nodes_without([])


def test_what_slurm_has_taken_from_the_job_is_lost_and_not_chosen(tmp_path: Path) -> None:
    step = flexible_step(tmp_path)
    step.job.commands.fields["7"]["NodeList"] = "node[1,3,5]"  # type: ignore[attr-defined]
    assert step.lost_nodes(step.job.show()) == ["node2"]
    assert step.nodes_without(["node2"]) == ("node1", "node3", "node5")
    # Nobody knows then.
    assert step.lost_nodes(None) == []


def test_a_job_that_slurm_ends_with_its_first_lost_node_has_no_others(tmp_path: Path) -> None:
    step = flexible_step(tmp_path, outlives_nodes=False)
    assert step.lost_nodes({**RUNNING, "NodeList": "node1"}) == () == step.nodes_without(["node2"])


@pytest.mark.parametrize(
    ("said", "is_free"),
    [
        ("srun: error: Unable to create step for job 7: Memory required by task is not available", False),
        ("NODE_MISSING node1: no answer, it said: srun: error: Unable to create step for job 7: Requested", False),
        ("srun: error: node1: task 0: Killed", True),
    ],
)
def test_a_job_that_gets_no_more_steps_is_not_free(said: str, is_free: bool, tmp_path: Path) -> None:
    step = flexible_step(tmp_path)
    for attempt in (0, 1):
        open_attempt(step._run, step.start)
        (step._run.attempt_logs(attempt) / "batch.log").write_text(f"{said}\n")
    assert step.clear(0), "the first ranks of a job: what is asked of srun may be wrong, and would be again"
    assert step.clear(1) == is_free


def test_the_step_of_a_lost_node_is_killed_and_not_waited_for(tmp_path: Path) -> None:
    step = flexible_step(tmp_path)
    step.lost = {"node2"}
    step.job.commands.running_steps = {"7.0": "attempt_0", "7.1": "other"}  # type: ignore[attr-defined]
    step.job.commands.stuck_steps = {"7.0"}  # type: ignore[attr-defined]
    assert step.clear(0)
    assert step.job.commands.cancelled == ["7.0"]  # type: ignore[attr-defined]


def test_the_ranks_are_asked_as_by_the_warning_before_the_limit(tmp_path: Path) -> None:
    step = flexible_step(tmp_path)
    commands: Any = step.job.commands
    commands.running_steps = {"7.0": "attempt_0", "7.1": "attempt_1", "7.2": "guard"}
    step.ask_ranks(1)
    assert commands.asked == ["USR2 7.1"]


def test_ranks_that_could_not_be_asked_to_stop_do_not_end_for_a_growth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_attempt: int) -> None:
        raise ClusterError("no answer")

    step = flexible_step(tmp_path)
    monkeypatch.setattr(step, "ask_ranks", refuse)
    with pytest.raises(ClusterError):
        step._stop_for_growth(0, Growth(nodes=4, is_worth_it=True, pays_after_s=1.0, sentence=""))
    assert step.growth is None, "ranks that fail now have failed by themselves"


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
