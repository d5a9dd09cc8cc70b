"""The probe on real DDP: what it says of a rank that waits and of one that is waited for, and what it costs between."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slurm_train.rundir.heartbeat import Heartbeat, Pace
from slurm_train.train.metrics import PaceProbe
from tests.support.rank_pair import run_pair

# Rank 1 computes 30 ms longer in each step; each rank leaves its sums, by kind of DDP.
PROGRAM = """
import json, os, time, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from slurm_train.rundir.heartbeat import Heartbeat
from slurm_train.train.metrics import PaceProbe
dist.init_process_group("gloo")
rank = dist.get_rank()

def pace_of(kind):
    ddp = DistributedDataParallel(torch.nn.Linear(64, 64), static_graph=kind == "static")
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
    return pace.samples, pace.own_s / pace.samples, pace.wait_s / pace.samples

with open(os.environ["OUT"], "w") as file:
    json.dump({kind: pace_of(kind) for kind in ("plain", "static")}, file)
dist.barrier()
os._exit(0)
"""


@pytest.mark.distributed
def test_the_victim_waits_and_the_cause_does_not(tmp_path: Path) -> None:
    victims, causes = run_pair(tmp_path, PROGRAM)
    for kind, victim in victims.items():
        cause = causes[kind]
        assert victim[0] == cause[0] == 7, kind
        assert victim[2] > 0.025 and cause[1] > 0.03, kind
        assert cause[2] < 0.5 * victim[2] and victim[1] < 0.5 * cause[1], kind


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
