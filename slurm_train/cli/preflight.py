"""The worker's part of the preflight: when it runs, what it is given, and where its variables go."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slurm_train.launch.meeting import is_under_torchrun
from slurm_train.slurm.allocation import Allocation

if TYPE_CHECKING:
    from slurm_train.config.schema import RunConfig
    from slurm_train.distributed.greeting import MeetingPoint
    from slurm_train.distributed.place import RankPlace
    from slurm_train.rundir.layout import RunDirectory

_NOT_UNDER_TORCHRUN = (
    "left out, as torchrun's ranks have met before they come to it, and torchrun would start them again after a "
    "finding; `doctor` with cluster.launcher=srun looks at the same nodes"
)


def look_first(
    run: RunDirectory,
    config: RunConfig,
    place: RankPlace,
    point: MeetingPoint,
    *,
    plan: Mapping[str, Any],
    env: Mapping[str, str],
) -> dict[str, str]:
    """Returns the environment for this rank after the look at nodes and network; all ranks of a Slurm step call it.

    Args:
        run: the run.
        config: its configuration.
        place: this rank.
        point: where the ranks will meet.
        plan: what `plan.json` holds.
        env: the environment.

    Raises:
        PreflightError: the nodes are not fit to train on.
    """
    # On this machine alone there is nothing between the ranks, and nobody else's node to be warned of.
    if config.cluster is None or not config.preflight.enabled or "SLURM_STEP_ID" not in env:
        return dict(env)
    if is_under_torchrun(env):
        if place.is_first:
            print(f"preflight: {_NOT_UNDER_TORCHRUN}", file=sys.stderr, flush=True)
        return dict(env)
    from slurm_train.doctor.preflight import PreflightStart, run_preflight

    allocation = Allocation.from_env(env)
    start = PreflightStart(
        run=run,
        config=config,
        place=place,
        point=point,
        attempt=point.attempt,
        nodes=allocation.nodes,
        ranks_per_node=allocation.tasks_per_node,
        world_size=int(plan.get("world", {}).get("size", place.world_size)),
        env=env,
    )
    variables = run_preflight(start)
    # gloo and NCCL read them from the process, not from us.
    os.environ.update(variables)
    return {**env, **variables}
