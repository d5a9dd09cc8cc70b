"""Runs the commands that build and administer the cluster, and turns a failure into a message with its cause."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from slurm_train.errors import ClusterError

# A fixed search path: what the caller's shell put first must not replace a system tool that runs as root.
SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
BASE_ENVIRONMENT = {"PATH": SYSTEM_PATH, "LC_ALL": "C.UTF-8", "HOME": "/"}
AFRESH_HINT = "`devcluster status` shows what is alive; `devcluster down`, then `up`, starts afresh"
_POLL_S = 0.05


def run_command(words: Sequence[str], *, extra: Mapping[str, str] | None = None, timeout_s: float = 30.0) -> str:
    """Returns the standard output of a command.

    Args:
        words: the command and its arguments.
        extra: variables beside the base environment, e.g. {"SLURM_CONF": "..."}.
        timeout_s: seconds after which the command is given up.

    Raises:
        ClusterError: the command is missing, fails, or takes too long; quotes its last line on stderr.
    """
    environment = {**BASE_ENVIRONMENT, **(extra or {})}
    try:
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError as err:
        raise ClusterError(
            f"`{words[0]}` is not installed", hint="`devcluster up` says which packages it needs"
        ) from err
    except subprocess.TimeoutExpired as err:
        raise ClusterError(
            f"`{shlex.join(words)}` gave no answer within {timeout_s:.0f} s",
            hint="the machine may be too busy; `devcluster status` shows what is alive",
        ) from err
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise ClusterError(f"`{shlex.join(words)}` ended with {done.returncode}: {said}", hint=AFRESH_HINT)
    return done.stdout


def succeeds(words: Sequence[str], *, extra: Mapping[str, str] | None = None, timeout_s: float = 5.0) -> bool:
    """Tells whether a command ends with 0; a missing or slow one does not."""
    try:
        run_command(words, extra=extra, timeout_s=timeout_s)
    except ClusterError:
        return False
    return True


def wait_until(is_reached: Callable[[], bool], *, timeout_s: float, poll_s: float = _POLL_S) -> bool:
    """Polls until a condition holds; returns False where it does not within `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not is_reached():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True
