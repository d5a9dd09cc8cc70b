"""`report RUN | SWEEP | REHEARSAL`: one HTML page with all that is on record; it needs no network and can be mailed."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_train.cli.selection import look_once, parse_runs
from slurm_train.cli.terminal import note
from slurm_train.errors import ConfigError, RunError
from slurm_train.rundir.files import write_atomic
from slurm_train.rundir.lookup import find_run, find_sweep
from slurm_train.rundir.sweep import Element, SweepDirectory, sweep_of
from slurm_train.tools.rehearsal.page import PAGE_NAME

if TYPE_CHECKING:
    from slurm_train.tools.report.page import Document


def main(words: Sequence[str]) -> int:
    """Writes the page, prints its path and returns 0."""
    arguments = parse_runs("report", words)
    root = arguments.root
    png = arguments.png and Path(arguments.png)
    out = Path(arguments.out) if arguments.out else None
    rehearsal_page = Path(arguments.what or "", PAGE_NAME)
    if arguments.what and rehearsal_page.is_file():
        if png:
            raise ConfigError(f"--png={png}: {arguments.what} is a rehearsal, which has no plots", hint="leave it out")
        _put_out(rehearsal_page.read_text(), out or rehearsal_page, is_shared=out is not None)
        return 0
    if png:
        from slurm_train.tools.report.pictures import require_matplotlib

        require_matplotlib()
    sweep = find_sweep(root, arguments.what) if arguments.what else None
    if sweep is not None:
        document = read_sweep(sweep, metric=arguments.metric)
        default = sweep.report
    else:
        run = find_run(root, arguments.what)
        sweep = sweep_of(run) if arguments.what in (None, run.name) else None
        if sweep is not None:
            note(f"the newest run, one of a sweep; all of it: `report {sweep.sweep_id}`")
        from slurm_train.tools.report.run import run_document

        (status,) = look_once([Element(run=run)], os.environ)
        facts = {"state": status.state.label, "note": status.note, "nodelist": status.nodelist or ""}
        document = run_document(run, **facts, now_unix_s=time.time())
        default = run.report
    from slurm_train.tools.report.page import render

    _put_out(render(document), out or default, is_shared=out is not None)
    if png:
        from slurm_train.tools.report.pictures import write_pictures

        for path in write_pictures(document, png):
            print(path)
    return 0


def read_sweep(sweep: SweepDirectory, *, metric: str | None) -> Document:
    """Returns everything that is known of a sweep.

    Raises:
        ConfigError: no run has the metric.
    """
    from slurm_train.rundir.sweep import read_table
    from slurm_train.tools.report.collate import collate
    from slurm_train.tools.report.sweep import read_trial, sweep_document

    elements = read_table(sweep)
    now = time.time()
    rows = look_once(elements, os.environ)
    trials = [
        read_trial(element, cells, state=row.state.label, note=row.note, is_active=row.is_active, now_unix_s=now)
        for element, row, cells in zip(elements, rows, collate(rows), strict=True)
    ]
    return sweep_document(sweep, elements, trials, metric=metric, now_unix_s=now)


def _put_out(text: str, path: Path, *, is_shared: bool) -> None:
    from slurm_train.formatting import byte_size

    try:
        write_atomic(path, text, durable=False, mode=0o644 if is_shared else 0o600)
    except OSError as err:
        raise RunError(f"{path} cannot be written: {err.strerror or err}", hint="name another file with --out") from err
    note(f"{byte_size(len(text.encode()))}; opens in any browser and loads nothing")
    print(path)
