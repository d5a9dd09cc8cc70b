"""The page holds its document safely and loads nothing; a million points become six hundred, no spike is lost."""

from __future__ import annotations

import json
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_train.status.run_status import RunState
from slurm_train.tools.report import page
from slurm_train.tools.report.page import MOST_POINTS, Curve, plot, skeleton, thinned
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


@pytest.mark.parametrize("spike_at", [1, 617, 50_000, 99_999])
def test_every_spike_is_inside_the_band(spike_at: int) -> None:
    values = array("d", [2.0] * 100_000)
    values[spike_at] = 42.0
    curve = thinned("loss", range(100_000), values)
    assert len(curve.x) == len(curve.y) == len(curve.low) == len(curve.high) == MOST_POINTS
    assert (max(curve.high), min(curve.low), curve.x[-1]) == (42.0, 2.0, 99_999)
    assert abs(curve.x[list(curve.high).index(42.0)] - spike_at) <= 100_000 / MOST_POINTS


@pytest.mark.parametrize("num", [0, 1, 5, 99, 100, 101, 4321])
def test_a_skeleton_keeps_every_spike(num: int) -> None:
    values = [1.0] * num
    if num > 50:
        values[37], values[num - 3] = 9.0, -9.0
    xs, ys = skeleton(range(num), values, most=100)
    assert len(xs) == len(ys) <= min(num, 102) and xs == sorted(set(xs))
    assert (min(ys, default=0), max(ys, default=0)) == (min(values, default=0), max(values, default=0))


def test_skeletons_of_runs_of_any_length_share_their_places() -> None:
    lengths = range(2000, 4000, 10)
    shared = {x for num in lengths for x in skeleton(range(num), list(map(float, range(num))), most=100)[0]}
    assert len(shared) < 400


def test_curves_share_x_and_are_none_where_they_have_no_point() -> None:
    block = plot("a", "A", [Curve(name="a", x=[1, 3], y=[1 / 3, 2.0]), Curve(name="b", x=[2, 3], y=[5.0, 6.0])])
    assert block["x"] == [1, 2, 3]
    assert [curve["y"] for curve in block["curves"]] == [[0.333333, None, 2], [None, 5, 6]]


@pytest.mark.parametrize(
    ("values", "scales"),
    [
        ([4.0, 2.0, 1.0], ["linear", "log"]),
        ([400.0, 2.0, 1.0], ["log", "linear"]),
        ([4.0, 0.0, 1.0], ["linear"]),
        ([2.0, 2.0, 2.0], ["linear"]),
    ],
)
def test_two_scales_are_offered_where_both_make_sense(values: list[float], scales: list[str]) -> None:
    assert plot("a", "A", [Curve(name="a", x=[1, 2, 3], y=values)])["scales"] == scales
