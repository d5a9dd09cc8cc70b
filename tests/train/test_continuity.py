"""Whether an attempt measures what the attempts before it have measured."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slurm_train.config.schema import EMA, RunConfig, TrainSection
from slurm_train.rundir.paths import RunDirectory
from slurm_train.train.continuity import Continuity, EvaluationBasis
from slurm_train.train.evaluate import find_measured
from tests.support.ranks import make_parts, make_rank


class HeldOut:
    """Samples that follow from a file."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = torch.tensor(numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def batch(self, indices: np.ndarray[Any, Any]) -> tuple[torch.Tensor]:
        return (self.numbers[torch.from_numpy(indices)],)

    def fingerprint(self) -> str:
        return "-".join(map(str, self.numbers.tolist()))


def measured(heldout: HeldOut | None, **settings: Any) -> EvaluationBasis | None:
    callbacks = [{"_target_": EMA, "evaluate": True}] if settings.pop("averaged", False) else []
    config = RunConfig(train=TrainSection(**settings), callbacks=callbacks)
    return find_measured(make_parts(make_rank(config=config), torch.nn.Linear(1, 1), None, heldout=heldout))


def continuity(now: EvaluationBasis | None) -> Continuity:
    facts: dict[str, Any] = {"settings": {}, "code": "", "same_code": frozenset(), "data": "d", "num_samples": 9}
    return Continuity(run=RunDirectory(Path("/nowhere")), changes=[], measured=now, **facts)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize(
    ("before", "now", "is_named"),
    [
        ({"heldout": HeldOut(1, 2, 3)}, {"heldout": HeldOut(1, 2, 3)}, False),
        ({"heldout": HeldOut(1, 2, 3)}, {"heldout": HeldOut(1, 2, 4)}, True),
        ({"heldout": HeldOut(*range(99))}, {"heldout": HeldOut(*range(99)), "eval_max_batches": 1}, True),
        # The cap has no effect on so few samples.
        ({"heldout": HeldOut(1, 2, 3)}, {"heldout": HeldOut(1, 2, 3), "eval_max_batches": 1}, False),
        ({"heldout": HeldOut(1, 2, 3)}, {"heldout": HeldOut(1, 2, 3), "averaged": True}, True),
        ({"heldout": HeldOut(1, 2, 3)}, {"heldout": HeldOut(4), "evaluate": False}, False),
        ({"heldout": None}, {"heldout": HeldOut(1)}, False),
    ],
)
def test_other_held_out_samples_are_named_at_a_resume(
    before: dict[str, Any], now: dict[str, Any], is_named: bool
) -> None:
    manifest: Any = SimpleNamespace(step=10, extra=continuity(measured(**before)).as_extra())
    note = continuity(measured(**now)).note_on_measures(manifest)
    assert (note is not None and "up to step 10" in note) is is_named
