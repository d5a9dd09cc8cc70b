"""Calls of W&B by a program whose W&B process gets the stop signal as well: the library itself, without a network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")

PROGRAM = """
import os, signal, subprocess, sys
import wandb
from slurm_train.session.signals import StopFlag, install
from slurm_train.session.wandb_calls import guard_calls

stop = StopFlag()
install(stop)
order, ends = sys.argv[1:]
if order == "before":
    guard_calls(stop)
run = wandb.init(project="p", mode="offline", settings=wandb.Settings(silent=True))
guard_calls(stop)
wandb.log({"loss": 1.0}, step=1)
processes = subprocess.run(["ps", "-wweo", "pid,ppid,args"], capture_output=True, text=True).stdout
(core,) = (line for line in processes.splitlines() if line.split()[1] == str(os.getpid()) and "wandb-core" in line)
os.kill(int(core.split()[0]), signal.SIGTERM)
if ends == "stop":
    os.kill(os.getpid(), signal.SIGTERM)
try:
    for step in range(2, 200):
        wandb.log({"loss": 1.0}, step=step)
        run.log({"lr": 1.0}, step=step)
    run.finish()
except Exception as err:
    print("raised", type(err).__name__, flush=True)
    os._exit(0)
print("went on")
sys.stdout.flush()
sys.exit(75)
"""


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_program_goes_on_to_its_save_where_a_stop_has_ended_the_process_of_wandb(order: str, tmp_path: Path) -> None:
    done = run(tmp_path, order, "stop")
    assert (done.stdout, done.returncode) == ("went on\n", 75), done.stderr
    # The process may live on for some calls after its signal.
    assert re.search("W&B's process was ended by the stop signal, (log|finish) does nothing", done.stderr)


def test_other_errors_of_wandb_are_raised(tmp_path: Path) -> None:
    assert run(tmp_path, "before", "crash").stdout.startswith("raised ")


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(PROGRAM)
    return subprocess.run(
        [sys.executable, "program.py", *words], cwd=folder, capture_output=True, text=True, timeout=120
    )
