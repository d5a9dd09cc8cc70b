"""Words of a command line on top of a configuration that is frozen already: what `resume RUN key=value` does.

The frozen configuration is the truth, so nothing is composed again but a group that is chosen anew: `cluster=2x8`
gives another size to the cluster that the run had; `model=`, `data=` and a cluster of another name replace theirs.
`site=NAME` moves the run to another cluster: of the old one only the size stays.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slurm_train.config.launch import settle_launch
from slurm_train.config.schema import RunConfig, build_config, to_mapping, unknown_key_error
from slurm_train.config.words import Words, prepare_overrides
from slurm_train.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

# In this order: a site fills the cluster that was chosen.
_GROUPS = ("model", "data", "cluster", "site", "container")
_SIZE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,2})")


def apply_words(config: RunConfig, words: Sequence[str], *, config_dir: str | None = None) -> RunConfig:
    """Returns the configuration with the words' settings in it.

    Args:
        config: a frozen configuration.
        words: settings, e.g. ["optim.lr=1e-4", "cluster=2x8"].
        config_dir: the person's own YAML files.

    Raises:
        ConfigError: an unknown key or value, or a word that makes no sense for a run that exists.
    """
    if not words:
        return config
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        overrides = OverridesParser.create().parse_overrides(prepare_overrides(words))
    except HydraException as err:
        raise ConfigError(" ".join(str(err).split()), hint="settings are written key=value") from err
    mapping: dict[str, Any] = to_mapping(config)
    # A group first: settings of its parts are meant for what was chosen.
    for override in sorted(overrides, key=_turn):
        if override.key_or_group == "site":
            _move(mapping, override, words, config_dir)
        elif override.key_or_group in _GROUPS:
            _choose(mapping, override, words, config_dir)
        else:
            _set(mapping, override)
    settle_launch(mapping)
    return build_config(RunConfig, mapping)


def _turn(override: Override) -> int:
    return _GROUPS.index(override.key_or_group) if override.key_or_group in _GROUPS else len(_GROUPS)


def _move(mapping: dict[str, Any], override: Override, words: Sequence[str], config_dir: str | None) -> None:
    site, cluster = override.value(), mapping["cluster"]
    if site in (None, "null") or cluster is None:
        mapping["site"] = None
        return
    from slurm_train.config.compose import compose

    # A range of nodes belongs to its launcher.
    keys = ("nodes", "gpus_per_node", *(("launcher",) if isinstance(cluster["nodes"], str) else ()))
    size = ["cluster=1x1", *(f"cluster.{key}={cluster[key]}" for key in keys)]
    # A typed partition decides what the site gives.
    typed = [word for word in words if word.startswith("cluster.")]
    moved = compose(Words(overrides=[*size, f"site={site}", *typed], config_dir=config_dir)).config
    mapping["site"], mapping["cluster"] = moved.site, to_mapping(moved.cluster)


def _choose(mapping: dict[str, Any], override: Override, words: Sequence[str], config_dir: str | None) -> None:
    group, choice = override.key_or_group, override.value()
    if group in ("cluster", "container") and choice in (None, "null"):
        mapping[group] = None
        return
    from slurm_train.config.compose import compose

    # An image has no default, so it is chosen together with its settings.
    own = [word for word in words if group == "container" and word.startswith("container.")]
    composed = compose(Words(overrides=[f"{group}={choice}", *own], config_dir=config_dir)).config
    chosen = to_mapping(getattr(composed, group))
    if group == "cluster" and mapping["cluster"] is not None and _SIZE.fullmatch(str(choice)):
        mapping["cluster"] |= {key: chosen[key] for key in ("nodes", "gpus_per_node")}
    else:
        mapping[group] = chosen


def _set(mapping: dict[str, Any], override: Override) -> None:
    key = override.key_or_group
    if override.is_sweep_override():
        raise ConfigError(f"{key} has several values; a run that exists has one", hint=f"give one: {key}=VALUE")
    *parents, last = key.split(".")
    holder: Any = mapping
    for index, parent in enumerate(parents):
        if holder.get(parent) is None:
            raise ConfigError(
                f"{key} was set, but the run has no {'.'.join(parents[: index + 1])}",
                hint="give it a size first: cluster=<nodes>x<GPUs per node>"
                if parents[0] == "cluster"
                else f"choose one first: {parents[0]}=NAME, or {parents[0]}._target_=my_package.name",
            )
        holder = holder[parent]
    if override.is_delete():
        holder.pop(last, None)
        return
    if last not in holder and not override.is_add() and not override.is_force_add():
        prefix = "".join(f"{parent}." for parent in parents)
        raise unknown_key_error(key, [f"{prefix}{name}" for name in holder])
    holder[last] = override.value()
