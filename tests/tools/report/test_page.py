"""The page holds its document safely and loads nothing; quantities are written as people read them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_train.status.run_status import RunState
from slurm_train.tools.report import page
from tests.support.documents import HOSTILE, document_in
from tests.support.html_pages import Page

EMPTY = {"title": "a & <b>", "sections": []}


@pytest.mark.parametrize("text", HOSTILE)
def test_json_cannot_end_the_script_that_holds_it(text: str) -> None:
    found = page.as_json({text: [text]})
    assert not set("<>&\u2028\u2029") & set(found)
    assert json.loads(found) == {text: [text]}


@settings(deadline=None)
@given(st.text())
def test_any_text_comes_back_but_for_what_a_browser_would_obey(text: str) -> None:
    (shown,) = json.loads(page.as_json([text]))
    shown.encode()
    assert len(shown) == len(text)
    assert all(one == other or other == "\N{REPLACEMENT CHARACTER}" for one, other in zip(text, shown, strict=True))


@pytest.mark.parametrize("text", ["\x00", "\x1b[2J", "\ud800", "\u202e", "\u2066"])
def test_what_a_browser_would_obey_is_replaced(text: str) -> None:
    assert "\N{REPLACEMENT CHARACTER}" in json.loads(page.as_json([text]))[0]


def test_the_page_asks_nobody_and_runs_its_own_script_only() -> None:
    found = Page(page.render(EMPTY))
    assert found.problems == [] and found.requests() == [] and found.handlers() == []
    (script,) = found.running_scripts()
    assert found.allows(script)
    assert "Permission is hereby granted" in script.text
    assert "url(" not in found.source and "@import" not in found.source
    assert found.of("title")[0].text == "a & <b>" and document_in(found) == EMPTY
    assert len(found.source) < 120_000


@pytest.mark.parametrize("state", RunState)
def test_an_unknown_state_is_bad(state: RunState) -> None:
    calm = {"finished", "running", "queued", "requeued", "finishing", "not_started", "stopped", "completed"}
    assert (page.chip(state.value)[1] == page.chip(state.label)[1] == "bad") == (state.value not in calm)


def test_settings_and_moments_are_written_as_they_are_typed() -> None:
    assert page.setting([0.9, True, None]) == "[0.9, true, null]"
    assert page.moment(1e40) == page.moment(None) == "-"
