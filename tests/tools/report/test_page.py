"""The page holds its document safely and loads nothing; a million points become six hundred, no spike is lost."""

from __future__ import annotations

import json
from array import array

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slurm_train.tools.report import page
from slurm_train.tools.report.page import MOST_POINTS, Curve, line, plot
from tests.support.documents import HOSTILE, document_in
from tests.support.html_pages import Page

EMPTY = {"title": "a & <b>"}


@pytest.mark.parametrize("text", HOSTILE)
def test_json_cannot_end_the_script_that_holds_it(text: str) -> None:
    found = page.as_json({text: [text]})
    assert not set("<>&\u2028\u2029") & set(found)
    assert json.loads(found) == {text: [text]}


@settings(deadline=None)
@given(st.text())
@example("\x00\x1b[2J\ud800\u202e\u2066")
def test_any_text_comes_back_but_for_what_a_browser_would_obey(text: str) -> None:
    (shown,) = json.loads(page.as_json([text]))
    shown.encode()
    assert not {*"\x00\x1b\u202e\u2066"} & {*shown}
    assert len(shown) == len(text)
    assert all(one == other or other == "\N{REPLACEMENT CHARACTER}" for one, other in zip(text, shown, strict=True))


def test_the_page_asks_nobody_and_runs_its_own_script_only() -> None:
    found = Page(page.render(EMPTY))
    assert found.problems == [] and found.requests() == [] and found.handlers() == []
    (script,) = found.running_scripts()
    assert found.allows(script)
    assert "Permission is hereby granted" in script.text
    assert "url(" not in found.source and "@import" not in found.source
    assert found.of("title")[0].text == "a & <b>" and document_in(found) == EMPTY
    assert len(found.source) < 120_000


def test_what_javascript_cannot_hold_is_a_text() -> None:
    values = [float("nan"), float("inf"), 2**60, 10**400, True, None, 0.1, 3]
    assert json.loads(page.as_json(values)) == ["nan", "inf", str(2**60), str(10**400), True, None, 0.1, 3]


@pytest.mark.parametrize("spike_at", [1, 617, 99_999])
def test_every_spike_is_inside_the_band(spike_at: int) -> None:
    values = array("d", [2.0] * 100_000)
    values[spike_at] = 42.0
    curve = line("loss", range(100_000), values)
    assert len(curve.x) == len(curve.y) == len(curve.low) == len(curve.high) <= MOST_POINTS
    assert (max(curve.high), min(curve.low)) == (42.0, 2.0)
    assert abs(curve.x[list(curve.high).index(42.0)] - spike_at) <= 2 * 100_000 / MOST_POINTS


def test_curves_share_x_and_are_none_where_they_have_no_point() -> None:
    block = plot("a", "A", [Curve(name="a", x=[1, 3], y=[1 / 3, 2.0]), Curve(name="b", x=[2, 3], y=[5.0, 6.0])])
    assert block["x"] == [1, 2, 3]
    assert [curve["y"] for curve in block["curves"]] == [[0.333333, None, 2], [None, 5, 6]]


@pytest.mark.parametrize(
    ("values", "scales"),
    [([4.0, 2.0], ["linear", "log"]), ([400.0, 1.0], ["log", "linear"]), ([4.0, 0.0], ["linear"])],
)
def test_two_scales_are_offered_where_both_make_sense(values: list[float], scales: list[str]) -> None:
    assert plot("a", "A", [Curve(name="a", x=[1, 2], y=values)])["scales"] == scales
