"""The rows of a plan: what the settings of the learning rate and of the context mean for this run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slurm_train.plan.preview import plan_rows
from tests.support.plans import make_plan

HF = "slurm_train.models.causal_lm.causal_lm"


def row(name: str, *, cwd: Path | str = "/home/user/project", **sections: Any) -> str | None:
    """Returns the text of a row of a run with 64 samples a step."""
    return dict(plan_rows(make_plan(cwd, **sections))).get(name)


@pytest.mark.parametrize(
    ("optim", "expected"),
    [
        ({}, "cosine, warm-up over 15 of 300 steps"),
        # A hundred steps were meant.
        ({"warmup_samples": 100}, "cosine, warm-up over 1.562 of 300 steps"),
        ({"schedule": "wsd", "decay_samples": 640}, "wsd, warm-up over 15, fall over the last 10 of 300 steps"),
        ({"schedule": {"_target_": "my_package.falling"}}, "my_package.falling"),
    ],
)
def test_the_schedule_is_shown_in_steps(optim: dict[str, Any], expected: str) -> None:
    assert row("schedule", optim=optim, train={"max_steps": 300}) == expected


def test_of_a_run_of_epochs_the_schedule_is_shown_as_it_was_typed() -> None:
    optim = {"warmup_samples": 6400}
    assert row("schedule", optim=optim, train={"max_epochs": 3}) == "cosine, warm-up over 6,400 samples"


@pytest.mark.parametrize(
    ("optim", "said"),
    [
        ({}, ""),
        ({"lr_retune": "linear", "lr_global_size": 64}, ""),
        ({"lr_global_size": 64}, ""),
        ({"lr_retune": "linear"}, "optim.lr_retune=linear has no optim.lr_global_size"),
        ({"lr_global_size": 32}, "unchanged: optim.lr_global_size=32 needs optim.lr_retune"),
        ({"lr_retune": "linear", "lr_global_size": 32}, "linear rule: 0.001 was tuned for a global batch of 32"),
    ],
)
def test_a_rule_for_the_rate_that_changes_nothing_is_named(optim: dict[str, Any], said: str) -> None:
    text = row("peak lr", optim={"lr": 1e-3, **optim})
    assert text is not None and said in text and (text == "0.001" or bool(said))


@pytest.mark.parametrize(
    ("saved", "typed", "is_named"),
    [
        ({"max_position_embeddings": 128}, None, True),
        ({"n_positions": 128}, None, True),
        ({"max_position_embeddings": 256}, None, False),
        ({"max_position_embeddings": 128, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, None, False),
        ({"max_position_embeddings": 128}, {"max_position_embeddings": 256}, False),
        ({}, None, False),
        (None, {"max_position_embeddings": 64}, True),
    ],
)
def test_a_context_beyond_what_a_model_knows_is_named(
    saved: dict[str, Any] | None, typed: dict[str, Any] | None, is_named: bool, tmp_path: Path
) -> None:
    """The samples have 256 tokens."""
    model: dict[str, Any] = {"_target_": HF, "model_type": "llama", "config": typed}
    if saved is not None:
        (tmp_path / "config.json").write_text(json.dumps(saved))
        model |= {"path": ".", "model_type": None}
    assert (row("context", cwd=tmp_path, model=model) is not None) is is_named
    assert row("context") is None, "the included model follows its samples"
