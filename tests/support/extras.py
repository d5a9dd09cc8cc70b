"""Marks for tests of what comes with an extra."""

from __future__ import annotations

import importlib.util

import pytest


def _needs(module: str, extra: str) -> pytest.MarkDecorator:
    is_missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(is_missing, reason=f"{module} is not installed: pip install '.[{extra}]'")


NEEDS_TRANSFORMERS = _needs("transformers", "hf")
NEEDS_TORCHAO = _needs("torchao", "fp8")
NEEDS_PEFT = _needs("peft", "lora")
NEEDS_LIGHTNING = _needs("lightning", "bench")
NEEDS_IGNITE = _needs("ignite", "loops")
NEEDS_MMENGINE = _needs("mmengine", "loops")
NEEDS_STABLE_BASELINES3 = _needs("stable_baselines3", "loops")
NEEDS_WANDB = _needs("wandb", "track")
NEEDS_MATPLOTLIB = _needs("matplotlib", "test")
