"""What makes two runs the same run: a hash over what is trained, not over where and how.

The same command twice is the same run, and the same run may continue on another number of nodes. `NOT_IDENTITY` is
the one list of what the hash leaves out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from slurm_train.config.schema import RunConfig
from slurm_train.config.structure import to_mapping

NOT_IDENTITY = (
    "run",
    "cluster",
    "site",
    "launch",
    "container",
    "preflight",
    "requeue",
    "health",
    "checkpoint",
    "sweep",
    "track",
    "parallel",
    "ddp.bucket_cap_mb",
    "ddp.static_graph",
    "batch.local_size",
    "batch.accumulation",
    "batch.default_global_size",
    # As the number of ranks: the same global batches in the same order, with the same weight for every item.
    "batch.shares",
    "train.eval_every_steps",
    "train.evaluate",
    "train.log_every_steps",
    "train.samples_digest",
    "train.start_timeout_s",
    "train.steady_timeout_s",
    "train.threads",
    "train.sample_tokens",
)


ID_DIGITS = 12
"""48 bits: of 10,000 runs two have the same id with a probability of 2e-7."""
LATER: Mapping[str, Any] = {
    "batch.by_length": False,
    "batch.pool": 64,
    "ddp.comm": "none",
    "ddp.comm_start_step": 100,
    "ddp.powersgd_rank": 2,
    "ddp.average_every_steps": 8,
}
"""Keys that came later, with what was before them: at that value the hash leaves them out: old runs keep ids."""


def identity(config: RunConfig, *, global_size: int) -> dict[str, Any]:
    """Returns the part of a configuration that decides what is trained.

    Args:
        config: the run's configuration.
        global_size: samples per optimizer step, as planned; it counts, however it is cut.
    """
    mapping = to_mapping(config)
    for key in NOT_IDENTITY:
        *parents, last = key.split(".")
        holder = mapping
        for parent in parents:
            holder = holder[parent]
        holder.pop(last)
    if not config.trains:
        return {key: mapping[key] for key in ("seed", "task", "script")}
    mapping["batch"]["global_size"] = global_size
    identity_part: dict[str, Any] = mapping
    return identity_part


def config_hash(config: RunConfig, *, global_size: int) -> str:
    """Returns the hash of what is trained, 64 hex digits (sha256 of canonical JSON)."""
    mapping = identity(config, global_size=global_size)
    for key, before in LATER.items():
        section, name = key.split(".")
        if mapping.get(section, {}).get(name) == before:
            del mapping[section][name]
    if not mapping.get("ddp", True):
        del mapping["ddp"]
    text = json.dumps(mapping, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def run_id(config: RunConfig, *, global_size: int) -> str:
    """Returns the run's name on disk, the beginning of its hash, e.g. "3f9a1c07b2e4"."""
    return config_hash(config, global_size=global_size)[:ID_DIGITS]
