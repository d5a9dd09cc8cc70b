"""Checks of what lies around a training: the command line, NCCL's recorder, the choice of the device, NVML."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slurm_train.distributed.group import newest_collectives
from slurm_train.metrics import read_metrics
from slurm_train.rundir.files import read_json
from slurm_train.supervise.hang import read_flights, recording_environment
from slurm_train.train.metrics import peak_flops
from tests.gpu.catalogue import Stage, require
from tests.gpu.training import open_rank, sections_of

_STOPPED = 75


def cli_end_to_end(stage: Stage) -> dict[str, Any]:
    """`python -m slurm_train` trains on the GPU over NCCL, stops when asked, saves, resumes and finishes."""
    root, steps = stage.folder / "runs", stage.size(4000, 200)
    words = [
        *("model.width=64", "model.num_layers=2", "data.context=64", f"data.path={stage.folder / 'stdlib'}"),
        *(f"run.root={root}", "run.processes=1", f"train.max_steps={steps}", "train.log_every_steps=5"),
        *("train.evaluate=false", "train.sample_tokens=0", "checkpoint.every_steps=50", "batch.global_size=8"),
    ]
    env = {**os.environ, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(stage.folder / "nccl.%p")}
    process = subprocess.Popen([sys.executable, "-m", "slurm_train", *words], env=env, cwd=stage.folder)
    try:
        run = _await_steps(process, root, count=5, within_s=stage.size(180, 400))
        (run / "STOP").touch()
        code = process.wait(timeout=stage.size(120, 400))
    finally:
        process.kill()
    require(code == _STOPPED, f"the run was asked to stop and ended with exit code {code}")
    stopped_at = read_metrics(run / "metrics.jsonl")[-1]["step"]
    resumed = subprocess.run([sys.executable, "-m", "slurm_train", "resume", str(run)], env=env, cwd=stage.folder)
    require(resumed.returncode == 0, f"resume ended with exit code {resumed.returncode}")
    result, lines = read_json(run / "result.json") or {}, read_metrics(run / "metrics.jsonl")
    require(result.get("step") == steps, f"the result is of step {result.get('step')}, not {steps}")
    require({line["attempt"] for line in lines} == {0, 1}, "the second attempt did not continue the first")
    # An attempt may log the step that it stopped at again, never one before it.
    first = next(line["step"] for line in lines if line["attempt"] == 1)
    require(first > stopped_at - 5, f"resumed at step {first}, and had stopped at {stopped_at}")
    require(lines[-1]["loss"] < lines[0]["loss"], f"the loss went from {lines[0]['loss']} to {lines[-1]['loss']}")
    figures = {"stopped_at": stopped_at, "first_loss": lines[0]["loss"], "last_loss": lines[-1]["loss"]}
    if stage.on_gpu:
        logs = "".join(path.read_text(errors="replace") for path in stage.folder.glob("nccl.*"))
        require("Init COMPLETE" in logs, "NCCL's own log has no communicator")
        require(lines[-1]["mfu"] is not None, "metrics.jsonl has no mfu: the card's peak is not known")
    return {**figures, "steps_per_s": 1 / lines[-1]["step_time_s"]}


def _await_steps(process: subprocess.Popen[bytes], root: Path, *, count: int, within_s: float) -> Path:
    """Returns the run directory as soon as so many steps are logged."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        for metrics in root.glob("*/*/metrics.jsonl"):
            if any(line["step"] >= count for line in read_metrics(metrics)):
                return metrics.parent
        require(process.poll() is None, f"the run ended with exit code {process.returncode} before step {count}")
        time.sleep(0.05)
    raise TimeoutError(f"no step {count} within {within_s:.0f} s")


def flight_is_nccl(stage: Stage) -> dict[str, Any]:
    """What the hang sentence is made of has NCCL's collectives, under its groups and with their numbers."""
    os.environ.update(recording_environment(torch.__version__))
    rank = open_rank(sections_of(), stage.folder / "run")
    values = torch.ones(1000, device=rank.device)
    for _ in range(8):
        dist.all_reduce(values)
    stage.sync()
    # NCCL's watchdog thread notes what is over.
    deadline, found = time.monotonic() + 20, {}
    backend = stage.size("nccl", "gloo")
    while time.monotonic() < deadline:
        found = read_flights(newest_collectives() or b"[]")
        done = [flight for key, flight in found.items() if key.startswith(backend) and flight.last_ended == 8]
        if done:
            require(done[0].newest[-1].name == "all_reduce" and done[0].newest[-1].elements == 1000, str(done[0]))
            return {"groups": len(found), "begun": done[0].last_begun}
        time.sleep(0.2)
    raw = (newest_collectives() or b"").decode()[:1500]
    require(False, f"no group of {backend} has 8 collectives that are over: {found}; recorded: {raw}")
    return {}


_CHOICE = """
import os, sys
import torch
from slurm_train.distributed.group import choose_device
from tests.support.ranks import make_rank
if sys.argv[1] == "refuse":
    torch.cuda.is_available = lambda: False
device = choose_device(make_rank().place, os.environ)
print(device, torch.cuda.current_device() if device.type == "cuda" else "")
"""


def device_choice(stage: Stage) -> dict[str, Any]:
    """A rank takes the device that CUDA_VISIBLE_DEVICES names, the CPU where it names none, and never by accident."""

    def choose(visible: str | None, *, how: str = "take") -> tuple[int, str]:
        env = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
        env |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        words = [sys.executable, "-c", _CHOICE, how]
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
        return done.returncode, (done.stdout or done.stderr).strip()

    require(choose("") == (0, "cpu"), f"without devices: {choose('')}")
    if not stage.on_gpu:
        return {"tried": 1}
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    for visible in (None, "0", uuid):
        code, text = choose(visible)
        require((code, text) == (0, "cuda:0 0"), f"CUDA_VISIBLE_DEVICES={visible}: {text}")
    code, text = choose("0", how="refuse")
    has_files = bool(list(Path("/dev").glob("nvidia[0-9]*")))
    # A sandbox may hide the driver's files; then nothing tells a GPU that torch cannot use from none.
    require(not has_files or (code and "finds no GPU" in text), f"trains on the CPU of a GPU node: {text}")
    return {"tried": 4, "refused": bool(code), "driver_files": has_files}


def nvml(stage: Stage) -> dict[str, Any]:
    """NVML gives memory, power, temperature and clocks; the peak of this card is in the table."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    name = pynvml.nvmlDeviceGetName(handle)
    name = name.decode() if isinstance(name, bytes) else name
    facts = {
        "name": name,
        "memory_gb": pynvml.nvmlDeviceGetMemoryInfo(handle).total / 1e9,
        "power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "temperature_c": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        "sm_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "max_sm_clock_mhz": pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "peak_tflops": (peak_flops(stage.device) or 0.0) / 1e12,
    }
    require(facts["peak_tflops"] > 0, f"train/metrics.py has no peak for {torch.cuda.get_device_name(0)}")
    require(json.loads(json.dumps(facts)) == facts, "facts are not plain")
    return facts
