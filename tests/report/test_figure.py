"""A plot as markup: shapes at their places, both scales where two make sense, points for the read-out."""

from __future__ import annotations

import json
import re

import pytest

from slurm_train.report.curve import Curve, thinned
from slurm_train.report.figure import figure
from slurm_train.report.path import SIDE, band, dots, line, places, ranges
from slurm_train.report.plot import Mark, Plot
from slurm_train.report.scale import Scale
from tests.support.html_pages import Page

LOSS = Curve(name="loss", x=[1, 2, 3], y=[4.0, 2.0, 1.0])


def drawn(plot: Plot) -> Page:
    page = Page(f"<body>{figure(plot)}</body>")
    assert page.problems == []
    return page


def points_of(path: str) -> list[tuple[int, int]]:
    """Returns the corners of a path of one move and differences."""
    first, *rest = [tuple(map(int, pair)) for pair in re.findall(r"[Ml](-?\d+) (-?\d+)", path)]
    found = [first]
    for x, y in rest:
        found.append((found[-1][0] + x, found[-1][1] + y))
    return found


def test_differences_lead_back_to_the_points() -> None:
    points = [(0, 10_000), (17, 3), (9_999, 5_000), (10_000, 0)]
    assert points_of(line(points)) == points
    assert line([]) == ""
    assert line([(3, 4)]) == "M3 4h0"
    assert dots([(1, 2), (3, 4)]) == "M1 2h0M3 4h0"
    assert ranges([(1, 9)], [(1, 2)]) == "M1 9V2"
    assert band([(0, 9), (5, 9)], [(0, 1), (5, 1)]) == "M0 1l5 0l0 8l-5 0z"


def test_the_y_axis_points_up_and_what_lies_outside_stands_at_the_edge() -> None:
    found = places(LOSS, LOSS.y, Scale(1, 3), Scale(1, 3))
    assert found == [(0, 0), (SIDE // 2, SIDE // 2), (SIDE, SIDE)]


@pytest.mark.parametrize(
    ("values", "scales"),
    [
        ([4.0, 2.0, 1.0], ["linear", "log"]),
        ([400.0, 2.0, 1.0], ["log", "linear"]),
        ([4.0, 0.0, 1.0], []),
        ([4.0, -2.0, 1.0], []),
        ([2.0, 2.0, 2.0], []),
    ],
)
def test_two_scales_are_offered_where_both_make_sense(values: list[float], scales: list[str]) -> None:
    page = drawn(Plot(key="a", title="A", curves=[Curve(name="a", x=[1, 2, 3], y=values)]))
    assert [label.text for label in page.of("label")] == scales
    assert len(page.of("div", class_="frame")) == max(1, len(scales))


def test_values_next_to_zero_take_no_room_on_a_log_axis() -> None:
    curve = Curve(name="a", x=[1, 2], y=[1.0, 100.0], low=[1e-30, 50.0], high=[2.0, 200.0])
    log = Plot(key="a", title="A", curves=[curve]).y_scales()[0]
    assert log.is_log and 0.05 < log.low < 0.1


def test_a_plot_without_points_says_so() -> None:
    page = drawn(Plot(key="a", title="A", curves=[], note="no step is on record yet"))
    assert page.text == "Ano step is on record yet"


def test_the_read_out_has_whole_steps_and_short_values() -> None:
    curve = Curve(name="a", x=[1_234_567, 1_234_568], y=[1 / 3, 1e-30], labels=["n1", "n2"], key="7")
    page = drawn(Plot(key="a", title="A", curves=[curve], y_label="ms"))
    data = json.loads(page.of("script")[0].text)
    assert (data["x"], data["unit"], data["isMany"]) == ("step", "ms", False)
    (found,) = data["curves"]
    assert (found["x"], found["y"]) == ([1_234_567, 1_234_568], [0.333333, 1e-30])
    assert (found["labels"], found["key"]) == (["n1", "n2"], "7")


def test_marks_stand_at_their_places_and_only_some_are_named() -> None:
    marks = [Mark(2, "attempt 1"), Mark(3, "spike at step 3", "event"), Mark(1, "stop asked", "calm")]
    page = drawn(Plot(key="a", title="A", curves=[LOSS], marks=marks))
    found = page.of("span", class_="at")[:3]
    assert [(one.text, one.attributes["style"], one.attributes["title"]) for one in found] == [
        ("attempt 1", "left:50.00%", "attempt 1"),
        ("", "left:100.00%", "spike at step 3"),
        ("", "left:0.00%", "stop asked"),
    ]


def test_a_thinned_curve_has_a_band_and_a_short_one_has_none() -> None:
    many = thinned("a", range(5000), [float(value % 7) + 1 for value in range(5000)])
    assert len(drawn(Plot(key="a", title="A", curves=[many])).of("path", class_="band")) == 2
    assert drawn(Plot(key="a", title="A", curves=[LOSS])).of("path", class_="band") == []


def test_many_curves_have_no_legend_but_their_runs() -> None:
    curves = [Curve(name=f"run {index}", x=[1, 2], y=[1.0, 2.0], key=str(index)) for index in range(9)]
    page = drawn(Plot(key="a", title="A", curves=curves))
    assert page.of("span", class_="legend") == []
    assert [path.attributes["data-run"] for path in page.of("path", class_="curve")][:9] == [str(i) for i in range(9)]
