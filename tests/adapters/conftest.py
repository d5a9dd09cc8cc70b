"""What the adapters change in torch is undone after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_safe_types() -> Iterator[None]:
    """Takes back the types that a test has let torch load: tests of other files share the process."""
    before = torch.serialization.get_safe_globals()
    yield
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(before)
