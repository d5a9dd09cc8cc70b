"""The one place where the core calls a tool: the preflight, if it is enabled. Without it, the doctor is not loaded."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slurm_train.distributed.ports import is_under_torchrun
from slurm_train.slurm.allocation import Allocation

if TYPE_CHECKING:
    from slurm_train.config.schema import RunConfig
    from slurm_train.distributed.meeting import MeetingPoint
    from slurm_train.distributed.place import RankPlace
    from slurm_train.rundir.paths import RunDirectory

_NOT_UNDER_TORCHRUN = (
    "left out, as torchrun's ranks have met before they come to it, and torchrun would start them again after a "
    "finding; `doctor` with cluster.launcher=srun looks at the same nodes"
)


def preflight(
    run: RunDirectory,
    config: RunConfig,
    place: RankPlace,
    point: MeetingPoint,
    *,
    plan: Mapping[str, Any],
    env: Mapping[str, str],
) -> dict[str, str]:
    """Returns the variables that this rank's collectives need, e.g. {"GLOO_SOCKET_IFNAME": "ib0"}.

    All ranks of a Slurm step call it, before torch is imported. It does nothing without a Slurm step, where
    preflight.enabled is false, and under torchrun.

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
    # On this machine alone there is no network between the ranks, and no other user's node to warn of.
    if config.cluster is None or not config.preflight.enabled or "SLURM_STEP_ID" not in env:
        return {}
    if is_under_torchrun(env):
        if place.is_first:
            print(f"preflight: {_NOT_UNDER_TORCHRUN}", file=sys.stderr, flush=True)
        return {}
    from slurm_train.tools.doctor.preflight import Preflight, run_preflight

    allocation = Allocation.from_env(env)
    return run_preflight(
        Preflight(
            run=run,
            config=config,
            place=place,
            point=point,
            nodes=allocation.nodes,
            ranks_per_node=allocation.tasks_per_node,
            world_size=int(plan.get("world", {}).get("size", place.world_size)),
            env=env,
        )
    )
