"""The frozen configuration: config.yaml, what makes two runs the same run, and what differs between two configurations.

config.yaml is written once by the login half and read by every attempt: plain YAML through libyaml, so a rank starts
without Hydra and OmegaConf.

A run's identity is a hash over what is trained, not over where and how: the same command twice is the same run, and it
may continue on another number of nodes. `NOT_IDENTITY` is the one list of what the hash leaves out. These keys, and
a few about where and how data are read, may change while a run exists; every other change alters the training and must
be accepted. Keys that give the shipped models their shape cannot change: the weights would not fit.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from slurm_train.assets import asset_dir
from slurm_train.config.program import program_of
from slurm_train.config.schema import (
    ClusterSection,
    RunConfig,
    all_keys,
    build_config,
    defaults_of,
    flat,
    nested,
    to_mapping,
)
from slurm_train.errors import RunError
from slurm_train.trust import read_text

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

NOT_IDENTITY = (
    "run",
    "cluster",
    "site",
    "launch",
    "container",
    "preflight",
    "requeue",
    "own_resume",
    "health",
    "checkpoint",
    "sweep",
    "track",
    "notify",
    "parallel",
    "ddp.bucket_cap_mb",
    "ddp.static_graph",
    "ddp.find_unused_parameters",
    "batch.local_size",
    "batch.accumulation",
    "batch.default_global_size",
    # As the number of ranks: the same global batches in the same order, with the same weight for every item.
    "batch.shares",
    "train.eval_every_steps",
    "train.eval_max_batches",
    "train.evaluate",
    "train.log_every_steps",
    "train.samples_digest",
    "train.start_timeout_s",
    "train.steady_timeout_s",
    "train.threads",
    "train.sample_tokens",
)
# Ways of training that few runs use: at these values the hash does not know them.
_UNUSED: Mapping[str, Mapping[str, Any]] = {
    "batch": {"by_length": False, "pool": 64, "growth": {}},
    "optim": {"_target_": "torch.optim.AdamW", "groups": [], "decay_samples": None},
    "ddp": {"comm": "none"},
    "data": {"document_mask": False},
    "train": {
        "max_epochs": None,
        "evaluate_from": None,
        "evaluate_data": None,
        "generate": None,
        "follow": None,
        "param_dtype": "float32",
        "compile_mode": "default",
    },
}

# What run directories of earlier versions have: keys under another name, and values that mean nothing now.
_FORMER_NAMES: Mapping[str, Mapping[str, str]] = {
    "requeue": {
        "max_fruitless_failures": "max_failures_without_progress",
        "max_fruitless_returns": "max_returns_without_progress",
    },
}
_FORMER_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ddp": {"comm_start_step": 100, "powersgd_rank": 2, "average_every_steps": 8},
    "batch": {"shares": "measured"},
    "train": {"cuda_graphs": False},
}

Kind = Literal["harmless", "training", "impossible"]

# The data set's own fingerprint tells whether these matter.
_DATA_HARMLESS = ("data.num_workers", "data.prefetch", "data.allow_world_change")
_DATA_MOVED = ("data.path",)
_SHAPES = {
    "slurm_train.models.gpt.GPT": (
        *("vocab_size", "num_layers", "num_kv_heads", "width"),
        *("norm", "activation", "positions", "bias", "tied"),
    ),
    "slurm_train.models.cnn.CNN": ("num_classes", "channels", "features", "side"),
}
# Sections that hold whatever a target takes: a key that only one side has counts.
_OPEN = ("model", "data", "task")
_OTHER_BATCHES = "other batches from here on: of the samples of one pool some come twice, others not at all"
_CONSEQUENCES = {
    "seed": "another order: some samples of this epoch come twice, others not at all",
    "data": "what is left of this epoch is drawn from other samples",
    "batch.by_length": _OTHER_BATCHES,
    "batch.pool": _OTHER_BATCHES,
    "batch.growth": "steps of another size; the schedule is stretched or cut from here on",
    "batch.global_size": "other steps; optim.lr_retune says what becomes of the learning rate",
    **dict.fromkeys(("train.max_steps", "train.max_epochs"), "the schedule is stretched or cut from here on"),
}


def dump_config(config: RunConfig) -> str:
    """Returns the YAML text of a configuration, every key spelled out."""
    text: str = yaml.dump(to_mapping(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def load_config(path: Path) -> RunConfig:
    """Returns the configuration in a frozen file.

    Raises:
        RunError: there is no such file, or it is not YAML.
        ConfigError: the file holds keys or values that this version does not know.
    """
    return config_of_values(load_values(path))


def config_of_values(values: dict[str, Any]) -> RunConfig:
    """Returns the configuration of frozen values, also of an earlier version.

    Raises:
        ConfigError: this version does not know a key or a value.
    """
    return build_config(RunConfig, _in_present_terms(values))


def _in_present_terms(values: dict[str, Any]) -> dict[str, Any]:
    """Returns frozen values as this version would have written them, where that is the same training."""
    present = dict(values)
    for section, keys in values.items():
        if isinstance(keys, dict):
            names = _FORMER_NAMES.get(section, {})
            meaningless = _FORMER_DEFAULTS.get(section, {}).items()
            kept = (item for item in keys.items() if item not in meaningless)
            present[section] = {names.get(key, key): value for key, value in kept}
    return present


def load_values(path: Path) -> dict[str, Any]:
    """Returns what a frozen file holds, whatever version has written it.

    Raises:
        RunError: there is no such file, or it is not YAML.
    """
    try:
        values = yaml.load(read_text(path), Loader=_Loader)
        problem = "it holds no mapping"
    except FileNotFoundError:
        raise RunError(f"{path} does not exist", hint="name a run directory, as `status` lists them") from None
    except yaml.YAMLError as err:
        values = None
        problem = " ".join(str(err).split())
    if not isinstance(values, dict):
        raise RunError(f"{path} cannot be read: {problem}", hint="type the run's first command again to write it anew")
    return values


def identity(config: RunConfig, *, global_size: int) -> dict[str, Any]:
    """Returns the part of a configuration that decides what is trained.

    Args:
        config: the run's configuration.
        global_size: samples per optimizer step, as planned; it counts, however it is cut.
    """
    own = program_of(config).identity
    if own is not None:
        return dict(own)
    mapping: dict[str, Any] = to_mapping(config)
    for key in NOT_IDENTITY:
        section, _, name = key.rpartition(".")
        del (mapping[section] if section else mapping)[name]
    mapping["batch"]["global_size"] = global_size
    return mapping


def config_hash(config: RunConfig, *, global_size: int) -> str:
    """Returns the hash of what is trained, 64 hex digits (sha256 of canonical JSON); the run id is its beginning."""
    mapping = identity(config, global_size=global_size)
    for section, unused in _UNUSED.items():
        if mapping.get(section):
            kept = {key: value for key, value in mapping[section].items() if (key, value) not in unused.items()}
            mapping[section] = kept
    for section in ("ddp", "callbacks"):
        if not mapping.get(section, True):
            del mapping[section]
    text = json.dumps(mapping, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Change:
    """One key that is not what it was."""

    key: str
    old: Any
    new: Any
    kind: Kind

    def __str__(self) -> str:
        return f"{self.key}: {in_words(self.old)} -> {in_words(self.new)}"

    @property
    def consequence(self) -> str:
        """What follows from it, "" where that is obvious."""
        return next((text for key, text in _CONSEQUENCES.items() if is_below(self.key, key)), "")


def in_words(value: Any) -> str:
    """Returns a value of a configuration in one short line."""
    if isinstance(value, Mapping) and "nodes" in value:
        return f"{value['nodes']} nodes x {value['gpus_per_node']} GPUs"
    text = "null" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_below(key: str, name: str) -> bool:
    """Returns whether a dotted key is `name` or lies below it."""
    return key == name or key.startswith(f"{name}.")


def trained_settings(config: RunConfig, *, global_size: int) -> dict[str, Any]:
    """Returns what decides the training, by dotted key: what a checkpoint keeps about its configuration."""
    # As it comes back from a manifest: JSON has neither tuples nor infinities.
    text = json.dumps(flat(identity(config, global_size=global_size)), default=str)
    plain: dict[str, Any] = json.loads(text, parse_constant=str)
    return plain


def all_changes(
    old: RunConfig, new: RunConfig, *, old_global_size: int, new_global_size: int, trained: Mapping[str, Any] | None
) -> list[Change]:
    """Returns every key that differs, those of the training first.

    Args:
        old: the frozen configuration.
        new: what it shall be.
        old_global_size: samples per optimizer step so far.
        new_global_size: samples per optimizer step from now on.
        trained: `trained_settings` of the newest checkpoint; None: those of `old`.
    """
    old_settings = trained_settings(old, global_size=old_global_size) if trained is None else trained
    changes = training_changes(old_settings, trained_settings(new, global_size=new_global_size))
    for key, old_value, new_value in _pairs(to_mapping(old), to_mapping(new)):
        if _is_left_out(key):
            changes.append(Change(key, old_value, new_value, "harmless"))
    return changes


def differences(
    old: RunConfig, new: RunConfig, *, old_global_size: int | None, new_global_size: int | None
) -> list[Change]:
    """Returns every key in which two runs differ, whatever follows from it; "harmless" where nothing is trained by it.

    Args:
        old: configuration of the one.
        new: configuration of the other.
        old_global_size: its samples per optimizer step, None where they are its own code's.
        new_global_size: likewise.
    """
    old_settings = to_mapping(old)
    new_settings = to_mapping(new)
    old_settings["batch"]["global_size"] = old_global_size
    new_settings["batch"]["global_size"] = new_global_size
    changes: list[Change] = []
    for key, old_value, new_value in _pairs(old_settings, new_settings):
        is_harmless = _is_left_out(key) or key in _DATA_HARMLESS
        changes.append(Change(key, old_value, new_value, "harmless" if is_harmless else "training"))
    return changes


def training_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Returns what differs between two `trained_settings`.

    A key that only one of them has is another version's, and does not count; in open sections it does.
    """
    changes = [
        Change(key, old_value, new_value, _kind_of(key, old, new))
        for key, old_value, new_value in _pairs(nested(old), nested(new))
        if (_holds(old, key) and _holds(new, key)) or _is_open(key)
    ]
    # Of a model, data set or optimizer that was replaced the keywords say nothing.
    replaced = [change.key.removesuffix("_target_") for change in changes if change.key.endswith("._target_")]
    return [
        change for change in changes if change.key.endswith("._target_") or not change.key.startswith(tuple(replaced))
    ]


def unaccepted(changes: Iterable[Change], accepted: Collection[str]) -> list[Change]:
    """Returns the changes of the training that none of the accepted names covers ("config" covers all)."""
    if "config" in accepted:
        return []
    relevant = (change for change in changes if change.kind != "harmless")
    return [change for change in relevant if not any(is_below(change.key, name) for name in accepted)]


def _holds(settings: Mapping[str, Any], key: str) -> bool:
    return any(is_below(name, key) for name in settings)


def _is_open(key: str) -> bool:
    """Returns whether a key is one that a target takes, not one of the schema."""
    return key.split(".")[0] in _OPEN or (key.startswith("optim.") and key not in all_keys(RunConfig))


def _is_left_out(key: str) -> bool:
    return any(is_below(key, name) for name in NOT_IDENTITY)


def _kind_of(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Kind:
    target = old.get("model._target_")
    is_shape = key.removeprefix("model.") in _SHAPES.get(str(target), ())
    # Nor would the state of one optimizer fit another, or that of one type parameters of another.
    if (
        is_shape
        or key in ("optim._target_", "train.param_dtype")
        or (key == "model._target_" and target in _SHAPES and new.get(key) in _SHAPES)
    ):
        return "impossible"
    moved = key in _DATA_MOVED and str(new.get("data._target_", "")).startswith("slurm_train.")
    return "harmless" if moved or key in _DATA_HARMLESS else "training"


def _pairs(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields key, old and new value of what differs; a section that is null on one side counts as one key."""
    for key in {**old, **new}:
        old_value = old.get(key)
        new_value = new.get(key)
        if isinstance(old_value, Mapping) and isinstance(new_value, Mapping):
            yield from _pairs(old_value, new_value, f"{prefix}{key}.")
        elif old_value != new_value:
            yield f"{prefix}{key}", old_value, new_value


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


def list_settings(config: Mapping[str, Any]) -> list[Setting]:
    """Returns a frozen configuration key by key, for showing what a person has chosen.

    Defaults are those of the schema; a model, data set or optimizer is compared with the shipped file of the same
    `_target_`, which is read as it is, without Hydra.

    Args:
        config: the mapping in a run's config.yaml.
    """
    conf = asset_dir("conf")
    values = flat(config)
    defaults = defaults_of(RunConfig)
    for group in ("model", "data", "optim"):
        chosen = config.get(group)
        target = chosen.get("_target_") if isinstance(chosen, Mapping) else None
        files = {path.stem: _read_shipped(path) for path in sorted((conf / group).glob("*.yaml"))}
        file = next((file for file in files.values() if file["_target_"] == target), files["custom"])
        defaults[group] = (defaults[group] or {}) | file
    if config.get("cluster"):
        # Its size has no default: every run has its own.
        defaults["cluster"] = defaults_of(ClusterSection)
        del defaults["cluster"]["nodes"], defaults["cluster"]["gpus_per_node"]
    default_of = {key: value for key, value in flat(defaults).items() if value != "???"}
    # "${oc.select:model._lr_,3.0e-3}": a model's file may say something else, which then counts as chosen.
    otherwise = {key: re.fullmatch(r"\$\{oc\.select:[\w.]+,(.+)\}", str(value)) for key, value in default_of.items()}
    default_of |= {key: yaml.load(match[1], Loader=_Loader) for key, match in otherwise.items() if match}
    references = {key: re.fullmatch(r"\$\{([\w.]+)\}", str(value)) for key, value in default_of.items()}
    default_of |= {key: values.get(match[1], match[0]) for key, match in references.items() if match}
    return [
        Setting(key, value, is_chosen=key not in default_of or default_of[key] != value, default=default_of.get(key))
        for key, value in values.items()
    ]


def _read_shipped(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    return values
