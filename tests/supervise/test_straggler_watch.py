"""Stragglers among real ranks: the one whose data come late is named while the run goes on, and a healthy run is not.

Ranks that compute longer, and whole nodes, are tried by the campaign `stragglers`.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from slurm_train.config.schema import RunConfig, build_config
from slurm_train.rundir.events import read_events
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.step_times import read_windows
from slurm_train.supervise.monitor import Monitor, straggler_watch
from tests.support.waiting import wait_for
from tests.support.warm_ranks import start_rank
from tests.train.test_trainer import RANK_PROGRAM, config_of

pytestmark = [pytest.mark.distributed, pytest.mark.faults]


def test_a_rank_whose_data_come_late_is_named_and_a_healthy_run_is_not(tmp_path: Path) -> None:
    run, late = RunDirectory(tmp_path / "run"), tmp_path / "late"
    run.path.mkdir()
    config = config_of(model={"step_s": 0.02}, max_steps=100_000, log_every_steps=1000)
    config |= {"data": {"_target_": "small_training.LateData", "late_while": str(late)}}
    config |= {"health": {"pace_every_steps": 2}}
    with socket.create_server(("127.0.0.1", 0)) as probe:
        orders = {"run": str(run.path), "config": config, "port": probe.getsockname()[1], "attempt": 0, "beats": True}
    env = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        start_rank(RANK_PROGRAM, json.dumps(orders), env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    watched, monitor = build_config(RunConfig, config), Monitor()
    try:
        monitor.add(straggler_watch(run, 0, config=watched, world_size=2, look_every_s=0.2, first_window_s=1.0))
        with monitor.running():
            wait_for(lambda: len(read_windows(run)) >= 3, within_s=120, what="windows of a healthy run")
            healthy = read_windows(run)
            late.touch()
            event = wait_for(lambda: read_events(run, "slow"), within_s=120, what="the finding")[0]
    finally:
        for rank in ranks:
            rank.kill()
    assert not any(window.findings for window in healthy), healthy
    assert healthy[-1].ranks[1].own_s > 0.02, "the forward pass sleeps so long"
    assert (event["kind"], event["ranks"]) == ("straggler", [1]), event
    assert event["sentence"].startswith(f"rank 1 on {os.uname().nodename} is "), event
    assert "because data come late" in event["sentence"], event
    assert event["advice"].startswith("read ahead with more workers: data.num_workers=N"), event
    window = next(window for window in read_windows(run) if window.findings)
    assert window.ranks[1].wait_s < window.ranks[0].wait_s, "whoever holds the others up waits least"
