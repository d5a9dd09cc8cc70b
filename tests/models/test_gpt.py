from __future__ import annotations

from typing import Any

import pytest
import torch

from slurm_train.errors import ConfigError
from slurm_train.models.gpt import GPT

SMALL: dict[str, Any] = {"vocab_size": 11, "context": 8, "num_layers": 2, "num_heads": 2, "width": 16}


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 11, (batch, length), generator=torch.Generator().manual_seed(1))


def test_learns_to_repeat_a_sequence_and_draws_the_same_beyond_its_context_with_the_same_generator() -> None:
    torch.manual_seed(0)
    model = GPT(**SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = torch.arange(9).expand(4, 9)
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    assert model.generate(torch.tensor([[0]]), num_tokens=8, temperature=0).tolist() == [list(range(9))]
    start, how = tokens(2, 3), {"num_tokens": 12, "temperature": 1.0}
    drawn = [model.generate(start, generator=torch.Generator().manual_seed(5), **how) for _ in range(2)]
    assert drawn[0].shape == (2, 15) and drawn[0].equal(drawn[1]) and drawn[0][:, :3].equal(start)


@pytest.mark.parametrize("form", [{"bias": True, "positions": "learned"}, {"norm": "rmsnorm", "activation": "swiglu"}])
@pytest.mark.parametrize(
    ("autocast", "stream"),
    [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32), (None, torch.float32)],
)
def test_the_residual_stream_is_bfloat16_where_products_are(
    autocast: torch.dtype | None, stream: torch.dtype, form: dict[str, Any]
) -> None:
    model, seen = GPT(**SMALL, **form), dict[str, set[torch.dtype]]()
    for name, module in model.named_modules():
        if name == "embedding" or "norm" in name or (name.startswith("blocks.") and name.count(".") == 1):
            module.register_forward_hook(
                lambda _module, given, output, name=name: seen.setdefault(name, set()).update(
                    one.dtype for one in (given[0], output) if one.is_floating_point()
                )
            )
    batch = tokens(2, 8)
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        loss = model(batch, targets=batch)
    loss.sum().backward()
    assert len(seen) == 8 and set.union(*seen.values()) == {stream}
    assert {one.grad.dtype for one in model.parameters() if one.grad is not None} == {loss.dtype} == {torch.float32}


@pytest.mark.parametrize("form", [{"width": 32, "num_heads": 4, "num_kv_heads": 2}, {"bias": True}])
def test_queries_keys_and_values_are_one_product_in_a_compiled_graph_under_autocast(form: dict[str, Any]) -> None:
    attention = GPT(**{**SMALL, **form}).blocks[0].attention
    # Whole numbers that bfloat16 holds: nothing is rounded, whatever is added up in which order.
    for parameter in attention.parameters():
        parameter.data = torch.randint_like(parameter, -2, 3)
    x_BTC = torch.randint(-2, 3, (2, 8, attention.q.in_features)).float()
    found, products = [], list[int]()

    def count(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        products.append(sum(node.target is torch._C._nn.linear for node in graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    for project in (attention._project, torch.compile(attention._project, backend=count)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            parts = project(x_BTC)
        sum(part.float().sum() * factor for part, factor in zip(parts, (1, 2, 3), strict=True)).backward()
        found.append([*parts, *(one.grad for one in attention.parameters() if one.grad is not None)])
        attention.zero_grad()
    assert all(map(torch.equal, *found))
    # Without autocast three: float32 would keep a copy of the matrices.
    torch.compile(attention._project, backend=count)(x_BTC)
    assert products == [1, 3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"width": 100, "num_heads": 3}, "model.width=100 cannot be split into model.num_heads=3 heads of an even w"),
        ({"num_heads": 4, "num_kv_heads": 3}, "model.num_heads=4 heads cannot share model.num_kv_heads=3 in equal gro"),
        ({"activation": "relu"}, "model.activation must be gelu or gelu_tanh or swiglu, got 'relu'"),
        ({"rope_scaling": {"factor": 8.0}}, "model.rope_scaling has the keys factor\nhint: give all of factor, low_f"),
        ({}, "a sequence of 9 tokens was given to a model of context 8"),
    ],
)
def test_a_form_that_is_none_or_a_sequence_that_is_too_long_is_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GPT(**{**SMALL, **words})(tokens(1, 9))
    assert str(caught.value).startswith(message)


def test_the_shipped_form_computes_what_it_always_has() -> None:
    """Weights and logits of the first release, so that a run of then goes on unchanged."""
    torch.manual_seed(0)
    model = GPT(**SMALL).eval()
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
