"""What NVML says about the GPUs of this node, where nvidia-ml-py is installed (extra: gpu) and there is a driver.

Asked before any rank of ours touches a GPU, so all memory that is taken is somebody else's. A question that a GPU does
not know is no finding.
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
# Of Xid errors those that tell of hardware; the others are mostly a program's own.
_HARDWARE_XIDS = frozenset({48, 62, 64, 74, 79, 92, 95, 110, 119, 120, 140})
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<where>[^)]+)\): (?P<number>\d+)")
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
    names = []
    for word in (part.strip() for part in setting.split(",")):
        if not word or word == "-1" or word == "NoDevFiles":
            break
        names.append(word)
    return names


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
        count = int(nvml.nvmlDeviceGetCount())
        found = [_read(nvml, name) for name in (map(str, range(count)) if names is None else names)]
        if any(gpu.used_mb > _LEFTOVER_MB for gpu in found):
            found = _read_again(nvml, found)
        return found, count, _text(nvml.nvmlSystemGetDriverVersion())
    finally:
        nvml.nvmlShutdown()


def _read_again(nvml: Any, found: Sequence[GpuFacts]) -> list[GpuFacts]:
    # What an attempt before this one held is given back a moment after its processes have ended.
    deadline = time.monotonic() + _LEFTOVER_WAIT_S
    while any(gpu.used_mb > _LEFTOVER_MB for gpu in found) and time.monotonic() < deadline:
        time.sleep(0.2)
        found = [_read(nvml, gpu.name) for gpu in found]
    return list(found)


def _read(nvml: Any, name: str) -> GpuFacts:
    try:
        by_uuid = name.startswith(("GPU-", "MIG-"))
        handle = nvml.nvmlDeviceGetHandleByUUID(name) if by_uuid else nvml.nvmlDeviceGetHandleByIndex(int(name))
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except Exception as err:  # NVMLError of a lost GPU; its class is made at run time
        return GpuFacts(name=name, errors=[f"NVML cannot read it: {err}"])
    holders = _asked(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle), [])
    return GpuFacts(
        name=name,
        total_mb=int(memory.total) // _MIB,
        used_mb=int(memory.used) // _MIB,
        holders=[f"pid {one.pid} ({(one.usedGpuMemory or 0) // _MIB} MiB)" for one in holders],
        errors=_errors(nvml, handle),
        warnings=_warnings(nvml, handle),
    )


def _errors(nvml: Any, handle: Any) -> list[str]:
    found = []
    kinds = getattr(nvml, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", 1), getattr(nvml, "NVML_VOLATILE_ECC", 0)
    count = _asked(lambda: int(nvml.nvmlDeviceGetTotalEccErrors(handle, *kinds)), 0)
    if count:
        found.append(f"{count} uncorrected memory errors since it was started")
    rows = _asked(lambda: nvml.nvmlDeviceGetRemappedRows(handle), (0, 0, 0, 0))
    if rows[3]:
        found.append("its memory has no spare rows left")
    return found


def _warnings(nvml: Any, handle: Any) -> list[str]:
    reasons = _asked(lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)), 0)
    found = [text for bit, text in _SLOWDOWNS.items() if reasons & bit]
    rows = _asked(lambda: nvml.nvmlDeviceGetRemappedRows(handle), (0, 0, 0, 0))
    pages = _asked(lambda: int(nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle)), 0)
    if rows[2] or pages:
        found.append("faulty memory waits for a reset to be taken out of use")
    return found


def _asked(question: Callable[[], Any], otherwise: Any) -> Any:
    try:
        return question()
    except Exception:  # NVMLError_NotSupported and its kin, made at run time
        return otherwise


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def logged_errors(kernel_log: Path = Path("/dev/kmsg")) -> list[str]:
    """Returns hardware errors that the driver logged in the last day, where this user may read the kernel's log."""
    if not Path("/proc/driver/nvidia").exists() and kernel_log == Path("/dev/kmsg"):
        return []
    found: dict[str, None] = {}
    for line in _records(kernel_log):
        fields, _, text = line.partition(";")
        match = _XID.search(text)
        if match is not None and int(match["number"]) in _HARDWARE_XIDS and _is_recent(fields):
            found[f"Xid {match['number']} on {match['where']}"] = None
    return list(found)


def _is_recent(fields: str) -> bool:
    # "priority,sequence,microseconds since boot,flags"
    try:
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields.split(",")[2]) / 1e6
    except (IndexError, ValueError):
        return False
    return age_s < _RECENT_S


def _records(path: Path) -> list[str]:
    records: list[str] = []
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            # One record for each read; the end is EAGAIN, or nothing in an ordinary file.
            while data := os.read(descriptor, 8192):
                records += data.decode(errors="replace").splitlines()
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)
    return records
