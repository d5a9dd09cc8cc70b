"""The probe on real DDP: what it says of a rank that waits and of one that is waited for, and what it costs between."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slurm_train.rundir.heartbeat import Heartbeat
from slurm_train.rundir.pace import Pace
from slurm_train.train.pace import PaceProbe

# Rank 1 computes 30 ms longer in each step; each rank prints its sums.
PROGRAM = """
import os, sys, time, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from slurm_train.rundir.heartbeat import Heartbeat
from slurm_train.train.pace import PaceProbe
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
static = sys.argv[1] == "static"
ddp = DistributedDataParallel(torch.nn.Linear(64, 64), static_graph=static)
heart = Heartbeat()
probe = PaceProbe(ddp, heart, every=5, data_wait_s=lambda: 0.0, on_device=False)
for _ in range(40):
    probe.begin()
    loss = ddp(torch.ones(8, 64)).sum()
    time.sleep(0.03 * rank)
    loss.backward()
    ddp.zero_grad(set_to_none=True)
    probe.end()
pace = heart.pace
print(pace.samples, pace.own_s / pace.samples, pace.wait_s / pace.samples, flush=True)
dist.barrier()
os._exit(0)
"""


def paces_of_two(kind: str) -> list[list[float]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, kind], env={**env, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    texts = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return [[float(word) for word in text.split()] for text in texts]


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["plain", "static"])
def test_the_victim_waits_and_the_cause_does_not(kind: str) -> None:
    victim, cause = paces_of_two(kind)
    assert victim[0] == cause[0] == 7
    assert victim[2] > 0.025 and cause[1] > 0.03
    assert cause[2] < 0.5 * victim[2] and victim[1] < 0.5 * cause[1]


@pytest.fixture
def ddp(group_of_one: None) -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(4, 4))


def steps(ddp: DistributedDataParallel, probe: PaceProbe, number: int) -> None:
    for _ in range(number):
        probe.begin()
        ddp(torch.ones(2, 4)).sum().backward()
        probe.end()


def make_probe(ddp: DistributedDataParallel, heart: Heartbeat, every: object) -> PaceProbe:
    return PaceProbe(ddp, heart, every=every, data_wait_s=lambda: 0.0, on_device=False)  # type: ignore[arg-type]


def test_a_sample_is_taken_every_so_many_steps(ddp: DistributedDataParallel) -> None:
    heart = Heartbeat()
    steps(ddp, make_probe(ddp, heart, 7), 71)
    assert heart.pace.samples == 10
    assert heart.pace.own_s > 0 and heart.pace.own_squared > 0


def test_auto_looks_at_fast_steps_once_in_64(ddp: DistributedDataParallel) -> None:
    heart = Heartbeat()
    steps(ddp, make_probe(ddp, heart, "auto"), 140)
    # The very first step may be long enough for another look at once.
    assert 2 <= heart.pace.samples <= 4


def test_nothing_is_measured_where_it_is_switched_off(ddp: DistributedDataParallel) -> None:
    heart = Heartbeat()
    steps(ddp, make_probe(ddp, heart, None), 20)
    assert heart.pace == Pace()


def test_a_step_between_samples_costs_less_than_two_microseconds(ddp: DistributedDataParallel) -> None:
    probe = make_probe(ddp, Heartbeat(), None)

    def cost_s() -> float:
        start = time.perf_counter()
        for _ in range(10_000):
            probe.begin()
            probe.end()
        return (time.perf_counter() - start) / 10_000

    assert min(cost_s() for _ in range(20)) < 2e-6
