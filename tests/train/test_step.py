"""One step: what the agreed numbers are, what it costs, and what is refused."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from slurm_train.config.batch import BatchPlan
from slurm_train.config.schema import DdpSection, OptimSection, RunConfig
from slurm_train.errors import SlurmTrainError
from slurm_train.models.objective import Objective
from slurm_train.supervise.signals import StopFlag
from slurm_train.train.health import refuse
from slurm_train.train.optimizer import build_optimizer
from slurm_train.train.passes import ReplicaPasses, TrainingModule, build_ddp
from slurm_train.train.step import StepFacts, Stepper, StepResult
from tests.support.ranks import make_rank

pytestmark = pytest.mark.usefixtures("group_of_one")
CPU = torch.device("cpu")
FACTS = StepFacts(step=1, samples=8, lr=0.01)


class Batch(NamedTuple):
    tensors: tuple[Tensor, ...]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def make_batch(seed: int = 0, size: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch((torch.randn(size, 4, generator=generator), torch.randint(0, 3, (size,), generator=generator)))


def make_stepper(
    model: nn.Module,
    *,
    stop: StopFlag | None = None,
    accumulation: int = 1,
    clip_norm: float | None = None,
    world_size: int = 1,
    **ddp: Any,
) -> Stepper:
    config = RunConfig(optim=OptimSection(weight_decay=0.0, grad_clip_norm=clip_norm))
    plan = BatchPlan(local_size=8, ranks=world_size, accumulation=accumulation)
    rank = make_rank(config=config, plan=plan, ranks=world_size)
    module = TrainingModule(Objective(model), stop=stop or StopFlag(), device=CPU, autocast=None)
    passes = ReplicaPasses(rank, module, build_ddp(module, ddp=DdpSection(**ddp), device=CPU))
    return Stepper(rank, passes, build_optimizer(model, optim=config.optim))


def step_of(stepper: Stepper, *batches: Batch) -> StepResult:
    result = stepper.step(FACTS, iter(batches))
    assert result is not None
    return result


def test_the_result_is_that_of_the_mean_over_all_items() -> None:
    model, (inputs, targets) = make_model(), make_batch().tensors
    loss = cross_entropy(model(inputs), targets)
    loss.backward()
    norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    result = step_of(make_stepper(make_model()), Batch((inputs, targets)))
    assert (result.num_items, result.stop, result.num_non_finite) == (8, False, 0)
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)


@pytest.mark.parametrize("static_graph", [False, True])
def test_targets_that_do_not_count_weigh_nothing_in_any_split(static_graph: bool) -> None:
    inputs, targets = make_batch(size=12).tensors
    targets[:5] = -100
    whole, split = make_model(), make_model()
    one, three = (
        make_stepper(whole, clip_norm=0.1),
        make_stepper(split, accumulation=3, clip_norm=0.1, static_graph=static_graph),
    )
    for _ in range(4):
        expected = step_of(one, Batch((inputs, targets)))
        found = step_of(three, *(Batch((inputs[i : i + 4], targets[i : i + 4])) for i in (0, 4, 8)))
        assert found.num_items == expected.num_items == 7
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    for mine, other in zip(whole.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_a_wish_to_stop_rides_along() -> None:
    stop = StopFlag()
    stepper = make_stepper(make_model(), stop=stop)
    assert not step_of(stepper, make_batch()).stop
    stop.request()
    assert step_of(stepper, make_batch()).stop


def count_collectives(run: Any) -> int:
    for _ in range(3):
        run()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run()
    return sum(event.count for event in seen.key_averages() if event.key.startswith("gloo:"))


@pytest.mark.filterwarnings("ignore")
def test_the_agreed_numbers_add_no_collective() -> None:
    ddp = DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
    bare = count_collectives(lambda: ddp(make_batch().tensors[0]).sum().backward())
    stepper = make_stepper(make_model())
    assert count_collectives(lambda: step_of(stepper, make_batch())) == bare == 1


def test_stats_param_is_neither_trained_nor_saved() -> None:
    model = make_model()
    stepper = make_stepper(model)
    step_of(stepper, make_batch())
    assert len(stepper._update.parameters) == len(list(model.parameters()))
    assert "stats_param" not in model.state_dict()


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda inputs, _: inputs.fill_(float("nan")), "step 1 is not finite: loss nan .1 micro-batches"),
        (lambda _, targets: targets.fill_(-100), "no item of step 1 counts"),
    ],
)
def test_a_bad_step_is_not_applied(spoil: Any, text: str) -> None:
    model, batch = make_model(), make_batch()
    spoil(*batch.tensors)
    result = step_of(make_stepper(model), batch)
    assert not result.applied
    with pytest.raises(SlurmTrainError, match=text):
        refuse(result)
    for mine, other in zip(model.parameters(), make_model().parameters(), strict=True):
        assert torch.equal(mine, other)


def test_the_pass_before_the_first_step_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    stepper = make_stepper(model, world_size=3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    stream = torch.get_rng_state()
    stepper.passes.arrange(make_batch().tensors)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), stream)


@pytest.mark.parametrize(
    ("world_size", "accumulation", "static_graph", "passes"),
    [(1, 1, False, 0), (2, 4, False, 0), (3, 1, False, 1), (2, 1, True, 0), (2, 2, True, 1)],
)
def test_only_ranks_whose_sums_depend_on_it_take_a_pass_before_the_first_step(
    world_size: int, accumulation: int, static_graph: bool, passes: int
) -> None:
    model, seen = make_model(), 0

    def count(*_: Any) -> None:
        nonlocal seen
        seen += 1

    model.register_forward_hook(count)
    make_stepper(model, world_size=world_size, accumulation=accumulation, static_graph=static_graph).passes.arrange(
        make_batch().tensors
    )
    assert seen == passes
