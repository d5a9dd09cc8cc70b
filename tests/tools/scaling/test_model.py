"""A study: its runs, what each shows, the model of an exchange, and what follows in words and as a page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slurm_train.rundir.heartbeat import Heartbeat, Pace
from slurm_train.rundir.paths import RunDirectory
from slurm_train.tools.scaling.model import (
    WARM_UP_LINES,
    Measured,
    Size,
    StudyPoint,
    fit,
    measure,
    plan_points,
    render_page,
    render_text,
    sort_study,
    verdict,
)
from tests.support.html_pages import Page

GRADIENT_BYTES = 5e6


def measured(
    nodes: int,
    per_node: int,
    *,
    comm: str = "none",
    sent_bytes: float = GRADIENT_BYTES,
    alpha_s: float = 0.0,
    bytes_per_s: float = 12.5e6,
    compute_s: float = 0.1,
    data_s: float = 0.0,
    uneven_s: float = 0.0,
) -> Measured:
    size = Size(nodes, per_node)
    ranks = size.ranks
    comm_s = alpha_s * math.log2(ranks) + 2 * (ranks - 1) / ranks * sent_bytes / bytes_per_s
    step_s = compute_s + data_s + uneven_s + comm_s
    return Measured(
        point=StudyPoint(size, 4, 1, comm, ("local",)),
        step_s=step_s,
        per_s=4 * ranks / step_s,
        unit="samples",
        compute_s=compute_s,
        data_s=data_s,
        comm_s=comm_s,
        uneven_s=uneven_s,
        sent_bytes=sent_bytes,
    )


@pytest.mark.parametrize("sizes", ["1x1 1x8 2x8 4x8", "1x1 2x1 4x1", "1x1 1x2 2x2 4x2 6x2", "1x1 1x4"])
def test_sizes_go_from_one_rank_over_one_node_to_all(sizes: str) -> None:
    nodes, per_node = map(int, sizes.split()[-1].split("x"))
    points = plan_points(Size(nodes, per_node), local_size=1, comms=["none"])
    assert " ".join(str(one.size) for one in points if "local" in one.modes) == sizes


def test_the_largest_size_is_one_run_for_both_series() -> None:
    points = plan_points(Size(4, 2), local_size=4, comms=["none"])
    assert [(str(p.size), p.local_size, p.accumulation, p.global_size, p.modes) for p in points] == [
        ("1x1", 4, 1, 4, ("local",)),
        ("1x2", 4, 1, 8, ("local",)),
        ("2x2", 4, 1, 16, ("local",)),
        ("4x2", 4, 1, 32, ("local", "global")),
        ("1x1", 4, 8, 32, ("global",)),
        ("1x2", 4, 4, 32, ("global",)),
        ("2x2", 4, 2, 32, ("global",)),
    ]


POINT = StudyPoint(Size(1, 2), local_size=4, accumulation=1, comm="none", modes=("local",))
WARM_UP: list[dict[str, Any]] = [{"step_time_s": 9.0, "samples_per_s": 1.0, "attempt": 0}] * WARM_UP_LINES


def run_with(folder: Path, *step_times_s: float) -> RunDirectory:
    """A run of two ranks with eight samples a step; rank 1 waits a tenth of a second longer than rank 0."""
    run = RunDirectory(folder)
    (run.epochs).mkdir(parents=True)
    (run.epochs / "attempt_0").touch()
    lines = [{"step_time_s": one, "samples_per_s": 8 / one, "attempt": 0} for one in step_times_s]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in [*WARM_UP, *lines]))
    for rank in range(2):
        heart = Heartbeat()
        heart.pace = Pace().plus(own_s=0.3 - 0.1 * rank, wait_s=0.1 + 0.1 * rank, data_s=0.05)
        heart.start(run, 0, rank=rank, host="node1", limits=None)
        heart.stop()
    return run


def test_the_speed_is_that_of_the_step_however_few_lines_there_are(tmp_path: Path) -> None:
    found = measure(run_with(tmp_path, 0.1, 0.3), POINT)
    parts = (found.step_s, found.per_s, found.comm_s, found.uneven_s, found.compute_s, found.data_s)
    assert parts == pytest.approx((0.2, 8 / 0.2, 0.1, 0.05, 0.2, 0.05))
    assert measure(run_with(tmp_path / "warm-up"), POINT) is None


def over(*nodes: int, **facts: float) -> list[Measured]:
    return [measured(one, 2, **facts) for one in nodes]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("points", "alpha_s", "bytes_per_s"),
    [
        (over(1, 2, 4, 8, alpha_s=0.003, bytes_per_s=12.5e6), 0.003, 12.5e6),
        # One size alone is taken for bandwidth.
        (over(2, bytes_per_s=1e6), 0.0, 1e6),
        # Runs on one node count only where there are no others.
        ([*over(1, bytes_per_s=1e9), *over(4, bytes_per_s=1e6)], 0.0, 1e6),
    ],
)
def test_latency_and_bandwidth_are_found_again(points: list[Measured], alpha_s: float, bytes_per_s: float) -> None:
    model = fit(points)
    assert (model.alpha_s, model.bytes_per_s) == (pytest.approx(alpha_s, abs=1e-9), pytest.approx(bytes_per_s))
    assert model.comm_s(points[-1], ranks=points[-1].size.ranks) == pytest.approx(points[-1].comm_s)


def test_times_that_fall_with_the_number_of_ranks_fit_no_model_and_no_part_is_negative() -> None:
    model = fit([*over(2, bytes_per_s=1e6), *over(8, bytes_per_s=4e6)])
    assert model.alpha_s >= 0 and model.bytes_per_s > 0
    assert fit(over(2, 4, 8, alpha_s=0.01, bytes_per_s=math.inf)).alpha_s == pytest.approx(0.01)
    assert fit([measured(1, 1)]) is None


def series(**facts: float) -> list[Measured]:
    """One rank, and one, two and four nodes; within a node the exchange is quick."""
    return [measured(1, 1), *over(1, **facts | {"bytes_per_s": 12.5e9}), *over(2, 4, **facts)]


def said(points: Sequence[Measured]) -> str:
    return "\n".join(verdict(sort_study(points, comm="none")))


@pytest.mark.parametrize(
    ("points", "sentences"),
    [
        (
            series(bytes_per_s=12.5e6),
            (
                "at 4 nodes x 2 a step takes 800 ms; the network limits: 88% of a step is spent on the exchange",
                "each rank sends 8.3 MiB per step at an effective 100 Mbit/s, which takes 700 ms",
                "more nodes do not pay: 8 would have 1.88x the throughput of 4, and each of them 12% of",
            ),
        ),
        (
            series(bytes_per_s=12.5e9),
            (
                "computing limits",
                "nothing else takes a tenth of it",
                "more nodes pay: 8 would have 2.00x the throughput of 4, and each of them 100% of what one alone",
            ),
        ),
        (
            [measured(1, 1), *over(1, bytes_per_s=1e9), *over(2, 4, bytes_per_s=1e6)],
            ("4 nodes are no faster than one",),
        ),
        (series(bytes_per_s=1e9, data_s=0.2), ("reading limits: 6",)),
        (series(bytes_per_s=1e9, uneven_s=0.2), ("uneven ranks limit: 6",)),
    ],
    ids=["network", "computing", "no faster", "data", "uneven"],
)
def test_what_limits_is_named_and_whether_more_nodes_pay(points: list[Measured], sentences: tuple[str, ...]) -> None:
    text = said(points)
    assert [sentence for sentence in sentences if sentence not in text] == []


def test_the_best_way_of_exchanging_is_named_and_the_page_has_every_run_and_needs_nothing_else() -> None:
    others = [measured(4, 2, comm="bf16", sent_bytes=2.5e6)]
    study = sort_study([*series(bytes_per_s=12.5e6), *others], comm="none")
    assert "ddp.comm=bf16 is 1." in "\n".join(verdict(study))
    rows = [line.split() for line in render_text(study).splitlines() if line.startswith("4x2 ")]
    # The bytes over the bandwidth stand beside what was measured.
    assert ["2.4", "MiB", "350", "ms"] in [row[-6:-2] for row in rows if row[1] == "bf16"]
    page = render_page(study, title="gpt <1>: from 1 rank to 4 nodes")
    assert "http" not in page and "<script" not in page and "gpt &lt;1&gt;" in page
    assert page.count('<div class="row">') == len(study.local) + len(study.other_exchanges)
    assert Page(page).problems == []


def test_a_study_of_one_rank_alone_has_a_report_too() -> None:
    assert "computing limits" in render_text(sort_study([measured(1, 1)], comm="none"))
