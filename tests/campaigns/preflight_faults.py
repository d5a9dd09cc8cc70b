"""The faults of the campaign `preflight`: how each is caused on the real one-machine cluster, and what has to be said.

A fault is a context manager around a held job: it breaks something once the run directory is there, and the job is let
go inside it.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from importlib import metadata
from pathlib import Path

from slurm_train.rundir.paths import RunDirectory
from tests.support import cluster_faults as broken

FAKETIME = Path(f"/usr/lib/{platform.machine()}-linux-gnu/faketime/libfaketime.so.1")
_NVML = """
import json, os, types
FACTS = json.loads({facts!r})
class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlSystemGetDriverVersion(): return "570.1"
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetMemoryInfo(handle): return types.SimpleNamespace(total=80 << 30, used=FACTS["used"])
def nvmlDeviceGetComputeRunningProcesses(handle):
    return [types.SimpleNamespace(pid=4711, usedGpuMemory=FACTS["used"])] if FACTS["used"] else []
def nvmlDeviceGetTotalEccErrors(handle, kind, counter): return FACTS["ecc"]
def nvmlDeviceGetRemappedRows(handle): return (0, 0, 0, 0)
def nvmlDeviceGetCurrentClocksThrottleReasons(handle): return FACTS["throttle"]
def nvmlDeviceGetRetiredPagesPendingStatus(handle): return 0
"""
_SPEEDS = """
import json, os, sys
if "slurm_train.tools.doctor.gpu_speed" in sys.orig_argv:
    gpu = {{"kind": "H200", "copy_gb_per_s": 4000.0}}
    gpus = [{{"name": str(number), "tflops": tflops, **gpu}} for number, tflops in enumerate(({tflops}, 781.0))]
    print(json.dumps({{"gpus": gpus, "all_reduce_gb_per_s": 360.0, "diagnosis": ""}}), flush=True)
    os._exit(0)
"""


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a fault happens."""

    run: RunDirectory
    scratch: Path
    """A folder of the trial's own, visible everywhere."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault on a job of three nodes with two ranks each.

    Args:
        code: what it is called.
        what: how it is caused, for the page.
        expects: what the line has to hold.
        cause: does it.
        words: of the run.
        prepared: puts something into the scratch folder and returns further words.
        is_error: whether the run is stopped.
        trains: whether the run goes on to the training.
    """

    code: str
    what: str
    expects: str
    _: KW_ONLY
    cause: Callable[[Scene], AbstractContextManager[object]] = lambda _: nullcontext()
    words: tuple[str, ...] = ()
    prepared: Callable[[Path], tuple[str, ...]] = lambda _: ()
    is_error: bool = True
    nodes: int = 3
    per_node: int = 2
    within_s: float = 30.0
    trains: bool = False


def _hosts(node: str, *, name: str, address: str | None) -> Callable[[Scene], AbstractContextManager[object]]:
    return lambda scene: broken.other_hosts(node, scene.scratch, name=name, address=address)


def _prolog(node: str, *lines: str) -> Callable[[Path], tuple[str, ...]]:
    return lambda scratch: (broken.task_prolog(scratch, node, *lines),)


def _exports(**values: object) -> list[str]:
    """Returns lines of a prolog that put values into the environment of the ranks."""
    return [f'echo "export {name}={value}"' for name, value in values.items()]


def _at_start(folder: Path, module: str) -> str:
    """Returns the line of a prolog with which every Python of the ranks begins with this code."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(module)
    return _exports(PYTHONPATH=f"{folder}:$PYTHONPATH")[0]


def _nvml(*, tflops: float = 781.0, **facts: int) -> Callable[[Path], tuple[str, ...]]:
    """A GPU cannot be made sick or slow on purpose: stand-ins for NVML and for the measurement say so on node2."""

    def words(scratch: Path) -> tuple[str, ...]:
        exports = {}
        for name, its, speed in (("well", {}, 781.0), ("ill", facts, tflops)):
            exports[name] = _at_start(scratch / name, _SPEEDS.format(tflops=speed))
            text = json.dumps({"used": 0, "ecc": 0, "throttle": 0} | its)
            (scratch / name / "pynvml.py").write_text(_NVML.format(facts=text))
        return (broken.task_prolog(scratch, "node2", exports["ill"], elsewhere=(exports["well"],)),)

    return words


def _other_clock(scratch: Path) -> tuple[str, ...]:
    """Without a fake monotonic clock libfaketime 0.9.10 fails each time.sleep; with one it never ends other waits."""
    text = "import select, time\ntime.sleep = lambda seconds: select.select([], [], [], seconds) and None\n"
    exports = _exports(LD_PRELOAD=FAKETIME, FAKETIME="+95s", FAKETIME_DONT_FAKE_MONOTONIC=1)
    return (broken.task_prolog(scratch, "node2", *exports, _at_start(scratch / "clock", text)),)


def _refusing_srun(scratch: Path) -> tuple[str, ...]:
    """A wrapper of a site that takes no step at all."""
    (scratch / "bin").mkdir()
    refuse = "echo 'srun: fatal: steps are started by mpirun here' >&2; exit 1"
    (scratch / "bin" / "srun").write_text(f"#!/bin/sh\n{refuse}\n")
    (scratch / "bin" / "srun").chmod(0o755)
    return (f'cluster.setup=["export PATH={scratch}/bin:$PATH"]',)


def _without_compiler(scratch: Path) -> tuple[str, ...]:
    return (broken.task_prolog(scratch, "node2", *_exports(CXX="/nowhere/g++")),)


def _stopped_ranks(scratch: Path) -> tuple[str, ...]:
    """A task that is stopped before it becomes the rank could not be killed, and Slurm would drain the node."""
    text = "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n"
    return (broken.task_prolog(scratch, "node3", _at_start(scratch / "stopped", text)),)


@contextmanager
def _stale_code(scene: Scene) -> Iterator[None]:
    with broken.private_copy("node2", scene.run.code, scene.scratch) as copy:
        (copy / "tiny.py").chmod(0o644)
        (copy / "tiny.py").write_text("# an older state\n")
        yield


def _other_torch(scene: Scene) -> AbstractContextManager[None]:
    path = Path(str(metadata.distribution("torch").locate_file("")))
    (folder,) = path.glob("torch-*.dist-info")

    def older(text: str) -> str:
        return "\n".join("Version: 1.99.0" if line.startswith("Version:") else line for line in text.splitlines())

    return broken.other_content("node2", folder / "METADATA", scene.scratch, older)


def _missing_data(scratch: Path) -> tuple[str, ...]:
    data = scratch / "data"
    data.mkdir()
    (data / "part").write_text("x")
    return (f"+data.root={data}",)


def _local_disk(scratch: Path) -> tuple[str, ...]:
    (scratch / "local").mkdir()
    return (f"checkpoint.local_dir={scratch / 'local'}",)


@contextmanager
def _busy_cpu(_: Scene) -> Iterator[None]:
    with broken.bound_to_cpu("node2"), broken.hogs():
        yield


_MEASURED = ("preflight.bandwidth=true",)
_OPENED = (
    'import socket, time; s = socket.create_server(("", int(__import__("os").environ["MASTER_PORT"]))); time.sleep(60)'
)

FAULTS: tuple[Fault, ...] = (
    Fault(
        "WRONG_MASTER",
        "the hosts file of node3 gives node1 an address that nobody has",
        "node3: looks for rank 0 at 10.98.76.99, but node1 has 10.98.76.11",
        cause=_hosts("node3", name="node1", address="10.98.76.99"),
    ),
    Fault(
        "WRONG_MASTER",
        "the hosts file of node3 gives node1 the address of node2",
        "node3: looks for rank 0 at 10.98.76.12, but node1 has 10.98.76.11",
        cause=_hosts("node3", name="node1", address="10.98.76.12"),
    ),
    Fault(
        "NAME_RESOLUTION",
        "node1 is gone from the hosts file of node3",
        "node3: cannot resolve node1, where rank 0 is",
        cause=_hosts("node3", name="node1", address=None),
    ),
    Fault(
        "LOOPBACK",
        "the hosts file of node3 gives node1 127.0.1.1",
        "node3: resolves node1, where rank 0 is, to itself (127.0.1.1)",
        cause=_hosts("node3", name="node1", address="127.0.1.1"),
    ),
    Fault(
        "LOOPBACK",
        "node2's own name is 127.0.1.1, as Debian has it; gloo is led along the route",
        "node2: resolves its own name node2 to 127.0.1.1",
        is_error=False,
        trains=True,
        cause=_hosts("node2", name="node2", address="127.0.1.1"),
    ),
    Fault(
        "PORT_BLOCKED",
        "nft on node1 drops what node3 sends",
        "node3: does not reach rank 0 at 10.98.76.11:",
        cause=lambda _: broken.firewall("node1", broken.from_node("node3", "drop")),
    ),
    Fault(
        "PORT_BLOCKED",
        "nft on node1 rejects what node3 sends",
        "connection refused; it reaches node2",
        cause=lambda _: broken.firewall("node1", broken.from_node("node3", "reject with tcp reset")),
    ),
    Fault(
        "PORT_BLOCKED",
        "nft on node3 drops all but the low ports",
        "node3: node1 does not reach node3 at 10.98.76.13:",
        cause=lambda _: broken.firewall("node3", "tcp dport 32768-65535 ct state new drop"),
    ),
    Fault(
        "PORT_BLOCKED",
        "a blackhole route from node2 to node3",
        "node2, node3: node2 does not reach node3",
        cause=lambda _: broken.blackhole("node2", "node3"),
    ),
    Fault(
        "PORT_IN_USE",
        "somebody takes the port on node1 before rank 0 does, and a script needs it",
        "node1: port",
        prepared=lambda scratch: (
            "script=[true]",
            broken.task_prolog(
                scratch,
                "node1",
                f"[ \"$SLURM_LOCALID\" = 0 ] && {{ setsid python3 -c '{_OPENED}' >/dev/null 2>&1 & sleep 1; }}",
            ),
        ),
    ),
    Fault(
        "WRONG_INTERFACE",
        "a second interface on every node, named for the collectives, leads nowhere",
        "gloo would announce eth9",
        words=("cluster.network_interface=eth9",),
        cause=lambda _: broken.second_interface(("node1", "node2", "node3")),
    ),
    Fault(
        "WRONG_INTERFACE",
        "an interface is named that no node has",
        "GLOO_SOCKET_IFNAME=ib0: there is no such interface",
        words=("cluster.network_interface=ib0",),
    ),
    Fault(
        "RANK_MISMATCH",
        "a prolog on node2 leaves RANK=0 in the environment",
        "node2: the task that Slurm calls rank",
        prepared=_prolog(
            "node2",
            *_exports(RANK=0, WORLD_SIZE=6, LOCAL_RANK=0, LOCAL_WORLD_SIZE=2),
        ),
    ),
    Fault(
        "NODE_MISSING",
        "the ranks of node3 are stopped (SIGSTOP) as soon as Python has started",
        "node3: not all of its ranks have come",
        is_error=False,
        prepared=_stopped_ranks,
    ),
    Fault(
        "GPU_COUNT",
        "srun gives the step one GPU of the two on each node",
        "1 GPUs are visible to the ranks, 2 were asked for",
        words=("cluster.setup=[export SLURM_GPUS_PER_NODE=1]",),
    ),
    Fault(
        "GPU_COUNT",
        "the step of the ranks asks for none of the job's GPUs",
        "Slurm names no GPU to the ranks, 2 were asked for: they would use CPUs",
        words=("cluster.gpu_flag=gres", "cluster.setup=[export SLURM_GRES=none]"),
    ),
    Fault(
        "GPU_BUSY",
        "a stand-in for NVML on node2 says that 60 GiB are taken",
        "node2: 61440 of 81920 MiB of GPU 0, 1 are taken by pid 4711",
        prepared=_nvml(used=60 << 30),
    ),
    Fault(
        "GPU_SICK",
        "a stand-in for NVML on node2 says that there were uncorrected errors",
        "node2: GPU 0: 3 uncorrected memory errors",
        prepared=_nvml(ecc=3),
    ),
    Fault(
        "GPU_SICK",
        "a stand-in for NVML on node2 says that the GPUs are slowed down",
        "node2: GPU 0: slowed down by heat",
        is_error=False,
        prepared=_nvml(throttle=0x40),
    ),
    Fault(
        "SLOW_GPU",
        "stand-ins for NVML and for the measurement on node2 say that GPU 0 is slow",
        "node2: GPU 0 (H200) computes 512 TFLOP/s in bfloat16, the others 781",
        is_error=False,
        prepared=_nvml(tflops=512.0),
        words=_MEASURED,
    ),
    Fault(
        "CODE_DRIFT",
        "node2 has an older copy of the code mounted",
        "node2: sees other code than was submitted: tiny.py",
        cause=_stale_code,
    ),
    Fault(
        "VERSION_DRIFT",
        "node2 has another torch installed",
        "node2: has torch 1.99.0, the other nodes have",
        cause=_other_torch,
    ),
    Fault(
        "CONFIG_DRIFT",
        "node2 has another config.yaml mounted",
        "node2: reads another config.yaml or plan.json",
        cause=lambda scene: broken.other_content(
            "node2", scene.run.config, scene.scratch, lambda text: text.replace("seed: 0", "seed: 9")
        ),
    ),
    Fault(
        "NO_SCONTROL",
        "node2 has no command scontrol",
        "node2: has no scontrol: a run that is preempted goes on as another job",
        is_error=False,
        cause=lambda _: broken.mounted_over("node2", Path("/usr/bin/scontrol"), "--bind", "/dev/null"),
    ),
    Fault(
        "NO_COMPILER",
        "node2 names a C++ compiler that is not there, and the run compiles",
        "node2: torch cannot compile kernels: no C++ compiler (CXX=/nowhere/g++)",
        is_error=False,
        prepared=_without_compiler,
        words=("train.compile=true",),
    ),
    Fault(
        "DATA_MISSING",
        "node2 does not have the data mounted",
        "node2: sees nothing in",
        prepared=_missing_data,
        cause=lambda scene: broken.mounted_over("node2", scene.scratch / "data", "-t", "tmpfs", "none"),
    ),
    Fault(
        "FS_MISSING",
        "node2 does not have the run directory mounted",
        "node2: node node2 does not see the run directory",
        cause=lambda scene: broken.mounted_over("node2", scene.run.path.parent, "-t", "tmpfs", "none"),
    ),
    Fault(
        "STEP_REFUSED",
        "srun creates no step",
        "srun: fatal: steps are started by mpirun here",
        prepared=_refusing_srun,
    ),
    Fault(
        "FS_STALE",
        "node3 has an older copy of the run directory mounted",
        "node3: node node3 does not see",
        cause=lambda scene: broken.private_copy("node3", scene.run.path, scene.scratch),
    ),
    Fault(
        "FS_READONLY",
        "the run directory is read-only on node2",
        "node2: node node2 does not write to",
        cause=lambda scene: broken.read_only("node2", scene.run.path),
    ),
    Fault(
        "FS_READONLY",
        "only the checkpoints are read-only on node2",
        "node2: cannot write to",
        cause=lambda scene: broken.read_only("node2", scene.run.checkpoints),
    ),
    Fault(
        "DISK_FULL",
        "the local disk of node2 is a full tmpfs",
        "(checkpoint.local_dir): No space left on device",
        prepared=_local_disk,
        cause=lambda scene: broken.full_disk("node2", scene.scratch / "local"),
    ),
    Fault(
        "CLOCK_SKEW",
        "faketime on node2",
        "node2: its clock is 9",
        is_error=False,
        prepared=_other_clock,
    ),
    Fault(
        "CPU_AFFINITY",
        "slurmd on node2 is bound to one CPU",
        "node2: 2 ranks may use CPUs 0 of",
        is_error=False,
        cause=lambda _: broken.bound_to_cpu("node2"),
    ),
    Fault(
        "LIMITS",
        # Slurm passes on soft limits alone, and a rank raises its own as far as the hard one allows.
        "slurmd of node2 has a hard limit of 120 open files",
        "LIMITS node2: a rank may open 120 files, it should have 1024",
        cause=lambda _: broken.few_files("node2", 120),
    ),
    Fault(
        "SLOW_NODE",
        "node2 shares its one CPU with hogs",
        "SLOW_NODE node2: computes",
        is_error=False,
        per_node=1,
        within_s=45.0,
        cause=_busy_cpu,
        # With more, the one CPU would be a finding of its own.
        words=(*_MEASURED, "cluster.cpus_per_gpu=1"),
    ),
    Fault(
        "SLOW_LINK",
        "tbf limits node2 to 20 Mbit/s",
        "SLOW_LINK node2:",
        is_error=False,
        cause=lambda _: broken.slow_link("node2"),
        words=_MEASURED,
    ),
    Fault(
        "COLLECTIVE",
        "nft on node2 loses large packets between the ports of collectives",
        "the first all_reduce of 1 MiB over 4 ranks failed after 8 s",
        nodes=2,
        trains=True,
        cause=lambda _: broken.firewall("node2", "tcp sport 32768-65535 tcp dport 32768-65535 meta length > 1400 drop"),
        words=("preflight.collective_timeout_s=8",),
        within_s=120.0,
    ),
)


def missing_for(fault: Fault) -> str:
    """Returns what this machine lacks for a fault, "" where nothing."""
    return "libfaketime (apt-get install libfaketime)" if fault.code == "CLOCK_SKEW" and not FAKETIME.exists() else ""
