from __future__ import annotations

from collections.abc import Callable

import pytest

from slurm_train.errors import ClusterError
from slurm_train.slurm.allocation import Allocation, TaskPlace, het_job_ids
from tests.support.refusals import refusal

Recorded = Callable[[str], dict[str, str]]

BATCH = {
    "SLURM_JOB_ID": "8",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
TASK = BATCH | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"SLURM_RESTART_COUNT": "2"}, "restart_count", 2),
        ({"SLURM_STEP_NODELIST": "node2", "SLURM_STEP_TASKS_PER_NODE": "3"}, "nodes", ("node2",)),
        ({"SLURM_STEP_NODELIST": "node2", "SLURM_STEP_TASKS_PER_NODE": "3"}, "tasks_per_node", (3,)),
        ({"SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "4"}, "requeue_id", "8_4"),
        ({"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}, "requeue_id", "7_0"),
    ],
)
def test_variables_beyond_the_plain_job(changes: dict[str, str], field: str, value: object) -> None:
    assert getattr(Allocation.from_env(BATCH | changes), field) == value


@pytest.mark.parametrize(
    ("name", "nodes", "tasks_per_node", "requeue_id"),
    [
        ("batch", ("node1", "node2"), (2, 2), "8"),
        ("plain_rank3", ("node1", "node2"), (2, 2), "8"),
        ("uneven_rank5", ("node3", "node4"), (5, 1), "13"),
        ("array_rank1", ("node1", "node2"), (2, 2), "9_5"),
        # Slurm sorts the step's list ("node[1-4]", "2,4,2,4"); rank 0 is on node2 all the same.
        ("het_rank8", ("node2", "node4", "node1", "node3"), (4, 4, 2, 2), "30"),
        ("het_batch", ("node2", "node4", "node1", "node3"), (4, 4, 2, 2), "30"),
    ],
)
def test_recorded_environments_of_slurm_22_05(
    name: str, nodes: tuple[str, ...], tasks_per_node: tuple[int, ...], requeue_id: str, recorded_env: Recorded
) -> None:
    found = Allocation.from_env(recorded_env(name))
    assert (found.nodes, found.tasks_per_node, found.requeue_id) == (nodes, tasks_per_node, requeue_id)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("plain_rank3", TaskPlace(rank=3, local_rank=1, node_rank=1, world_size=4, local_world_size=2)),
        ("uneven_rank5", TaskPlace(rank=5, local_rank=0, node_rank=1, world_size=6, local_world_size=1)),
        ("array_rank1", TaskPlace(rank=1, local_rank=1, node_rank=0, world_size=4, local_world_size=2)),
        ("het_rank8", TaskPlace(rank=8, local_rank=0, node_rank=2, world_size=12, local_world_size=2)),
    ],
)
def test_recorded_places_of_slurm_22_05(name: str, place: TaskPlace, recorded_env: Recorded) -> None:
    env = recorded_env(name)
    assert TaskPlace.from_env(env) == place
    assert Allocation.from_env(env).nodes[place.node_rank] == env["SLURMD_NODENAME"]


def test_the_components_of_a_heterogeneous_job_are_counted_and_named(recorded_env: Recorded) -> None:
    env = recorded_env("het_batch")
    assert het_job_ids(env) == ("30", "31")
    assert het_job_ids(recorded_env("batch")) == ()


def test_a_step_on_one_component_of_a_heterogeneous_job_has_only_its_nodes(recorded_env: Recorded) -> None:
    env = recorded_env("het_rank8") | {"SLURM_STEP_NODELIST": "node[1,3]", "SLURM_STEP_NUM_TASKS": "4"}
    found = Allocation.from_env(env)
    assert (found.nodes, found.tasks_per_node) == (("node1", "node3"), (2, 2))


def test_a_step_on_parts_of_components_is_refused(recorded_env: Recorded) -> None:
    env = recorded_env("het_rank8") | {"SLURM_STEP_NODELIST": "node[1-2]"}
    with pytest.raises(ClusterError, match=r"SLURM_STEP_NODELIST=node1,node2 does not fit the step's job components"):
        Allocation.from_env(env)


def test_a_batch_script_has_no_place_although_slurm_gives_it_rank_0(recorded_env: Recorded) -> None:
    env = recorded_env("batch")
    assert env["SLURM_PROCID"] == "0"
    assert str(refusal(ClusterError, TaskPlace.from_env, env)) == (
        "SLURM_STEP_ID is not set\n"
        "hint: start the process with srun inside the job; a batch script or a login shell has no rank"
    )


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({}, "SLURM_STEP_NODELIST and SLURM_JOB_NODELIST and SLURM_NODELIST are not set"),
        (without(BATCH, "SLURM_TASKS_PER_NODE"), "SLURM_STEP_TASKS_PER_NODE and SLURM_TASKS_PER_NODE are not set"),
        (BATCH | {"SLURM_JOB_ID": "8x"}, "SLURM_JOB_ID='8x' is not a number"),
        (BATCH | {"SLURM_ARRAY_JOB_ID": "8"}, "SLURM_ARRAY_TASK_ID is not set"),
        (
            BATCH | {"SLURM_JOB_NODELIST": "node[x]"},
            "SLURM_JOB_NODELIST: 'node[x]' is not a Slurm list: expected a number or a range, found 'x'",
        ),
        (
            BATCH | {"SLURM_TASKS_PER_NODE": "2,2,2"},
            "Slurm lists 2 nodes (node1,node2) but task counts for 3 (2,2,2)",
        ),
    ],
)
def test_an_allocation_error_names_variable_and_value(env: dict[str, str], message: str) -> None:
    assert refusal(ClusterError, Allocation.from_env, env).message == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID=4 does not fit the step's 4 tasks"),
        ({"SLURM_LOCALID": "2"}, "SLURM_LOCALID=2 does not fit the step's 2 tasks on this node"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID=2 does not fit the step's 2 nodes"),
        ({"SLURM_STEP_NUM_TASKS": "6"}, "SLURM_STEP_NUM_TASKS=6 does not fit the step's task counts (2, 2)"),
        ({"SLURM_LOCALID": "\u0661"}, "SLURM_LOCALID='\u0661' is not a number"),
    ],
)
def test_a_place_error_names_variable_and_value(changes: dict[str, str], message: str) -> None:
    error = refusal(ClusterError, TaskPlace.from_env, TASK | changes)
    assert error.message == message
    assert "srun" in error.hint
