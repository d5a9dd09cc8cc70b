"""Runs that an earlier version has written go on with the same bits: what is on disk stays readable.

Each archive in `stored/` is a run directory that was stopped at step 7, with periodic saves in the background before
that. `python -m tests.checkpoint.test_stored_runs` makes those that are missing. None is made anew for a change of the
library: another format gets archives of its own.
"""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from slurm_train.checkpoint.load import load_tensors, read_model
from slurm_train.checkpoint.metadata import read_metadata
from slurm_train.checkpoint.verify import newest_verified
from slurm_train.metrics import read_metrics
from slurm_train.rundir.attempts import open_attempt
from slurm_train.rundir.ledger import Start
from slurm_train.rundir.paths import RunDirectory, list_checkpoints, parse_name
from tests.support.ports import rank_environments
from tests.support.warm_ranks import start_rank
from tests.train.small_runs import config_of, finish, run_to_end

STORED = Path(__file__).with_name("stored")
CALLBACKS = "slurm_train.train.callbacks"
STOPPED_AT = 7
EMA = {"_target_": f"{CALLBACKS}.EMA", "decay": 0.9}
HELD_OUT = {"_target_": "small_training.Tokens", "split": "heldout"}
SECTIONS: dict[str, dict[str, Any]] = {
    # Callbacks with values and tensors, a stream on each rank, a loss scale, and the losses that spikes are seen by.
    "replicas": {
        "model": {"_target_": "small_training.DoubleGPT", "dtype": "float32", "num_layers": 1, "dropout": 0.2},
        "data": {"_target_": "small_training.TokenStream", "heldout": HELD_OUT},
        "batch": {"global_size": 16},
        "train": {"max_steps": 12, "eval_every_steps": 4, "precision": "float16"},
        "health": {"on_spike": "log", "spike_factor": 1.5},
    },
    # Shards of an odd number of rows, buffers that training makes, and an average that is cut as well.
    "shards": {
        "model": {"_target_": "small_training.Net", "dropout": 0.2},
        "batch": {"global_size": 12},
        "parallel": {"dp_shard": 2},
        "train": {"max_steps": 12, "eval_every_steps": 4},
    },
    "buffers": {
        "model": {"_target_": "test_unusual_states.MakesBuffers", "dropout": 0.2},
        "train": {"max_steps": 12},
    },
    # One state of named parts: each part of the trainer's loop in the files of the ranks, and switches of modules.
    "parts": {
        "model": {
            "_target_": "small_training.Settles",
            "dtype": "float32",
            "num_layers": 1,
            "num_heads": 2,
            "width": 8,
            "hidden": 16,
            "dropout": 0.2,
        },
        "data": {"_target_": "small_training.TokenStream"},
        "batch": {"global_size": 16},
        "train": {"max_steps": 12, "precision": "float16"},
        "health": {"on_spike": "log", "spike_factor": 1.5},
    },
}
# What ranks share, what each has for itself, what is cut over them, and a group that training has added.
PROGRAM = """
import sys
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from slurm_train import session

last = int(sys.argv[1])
run = session.join()
dist.init_process_group("gloo")
torch.manual_seed(3)


class Queue(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("queue", torch.zeros(8, 4))
        self.num_seen = 0

    def forward(self, x):
        x = self.layer(x)
        self.queue = torch.cat([self.queue[len(x):], x.detach()])
        self.num_seen += 1
        return x - self.queue.mean(0)

    def get_extra_state(self): return {"num_seen": self.num_seen}
    def set_extra_state(self, state): self.num_seen = state["num_seen"]


class ByHand(torch.optim.Optimizer):
    def __init__(self, params): super().__init__(params, {"lr": 0.05})
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            dist.all_reduce(p.grad)
            half = p.shape[0] // 2
            mine = slice(run.rank * half, (run.rank + 1) * half)
            moment = self.state[p].setdefault("moment", torch.zeros_like(p[mine]))
            moment.mul_(0.9).add_(p.grad[mine])
            halves = [torch.empty_like(moment) for _ in range(2)]
            dist.all_gather(halves, p[mine] - 0.05 * moment)
            p.copy_(torch.cat(halves))


class Reader:
    place, kept = 100 * run.rank, [torch.arange(3) + run.rank, np.float32(0.5)]
    def state_dict(self): return {"place": self.place, "kept": self.kept}
    def load_state_dict(self, state): self.place, self.kept = state["place"], state["kept"]


bare = nn.Sequential(nn.Linear(4, 30), nn.BatchNorm1d(30), nn.Dropout(0.2), nn.Linear(30, 4))
replica = DistributedDataParallel(bare)
queue, cut, third = Queue(), nn.Linear(4, 4), nn.Linear(1, 4, bias=False)
fully_shard(queue)
fully_shard(cut)
optimizers = [
    torch.optim.Adam(bare[0].parameters()),
    torch.optim.SGD([*queue.parameters(), *cut.parameters()], lr=0.1, momentum=0.9),
    ByHand(third.parameters()),
]
objects = {
    "average": AveragedModel(bare),
    "reader": Reader(),
    "sampler": np.random.default_rng(5),
    "schedule": torch.optim.lr_scheduler.StepLR(optimizers[0], 3),
}
parts = {"replica": replica, "queue": queue, "cut": cut, "third": third}
training = run.training(parts, optimizers, **objects)
step = training.resume()
torch.manual_seed(run.rank) if step == 0 else None
while step < last:
    if step == 4:
        optimizers[0].add_param_group({"params": bare[3].parameters(), "lr": 0.02})
    noise = float(objects["sampler"].random())
    hidden = cut(queue(replica(torch.randn(8, 4) + noise)))
    loss = (hidden.square().mean() + (third(hidden[:, :1]) - 1).square().mean()) / 2
    loss = loss + objects["reader"].place / 1e6 + queue.num_seen / 1e6
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    objects["schedule"].step()
    objects["average"].update_parameters(bare)
    objects["reader"].place += 1
    step += 1
    total = loss.detach() + objects["average"].module[0].weight.detach().sum()
    dist.all_reduce(total)
    run.report(step, loss=total.item())
    if step in (3, 5, 7, 12):
        training.save(step)
assert objects["reader"].place == 100 * run.rank + step
dist.destroy_process_group()
"""
LAST = 12


def train(run: Path, name: str, *, attempt: int, stops: bool = False) -> None:
    """Runs an attempt of the trainer on two ranks to its end, or to the stop."""
    config = config_of(**SECTIONS[name])
    config["checkpoint"] = {"every_steps": 5}
    config["callbacks"] = [EMA, {"_target_": "small_training.Teller"}]
    fault = {"stop_step": STOPPED_AT} if stops else {}
    run_to_end(run, config, code=75 if stops else 0, attempt=attempt, fault=fault)


def train_program(run: Path, *, last: int) -> None:
    """Runs the program in a run directory as two ranks of the next attempt, up to a step."""
    attempt = open_attempt(RunDirectory(run), Start(job_id=None, restart_count=0, nodes=("here",), world_size=2))
    base = {**os.environ, "SLURM_TRAIN_RUN_DIR": str(run), "SLURM_TRAIN_ATTEMPT": str(attempt)}
    codes, text = finish([start_rank(run / "program.py", str(last), env=env) for env in rank_environments(2, base)])
    assert codes == [0, 0], text


def begin(run: Path, name: str) -> None:
    """Trains a run up to its stop."""
    if name == "program":
        train_program(run, last=STOPPED_AT)
    else:
        train(run, name, attempt=0, stops=True)


def go_on(run: Path, name: str, *, attempt: int) -> None:
    """Trains a run to its end."""
    if name == "program":
        train_program(run, last=LAST)
    else:
        train(run, name, attempt=attempt)


def losses_of(run: Path) -> list[tuple[int, float]]:
    """Returns number and loss of the steps that count."""
    return [(line["step"], line["loss"]) for line in read_metrics(run / "metrics.jsonl") if "loss" in line]


def weights_of(run: Path) -> dict[str, Any]:
    """Returns the tensors of the model in the newest checkpoint, which is that of the last step."""
    found = newest_verified(run / "checkpoints").newest
    assert found is not None and found[1].step == LAST
    return {name: tensor.tolist() for name, tensor in read_model(found[0])[1].items()}


def state_of(run: Path, step: int) -> dict[str, Any]:
    """Returns the tensors of a step's checkpoint: parameters and what their optimizers keep."""
    (path,) = [path for path in list_checkpoints(run / "checkpoints") if step_of(path) == step]
    described = read_metadata(path)
    tensors = {
        name: torch.empty(facts.size, dtype=facts.properties.dtype)
        for name, facts in described.state_dict_metadata.items()
        if isinstance(facts, TensorStorageMetadata)
    }
    load_tensors(path, tensors, described=described)
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def step_of(checkpoint: Path) -> int:
    """Returns the step of a checkpoint's directory."""
    name = parse_name(checkpoint.name)
    assert name is not None
    return name.step


@pytest.mark.distributed
@pytest.mark.parametrize("newest", [STOPPED_AT, 5])
@pytest.mark.parametrize("name", [*SECTIONS, "program"])
def test_a_stored_run_goes_on_with_the_same_bits(tmp_path: Path, name: str, newest: int) -> None:
    """From the save of its stop, and from the one that a thread has written while training went on."""
    with tarfile.open(STORED / f"{name}.tar.xz") as archive:
        # Python 3.11.2 has no filters.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path)
    run, today, whole = tmp_path / name, tmp_path / "today", tmp_path / "whole"
    assert [step for step, _ in losses_of(run)] == list(range(1, STOPPED_AT + 1))
    for checkpoint in list_checkpoints(run / "checkpoints"):
        if step_of(checkpoint) > newest:
            shutil.rmtree(checkpoint)
    for folder in (today, whole):
        folder.mkdir()
        if name == "program":
            shutil.copy(run / "program.py", folder)
            shutil.copy(run / "config.yaml", folder)
    begin(today, name)
    stored_state, state_today = state_of(run, newest), state_of(today, newest)
    assert stored_state.keys() == state_today.keys()
    go_on(run, name, attempt=1)
    go_on(whole, name, attempt=0)
    found, expected = losses_of(run), losses_of(whole)
    # Another kind of processor adds up in another order. From equal bits all others follow, on any.
    if stored_state == state_today:
        assert found == expected and weights_of(run) == weights_of(whole)
    else:
        assert found == [(step, pytest.approx(loss, rel=1e-4)) for step, loss in expected]


def make(name: str) -> None:
    """Makes an archive."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / name
        run.mkdir()
        if name == "program":
            from slurm_train.config.frozen import dump_config
            from slurm_train.config.schema import RunConfig

            (run / "program.py").write_text(PROGRAM)
            (run / "config.yaml").write_text(dump_config(RunConfig()))
        begin(run, name)
        with tarfile.open(STORED / f"{name}.tar.xz", "w:xz") as archive:
            archive.add(run, name)


if __name__ == "__main__":
    for wanted in [*SECTIONS, "program"]:
        if not (STORED / f"{wanted}.tar.xz").exists():
            make(wanted)
            sys.stderr.write(f"{wanted}\n")
