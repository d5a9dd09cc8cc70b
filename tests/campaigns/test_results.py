from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.campaigns.catalogue import CAMPAIGNS, pages, render
from tests.campaigns.record import Tally, keep_record, read_records
from tests.campaigns.versions import FAULTS, read_verdict

pytestmark = pytest.mark.full

FOUND = Tally(trials=100, held=99, figures={"longest": "3.1 s"}, problems=["trial 7: lost step 12"])
FACTS = {"date": "2026-01-02", "seed": 5, "wall_s": 90.0, "revision": "abc1234"}


def test_the_pages_say_what_the_kept_results_say() -> None:
    written = pages(read_records())
    assert len(written) > 1
    for page, text in written.items():
        assert page.read_text(encoding="utf-8") == text, "run `python -m tests.campaigns --keep`"


def test_the_table_of_versions_has_a_row_per_flow_and_a_column_per_slurm() -> None:
    cells = {"20.11": {"`plan`": "3 s", "torchrun": "not reached"}, "24.11": {"`plan`": "2 s", "torchrun": "9 s"}}
    counted = {"trials": 2, "held": 1, "figures": {}, "problems": []}
    records = {
        f"versions-{version}": {**FACTS, "result": {**counted, "table": {f"{version}.4": cells[version]}}}
        for version in cells
    }
    (text,) = (text for page, text in pages(records).items() if page.name == "slurm-tested.md")
    wanted = """
|  | 20.11.4 | 24.11.4 |
| --- | --- | --- |
| `plan` | 3 s | 2 s |
| torchrun | not reached | 9 s |
| date, commit | 2026-01-02, `abc1234` | 2026-01-02, `abc1234` |
"""
    assert wanted in text


def test_the_verdict_of_a_campaign_on_another_version_is_read_from_what_it_prints() -> None:
    said = "13. kills-0: rank 0 of 2 killed at commit\nkills: 12 of 13 held in 76 s\n  runs: 1\nbroken: kills\n"
    assert read_verdict("kills", said) == (12, 13)
    assert read_verdict("kills", "Traceback (most recent call last):\n") == (0, 0)
    assert set(FAULTS) <= set(CAMPAIGNS)


def test_a_record_takes_the_place_of_the_older_and_a_broken_promise_stands_on_the_page(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    for name, found in (("kills", Tally(trials=1, held=1)), ("cancel", FOUND), ("kills", FOUND)):
        keep_record(name, found, path, **FACTS)
    records = read_records(path)
    assert list(records) == ["cancel", "kills"]
    text = render(records)
    assert re.search(r"`kills`.*99 of 100.*longest: 3.1 s.*2026-01-02, seed 5, 1.5 min, `abc1234`", text)
    assert "what did not hold" in text and "- trial 7: lost step 12" in text


def test_every_campaign_can_be_run() -> None:
    for campaign in CAMPAIGNS.values():
        assert callable(campaign.function)
