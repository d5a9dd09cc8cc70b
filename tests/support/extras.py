"""Marks for tests of what comes with an extra."""

from __future__ import annotations

import importlib.util

import pytest

NEEDS_TRANSFORMERS = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed: pip install '.[hf]'"
)
NEEDS_TORCHAO = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed: pip install '.[fp8]'"
)
NEEDS_PEFT = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="peft is not installed: pip install '.[lora]'"
)
