"""What differs between the configuration that a run was trained with and another one, and how much that matters.

Keys that the run's identity leaves out, and a few more that move data or read it otherwise, change nothing that is
trained. Everything else does. Keys that give the shipped models their shape cannot change: the weights would not fit.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slurm_train.config.identity import LATER, NOT_IDENTITY, identity
from slurm_train.config.schema import RunConfig
from slurm_train.config.structure import flat, to_mapping

Kind = Literal["harmless", "training", "impossible"]

# The data set's own fingerprint tells whether these matter.
_DATA_HARMLESS = ("data.num_workers", "data.prefetch")
_DATA_MOVED = ("data.path",)
_OURS = "slurm_train."
_SHAPES = {
    "slurm_train.models.gpt.GPT": (
        *("vocab_size", "num_layers", "num_kv_heads", "width"),
        *("norm", "activation", "positions", "bias", "tied"),
    ),
    "slurm_train.models.cnn.CNN": ("num_classes", "channels", "features", "side"),
}
# Sections that hold whatever a target takes: a key that only one side has counts.
_OPEN = ("model", "data", "task")
_CONSEQUENCES = {
    "seed": "another order: some samples of this epoch come twice, others not at all",
    "data": "what is left of this epoch is drawn from other samples",
    "batch.by_length": "other batches from here on: of the samples of one pool some come twice, others not at all",
    "batch.pool": "other batches from here on: of the samples of one pool some come twice, others not at all",
    "batch.global_size": "other steps; optim.lr_retune says what becomes of the learning rate",
    "train.max_steps": "the schedule is stretched or cut from here on",
}


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
        """What follows from it, "" where that goes without saying."""
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
    """Returns every key that differs, in the configuration's order.

    Args:
        old: the frozen configuration.
        new: what it shall be.
        old_global_size: samples per optimizer step so far.
        new_global_size: samples per optimizer step from now on.
        trained: `trained_settings` of the newest checkpoint; None: those of `old`.
    """
    before = trained_settings(old, global_size=old_global_size) if trained is None else trained
    found = training_changes(before, trained_settings(new, global_size=new_global_size))
    others = flat(to_mapping(old)), flat(to_mapping(new))
    keys = [key for key in _keys(*others) if any(is_below(key, left_out) for left_out in NOT_IDENTITY)]
    pairs = ((key, _get(others[0], key), _get(others[1], key)) for key in keys)
    return found + [Change(key, was, now, "harmless") for key, was, now in pairs if was != now]


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
    found = []
    for config, global_size in ((old, old_global_size), (new, new_global_size)):
        mapping = to_mapping(config)
        mapping["batch"]["global_size"] = global_size
        found.append(flat(mapping))
    pairs = ((key, _get(found[0], key), _get(found[1], key)) for key in _keys(*found))
    return [Change(key, was, now, _weight_of(key)) for key, was, now in pairs if was != now]


def _weight_of(key: str) -> Kind:
    is_left_out = key in _DATA_HARMLESS or any(is_below(key, left_out) for left_out in NOT_IDENTITY)
    return "harmless" if is_left_out else "training"


def training_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Returns what differs between two `trained_settings`.

    A key that only one of them has is another version's, and does not count; in open sections it does.
    """
    found = []
    old, new = {**LATER, **old}, {**LATER, **new}
    for key in _keys(old, new):
        is_open = key.split(".")[0] in _OPEN
        was, now = _get(old, key), _get(new, key)
        if ((key in old and key in new) or is_open) and was != now:
            found.append(Change(key, was, now, _kind_of(key, old, new)))
    replaced = [change.key.split(".")[0] for change in found if change.key.endswith("._target_")]
    return [change for change in found if change.key.endswith("._target_") or change.key.split(".")[0] not in replaced]


def unaccepted(changes: Iterable[Change], accepted: Collection[str]) -> list[Change]:
    """Returns the changes of the training that none of the accepted names covers ("config" covers all)."""
    return [
        change
        for change in changes
        if change.kind != "harmless" and not ("config" in accepted or any(is_below(change.key, n) for n in accepted))
    ]


def _kind_of(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Kind:
    target = old.get("model._target_")
    is_shape = any(key == f"model.{name}" for name in _SHAPES.get(str(target), ()))
    if is_shape or (key == "model._target_" and target in _SHAPES and new.get(key) in _SHAPES):
        return "impossible"
    moved = key in _DATA_MOVED and str(new.get("data._target_", "")).startswith(_OURS)
    return "harmless" if moved or key in _DATA_HARMLESS else "training"


def _keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    keys = [*old, *(key for key in new if key not in old)]
    # A section that is null on one side is one change, not one for each of its keys.
    holders = {parent for key in keys for parent in _parents(key)}
    absent = [key for key in holders & {*keys} if None in (old.get(key, ""), new.get(key, ""))]
    kept = (key for key in keys if key not in holders and not any(is_below(key, section) for section in absent))
    return [*sorted(absent), *kept]


def _parents(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _get(values: Mapping[str, Any], key: str) -> Any:
    if key in values:
        return values[key]
    below = {name[len(key) + 1 :]: value for name, value in values.items() if is_below(name, key)}
    return below or None
