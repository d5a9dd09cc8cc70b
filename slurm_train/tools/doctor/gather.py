"""Gathers what a rank reports of itself, and the first rank of a node of its node.

Reads /proc, sockets and files, within a second or two, and imports neither torch nor what it asks versions of.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import re
import resource
import socket
import string
import struct
import tempfile
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import xxhash

from slurm_train import __version__
from slurm_train.config.schema import RunConfig
from slurm_train.data.shards import known_fingerprint
from slurm_train.distributed.place import RankPlace
from slurm_train.rundir.files import read_json
from slurm_train.rundir.paths import RunDirectory
from slurm_train.tools.doctor.facts import DiskFacts, FilesFacts, NetworkFacts, NodeFacts, RankFacts
from slurm_train.tools.doctor.gpus import logged_errors, read_gpus, visible_gpus

_MIB = 1 << 20
_SIOCGIFADDR = 0x8915
# A snapshot may be 100 MB on a busy file system: the sources first, as far as the time goes.
_HASHING_S = 1.0
_LONGEST_LIST = 20
_PATH_KEY = re.compile(r"(.*_)?(path|root|dir|folder|directory|file)")
_TEXT_TARGET = "slurm_train.data.text.build"
_CUDA = re.compile(r"^cuda(?:: Optional\[str\])? = '([^']+)'", re.MULTILINE)
_DRIVER = Path("/proc/driver/nvidia/version")
_DRIVER_NUMBER = re.compile(r"Kernel Module(?: for \S+)?\s+(\S+)")


def read_rank(place: RankPlace, env: Mapping[str, str]) -> RankFacts:
    """Returns what this rank knows of itself."""
    task, names = env.get("SLURM_PROCID", ""), visible_gpus(env.get("CUDA_VISIBLE_DEVICES"))
    # Where each task is bound to a single GPU, Slurm knows how many its step has on the node.
    on_node = env.get("SLURM_GPUS_ON_NODE", "")
    of_step = int(on_node) if on_node.isdigit() and len(names or ()) == 1 else 0
    locked = _soft_limit(resource.RLIMIT_MEMLOCK)
    return RankFacts(
        rank=place.rank,
        local_rank=place.local_rank,
        node_rank=place.node_rank,
        world_size=place.world_size,
        local_world_size=place.local_world_size,
        node=place.host,
        slurm_rank=int(task) if task.isdigit() and "SLURM_STEP_ID" in env else None,
        visible_gpus=None if names is None else max(len(names), of_step),
        cpus=sorted(os.sched_getaffinity(0)),
        max_open_files=_soft_limit(resource.RLIMIT_NOFILE),
        max_locked_mb=None if locked is None else locked // _MIB,
    )


def _soft_limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def read_node(
    run: RunDirectory, config: RunConfig, place: RankPlace, env: Mapping[str, str], *, network: NetworkFacts
) -> NodeFacts:
    """Returns what the first rank of a node knows of the node.

    Args:
        run: the run.
        config: its configuration, as read here.
        place: this rank.
        env: its environment.
        network: what `read_network` gave.
    """
    gpus, num_gpus, driver = read_gpus(visible_gpus(env.get("CUDA_VISIBLE_DEVICES")))
    return NodeFacts(
        node=place.host,
        node_rank=place.node_rank,
        num_cpus=os.cpu_count() or 0,
        load=os.getloadavg()[0],
        network=network,
        files=read_files(run, config, directory=Path.cwd()),
        disks=read_disks(run, config, env),
        gpus=gpus,
        num_gpus=num_gpus,
        gpu_errors=logged_errors(),
        versions=read_versions(driver=driver),
    )


def read_versions(*, driver: str = "") -> dict[str, str]:
    """Returns name -> version for python, torch, cuda, nccl, driver and this package; what is not here is left out.

    Args:
        driver: the GPU driver's version if NVML gave it.
    """
    versions = {"slurm_train": __version__, "python": platform.python_version(), "driver": driver}
    packages = (("torch", "torch"), *(("nccl", f"nvidia-nccl-cu{number}") for number in (13, 11, 12)))
    for name, package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError, KeyError, ValueError):
            versions[name] = metadata.version(package)
    with contextlib.suppress(metadata.PackageNotFoundError, OSError, ValueError):
        path = metadata.distribution("torch").locate_file("torch/version.py")
        versions["cuda"] = "".join(_CUDA.findall(Path(str(path)).read_text(encoding="utf-8"))[:1])
    with contextlib.suppress(OSError):
        versions["driver"] = driver or "".join(_DRIVER_NUMBER.findall(_DRIVER.read_text(errors="replace"))[:1])
    return {name: version for name, version in versions.items() if version}


# The network.


def read_network(place: RankPlace, env: Mapping[str, str], *, peer: str, probe_port: int) -> NetworkFacts:
    """Returns how this node is reached.

    Args:
        place: this rank.
        env: its environment.
        peer: host name of another node, which decides the route: rank 0's, or any as seen from there.
        probe_port: where this node answers probes.
    """
    if not place.spans_nodes:
        return NetworkFacts(address="127.0.0.1", probe_port=probe_port)
    addresses, own_name = interface_addresses(), socket.gethostname()
    towards, _ = resolve(peer)
    interface, address = route_to(towards[0], addresses) if towards else ("", "")
    if interface == "" and len(addresses) == 1:
        # Whatever this node takes for its peer's address, there is but one way out of it.
        ((interface, address),) = addresses.items()
    return NetworkFacts(
        addresses=addresses,
        interface=interface,
        address=address,
        own_name=own_name,
        own_addresses=resolve(own_name)[0],
        gloo_interface=env.get("GLOO_SOCKET_IFNAME", ""),
        nccl_interface=env.get("NCCL_SOCKET_IFNAME", ""),
        has_infiniband=any(Path("/sys/class/infiniband").glob("*")),
        link_mbit_per_s=link_speed_mbit(interface),
        probe_port=probe_port,
    )


def resolve(name: str) -> tuple[list[str], str]:
    """Returns the addresses of a name as seen from here, IPv4 first, and why there are none."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as err:
        return [], str(err.strerror or err)
    return sorted({str(entry[4][0]) for entry in found}, key=lambda address: (":" in address, address)), ""


def interface_addresses() -> dict[str, str]:
    """Returns interface -> address for all that have one, without the loopback; of two the IPv4 one."""
    found: dict[str, str] = {}
    for digits, _, _, scope, _, name in _rows("/proc/net/if_inet6"):
        if scope == "00":  # global
            found[name] = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    found.pop("lo", None)
    return found


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
            own = str(asking.getsockname()[0])
    except OSError:
        return "", ""
    by_address = next((name for name, its in addresses.items() if its == own), "")
    return by_address or _interface_in_table(address), own


def _interface_in_table(address: str) -> str:
    """Returns the interface of the longest IPv4 route that holds an address; for second addresses of an interface."""
    if ":" in address:
        return ""
    wanted, best = int.from_bytes(socket.inet_aton(address), "little"), (-1, "")
    for name, target, *fields in _rows("/proc/net/route")[1:]:
        mask = int(fields[5], 16)
        if wanted & mask == int(target, 16):
            best = max(best, (mask.bit_count(), name), key=lambda one: one[0])
    return best[1]


def link_speed_mbit(interface: str) -> int | None:
    """Returns the nominal speed of an interface, None where it has none (virtual ones, many InfiniBand ones)."""
    try:
        speed = int(Path("/sys/class/net", interface, "speed").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return speed if speed > 0 else None


def holder_of(port: int) -> str:
    """Returns who listens at a port of this machine, e.g. "pid 7 (python)"; "" where /proc hides it from this user."""
    rows = (*_rows("/proc/net/tcp")[1:], *_rows("/proc/net/tcp6")[1:])
    listening = (row for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port)
    sockets = {f"socket:[{row[9]}]" for row in listening}
    for process in Path("/proc").glob("[0-9]*") if sockets else ():
        with contextlib.suppress(OSError):
            if any(os.readlink(link) in sockets for link in (process / "fd").iterdir()):  # noqa: PTH115  # str out
                return f"pid {process.name} ({(process / 'comm').read_text().strip()})"
    return ""


def _rows(path: str) -> list[list[str]]:
    try:
        return [line.split() for line in Path(path).read_text(encoding="ascii").splitlines()]
    except OSError:
        return []


# Files and disks.


def read_files(run: RunDirectory, config: RunConfig, *, directory: Path, hashing_s: float = _HASHING_S) -> FilesFacts:
    """Returns what this node sees of the run.

    Args:
        run: the run.
        config: its configuration, as read here.
        directory: what relative paths of the data start from.
        hashing_s: seconds that the code's files may take.
    """
    index = read_json(run.code_index)
    files = index.get("files") if index else None
    data = (config.data or {}) if config.trains else {}
    paths = _data_paths(data)
    missing = [str(path) for path in paths if not path.exists()]
    if data.get("_target_") == _TEXT_TARGET:
        missing = _missing_shards(directory / Path(str(data.get("path"))).expanduser())
    return FilesFacts(
        code_index=_digest(json.dumps(files, sort_keys=True).encode()) if isinstance(files, dict) else "",
        code_changes=_code_changes(run.code, files, hashing_s) if isinstance(files, dict) else [],
        config=_digest(*(_content(path) or b"" for path in (run.config, run.plan))),
        data=(known_fingerprint(data, cwd=directory) or "") if config.trains else "",
        data_missing=missing,
        data_empty=[str(path) for path in paths if _is_empty(path)],
    )


def _code_changes(code: Path, files: Mapping[str, Any], hashing_s: float) -> list[str]:
    deadline, found = time.monotonic() + hashing_s, list[str]()
    for name in sorted(files, key=lambda name: (not name.endswith(".py"), name)):
        if time.monotonic() > deadline or len(found) >= _LONGEST_LIST:
            break
        content = _content(code / name)
        if content is None:
            found.append(f"{name} (gone)")
        elif _digest(content) != files[name]:
            found.append(name)
    return found


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _digest(*parts: bytes) -> str:
    return xxhash.xxh3_128(b"".join(parts)).hexdigest()


def _data_paths(data: Mapping[str, Any]) -> list[Path]:
    """Returns what is a path for certain; "train" or "openwebtext" may be the name of anything."""
    if str(data.get("_target_", "")).startswith("slurm_train."):
        return []  # made on demand, or checked with more knowledge
    named = [value for key, value in data.items() if _PATH_KEY.fullmatch(key) and isinstance(value, str)]
    return [Path(value).expanduser() for value in named if value.startswith(("/", "~"))]


def _is_empty(path: Path) -> bool:
    try:
        with os.scandir(path) as entries:
            return next(entries, None) is None
    except OSError:
        return False


def _missing_shards(directory: Path) -> list[str]:
    """Returns the shards of prepared text that are not here or have another size."""
    index = directory / "index.json"
    value = read_json(index)
    if value is None:
        return [str(index)]
    try:
        width = int(str(value["dtype"])[-1])
        shards = [shard for split in value["splits"].values() for shard in split["shards"]]
        expected = {directory / shard["file"]: shard["tokens"] * width for shard in shards}
    except (KeyError, TypeError, AttributeError, ValueError):
        return [f"{index} (not an index)"]
    wrong = [path for path, size in expected.items() if _size(path) != size][:_LONGEST_LIST]
    return [f"{path} ({'gone' if _size(path) is None else 'another size'})" for path in wrong]


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def read_disks(run: RunDirectory, config: RunConfig, env: Mapping[str, str]) -> list[DiskFacts]:
    """Returns the places that ranks of this node write to, each after a small file was written and removed."""
    places = {"run directory": str(run.checkpoints)}
    if config.checkpoint.local_dir is not None and config.trains:
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
