"""The learning rate is a function of samples and of nothing else."""

from __future__ import annotations

import pytest

from slurm_train.config.schema import OptimSection
from slurm_train.train.optimizer import build_schedule


def lr_at(samples: int, **optim: object) -> float:
    section = OptimSection(**{"warmup_samples": 100, "min_lr_ratio": 0.1, **optim})  # type: ignore[arg-type]
    return build_schedule(section, peak_lr=2.0, total_samples=1100).lr_at(samples)


@pytest.mark.parametrize(
    ("samples", "cosine", "constant"),
    [(0, 0.0, 0.0), (50, 1.0, 1.0), (100, 2.0, 2.0), (600, 1.1, 2.0), (1100, 0.2, 2.0), (5000, 0.2, 2.0)],
)
def test_rises_linearly_then_falls_as_a_cosine(samples: int, cosine: float, constant: float) -> None:
    assert lr_at(samples) == pytest.approx(cosine)
    assert lr_at(samples, schedule="constant") == pytest.approx(constant)


def test_warm_up_is_a_twentieth_of_the_run_by_default_and_may_be_none() -> None:
    assert build_schedule(OptimSection(), peak_lr=1.0, total_samples=2000).warmup_samples == 100
    assert lr_at(1, warmup_samples=0) == pytest.approx(2.0, rel=1e-4)
