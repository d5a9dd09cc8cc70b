"""The loops that the benchmark of GPT-2 compares: what they import."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from tests.benchmarks.bench_gpt2 import import_lightning

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("installed", "taken"),
    [
        (["lightning", "pytorch_lightning"], "lightning"),
        (["lightning"], "lightning"),
        (["pytorch_lightning"], "pytorch_lightning"),
    ],
)
def test_lightning_is_found_by_either_name(
    installed: list[str], taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in installed:
        (tmp_path / f"{name}.py").touch()
    for name in ("lightning", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    module = import_lightning()
    # Not `monkeypatch.delitem`: its undoing would put the empty module back, for every later test of this process.
    del sys.modules[taken]
    assert module.__name__ == taken
