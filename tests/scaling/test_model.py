"""The model of an exchange: found again from what it gives, and nothing made up where little is known."""

from __future__ import annotations

import math

import pytest

from slurm_train.scaling.model import fit, ring_bytes
from tests.scaling.made_up import GRADIENT_BYTES, measured


def test_latency_and_bandwidth_are_found_again() -> None:
    points = [measured(nodes, 2, alpha_s=0.003, bytes_per_s=12.5e6) for nodes in (1, 2, 4, 8)]
    model = fit(points)
    assert model is not None
    assert model.alpha_s == pytest.approx(0.003, rel=1e-6) and model.bytes_per_s == pytest.approx(12.5e6, rel=1e-6)
    assert model.comm_s(16, GRADIENT_BYTES) == pytest.approx(points[-1].comm_s)


def test_one_size_alone_is_taken_for_bandwidth() -> None:
    model = fit([measured(2, 1, bytes_per_s=1e6)])
    assert model is not None
    assert (model.alpha_s, model.bytes_per_s) == (0.0, pytest.approx(1e6))


def test_runs_on_one_node_count_only_where_there_are_no_others() -> None:
    fast, slow = measured(1, 8, bytes_per_s=1e9), measured(4, 8, bytes_per_s=1e6)
    mixed, alone = fit([fast, slow]), fit([fast])
    assert mixed is not None and mixed.bytes_per_s == pytest.approx(1e6)
    assert alone is not None and alone.bytes_per_s == pytest.approx(1e9)


def test_no_part_is_negative() -> None:
    # Times that fall with the number of ranks fit no model; the least wrong one is taken.
    points = [measured(2, 1, bytes_per_s=1e6), measured(8, 1, bytes_per_s=4e6)]
    model = fit(points)
    assert model is not None and model.alpha_s >= 0 and model.bytes_per_s > 0
    latency = fit([measured(n, 1, alpha_s=0.01, bytes_per_s=math.inf) for n in (2, 4, 8)])
    assert latency is not None
    assert latency.alpha_s == pytest.approx(0.01) and latency.comm_s(16, GRADIENT_BYTES) == pytest.approx(0.04)


def test_without_an_exchange_there_is_no_model() -> None:
    assert fit([measured(1, 1)]) is None
    assert fit([]) is None


def test_a_ring_sends_twice_all_but_one_part() -> None:
    assert ring_bytes(1, 100.0) == 0.0
    assert ring_bytes(4, 100.0) == 150.0
