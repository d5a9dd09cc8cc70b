"""Which positions a rank has, and what cannot be cut; that it trains the same is in tests/train/test_layouts.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slurm_train.distributed.sequence import SequencePart, share_context
from slurm_train.errors import ConfigError
from slurm_train.models.gpt import GPT


def test_a_rank_has_a_chunk_of_the_front_and_its_mirror_image() -> None:
    parts = [SequencePart(place, 2).positions(8).tolist() for place in range(2)]
    assert parts == [[0, 1, 6, 7], [2, 3, 4, 5]]


def test_every_tensor_of_a_batch_is_cut_by_positions() -> None:
    tokens = torch.arange(16).reshape(2, 8)
    inputs, targets = SequencePart(1, 2).cut((tokens, tokens + 1))
    assert inputs.tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]] and torch.equal(targets, inputs + 1)
    with pytest.raises(ConfigError, match=r"parallel\.cp=3 cannot cut a sequence of 8 positions into 6 equal chunks"):
        SequencePart(0, 3).cut((tokens, tokens))


class OneRank:
    """As much of a mesh as is looked at before ranks exchange anything."""

    def size(self) -> int:
        return 2

    def get_local_rank(self) -> int:
        return 0


def test_a_model_is_told_what_its_plan_lacks() -> None:
    mesh: Any = OneRank()
    with pytest.raises(
        ConfigError,
        match=r"Linear has no context_parallel_plan\(\) with positions, attention",
    ):
        share_context(nn.Linear(2, 2), roots=[], mesh=mesh)
    model: Any = GPT(context=8, width=16)
    model.context_parallel_plan = lambda: {"positions": (), "attention": ("blocks.*.mixing",)}
    with pytest.raises(ConfigError, match=r"has 'blocks\.\*\.mixing', which names no part of the model"):
        share_context(model, roots=[], mesh=mesh)
    model.training_loss = lambda _batch: None
    with pytest.raises(ConfigError, match="brings its own loss"):
        share_context(model, roots=[], mesh=mesh)


@pytest.mark.parametrize(("form", "table"), [({}, "cos_TD"), ({"positions": "learned"}, "embedding.order_T")])
def test_the_tables_of_positions_are_cut_as_the_sequences_are(form: dict[str, Any], table: str) -> None:
    model, whole = (GPT(context=8, width=16, **form) for _ in range(2))
    mesh: Any = OneRank()
    share_context(model, roots=[model], mesh=mesh)
    model.forward = lambda _tokens: None  # type: ignore[method-assign, assignment]
    # Also sequences shorter than the model could take, one after the other.
    for own_length, positions in ((4, [0, 1, 6, 7]), (2, [0, 3]), (4, [0, 1, 6, 7])):
        model(torch.zeros(1, own_length, dtype=torch.int64))
        assert torch.equal(model.get_buffer(table), whole.get_buffer(table)[positions])
    assert model.state_dict().keys() == whole.state_dict().keys()
    with pytest.raises(ConfigError, match="a sequence of 16 positions was given to a model of context 8"):
        model(torch.zeros(1, 8, dtype=torch.int64))
