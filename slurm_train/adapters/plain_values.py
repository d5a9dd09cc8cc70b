"""Lets torch load values of a program's checkpoint that hold data, and nothing that acts.

`torch.load(weights_only=True)` reads tensors and numbers, and refuses what else a pickle names, such as a function that
runs a command. A file of a library may hold settings of other types (paths, modules of torch, classes of the program).
Those that only hold data are allowed by name before the file is loaded.
"""

from __future__ import annotations

import importlib
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

# Their constructors keep what they are given.
_CLASSES = {
    "argparse": {"Namespace"},
    "builtins": {"complex", "frozenset", "slice", "range"},
    "collections": {"ChainMap", "Counter", "OrderedDict", "UserDict", "defaultdict", "deque"},
    "datetime": {"date", "datetime", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "fractions": {"Fraction"},
    "functools": {"partial"},
    "lightning.fabric.utilities.data": {"AttributeDict"},
    "lightning_fabric.utilities.data": {"AttributeDict"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "types": {"SimpleNamespace"},
    "typing": {"Any"},
    "uuid": {"UUID"},
}
_PACKAGES = ("torch.nn.modules", "torch.optim", "omegaconf")
_FUNCTIONS = {
    "numpy": {"dtype", "ndarray"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
}


def allow_data_in(path: Path) -> list[str]:
    """Allows torch to load the types of data that a file names; returns the names of what stays refused, sorted.

    Args:
        path: a file of `torch.save`, or a directory in which Lightning has one; anything else names nothing.
    """
    file = path / "meta.pt" if path.is_dir() else path
    if not file.is_file() or not zipfile.is_zipfile(file):
        return []
    names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    values = {name: _data_class(name) for name in names}
    torch.serialization.add_safe_globals([(value, name) for name, value in values.items() if value is not None])
    # What a dtype of numpy is made from is its class, which no file names.
    torch.serialization.add_safe_globals([type(np.dtype(code)) for code in np.typecodes["All"]])
    return sorted(name for name, value in values.items() if value is None)


def _data_class(full: str) -> Any:
    """Returns what a name stands for where it only holds data, else None."""
    module, _, name = full.rpartition(".")
    is_listed = name in _CLASSES.get(module, ()) or name in _FUNCTIONS.get(module, ())
    is_of_package = any(module == package or module.startswith(f"{package}.") for package in _PACKAGES)
    if not (is_listed or is_of_package or _is_of_program(module)):
        return None
    try:
        value = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None
    return value if isinstance(value, type) or is_listed else None


def _is_of_program(module: str) -> bool:
    """Returns whether a module that is imported already is code of the program's own, and not installed."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or module.partition(".")[0] == "slurm_train":
        return False
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
    return not is_installed and Path(os.__file__).parent not in Path(file).parents
