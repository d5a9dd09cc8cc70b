"""Who holds the others up: the map shows causes dark and victims pale, and every finding with what helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurm_train.report.pictures import write_run_pictures
from slurm_train.report.record import Verdict, read_record
from slurm_train.report.run_page import run_page
from slurm_train.report.stragglers import MOST_COLUMNS, build_heat_map, level_of, mapped_attempt, sums_of
from slurm_train.report.stragglers_figure import heat_map, stragglers
from slurm_train.rundir.stragglers import Finding, PaceWindow, RankPace
from tests.report.test_markup import HOSTILE
from tests.support.html_pages import Page
from tests.support.run_files import BEGAN_UNIX_S, RunFiles, ended, run_in

NAMED = Finding(
    kind="straggler",
    ranks=(2,),
    hosts=("node2",),
    factor=1.6,
    lost_share=0.36,
    sentence="rank 2 on node2 is 1.60x as slow as the others",
    advice="see what else runs on node2",
)


def window(number: int, *own_s: float, attempt: int = 0, findings: tuple[Finding, ...] = ()) -> PaceWindow:
    """A window of ten seconds; ranks wait for the slowest."""
    slowest = max(own_s, default=0.0)
    ranks = [
        RankPace(
            rank=rank, host=f"node{rank // 2 + 1}", own_s=one, wait_s=0.01 + slowest - one, data_s=0.0, uneven_s=0.0
        )
        for rank, one in enumerate(own_s)
    ]
    begin = BEGAN_UNIX_S + 10.0 * number
    return PaceWindow(
        attempt=attempt,
        begin_unix_s=begin,
        end_unix_s=begin + 10.0,
        from_step=100 * number,
        to_step=100 * number + 100,
        samples=9,
        ranks=tuple(ranks),
        findings=findings,
    )


SLOWED = [
    window(0, 0.1, 0.1, 0.1, 0.1),
    window(1, 0.1, 0.1, 0.16, 0.1),
    window(2, 0.1, 0.1, 0.16, 0.1, findings=(NAMED,)),
    window(3, 0.1, 0.1, 0.16, 0.1, findings=(NAMED,)),
]


def test_the_cause_is_dark_and_its_victims_are_pale() -> None:
    heat = build_heat_map(SLOWED, 0)
    assert [[level_of(excess) for excess in column] for column in heat.excess] == [
        [0, 0, 0, 0],
        *[[0, 0, 4, 0]] * 3,
    ]
    slow, *others = sums_of(SLOWED, heat)
    assert (slow.rank, slow.host, slow.named) == (2, "node2", 2) and slow.wait_s < others[0].wait_s
    drawing = heat_map(heat)
    assert drawing.count("heat h4") == 2, "one cell over three windows, and its entry in the legend"
    assert 'd="M2500 5000H10000V7500H2500z"' in drawing


@pytest.mark.parametrize(("excess", "level"), [(-0.5, 0), (0.049, 0), (0.05, 1), (0.6, 4), (9.0, 5)])
def test_a_cell_is_the_darker_the_longer(excess: float, level: int) -> None:
    assert level_of(excess) == level


def test_of_two_ranks_the_quick_one_is_the_measure() -> None:
    assert build_heat_map([window(0, 0.1, 0.2)], 0).excess == ((0.0, 1.0),)


def test_the_attempt_with_the_longest_record_is_shown_and_one_rank_has_no_map() -> None:
    windows = [window(0, 0.1, 0.1), window(1, 0.1, 0.1, attempt=1), window(2, 0.1, 0.1, attempt=1)]
    assert mapped_attempt(windows) == 1
    assert mapped_attempt([window(0, 0.1)]) is None and stragglers([window(0, 0.1)]) == ""


def test_a_map_of_many_windows_and_ranks_stays_small() -> None:
    windows = [window(number, *(0.1 + 0.05 * ((number + rank) % 3) for rank in range(64))) for number in range(1000)]
    heat = build_heat_map(windows, 0)
    assert len(heat.excess) <= MOST_COLUMNS
    assert len(heat_map(heat)) < 300_000


def page_of(folder: Path, **files: Any) -> Page:
    record = read_record(
        RunFiles(ledger=ended(0), **files).write(run_in(folder)), Verdict("finished"), now_unix_s=BEGAN_UNIX_S + 500
    )
    return Page(run_page(record))


def test_the_page_says_who_since_when_and_what_helps(tmp_path: Path) -> None:
    page = page_of(tmp_path, windows=SLOWED)
    assert page.problems == []
    for text in (
        "Who holds the others up",
        NAMED.sentence,
        NAMED.advice,
        "20 s",
        "36 %",
        "Ranks over time",
    ):
        assert text in page.text, text


def test_a_healthy_run_and_one_without_a_record_say_so(tmp_path: Path) -> None:
    healthy = page_of(tmp_path / "healthy", windows=SLOWED[:1])
    assert "No rank has held the others up for long, in 1 windows." in healthy.text
    assert "Who holds the others up" not in page_of(tmp_path / "none").text


def test_names_of_nodes_are_shown_as_they_are(tmp_path: Path) -> None:
    hostile = Finding(**{name: getattr(NAMED, name) for name in NAMED.__slots__} | {"sentence": HOSTILE[0]})
    assert page_of(tmp_path, windows=[window(0, 0.1, 0.2, findings=(hostile,))]).problems == []


def test_the_map_is_a_picture_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (extra: plot)")
    run = RunFiles(ledger=ended(0), windows=SLOWED).write(run_in(tmp_path))
    record = read_record(run, Verdict("finished"), now_unix_s=BEGAN_UNIX_S + 500)
    assert "stragglers.png" in [path.name for path in write_run_pictures(record, tmp_path / "pictures")]
