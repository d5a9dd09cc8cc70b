"""`report` on the command line: which run or sweep, where to, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.documents import document_in
from tests.support.html_pages import Page
from tests.support.run_facts import attempt

SWEEP = ("-m", "+cluster=1x8", "optim.lr=1e-3,3e-4", "seed=range(2)")
METRICS = tuple({"step": step, "attempt": 0, "loss": 3.0 / step, "time_unix_s": 10.0 + step} for step in range(1, 5))


def test_a_runs_page_lies_in_its_directory_and_its_path_is_the_output(shell: Any) -> None:
    run = shell.has_run(ledger=attempt(0, reason="failed", note="rank 1: boom"), metrics=METRICS)
    done = shell.types("report", "3f9a1c07")
    assert (done.code, done.out) == (0, f"{run.report}\n")
    page = Page(run.report.read_text())
    assert page.problems == [] and document_in(page)["note"].endswith("rank 1: boom")
    assert page.of("title")[0].text == "gpt-stdlib/3f9a1c07: failed"
    assert run.report.stat().st_mode & 0o777 == 0o600


def test_pictures_are_written_beside_and_slurms_silence_costs_nothing(shell: Any) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    run = shell.has_run(job_ids=("12",), ledger=attempt(0), metrics=METRICS)
    shell.slurm.break_down("squeue", "sacct")
    done = shell.types("report", "3f9a1c07", "--png", "pictures")
    assert (done.code, done.out.splitlines()) == (0, [str(run.report), "pictures/loss.png", "pictures/timeline.png"])


def test_what_cannot_be_done_is_said(shell: Any, monkeypatch: Any) -> None:
    shell.has_run(metrics=METRICS)
    path = Path(shell.types(*SWEEP).out.split()[1])
    shell.refuses("no run matches 'nothing'", "report nothing")
    shell.refuses("no/such/page.html cannot be written", "report 3f9a1c07 --out no/such/page.html")
    shell.refuses("--metric bleu: no run has it", f"report {path.name} --metric bleu")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shell.refuses("pip install matplotlib", "report 3f9a1c07 --png x")
    assert not (shell.folder / "x").exists()


def test_a_rehearsals_folder_gives_its_page_and_a_copy_for_others(shell: Any) -> None:
    page = shell.folder / "runs" / "rehearsals" / "train-3f9a1c07" / "rehearsal.html"
    page.parent.mkdir(parents=True)
    page.write_text("<!doctype html>")
    done = shell.types("report", str(page.parent))
    assert (done.code, done.out) == (0, f"{page}\n")
    assert shell.types("report", str(page.parent), "--out", "shared.html").out == "shared.html\n"
    assert (shell.folder / "shared.html").read_text() == page.read_text() == "<!doctype html>"
    shell.refuses("is a rehearsal", f"report {page.parent} --png x")
