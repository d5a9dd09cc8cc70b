"""`report RUN | SWEEP`: one HTML page with everything that is on record; it needs no network and can be mailed."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_train.cli.arguments import RUN_HELP, build_run_parser
from slurm_train.cli.display import note
from slurm_train.cli.survey import look_once
from slurm_train.errors import RunError
from slurm_train.rundir.files import write_atomic
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.lookup import find_run
from slurm_train.rundir.sweep import SweepDirectory, find_sweep, sweep_of
from slurm_train.standing.facts import Subject, subjects_of

if TYPE_CHECKING:
    from slurm_train.tools.report.page import Document

_EXAMPLES = """\
examples:
  python -m slurm_train report                              the newest run
  python -m slurm_train report 3f9a1c07 --out today.html
  python -m slurm_train report 9b1c44e0                     a sweep
  python -m slurm_train report 3f9a1c07 --png pictures      the main plots as PNG, too (needs matplotlib)
"""


def main(words: Sequence[str]) -> int:
    """Writes the page, prints its path and returns 0."""
    parser = build_run_parser("report", description=__doc__, examples=_EXAMPLES)
    parser.add_argument("what", nargs="?", metavar="RUN|SWEEP", help=f"{RUN_HELP}, or a sweep; default: the newest run")
    parser.add_argument("--out", metavar="FILE", help="default: report.html in the directory of the run or sweep")
    parser.add_argument("--png", metavar="DIR", help="write the main plots there as PNG (pip install matplotlib)")
    parser.add_argument("--metric", metavar="NAME", help="what a sweep is judged by; default: eval_loss, else loss")
    arguments = parser.parse_args(list(words))
    root, png = Path(arguments.root), arguments.png and Path(arguments.png)
    if png:
        from slurm_train.tools.report.pictures import require_matplotlib

        require_matplotlib()
    sweep = find_sweep(root, arguments.what) if arguments.what else None
    if sweep is not None:
        document, default = read_sweep(sweep, metric=arguments.metric), sweep.report
    else:
        run = find_run(root, arguments.what)
        if arguments.what in (None, run.name) and (of := sweep_of(run)) is not None:
            note(f"the newest run, one of a sweep; all of it: `report {of.sweep_id}`")
        document, default = read_run(run), run.report
    _put_out(document, Path(arguments.out) if arguments.out else default, is_shared=bool(arguments.out))
    if png:
        from slurm_train.tools.report.pictures import write_pictures

        for path in write_pictures(document, png):
            print(path)
    return 0


def read_run(run: RunDirectory) -> Document:
    """Returns everything that is known of a run."""
    from slurm_train.tools.report.attempts import Verdict
    from slurm_train.tools.report.run import run_document

    (standing,) = look_once([Subject(run)], os.environ)
    verdict = Verdict(standing.state.label, standing.note, standing.nodelist)
    return run_document(run, verdict, now_unix_s=time.time())


def read_sweep(sweep: SweepDirectory, *, metric: str | None) -> Document:
    """Returns everything that is known of a sweep.

    Raises:
        ConfigError: no run has the metric.
    """
    from slurm_train.cli.collate import collate
    from slurm_train.rundir.sweep import read_table
    from slurm_train.tools.report.attempts import Verdict
    from slurm_train.tools.report.sweep import read_trial, sweep_document

    elements = read_table(sweep)
    rows = look_once(subjects_of(elements), os.environ)
    now = time.time()
    trials = [
        read_trial(
            element,
            Verdict(one.state.label, one.note),
            cells,
            is_active=one.is_active,
            num_runs=len(rows),
            now_unix_s=now,
        )
        for element, one, cells in zip(elements, rows, collate(rows), strict=True)
    ]
    return sweep_document(sweep, trials, metric=metric, now_unix_s=now)


def _put_out(document: Document, path: Path, *, is_shared: bool) -> None:
    from slurm_train.tools.report.page import byte_size, render

    text = render(document)
    try:
        write_atomic(path, text, durable=False, mode=0o644 if is_shared else 0o600)
    except OSError as err:
        raise RunError(f"{path} cannot be written: {err.strerror or err}", hint="name another file with --out") from err
    note(f"{byte_size(len(text.encode()))}; opens in any browser and loads nothing")
    print(path)
