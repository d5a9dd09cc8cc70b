"""What is saved of a training: whose each part is, what is switched, which optimizers; the same for every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from slurm_train.checkpoint.choice import choose_checkpoint
from slurm_train.checkpoint.contents import State, Terms
from slurm_train.checkpoint.save import save_checkpoint
from slurm_train.errors import CheckpointError, RunError
from tests.support.small_checkpoints import make_header

TRAINER = Terms(makes_state=True, keeps_replicas=True, has_modes=True, of="run", noun="callback ", settings={"lr"})


class Holder:
    """Has any state."""

    def __init__(self, **state: Any) -> None:
        self.state: dict[str, Any] = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def make_state(model: nn.Module, terms: Terms, kind: Any = torch.optim.SGD, **objects: Any) -> State:
    return State(model, [kind(model.parameters(), lr=0.1)], objects, group=None, terms=terms)


def save(root: Path, state: State, step: int = 4, group: Any = None) -> None:
    content = state.content(lambda: make_header(step))
    rank_state, header = content.facts()
    save_checkpoint(root, tensors=content.tensors, rank_state=rank_state, header=header, group=group, keep=9)


def restore(root: Path, state: State, group: Any = None) -> list[str]:
    choice = choose_checkpoint(root, group=group, attempt=1)
    assert choice is not None
    return state.restore(choice)


@pytest.mark.parametrize("terms", [TRAINER, Terms()], ids=["trainer", "program"])
def test_both_engines_save_the_same_and_give_it_back(root: Path, terms: Terms) -> None:
    model, noted = make_model(), Holder(seen=3, table=torch.arange(4.0))
    state = make_state(model, terms, noted=noted)
    state.add("scale", Holder(values=[2.0]), of="run")
    state.add("stream", Holder(place=7), of="reader")
    model[1].running_mean += 5
    save(root, state)
    other, again = make_model(), Holder(seen=0, table=torch.zeros(4))
    scale, stream, new = Holder(values=[1.0]), Holder(place=0), Holder(kept=1)
    fresh = make_state(other, terms, noted=again)
    for name, part, of in (("scale", scale, "run"), ("stream", stream, "reader"), ("new", new, "run")):
        fresh.add(name, part, of=of)  # type: ignore[arg-type]
    assert restore(root, fresh) == []
    assert (scale.state, stream.state, new.state) == ({"values": [2.0]}, {"place": 7}, {"kept": 1})
    assert again.state["seen"] == 3 and again.state["table"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(other.buffers(), model.buffers(), strict=True))


@pytest.mark.parametrize("terms", [TRAINER, Terms()], ids=["trainer", "program"])
def test_switches_come_back_and_those_of_a_later_step_are_taken_back(root: Path, terms: Terms) -> None:
    model = make_model()
    state = make_state(model, terms)
    model[1].track_running_stats = False
    if terms.has_modes:
        model[0].eval()
    save(root, state)
    model[0].weight.requires_grad_(False)
    model[1].track_running_stats = True
    model.train()
    restore(root, state)
    assert not model[1].track_running_stats and model[0].training != terms.has_modes
    assert model[0].weight.requires_grad
    fresh = make_model()
    # A person's own change of the program stays.
    fresh[2].bias.requires_grad_(False)
    restore(root, make_state(fresh, terms))
    assert not fresh[1].track_running_stats and fresh[0].training != terms.has_modes
    assert not fresh[2].bias.requires_grad


@pytest.mark.parametrize("terms", [TRAINER, Terms()], ids=["trainer", "program"])
def test_another_kind_of_optimizer_is_refused_by_name(root: Path, terms: Terms) -> None:
    save(root, make_state(make_model(), terms))
    with pytest.raises(RunError, match="state of SGD, and the training has Adagrad"):
        restore(root, make_state(make_model(), terms, torch.optim.Adagrad))


@pytest.mark.parametrize("terms", [TRAINER, Terms()], ids=["trainer", "program"])
def test_a_save_and_a_restore_after_an_evaluation_are_of_the_shards(
    root: Path, group_of_one: None, terms: Terms
) -> None:
    """FSDP2's outermost module keeps the parameters that it has gathered after a pass without gradients."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def evaluate() -> None:
        with torch.no_grad():
            model(torch.ones(2, 3))
        assert not any(isinstance(parameter, DTensor) for parameter in model[1].parameters())

    evaluate()
    state = State(model, [optimizer], {}, group=dist.group.WORLD, terms=terms)
    before = {name: value.to_local().clone() for name, value in model.state_dict().items()}
    evaluate()
    assert state.check_after_first_step() == []
    evaluate()
    save(root, state, group=dist.group.WORLD)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    evaluate()
    restore(root, state, group=dist.group.WORLD)
    now = {name: value.to_local() for name, value in model.state_dict().items()}
    assert all(torch.equal(now[name], value) for name, value in before.items())


def test_gradients_that_are_added_up_are_seen_after_an_evaluation_of_shards(group_of_one: None) -> None:
    model = nn.Linear(3, 1)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = State(model, [optimizer], {}, group=dist.group.WORLD, terms=Terms())
    for pending in ("", "weight"):
        model(torch.ones(2, 3)).sum().backward()
        if not pending:
            optimizer.step()
        with torch.no_grad():
            model(torch.ones(2, 3))
        assert state.pending_gradient() == pending


@pytest.mark.parametrize("terms", [TRAINER, Terms()], ids=["trainer", "program"])
def test_what_no_resume_could_read_or_nothing_saves_is_found_after_the_first_step(terms: Terms) -> None:
    class Counter(Holder):
        num_steps = 0

    counter = Counter()
    counter.num_steps = 1
    state = make_state(make_model(), terms, counter=counter)
    counter.num_steps += 1
    (note,) = state.check_after_first_step()
    assert "training changes num_steps of counter, which its state_dict lacks" in note
    assert state.check_before_save(1) == []
    with pytest.raises(CheckpointError, match="the state of path could not be loaded again"):
        make_state(make_model(), terms, path=Holder(path=Path("x"))).check_after_first_step()
