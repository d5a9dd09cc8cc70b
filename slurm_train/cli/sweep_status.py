"""`status SWEEP`: the table of a sweep's runs, with what each was given."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

from slurm_train.cli.display import table
from slurm_train.cli.status import ask_slurm
from slurm_train.cli.sweep_table import read_rows, summary
from slurm_train.rundir.sweep import SweepDirectory, read_table

_SHOWN = ("job", "state", "step", "loss", "speed", "eta", "attempts", "note")


def print_sweep(sweep: SweepDirectory, env: Mapping[str, str], *, as_json: bool) -> int:
    """Prints the table to stdout and returns 0."""
    elements = read_table(sweep)
    rows = read_rows(elements, ask_slurm([element.run for element in elements], env))
    if as_json:
        facts = [
            {"index": one.element.index, "overrides": dict(one.element.overrides), **asdict(one.row)} for one in rows
        ]
        print(json.dumps(facts, indent=2))
        return 0
    keys = list(rows[0].element.overrides) if rows else []
    cells = [
        [
            str(one.element.index),
            *(one.element.overrides.get(key, "") for key in keys),
            one.element.run.run_id,
            *(str(getattr(one.row, name)) for name in _SHOWN),
        ]
        for one in rows
    ]
    print(table(["#", *keys, "RUN", *(name.upper() for name in _SHOWN)], cells))
    print(summary(rows))
    print(sweep.path)
    return 0
