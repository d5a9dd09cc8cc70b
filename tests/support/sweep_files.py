"""A sweep's record as a report reads it, from runs that were never trained."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_train.rundir.sweep import Element, SweepDirectory, write_table
from slurm_train.tools.report.page import Document
from slurm_train.tools.report.run import Fact
from slurm_train.tools.report.sweep import read_trial, sweep_document
from tests.support.run_files import BEGAN_UNIX_S, RunFiles, ended, evaluated, run_in, steps


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptRun:
    """One run."""

    given: Mapping[str, str]
    value: float | None = None
    state: str = "finished"
    note: str = ""
    cells: Mapping[str, Any] = field(default_factory=dict)


RUNS = (
    SweptRun(given={"optim.lr": "0.001", "seed": "0"}, value=3.0),
    SweptRun(given={"optim.lr": "0.01", "seed": "0"}, value=1.0),
    SweptRun(given={"optim.lr": "0.1", "seed": "0"}, value=2.0),
    SweptRun(given={"optim.lr": "0.001", "seed": "1"}, state="failed", note="rank 3 on node2: ZeroDivisionError"),
    SweptRun(given={"optim.lr": "0.01", "seed": "1"}, state="running"),
    SweptRun(given={"optim.lr": "0.1", "seed": "1"}, state="not started"),
)


def write_sweep(folder: Path, runs: Sequence[SweptRun] = RUNS) -> tuple[SweepDirectory, list[Element], list[Fact]]:
    """Writes the runs of a sweep below a folder and reads them as the verb does."""
    sweep = SweepDirectory(folder / "runs" / "sweeps" / "9b1c44e0")
    sweep.path.mkdir(parents=True)
    elements = [_write(folder, index, run) for index, run in enumerate(runs)]
    write_table(sweep, elements)
    sweep.facts.write_text(json.dumps({"words": ["-m", "optim.lr=1e-3,1e-2,1e-1", "seed=0,1"]}))
    trials = [
        read_trial(
            element,
            _cells(element, run),
            state=run.state,
            note=run.note,
            is_active=run.state == "running",
            now_unix_s=BEGAN_UNIX_S + 5000,
        )
        for element, run in zip(elements, runs, strict=True)
    ]
    return sweep, elements, trials


def sweep_document_of(folder: Path, runs: Sequence[SweptRun] = RUNS) -> Document:
    """Returns the document of a sweep that it writes below a folder."""
    sweep, elements, trials = write_sweep(folder, runs)
    return sweep_document(sweep, elements, trials, metric=None, now_unix_s=BEGAN_UNIX_S + 5000)


def _write(folder: Path, index: int, run: SweptRun) -> Element:
    path = run_in(folder, run_id=f"{index:08x}")
    if run.state == "not started":
        RunFiles().write(path)
    else:
        measured = [] if run.value is None else [evaluated(40, eval_loss=run.value)]
        ledger = ended(0) if run.state != "running" else ended(0)[:1]
        RunFiles(ledger=ledger, metrics=[*steps(1, 40), *measured]).write(path)
    return Element(index=index, run=path, overrides=run.given, job=f"12_{index}")


def _cells(element: Element, run: SweptRun) -> dict[str, Any]:
    value = {} if run.value is None else {"best_eval_loss": run.value, "best_eval_loss_step": 40}
    name = f"{element.run.name}/{element.run.run_id}"
    head = {"index": element.index, "run": name, **run.given, "state": run.state, "step": 40, "best_loss": 1.5}
    return {**head, **value, "gpu_hours": 0.05, "note": run.note, **run.cells}
