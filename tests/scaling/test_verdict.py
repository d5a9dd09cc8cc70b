"""What limits and whether more nodes pay, in words; and the report as text and as a page."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

import pytest

from slurm_train.scaling.measure import Measured
from slurm_train.scaling.page import render_page
from slurm_train.scaling.text import render_text
from slurm_train.scaling.verdict import efficiency, in_bits, in_bytes, in_time, shares, sort_study, verdict
from tests.scaling.made_up import measured

NODES = (1, 2, 4)


def series(**facts: float) -> list[Measured]:
    """One rank, and one, two and four nodes; within a node the exchange is quick."""
    inside: dict[str, float] = facts | {"bytes_per_s": 12.5e9}
    alone = measured(1, 1, compute_s=facts.get("compute_s", 0.1))
    return [alone, measured(1, 2, **inside), *(measured(nodes, 2, **facts) for nodes in NODES[1:])]  # type: ignore[arg-type]


def said(points: Sequence[Measured]) -> str:
    return "\n".join(verdict(sort_study(points, comm="none")))


def test_a_slow_network_is_named_with_its_bandwidth() -> None:
    text = said(series(bytes_per_s=12.5e6))
    assert "at 4 nodes x 2 a step takes 800 ms; the network limits: 88% of a step is spent on the exchange" in text
    assert "each rank sends 8.75 MB per step at an effective 100 Mbit/s, which takes 700 ms" in text
    assert "more nodes do not pay: 8 would have 1.88x the throughput of 4, and each of them 12% of" in text


def test_a_fast_network_lets_more_nodes_pay() -> None:
    text = said(series(bytes_per_s=12.5e9))
    assert "computing limits" in text and "nothing else takes a tenth of it" in text
    assert "more nodes pay: 8 would have 2.00x the throughput of 4, and each of them 100% of what one alone" in text


def test_nodes_that_are_slower_together_are_said_so() -> None:
    pair = [measured(nodes, 2, bytes_per_s=1e6) for nodes in (2, 4)]
    assert "4 nodes are no faster than one" in said([measured(1, 1), measured(1, 2, bytes_per_s=1e9), *pair])


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"bytes_per_s": 1e9, "data_s": 0.2}, "reading limits: 6"),
        ({"bytes_per_s": 1e9, "uneven_s": 0.2}, "uneven ranks limit: 6"),
    ],
)
def test_other_limits_are_told_apart(facts: dict[str, float], words: str) -> None:
    assert words in said(series(**facts))


def test_ranks_that_share_what_they_compute_on_limit_each_other() -> None:
    points = [measured(1, 1, compute_s=0.1), *(measured(nodes, 2, compute_s=0.3, bytes_per_s=1e9) for nodes in NODES)]
    assert "the ranks of a node limit each other" in said(points)
    found = shares(sort_study(points, comm="none"))
    assert found["crowd"] == pytest.approx(2 * found["compute"], rel=1e-6)


def test_the_best_way_of_exchanging_is_named_and_compared_with_its_bytes() -> None:
    others = [
        measured(4, 2, comm="bf16", sent_bytes=2.5e6),
        measured(4, 2, comm="powersgd", sent_bytes=2e5),
    ]
    study = sort_study([*series(bytes_per_s=12.5e6), *others], comm="none")
    assert "ddp.comm=powersgd is 6." in "\n".join(verdict(study))
    text = render_text(study)
    rows = {
        line.split()[1]: line.split()
        for line in text.splitlines()
        if line.startswith("4x2 ") and "ms" in line and "x" in line
    }
    assert {"none", "bf16", "powersgd"} <= set(rows)
    assert rows["bf16"][-6:-2] == ["2.5", "MB", "350", "ms"], "bytes over bandwidth stands beside what was measured"


def test_efficiency_is_throughput_per_rank() -> None:
    base, one = measured(1, 1), measured(4, 2, bytes_per_s=12.5e6)
    assert efficiency(one, base) == pytest.approx(base.step_s / one.step_s)


def test_a_page_needs_nothing_else_and_its_drawings_are_sound() -> None:
    study = sort_study([*series(bytes_per_s=12.5e6), measured(4, 2, comm="bf16", sent_bytes=2.5e6)], comm="none")
    page = render_page(study, title="gpt <1>: from 1 rank to 4 nodes")
    assert "http" not in page and "<script" not in page and "gpt &lt;1&gt;" in page
    drawings = page.split("<svg")[1:]
    assert len(drawings) == 2
    for drawing in drawings:
        ElementTree.fromstring(f"<svg{drawing.partition('</svg>')[0]}</svg>")


def test_a_study_of_one_rank_alone_has_a_report_too() -> None:
    assert "computing limits" in render_text(sort_study([measured(1, 1)], comm="none"))


def test_numbers_are_for_people() -> None:
    assert [in_time(s) for s in (12.34, 0.0567, 3e-6)] == ["12.3 s", "56.7 ms", "3 us"]
    assert [in_bytes(b) for b in (5.25e6, 16, 2e9)] == ["5.25 MB", "16 B", "2 GB"]
    assert [in_bits(b) for b in (12.5e6, 12.5e9)] == ["100 Mbit/s", "100 Gbit/s"]
