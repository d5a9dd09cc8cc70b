from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from slurm_train.errors import ConfigError
from slurm_train.models.blocks import LayerNorm, RMSNorm
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


@pytest.mark.parametrize("form", [{"bias": True, "positions": "learned"}, {"norm": "rmsnorm", "activation": "swiglu"}])
@pytest.mark.parametrize(
    ("autocast", "stream"),
    [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32), (None, torch.float32)],
)
def test_the_residual_stream_is_bfloat16_where_products_are(
    autocast: torch.dtype | None, stream: torch.dtype, form: dict[str, Any]
) -> None:
    model, seen = GPT(**SMALL, **form), dict[str, set[torch.dtype]]()  # type: ignore[arg-type]
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


@pytest.mark.parametrize("norm", [LayerNorm(16), RMSNorm(16)])
def test_norms_of_bfloat16_compute_as_where_their_weights_are_gathered_in_it(norm: torch.nn.Module) -> None:
    x = torch.randn(2, 8, 16).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = norm(x)
    assert found.dtype == torch.bfloat16 and torch.equal(found, copy.deepcopy(norm).bfloat16()(x))
    torch.testing.assert_close(found.float(), norm(x.float()), atol=0.03, rtol=0.01)


FORMS = [{"width": 32, "num_heads": 4, "num_kv_heads": 2}, {"bias": True}]


@pytest.mark.parametrize("form", FORMS, ids=["grouped", "biases"])
def test_queries_keys_and_values_are_one_product_in_a_compiled_graph_under_autocast(form: dict[str, Any]) -> None:
    attention = GPT(**{**SMALL, **form}).blocks[0].attention  # type: ignore[arg-type]
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter)
    # Whole numbers that bfloat16 holds: nothing is rounded, whatever is added up in which order.
    x_BTC = torch.randint(-2, 3, (2, 8, attention.q.in_features)).float()
    for parameter in attention.parameters():
        parameter.data = parameter.data.round().clamp(-2, 2)
    found, graphs = [], list[torch.fx.GraphModule]()

    def keep(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for project in (attention._project, torch.compile(attention._project, backend=keep)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            parts = project(x_BTC)
        sum(part.float().sum() * factor for part, factor in zip(parts, (1, 2, 3), strict=True)).backward()  # type: ignore[union-attr]
        found.append([*parts, *(one.grad for one in attention.parameters() if one.grad is not None)])
        attention.zero_grad()
    assert len(found[0]) == (9 if "bias" in form else 6)
    assert all(map(torch.equal, *found))
    assert count_products(graphs) == [1]

    # Elsewhere three: what changes a layer would be passed over, and float32 would keep a copy of the matrices.
    graphs.clear()
    torch.compile(attention._project, backend=keep)(x_BTC)
    attention.k.register_forward_hook(lambda *_: None)
    torch._dynamo.reset()  # a hook that comes later is not guarded
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.compile(attention._project, backend=keep)(x_BTC)
    assert count_products(graphs) == [3, 3]


def count_products(graphs: list[torch.fx.GraphModule]) -> list[int]:
    return [sum(node.target is torch._C._nn.linear for node in graph.graph.nodes) for graph in graphs]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"num_heads": 4, "num_kv_heads": 3}, "model.num_heads=4 heads cannot share model.num_kv_heads=3 in equal gro"),
        ({"activation": "relu"}, "model.activation must be gelu or gelu_tanh or swiglu, got 'relu'"),
        ({"positions": "alibi"}, "model.positions must be rope or learned, got 'alibi'"),
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
