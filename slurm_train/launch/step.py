"""Runs the step of the ranks and makes sure that it is over: srun can be killed and leave ranks, or wait for ever.

srun is told of each task's end by the node's slurmstepd. Where that one was killed, nobody tells it, and it waits for
ranks that are long gone; where srun itself is killed, the ranks train on without it.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from slurm_train.errors import ClusterError
from slurm_train.slurm.commands import SlurmCommands

ORPHAN_LINGER_S = 10.0
"""srun that still waits this long after a rank has reported the death of its slurmstepd will wait for ever."""
LINGER_S = 150.0
"""Longer than --wait and any usual KillWait: ranks of which one failed must be gone by then."""
_GONE_WITHIN_S = 60.0


def run_step(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    log: BinaryIO,
    is_overdue: Callable[[], bool],
    beside: Callable[[], None] = lambda: None,
    cwd: Path | None = None,
) -> int:
    """Runs srun to its end and returns its exit code, 128 + signal if it was killed.

    Args:
        argv: srun and its arguments.
        env: its environment.
        log: where it says what it says.
        is_overdue: whether the ranks are known to have ended so long ago that srun must have missed it.
        beside: called once a second; like `is_overdue` it neither waits nor raises.
        cwd: where srun and its tasks work; None: where this process does.
    """
    process = subprocess.Popen(
        list(argv),
        env=dict(env) | ({} if cwd is None else {"PWD": str(cwd)}),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd=cwd,
    )
    given_up = False
    while True:
        try:
            code = process.wait(timeout=1.0)
            break
        except subprocess.TimeoutExpired:
            beside()
            if not given_up and is_overdue():
                given_up = True
                process.kill()
    if code < 0 and not given_up:
        # The ranks have ended: a full disk costs the line, not what follows.
        with contextlib.suppress(OSError):
            log.write(f"srun: error: srun itself was killed by signal {-code}\n".encode())
            log.flush()
    return 128 - code if code < 0 else code


def end_step(
    job_id: str,
    name: str,
    commands: SlurmCommands,
    *,
    within_s: float = _GONE_WITHIN_S,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Ends what is left of a job's step and returns whether its nodes are free for another one.

    Args:
        job_id: the job.
        name: the step's name; other steps of the allocation are somebody else's.
        commands: Slurm.
        within_s: seconds that it may take.
        sleep: waits so many seconds.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            left = [step for step, its_name in commands.steps(job_id).items() if its_name == name]
            if not left:
                return True
            for step in left:
                commands.cancel_step(step)
        except ClusterError:
            # Without an answer nothing is known; a new step could not be made now either.
            pass
        if time.monotonic() > deadline:
            return False
        sleep(1.0)
