"""Ranks without an attempt agree on one; threads play the ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from slurm_train.distributed.handshake import MeetingPoint
from slurm_train.distributed.lobby import agree_on_attempt
from slurm_train.distributed.place import RankPlace
from slurm_train.errors import RunError
from slurm_train.launch.meeting import is_under_torchrun, lobby_ports, meeting_ports

HOSTS = ("node3", "node3", "node1", "node1")


def place(rank: int) -> RankPlace:
    # One machine as far as the addresses go.
    return RankPlace(rank=rank, local_rank=rank, node_rank=0, world_size=4, local_world_size=4, host=HOSTS[rank])


def test_one_rank_opens_the_attempt_and_all_hear_its_number() -> None:
    point = MeetingPoint(
        master_addr="localhost", ports=lobby_ports("this test"), run_id="run", attempt=0, timeout_s=20.0, secret="s"
    )
    opened: list[tuple[str, ...]] = []

    def open_attempt(nodes: tuple[str, ...]) -> int:
        opened.append(nodes)
        return 40 + len(opened)

    def agree(rank: int) -> int:
        return agree_on_attempt(place(rank), point, open_attempt=open_attempt)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(agree, range(4))) == [41] * 4
        assert opened == [("node3", "node1")], "nodes in the order of the ranks, once"
        assert list(pool.map(agree, range(4))) == [42] * 4


def test_the_reason_why_nothing_is_opened_is_rank_0_s_to_tell() -> None:
    alone = RankPlace(rank=0, local_rank=0, node_rank=0, world_size=1, local_world_size=1, host="here")
    point = MeetingPoint(master_addr="", ports=lobby_ports("alone"), run_id="run", attempt=0, timeout_s=5.0)

    def refuse(_nodes: tuple[str, ...]) -> int:
        raise RunError("no", hint="none")

    with pytest.raises(RunError, match="no"):
        agree_on_attempt(alone, point, open_attempt=refuse)


def test_the_port_that_torchrun_has_taken_is_no_meeting_place() -> None:
    env = {"MASTER_PORT": "29400"}
    assert meeting_ports("run", attempt=0, env=env)[0] == 29400
    under_torchrun = env | {"TORCHELASTIC_RUN_ID": "x", "RANK": "0"}
    assert 29400 not in meeting_ports("run", attempt=0, env=under_torchrun)
    assert is_under_torchrun(under_torchrun) and not is_under_torchrun(env)
