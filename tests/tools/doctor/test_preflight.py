"""The whole preflight of ranks on one machine, played by threads; for several nodes see test_preflight_on_slurm."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from slurm_train.config.schema import ClusterSection, PreflightSection, RunConfig
from slurm_train.distributed.meeting import MeetingPoint
from slurm_train.distributed.place import RankPlace
from slurm_train.errors import EXIT_FAILURE, EXIT_WRONG_USE, PreflightError
from slurm_train.rundir.events import errors_of, findings_of, read_preflight
from slurm_train.rundir.paths import RunDirectory
from slurm_train.tools.doctor import gather, probes
from slurm_train.tools.doctor.facts import JobFacts, NodeFacts, Trouble
from slurm_train.tools.doctor.preflight import AbsentNodes, Preflight
from tests.support.ports import free_port

WORLD = 3


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "runs" / "name" / "id")
    run.attempt_logs(0).mkdir(parents=True)
    run.checkpoints.mkdir()
    run.config.write_text("seed: 0\n")
    run.plan.write_text("{}")
    return run


def point(**other: Any) -> MeetingPoint:
    facts = {"master_addr": "localhost", "ports": [free_port()], "run_id": "run", "attempt": 0, "timeout_s": 20.0}
    return MeetingPoint(**{**facts, "secret": "5" * 32, **other})


def preflight(
    run: RunDirectory, rank: int, point: MeetingPoint, *, gpus: int = WORLD, bandwidth: bool = False, **env: str
) -> Preflight:
    cluster = ClusterSection(nodes=1, gpus_per_node=WORLD)
    config = RunConfig(cluster=cluster, preflight=PreflightSection(budget_s=5.0, bandwidth=bandwidth))
    place = RankPlace(rank=rank, local_rank=rank, node_rank=0, world_size=WORLD, local_world_size=WORLD, host="node1")
    of_slurm = {"SLURM_PROCID": str(rank), "SLURM_STEP_ID": "0", "CUDA_VISIBLE_DEVICES": ",".join("012"[:gpus])}
    return Preflight(run, config, place, point, of_slurm | env, ("node1",), (WORLD,), world_size=WORLD)


def all_ranks(
    run: RunDirectory, where: MeetingPoint, *, num: int = WORLD, **more: Any
) -> list[Mapping[str, str] | PreflightError]:
    def one(rank: int) -> Mapping[str, str] | PreflightError:
        try:
            return preflight(run, rank, where, **more).apply()
        except PreflightError as err:
            return err

    with ThreadPoolExecutor(num) as pool:
        return list(pool.map(one, range(num)))


def test_healthy_ranks_find_nothing_and_leave_a_record(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probes, "_WORK", 1000)
    assert all_ranks(run, point(), bandwidth=True) == [{}, {}, {}]
    record = read_preflight(run, 0)
    assert record["findings"] == [] and record["nodes"] == ["node1"]
    head, row = record["table"]
    assert head.startswith("NODE") and "WORK" in head and row.split()[:2] == ["node1", "0-2"]
    assert capsys.readouterr().err == ""
    assert not run.preflight_folder(0).exists()


def test_every_rank_gets_an_error_and_its_kind(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    found = all_ranks(run, point(), gpus=2)
    assert len({str(err) for err in found}) == 1
    assert str(found[0]).startswith("GPU_COUNT node1: 2 GPUs are visible to the ranks, 3 were asked for\nhint: ")
    assert "preflight: error: GPU_COUNT node1" in capsys.readouterr().err
    # Where one node may be to blame the run is tried again, elsewhere if possible.
    assert {err.exit_code for err in found if isinstance(err, PreflightError)} == {EXIT_FAILURE}


def test_a_rank_with_another_number_fails_by_itself(run: RunDirectory) -> None:
    with pytest.raises(PreflightError, match="the task that Slurm calls rank 2 has RANK=0") as caught:
        preflight(run, 0, point(), SLURM_PROCID="2").apply()
    assert caught.value.exit_code == EXIT_WRONG_USE
    assert errors_of(findings_of(read_preflight(run, 0)))[0].line == str(caught.value).replace("\nhint: ", "; ")


def test_a_fault_of_the_preflight_itself_stops_nothing(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> NodeFacts:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(gather, "read_node", fail)
    assert all_ranks(run, point()) == [{}, {}, {}]
    assert "preflight: what node1 is like is not known: RuntimeError: a mistake" in capsys.readouterr().err
    assert read_preflight(run, 0)["nodes"] == [], "no node is recorded as well"
    monkeypatch.setattr("slurm_train.tools.doctor.preflight.ProbeServer", fail)
    assert preflight(run, 0, point()).apply() == {}
    assert "preflight: not finished, the ranks start without it: RuntimeError: a mistake" in capsys.readouterr().err


def test_ranks_that_never_come_are_named_when_the_time_is_over(run: RunDirectory) -> None:
    found = all_ranks(run, point(timeout_s=1.0), num=WORLD - 1)
    assert {str(err).partition(":")[0] for err in found} == {"NODE_MISSING node1"}
    assert read_preflight(run, 0)["waited_s"] >= 1.0


def test_a_taken_port_is_a_warning_while_another_is_free(run: RunDirectory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [taken.getsockname()[1], free_port()]
        assert all_ranks(run, point(ports=ports)) == [{}, {}, {}]
        (finding,) = read_preflight(run, 0)["findings"]
        assert (finding["code"], finding["level"]) == ("PORT_IN_USE", "warning")
        with pytest.raises(PreflightError, match="PORT_IN_USE node1"):
            preflight(run, 0, point(ports=ports[:1])).apply()


def test_the_verdict_of_a_rank_zero_that_dies_is_not_waited_for(run: RunDirectory) -> None:
    where = point(timeout_s=0.5)

    def die() -> None:
        with socket.create_server(("127.0.0.1", where.ports[0])) as server:
            server.accept()[0].close()

    with ThreadPoolExecutor(1) as pool:
        died = pool.submit(die)
        assert preflight(run, 1, where).apply() == {}
        died.result(timeout=60)


class TwoNodes:
    """Rank 0 of a job of two nodes that waits for the second."""

    missing = (1,)

    def __init__(self, run: RunDirectory) -> None:
        self.first, self.second = (self._preflight(run, rank) for rank in range(2))
        job = JobFacts(names=("node1", "node2"), world_size=2, bound_port=20_001)
        self.absent = AbsentNodes(self.first, self, job)  # type: ignore[arg-type]  # for its `missing`

    def _preflight(self, run: RunDirectory, rank: int) -> Preflight:
        host, found = f"node{rank + 1}", preflight(run, 0, point())
        found.nodes, found.ranks_per_node = ("node1", "node2"), (1, 1)
        found.place = RankPlace(rank=rank, local_rank=0, node_rank=rank, world_size=2, local_world_size=1, host=host)
        found.report = {"node": asdict(NodeFacts(node=host, node_rank=rank))}
        return found

    def writes(self, **trouble: Any) -> None:
        facts = Trouble(**{"node": "node2", "address": "10.0.0.1", "port": 20_001, **trouble})
        self.second.write("trouble", trouble=asdict(facts))

    def is_enough(self) -> bool:
        self.absent._looked_s -= 1.0
        return self.absent.is_enough()


@pytest.fixture
def two_nodes(run: RunDirectory) -> TwoNodes:
    return TwoNodes(run)


def test_missing_ranks_are_placed_by_slurms_counts(two_nodes: TwoNodes) -> None:
    two_nodes.first.ranks_per_node = (3, 2)
    assert [two_nodes.first.nodes_of([2, rank]) for rank in (3, 7)] == [["node1", "node2"]] * 2


def test_trouble_is_believed_when_it_goes_on_at_rank_zeros_port(two_nodes: TwoNodes) -> None:
    two_nodes.writes(tries=5)
    assert not two_nodes.is_enough(), "it may be from before rank 0 listened"
    two_nodes.writes(tries=50, port=20_002)
    assert not two_nodes.is_enough(), "that is another port than rank 0's"
    two_nodes.writes(tries=7)
    assert two_nodes.is_enough()
    assert [trouble.node for trouble in two_nodes.absent.believed] == ["node2"]


def test_a_node_that_wrote_nothing_is_waited_for_and_mentioned_once(
    two_nodes: TwoNodes, run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    two_nodes.absent._began_s -= 21.0
    assert not two_nodes.is_enough() and not two_nodes.is_enough()
    assert capsys.readouterr().err.count("NODE_MISSING node2: not all of its ranks have come within 20 s") == 1
    assert read_preflight(run, 0)["nodes"] == [], "no node is recorded as well"


@pytest.mark.parametrize("content", ["{", "[]", '{"trouble": {"node": "node2"}}'])
def test_a_damaged_file_is_passed_over(two_nodes: TwoNodes, run: RunDirectory, content: str) -> None:
    run.preflight_folder(0).mkdir()
    (run.preflight_folder(0) / "trouble_1.json").write_text(content)
    assert not two_nodes.is_enough()
