"""Which rank am I: a table of environments."""

from __future__ import annotations

import socket

import pytest

from slurm_train.distributed.place import RankPlace
from slurm_train.errors import ClusterError

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[0-1]",
    "SLURM_NTASKS": "6",
    "SLURM_TASKS_PER_NODE": "4,2",
}
PLACE = RankPlace(rank=5, local_rank=1, node_rank=1, world_size=6, local_world_size=2, host="n1")


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (TORCHRUN, PLACE),
        (SLURM, PLACE),
        # A local launch typed inside `srun --pty bash`.
        (
            {**SLURM, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            RankPlace(rank=0, local_rank=0, node_rank=0, world_size=2, local_world_size=2, host="n1"),
        ),
        ({}, RankPlace(rank=0, local_rank=0, node_rank=0, world_size=1, local_world_size=1, host="n1")),
    ],
    ids=["torchrun", "slurm 4+2", "local in srun shell", "alone"],
)
def test_place_of_an_environment(env: dict[str, str], expected: RankPlace) -> None:
    assert RankPlace.from_env(env, host="n1") == expected
    assert expected.spans_nodes == (expected.world_size == 6)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE='x' is not a number"),
        ({"GROUP_RANK": ""}, "GROUP_RANK='' is not a number"),
        ({"RANK": "6"}, "contradict each other: RANK=6, LOCAL_RANK=1, WORLD_SIZE=6, LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_RANK": "2"}, "contradict each other"),
        ({"LOCAL_WORLD_SIZE": None}, "RANK is set, but LOCAL_WORLD_SIZE is not"),
    ],
)
def test_contradictions_are_refused(change: dict[str, str | None], text: str) -> None:
    env = {key: value for key, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(ClusterError, match=text):
        RankPlace.from_env(env)


def test_a_node_goes_by_its_name_in_slurm() -> None:
    assert RankPlace.from_env({**SLURM, "SLURMD_NODENAME": "gpu-a7"}).host == "gpu-a7"
    assert RankPlace.from_env(TORCHRUN).host == socket.gethostname()
