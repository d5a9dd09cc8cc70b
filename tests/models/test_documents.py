"""Documents that are packed into one sequence are trained as each of them alone (`data.document_mask`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slurm_train.errors import ConfigError
from slurm_train.models.blocks import Block, BlockShape, Places
from slurm_train.models.documents import attend_in_blocks, block_mask, document_mask
from slurm_train.models.gpt import GPT
from slurm_train.models.objective import Objective

LENGTHS = (5, 1, 9, 17)
VOCABULARY = 31
GPT2 = {"bias": True, "positions": "learned", "activation": "gelu_tanh"}
SHAPE = BlockShape(
    width=64, num_heads=4, num_kv_heads=2, hidden=96, norm="rmsnorm", norm_eps=1e-5, activation="swiglu",
    positions="learned", bias=False, dropout=0.0,
)  # fmt: skip
LLAMA = {"num_kv_heads": 2, "norm": "rmsnorm", "activation": "swiglu", "hidden": 48, "tied": False}


class Graphs:
    """A backend of torch.compile that counts what it is given, and runs it as it is."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def __call__(self, graph: Any, _inputs: Any) -> Any:
        self.graphs.append(graph)
        return graph.forward


def own(form: dict[str, Any]) -> nn.Module:
    return GPT(vocab_size=VOCABULARY, context=sum(LENGTHS), num_layers=2, num_heads=4, width=32, **form)


def of_transformers(model_type: str = "llama") -> nn.Module:
    pytest.importorskip("transformers")
    from slurm_train.models.causal_lm import causal_lm

    config = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": sum(LENGTHS),
    }  # fmt: skip
    return causal_lm(model_type=model_type, config=config)


def packed() -> tuple[Tensor, Tensor, Tensor]:
    """Two sequences of the same lengths of documents."""
    tokens = torch.randint(0, VOCABULARY, (2, sum(LENGTHS) + 1), generator=torch.Generator().manual_seed(0))
    position_ids = torch.cat([torch.arange(length) for length in LENGTHS]).repeat(2, 1)
    return tokens[:, :-1], tokens[:, 1:].clone(), position_ids


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda: own(GPT2), id="gpt2"),
        pytest.param(lambda: own(LLAMA), id="llama"),
        pytest.param(of_transformers, id="hf", marks=pytest.mark.full),
    ],
)
def test_packed_documents_have_the_losses_and_gradients_of_each_alone(build: Any) -> None:
    torch.manual_seed(0)
    model = build().double()
    objective = Objective(model)
    batch = packed()
    objective.call.check_batch(batch)
    loss, count = objective(batch)
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    alone: list[Tensor] = []
    num_alone = 0
    for part in zip(*(tensor.split(LENGTHS, dim=1) for tensor in batch[:2]), strict=True):
        document_loss, document_count = objective(part)
        document_loss.backward()
        alone.append(document_loss.detach())
        num_alone += int(document_count)
    assert int(count) == num_alone == 2 * sum(LENGTHS)
    # A loss is float32 or more precise, whatever the model is.
    packed_loss = float(loss.detach())
    assert packed_loss == pytest.approx(float(torch.stack(alone).double().sum()), rel=1e-6)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-6, atol=1e-6)
    unmasked, _ = objective(batch[:2])
    assert abs(float(unmasked.detach()) - packed_loss) > 1e-4 * packed_loss


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_gives_what_a_mask_gives_and_is_compiled_once() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    position_ids = packed()[2]
    query, key, value = (torch.randn(2, heads, sum(LENGTHS), 16) for heads in (4, 2, 2))
    backend = Graphs()
    block = Block(SHAPE).eval()
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    for positions in (position_ids, torch.arange(sum(LENGTHS)).repeat(2, 1) % 7):
        mask = document_mask(positions, compiled=True, has_dropout=False)
        assert isinstance(mask, Tensor) and mask.shape == (2, 1, sum(LENGTHS), sum(LENGTHS))
        expected = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        blocks = block_mask((positions == 0).cumsum(dim=1))
        torch.testing.assert_close(attend_in_blocks(query, key, value, blocks, is_grouped=True), expected)
        x_BTC = torch.randn(2, sum(LENGTHS), SHAPE.width)
        with torch.no_grad():
            by_mask = block(x_BTC, Places(None, None, mask=mask))
            # A new object with a new function, as every step makes one.
            torch.testing.assert_close(compiled(x_BTC, Places(None, None, mask=blocks)), by_mask)
    assert len(backend.graphs) == 1
    torch._dynamo.reset()


def test_a_compiled_model_is_one_graph_whatever_the_documents_are() -> None:
    torch._dynamo.reset()
    model = own(LLAMA)
    backend = Graphs()
    inputs, targets, position_ids = packed()
    eager = model(inputs, targets, position_ids)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(inputs, targets, position_ids), eager)
    others = torch.arange(sum(LENGTHS)).repeat(2, 1) % 7
    torch.testing.assert_close(compiled(inputs, targets, others), model(inputs, targets, others))
    assert len(backend.graphs) == 1
    torch._dynamo.reset()


class Forgetful(nn.Module):
    """Takes positions and looks at all tokens before."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, inputs: Tensor, position_ids: Tensor) -> Tensor:
        scores: Tensor = self.embedding(inputs).cumsum(dim=1)
        return scores + position_ids.unsqueeze(-1)


@pytest.mark.full
@torch.no_grad()
def test_models_that_cannot_keep_documents_apart_are_refused_and_others_are_not() -> None:
    with pytest.raises(ConfigError, match="takes no position_ids"):
        Objective(nn.Embedding(VOCABULARY, VOCABULARY)).call.check_batch(packed())
    with pytest.raises(ConfigError, match="Forgetful takes position_ids"):
        Objective(Forgetful()).scores.check_documents(packed())
    Objective(own(GPT2)).scores.check_documents(packed())
    Objective(of_transformers()).scores.check_documents(packed())
