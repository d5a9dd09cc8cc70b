"""The checker of the campaign `slow-network` can fail."""

from __future__ import annotations

from typing import Any

from tests.campaigns.slow_network import NODES, WAYS, figures_of, what_is_wrong

TEXT = "at 4 nodes x 1 a step takes 300 ms; the network limits: 80% of a step"


def runs(**changes: dict[str, float]) -> dict[str, dict[str, Any]]:
    # 2 MB at 100 Mbit/s: 2 x 3/4 x 2 MB / 12.5 MB/s.
    plain = {"step_s": 0.30, "comm_s": 0.25, "sent_bytes": 2e6}
    faster = {"step_s": 0.10, "comm_s": 0.05, "sent_bytes": 2e5}
    return {way: (plain if way == "none" else faster) | changes.get(way, {}) for way in WAYS}


def test_a_true_report_is_accepted_and_told_in_figures() -> None:
    assert NODES == 4
    assert what_is_wrong(0, TEXT, runs()) == []
    assert figures_of(runs())["step with bf16"] == "100 ms (3.0x; its bytes take 24 ms)"


def test_what_is_not_true_is_found() -> None:
    assert what_is_wrong(1, TEXT, {}) == ["exit code 1, results of []"]
    assert what_is_wrong(0, "computing limits", runs()) == ["it does not say that the network limits"]
    assert "its bytes take 0.240 s" in what_is_wrong(0, TEXT, runs(none={"comm_s": 0.02}))[0]
    assert what_is_wrong(0, TEXT, runs(bf16={"step_s": 0.29})) == ["bf16 is 1.03x as fast as the plain exchange"]
