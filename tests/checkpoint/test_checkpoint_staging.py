"""Copies in re-used memory: equal, independent of what follows, and never more of them."""

from __future__ import annotations

import pytest
import torch

from slurm_train.checkpoint.staging import StagingBuffers, can_pin
from slurm_train.checkpoint.state import own_part, own_tensors, share_of, training_state


@pytest.fixture
def buffers() -> StagingBuffers:
    return StagingBuffers(torch.device("cpu"))


def state_of(value: float) -> dict:
    weights = {"a": torch.full((3, 4), value), "b": torch.full((3, 4), -value), "half": torch.ones(5).bfloat16()}
    groups = [{"lr": value, "params": ["a", "b"], "tensors": (torch.tensor(value),)}]
    return {"model": weights, "optimizer": {"param_groups": groups, "none": None, "empty": torch.empty(0)}}


def test_a_copy_equals_its_source_and_does_not_follow_it(buffers):
    state = state_of(1.5)
    staged = buffers.stage(state)
    state["model"]["a"].add_(1)
    state["optimizer"]["param_groups"][0]["lr"] = 7.0
    state["optimizer"]["param_groups"][0]["params"].append("c")
    expected = state_of(1.5)
    for name, tensor in expected["model"].items():
        assert staged["model"][name].equal(tensor) and staged["model"][name].dtype == tensor.dtype
    (group,) = staged["optimizer"]["param_groups"]
    assert (group["lr"], group["params"], group["tensors"][0].item()) == (1.5, ["a", "b"], 1.5)
    assert staged["optimizer"]["none"] is None and staged["optimizer"]["empty"].shape == (0,)


def test_later_copies_use_the_same_memory(buffers):
    first = buffers.stage(state_of(1.0))
    places = {name: tensor.data_ptr() for name, tensor in first["model"].items()}
    size = buffers.num_bytes
    second = buffers.stage(state_of(2.0))
    assert {name: tensor.data_ptr() for name, tensor in second["model"].items()} == places
    assert buffers.num_bytes == size == sum(t.nbytes for t in first["model"].values()) + 4


def test_a_state_that_grows_gets_more_memory_and_keeps_the_old(buffers):
    buffers.stage({"a": torch.ones(8)})
    staged = buffers.stage({"a": torch.ones(8), "b": torch.zeros(8), "c": torch.ones(2, 4)})
    assert staged["a"].sum() == 8 and staged["b"].sum() == 0 and staged["c"].shape == (2, 4)
    assert buffers.num_bytes == 3 * 32


def test_prepared_memory_is_what_the_first_copy_takes(buffers):
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    for rank in range(2):
        buffers = StagingBuffers(torch.device("cpu"))
        buffers.prepare(own_tensors(model, optimizer, rank=rank, num_ranks=2))
        size = buffers.num_bytes
        buffers.stage(own_part(training_state(model, optimizer), rank=rank, num_ranks=2))
        assert buffers.num_bytes == size > 0


def test_strided_and_gradient_carrying_tensors_are_copied_as_values(buffers):
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    staged = buffers.stage({"weight": weight, "turned": weight.t()})
    assert not staged["weight"].requires_grad
    assert staged["turned"].equal(torch.arange(6.0).reshape(2, 3).t())


def test_without_a_gpu_nothing_is_pinned_and_waiting_is_nothing(buffers):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert not can_pin()
    buffers.stage(state_of(1.0))
    buffers.wait_for_copy()
    buffers.hold_changes()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_shares_are_disjoint_complete_and_even(num_ranks):
    sizes = {f"t{number}": 8 * (number % 5 + 1) for number in range(40)} | {"big": 100}
    shares = [share_of(sizes, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    loads = [sum(sizes[name] for name in share) for share in shares]
    assert max(loads) - min(loads) <= 100


def test_the_parts_of_the_ranks_make_the_whole_and_values_are_on_each():
    state = state_of(1.0)
    parts = [own_part(state, rank=rank, num_ranks=2) for rank in range(2)]
    names = [set(part["model"]) for part in parts]
    assert names[0] | names[1] == set(state["model"]) and not names[0] & names[1]
    for part in parts:
        assert part["optimizer"]["param_groups"] is state["optimizer"]["param_groups"]
        assert part["optimizer"]["none"] is None


@pytest.mark.gpu
def test_a_copy_from_a_gpu_is_of_the_moment_although_training_goes_on():
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    device = torch.device("cuda", torch.cuda.current_device())
    buffers = StagingBuffers(device)
    weights = torch.zeros(64 << 20, device=device)
    steps = torch.zeros(3)
    for number in range(1, 6):
        weights.fill_(number)
        steps.fill_(number)
        staged = buffers.stage({"weights": weights, "steps": steps})
        buffers.hold_changes()
        weights.fill_(-1)
        steps.fill_(-1)
        buffers.wait_for_copy()
        assert staged["weights"].is_pinned() == can_pin() and not staged["weights"].is_cuda
        assert staged["weights"].eq(number).all() and staged["steps"].eq(number).all()
    assert buffers.num_bytes == weights.nbytes + steps.nbytes
