"""The ranks of an attempt under srun: which nodes the run takes, and how a lost one is found."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from slurm_train.config.schema import ClusterSection, RunConfig
from slurm_train.distributed import interfaces
from slurm_train.rundir.events import add_bad_nodes
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.allocation import Allocation
from slurm_train.slurm.commands import Finished
from slurm_train.supervise import srun
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
