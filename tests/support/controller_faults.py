"""Faults of the test cluster's controller, and settings of it that a test needs, all undone afterwards."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from slurm_train.tools.devcluster.daemons import daemon_process, start_daemon
from slurm_train.tools.devcluster.plan import ClusterPlan
from tests.support.waiting import wait_for


@contextmanager
def controller_away(plan: ClusterPlan) -> Iterator[None]:
    """Kills slurmctld and starts it again at the end."""
    record = daemon_process(plan, "slurmctld")
    assert record is not None and record.is_alive(), "no slurmctld"
    os.kill(record.pid, signal.SIGKILL)
    wait_for(lambda: not record.is_alive(), within_s=10, what="the end of slurmctld")
    try:
        yield
    finally:
        start_daemon(plan, "slurmctld")


@contextmanager
def kill_wait(plan: ClusterPlan, seconds: int) -> Iterator[None]:
    """Gives what Slurm ends more time before it is killed; most sites have Slurm's default of 30 s."""
    before = plan.slurm_conf.read_text()
    try:
        _configure(plan, re.sub(r"(?m)^KillWait=.*$", f"KillWait={seconds}", before))
        yield
    finally:
        _configure(plan, before)


def _configure(plan: ClusterPlan, text: str) -> None:
    plan.slurm_conf.write_text(text)
    subprocess.run(["scontrol", "reconfigure"], check=True, timeout=60)


@contextmanager
def extra_qos(settings: Mapping[str, str]) -> Iterator[None]:
    """Adds QOS that `urgent` preempts and everybody may use, e.g. {"nograce": "gracetime=0 preemptmode=requeue"}."""
    names = ",".join(settings)
    try:
        for name, words in settings.items():
            _sacctmgr("add", "qos", name)
            _sacctmgr("modify", "qos", name, "set", *words.split())
        _sacctmgr("modify", "qos", "urgent", "set", f"preempt=normal,{names}")
        _sacctmgr("modify", "account", "dev", "set", f"qos+={names}")
        yield
    finally:
        _sacctmgr("modify", "qos", "urgent", "set", "preempt=normal")
        _sacctmgr("modify", "account", "dev", "set", f"qos-={names}")
        _sacctmgr("delete", "qos", names)


def _sacctmgr(*words: str) -> None:
    done = subprocess.run(
        ["sacctmgr", "--immediate", "--quiet", *words], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
