"""The short way through AdamW is AdamW."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slurm_train.config.schema import OptimSection
from slurm_train.train.optimizer import Update, build_optimizer, can_call_kernel

OPTIM = OptimSection(lr=0.01, weight_decay=0.3)


def make(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


def gradients(update: Update, step: int, factor: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [factor * torch.randn(p.shape, generator=generator).to(p.dtype) for p in update.parameters]


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, *, divisor: float, steps: range) -> None:
    update = Update(optimizer)
    for step in steps:
        found = gradients(update, step, divisor)
        for parameter, gradient in zip(update.parameters, found, strict=True):
            parameter.grad = gradient
        update.apply(found, torch.tensor(divisor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_calls_kernel_gives_what_torchs_own_step_gives(dtype: torch.dtype) -> None:
    ours, theirs = make(dtype), make(dtype)
    optimizer, plain = build_optimizer(ours, optim=OPTIM), build_optimizer(theirs, optim=OPTIM)
    assert can_call_kernel(optimizer)
    # A power of two divides without rounding, so equality can be asked for bit for bit.
    take_steps(ours, optimizer, divisor=64.0, steps=range(6))
    for step in range(6):
        for parameter, gradient in zip(Update(plain).parameters, gradients(Update(plain), step, 1.0), strict=True):
            parameter.grad = gradient
        plain.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_a_loaded_state_is_used_after_the_load() -> None:
    whole, cut = make(), make()
    optimizer, saved = build_optimizer(whole, optim=OPTIM), build_optimizer(cut, optim=OPTIM)
    take_steps(whole, optimizer, divisor=2.0, steps=range(6))
    take_steps(cut, saved, divisor=2.0, steps=range(3))
    update = Update(saved)
    saved.load_state_dict(saved.state_dict())
    for step in range(3, 6):
        update.apply(gradients(update, step, 2.0), torch.tensor(2.0))
    for mine, other in zip(whole.parameters(), cut.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_what_is_not_plain_fused_adamw_goes_torchs_way() -> None:
    model = make()
    assert not can_call_kernel(torch.optim.SGD(model.parameters(), lr=0.1))
    assert not can_call_kernel(torch.optim.AdamW(model.parameters(), fused=False))
    hooked = build_optimizer(model, optim=OPTIM)
    hooked.register_step_post_hook(lambda *_: None)
    assert not can_call_kernel(hooked)


def test_only_matrices_decay() -> None:
    groups = build_optimizer(make(), optim=OPTIM).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(2, 0.3), (4, 0.0)]


@pytest.mark.parametrize("is_short", [True, False])
def test_a_masked_step_leaves_parameters_moments_and_step_count_alone(is_short: bool) -> None:
    """What a GPU does with a step that is not finite: the verdict is a tensor, and NaNs are in the gradients."""
    masked, plain = make(), make()
    optimizer, other = (build_optimizer(model, optim=OPTIM) for model in (masked, plain))
    take_steps(masked, optimizer, divisor=2.0, steps=range(3))
    take_steps(plain, other, divisor=2.0, steps=range(3))
    update = Update(optimizer)
    update._calls_kernel = is_short
    bad = gradients(update, 3, float("nan"))
    update.apply(bad, torch.tensor(float("nan")), skip=torch.tensor(1.0))
    good = gradients(update, 4, 2.0)
    for parameter, gradient in zip(update.parameters, good, strict=True):
        parameter.grad = gradient
    update.apply(good, torch.tensor(2.0), skip=torch.tensor(0.0))
    take_steps(plain, other, divisor=2.0, steps=range(4, 5))
    for mine, theirs in zip(masked.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    for mine_state, their_state in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert all(torch.equal(mine_state[name], their_state[name]) for name in their_state)
