"""Which parameters get which settings, the learning rate over a run, and that any optimizer is resumed exactly."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from torch import nn

from slurm_train.checkpoint.load import require_fit
from slurm_train.checkpoint.verify import newest_verified
from slurm_train.config.schema import OptimSection, RunConfig, all_keys, build_config, nested
from slurm_train.errors import ConfigError, RunError
from slurm_train.train.optimizer import (
    CombinedOptimizer,
    Update,
    averaged,
    build_optimizer,
    build_schedule,
    note_on_rate,
    require_rules_fit,
    to_average,
    to_training,
)
from tests.train.small_runs import assert_resumes_bit_for_bit, config_of, finish, run_to_end, start, weights_of

MUON = {
    "_target_": "torch.optim.Muon",
    "momentum": 0.95,
    "groups": [
        {"match": ["embed*"], "_target_": "torch.optim.AdamW"},
        {"dims": [0, 1], "_target_": "torch.optim.AdamW"},
    ],
}


def no_optimizer(parameters: list[Any], *, lr: float) -> list[Any]:
    return parameters


def section(**optim: Any) -> OptimSection:
    return build_config(OptimSection, optim, path="optim.")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden, self.norm = nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)


def groups_of(model: nn.Module, **optim: Any) -> dict[tuple[str, ...], dict[str, Any]]:
    """Returns the settings of each group by the names of its parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    built = build_optimizer(model, optim=section(**optim))
    return {tuple(names[id(one)] for one in group["params"]): group for group in built.param_groups}


VECTORS = ("hidden.bias", "norm.weight", "norm.bias")


def test_without_rules_matrices_decay_and_vectors_do_not() -> None:
    found = groups_of(Net(), weight_decay=0.3)
    assert {names: group["weight_decay"] for names, group in found.items()} == {
        ("embedding.weight", "hidden.weight"): 0.3,
        VECTORS: 0.0,
    }
    assert all(group["fused"] and group["betas"] == (0.9, 0.95) for group in found.values())


def test_the_first_rule_that_fits_decides() -> None:
    rules = [
        {"match": "embed*", "lr_scale": 0.1, "betas": [0.5, 0.6]},
        {"dims": 1, "weight_decay": 0.2},
        {"match": ["no*", "hid*"], "lr": 0.04},
    ]
    found = groups_of(Net(), lr=0.02, weight_decay=0.3, groups=rules)
    assert {names: (group.get("lr_scale"), group["weight_decay"]) for names, group in found.items()} == {
        ("embedding.weight",): (0.1, 0.3),
        ("hidden.weight",): (2.0, 0.3),
        VECTORS: (None, 0.2),
    }
    assert found[("embedding.weight",)]["betas"] == [0.5, 0.6]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"match": "embed"}, "optim.groups[0].match=embed fits no parameter of Net"),
        (
            {"match": "embed*", "wieght_decay": 0.1},
            "torch.optim.AdamW got an unexpected keyword argument 'wieght_decay'",
        ),
    ],
)
def test_a_rule_that_would_do_nothing_is_refused(rule: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        optim = section(groups=[rule])
        require_rules_fit(Net(), optim=optim)
        build_optimizer(Net(), optim=optim)
    assert caught.value.message == message


def test_rules_can_give_parameters_to_another_optimizer() -> None:
    built = build_optimizer(Net(), optim=section(**MUON))
    assert isinstance(built, CombinedOptimizer)
    assert [len(group["params"]) for group in built.param_groups] == [1, 3, 1]
    for group in built.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    before = [parameter.clone() for group in built.param_groups for parameter in group["params"]]
    built.step()
    after = [parameter for group in built.param_groups for parameter in group["params"]]
    assert not any(old.equal(new) for old, new in zip(before, after, strict=True))
    assert {tuple(sorted(entry)) for entry in built.state.values()} == {
        ("exp_avg", "exp_avg_sq", "step"),
        ("momentum_buffer",),
    }


@pytest.mark.parametrize(
    ("optim", "message"),
    [
        ({"_target_": "torch.optim.Adamw"}, "torch.optim has no 'Adamw'"),
        ({"_target_": "torch.nn.Linear"}, "torch.nn.Linear got an unexpected keyword argument 'weight_decay'"),
        (
            {"_target_": "torch.optim.Muon"},
            "torch.optim.Muon does not take these parameters or keywords: Muon only supports 2D",
        ),
        ({"_target_": "torch.optim.LBFGS", "weight_decay": 0.0}, "LBFGS computes the loss several times in a step"),
        ({"_target_": f"{__name__}.no_optimizer", "weight_decay": 0.0}, "gave a list"),
    ],
)
def test_what_is_no_optimizer_of_these_parameters_is_refused(optim: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_optimizer(nn.Linear(2, 2), optim=section(**optim))
    assert message in str(caught.value)
    with pytest.raises(ConfigError, match="has no parameter that requires a gradient"):
        build_optimizer(nn.Identity(), optim=OptimSection())


SCHEDULES: list[tuple[Any, dict[int, float]]] = [
    ("cosine", {0: 0.0, 50: 1.0, 100: 2.0, 600: 1.1, 1100: 0.2, 5000: 0.2}),
    ("linear", {50: 1.0, 100: 2.0, 600: 1.1, 1100: 0.2, 5000: 0.2}),
    ("constant", {50: 1.0, 100: 2.0, 600: 2.0, 5000: 2.0}),
    ("wsd", {50: 1.0, 100: 2.0, 900: 2.0, 1000: 1.1, 1100: 0.2, 5000: 0.2}),
    ("inverse_sqrt", {50: 1.0, 100: 2.0, 400: 1.0, 10_000: 0.2, 10**7: 0.2}),
    ({"_target_": f"{__name__}.own_schedule", "factor": 3}, {0: 6.0, 1100: 600.0}),
]


@pytest.mark.parametrize(("schedule", "expected"), SCHEDULES)
def test_the_learning_rate_over_a_run(schedule: Any, expected: dict[int, float]) -> None:
    optim = section(warmup_samples=100, decay_samples=200, min_lr_ratio=0.1, schedule=schedule)
    built = build_schedule(optim, peak_lr=2.0, total_samples=1100)
    assert {samples: built.lr_at(samples) for samples in expected} == pytest.approx(expected)
    shares = build_schedule(OptimSection(schedule="wsd"), peak_lr=1.0, total_samples=2000)
    assert (shares.warmup_samples, shares.decay_samples) == (100, 400)


@pytest.mark.parametrize(
    ("change", "rates"),
    [
        ({}, None),
        # Cosine over 20 steps has fallen to a tenth at step 20, and is at its middle at step 21 of 40.
        ({"train.max_steps": 40}, ("0.001", "0.00515")),
        ({"train.max_steps": 40, "optim.schedule": "constant", "optim.lr": 1e-3}, None),
        ({"optim.weight_decay": 0.5}, None),
    ],
)
def test_a_change_that_moves_the_learning_rate_is_said_at_the_resume(
    change: dict[str, Any], rates: tuple[str, str] | None
) -> None:
    before = {"optim.lr": 1e-2, "optim.warmup_samples": 0, "train.max_steps": 20}
    extra = {"settings": before, "lr": {"peak": 1e-2}, "num_samples": 256, "batch_since": [0, 0]}
    manifest: Any = SimpleNamespace(step=20, samples=640, batch_plan={"global_size": 32}, extra=extra)
    config = build_config(RunConfig, nested(before | change), path="")
    schedule = build_schedule(config.optim, peak_lr=config.optim.lr, total_samples=config.train.max_steps * 32)
    note = note_on_rate(manifest, schedule, next_samples=672)
    if rates is None:
        assert note is None
    else:
        # Plain arithmetic of half a cosine from the peak to a tenth of it.
        assert f"{1e-3 + 9e-3 * 0.5 * (1 + math.cos(math.pi * 21 / 40)):.3g}" == rates[1]
        assert note is not None and f"was {rates[0]} at step 20 and is {rates[1]} at the next one" in note


@pytest.mark.parametrize("settings", [{"ddp.average_every_steps": 8}, {"optim.min_lr_ratio": 2.0}, {"x.y": 1}])
def test_settings_of_an_earlier_version_end_no_resume(settings: dict[str, Any]) -> None:
    before = {"optim.lr": 1e-2, "optim.warmup_samples": 0, "train.max_steps": 20}
    extra = {"settings": before | settings, "lr": {"peak": 1e-2}, "num_samples": 256, "batch_since": [0, 0]}
    manifest: Any = SimpleNamespace(step=20, samples=640, batch_plan={"global_size": 32}, extra=extra)
    schedule = build_schedule(section(lr=1e-2, warmup_samples=0), peak_lr=1e-2, total_samples=640)
    assert note_on_rate(manifest, schedule, next_samples=672) is None


def test_every_schedule_has_a_row() -> None:
    kinds = get_args(all_keys(OptimSection)["schedule"])
    names = {name for kind in kinds if get_origin(kind) is Literal for name in get_args(kind)}
    assert {schedule for schedule, _ in SCHEDULES if isinstance(schedule, str)} == names


def own_schedule(samples: int, *, warmup_samples: int, total_samples: int, factor: float) -> float:
    return factor * (warmup_samples if samples == total_samples else 1.0)


class Counting(torch.optim.SGD):
    """Keeps a number in its groups, as Prodigy and schedule-free optimizers do, and acts on it."""

    def __init__(self, params: Any, lr: float = 0.1, **others: Any) -> None:
        super().__init__(params, lr=lr, **others)
        for group in self.param_groups:
            group["count"] = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] += 1
            group["momentum"] = 1.0 - 1.0 / (1 + group["count"])
        return super().step(closure)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"_target_": "torch.optim.SGD", "momentum": 0.9, "nesterov": True},
    "SGD without state": {"_target_": "torch.optim.SGD", "schedule": "linear"},
    "Muon": MUON,
    "Adafactor": {"_target_": "torch.optim.Adafactor"},
    "groups": {"groups": [{"match": "*weight", "lr": 0.02}, {"dims": 1, "weight_decay": 0.1}], "schedule": "wsd"},
    "a number in the groups": {"_target_": f"{__name__}.Counting", "weight_decay": 0.0},
}


def test_sgd_changes_parameters_of_two_bytes_as_it_does_those_of_four() -> None:
    """The kernel of torch 2.13 for the CPU leaves most of those of two bytes as they are."""
    torch.manual_seed(5)
    whole = nn.Linear(64, 64)
    rounded = nn.Linear(64, 64).bfloat16()
    rounded.load_state_dict(whole.state_dict())
    for model in (whole, rounded):
        optim = OptimSection(_target_="torch.optim.SGD", lr=0.1, keywords={"momentum": 0.9, "nesterov": True})
        update = Update(build_optimizer(model, optim=optim))
        for _ in range(3):
            gradients = [torch.full_like(parameter, 3.0) for parameter in update.parameters]
            for parameter, gradient in zip(update.parameters, gradients, strict=True):
                parameter.grad = gradient
            update.apply(gradients, torch.tensor(3.0))
    for expected, found in zip(whole.parameters(), rounded.parameters(), strict=True):
        assert found.float().detach().numpy() == pytest.approx(expected.detach().numpy(), abs=0.01)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout", [pytest.param({}, id="DDP"), pytest.param({"dp_shard": 2}, id="FSDP2", marks=pytest.mark.full)]
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_is_resumed_bit_for_bit(tmp_path: Path, name: str, layout: dict[str, int]) -> None:
    optim = OPTIMIZERS[name]
    if layout and name == "Adafactor":
        facts = {"signal_at": 3, "only_in": str(tmp_path / "sent")}
        run_to_end(tmp_path / "moved", config_of(optim=optim, model=facts), code=75)
        for run in ("run", "moved"):
            _, text = finish(start(tmp_path / run, config_of(optim=optim, model=facts, parallel=layout), attempt=1))
            assert "Adafactor cannot update parameters that are spread over ranks" in text, run
        return
    assert_resumes_bit_for_bit(tmp_path, config_of(optim=optim, parallel=layout))


@pytest.mark.distributed
def test_a_checkpoint_without_what_an_optimizer_keeps_now_is_refused(tmp_path: Path) -> None:
    run_to_end(tmp_path, config_of(optim={"_target_": "torch.optim.SGD"}))
    found = newest_verified(tmp_path / "checkpoints").newest
    assert found is not None
    weights = weights_of(tmp_path)
    require_fit(found[0], weights, kept={name: {} for name in weights})
    with pytest.raises(RunError, match=r"the optimizer keeps momentum_buffer of .* now, which checkpoint_0000020"):
        require_fit(found[0], weights, kept={name: {"momentum_buffer": weight} for name, weight in weights.items()})


class Averaging(torch.optim.SGD):
    """Has other weights in the model while it is evaluated, as schedule-free optimizers do."""

    def train(self) -> None:
        self._scale(2.0, is_training=True)

    def eval(self) -> None:
        self._scale(0.5, is_training=False)

    def _scale(self, factor: float, *, is_training: bool) -> None:
        for group in self.param_groups:
            if group.get("train_mode", False) != is_training:
                group["train_mode"] = is_training
                for parameter in group["params"]:
                    parameter.data.mul_(factor).add_(1e-7)

    def step(self, closure: Any = None) -> Any:
        assert all(group["train_mode"] for group in self.param_groups)
        return super().step(closure)


def test_an_optimizer_that_averages_is_evaluated_so_and_goes_on_with_the_same_bits() -> None:
    layer = nn.Linear(3, 2)
    for optimizer in (
        Averaging(layer.parameters(), lr=0.1),
        CombinedOptimizer([Averaging(layer.parameters(), lr=0.1)]),
    ):
        to_training(optimizer)
        before = layer.weight.detach().clone()
        with averaged(optimizer):
            assert not layer.weight.equal(before)
        assert layer.weight.equal(before)
        layer(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        to_average(optimizer)
        assert not optimizer.param_groups[0]["train_mode"]
    plain = torch.optim.SGD(layer.parameters(), lr=0.1)
    with averaged(plain):
        to_training(plain)
