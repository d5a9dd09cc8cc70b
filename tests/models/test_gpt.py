from __future__ import annotations

from typing import Any

import pytest
import torch

from slurm_train.errors import ConfigError
from slurm_train.models.gpt import GPT

SMALL = {"vocab_size": 11, "context": 8, "num_layers": 2, "num_heads": 2, "width": 16}


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(**SMALL).eval()  # type: ignore[arg-type]


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 11, (batch, length), generator=torch.Generator().manual_seed(1))


def test_no_position_sees_a_later_token(model: GPT) -> None:
    left = tokens(1, 8)
    right = left.clone()
    right[0, 5:] = (right[0, 5:] + 1) % 11
    first, second = model(left), model(right)
    assert first.shape == (1, 8, 11)
    torch.testing.assert_close(first[:, :5], second[:, :5])
    assert not torch.allclose(first[:, 5:], second[:, 5:])


def test_tied_head_is_the_embedding_and_untied_is_not() -> None:
    tied, untied = GPT(**SMALL), GPT(**SMALL, tied=False)  # type: ignore[arg-type]
    assert tied.head.weight is tied.embedding.weight
    assert untied.head.weight is not untied.embedding.weight


def test_rotary_tables_are_not_saved(model: GPT) -> None:
    assert not [name for name in model.state_dict() if "_TD" in name]


def test_learns_to_repeat_a_sequence() -> None:
    torch.manual_seed(0)
    model = GPT(**SMALL)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = torch.arange(9).expand(4, 9)
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    assert model.generate(torch.tensor([[0]]), num_tokens=8, temperature=0).tolist() == [list(range(9))]


def test_generate_goes_beyond_the_context_and_repeats_with_the_same_generator(model: GPT) -> None:
    start = tokens(2, 3)
    first, second = (
        model.generate(start, num_tokens=12, temperature=1.0, generator=torch.Generator().manual_seed(5))
        for _ in range(2)
    )
    assert first.shape == (2, 15)
    assert torch.equal(first, second)
    assert torch.equal(first[:, :3], start)


def test_dropout_acts_in_training_only() -> None:
    model = GPT(**SMALL, dropout=0.5)  # type: ignore[arg-type]
    batch = tokens(1, 8)
    assert not torch.equal(model(batch), model(batch))
    model.eval()
    assert torch.equal(model(batch), model(batch))


def test_messages_of_wrong_sizes(model: GPT) -> None:
    with pytest.raises(ConfigError) as caught:
        model(tokens(1, 9))
    assert caught.value.message == "a sequence of 9 tokens was given to a model of context 8"
    with pytest.raises(ConfigError) as caught:
        GPT(width=100, num_heads=3)
    assert str(caught.value) == (
        "model.width=100 cannot be split into model.num_heads=3 heads of an even width\n"
        "hint: set model.width to a multiple of 6"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"num_heads": 4, "num_kv_heads": 3}, "model.num_heads=4 heads cannot share model.num_kv_heads=3 in equal gro"),
        ({"activation": "relu"}, "model.activation=relu is not known\nhint: use one of gelu, gelu_tanh, swiglu"),
        ({"positions": "alibi"}, "model.positions=alibi is not known\nhint: use one of rope, learned"),
        ({"rope_scaling": {"factor": 8.0}}, "model.rope_scaling has the keys factor\nhint: give all of factor, low_f"),
    ],
)
def test_a_form_that_is_none_is_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GPT(**{**SMALL, **words})
    assert str(caught.value).startswith(message)


def test_the_shipped_form_computes_what_it_always_has() -> None:
    """Weights and logits of the first release, so that a run of then goes on unchanged."""
    torch.manual_seed(0)
    model = GPT(**SMALL).eval()  # type: ignore[arg-type]
    logits_BTV = model(torch.arange(8)[None] % 11)
    assert list(model.state_dict()) == SHIPPED_NAMES
    assert logits_BTV[0, 7, :3].tolist() == pytest.approx(SHIPPED_LOGITS, rel=1e-5)


BLOCK_NAMES = ("attention_norm", "attention.q", "attention.k", "attention.v", "attention.out", "feed_forward_norm",
               "feed_forward.up", "feed_forward.out")  # fmt: skip
SHIPPED_NAMES = [
    "embedding.weight",
    *(f"blocks.{number}.{name}.weight" for number in range(2) for name in BLOCK_NAMES),
    "norm.weight",
    "head.weight",
]
SHIPPED_LOGITS = [-0.030020762, -0.052685230, 0.133970767]
