"""What a run that sets nothing would have had: the shipped files read as they are, without Hydra.

Only for showing what a person has chosen; nothing is run by it. A model or data set is compared with the shipped file
of the same `_target_`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slurm_train.assets import asset_dir
from slurm_train.config.schema import ClusterSection, RunConfig
from slurm_train.config.structure import flat, to_mapping

_NOT_SETTINGS = ("defaults", "hydra")
# Every run has its own.
_ALWAYS_GIVEN = ("cluster.nodes", "cluster.gpus_per_node")
_MISSING = "???"
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of a run's configuration."""

    key: str
    """Dotted, e.g. "optim.lr"."""
    value: Any
    is_chosen: bool
    """It is not what a run would have that sets nothing."""
    default: Any = None
    """That value, where there is one."""


def read_settings(config: Mapping[str, Any]) -> list[Setting]:
    """Returns a frozen configuration key by key.

    Args:
        config: the mapping in a run's config.yaml.
    """
    values, defaults = flat(config), _defaults(config)
    return [
        Setting(key, value, is_chosen=key not in defaults or defaults[key] != value, default=defaults.get(key))
        for key, value in values.items()
    ]


def _defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    conf = asset_dir("conf")
    found = flat(to_mapping(RunConfig())) | flat(_read(conf / "config.yaml"))
    for group in ("model", "data"):
        found |= flat({group: _shipped(conf / group, config.get(group))})
    if config.get("cluster"):
        found |= flat({"cluster": to_mapping(ClusterSection())}) | flat({"cluster": _read(conf / "cluster/base.yaml")})
    found = {key: _resolved(value, config) for key, value in found.items()}
    return {key: value for key, value in found.items() if key not in _ALWAYS_GIVEN and value != _MISSING}


def _shipped(folder: Path, chosen: Any) -> dict[str, Any]:
    """Returns the shipped file of a group with the same `_target_`, {} for somebody's own."""
    target = chosen.get("_target_") if isinstance(chosen, Mapping) else None
    files = (_read(path) for path in sorted(folder.glob("*.yaml")))
    return next((values for values in files if target is not None and values.get("_target_") == target), {})


def _read(path: Path) -> dict[str, Any]:
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {key: value for key, value in (values or {}).items() if key not in _NOT_SETTINGS}


def _resolved(value: Any, config: Mapping[str, Any]) -> Any:
    """Returns what a reference like "${data.context}" means in this run."""
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    return flat(config).get(match[1], value) if match else value
