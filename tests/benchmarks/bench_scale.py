"""How the control plane grows with the ranks: processor time, file operations and descriptors, not training.

    python -m tests.benchmarks.bench_scale [--sizes 256 1024 4096] [--parts meeting restoring ...] [--json FILE]
    python -m tests.benchmarks.bench_scale --compare BEFORE.json AFTER.json [--plot FILE.png]

Each part runs the toolkit's own code for one of N logical ranks, or for the one process that serves all of them, in a
process of its own. What is counted does not depend on what else the machine does: seconds of the processor, calls that
a shared file system would see, descriptors. `growth` is the exponent between the two largest sizes, of whichever of the
three grows most. The estimate for 16,384 ranks is the processor time, plus what waits for the file server: the serial
calls x `--op-ms`, but at least all calls of all ranks over `--server-ops` calls a second. A part whose growth or whose
estimate is worse than its limit is marked, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

_TARGET = 16384
_PER_NODE = 8
_WATCHED_S = 12.0
_CALLS = (
    *("access", "chmod", "fdatasync", "fsync", "listdir", "lstat", "mkdir", "open", "pwrite", "readlink", "rename"),
    *("replace", "rmdir", "scandir", "stat", "unlink"),
)
_ON_DESCRIPTORS = {"fsync", "fdatasync", "pwrite"}
_SHARDS = 10_000
_LEAST_CPU_S = 0.05
"""Less is noise."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one size cost."""

    cpu_s: float = 0.0
    calls: float = 0
    """File-system calls of the process that was measured."""
    extra: float = 0
    """Of another kind, see the part: descriptors, bytes, connections."""


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that grows."""

    name: str
    row: str
    """What it is, for the table."""
    measure: Callable[[int, Path], Cost]
    is_each_rank: bool
    """Every rank pays this, else one process."""
    extra: str = ""
    """What `Cost.extra` counts."""
    limit_s: float = 30.0
    """The longest that it may take at 16,384 ranks."""
    growth: float = 1.3
    """The largest exponent."""
    largest: int = 1 << 20
    """Not measured beyond this size."""
    at_once: int = 1
    """How many file operations are under way at the same time."""


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Counts calls that reach a file system, and processor time, while the body runs."""
    counts, is_on = dict.fromkeys((*_CALLS, "cpu_us"), 0), [True]
    real = {name: getattr(os, name) for name in _CALLS}

    def wrap(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += name in _ON_DESCRIPTORS or not (args and isinstance(args[0], int))
            return real[name](*args, **kwargs)

        return call

    def on_event(event: str, args: tuple[Any, ...]) -> None:
        # `open()` and pathlib do not go through os.open, which has no mode.
        is_counted = event == "open" and not isinstance(args[0], int) and args[1] is not None
        counts["open"] += is_on[0] and is_counted and not str(args[0]).startswith("/proc/")

    sys.addaudithook(on_event)
    for name in _CALLS:
        setattr(os, name, wrap(name))
    began_s = time.process_time()
    try:
        yield counts
    finally:
        counts["cpu_us"] = round(1e6 * (time.process_time() - began_s))
        is_on[0] = False
        for name, function in real.items():
            setattr(os, name, function)


def cost_of(counts: Mapping[str, int], extra: float = 0) -> Cost:
    """Returns what was counted."""
    return Cost(counts["cpu_us"] / 1e6, sum(counts[name] for name in _CALLS), extra)


# How the ranks meet.


def free_port() -> int:
    """Returns a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def place_of(rank: int, size: int) -> Any:
    """Returns the place of a rank among nodes of eight."""
    from slurm_train.distributed.place import RankPlace

    return RankPlace(
        rank=rank,
        local_rank=rank % _PER_NODE,
        node_rank=rank // _PER_NODE,
        world_size=size,
        local_world_size=min(size, _PER_NODE),
        host=f"node{rank // _PER_NODE}",
    )


def open_files() -> int:
    """Returns how many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # names alone


def meeting(size: int, folder: Path) -> Cost:
    """Rank 0 until all ranks have met; they are one other process. Begins with a soft limit of 1,024 descriptors."""
    from slurm_train.distributed.meeting import MeetingPoint
    from slurm_train.distributed.rendezvous import host_meeting

    port = free_port()
    point = MeetingPoint(master_addr="", ports=[port], run_id="bench", attempt=0, timeout_s=300.0, secret="s")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        _call(point, port, size)
        os._exit(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    before, most = open_files(), [0]

    def decide(_: Any) -> None:
        most[0] = open_files() - before

    place = replace(place_of(0, size), local_world_size=size)  # listens on the loopback alone
    with counted() as counts:
        listener, _ = host_meeting(place, point, addresses=["127.0.0.1"], decide=decide)
    listener.close()
    os.waitpid(child, 0)
    return cost_of(counts, most[0])


def _call(point: Any, port: int, size: int) -> None:
    """Calls as all ranks but the first, one after the other, and waits with them."""
    from slurm_train.distributed.meeting import CallerHandshake, Channel

    waiting = []
    for rank in range(1, size):
        while True:
            try:
                channel = Channel(socket.create_connection(("127.0.0.1", port), timeout=60.0))
                break
            except OSError:
                time.sleep(0.01)
        CallerHandshake(channel, point, rank=rank, host=f"node{rank // _PER_NODE}").prove(
            deadline=time.monotonic() + 60.0
        )
        channel.send_value(None, deadline=time.monotonic() + 60.0)
        waiting.append(channel)
    for channel in waiting:
        channel.receive_value(deadline=time.monotonic() + 300.0)


def start_of_all(size: int, folder: Path) -> Cost:
    """All ranks meet and take torch's store; those but rank 0 are one other process. Extra: seconds until all have it.

    Begins with a soft limit of 1,024 descriptors.
    """
    import torch.distributed as dist

    from slurm_train.distributed.meeting import MeetingPoint
    from slurm_train.distributed.rendezvous import allow_files, open_store

    point = MeetingPoint(master_addr="", ports=[free_port()], run_id="bench", attempt=0, timeout_s=300.0, secret="s")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    began_s = time.monotonic()
    child = os.fork()
    if child == 0:
        allow_files(size)
        _call(point, point.ports[0], size)

        def take_store(_: int) -> Any:
            store = dist.TCPStore("127.0.0.1", point.ports[0], is_master=False, wait_for_workers=False)
            store.add("arrived", 1)
            return store

        # At the same time, as ranks do: torch asks for the name of its own address, and a lost answer takes 5 s.
        with ThreadPoolExecutor(256) as pool:
            kept = list(pool.map(take_store, range(1, size)))
        assert kept
        os._exit(0)
    store, _ = open_store(replace(place_of(0, size), local_world_size=size), point)
    while store.add("arrived", 0) < size - 1:
        time.sleep(0.05)
    took_s = time.monotonic() - began_s
    os.waitpid(child, 0)
    return Cost(time.process_time(), extra=round(took_s, 1))


def waiting(size: int, folder: Path) -> Cost:
    """A rank that waits for a rank 0 that is late; extra: connections of all ranks in a second."""
    from slurm_train.distributed.master import candidate_ports
    from slurm_train.distributed.meeting import MeetingPoint, PortSearch

    calls, real = [0], socket.socket.connect_ex

    class Counting(socket.socket):
        def connect_ex(self, address: Any) -> int:
            calls[0] += 1
            return real(self, address)

    socket.socket = Counting  # type: ignore[misc]
    ports = candidate_ports("bench")
    point = MeetingPoint(master_addr="", ports=ports, run_id="bench", attempt=0, timeout_s=300.0, secret="s")
    search = PortSearch(place_of(1, size), point)
    search.set_targets([("127.0.0.1", port) for port in ports])
    with counted() as counts:
        assert search.run(until=time.monotonic() + _WATCHED_S) is None
    return cost_of(counts, round(size * calls[0] / _WATCHED_S))


def _preflight(folder: Path, rank: int, size: int, **point: Any) -> Any:
    from slurm_train.config.schema import ClusterSection, RunConfig
    from slurm_train.distributed.meeting import MeetingPoint
    from slurm_train.rundir.paths import RunDirectory
    from slurm_train.tools.doctor.preflight import Preflight

    num_nodes = max(size // _PER_NODE, 1)
    run = RunDirectory(folder / "n" / "run")
    run.attempt_logs(0).mkdir(parents=True)
    facts = {"master_addr": "localhost", "ports": [free_port()], "run_id": "bench", "attempt": 0, "secret": "s"}
    return Preflight(
        run,
        RunConfig(cluster=ClusterSection(nodes=num_nodes, gpus_per_node=_PER_NODE)),
        place_of(rank, size),
        MeetingPoint(**{**facts, "timeout_s": 300.0, **point}),
        {},
        tuple(f"node{number}" for number in range(num_nodes)),
        (_PER_NODE,) * num_nodes,
        world_size=size,
    )


def preflight_waiting(size: int, folder: Path) -> Cost:
    """A rank of the preflight that waits for rank 0; extra: file operations and name look-ups of all in a second."""
    from slurm_train.tools.doctor import gather

    looked_up, real = [0], gather.resolve

    def resolve(name: str) -> Any:
        looked_up[0] += 1
        return real(name)

    gather.resolve = resolve
    preflight = _preflight(folder, 9, size, timeout_s=_WATCHED_S)
    preflight.report = {"rank": None, "node": None}
    with counted() as counts:
        assert preflight._find_rank_0() is None
    cost = cost_of(counts)
    return replace(cost, extra=round(size * (cost.calls + looked_up[0]) / _WATCHED_S))


def preflight_look(size: int, folder: Path) -> Cost:
    """Rank 0 looks once what the nodes that have not connected have written: all nodes but its own are slow."""
    from slurm_train.distributed.meeting import Meeting, listen
    from slurm_train.tools.doctor.facts import JobFacts
    from slurm_train.tools.doctor.preflight import AbsentNodes

    preflight = _preflight(folder, 0, size)
    preflight._folder.mkdir()
    for number in range(1, size // _PER_NODE):
        preflight._file(number).write_text(json.dumps({"rank": {}, "node": {"node": f"node{number}"}}))
    listener = listen(preflight.point, family=socket.AF_INET, address="127.0.0.1")
    assert listener is not None
    meeting = Meeting(listener, preflight.point, world_size=size, host="node0")
    absent = AbsentNodes(preflight, meeting, JobFacts(names=preflight.nodes, world_size=size, gpus_per_node=8, port=1))
    absent._looked_s -= 10.0
    with counted() as counts:
        assert not absent.is_enough()
    return cost_of(counts)


def preflight_verdict(size: int, folder: Path) -> Cost:
    """Rank 0 applies all rules to a healthy job."""
    from slurm_train.tools.doctor.node_rules import find_faults
    from tests.tools.doctor.test_node_rules import healthy

    job = healthy(max(size // _PER_NODE, 2), _PER_NODE)
    nodes = []
    for number, node in enumerate(job.nodes):
        address = f"10.1.{number >> 8}.{number & 255}"
        nodes.append(replace(node, address=address, addresses={"eth0": address}, own_addresses=[address]))
    # Each is asked by a few others.
    probes = [replace(probe, seen_after_s=dict(list(probe.seen_after_s.items())[:4])) for probe in job.probes]
    job = replace(job, nodes=nodes, probes=probes)
    with counted() as counts:
        find_faults(job)
    return cost_of(counts)


def group(size: int, folder: Path) -> Cost:
    """A gloo group of all ranks, opened and used once; extra: descriptors of a rank."""
    import torch
    import torch.distributed as dist

    from slurm_train.worker.rank import gloo_environment

    os.environ.update(gloo_environment(_TARGET))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    shared, limit = dist.HashStore(), timedelta(seconds=120)
    shared.set_timeout(limit)
    groups: list[Any] = [None] * size

    def join(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(shared, rank, size, limit)
        groups[rank].allreduce([torch.ones(4)]).wait()
        groups[rank].barrier().wait()

    before, began_s = open_files(), time.process_time()
    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Cost((time.process_time() - began_s) / size, extra=(open_files() - before) / size)


# What is read and written while they train.


_START = """
import os, sys
stage, n = os.environ.get("SLURM_TRAIN_STAGE") or "/none", [0]
sys.addaudithook(lambda event, args: n.__setitem__(0, n[0] + (event == "open" and not str(args[0]).startswith(stage))))
import slurm_train
if stage != "/none":
    from slurm_train.code.imports import import_from_stage
    import_from_stage(stage)
import slurm_train.worker.rank, slurm_train.train.build, slurm_train.checkpoint.tensors
print(n[0])
"""


def starting(size: int, folder: Path, *, variables: Mapping[str, str] | None = None) -> Cost:
    """What a rank opens until it can train: its imports; the same at every size."""
    env = {**os.environ, **(variables or {})}
    done = subprocess.run([sys.executable, "-c", _START], env=env, capture_output=True, text=True, check=True)
    return Cost(calls=int(done.stdout))


def starting_staged(size: int, folder: Path) -> Cost:
    """The same with `cluster.stage_python`; what lies on the node's own disk is not counted. Copies this Python."""
    from slurm_train.supervise.staging import stage_python

    srun = folder / "srun"
    srun.write_text('#!/bin/bash\nwhile [ "${1#--}" != "$1" ]; do shift; done\nSLURMD_NODENAME=node0 exec "$@"\n')
    srun.chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}"}
    variables = stage_python(str(folder / "disk"), folder, ("node0",), env)
    assert variables, "the packages were not staged"
    return starting(size, folder, variables=variables)


def training(size: int, folder: Path) -> Cost:
    """A minute of a rank that trains: heartbeat and fence, of all eight ranks of a node, as a mean."""
    from slurm_train.rundir.attempts import check_fence
    from slurm_train.rundir.heartbeat import Heartbeat
    from slurm_train.rundir.paths import RunDirectory
    from slurm_train.session.signals import NodeLeader, start_orphan_watchdog

    run = RunDirectory(folder / "n" / "run")
    run.attempt_logs(0).mkdir(parents=True)
    run.epochs.mkdir()
    (run.epochs / "attempt_0").write_text("{}")

    def is_overtaken() -> bool:
        check_fence(run, 0)
        return False

    hearts = [Heartbeat() for _ in range(_PER_NODE)]
    for rank, heart in enumerate(hearts):
        heart.start(run, 0, rank=rank, host="node0", limits=None, local_rank=rank)
    with counted() as counts:
        for _ in range(_PER_NODE):
            start_orphan_watchdog(
                parent=os.getppid(),
                is_overtaken=is_overtaken,
                on_orphaned=lambda: None,
                on_overtaken=lambda: None,
                leader=NodeLeader(str(folder)),
            )
        time.sleep(_WATCHED_S)
    cost = cost_of({**counts, "pwrite": 0})  # what is written lies in the node's cache until the fdatasync
    each = 60.0 / _WATCHED_S / _PER_NODE
    return Cost(cost.cpu_s * each, cost.calls * each)


def _beats(folder: Path, size: int) -> Any:
    """Returns a run whose ranks have all written a heartbeat."""
    from slurm_train.rundir.paths import RunDirectory

    run = RunDirectory(folder / "n" / "run")
    run.attempt_logs(0).mkdir(parents=True)
    for rank in range(size):
        beat = {
            "rank": rank,
            "host": f"node{rank // _PER_NODE}",
            "pid": 1,
            "step_id": "1.0",
            "step": 10,
            "marks": 20,
            "phase": "step",
            "settled": True,
            "beats": 30,
            "written_unix_s": time.time(),
            "pace": (10, 10.0 + 0.01 * (rank % 7), 10.0, 1.0, 1.0, 0.1),
        }
        with run.heartbeats(0, rank // _PER_NODE * _PER_NODE).open("ab") as file:
            file.write(json.dumps(beat).encode().ljust(1024))
    return run


def one_look(size: int, folder: Path) -> Cost:
    """The supervisor reads all heartbeats once, which it does every second."""
    from slurm_train.rundir.heartbeat import read_beats

    run = _beats(folder, size)
    with counted() as counts:
        assert len(read_beats(run, 0)) == size
    return cost_of(counts)


def hang_found(size: int, folder: Path) -> Cost:
    """A hang with a limit of 300 s while each heartbeat takes 3 ms to read; extra: seconds until it is found."""
    from slurm_train.rundir.heartbeat import Beat, Limits
    from slurm_train.supervise.hang import Observer

    beats = {
        rank: Beat(rank=rank, host="n", pid=1, step=5, marks=9, phase="step", settled=True, beats=3)
        for rank in range(size)
    }
    observer, now_s, look_s = Observer(Limits(600.0, 300.0), world_size=size), 0.0, 3e-3 * size
    with counted() as counts:
        while now_s < 7200.0:
            observer.look(beats, began_s=now_s, ended_s=now_s + look_s)
            now_s += look_s
            if observer.is_hung():
                break
            now_s += 3.0
    return cost_of(counts, round(now_s))


def judging(size: int, folder: Path) -> Cost:
    """The supervisor judges one window of paces."""
    from slurm_train.rundir.timing import PaceWindow, RankPace
    from slurm_train.supervise.stragglers import WindowJudge

    ranks = tuple(
        RankPace(rank, f"node{rank // _PER_NODE}", 1.0 + rank * 7919 % 1000 * 1e-5, 0.1, 0.0, 0.0)
        for rank in range(size)
    )
    window = PaceWindow(
        attempt=0, begin_unix_s=0.0, end_unix_s=1.0, from_step=0, to_step=9, samples=9, ranks=ranks, findings=()
    )
    with counted() as counts:
        WindowJudge(excess=0.1).judge(window)
    return cost_of(counts)


def autopsy(size: int, folder: Path) -> Cost:
    """The supervisor says who hangs, among ranks that all stand at the same point."""
    from slurm_train.rundir.heartbeat import Beat, Limits
    from slurm_train.supervise.hang import Observer

    beats = {
        rank: Beat(rank=rank, host="n", pid=1, step=5, marks=9, phase="step", settled=True, beats=3)
        for rank in range(size)
    }
    observer = Observer(Limits(600.0, 300.0), world_size=size)
    observer.look(beats, began_s=0.0, ended_s=0.1)
    with counted() as counts:
        observer.explain({})
    return cost_of(counts)


def status(size: int, folder: Path) -> Cost:
    """`status` names the oldest heartbeat of one run, which the supervisor has noted."""
    from slurm_train.rundir.heartbeat import note_oldest, read_beats, read_oldest

    run = _beats(folder, size)
    note_oldest(run, 0, read_beats(run, 0))
    with counted() as counts:
        assert read_oldest(run, 0) is not None
    return cost_of(counts)


def data_shards(size: int, folder: Path) -> Cost:
    """A rank opens prepared text of 10,000 shards and reads a batch of 64; extra: descriptors that it keeps."""
    import numpy as np

    from slurm_train.data import shards, text

    out = folder / "text"
    out.mkdir()
    made = tuple(shards.Shard(f"train_{number:05d}.bin", 257, "0" * 32) for number in range(_SHARDS))
    for shard in made:
        (out / shard.file).write_bytes(bytes(2 * 257))
    splits = {"train": shards.SplitIndex(1, 1, 256 * _SHARDS, made), "heldout": shards.SplitIndex(0, 0, 0, ())}
    shards.write_index(out, shards.ShardIndex("text", "0", "bytes", "<u2", 257, 256, splits))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    before = open_files()
    with counted() as counts:
        source = text.build(path=str(out), context=64)
        assert source is not None
        source.batch(np.random.default_rng(0).permutation(len(source))[:64])
    return cost_of(counts, open_files() - before)


# What the supervisor does between two attempts.


def rank_logs(size: int, folder: Path) -> Cost:
    """The supervisor makes the ranks' logs before it starts them."""
    from slurm_train.config.schema import RunConfig
    from slurm_train.rundir.paths import RunDirectory
    from slurm_train.slurm.allocation import Allocation
    from slurm_train.supervise.job import SlurmJob
    from slurm_train.supervise.nodes import NodePool
    from slurm_train.supervise.srun import SrunStep

    run = RunDirectory(folder / "n" / "run")
    allocation = Allocation(requeue_id="1", restart_count=0, nodes=("node0",), tasks_per_node=(size,))
    job = SlurmJob(run, allocation, {}, retry_s=0.0)
    command = ["srun", f"--output={folder}/rank_%t.log"]
    step = SrunStep(run, RunConfig(), job, pool=NodePool.whole(allocation), command=command, env={})
    with counted() as counts:
        step._make_logs(folder)
    assert len(list(folder.glob("rank_*.log"))) == size
    return cost_of(counts)


def first_failed(size: int, folder: Path) -> Cost:
    """The supervisor reads the marks of ranks that have all failed, and what srun said of each node."""
    from slurm_train.rundir.events import FailureMark, first_mark
    from slurm_train.rundir.paths import RunDirectory
    from slurm_train.slurm.records import violent_end

    run = RunDirectory(folder / "n" / "run")
    logs = run.attempt_logs(0)
    logs.mkdir(parents=True)
    said = ""
    for node in range(size // _PER_NODE):
        ranks = range(node * _PER_NODE, (node + 1) * _PER_NODE)
        facts: dict[str, Any] = {"host": f"node{node}", "exit_code": 1, "message": "RuntimeError: lost"}
        marks = [FailureMark(rank=rank, time_unix_s=rank, **facts) for rank in ranks]
        (logs / f"failures@node{node}.jsonl").write_text("".join(json.dumps(asdict(one)) + "\n" for one in marks))
        said += f"srun: error: node{node}: tasks {ranks[0]}-{ranks[-1]}: Exited with exit code 1\n"
    with counted() as counts:
        assert first_mark(run, 0) is not None
        violent_end(said)
    return cost_of(counts)


# Many runs; the size is the number of them.


def status_of_runs(size: int, folder: Path) -> Cost:
    """`status` reads the files of all runs below a root; all have failed."""
    from slurm_train.rundir.lookup import list_runs
    from slurm_train.rundir.paths import RunDirectory
    from slurm_train.rundir.sweep import Element
    from slurm_train.slurm.commands import SlurmCommands
    from slurm_train.slurm.queue_view import QueueView
    from slurm_train.status.run_status import Surveyor
    from tests.support.run_facts import RunFacts, attempt

    ledger = attempt(0, reason="failed", action="stop", note="rank 0: no")
    facts = RunFacts(job_ids=("12",), ledger=ledger, metrics=({"step": 1, "loss": 2.0, "max_steps": 9},))
    for number in range(size):
        facts.write(RunDirectory(folder / "root" / "name" / f"{number:012x}"))
    surveyor = Surveyor(QueueView(SlurmCommands({"PATH": "/nowhere"})))
    with counted() as counts:
        survey = surveyor.look([Element(run=run) for run in list_runs(folder / "root")])
    assert len(survey.statuses) == size
    return cost_of(counts)


def sweeping(size: int, folder: Path) -> Cost:
    """A sweep of so many points is composed, planned, written and submitted to programs that answer at once."""
    from slurm_train import verbs
    from tests.fakes.slurm_programs import SlurmPrograms
    from tests.support.command_line import TINY, new_project

    os.environ["PATH"] = SlurmPrograms(folder / "bin").path
    os.environ["HOME"] = str(folder)
    os.chdir(new_project(folder / "project"))
    words = ["-m", "+cluster=1x8", *TINY, f"seed=range({size})", f"run.root={folder}/root"]
    with (
        Path(os.devnull).open("w") as nothing,
        contextlib.redirect_stdout(nothing),
        contextlib.redirect_stderr(nothing),
        counted() as counts,
    ):
        assert verbs.run(words) == 0
    assert len(list((folder / "root" / "tiny-numbers").iterdir())) == size
    return cost_of(counts, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


# Checkpoints.


def _manifest(size: int) -> Any:
    from slurm_train.checkpoint.manifest import CheckpointHeader, FileRecord, Manifest, digest_of

    header = CheckpointHeader(
        step=1000, samples=1, epoch=0, world_size=size, mesh={"dp_shard": size}, batch_plan={}, config_hash="a" * 64,
        data_fingerprint="b" * 32, torch_version="2.13.0", attempt=0,
    )  # fmt: skip
    record = FileRecord(64, digest_of(bytes(64)).decode().partition(":")[2])
    names = [name for rank in range(size) for name in (f"rank_{rank:05d}.pt", f"__{rank}_0.distcp")]
    return Manifest.of(header, dict.fromkeys(names, record))


def _staged(size: int, root: Path) -> Any:
    """Returns a place, and a staging directory in it that holds what two files per rank need."""
    from slurm_train.checkpoint.commit import Place

    manifest = _manifest(size)
    root.mkdir(mode=0o700)
    place = Place(root=root, attempt=0)
    staging = place.begin(1000)
    for name in manifest.files:
        (staging / name).write_bytes(bytes(64))
        (staging / name).chmod(0o600)
    return place, staging, manifest


def committing(size: int, folder: Path) -> Cost:
    """Rank 0 gives a checkpoint its name, and removes the one before it."""
    place, staging, manifest = _staged(size, folder / "c")
    older = place.commit(staging, manifest)
    staging = place.begin(2000)
    for name in manifest.files:
        (staging / name).hardlink_to(older / name)
    newer = replace(manifest, step=2000)
    with counted() as counts:
        place.prune(place.commit(staging, newer))
    assert not older.exists()
    return cost_of(counts)


def verifying(size: int, folder: Path) -> Cost:
    """Rank 0's part of verifying a checkpoint before a resume; extra: bytes that it reads, of 64 per file."""
    from slurm_train.checkpoint.verify import read_manifest, share_of, verify_share

    place, staging, manifest = _staged(size, folder / "c")
    path = place.commit(staging, manifest)
    with counted() as counts:
        verify_share(path, read_manifest(path), number=0, of=size)
    return cost_of(counts, 64 * len(share_of(manifest, 0, size)))


def restoring(size: int, folder: Path) -> Cost:
    """Every rank looks at the checkpoint that rank 0 has chosen, and finds its own file; loading is not counted."""
    from slurm_train.checkpoint.choice import check_owners
    from slurm_train.checkpoint.verify import read_manifest, share_of

    place, staging, manifest = _staged(size, folder / "c")
    path = place.commit(staging, manifest)
    with counted() as counts:
        check_owners(path, share_of(read_manifest(path), 1, size))
        read_manifest(path)
    return cost_of(counts)


def loading(size: int, folder: Path) -> Cost:
    """The files of others that a rank opens to load 1,000 parameters of sharded training: for what is not sharded."""
    import torch
    from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

    from slurm_train.checkpoint.division import part_if_alike

    names = [f"layer.{number}" for number in range(1000)]
    groups = [{"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": names}]
    steps = {name: {"step": torch.tensor(1.0)} for name in names}
    state = {"optimizer": {"state": steps, "param_groups": groups}}
    parts = [part_if_alike(state, rank=rank, num_ranks=size) for rank in range(size)]
    plans = [create_default_local_save_plan(flatten_state_dict(part)[0], rank == 0) for rank, part in enumerate(parts)]
    return Cost(calls=sum(bool(plan.items) for plan in dedup_save_plans(plans)))


def local_restoring(size: int, folder: Path) -> Cost:
    """Every rank finds out which node copies what of a local checkpoint; extra: bytes that each rank is sent."""
    import pickle

    from slurm_train.checkpoint.local import Held, choose_reachable

    text, held = _manifest(size).to_json(), []
    for rank in range(size):
        first = rank // _PER_NODE * _PER_NODE  # of 2 x size files, by their sorted names
        ranks = range(first, first + _PER_NODE)
        held.append({Held(1000, 0, "a" * 32): [n for one in ranks for n in (one, size + one)]})
    with counted() as counts:
        assert choose_reachable(held, lambda *_: text) is not None
    return cost_of(counts, len(pickle.dumps(held[0])) * size + len(text))


def _plans(size: int) -> list[Any]:
    """Returns what each rank holds of 20 matrices that are wider than high, each cut into N."""
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    def item(rank: int, number: int) -> WriteItem:
        chunk = ChunkStorageMetadata(torch.Size([rank, 0]), torch.Size([1, 2 * size]))
        data = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size([size, 2 * size]))
        return WriteItem(MetadataIndex(f"w{number}", chunk.offsets), WriteItemType.SHARD, tensor_data=data)

    return [SavePlan([item(rank, number) for number in range(20)], planner_data={}) for rank in range(size)]


def planning(size: int, folder: Path) -> Cost:
    """Rank 0 plans the first save of 20 matrices."""
    from slurm_train.checkpoint.tensors import share_out

    plans = _plans(size)
    with counted() as counts:
        share_out(plans)
    return cost_of(counts)


def _written_again(size: int, folder: Path) -> tuple[dict[str, int], int]:
    """Writes the `.metadata` of a save of 20 matrices that rank 0 has planned before; returns the cost, bytes kept."""
    from slurm_train.checkpoint.tensors import TensorPlan, describe_tensors, share_out

    plan = TensorPlan({}, group=None)
    plan._share = share_out(_plans(size))[0]
    lengths = [[1] * 20] * size
    (folder / ".metadata").unlink(missing_ok=True)
    with counted() as counts:
        plan.settle([plan.number])
        describe_tensors(folder, plan, lengths)
    return counts, len(plan._share.packed)


def planning_again(size: int, folder: Path) -> Cost:
    """Rank 0 plans a later save of the same, and writes its `.metadata`; extra: bytes that it keeps between saves."""
    return cost_of(*_written_again(size, folder))


def describing(size: int, folder: Path) -> Cost:
    """A rank reads `.metadata` once; extra: its bytes."""
    from slurm_train.checkpoint.metadata import read_metadata

    _written_again(size, folder)
    with counted() as counts:
        read_metadata(folder)
    return cost_of(counts, (folder / ".metadata").stat().st_size)


PARTS = (
    Part("meeting", "A, C: meeting of all ranks", meeting, False, "descriptors"),
    Part("start_of_all", "A, C, D: all ranks hold torch's store", start_of_all, False, "s on two cores"),
    Part("waiting", "B: waiting for a late rank 0", waiting, True, "connections/s of all", growth=0.3),
    Part("preflight_waiting", "B: the same in the preflight", preflight_waiting, True, "look-ups/s of all", growth=0.3),
    Part("group", "E: a gloo group", group, True, "descriptors", growth=0.6, largest=128),
    Part("preflight_look", "F: preflight, one look for absent nodes", preflight_look, False, limit_s=1.0),
    Part("preflight_verdict", "G: preflight, the verdict", preflight_verdict, False),
    Part("starting", "H: start of a rank, its imports", starting, True, limit_s=60.0),
    Part("starting_staged", "H: the same, cluster.stage_python", starting_staged, True, limit_s=300.0),
    # A twentieth of what the file server does in a minute.
    Part("training", "I: a minute of training", training, True, limit_s=3.0),
    Part("one_look", "J: one look at the heartbeats", one_look, False, limit_s=5.0),
    Part("hang_found", "J: a hang is found", hang_found, False, "s until it is found", limit_s=60.0),
    Part("judging", "K: judging a window", judging, False, limit_s=5.0),
    Part("autopsy", "K: saying who hangs", autopsy, False, limit_s=5.0),
    Part("committing", "L: commit, and removal of the one before", committing, False, at_once=16),
    Part("restoring", "M: each rank looks at the checkpoint", restoring, True, growth=0.3),
    Part("verifying", "N: rank 0's part of verifying", verifying, False, "bytes", growth=0.3),
    Part("loading", "M: files that a rank opens to load", loading, True, limit_s=60.0, growth=0.3, largest=1024),
    Part("planning", "O: plan, first save", planning, False, limit_s=60.0),
    Part("planning_again", "O: plan and .metadata, a later save", planning_again, False, "bytes kept"),
    Part("describing", "O: a rank reads .metadata", describing, True, "bytes", limit_s=60.0),
    Part("local_restoring", "P: who copies what from local disks", local_restoring, True, "bytes sent", growth=1.1),
    Part("rank_logs", "Q: logs of the ranks are made", rank_logs, False, at_once=16, limit_s=5.0),
    Part("first_failed", "Q: who failed first", first_failed, False, limit_s=10.0),
    Part("status", "R: heartbeats for `status`", status, False, limit_s=5.0),
    Part("status_of_runs", "S: `status` of as many runs", status_of_runs, False, at_once=16, limit_s=60.0),
    Part("sweeping", "S: a sweep of as many points", sweeping, False, "MB of memory", at_once=16, limit_s=900.0),
    Part("data_shards", "T: 10,000 shards of data, a batch", data_shards, True, "descriptors", limit_s=60.0),
)


def growth_of(costs: Mapping[int, Cost]) -> float:
    """Returns the exponent of whatever grows most between the two largest sizes."""
    (small, first), (large, last) = sorted(costs.items())[-2:]
    found = [_exponent(small, first.calls, large, last.calls), _exponent(small, first.extra, large, last.extra)]
    if last.cpu_s > _LEAST_CPU_S:
        found.append(_exponent(small, first.cpu_s, large, last.cpu_s))
    return max(found)


def estimated_s(
    part: Part, costs: Mapping[int, Cost], *, op_s: float, server_ops: float, num_ranks: int = _TARGET
) -> float:
    """Returns the seconds that a part takes, by the two largest sizes."""
    (small, first), (large, last) = sorted(costs.items())[-2:]
    ratio = num_ranks / large
    cpu_s = last.cpu_s * ratio ** max(_exponent(small, first.cpu_s, large, last.cpu_s), 0.0)
    calls = last.calls * ratio ** _exponent(small, first.calls, large, last.calls)
    return cpu_s + max(calls * op_s / part.at_once, calls * (num_ranks if part.is_each_rank else 1) / server_ops)


def _exponent(small: int, first: float, large: int, last: float) -> float:
    return math.log(last / first) / math.log(large / small) if first > 0 and last > 0 else 0.0


def measured(part: Part, size: int) -> Cost:
    """Returns what a part costs at a size, in a process of its own."""
    argv = [sys.executable, "-m", "tests.benchmarks.bench_scale", "--inside", part.name, str(size)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{part.name} of {size} ranks failed:\n{done.stderr}")
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def sizes_of(part: Part, asked: Sequence[int]) -> list[int]:
    """Returns at least two sizes, none beyond what the part can do."""
    sizes = sorted({size for size in asked if size < part.largest} | {min(max(asked), part.largest)})
    return sizes if len(sizes) > 1 else [sizes[0] // 4, sizes[0]]


def cell(part: Part, cost: Cost) -> str:
    """Returns what one size cost, in a few words."""
    words = [f"{cost.cpu_s:.2g} s"] if cost.cpu_s > 0.005 else []
    words += [f"{cost.calls:,.0f} calls"] if cost.calls else []
    words += [f"{cost.extra:,.0f} {part.extra}"] if part.extra else []
    return ", ".join(words) or "0 s"


def show(results: Mapping[str, Any], *, before: Mapping[str, Any] | None = None) -> str:
    """Returns results as a table in Markdown, with those of before in front of them where they are given."""
    lines = ["| part | ranks | before | now |" if before else "| part | ranks | now |"]
    lines.append("|---|--:|---|---|" if before else "|---|--:|---|")
    for part in PARTS:
        if part.name not in results:
            continue
        texts, sizes = [], []
        for found in (before or {}, results):
            row = found.get(part.name)
            if row is None:
                continue
            costs = {int(size): Cost(**cost) for size, cost in row["costs"].items()}
            size, cost = max(costs.items())
            sizes.append(size)
            texts.append(f"{cell(part, cost)}; N^{row['growth']:.1f}; ~{_seconds(row['estimate_s'])}")
        lines.append(f"| {part.row} | {max(sizes):,} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _seconds(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.0f} h"


def draw(before: Mapping[str, Any], after: Mapping[str, Any], target: Path) -> None:
    """Draws the estimates for 16,384 ranks, before and after, as a PNG. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    parts = [part for part in PARTS if part.name in before and part.name in after][::-1]
    figure, axes = pyplot.subplots(figsize=(9, 0.42 * len(parts) + 1), layout="constrained")
    for number, part in enumerate(parts):
        ends = [max(found[part.name]["estimate_s"], 1e-3) for found in (before, after)]
        axes.plot(ends, [number, number], color="0.7", zorder=1)
        axes.scatter(ends[:1], [number], color="tab:red", zorder=2, label="before" if number == 0 else None)
        axes.scatter(ends[1:], [number], color="tab:green", zorder=3, label="now" if number == 0 else None)
    axes.set_yticks(range(len(parts)), [part.row for part in parts])
    axes.set_xscale("log")
    axes.set_xlabel("estimated seconds at 16,384 ranks")
    axes.grid(axis="x", alpha=0.3)
    axes.legend()
    figure.savefig(target, dpi=130)


def main() -> None:
    """Measures, or compares two measurements; ends with 1 where a limit does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--parts", nargs="*", choices=[part.name for part in PARTS], metavar="PART")
    parser.add_argument("--op-ms", type=float, default=1.0, help="one call to the shared file system")
    parser.add_argument("--server-ops", type=float, default=30000.0, help="calls a second that its server takes")
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"), help="measure nothing")
    parser.add_argument("--plot", type=Path, help="draw what is compared")
    parser.add_argument("--inside", nargs=2, metavar=("PART", "SIZE"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    by_name = {part.name: part for part in PARTS}
    if asked.inside:
        with tempfile.TemporaryDirectory(prefix="slurm_train-bench-", dir="/dev/shm") as folder:
            print(json.dumps(asdict(by_name[asked.inside[0]].measure(int(asked.inside[1]), Path(folder)))), flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            Path(folder).mkdir()
        os._exit(0)  # threads of what was measured may still run
    if asked.compare:
        before, after = (json.loads(path.read_text()) for path in asked.compare)
        print(show(after, before=before))
        if asked.plot:
            draw(before, after, asked.plot)
        return
    results: dict[str, Any] = {}
    broken = []
    for part in (by_name[name] for name in asked.parts or by_name):
        costs = {size: measured(part, size) for size in sizes_of(part, asked.sizes)}
        growth, ahead_s = (
            growth_of(costs),
            estimated_s(part, costs, op_s=asked.op_ms / 1e3, server_ops=asked.server_ops),
        )
        results[part.name] = {
            "costs": {str(size): asdict(cost) for size, cost in costs.items()},
            "growth": round(growth, 2),
            "estimate_s": round(ahead_s, 4),
        }
        if asked.json:
            asked.json.write_text(json.dumps(results, indent=1) + "\n")
        broken += [part.name] * (growth > part.growth or ahead_s > part.limit_s)
        cells = "; ".join(f"{size:,}: {cell(part, cost)}" for size, cost in costs.items())
        mark = "BROKEN" if part.name in broken else "ok"
        print(f"{part.row:<42} {mark:<6} N^{growth:.1f}, at 16,384 {_seconds(ahead_s):>8}   {cells}", flush=True)
    if broken:
        print(f"over a limit: {', '.join(broken)}")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
