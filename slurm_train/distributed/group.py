"""The process group of one attempt: opened on an agreed store, tried once, closed only when all went well.

After an error no rank destroys the group: that waits for peers that will never come, which has held allocations for
hours. The error path is traceback, flush, `os._exit`.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from slurm_train.distributed.place import RankPlace
from slurm_train.errors import EXIT_FAILURE, PreflightError, RendezvousError
from slurm_train.slurm.devices import installed_gpus, visible_gpus

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# How the descriptions of groups of a mesh begin.
_MESH_GROUP = "mesh_"
_NUM_TRIED_VALUES = 1 << 18
# Graphics of a Mac: ranks use the CPU there, as on any machine without a GPU for training.
_ALSO_WITHOUT_GPU = ("cuda", "mps")
_COLLECTIVE_HINT = (
    "the sockets were fine: compare the MTU of the nodes (`ip link`), and the interface that is used "
    "(cluster.env.NCCL_DEBUG=INFO); see docs/troubleshooting.md#collective"
)
_KEPT_PER_GROUP = 4
_KEPT_FIELDS = (
    *("pg_id", "process_group", "collective_seq_id", "profiling_name", "input_sizes", "input_dtypes", "is_p2p"),
)


def torch_release() -> tuple[int, int]:
    """Returns major and minor number of torch, e.g. (2, 13)."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def choose_device(
    place: RankPlace, env: Mapping[str, str], *, devices: Path = Path("/dev"), sys: Path = Path("/sys")
) -> torch.device:
    """Returns this rank's device: local rank modulo the visible GPUs, or the CPU where there is none.

    torch calls the GPUs of ROCm "cuda", too. CUDA_VISIBLE_DEVICES and its kin are Slurm's to set and stay as they are.
    They may name devices that are only pretended, so what counts is the files of the drivers.

    Args:
        place: this rank.
        env: its environment.
        devices: where the drivers have their files.
        sys: where the kernel shows its devices.

    Raises:
        PreflightError: this node has GPUs for this rank that torch cannot use, or that nothing here is written for. On
            the CPU the rank would be slow without a word, and of another backend than its peers.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    names = visible_gpus(env)
    # A job that asked for no GPU finds the files, too, but then Slurm does not name any.
    wants_gpu = "SLURM_JOB_ID" not in env if names is None else bool(names)
    if not wants_gpu:
        return torch.device("cpu")
    otherwise = "to train on CPUs: CUDA_VISIBLE_DEVICES= here, cluster.gpu_flag=none on a cluster"
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None and accelerator.type not in _ALSO_WITHOUT_GPU:
        raise PreflightError(
            f'{place.host} has devices that torch {torch.__version__} calls "{accelerator.type}", and training here '
            'is written for "cuda" (NVIDIA and ROCm) and the CPU',
            hint=otherwise,
        )
    gpus = installed_gpus(devices=devices, sys=sys)
    if gpus:
        named = ", ".join(gpu.file for gpu in gpus)
        vendor = gpus[0].vendor
        wheel, driver = _advise_build(vendor)
        raise PreflightError(
            f"{place.host} has {vendor} GPUs ({named}), but torch {torch.__version__} ({wheel}) finds no GPU there",
            hint=f"{driver}; {otherwise}",
        )
    return torch.device("cpu")


def _advise_build(vendor: str) -> tuple[str, str]:
    """Returns what this torch was built for, and what to do where it finds no GPU of a vendor."""
    if vendor == "Intel":
        return "a build without them", "Intel GPUs cannot be trained on yet"
    wanted = "CUDA" if vendor == "NVIDIA" else "ROCm"
    built = torch.version.cuda if vendor == "NVIDIA" else torch.version.hip
    if built is None:
        other = f"a build for {'ROCm' if torch.version.hip else 'CUDA' if torch.version.cuda else 'CPUs'}"
        return other, f"install a build of torch for {wanted} (https://pytorch.org/get-started)"
    tool = "nvidia-smi" if vendor == "NVIDIA" else "rocm-smi"
    return f"built for {wanted} {built}", f"compare the driver (`{tool}`) with what that {wanted} needs"


def stay_near(device: torch.device, env: Mapping[str, str], *, sys: Path = Path("/sys")) -> frozenset[int]:
    """Binds this process to those of its CPUs that are on the NUMA node of its GPU; returns them, or none.

    What it starts later inherits that: threads, workers, pinned memory. Nothing is bound where Slurm has bound the
    task, where one node has all CPUs or the GPU belongs to none, or where its node has fewer than an equal part of the
    CPUs.

    Args:
        device: this rank's.
        env: environment of the task.
        sys: where the kernel shows its devices.
    """
    # "mask_cpu:", "map_ldom:", "rank:" and the like; "none" where it was asked not to.
    is_bound = env.get("SLURM_CPU_BIND_TYPE", "").startswith(("mask", "map", "rank"))
    nodes = sorted(sys.glob("devices/system/node/node[0-9]*"))
    if device.type != "cuda" or is_bound or len(nodes) < 2:
        return frozenset()
    card: Any = torch.cuda.get_device_properties(device)
    try:
        address = f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0"
        number = int((sys / "bus/pci/devices" / address / "numa_node").read_text())
        listed = (sys / f"devices/system/node/node{number}/cpulist").read_text().strip()
    except (AttributeError, OSError, ValueError):
        # torch 2.7 does not say the address, a container may hide the files; a virtual machine says -1.
        return frozenset()
    bounds = (part.partition("-") for part in listed.split(",") if part)
    allowed = os.sched_getaffinity(0)
    near = allowed & {cpu for first, _, last in bounds for cpu in range(int(first), int(last or first) + 1)}
    if near == allowed or len(near) * len(nodes) < len(allowed):
        return frozenset()
    os.sched_setaffinity(0, near)
    return frozenset(near)


def init_group(
    place: RankPlace, store: Store, *, device: torch.device, timeout_s: float, say_after_s: float = 60.0
) -> None:
    """Opens the default process group: gloo for tensors on the host, NCCL for those on a GPU. Collective.

    Args:
        place: this rank.
        store: what `rendezvous.open_store` gave.
        device: what `choose_device` gave.
        timeout_s: seconds that this, and a collective until `use_timeout`, may take.
        say_after_s: seconds after which it is said that the ranks have not come together.

    Raises:
        RendezvousError: NCCL or gloo could not connect the ranks.
    """
    has_gpu = device.type == "cuda"
    # A group that is bound to a device is split for the groups of a mesh. torch 2.8 and 2.9 cannot split one with two
    # backends (pytorch issue 159200, pull request 162424), and 2.7 leaves gloo out of its parts.
    can_split = torch_release() >= (2, 10)
    library = "NCCL" if has_gpu else "gloo"
    began_s = time.monotonic()
    opening = f"COLLECTIVE {place.host}: opening {library} between {place.world_size} ranks"
    with _noticed(opening, say_after_s=say_after_s, timeout_s=timeout_s):
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if has_gpu else "gloo",
                store=store,
                rank=place.rank,
                world_size=place.world_size,
                timeout=timedelta(seconds=timeout_s),
                device_id=device if has_gpu and can_split else None,
            )
        except RuntimeError as err:
            problem = f"failed after {time.monotonic() - began_s:.0f} s: {str(err).splitlines()[0]}"
            raise RendezvousError(f"{opening} {problem}", hint=_COLLECTIVE_HINT) from err


@contextlib.contextmanager
def _noticed(opening: str, *, say_after_s: float, timeout_s: float) -> Iterator[None]:
    """Prints a line where opening a group takes long, and ends the process at the time-out.

    A group that is bound to its GPU connects NCCL's ranks at once, in a call that cannot be interrupted; where the
    network drops packets it retries for an hour.
    """

    def say(text: str) -> None:
        print(f"{opening} {text}; {_COLLECTIVE_HINT}", file=sys.stderr, flush=True)

    def end() -> None:
        say(f"took longer than {timeout_s:.0f} s: this rank ends")
        os._exit(EXIT_FAILURE)

    timers = [
        threading.Timer(min(say_after_s, timeout_s), say, [f"has taken {say_after_s:.0f} s so far"]),
        # A supervisor that watches the ranks comes first.
        threading.Timer(timeout_s, end),
    ]
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()


def open_side_group(timeout_s: float) -> dist.ProcessGroup:
    """Returns a gloo group of all ranks for exchanges in the background of the training. Collective over all ranks.

    Args:
        timeout_s: seconds that one of its collectives may take.
    """
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return group


def open_axis(groups: Iterable[Sequence[int]], *, name: str, on_host: bool = False) -> dist.ProcessGroup:
    """Returns the group of those ranks that this one is among. Collective over all ranks.

    A group that is bound to its GPU is split, in one call for all parts. From torch 2.13 on it is split without gloo,
    which would connect the ranks once more for each axis, and be given NCCL's options.

    Args:
        groups: numbers of ranks; each rank is in one of them.
        name: of the axis.
        on_host: tensors on the host are exchanged as well.
    """
    parts = [list(ranks) for ranks in groups]
    world: Any = dist.group.WORLD
    if len(parts) == 1:
        return world  # type: ignore[no-any-return]  # torch gives it no type
    description = f"{_MESH_GROUP}{name}"
    if getattr(world, "bound_device_id", None) is not None:
        takes_backend = "backend" in inspect.signature(dist.split_group).parameters
        options: dict[str, Any] = {"backend": "cuda:nccl"} if takes_backend and not on_host else {}
        split: Any = dist.split_group(split_ranks=parts, group_desc=description, **options)
        return split  # type: ignore[no-any-return]  # torch gives it no type
    opened = [dist.new_group(ranks, group_desc=description) for ranks in parts]
    (own,) = (group for group in opened if isinstance(group, dist.ProcessGroup))
    return own


def exchange_once(place: RankPlace, *, device: torch.device, timeout_s: float) -> None:
    """Adds up a mebibyte over all ranks, with a time-out of its own. Collective over all ranks.

    The preflight's messages are small: a network that loses large packets (MTU) passes it, and would pass the group's
    own time-out, which is long where a watchdog looks for hangs.

    Args:
        place: this rank.
        device: where the values are: the backend of the training's gradients is the one that is tried.
        timeout_s: seconds that it may take.

    Raises:
        RendezvousError: it did not end in time, failed, or the sum is wrong.
    """
    values = torch.ones(_NUM_TRIED_VALUES, device=device)
    began_s = time.monotonic()
    problem = ""
    try:
        dist.all_reduce(values, async_op=True).wait(timedelta(seconds=timeout_s))
        if not bool((values == place.world_size).all()):
            problem = f"gave another sum than {place.world_size}"
    except RuntimeError as err:
        problem = f"failed after {time.monotonic() - began_s:.0f} s: {str(err).splitlines()[0]}"
    if problem:
        raise RendezvousError(
            f"COLLECTIVE {place.host}: the first all_reduce of 1 MiB over {place.world_size} ranks {problem}",
            hint=_COLLECTIVE_HINT,
        )


def use_timeout(timeout_s: float) -> None:
    """Sets the time-out of later collectives of the default group and of those of a mesh's axes."""
    # Private in torch up to 2.14, and the only way to change it without other groups.
    set_timeout = getattr(dist, "set_timeout", None) or getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    if set_timeout is not None:
        for group in list(dist.distributed_c10d._world.pg_map):
            if group.group_desc.startswith(("default_pg", _MESH_GROUP)):
                set_timeout(timedelta(seconds=timeout_s), group)


def shutdown() -> None:
    """Waits until every rank is done; the process may then end with `os._exit`. Collective over all ranks.

    The group is not destroyed: with gloo on a busy node its threads have kept a rank alive after the last step until
    srun killed it, and an orderly interpreter exit has aborted in them (both seen with torch 2.13).
    """
    if dist.is_initialized():
        dist.barrier()


def newest_collectives() -> bytes | None:
    """Returns the newest collectives of each group as JSON: which were begun on this rank, and which are over.

    Called by the heartbeat's thread of a rank that has made no progress for long.

    Returns:
        None where nothing is recorded. The interface of torch's flight recorders, one for NCCL and since 2.9 one for
        gloo, is private; where it is another one there is no record.
    """
    core: Any = getattr(torch._C, "_distributed_c10d", None)
    dumps = [getattr(core, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json")]
    return shorten_records([dump() for dump in dumps if dump is not None])


def shorten_records(texts: Sequence[str | bytes]) -> bytes | None:
    """Returns records, a list in JSON, with the newest entries of each group only; None where there are none.

    Args:
        texts: what torch's recorders give: JSON with `entries` and `pg_status`.
    """
    records = []
    for record in map(json.loads, texts):
        groups: dict[Any, list[dict[str, Any]]] = defaultdict(list)
        for entry in record.get("entries") or []:
            if not entry.get("is_p2p"):
                groups[entry.get("pg_id")].append({name: entry.get(name) for name in _KEPT_FIELDS})
        newest = [entry for entries in groups.values() for entry in entries[-_KEPT_PER_GROUP:]]
        if newest:
            records.append({"entries": newest, "pg_status": record.get("pg_status", {})})
    return json.dumps(records).encode() if records else None
