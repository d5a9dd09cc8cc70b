"""What NVML says about the GPUs of this node, where nvidia-ml-py is installed (extra: gpu) and there is a driver.

Asked before any rank of ours uses a GPU, so all memory that is taken is another program's. A question that a GPU does
not support is no finding.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slurm_train.tools.doctor.facts import GpuFacts

_MIB = 1 << 20
# The Xid errors that are about hardware; the others are mostly a program's own.
_HARDWARE_XIDS = {"48", "62", "64", "74", "79", "92", "95", "110", "119", "120", "140"}
# A record is "priority,sequence,microseconds since boot,flags;text".
_XID = re.compile(r"\d+,\d+,(?P<at_us>\d+),.*?;.*NVRM: Xid \((?:PCI:)?(?P<where>[^)]+)\): (?P<number>\d+)")
_RECENT_S = 86400.0
_LEFTOVER_WAIT_S = 3.0
_LEFTOVER_MB = 2048
_SLOWDOWNS = {
    0x08: "slowed down by its hardware (power or heat)",
    0x40: "slowed down by heat",
    0x80: "slowed down by the power supply (external brake)",
}


def visible_gpus(setting: str | None) -> list[str] | None:
    """Returns the devices of CUDA_VISIBLE_DEVICES, None where it is not set; CUDA stops at the first that is none."""
    if setting is None:
        return None
    names = [part.strip() for part in setting.split(",")]
    end = next((index for index, name in enumerate(names) if name in ("", "-1", "NoDevFiles")), len(names))
    return names[:end]


def read_gpus(names: Sequence[str] | None) -> tuple[list[GpuFacts] | None, int | None, str]:
    """Returns the GPUs of this job on this node, how many NVML counts, and the driver's version.

    Args:
        names: what `visible_gpus` gave; None: all.

    Returns:
        (None, None, "") where there is no NVML.
    """
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except Exception:  # no package, no driver, or one that does not answer: each with an error class of its own
        return None, None, ""
    try:
        count, deadline = int(nvml.nvmlDeviceGetCount()), time.monotonic() + _LEFTOVER_WAIT_S
        wanted = list(map(str, range(count))) if names is None else names
        found = [_read(nvml, name) for name in wanted]
        # What the attempt before this one held is freed a moment after its processes have ended.
        while any(gpu.used_mb > _LEFTOVER_MB for gpu in found) and time.monotonic() < deadline:
            time.sleep(0.2)
            found = [_read(nvml, name) for name in wanted]
        driver = nvml.nvmlSystemGetDriverVersion()
        return found, count, driver.decode() if isinstance(driver, bytes) else driver
    finally:
        nvml.nvmlShutdown()


def _read(nvml: Any, name: str) -> GpuFacts:
    try:
        by_uuid = name.startswith(("GPU-", "MIG-"))
        handle = nvml.nvmlDeviceGetHandleByUUID(name) if by_uuid else nvml.nvmlDeviceGetHandleByIndex(int(name))
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except Exception as err:  # NVMLError of a lost GPU; its class is made at run time
        return GpuFacts(name=name, errors=[f"NVML cannot read it: {err}"])

    def ask(question: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return question()
        except Exception:  # NVMLError_NotSupported and its kin, made at run time
            return otherwise

    kinds = getattr(nvml, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", 1), getattr(nvml, "NVML_VOLATILE_ECC", 0)
    holders = ask(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle), [])
    num_errors = ask(lambda: int(nvml.nvmlDeviceGetTotalEccErrors(handle, *kinds)), 0)
    _, _, is_pending, has_no_spare = ask(lambda: nvml.nvmlDeviceGetRemappedRows(handle), (0, 0, 0, 0))
    pages = ask(lambda: int(nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle)), 0)
    reasons = ask(lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)), 0)
    errors = {
        f"{num_errors} uncorrected memory errors since it was started": num_errors,
        "its memory has no spare rows left": has_no_spare,
    }
    warnings = {text: reasons & bit for bit, text in _SLOWDOWNS.items()}
    warnings["faulty memory waits for a reset to be taken out of use"] = is_pending or pages
    return GpuFacts(
        name=name,
        total_mb=int(memory.total) // _MIB,
        used_mb=int(memory.used) // _MIB,
        holders=[f"pid {one.pid} ({(one.usedGpuMemory or 0) // _MIB} MiB)" for one in holders],
        errors=[text for text, is_so in errors.items() if is_so],
        warnings=[text for text, is_so in warnings.items() if is_so],
    )


def logged_errors(kernel_log: Path = Path("/dev/kmsg")) -> list[str]:
    """Returns hardware errors that the driver logged in the last day, where this user may read the kernel's log."""
    if kernel_log == Path("/dev/kmsg") and not Path("/proc/driver/nvidia").exists():
        return []
    found: dict[str, None] = {}
    for match in filter(None, map(_XID.match, _records(kernel_log))):
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(match["at_us"]) / 1e6
        if match["number"] in _HARDWARE_XIDS and age_s < _RECENT_S:
            found[f"Xid {match['number']} on {match['where']}"] = None
    return list(found)


def _records(path: Path) -> list[str]:
    records: list[str] = []
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            # One record for each read; the end is EAGAIN, or nothing in an ordinary file.
            while data := os.read(descriptor, 8192):
                records += data.decode(errors="replace").splitlines()
        finally:
            os.close(descriptor)
    return records
