"""TensorBoard is an extra: curves where it is installed, one clear line where it is not."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import pytest

from slurm_train.errors import ConfigError
from slurm_train.metrics.tensorboard import TensorBoardWriter


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_numbers_become_curves(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoardWriter(tmp_path, first_step=0)
    writer.write({"step": 3, "loss": 1.5, "mfu": None, "attempt": 0})
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(3, 1.5)]


def test_absent_tensorboard_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without(name: str, *arguments: Any, **words: Any) -> Any:
        if name.startswith("torch.utils.tensorboard"):
            raise ImportError(name)
        return real_import(name, *arguments, **words)

    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'slurm-train\[track\]'"):
        TensorBoardWriter(tmp_path, first_step=0)
