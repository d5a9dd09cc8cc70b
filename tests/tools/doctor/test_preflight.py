"""The whole preflight of ranks on one machine, played by threads; for several nodes see test_preflight_on_slurm."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from slurm_train.config.schema import ClusterSection, PreflightSection, RunConfig
from slurm_train.distributed.greeting import MeetingPoint
from slurm_train.distributed.meeting import Meeting
from slurm_train.distributed.place import RankPlace
from slurm_train.errors import EXIT_FAILURE, EXIT_WRONG_USE, PreflightError
from slurm_train.rundir.events import fatal_line, read_preflight
from slurm_train.rundir.layout import RunDirectory
from slurm_train.tools.doctor import gather as gathering
from slurm_train.tools.doctor import preflight
from slurm_train.tools.doctor.facts import NodeFacts, Trouble
from slurm_train.tools.doctor.participant import Participant, file_name, nodes_of
from slurm_train.tools.doctor.preflight import PreflightStart, run_preflight
from slurm_train.tools.doctor.trouble import Watcher

WORLD = 3


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "runs" / "name" / "id")
    run.attempt_logs(0).mkdir(parents=True)
    run.checkpoints.mkdir()
    run.config.write_text("seed: 0\n")
    run.plan.write_text("{}")
    return run


def start(run: RunDirectory, rank: int, point: MeetingPoint, *, gpus: int = WORLD, **env: str) -> PreflightStart:
    place = RankPlace(rank=rank, local_rank=rank, node_rank=0, world_size=WORLD, local_world_size=WORLD, host="node1")
    of_slurm = {"SLURM_PROCID": str(rank), "SLURM_STEP_ID": "0", "SLURMD_NODENAME": "node1"}
    return PreflightStart(
        run=run,
        config=RunConfig(
            cluster=ClusterSection(nodes=1, gpus_per_node=WORLD), preflight=PreflightSection(budget_s=5.0)
        ),
        place=place,
        point=point,
        attempt=0,
        nodes=("node1",),
        ranks_per_node=(WORLD,),
        world_size=WORLD,
        env={**of_slurm, "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus))), **env},
    )


def point(**other: object) -> MeetingPoint:
    facts = {"master_addr": "localhost", "ports": [free_port()], "run_id": "run", "attempt": 0, "timeout_s": 20.0}
    return MeetingPoint(**{**facts, "secret": "5" * 32, **other})  # type: ignore[arg-type]


def all_ranks(starts: list[PreflightStart]) -> list[Mapping[str, str] | PreflightError]:
    def one(its: PreflightStart) -> Mapping[str, str] | PreflightError:
        try:
            return run_preflight(its)
        except PreflightError as err:
            return err

    with ThreadPoolExecutor(len(starts)) as pool:
        return list(pool.map(one, starts))


def test_healthy_ranks_find_nothing_and_leave_a_record(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    where = point()
    assert all_ranks([start(run, rank, where) for rank in range(WORLD)]) == [{}, {}, {}]
    record = read_preflight(run, 0)
    assert record["findings"] == [] and record["nodes"] == ["node1"]
    assert record["table"][0].startswith("NODE") and record["table"][1].split()[:2] == ["node1", "0-2"]
    assert capsys.readouterr().err == ""
    assert not run.preflight_folder(0).exists()


def test_every_rank_hears_of_an_error_and_of_its_kind(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    where = point()
    found = all_ranks([start(run, rank, where, gpus=2) for rank in range(WORLD)])
    assert {str(err).replace("\nhint: ", "; ") for err in found} == {fatal_line(read_preflight(run, 0))}
    assert str(found[0]).startswith("GPU_COUNT node1: 2 GPUs are visible to the ranks, 3 were asked for\nhint: ")
    assert "preflight: error: GPU_COUNT node1" in capsys.readouterr().err
    # On a node that may be to blame it is tried again, elsewhere if possible.
    assert {err.exit_code for err in found if isinstance(err, PreflightError)} == {EXIT_FAILURE}


def test_a_rank_that_is_told_another_number_says_so_by_itself(run: RunDirectory) -> None:
    its = start(run, 0, point(), SLURM_PROCID="2")
    began_s = time.monotonic()
    with pytest.raises(PreflightError, match="the task that Slurm calls rank 2 has RANK=0") as caught:
        run_preflight(its)
    assert caught.value.exit_code == EXIT_WRONG_USE and time.monotonic() - began_s < 5
    assert fatal_line(read_preflight(run, 0)) == str(caught.value).replace("\nhint: ", "; ")


def test_measuring_is_part_of_it_on_request(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm_train.tools.doctor.speed._WORK", 1000)
    where = point()
    starts = [start(run, rank, where) for rank in range(WORLD)]
    measured = [replace(its, config=replace(its.config, preflight=PreflightSection(bandwidth=True))) for its in starts]
    assert all_ranks(measured) == [{}, {}, {}]
    assert "WORK" in read_preflight(run, 0)["table"][0]


def test_a_fault_of_the_preflight_itself_stops_nothing(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> NodeFacts:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(gathering, "read_node", fail)
    where = point()
    assert all_ranks([start(run, rank, where) for rank in range(WORLD)]) == [{}, {}, {}]
    assert "preflight: what node1 is like is not known: RuntimeError: a mistake" in capsys.readouterr().err
    assert read_preflight(run, 0)["nodes"] == [], "nobody is found well"
    monkeypatch.setattr("slurm_train.tools.doctor.preflight.ProbeServer", fail)
    assert run_preflight(start(run, 0, point())) == {}
    assert "preflight: not finished, the ranks start without it: RuntimeError: a mistake" in capsys.readouterr().err


def test_ranks_that_never_come_are_named_when_the_time_is_over(run: RunDirectory) -> None:
    where = point(timeout_s=1.0)
    found = all_ranks([start(run, rank, where) for rank in range(WORLD - 1)])
    assert {type(err) for err in found} == {PreflightError}
    assert str(found[0]).startswith("NODE_MISSING node1: ranks of it have not come within 1 s and left no word\nhint: ")
    record = read_preflight(run, 0)
    assert 1.0 <= record["waited_s"] <= record["seconds"]


def test_no_free_port_is_an_error(run: RunDirectory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PreflightError, match="PORT_IN_USE node1"):
        run_preflight(start(run, 0, point(ports=[taken.getsockname()[1]])))


def test_a_port_that_was_taken_meanwhile_is_told_and_the_next_one_serves(run: RunDirectory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = point(ports=[taken.getsockname()[1], free_port()])
        assert all_ranks([start(run, rank, where) for rank in range(WORLD)]) == [{}, {}, {}]
    (finding,) = read_preflight(run, 0)["findings"]
    assert (finding["code"], finding["level"]) == ("PORT_IN_USE", "warning")


def test_preflight_and_training_are_never_mixed_up_at_one_port() -> None:
    where = point()
    assert replace(where, purpose="preflight").greeting != where.greeting
    assert replace(where, purpose="preflight").proof("x") != where.proof("x")


class Stage:
    """Rank 0 of a job of two nodes that waits for the second."""

    def __init__(self, tmp_path: Path) -> None:
        place = RankPlace(rank=0, local_rank=0, node_rank=0, world_size=2, local_world_size=1, host="node1")
        report = gathering.read_rank(place, {})
        self.participant = Participant(
            place=place,
            point=point(),
            node="node1",
            nodes=("node1", "node2"),
            ranks_per_node=(1, 1),
            folder=tmp_path,
            report=report,
            facts=None,
            budget_s=5.0,
        )
        self.told: list[str] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.meeting = Meeting(self.listener, self.participant.point, world_size=2, host="node1")
        self.watcher = Watcher(
            self.participant,
            self.meeting,
            bound=20_001,
            tell=lambda found: self.told.append(found.short),
        )

    def node2_writes(self, **trouble: object) -> None:
        facts = Trouble(**{"node": "node2", "tries": 1, "address": "10.0.0.1", "port": 20_001, **trouble})  # type: ignore[arg-type]
        other = replace(
            self.participant,
            place=replace(self.participant.place, node_rank=1),
            facts=NodeFacts(node="node2", node_rank=1),
        )
        other.write({"trouble": asdict(facts)})

    def looks(self) -> bool:
        self.watcher._looked_s -= 1.0
        return self.watcher.is_enough()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    with stage.listener:
        yield stage
        stage.meeting.abandon()


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [([0], ["node1"]), ([2, 3], ["node1", "node2"]), ([4, 3], ["node2"]), ([7], ["node2"]), ([], [])],
)
def test_ranks_that_are_missing_are_placed_by_slurms_counts(
    stage: Stage, ranks: list[int], expected: list[str]
) -> None:
    uneven = replace(stage.participant, ranks_per_node=(3, 2))
    assert nodes_of(ranks, uneven) == expected


def test_trouble_is_believed_when_it_goes_on(stage: Stage) -> None:
    stage.node2_writes(tries=5)
    assert not stage.looks(), "it may have been tried before this rank listened"
    stage.node2_writes(tries=7)
    assert stage.looks()
    assert [trouble.node for trouble in stage.watcher.believed] == ["node2"]


def test_trouble_with_another_port_says_nothing(stage: Stage) -> None:
    for tries in (5, 50):
        stage.node2_writes(tries=tries, port=20_002)
        assert not stage.looks()


def test_a_node_that_wrote_nothing_is_waited_for(stage: Stage) -> None:
    assert not stage.looks() and not stage.told
    stage.watcher._began_s -= 21.0
    assert not stage.looks()
    assert stage.told == ["NODE_MISSING node2: not all of its ranks have come within 20 s; they are waited for"]
    assert not stage.looks() and len(stage.told) == 1


@pytest.mark.parametrize("content", ["", "{", "[]", '{"node": 7}', '{"trouble": {"node": "node2"}}'])
def test_a_file_that_makes_no_sense_is_passed_over(stage: Stage, content: str) -> None:
    (stage.participant.folder / file_name(1)).write_text(content)
    assert not stage.looks()


def test_the_verdict_of_a_rank_zero_that_dies_is_not_waited_for(run: RunDirectory) -> None:
    where, done = point(timeout_s=10.0), threading.Event()

    def die() -> None:
        with socket.create_server(("127.0.0.1", where.ports[0])) as server:
            connection, _ = server.accept()
            connection.close()
        done.set()

    threading.Thread(target=die, daemon=True).start()
    its = replace(start(run, 1, where), point=replace(where, timeout_s=0.5))
    assert preflight.run_preflight(its) == {}
    assert done.wait(5)
