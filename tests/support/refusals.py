"""What a call is refused with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from slurm_train.errors import SlurmTrainError

E = TypeVar("E", bound=SlurmTrainError)


def refusal(kind: type[E], call: Callable[..., object], *args: Any, **named: Any) -> E:
    """Returns the error of this kind that a call ends with; it says what to do."""
    with pytest.raises(kind) as caught:
        call(*args, **named)
    assert caught.value.hint
    return caught.value
