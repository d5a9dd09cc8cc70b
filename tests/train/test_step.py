"""One step: what the ranks agree on, what it costs, what is refused; and the update, which is AdamW."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from slurm_train.config.batch import BatchPlan
from slurm_train.config.schema import DdpSection, HealthSection, OptimSection, RunConfig, build_config
from slurm_train.data.batches import MicroBatch, Prefetch
from slurm_train.errors import ConfigError, SlurmTrainError
from slurm_train.models.objective import Objective
from slurm_train.session.signals import StopFlag
from slurm_train.train.buckets import RecordedOrder
from slurm_train.train.context import native_precision
from slurm_train.train.ddp import TrainingModule, build_ddp
from slurm_train.train.device_copies import DeviceCopies, Pinning
from slurm_train.train.health import refuse
from slurm_train.train.inputs import ModelInputs
from slurm_train.train.loss_scale import LossScale
from slurm_train.train.optimizer import Update, build_optimizer, can_call_kernel
from slurm_train.train.passes import Passes, ReplicaPasses, ShardPasses
from slurm_train.train.step import StepFacts, Stepper, StepResult, build_stepper
from tests.support.ranks import make_parts, make_rank

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
    health: HealthSection | None = None,
    wraps: bool = True,
    shards: bool = False,
    autocast: torch.dtype | None = None,
    scale: LossScale | None = None,
    optim: OptimSection | None = None,
    order: Sequence[int] = (),
    **ddp: Any,
) -> Stepper:
    optim = replace(optim or OptimSection(weight_decay=0.0), grad_clip_norm=clip_norm)
    config = RunConfig(optim=optim, health=health or HealthSection(), ddp=DdpSection(**ddp))
    plan = BatchPlan.equal(local_size=8, ranks=world_size, accumulation=accumulation)
    rank = make_rank(config=config, plan=plan, ranks=world_size)
    factor = None if scale is None else scale.factor
    module = TrainingModule(Objective(model), stop=stop or StopFlag(), device=CPU, autocast=autocast, factor=factor)
    wrapped = build_ddp(module, ddp=config.ddp, device=CPU) if wraps else None
    inputs = ModelInputs(CPU, autocast=autocast)
    passes: Passes = ReplicaPasses(rank, inputs, module, wrapped, order=RecordedOrder(order))
    optimizer = build_optimizer(model, optim=config.optim)
    if shards:
        parameters = parameters_of(optimizer)
        shard: dict[str, Any] = {"model": model, "objective": Objective(model), "parameters": parameters}
        passes = ShardPasses(rank, inputs, **shard, factor=factor)
    return Stepper(rank, passes, optimizer, scale=scale)


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


def test_a_clipped_step_is_that_of_a_plain_loop_with_torchs_clipping() -> None:
    model, plain, batch = make_model(), make_model(), make_batch()
    stepper = make_stepper(model, clip_norm=0.1, optim=replace(PLAIN_SGD, weight_decay=0.0))
    optimizer = torch.optim.SGD(plain.parameters(), lr=FACTS.lr)
    for _ in range(3):
        result = step_of(stepper, batch)
        optimizer.zero_grad()
        inputs, targets = batch.tensors
        cross_entropy(plain(inputs), targets).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5) and norm > 0.2
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


class Mixed(nn.Module):
    """A model whose weights are of several number types, in the given order."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(4, 3, dtype=dtype)) for dtype in dtypes)

    def forward(self, inputs: Tensor) -> Tensor:
        # Gradients of 1000 and more each, whose squares float16 does not hold.
        return sum((1000 * inputs.to(weight.dtype) @ weight).float() for weight in self.weights)  # type: ignore[return-value]


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float16),
        (torch.float16,),
        (torch.bfloat16, torch.float64),
        (torch.float64, torch.bfloat16),
        (torch.float32, torch.bfloat16),
    ],
)
def test_the_norm_of_gradients_of_several_types_is_precise(dtypes: tuple[torch.dtype, ...], shards: bool) -> None:
    model = Mixed(*dtypes)
    batch = make_batch(size=8)
    stepper = make_stepper(model, shards=shards, wraps=False, optim=OptimSection(_target_="torch.optim.SGD", lr=1e-6))
    gradients: list[Tensor] = []
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(lambda weight: gradients.append(weight.grad.double() / 8))
    result = step_of(stepper, batch)
    expected = torch.linalg.vector_norm(torch.stack([gradient.flatten() for gradient in gradients])).item()
    assert result.grad_norm == pytest.approx(expected, rel=1e-5) and result.applied


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


@pytest.mark.filterwarnings("ignore")
def test_a_step_of_three_micro_batches_has_one_exchange() -> None:
    stepper = make_stepper(make_model(), accumulation=3)
    assert count_collectives(lambda: step_of(stepper, *map(make_batch, range(3)))) == 1


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


class Branches(nn.Module):
    """Each batch goes through one of two layers; the third is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.layers[int(inputs[0, 0] > 0)](inputs)
        return scores


def test_unused_parameters_are_refused_by_name_unless_they_are_looked_for() -> None:
    batches = sorted((make_batch(seed) for seed in range(6)), key=lambda batch: bool(batch.tensors[0][0, 0] > 0))
    pairs = list(zip(batches[:2], batches[-2:], strict=True))
    with pytest.raises(ConfigError, match=r"not depend on 4 parameters .* layers.1.weight") as caught:
        step_of(make_stepper(Branches()), batches[0])
    assert "ddp.find_unused_parameters=true" in caught.value.hint
    model, plain = Branches(), Branches()
    stepper = make_stepper(model, accumulation=2, find_unused_parameters=True)
    optimizer = build_optimizer(plain, optim=OptimSection(lr=FACTS.lr, weight_decay=0.0))
    for pair in pairs:
        result = step_of(stepper, *pair)
        optimizer.zero_grad()
        losses = [
            cross_entropy(plain(inputs), targets, reduction="sum") for inputs, targets in (b.tensors for b in pair)
        ]
        (sum(losses[1:], losses[0]) / 16).backward()
        optimizer.step()
        assert (result.num_items, result.applied) == (16, True)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def ready_order(stepper: Stepper) -> list[int]:
    step_of(stepper, make_batch())
    return stepper.passes._order.numbers


def test_a_resumed_run_has_the_buckets_of_the_first_step_without_a_pass_that_has_gradients() -> None:
    model, seen = make_model(), []
    order = ready_order(make_stepper(make_model(), world_size=3))
    assert sorted(order) == [0, 1, 2, 3, 4]  # two layers, and the agreed numbers
    model.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    # Another order than a backward pass gives, to see that it is what DDP takes.
    stepper = make_stepper(model, world_size=3, order=order[::-1])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    stream = torch.get_rng_state()
    stepper.passes.check_first_batch(make_batch().tensors)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in stepper.passes.ddp.parameters())
    assert torch.equal(torch.get_rng_state(), stream) and not any(seen)
    parameters = list(stepper.passes.ddp.module.parameters())
    stepper.passes.run(iter([make_batch()]))
    # All are in one bucket, whose views the gradients are.
    assert sorted(range(5), key=lambda number: parameters[number].grad.data_ptr()) == order[::-1]
    assert stepper.passes._order.numbers == order[::-1] and sum(seen) == 1


def test_what_is_said_before_the_first_step_names_a_loss_that_is_not_the_trained_one() -> None:
    model = make_model()
    assert make_stepper(model).passes.check_first_batch(make_batch().tensors) is None
    model.append(nn.Module())
    model[-1].criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    model[-1].forward = nn.Identity().forward
    note = make_stepper(model).passes.check_first_batch(make_batch().tensors)
    assert note is not None and "3.criterion of Sequential" in note


@pytest.mark.parametrize("numbers", [[], [0, 1, 2], [0, 1, 2, 3, 3], [0, 1, 2, 3, 9]])
def test_an_order_of_other_parameters_is_not_repeated(numbers: list[int]) -> None:
    stepper = make_stepper(make_model(), world_size=3, order=numbers)
    stepper.passes.check_first_batch(make_batch().tensors)
    assert stepper.passes._order.numbers == [] and len(ready_order(stepper)) == 5


def unfreeze(stepper: Stepper, model: nn.Module) -> None:
    model[0].requires_grad_(True)


def freeze(stepper: Stepper, model: nn.Module) -> None:
    model[2].requires_grad_(False)


def set_rate(stepper: Stepper, model: nn.Module) -> None:
    stepper.optimizer.param_groups[0]["lr"] = 0.5


def add_group(stepper: Stepper, model: nn.Module) -> None:
    stepper.optimizer.add_param_group({"params": list(model[0].parameters())})


@pytest.mark.parametrize("wraps", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (unfreeze, r"0\.weight, 0\.bias requires a gradient since the training began: 2 parameters"),
        (freeze, r"2\.weight, 2\.bias is frozen since the training began: 2 parameters"),
        (set_rate, r"the learning rate of group 0 was set to 0\.5 between two steps; the schedule had set 0\.01"),
        (add_group, r"the optimizer has 6 parameters, and 4 when the training began"),
    ],
)
def test_what_is_changed_between_steps_without_an_effect_is_refused(change: Any, message: str, wraps: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    model[3].requires_grad_(change is not add_group)
    stepper = make_stepper(model, wraps=wraps)
    step_of(stepper, make_batch())
    change(stepper, model)
    with pytest.raises((ConfigError, RuntimeError), match=message):
        step_of(stepper, make_batch())


class NoWaiting(TorchDispatchMode):
    """Fails where a GPU would have to finish before the host can go on.

    Args:
        is_first: an optimizer's very first step makes its state, and may wait.
    """

    def __init__(self, *, is_first: bool) -> None:
        super().__init__()
        self.is_first = is_first

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "equal")
        assert not waits or self.is_first, func
        # There is no memory to pin without a GPU.
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


class Event:
    """A GPU's, of which everything before is over."""

    def __init__(self, *, blocking: bool = False) -> None:
        assert blocking, "a host that spins takes a core from NCCL and the loader"

    def record(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...


def as_on_a_gpu(stepper: Stepper, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a stepper take the ways of a GPU, on the CPU."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    stepper._is_masked = True
    if isinstance(stepper.passes, ReplicaPasses):
        stepper.passes._module._host_values = None


class Uneven(nn.Module):
    """Matrices of two types, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.unused, self.last = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 3).bfloat16()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        return self.last(hidden.bfloat16()).float()


class Watched(nn.Module):
    """Its loss can be as large as its inputs, whose statistics it follows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.layer = nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        self.norm(inputs)
        scores: Tensor = self.layer(inputs)
        return scores


SGD, PLAIN_SGD = (
    build_config(OptimSection, {"_target_": "torch.optim.SGD", "momentum": momentum}, path="optim.")
    for momentum in (0.9, 0.0)
)


@pytest.mark.parametrize(
    ("make", "on_spike", "shards", "scales", "optim"),
    [
        (make_model, "log", False, False, None),
        (make_model, "skip", False, True, None),
        (Uneven, "skip", False, False, None),
        (Uneven, "skip", True, False, None),
        (make_model, "log", True, True, None),
        (Uneven, "skip", True, False, SGD),
        (make_model, "skip", False, True, SGD),
        (Uneven, "skip", False, False, PLAIN_SGD),
        (Watched, "skip", False, False, None),
    ],
)
def test_no_step_on_a_gpu_waits_for_a_value(
    make: Any, on_spike: Any, shards: bool, scales: bool, optim: OptimSection | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    health, facts = HealthSection(on_spike=on_spike), FACTS._replace(loss_limit=50.0)
    settings: Any = {"clip_norm": 0.1, "health": health, "wraps": False, "find_unused_parameters": True, "optim": optim}
    # A GPU's kernel is used for these, too.
    monkeypatch.setattr("slurm_train.train.optimizer._HALF_TYPES", set())
    plain, masked = (
        make_stepper(make(), scale=LossScale(CPU) if scales else None, shards=shards, **settings) for _ in range(2)
    )
    as_on_a_gpu(masked, monkeypatch)
    expected: list[StepResult | None] = []
    found: list[StepResult | None] = []
    for step in range(5):
        batch = make_batch(step)
        if step == 2 and on_spike == "skip":
            batch.tensors[0].mul_(1e4)
        if step == 3:
            batch.tensors[0].fill_(float("inf"))
        expected.append(plain.step(facts, iter([batch])))
        with NoWaiting(is_first=step == 0):
            found.append(masked.step(facts, iter([batch])))
    found.append(masked.drain())
    applied = [True, True, on_spike == "log", False, True]
    assert [result and result.applied for result in found] == [None, *applied]
    assert [result and result.facts for result in found[1:]] == [result and result.facts for result in expected]
    for mine, other in zip(masked._update.parameters, plain._update.parameters, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    for mine, other in zip(*(stepper.passes.objective.buffers() for stepper in (masked, plain)), strict=True):
        assert torch.equal(mine, other) and mine.isfinite().all()


class Following(nn.Module):
    """Has all kinds of buffers that a forward pass changes: in place, by another tensor, by one of another shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("codebook", torch.zeros(4))
        self.register_buffer("peak", torch.zeros((), dtype=torch.float64))
        self.register_buffer("queue", torch.zeros(1, 4))
        self.peak: Tensor
        self.queue: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.codebook.lerp_(inputs.mean(0), 0.1)
            self.peak = torch.maximum(self.peak, inputs.max().double())
            self.queue = torch.cat((self.queue, inputs[:1]))
        scores: Tensor = self.last(self.norm(self.first(inputs)).relu())
        return scores


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("bad", ["nan", "spike"])
def test_a_step_that_is_not_applied_leaves_the_buffers_as_they_were(
    bad: str, is_masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of a plain loop that never sees the bad batch, bit for bit."""
    health = HealthSection(on_non_finite="skip", on_spike="skip")
    optim = replace(PLAIN_SGD, weight_decay=0.0)
    model, plain = Following(), Following()
    stepper = make_stepper(model, health=health, wraps=False, optim=optim)
    if is_masked:
        as_on_a_gpu(stepper, monkeypatch)
    results = []
    for number in range(3):
        batch = make_batch(number)
        if number == 1:
            batch.tensors[0][0, 0] = float("nan" if bad == "nan" else 1e4)
        facts = FACTS._replace(loss_limit=1e-3 if number == 1 else float("inf"))
        # The queue grows, and for that the host waits.
        with NoWaiting(is_first=True) if is_masked else contextlib.nullcontext():
            results.append(stepper.step(facts, iter([batch])))
    results.append(stepper.drain())
    assert [result.applied for result in results if result is not None] == [True, False, True]
    optimizer = torch.optim.SGD(plain.parameters(), lr=FACTS.lr)
    for number in (0, 2):
        inputs, targets = make_batch(number).tensors
        optimizer.zero_grad()
        cross_entropy(plain(inputs), targets).backward()
        optimizer.step()
    for (name, mine), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=0.0, msg=name)


def test_offloaded_gradients_are_measured_and_used_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the `meta` device are those on a GPU: with others they do not mix, and their values are not there."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda _: None)
    model = make_model()
    optimizer = build_optimizer(model, optim=OPTIM)
    parameters = parameters_of(optimizer)
    rank = make_rank(device=torch.device("meta"))
    passes = ShardPasses(rank, ModelInputs(CPU), model=model, objective=Objective(model), parameters=parameters)
    stepper = Stepper(rank, passes, optimizer)
    for having in (parameters, parameters[1:]):
        for parameter in having:
            parameter.grad = torch.ones_like(parameter)
        gradients, numbers, norm = passes.reduce(parameters)
        assert (len(gradients), numbers.device.type, norm.device.type) == (len(having), "meta", "meta")
        stepper.optimizer.zero_grad()
    before = parameters[0].clone()
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    numbers, norm = torch.tensor([0.0, 8.0, 4.0, 0.0]), torch.tensor(8.0)
    monkeypatch.setattr(passes, "run", lambda _, **_how: None)
    monkeypatch.setattr(passes, "reduce", lambda _: ([parameter.grad for parameter in parameters], numbers, norm))
    result = stepper.step(FACTS, iter(()))
    assert result is not None and (result.loss, result.grad_norm, result.applied) == (0.5, 1.0, True)
    assert not torch.equal(parameters[0], before)


def test_one_rank_exchanges_with_nobody() -> None:
    model = make_model()
    parts = make_parts(make_rank(), model, build_optimizer(model, optim=OPTIM))
    stepper = build_stepper(parts, Objective(model), hold_changes=lambda: None, scale=None, order=RecordedOrder())
    assert stepper.passes.ddp is None
    assert count_collectives(lambda: step_of(stepper, make_batch())) == 0


def test_the_loss_scale_follows_the_gradients() -> None:
    scale, fine, too_large = LossScale(CPU), torch.tensor(1.0), torch.tensor(float("inf"))

    def take(norm: Tensor, loss: Tensor = fine, steps: int = 1) -> tuple[bool, float]:
        found = [bool(scale.update(loss, norm)) for _ in range(steps)]
        return found[-1], scale.factor.item()

    assert take(fine, steps=10) == (False, 1024.0), "doubled until the first overflow"
    assert take(too_large) == (True, 512.0)
    assert take(too_large, loss=too_large) == (False, 512.0), "a loss that is not finite says nothing about the scale"
    assert take(fine, steps=1998) == (False, 512.0)
    scale.load_state_dict(scale.state_dict())
    assert take(fine) == (False, 1024.0)
    assert take(too_large, steps=34) == (True, 2.0**-24)
    assert take(too_large) == (False, 2.0**-24), "smaller would not help"


@pytest.mark.parametrize("is_masked", [False, True])
def test_gradients_that_overflow_are_not_applied_and_the_next_ones_are_smaller(
    is_masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = LossScale(CPU)
    scale.load_state_dict({"values": [2.0**17, 0.0, 1.0]})
    model, plain, batch = make_model(), make_model(), make_batch()
    stepper = make_stepper(model, autocast=torch.float16, scale=scale, wraps=False)
    if is_masked:
        as_on_a_gpu(stepper, monkeypatch)
    results = list[StepResult | None]()
    for step in range(5):
        with NoWaiting(is_first=step < 4) if is_masked else contextlib.nullcontext():
            results.append(stepper.step(FACTS._replace(step=step), iter([batch])))
    found = [result for result in (*results, stepper.drain()) if result is not None]
    skipped = [result.facts.step for result in found if result.overflowed]
    assert (
        skipped == list(range(len(skipped))) and 1 <= len(skipped) <= 3 and scale.factor == 2.0 ** (17 - len(skipped))
    )
    assert [result.applied for result in found] == [not result.overflowed for result in found]
    assert all(math.isfinite(result.loss) for result in found)
    other = make_stepper(plain, wraps=False)
    for result in found[len(skipped) :]:
        expected = step_of(other, batch)
        assert (result.loss, result.grad_norm) == pytest.approx((expected.loss, expected.grad_norm), rel=1e-2)


@pytest.mark.parametrize(
    ("capability", "precision"), [((9, 0), "bfloat16"), ((7, 5), "float16"), ((7, 0), "float16"), ((6, 1), "float32")]
)
def test_auto_is_what_a_gpu_computes_without_emulation(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], precision: str
) -> None:
    def is_supported(including_emulation: bool = True) -> bool:
        return including_emulation or capability >= (8, 0)

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert native_precision(torch.device("cuda", 0)) == precision


OPTIM = OptimSection(lr=0.01, weight_decay=0.3)


def make_optimizer(dtype: torch.dtype = torch.float32, optim: OptimSection = OPTIM) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)
    return build_optimizer(model, optim=optim)


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


@pytest.mark.parametrize("optim", [OPTIM, SGD, PLAIN_SGD], ids=["AdamW", "SGD", "SGD without state"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kernel_gives_what_torchs_own_step_gives(dtype: torch.dtype, optim: OptimSection) -> None:
    ours, theirs = make_optimizer(dtype, optim), make_optimizer(dtype, optim)
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


@pytest.mark.parametrize("optim", [OPTIM, SGD], ids=["AdamW", "SGD"])
@pytest.mark.parametrize("calls_kernel", [True, False])
def test_a_masked_step_leaves_parameters_moments_and_step_count_alone(calls_kernel: bool, optim: OptimSection) -> None:
    """What a GPU does with a step that is not finite: the verdict is a tensor, and NaNs are in the gradients."""
    masked, plain = make_optimizer(optim=optim), make_optimizer(optim=optim)
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
    damped = build_config(OptimSection, {**SGD.keywords, "_target_": SGD._target_, "dampening": 0.1}, path="optim.")
    others = [hooked, make_optimizer(optim=damped), torch.optim.AdamW(parameters, fused=False)]
    assert not any(can_call_kernel(optimizer) for optimizer in others)


def test_sparse_gradients_train_as_dense_ones_do() -> None:
    weights = []
    for is_sparse in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 2, sparse=is_sparse), nn.Flatten(), nn.Linear(6, 3))
        batch = Batch((torch.tensor([[1, 2, 1], [4, 0, 8]]), torch.tensor([0, 2])))
        assert step_of(make_stepper(model, clip_norm=0.01), batch).applied
        weights.append([parameter.detach() for parameter in model.parameters()])
    assert all(map(torch.equal, *weights))


def test_a_thread_that_reads_ahead_pins_what_it_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, pinned = [], []

    def pin(tensor: Tensor) -> Tensor:
        pinned.append(threading.current_thread().name)
        return tensor.clone()

    monkeypatch.setattr(torch.cuda, "set_device", entered.append)
    monkeypatch.setattr(Tensor, "pin_memory", pin)
    device = torch.device("cuda", 3)
    read = [MicroBatch(np.arange(2), (torch.ones(2), {"boxes": [torch.zeros(2)]})) for _ in range(3)]
    stream = Prefetch(iter(read), depth=2, prepare=Pinning(device))
    given = [next(stream) for _ in range(3)]
    stream.close()
    assert entered == [device], "a thread begins on another GPU"
    assert pinned == ["prefetch"] * 6
    assert torch.equal(given[0].tensors[1]["boxes"][0], torch.zeros(2))


def test_a_batch_is_copied_beside_what_the_gpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Stream:
        def __init__(self, name: object) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            log.append(f"{self.name} waits for {other.name}")

    @contextlib.contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        log.append(f"on {stream.name}")
        yield
        log.append(f"off {stream.name}")

    computing = Stream("computing")
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: Stream("copies"))
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: computing)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: log.append("pinned") or tensor)
    monkeypatch.setattr(Tensor, "record_stream", lambda _tensor, stream: log.append(f"kept for {stream.name}"))
    (copy,) = DeviceCopies(torch.device("meta")).copy((torch.ones(2),))
    assert copy.device.type == "meta"
    assert log == ["on copies", "pinned", "off copies", "computing waits for copies", "kept for computing"]
