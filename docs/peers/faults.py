"""The faults of the comparison: each happens to all peers' jobs in the same way at the same step."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from docs.peers.job import Job
from slurm_train.slurm.records import parse_record
from slurm_train.tools.devcluster.cluster import start_node, stop_node
from slurm_train.tools.devcluster.plan import DEFAULT_STATE_DIR
from tests.support.waiting import wait_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that happens to a training.

    Args:
        what: for the table.
        cause: does it to all jobs, once each has done AT_STEP steps; a context, so that it can be undone at the end.
        grace_s: GraceTime of the jobs' QOS; None: a QOS that nobody preempts.
        step_s: seconds of a step.
        time_limit_min: of the job.
        is_gated: all jobs wait for each other at AT_STEP, and go on when the fault comes.
        ends_cancelled: the right end is a cancelled job, not a finished training.
    """

    what: str
    cause: Callable[[list[Job], str], object]
    grace_s: int | None = None
    step_s: float = 0.25
    time_limit_min: int = 30
    is_gated: bool = True
    ends_cancelled: bool = False


@contextmanager
def preempt(_jobs: list[Job], qos: str) -> Iterator[None]:
    """An urgent job takes all nodes for a second."""
    words = ("--parsable", f"--qos={qos}", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    urgent = _run("sbatch", *words).strip()
    try:
        yield
    finally:
        _run("scancel", "--quiet", urgent, must=False)


@contextmanager
def nothing(_jobs: list[Job], _qos: str) -> Iterator[None]:
    """What happens, happens by itself."""
    yield


@contextmanager
def kill_rank(jobs: list[Job], _qos: str) -> Iterator[None]:
    """Kills rank 1 of each."""
    for job in jobs:
        for pid in _rank_pids(job.job_id, rank=1):
            os.kill(pid, signal.SIGKILL)
    yield


@contextmanager
def lose_nodes(jobs: list[Job], _qos: str) -> Iterator[None]:
    """Kills the daemons of the nodes that the jobs run on, and declares the nodes down; the ranks there run on."""
    nodes = sorted({show_job(job)["NodeList"] for job in jobs})
    for node in nodes:
        stop_node(DEFAULT_STATE_DIR, node=node)
    _run("scontrol", "update", f"NodeName={','.join(nodes)}", "State=DOWN", "Reason=campaign")
    try:
        yield
    finally:
        _run("scontrol", "update", f"NodeName={','.join(nodes)}", "State=RESUME")
        for node in nodes:
            start_node(DEFAULT_STATE_DIR, node=node)


@contextmanager
def damage(jobs: list[Job], _qos: str) -> Iterator[None]:
    """Requeues each, flips a byte in the middle of the newest checkpoint while it waits, and lets it start."""
    for job in jobs:
        _run("scontrol", "requeuehold", job.job_id)
    for job in jobs:
        wait_for(lambda job=job: show_job(job)["JobState"] == "PENDING", within_s=60, what="a held job")
        flip_byte(job.newest_checkpoint)
        _run("scontrol", "release", job.job_id)
    yield


@contextmanager
def cancel(jobs: list[Job], _qos: str) -> Iterator[None]:
    """Cancels each."""
    _run("scancel", *(job.job_id for job in jobs))
    yield


FAULTS: dict[str, Fault] = {
    # What is left to do must outlast the grace and KillWait, or a job that ignores the signal ends well.
    "grace": Fault(what="preempted, 15 s grace", cause=preempt, grace_s=15, step_s=1.0),
    "nograce": Fault(what="preempted, no grace", cause=preempt, grace_s=0, step_s=1.0),
    # Slurm's warning may come a minute early, and submitit asks for it 90 s before the end: less would hit the start.
    "limit": Fault(what="time limit, with a warning", cause=nothing, step_s=4.6, time_limit_min=4, is_gated=False),
    "rank": Fault(what="a rank is killed", cause=kill_rank),
    "node": Fault(what="its node is lost", cause=lose_nodes),
    "damage": Fault(what="a byte of the newest checkpoint is flipped", cause=damage),
    "scancel": Fault(what="`scancel`", cause=cancel, ends_cancelled=True),
}


def flip_byte(path: Path) -> None:
    """Flips the bits of one byte in the middle of a file, and leaves its time as it was."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(status.st_size // 2)
        byte = file.read(1)[0]
        file.seek(status.st_size // 2)
        file.write(bytes([byte ^ 0x40]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def show_job(job: Job) -> dict[str, str]:
    """Returns the job's record."""
    return parse_record(_run("scontrol", "show", "job", job.job_id))


def _rank_pids(job_id: str, *, rank: int) -> list[int]:
    wanted = {f"SLURM_JOB_ID={job_id}".encode(), f"SLURM_PROCID={rank}".encode(), b"SLURM_LOCALID=1"}
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                found.append(int(entry.name))
    return found


def _run(*argv: str, must: bool = True) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 or not must, f"{argv}: {done.stderr}"
    return done.stdout
