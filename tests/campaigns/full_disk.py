"""The file system refuses the supervisor around a preemption: whatever it could not write, the run comes back.

First without Slurm: the verb `supervise` in a process of its own, with srun and scontrol as small programs. The ranks
have saved and the job is preempted; every call that makes or changes a file fails, the first, the second, ... with each
of four errors, once alone and once with all that follow it, until the supervisor runs through undisturbed. scontrol
kills the supervisor when it is asked for the requeue, as Slurm does. The job comes back if the requeue was asked for,
and the next start, on a disk with room, finishes the run.

Then on the real Slurm: a small file system of its own holds the root of the runs and is filled up around a preemption.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from slurm_train.config.frozen import dump_config
from slurm_train.config.schema import ClusterSection, RunConfig
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.records import parse_record
from tests.campaigns.checker import History
from tests.campaigns.record import Tally
from tests.campaigns.victims import PATIENCE_S, Victim, golden_run
from tests.support.cluster_faults import mounted_over, take_nodes
from tests.support.command_line import Person
from tests.support.failing_writes import FailingWrites
from tests.support.ledgers import ledger_lines
from tests.support.slurm_runs import at_work, command
from tests.support.waiting import wait_for

ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)
_JOB = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "node1",
    "SLURM_TASKS_PER_NODE": "1",
    "SLURM_JOB_NAME": "full",
}
_RECORD = """JobId=77 JobName=full
   JobState=RUNNING Reason=None Restarts=RESTARTS
   PreemptTime=PREEMPTED
"""
# The step of the ranks saves and ends with 75, in the second start it finishes.
_SRUN = """
case " $* " in *config.yaml*) echo fine node1;;
*) if [ "$SLURM_RESTART_COUNT" = 0 ]; then echo saved > {here}/saved; exit 75; fi; echo '{{}}' > {run}/result.json;;
esac
"""
_SCONTROL = """
case "$*" in
requeue*) echo asked > {here}/requeued; kill -KILL $PPID;;
"show job"*) cat {here}/job;;
"show config") echo "KillWait = 30 sec";;
*) exit 1;;
esac
"""
_LIMIT_S = 60.0
_WORDS = ("+cluster=1x1", "train.max_steps=150", "checkpoint.every_steps=5")


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Causes about so many faults without Slurm, spread over all of them, then two on the real Slurm."""
    number, of_calls = without_slurm(tally, folder / "alone", trials=trials, seed=seed)
    on_slurm(tally, folder)
    return {"calls of the supervisor that change a file": str(of_calls), "faults without Slurm": str(number)}


def without_slurm(tally: Tally, folder: Path, *, trials: int, seed: int) -> tuple[int, int]:
    """Returns how many faults were caused, and how many calls there are."""
    folder.mkdir(parents=True)
    # Imported once; each trial is a fork of this process.
    importlib.import_module("slurm_train.cli.supervise")
    calls = one_trial(folder / "undisturbed", at=0, number=0, onward=False)[1]
    every = [(at, number, onward) for at in range(1, calls + 3) for number in ERRORS for onward in (False, True)]
    pace = max(1, len(every) // trials)
    chosen = every[seed % pace :: pace]
    for at, number, onward in chosen:
        place = folder / f"{at}_{number}_{onward}"
        problems, _ = one_trial(place, at=at, number=number, onward=onward)
        words = f"{errno.errorcode[number]} at call {at}{' and all after it' if onward else ''}"
        tally.add(words, problems)
        if not problems:
            shutil.rmtree(place)
    return len(chosen), calls


def one_trial(place: Path, *, at: int, number: int, onward: bool) -> tuple[list[str], int]:
    """Preempts a run that is supervised under a fault; returns what is wrong, and the number of calls."""
    here, run = place / "bin", RunDirectory(place / "runs" / "full" / "0123abcd")
    make_run(here, run)
    calls = supervise(here, run, restart_count=0, fault=(at, number, onward))
    problems = [] if (here / "requeued").exists() else ["the requeue was not asked for"]
    if not problems:
        (here / "requeued").unlink()
        record = _RECORD.replace("RESTARTS", "1").replace("PREEMPTED", "None")
        (here / "job").write_text(record)
        supervise(here, run, restart_count=1, fault=None)
        ledger = ledger_lines(run)
        if not run.result.exists() or not ledger or ledger[-1].get("reason") != "done":
            problems.append(f"the next start did not finish the run: {ledger[-1:]}")
        problems += [f"attempt {entry['attempt']} has no end" for entry in ledger if "reason" not in entry]
    return problems, calls


def make_run(here: Path, run: RunDirectory) -> None:
    """Makes a run directory as a submission leaves it, and the programs."""
    for path in (here, run.path, run.logs):
        path.mkdir(parents=True, mode=0o700)
    run.config.write_text(dump_config(RunConfig(cluster=ClusterSection())))
    run.plan.write_text('{"world": {"ranks_per_node": [1], "size": 1}}')
    for name, body in (("srun", _SRUN), ("scontrol", _SCONTROL)):
        (here / name).write_text(f"#!/bin/sh\n{body.format(here=here, run=run.path)}")
        (here / name).chmod(0o755)
    (here / "job").write_text(_RECORD.replace("RESTARTS", "0").replace("PREEMPTED", "2026-01-31T09:41:24"))


def supervise(here: Path, run: RunDirectory, *, restart_count: int, fault: tuple[int, int, bool] | None) -> int:
    """Runs the verb in a child with its output beside the run; returns how many calls were counted."""
    counted = here / "calls"
    child = os.fork()
    if child == 0:
        try:
            os.environ.update(_JOB, PATH=f"{here}:/usr/bin:/bin", SLURM_RESTART_COUNT=str(restart_count))
            # The log of a batch script is on the same disk; what it may not say must cost nothing either.
            log = os.open(here / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os._exit(_run_verb(run, fault, counted))
        finally:
            os._exit(70)
    deadline = time.monotonic() + _LIMIT_S
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.02)
    return int(counted.read_text() or 0) if counted.exists() else 0


def _run_verb(run: RunDirectory, fault: tuple[int, int, bool] | None, counted: Path) -> int:
    from slurm_train.verbs import run as run_words

    at, number, onward = fault or (0, 0, False)
    with FailingWrites(run.path, at=at, number=number, onward=onward, counted=counted).installed():
        return run_words(["supervise", str(run.path), "--", "srun", f"--output={run.logs}/attempt_{{attempt}}/r"])


def on_slurm(tally: Tally, folder: Path) -> None:
    """Fills a real file system up around preemptions, and frees it again."""
    with small_disk(folder / "disk") as disk, at_work(folder) as person:
        golden = golden_run(person, "golden", *_WORDS)
        for full_before in (True, False):
            when = "the preemption" if full_before else "the start after it"
            with tally.trial(f"a disk that is full before {when}") as problems:
                problems += _preempted_on(person, disk, golden, full_before=full_before)


def _preempted_on(person: Person, disk: Path, golden: History, *, full_before: bool) -> list[str]:
    words = (*_WORDS, f"run.root={disk}", "cluster.nodelist=node1", "model.step_s=0.1")
    victim = Victim.submit(person, random.Random(), f"full-{full_before}", *words)
    run = victim.run
    wait_for(lambda: list(run.checkpoints.glob("checkpoint_*/COMPLETE")), within_s=PATIENCE_S, what="a checkpoint")
    job = victim.job
    try:
        if full_before:
            fill(disk)
        take_nodes(["node1"])
        fill(disk)
        came_back = "a start that could not write, and came back"
        wait_for(lambda: int(_record(job).get("Restarts", "0")) >= 2, within_s=PATIENCE_S, what=came_back)
        time.sleep(2.0)  # what Slurm is told right after the requeue takes a moment
        asked_s = datetime.fromisoformat(_record(job)["EligibleTime"]).timestamp() - time.time()
    finally:
        (disk / "filler").unlink(missing_ok=True)
    # There is room: what waits for its next start need not wait longer.
    person.runs("scontrol", "update", f"JobId={job}", "StartTime=now")
    problems = [] if asked_s > 20 else [f"the next start was put off by {asked_s:.0f} s only"]
    return problems + victim.problems(golden)


def _record(job: str) -> dict[str, str]:
    return parse_record(command("scontrol", "show", "job", job, must=False))


def fill(disk: Path) -> None:
    """Takes all room of a file system."""
    with (disk / "filler").open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while file.write(b"\0" * size):
                    pass


@contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """Mounts a file system of 400 MB here and on node1, which has mounts of its own."""
    place.mkdir(parents=True)
    image = place.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(400 << 20)
    device = command("losetup", "--find", "--show", str(image))
    try:
        command("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", device)
        with mounted_over("node1", place, device):
            command("mount", device, str(place))
            place.chmod(0o700)
            try:
                yield place
            finally:
                command("umount", "--lazy", str(place))
    finally:
        command("losetup", "--detach", device)
