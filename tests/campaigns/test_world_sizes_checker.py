from __future__ import annotations

from typing import Any

import pytest

from tests.campaigns.world_sizes import compare

pytestmark = pytest.mark.full

STEP: dict[str, Any] = {"samples": 96, "samples_digest": 7, "lr": 0.1, "epoch": 0, "loss": 2.0, "grad_norm": 1.0}
STEPS = [{**STEP, "step": number} for number in (1, 2)]


def test_equal_runs_are_equal_and_rounding_is_let_pass() -> None:
    assert compare(STEPS, STEPS) == ([], 0.0)
    found, worst = compare(STEPS, [STEPS[0], {**STEPS[1], "loss": 2.0 + 1e-7}])
    assert found == [] and worst == pytest.approx(5e-8)


@pytest.mark.parametrize(("key", "value"), [("samples_digest", 8), ("grad_norm", 2), ("loss", float("nan"))])
def test_a_planted_difference_is_reported(key: str, value: Any) -> None:
    (found,), _ = compare(STEPS, [STEPS[0], {**STEPS[1], key: value}])
    assert found.startswith(f"step 2 {key}: ")


def test_a_missing_step_is_reported() -> None:
    assert compare(STEPS, STEPS[:1])[0] == ["the steps on record differ"]
