"""One step: what the ranks agree on, what it costs, what is refused; and the update, which is AdamW."""

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
from slurm_train.train.health import refuse
from slurm_train.train.optimizer import Update, build_optimizer, build_schedule, can_call_kernel
from slurm_train.train.signals import StopFlag
from slurm_train.train.step import ReplicaPasses, StepFacts, Stepper, StepResult, TrainingModule, build_ddp
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
    one = make_stepper(whole, clip_norm=0.1)
    three = make_stepper(split, accumulation=3, clip_norm=0.1, static_graph=static_graph)
    for _ in range(4):
        expected = step_of(one, Batch((inputs, targets)))
        found = step_of(three, *(Batch((inputs[i : i + 4], targets[i : i + 4])) for i in (0, 4, 8)))
        assert found.num_items == expected.num_items == 7
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    for mine, other in zip(whole.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def count_collectives(run: Any) -> int:
    for _ in range(3):
        run()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run()
    return sum(event.count for event in seen.key_averages() if event.key.startswith("gloo:"))


@pytest.mark.filterwarnings("ignore")
def test_the_agreed_numbers_add_no_collective_and_are_neither_trained_nor_saved() -> None:
    ddp = DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
    bare = count_collectives(lambda: ddp(make_batch().tensors[0]).sum().backward())
    model = make_model()
    stepper = make_stepper(model)
    assert count_collectives(lambda: step_of(stepper, make_batch())) == bare == 1
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
    model, seen = make_model(), []
    model.register_forward_hook(lambda *_: seen.append(1))
    stepper = make_stepper(model, world_size=world_size, accumulation=accumulation, static_graph=static_graph)
    stepper.passes.arrange(make_batch().tensors)
    assert len(seen) == passes


OPTIM = OptimSection(lr=0.01, weight_decay=0.3)


def make_optimizer(dtype: torch.dtype = torch.float32) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)
    return build_optimizer(model, optim=OPTIM)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def take_steps(
    optimizer: torch.optim.Optimizer, steps: range, *, update: Update | None = None, divisor: float = 64.0
) -> None:
    """Takes steps with the same gradients for everybody, through an `Update`, or by torch alone (divisor 0)."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters_of(optimizer):
            parameter.grad = (divisor or 1) * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        found = [parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None]
        if divisor:
            (update or Update(optimizer)).apply(found, torch.tensor(divisor))
        else:
            optimizer.step()


def assert_equal(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    for mine, theirs in zip(parameters_of(one), parameters_of(other), strict=True):
        assert torch.equal(mine, theirs)
    for my_state, their_state in zip(one.state.values(), other.state.values(), strict=True):
        assert all(torch.equal(my_state[name], their_state[name]) for name in their_state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kernel_gives_what_torchs_own_step_gives(dtype: torch.dtype) -> None:
    ours, theirs = make_optimizer(dtype), make_optimizer(dtype)
    assert can_call_kernel(ours)
    # A power of two divides without rounding, so equality can be asked for bit for bit.
    take_steps(ours, range(6), update=Update(ours))
    take_steps(theirs, range(6), divisor=0)
    assert_equal(ours, theirs)


def test_a_loaded_state_is_used_after_the_load() -> None:
    whole, cut = make_optimizer(), make_optimizer()
    update = Update(cut)
    take_steps(whole, range(6))
    take_steps(cut, range(3), update=update)
    cut.load_state_dict(cut.state_dict())
    take_steps(cut, range(3, 6), update=update)
    assert_equal(whole, cut)


@pytest.mark.parametrize("calls_kernel", [True, False])
def test_a_masked_step_leaves_parameters_moments_and_step_count_alone(calls_kernel: bool) -> None:
    """What a GPU does with a step that is not finite: the verdict is a tensor, and NaNs are in the gradients."""
    masked, plain = make_optimizer(), make_optimizer()
    update = Update(masked)
    take_steps(masked, range(3), update=update)
    take_steps(plain, range(3))
    update._calls_kernel = calls_kernel
    bad = [torch.full_like(parameter, float("nan")) for parameter in parameters_of(masked)]
    update.apply(bad, torch.tensor(float("nan")), skip=torch.tensor(1.0))
    assert_equal(masked, plain)
    update._calls_kernel = True
    take_steps(masked, range(3, 4), update=update)
    take_steps(plain, range(3, 4))
    assert_equal(masked, plain)


def test_what_is_not_plain_fused_adamw_goes_torchs_way() -> None:
    hooked = make_optimizer()
    hooked.register_step_post_hook(lambda *_: None)
    parameters = make_model().parameters()
    others = [hooked, torch.optim.SGD(make_model().parameters(), lr=0.1), torch.optim.AdamW(parameters, fused=False)]
    assert not any(can_call_kernel(optimizer) for optimizer in others)


def test_only_matrices_decay() -> None:
    groups = make_optimizer().param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(2, 0.3), (4, 0.0)]


@pytest.mark.parametrize(
    ("samples", "cosine", "constant"),
    [(0, 0.0, 0.0), (50, 1.0, 1.0), (100, 2.0, 2.0), (600, 1.1, 2.0), (1100, 0.2, 2.0), (5000, 0.2, 2.0)],
)
def test_the_learning_rate_rises_linearly_then_falls_as_a_cosine(samples: int, cosine: float, constant: float) -> None:
    for shape, expected in (("cosine", cosine), ("constant", constant)):
        section = OptimSection(warmup_samples=100, min_lr_ratio=0.1, schedule=shape)  # type: ignore[arg-type]
        schedule = build_schedule(section, peak_lr=2.0, total_samples=1100)
        assert schedule.lr_at(samples) == pytest.approx(expected)
    assert build_schedule(OptimSection(), peak_lr=1.0, total_samples=2000).warmup_samples == 100
