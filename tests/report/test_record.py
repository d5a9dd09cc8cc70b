"""A damaged run gives a shorter report, never an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.report.record import Verdict, read_record
from slurm_train.report.run_page import run_page
from slurm_train.rundir.layout import RunDirectory
from tests.support.html_pages import Page
from tests.support.run_files import RunFiles, ended, run_in, steps

FILES = ("config", "plan", "attempts", "metrics", "events", "saves", "provenance", "result", "changes")
DAMAGE = [
    b"",
    b"{",
    b"\x00\xff\xfe garbage",
    b"[]\n",
    b"null\n",
    b'{"attempt": 0}\n',
    b'{"attempt": "x", "step": "y", "event": 3, "time_unix_s": "now"}\n',
    b'{"step": 1, "attempt": 0, "loss": 1e999}\n',
    b'{"words": 3, "versions": [1], "git_diff": 5, "max_steps": "many", "names": 1}\n',
    b"a: [b: {c: \n- d",
]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    files = RunFiles(ledger=ended(0), metrics=steps(1, 5), result={"step": 5}, slow_ranks={0: 0.1})
    return files.write(run_in(tmp_path))


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: repr(damage[:20]))
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_costs_what_it_held(name: str, damage: bytes, run: RunDirectory) -> None:
    getattr(run, name).write_bytes(damage)
    page = Page(run_page(read_record(run, Verdict("failed", "why"), now_unix_s=1.8e9)))
    assert page.problems == []
    assert "why" in page.text


@pytest.mark.parametrize("name", ["config", "attempts", "metrics"])
def test_a_folder_in_the_place_of_a_file_is_told(name: str, run: RunDirectory) -> None:
    getattr(run, name).unlink()
    assert run_page(read_record(run, Verdict("failed"), now_unix_s=1.8e9))


def test_it_reads_what_is_there(run: RunDirectory) -> None:
    record = read_record(run, Verdict("finished"), now_unix_s=1.8e9)
    assert (record.name, record.step, record.max_steps, record.series.num) == ("gpt/3f9a1c07", 5, 100, 5)
    assert record.config["optim"]["lr"] == 1e-3
    assert list(record.step_times) == [0]


def test_checkpoints_that_are_not_whole_are_told_apart(run: RunDirectory) -> None:
    (run.checkpoints / "checkpoint_0000004_attempt_0000_00000000").mkdir(parents=True)
    record = read_record(run, Verdict("finished"), now_unix_s=1.8e9)
    assert [(stored.step, stored.num_bytes) for stored in record.stored] == [(4, None)]
    assert "1 on disk are not whole" in run_page(record)
