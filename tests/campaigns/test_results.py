from __future__ import annotations

import re
from pathlib import Path

from tests.campaigns.catalogue import CAMPAIGNS
from tests.campaigns.record import PAGE, Record, Result, keep_record, read_records, render


def a_record(name: str = "kills", *, held: int = 99) -> Record:
    result = Result(trials=100, held=held, figures={"longest": "3.1 s"}, problems=("trial 7: lost step 12",))
    return Record(name=name, date="2026-01-02", seed=5, wall_s=90.0, revision="abc1234", result=result)


def test_the_page_says_what_the_kept_results_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(read_records()), "run `python -m tests.campaigns --keep`"


def test_a_record_is_read_as_it_was_kept_and_takes_the_place_of_the_older(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    keep_record(a_record(held=100), path)
    keep_record(a_record("cancel"), path)
    keep_record(a_record(), path)
    assert read_records(path) == {"cancel": a_record("cancel"), "kills": a_record()}


def test_a_promise_is_kept_only_where_it_was_tried_and_always_held() -> None:
    assert Result(trials=3, held=3).is_kept
    assert not Result(trials=3, held=2).is_kept
    assert not Result(trials=0, held=0).is_kept


def test_a_broken_promise_stands_on_the_page() -> None:
    text = render({"kills": a_record()})
    assert re.search(r"`kills`.*99 of 100.*longest: 3.1 s.*2026-01-02, seed 5, 1.5 min, `abc1234`", text)
    assert "what did not hold" in text and "- trial 7: lost step 12" in text


def test_every_campaign_can_be_run() -> None:
    for campaign in CAMPAIGNS.values():
        assert callable(campaign.load())
