"""The names of libraries that adapters need: checked at the first start."""

from __future__ import annotations

import pytest
import torch

from slurm_train.adapters.library_names import Library
from slurm_train.errors import ConfigError


def test_a_library_without_a_name_that_is_needed_is_refused_at_the_start() -> None:
    Library(name="torch", tried=">=2.7", names={"torch": ("save", "load")}).check(torch=torch)
    lacking = Library(name="torch", tried=">=2.7,<3", names={"torch": ("save", "sove")})
    with pytest.raises(ConfigError, match=r"torch 2\..* lacks what the callback needs.*: torch\.sove") as caught:
        lacking.check(torch=torch)
    assert "torch>=2.7,<3" in caught.value.hint
    with pytest.raises(ConfigError, match=r"torch 2\..* is older") as caught:
        Library(name="torch", tried=">=2.9999.1,<3", names={}).check()
    assert "torch>=2.9999.1,<3" in caught.value.hint
