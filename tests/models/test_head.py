"""The last layer with its cross entropy, against torch's two operations one after the other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from slurm_train.errors import ConfigError
from slurm_train.models import head
from slurm_train.models.gpt import GPT
from slurm_train.models.head import linear_cross_entropy
from slurm_train.models.objective import Objective
from slurm_train.models.own_loss import IGNORED
from tests.support.warm_ranks import start_rank

NUM_TOKENS, WIDTH, NUM_IDS = 37, 16, 101


@pytest.fixture
def in_chunks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Nine tokens at a time; with a parameter also a padded vocabulary."""
    monkeypatch.setattr(head, "_PLAIN_SCORES", 0)
    monkeypatch.setattr(head, "_CHUNK_SCORES_ON_CPU", 1200)
    monkeypatch.setattr(head, "_ALIGNMENT_ON_CPU", getattr(request, "param", 1))


padded_or_not = pytest.mark.parametrize("in_chunks", [1, 64], indirect=True)


def case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(NUM_TOKENS, WIDTH, dtype=dtype, generator=generator).requires_grad_()
    weight = torch.randn(NUM_IDS, WIDTH, dtype=dtype, generator=generator).requires_grad_()
    targets = torch.randint(0, NUM_IDS, (NUM_TOKENS,), generator=generator)
    targets[3:6] = IGNORED
    targets[0], targets[-1] = 0, NUM_IDS - 1
    return x, weight, targets


def plain_sum(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    scores = functional.linear(x, weight)
    return functional.cross_entropy(scores.to(torch.promote_types(x.dtype, torch.float32)), targets, reduction="sum")


def gradients(loss: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    # A factor, as float16 has one.
    return torch.autograd.grad(4 * loss, of)


@padded_or_not
@pytest.mark.parametrize(
    ("dtype", "autocasts", "near"),
    [
        (torch.float64, False, 1e-12),
        (torch.float32, False, 2e-5),
        (torch.bfloat16, False, 2e-2),
        (torch.float32, True, 2e-2),
    ],
)
@pytest.mark.usefixtures("in_chunks")
def test_chunks_give_loss_and_gradients_of_the_whole(dtype: torch.dtype, autocasts: bool, near: float) -> None:
    x, weight, targets = case(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocasts):
        sums, expected = linear_cross_entropy(x, weight, targets, counts=False), plain_sum(x, weight, targets)
    assert sums.dtype == expected.dtype
    torch.testing.assert_close(sums[0], expected, rtol=1e-4 if autocasts else near, atol=0)
    for ours, theirs in zip(gradients(sums[0], x, weight), gradients(expected, x, weight), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        torch.testing.assert_close(ours, theirs, rtol=near, atol=near * float(theirs.abs().max()))


@pytest.mark.usefixtures("in_chunks")
def test_a_confident_prediction_keeps_the_digits_of_its_gradient() -> None:
    weight = torch.tensor([[6.0], [0.0]], dtype=torch.bfloat16, requires_grad=True)
    x = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    (gradient,) = torch.autograd.grad(linear_cross_entropy(x, weight, torch.tensor([0]), counts=False)[0], weight)
    wrong = 1 / (1 + torch.tensor(6.0).exp())
    torch.testing.assert_close(gradient.float(), torch.stack((-wrong, wrong)).unsqueeze(1), rtol=0.005, atol=0)


@padded_or_not
@pytest.mark.usefixtures("in_chunks")
def test_right_answers_are_counted_without_gradients() -> None:
    x, weight, targets = case(torch.float32)
    best = functional.linear(x, weight).argmax(dim=-1)
    targets[10:20] = best[10:20]
    with torch.no_grad():
        loss, correct = linear_cross_entropy(x, weight, targets, counts=True)
    assert int(correct) == int((best == targets).sum()) >= 10
    torch.testing.assert_close(loss, plain_sum(x, weight, targets).detach())


@pytest.mark.usefixtures("in_chunks")
def test_targets_outside_of_the_vocabulary_or_of_another_shape_are_refused() -> None:
    x, weight, targets = case(torch.float32)
    targets[7] = NUM_IDS
    with pytest.raises(RuntimeError, match="a target is no id of the vocabulary"):
        linear_cross_entropy(x, weight, targets, counts=False)
    with pytest.raises(ConfigError, match="the last layer got"):
        linear_cross_entropy(x, weight, targets[1:], counts=False)


class Largest(TorchDispatchMode):
    """Notes the largest result of an operation, in numbers."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [one for one in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(one, Tensor)]
        self.numel = max([self.numel, *(one.numel() for one in tensors)])
        return out


def test_scores_of_all_tokens_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    objective = Objective(GPT(num_layers=1, width=8, num_heads=1, vocab_size=500, context=64))
    batch = torch.zeros(4, 64, dtype=torch.int64), torch.ones(4, 64, dtype=torch.int64)
    of_chunks, log_sum = list[int](), head._log_sum
    # A mode does not look into an operation.
    monkeypatch.setattr(
        head, "_log_sum", lambda scores, kind: (of_chunks.append(scores.numel()), log_sum(scores, kind))[1]
    )
    monkeypatch.setattr(head, "_CHUNK_SCORES_ON_CPU", 2**13)
    with Largest() as plain:
        objective(batch)[0].backward()
    monkeypatch.setattr(head, "_PLAIN_SCORES", 0)
    with Largest() as largest:
        objective(batch)[0].backward()
        with torch.no_grad():
            objective.eval().evaluation_sums(batch)
    assert plain.numel == 256 * 500 and largest.numel <= 2**13
    assert len(of_chunks) > 20 and max(of_chunks) <= 2**13


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # of torch itself
@pytest.mark.parametrize("plain", [True, False])
def test_model_and_loss_are_one_graph(monkeypatch: pytest.MonkeyPatch, plain: bool) -> None:
    monkeypatch.setattr(head, "_PLAIN_SCORES", head._PLAIN_SCORES if plain else 0)
    torch._dynamo.reset()
    counters.clear()
    objective = Objective(GPT(num_layers=2, width=16, num_heads=2))
    batch = torch.zeros(2, 8, dtype=torch.int64), torch.ones(2, 8, dtype=torch.int64)
    expected = objective(batch)[0].detach()
    # The graph is what is counted, not what is made of it.
    objective.compile(backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(head, "_compiled", lambda: (head._log_sum, head._to_probabilities))
    loss, _ = objective(batch)
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected)
    assert counters["stats"]["unique_graphs"] == 1
    assert all(parameter.grad is not None for parameter in objective.parameters())


PARTS = """
import os, sys
import torch, torch.distributed as dist
from torch.nn import functional
from slurm_train.models import head
from slurm_train.models.head import Head
from torch.distributed.device_mesh import init_device_mesh
from slurm_train.config.parallel import ParallelLayout
from slurm_train.distributed.parallelize import _spread_ids
from slurm_train.models.gpt import GPT

rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
head._PLAIN_SCORES, head._CHUNK_SCORES_ON_CPU, head._ALIGNMENT_ON_CPU = 0, 300, 8
torch.manual_seed(0)
layer, x = Head(16, 101).double(), torch.randn(37, 16, dtype=torch.float64, requires_grad=True)
targets = torch.randint(0, 101, (37,))
targets[3:6], targets[0], targets[-1] = -100, 0, 100
scores = layer(x)
targets[10:20] = torch.where(targets[10:20] < 0, targets[10:20], scores[10:20].argmax(-1))
layer.score_group = dist.group.WORLD.group_name
with torch.no_grad():
    correct = layer.eval()(x, targets)[1]
assert correct == (scores.argmax(-1) == targets).sum() >= 10, correct
loss = layer.train()(x, targets)[0]
expected = functional.cross_entropy(scores, targets, reduction="sum")
for ours, theirs in zip(
    (loss, *torch.autograd.grad(loss, (x, layer.weight))),
    (expected, *torch.autograd.grad(functional.cross_entropy(layer(x), targets, reduction="sum"), (x, layer.weight))),
):
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)

# The weight of 102 ids spread over the ranks, and that of an embedding that is tied to it.
model = GPT(vocab_size=102, context=8, num_layers=1, num_heads=2, width=16).double()
tokens, targets = torch.randint(0, 102, (2, 2, 8))
def results():
    loss = model(tokens, targets)[0]
    loss.backward()
    return [loss, model.eval()(tokens), model(tokens, targets), *(one.grad for one in model.train().parameters())]
whole = results()
model.zero_grad()
mesh, layout = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)), ParallelLayout(tp=world)
_spread_ids(["embedding", "head"], model, mesh=mesh, layout=layout)
model.head.score_group = mesh.get_group().group_name
assert model.head.weight is model.embedding.weight and model.head.weight.to_local().shape == (34, 16)
for ours, theirs in zip(results(), whole):
    ours = ours.full_tensor() if hasattr(ours, "placements") else ours
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
model(tokens).sum().backward()
print("alike", flush=True)
os._exit(0)
"""


@pytest.mark.distributed
def test_ranks_that_have_a_part_of_the_ids_each_get_loss_and_gradients_of_all(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PARTS)
    ranks = [start_rank(program, str(rank), "3", str(tmp_path), env=os.environ) for rank in range(3)]
    for rank in ranks:
        _, text = rank.communicate(timeout=300)
        assert text.endswith("alike\n"), text
