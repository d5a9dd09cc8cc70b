"""Values of a checkpoint that hold data are loaded; what acts is named and stays refused."""

from __future__ import annotations

import functools
import os
import pickle
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slurm_train.adapters.plain_values import allow_data_in


@dataclass
class Settings:
    """A class of the program's own."""

    width: int = 3


class Acts:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize(
    "value",
    [
        Path("data"),
        Namespace(lr=0.1),
        SimpleNamespace(a=1),
        Settings(4),
        np.arange(6.0).reshape(2, 3),
        np.float32(2.5),
        functools.partial(torch.optim.AdamW, lr=0.1),
        {"places": {1, 2}, "complex": 1j},
    ],
    ids=lambda value: type(value).__name__,
)
def test_data_of_other_types_are_loaded(value: Any, tmp_path: Path) -> None:
    torch.save({"value": value, "loss": torch.nn.MSELoss()}, tmp_path / "file.pt")
    assert allow_data_in(tmp_path / "file.pt") == []
    loaded = torch.load(tmp_path / "file.pt", weights_only=True)
    assert repr(loaded["value"]) == repr(value) and isinstance(loaded["loss"], torch.nn.MSELoss)


@pytest.mark.parametrize(
    "function", [os.system, eval, exec, torch.hub.load, pickle.loads, torch.load, functools.reduce]
)
def test_what_acts_is_named_and_refused(function: Any, tmp_path: Path) -> None:
    torch.save([Acts(function, "1")], tmp_path / "file.pt")
    (name,) = allow_data_in(tmp_path / "file.pt")
    assert name.rpartition(".")[2] == function.__name__
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "file.pt", weights_only=True)


def test_what_is_no_file_of_torch_names_nothing(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("x")
    assert allow_data_in(tmp_path / "text") == allow_data_in(tmp_path) == allow_data_in(tmp_path / "absent") == []
