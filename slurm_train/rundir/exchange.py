"""exchange.json of an attempt: how many bytes of gradients there are, and how many of them a rank sends per step."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass

from slurm_train.rundir.files import read_json, write_atomic
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.private import make_private


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeFacts:
    """What is exchanged at every step."""

    comm: str
    """`ddp.comm`."""
    gradient_bytes: float
    """Of all gradients of one rank."""
    sent_bytes: float
    """That a rank gives into exchanges over the network per step, on average."""


def write_exchange(run: RunDirectory, attempt: int, facts: ExchangeFacts) -> None:
    """Writes the facts; rank 0 does. A file system that refuses costs a figure, never the run."""
    path = run.attempt_logs(attempt) / "exchange.json"
    with contextlib.suppress(OSError):
        make_private(path.parent)
        write_atomic(path, json.dumps(asdict(facts)) + "\n", durable=False)


def read_exchange(run: RunDirectory, attempt: int) -> ExchangeFacts | None:
    """Returns what was written, None where nothing was."""
    value = read_json(run.attempt_logs(attempt) / "exchange.json")
    try:
        return None if value is None else ExchangeFacts(**value)
    except TypeError:
        return None
