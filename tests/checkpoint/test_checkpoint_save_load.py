"""Saving and loading in one process without a process group."""

from __future__ import annotations

import os

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

from slurm_train.checkpoint import commit as commit_module
from slurm_train.checkpoint.choice import choose_checkpoint
from slurm_train.checkpoint.load import load_rank_state, load_tensors, weights_digest
from slurm_train.checkpoint.save import save_checkpoint
from slurm_train.checkpoint.state import restore_training_state, training_state
from slurm_train.checkpoint.verify import newest_verified, verify
from slurm_train.errors import CheckpointError
from tests.support.small_checkpoints import make_checkpoint, make_header, stage

WEIGHTS = {"weights": torch.arange(8.0)}


def save(root, header, **changes):
    arguments = {"tensors": WEIGHTS, "rank_state": {}, "group": None, "keep": 2} | changes
    return save_checkpoint(root, header=header, **arguments)


def build(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(8))
    decayed = [model[0].weight]
    others = [parameter for parameter in model.parameters() if parameter is not model[0].weight]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=1e-2, fused=True)


def train(model, optimizer, *, first, last):
    for step in range(first, last):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        optimizer.zero_grad()
        model(torch.full((16, 4), 0.1 * step) + torch.randn(16, 4)).square().mean().backward()
        optimizer.step()


def test_resume_is_bitwise_with_fused_adamw_dropout_and_buffers(root):
    model, optimizer = build(0)
    train(model, optimizer, first=0, last=3)
    rank_state = {"rng": torch.get_rng_state(), "cursor": [24, 0]}
    save(root, make_header(3), tensors=training_state(model, optimizer), rank_state=rank_state)
    train(model, optimizer, first=3, last=6)

    other, other_optimizer = build(1)
    before = weights_digest(other.named_parameters())
    training_state(other, other_optimizer)
    assert weights_digest(other.named_parameters()) == before, "making a fresh optimizer's state moves no weight"
    choice = choose_checkpoint(root, group=None, attempt=2)
    assert choice is not None and choice.manifest.step == 3
    state = training_state(other, other_optimizer)
    load_tensors(choice.path, state)
    restore_training_state(other, other_optimizer, state)
    mine = load_rank_state(choice.path, 0)
    assert mine is not None and mine["cursor"] == [24, 0]
    torch.set_rng_state(mine["rng"])
    assert [group["weight_decay"] for group in other_optimizer.param_groups] == [0.1, 0.0]
    train(other, other_optimizer, first=3, last=6)
    assert weights_digest(other.state_dict().items()) == weights_digest(model.state_dict().items())


class OfAllKinds(torch.nn.Module):
    """Tied, frozen, with running statistics, and with a part that is compiled or replicated."""

    def __init__(self, wrap):
        super().__init__()
        self.first = wrap(torch.nn.Linear(4, 4))
        self.second = torch.nn.Linear(4, 4, bias=False)
        self.tied = self.second
        self.norm = torch.nn.BatchNorm1d(4)
        self.frozen = torch.nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x):
        return self.tied(self.norm(self.first(x)))


@pytest.mark.parametrize("has_stepped", [False, True])
@pytest.mark.parametrize("wrap", [lambda module: module, lambda module: torch.compile(module, backend="eager")])
def test_names_of_a_training_state_are_those_of_torch(wrap, has_stepped):
    model = OfAllKinds(wrap)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW([{"params": trained[::2]}, {"params": trained[1::2], "weight_decay": 0.0}])
    if has_stepped:
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = training_state(model, optimizer)
    expected_model, expected = get_state_dict(model, optimizer)
    assert found["model"].keys() == expected_model.keys()
    assert found["optimizer"]["param_groups"] == expected["param_groups"]
    assert list(found["optimizer"]["state"]) == list(expected["state"])
    for name, kept in expected["state"].items():
        assert all(found["optimizer"]["state"][name][key] is value for key, value in kept.items())


def test_files_are_private_whatever_the_umask(root):
    old = os.umask(0)
    try:
        path = save(root, make_header(1)).path
    finally:
        os.umask(old)
    assert root.stat().st_mode & 0o777 == path.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o600}


@pytest.mark.faults
@pytest.mark.parametrize("number", [28, 122, 5], ids=["ENOSPC", "EDQUOT", "EIO"])
@pytest.mark.parametrize(
    "where", ["tensors.NewFile", "save.write_file", "commit.Place.commit", "commit.Place.open_staging"]
)
def test_an_error_of_the_file_system_is_named_and_the_previous_one_stays(root, monkeypatch, where, number):
    old = save(root, make_header(1)).path

    def refuse(*args, **kwargs):
        raise OSError(number, os.strerror(number), "x")

    monkeypatch.setattr(f"slurm_train.checkpoint.{where}", refuse)
    with pytest.raises(CheckpointError) as caught:
        save(root, make_header(2))
    assert f"[Errno {number}] {os.strerror(number)}" in caught.value.message
    assert caught.value.message.startswith("rank 0 on ")
    assert ("free space" in caught.value.hint) == (number != 5)
    assert list(root.iterdir()) == [old]
    monkeypatch.undo()
    assert save(root, make_header(2)).path == newest_verified(root).newest[0]


def test_a_failed_fsync_is_not_tried_again(root, monkeypatch):
    calls = []

    def refuse(path):
        calls.append(path)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(commit_module, "fsync_directory", refuse)
    root.mkdir()
    with pytest.raises(CheckpointError):
        save(root, make_header(1))
    assert calls == [calls[0], root], "the staging directory once, then that it has lost its name"


def test_a_saved_step_that_cannot_be_read_now_is_left_alone(root, monkeypatch):
    path = save(root, make_header(1)).path
    real = os.open

    def refuse(name, *args, **kwargs):
        if str(name).endswith("manifest.json"):
            raise OSError(5, "Input/output error")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(root, make_header(1))
    monkeypatch.undo()
    assert verify(path).step == 1


def test_a_checkpoint_without_its_marker_is_damaged(root):
    """It had one when it got its name, so starting over would hide a loss; an unfinished save never had one."""
    stage(root, make_header(1))
    assert choose_checkpoint(root, group=None, attempt=1) is None
    (make_checkpoint(root, 1) / "COMPLETE").unlink()
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        choose_checkpoint(root, group=None, attempt=2)


def test_the_files_of_another_user_are_not_loaded(root):
    path = make_checkpoint(root, 1)
    (path / "__1_0.distcp").chmod(0o620)
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp belongs to uid \d+ with mode -rw--w----") as caught:
        choose_checkpoint(root, group=None, attempt=2)
    assert "remove group and world write permission" in caught.value.hint


def test_rank_state_is_verified_again_where_it_is_read(root):
    path = save(root, make_header(1)).path
    file = path / "rank_00000.pt"
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank_00000\.pt: "):
        load_rank_state(path, 0)


def test_the_digest_knows_name_type_shape_and_every_bit():
    base = {"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.zeros(())}
    changes = [{"b": -base["b"]}, {"c": base["b"]}, {"a": base["a"].half()}, {"a": base["a"].reshape(3, 2)}]
    variants = [base, *(base | change for change in changes)]
    assert len({weights_digest(variant.items()) for variant in variants}) == len(variants)
    assert weights_digest(reversed(base.items())) == weights_digest(base.items())
    strided = torch.arange(6.0).reshape(2, 3)
    assert weights_digest([("a", strided.T)]) == weights_digest([("a", strided.T.contiguous())])
