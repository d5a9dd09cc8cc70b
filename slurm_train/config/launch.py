"""How a run is started (`launch`), put in accord with what it asks for."""

from __future__ import annotations

from typing import Any

from slurm_train.errors import ConfigError


def settle_launch(mapping: dict[str, Any]) -> None:
    """Takes the cluster away from a run that is to stay here; everything else then follows from its absence.

    Args:
        mapping: a configuration.

    Raises:
        ConfigError: an allocation is asked for, and no cluster.
    """
    launch = mapping.get("launch")
    if launch == "local":
        mapping["cluster"] = None
    elif launch == "interactive" and mapping.get("cluster") is None:
        raise ConfigError(
            "launch=interactive asks Slurm for an allocation, but the run asks for no cluster",
            hint="add +cluster=<nodes>x<GPUs per node>, e.g. +cluster=1x2",
        )
