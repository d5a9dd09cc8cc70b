"""Gathers what a rank reports of itself, and the first rank of a node of its node.

Reads /proc, sockets, files and, where nvidia-ml-py is installed (extra: gpu) and there is a driver, NVML, within a
second or two; imports neither torch nor what it asks versions of. NVML is asked before any rank of ours uses a GPU, so
all memory that is taken is another program's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import platform
import re
import resource
import shutil
import socket
import string
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import xxhash

from slurm_train import __version__
from slurm_train.code import snapshot
from slurm_train.code.imports import own_paths
from slurm_train.code.provenance import read_gpu_software
from slurm_train.config.data_kinds import PREPARED, kind_of
from slurm_train.config.program import program_of
from slurm_train.config.schema import RunConfig
from slurm_train.data.check import known_fingerprint
from slurm_train.data.shards import check_sizes, read_index
from slurm_train.distributed.interfaces import interface_addresses, table_rows
from slurm_train.distributed.place import RankPlace
from slurm_train.distributed.rendezvous import addresses_of
from slurm_train.errors import DataError
from slurm_train.rundir.node_disk import compile_obstacles
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.devices import installed_gpus, visible_gpus
from slurm_train.slurm.limits import read_limits
from slurm_train.slurm.pack_slot import PackSlot
from slurm_train.tools.doctor.facts import DiskFacts, GpuFacts, NodeFacts, RankFacts

_MIB = 1 << 20
# A snapshot may have 100 MB on a busy file system: sources are hashed first, until this time is over.
_HASHING_S = 1.0
_LONGEST_LIST = 20
_PATH_KEY = re.compile(r"(.*_)?(path|root|dir|folder|directory|file)")
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


def read_rank(place: RankPlace, env: Mapping[str, str]) -> RankFacts:
    """Returns what this rank knows of itself."""
    task = env.get("SLURM_PROCID", "")
    names = visible_gpus(env)
    # Where each task is bound to a single GPU, Slurm knows how many its step has on the node.
    on_node = env.get("SLURM_GPUS_ON_NODE", "")
    of_step = int(on_node) if on_node.isdigit() and len(names or ()) == 1 else 0
    # A task prolog may remove the vendor's variable; Slurm's own stay.
    is_unnamed = names is None and "SLURM_STEP_ID" in env and not on_node and "SLURM_STEP_GPUS" not in env
    locked = _soft_limit(resource.RLIMIT_MEMLOCK)
    return RankFacts(
        rank=place.rank,
        local_rank=place.local_rank,
        world_size=place.world_size,
        local_world_size=place.local_world_size,
        node=place.host,
        slurm_rank=int(task) if task.isdigit() and "SLURM_STEP_ID" in env else None,
        visible_gpus=None if names is None else max(len(names), of_step),
        unnamed_gpus=len(installed_gpus()) if is_unnamed else None,
        cpus=sorted(os.sched_getaffinity(0)),
        max_open_files=_soft_limit(resource.RLIMIT_NOFILE),
        max_locked_mb=None if locked is None else locked // _MIB,
        limits=dict(read_limits()),
    )


def _soft_limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def read_node(
    run: RunDirectory,
    config: RunConfig,
    place: RankPlace,
    env: Mapping[str, str],
    *,
    num_nodes: int,
    peer: str,
    probe_port: int,
) -> NodeFacts:
    """Returns what the first rank of a node knows of the node.

    Args:
        run: the run.
        config: its configuration, as read here.
        place: this rank.
        env: its environment.
        num_nodes: of the run.
        peer: host name of another node, which decides the route: rank 0's, or any as seen from there.
        probe_port: where this node answers probes.
    """
    slot = PackSlot.from_env(env)
    are_shared = slot is not None and slot.num_gpus is not None
    gpus, num_gpus, driver = read_gpus(visible_gpus(env), are_shared=are_shared)
    return NodeFacts(
        node=place.host,
        node_rank=place.node_rank,
        num_cpus=os.cpu_count() or 0,
        load=os.getloadavg()[0],
        versions=read_versions(driver=driver),
        probe_port=probe_port,
        **read_network(place, env, peer=peer),
        **read_files(run, config, directory=Path.cwd(), node=(place.node_rank, num_nodes)),
        disks=read_disks(run, config, env),
        gpus=gpus,
        num_gpus=num_gpus,
        gpu_errors=logged_errors(),
        compile_obstacles=read_compile_obstacles(config, env),
        # A container has none, and the supervisor, who calls it, is outside.
        lacks_scontrol="SLURM_JOB_ID" in env and config.container is None and shutil.which("scontrol") is None,
    )


def read_compile_obstacles(
    config: RunConfig, env: Mapping[str, str], *, devices: Path = Path("/dev"), sys: Path = Path("/sys")
) -> list[str]:
    """Returns why torch cannot compile here; nothing where it can or the run does not compile.

    Args:
        config: the run's.
        env: environment of a rank.
        devices: where the drivers have their files.
        sys: where the kernel shows its devices.
    """
    # Slurm's variables may name devices that are only pretended.
    on_gpu = bool(visible_gpus(env)) and bool(installed_gpus(devices=devices, sys=sys))
    compiles = program_of(config).used.train.compiles(on_gpu=on_gpu)
    return compile_obstacles(env, on_gpu=on_gpu) if compiles else []


def read_versions(*, driver: str = "") -> dict[str, str]:
    """Returns name -> version for python, torch, nccl, cuda, driver and this package; what is not here is left out.

    Args:
        driver: the GPU driver's version if NVML gave it.
    """
    software = read_gpu_software(own_paths())
    versions = {**software, "slurm_train": __version__, "python": platform.python_version()}
    versions["driver"] = driver or software["driver"]
    for package in ("torch", "nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        with contextlib.suppress(metadata.PackageNotFoundError, KeyError, ValueError):
            versions["torch" if package == "torch" else "nccl"] = metadata.version(package)
    return {name: version for name, version in versions.items() if version}


# The network.


def read_network(place: RankPlace, env: Mapping[str, str], *, peer: str) -> dict[str, Any]:
    """Returns how this node is reached, by the names of `NodeFacts`; `peer` as in `read_node`."""
    if not place.spans_nodes:
        return {"address": "127.0.0.1"}
    addresses = interface_addresses()
    own_name = socket.gethostname()
    towards, _ = resolve(peer)
    interface, address = route_to(towards[0], addresses) if towards else ("", "")
    # Rank 0's node is reached where it was chosen to be, whatever its route to the others is.
    chosen = env.get("MASTER_ADDR", "") if place.is_first else ""
    if chosen not in ("", place.host):
        by_address = {own: name for name, own in addresses.items()}
        own_address = next((found for found in resolve(chosen)[0] if found in by_address), address)
        interface, address = by_address.get(own_address, interface), own_address
    if interface == "" and len(addresses) == 1:
        # Whatever this node takes for its peer's address, there is but one way out of it.
        ((interface, address),) = addresses.items()
    return {
        "addresses": addresses,
        "interface": interface,
        "address": address,
        "own_name": own_name,
        "own_addresses": resolve(own_name)[0],
        "gloo_interface": env.get("GLOO_SOCKET_IFNAME", ""),
        "nccl_interface": env.get("NCCL_SOCKET_IFNAME", ""),
        "has_infiniband": any(Path("/sys/class/infiniband").glob("*")),
        "link_mbit_per_s": link_speed_mbit(interface),
    }


def resolve(name: str) -> tuple[list[str], str]:
    """Returns the addresses of a name as seen from here, IPv4 first, and why there are none."""
    try:
        return addresses_of(name), ""
    except OSError as err:
        return [], str(err.strerror or err)


def route_to(address: str, addresses: Mapping[str, str]) -> tuple[str, str]:
    """Returns interface and own address of the route to another machine, ("", "") where there is none.

    Args:
        address: of the other machine.
        addresses: what `interface_addresses` gave.
    """
    try:
        # Connecting a datagram socket sends nothing; the kernel chooses the route.
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.connect((address, 9))
            own_address = str(asking.getsockname()[0])
    except OSError:
        return "", ""
    by_address = next((name for name, candidate in addresses.items() if candidate == own_address), "")
    return by_address or _interface_in_table(address), own_address


def _interface_in_table(address: str) -> str:
    """Returns the interface of the longest IPv4 route that holds an address; for second addresses of an interface."""
    if ":" in address:
        return ""
    wanted = int.from_bytes(socket.inet_aton(address), "little")
    best = (-1, "")
    for name, target, *fields in table_rows("/proc/net/route")[1:]:
        mask = int(fields[5], 16)
        if wanted & mask == int(target, 16):
            best = max(best, (mask.bit_count(), name), key=lambda pair: pair[0])
    return best[1]


def link_speed_mbit(interface: str) -> int | None:
    """Returns the nominal speed of an interface, None where it has none (virtual ones, many InfiniBand ones)."""
    try:
        speed = int(Path("/sys/class/net", interface, "speed").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return speed if speed > 0 else None


# Files and disks.


def read_files(
    run: RunDirectory,
    config: RunConfig,
    *,
    directory: Path,
    node: tuple[int, int] = (0, 1),
    hashing_s: float = _HASHING_S,
) -> dict[str, Any]:
    """Returns what this node sees of the run, by the names of `NodeFacts`.

    Args:
        run: the run.
        config: its configuration, as read here.
        directory: what relative paths of the data start from.
        node: its number, and how many there are; they share the look at very many files of data.
        hashing_s: seconds that the code's files may take.
    """
    files = snapshot.read_index(run) or {}
    changes = _code_changes(run.code, files, hashing_s)
    data = program_of(config).used.data or {}
    paths = _data_paths(data)
    missing = [f"{path} is not there" for path in paths if not path.exists()]
    if kind_of(data) is PREPARED:
        try:
            path = directory / Path(str(data.get("path"))).expanduser()
            check_sizes(path, read_index(path), node=node[0], nodes=node[1])
        except DataError as err:
            missing = [err.message]
    hashes = {
        # Changed files are named one by one, whatever the list says.
        "code": _digest(files) if files and not changes else None,
        "config": _digest(snapshot.index_code(run.path.joinpath, [run.config.name, run.plan.name])),
        "data": known_fingerprint(data, cwd=directory),
    }
    return {
        "hashes": {name: value for name, value in hashes.items() if value},
        "code_changes": changes,
        "data_missing": missing,
        "data_empty": [str(path) for path in paths if _is_empty(path)],
    }


def _code_changes(code: Path, files: Mapping[str, str], hashing_s: float) -> list[str]:
    deadline = time.monotonic() + hashing_s
    changes = list[str]()
    for name in sorted(files, key=lambda name: (not name.endswith(".py"), name)):
        if time.monotonic() > deadline or len(changes) >= _LONGEST_LIST:
            break
        content = snapshot.index_code(code.joinpath, [name]).get(name)
        if content != files[name]:
            changes.append(name if content else f"{name} (gone)")
    return changes


def _digest(hashes: Mapping[str, str]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(hashes, sort_keys=True).encode())


def _data_paths(data: Mapping[str, Any]) -> list[Path]:
    """Returns what is a path for certain; "train" or "openwebtext" may be the name of anything."""
    if str(data.get("_target_", "")).startswith("slurm_train."):
        return []  # made on demand, or checked with more knowledge
    named = [value for key, value in data.items() if _PATH_KEY.fullmatch(key) and isinstance(value, str)]
    return [Path(value).expanduser() for value in named if value.startswith(("/", "~"))]


def _is_empty(path: Path) -> bool:
    try:
        return not any(path.iterdir())
    except OSError:
        return False


def read_disks(run: RunDirectory, config: RunConfig, env: Mapping[str, str]) -> list[DiskFacts]:
    """Returns the places that ranks of this node write to, each after a small file was written and removed."""
    places = {"run directory": str(run.checkpoints)}
    if config.checkpoint.local_dir is not None:
        places["checkpoint.local_dir"] = string.Template(config.checkpoint.local_dir).safe_substitute(env)
    places |= {"temporary files": tempfile.gettempdir(), "shared memory": "/dev/shm"}
    return [_read_disk(role, path) for role, path in places.items()]


def _read_disk(role: str, path: str) -> DiskFacts:
    facts: dict[str, Any] = {}
    error = _try_to_write(Path(path))
    try:
        room = os.statvfs(path)
        facts = {"free_mb": room.f_bavail * room.f_frsize // _MIB, "total_mb": room.f_blocks * room.f_frsize // _MIB}
        # Some file systems count no inodes.
        facts["free_inodes"] = room.f_favail if room.f_files else None
    except OSError as err:
        error = error or err
    if error is not None:
        facts["error"] = error.strerror or str(error)
        facts["is_full"] = error.errno in (errno.ENOSPC, errno.EDQUOT)
        facts["is_readonly"] = error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)
    return DiskFacts(role=role, path=path, **facts)


def _try_to_write(folder: Path) -> OSError | None:
    path = folder / f".preflight_{os.uname().nodename}_{os.getpid()}"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.write(descriptor, bytes(4096))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as err:
        return err
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    return None


# GPUs. A question that a GPU does not support is no finding.


def read_gpus(
    names: Sequence[str] | None, *, are_shared: bool = False
) -> tuple[list[GpuFacts] | None, int | None, str]:
    """Returns the GPUs of this job on this node, how many NVML counts, and the driver's version.

    Args:
        names: what `visible_gpus` gave; None: all.
        are_shared: other runs of the job use them, too (`sweep.runs_per_gpu`): what these hold is nothing left over.

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
        deadline = time.monotonic() + _LEFTOVER_WAIT_S
        wanted = list(map(str, range(count))) if names is None else names
        gpus = [_read(nvml, name) for name in wanted]
        if are_shared:
            gpus = [dataclasses.replace(gpu, used_mb=0, holders=[]) for gpu in gpus]
        # What the attempt before this one held is freed a moment after its processes have ended.
        while any(gpu.used_mb > _LEFTOVER_MB for gpu in gpus) and time.monotonic() < deadline:
            time.sleep(0.2)
            gpus = [_read(nvml, name) for name in wanted]
        driver = nvml.nvmlSystemGetDriverVersion()
        return gpus, count, driver.decode() if isinstance(driver, bytes) else driver
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

    uncorrected = getattr(nvml, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", 1)
    since_start = getattr(nvml, "NVML_VOLATILE_ECC", 0)
    holders = ask(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle), [])
    num_errors = ask(lambda: int(nvml.nvmlDeviceGetTotalEccErrors(handle, uncorrected, since_start)), 0)
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
        holders=[f"pid {holder.pid} ({(holder.usedGpuMemory or 0) // _MIB} MiB)" for holder in holders],
        errors=[text for text, is_so in errors.items() if is_so],
        warnings=[text for text, is_so in warnings.items() if is_so],
    )


def logged_errors(kernel_log: Path = Path("/dev/kmsg")) -> list[str]:
    """Returns hardware errors that the driver logged in the last day, where this user may read the kernel's log."""
    if kernel_log == Path("/dev/kmsg") and not Path("/proc/driver/nvidia").exists():
        return []
    errors: dict[str, None] = {}
    for match in filter(None, map(_XID.match, _records(kernel_log))):
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(match["at_us"]) / 1e6
        if match["number"] in _HARDWARE_XIDS and age_s < _RECENT_S:
            errors[f"Xid {match['number']} on {match['where']}"] = None
    return list(errors)


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
