"""How fast the GPUs of one node are: a program of its own, since it needs torch, which the preflight does not import.

`python -m slurm_train.tools.doctor.gpu_speed` prints one line of JSON: of each visible GPU a matrix product in bfloat16
and a copy within its memory, of all of them together NCCL's all_reduce, and what DCGM's short diagnosis finds where it
is installed. The rules compare; here nothing is judged.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

_PRODUCT_SIZE = 8192
_COPY_BYTES = 1 << 30
_REDUCED_BYTES = 1 << 28
_ROUNDS = 10
_DIAGNOSIS_S = 40.0


def read_speeds(*, timeout_s: float) -> dict[str, Any]:
    """Returns what the program prints, {"error": ...} where it does not come to an end; imports no torch.

    Args:
        timeout_s: seconds that it may take, torch's import included.
    """
    words = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s)
        speeds: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"the measurement of its GPUs was not done within {timeout_s:.0f} s"}
    except (IndexError, ValueError):
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"error": f"its GPUs could not be measured: {reason[:200]}"}
    return speeds


def measure(*, rounds: int = _ROUNDS) -> dict[str, Any]:
    """Returns the speeds of all visible GPUs, as plain values; needs torch and a GPU.

    A first product warms a GPU up; the quickest of the rounds counts, since a clock rises in the first of them.
    """
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        matrix = torch.randn(_PRODUCT_SIZE, _PRODUCT_SIZE, device=device, dtype=torch.bfloat16)
        product = torch.empty_like(matrix)
        product_s = _quickest(lambda a=matrix, out=product: torch.mm(a, a, out=out), [device], rounds)
        source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copy_s = _quickest(lambda a=source, out=target: out.copy_(a), [device], rounds)
        gpus.append(
            {
                "name": str(index),
                "kind": torch.cuda.get_device_name(device),
                "tflops": round(2 * _PRODUCT_SIZE**3 / product_s / 1e12, 1),
                # Each byte is read and written.
                "copy_gb_per_s": round(2 * _COPY_BYTES / copy_s / 1e9, 1),
            }
        )
    return {"gpus": gpus, "all_reduce_gb_per_s": _all_reduce(len(gpus), rounds), "diagnosis": diagnose()}


def _all_reduce(num_gpus: int, rounds: int) -> float | None:
    """Returns the bytes per second that NCCL moves on the busiest link ("bus bandwidth"), None for one GPU."""
    import torch

    if num_gpus < 2:
        return None
    devices = [torch.device("cuda", index) for index in range(num_gpus)]
    values = [torch.ones(_REDUCED_BYTES // 4, device=device) for device in devices]
    all_reduce: Any = torch.cuda.nccl.all_reduce
    took_s = _quickest(lambda: all_reduce(values), devices, rounds)
    return round(2 * (num_gpus - 1) / num_gpus * _REDUCED_BYTES / took_s / 1e9, 1)


def _quickest(work: Any, devices: list[Any], rounds: int) -> float:
    import time

    import torch

    def wait() -> None:
        for device in devices:
            torch.cuda.synchronize(device)

    times_s = []
    for _ in range(rounds + 1):
        wait()
        began_s = time.perf_counter()
        work()
        wait()
        times_s.append(time.perf_counter() - began_s)
    return min(times_s[1:])


def diagnose() -> str:
    """Returns what DCGM's short diagnosis finds, "" where it finds nothing, or is not installed or not allowed."""
    program = shutil.which("dcgmi")
    if program is None:
        return ""
    try:
        words = [program, "diag", "-r", "1", "-j"]
        text = subprocess.run(words, capture_output=True, text=True, timeout=_DIAGNOSIS_S).stdout
        return "; ".join(dict.fromkeys(failures_of(json.loads(text))))
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return ""


def failures_of(report: Any, test: str = "") -> Iterator[str]:
    """Yields what failed in DCGM's JSON, e.g. "Memory of GPU 3 failed"; releases nest the tests differently.

    Args:
        report: the document, or a part of it.
        test: name of the test that the part belongs to.
    """
    if isinstance(report, list):
        for part in report:
            yield from failures_of(part, test)
    elif isinstance(report, dict):
        test = str(report.get("name", test))
        number = report.get("gpu_id", report.get("gpu_ids", report.get("entity_id")))
        if str(report.get("status", "")).lower() == "fail" and number is not None:
            yield f"{test} of GPU {number} failed"
        for part in report.values():
            yield from failures_of(part, test)


if __name__ == "__main__":
    print(json.dumps(measure()))
