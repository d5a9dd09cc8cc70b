"""What torch's flight recorder knows of the newest collectives: which were begun on this rank, and which are over.

It records for NCCL, and since torch 2.9 for gloo as well. The interface is torch's own and private; where it is
another one, there is nothing to tell.
"""

from __future__ import annotations

import json
from typing import Any

import torch

_NAMES = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_KEPT_PER_GROUP = 4
_FIELDS = ("pg_id", "process_group", "collective_seq_id", "profiling_name", "input_sizes", "input_dtypes", "is_p2p")


def newest_collectives() -> bytes | None:
    """Returns the newest collectives of each group as JSON, None where nothing is recorded.

    Called by the heartbeat's thread of a rank that has stood still for long.
    """
    core: Any = getattr(torch._C, "_distributed_c10d", None)
    dump = next((found for name in _NAMES if (found := getattr(core, name, None)) is not None), None)
    if dump is None:
        return None
    return shortened(dump())


def shortened(text: str | bytes) -> bytes | None:
    """Returns a record with the newest entries of each group only, None where it has none.

    Args:
        text: what torch gives: JSON with `entries` and `pg_status`.
    """
    record = json.loads(text)
    entries = [entry for entry in record.get("entries") or [] if not entry.get("is_p2p")]
    kept: dict[Any, list[dict[str, Any]]] = {}
    for entry in entries:
        kept.setdefault(entry.get("pg_id"), []).append({name: entry.get(name) for name in _FIELDS})
    if not kept:
        return None
    newest = [entry for group in kept.values() for entry in group[-_KEPT_PER_GROUP:]]
    return json.dumps({"entries": newest, "pg_status": record.get("pg_status", {})}).encode()
