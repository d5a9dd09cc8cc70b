"""Gives a test session a machine of its own, in which it builds a real Slurm: network, processes, /etc, /run, /var/lib.

A Slurm, a devcluster or another session on the machine is neither seen nor changed. The kernel ends all that runs in
there with the session, however that ends, so no cluster is left behind.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from slurm_train.tools.devcluster.cluster import missing_here
from slurm_train.tools.devcluster.system import SYSTEM_PATH
from tests.support.command_line import REPOSITORY

NAMESPACES = ("--mount", "--net", "--uts", "--pid", "--fork", "--kill-child")
"""Options of `unshare`, for the places that `PREPARE` prepares."""
# $1 an empty folder. A copy of /etc has what a container mounts in there; an overlay has not, and cannot be nested.
# No name server can be reached, and torch warns of each failed question.
PREPARE = """
set -e
mount -t tmpfs tmpfs "$1"
cp -a /etc "$1"
rm -rf "$1/etc/slurm" && mkdir "$1/etc/slurm"
echo "127.0.0.1 localhost tests" >"$1/etc/hosts"
echo "::1 localhost" >>"$1/etc/hosts"
touch "$1/etc/nsswitch.conf"
sed -i '/^hosts:/d' "$1/etc/nsswitch.conf"
echo "hosts: files" >>"$1/etc/nsswitch.conf"
for mount in $(awk '$2 ~ "^/run/netns" {print $2}' /proc/mounts | sort -r); do umount -l "$mount"; done
mount --bind "$1/etc" /etc
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o mode=755 tmpfs /var/lib
mount -t proc proc /proc
hostname tests
ip link set lo up
"""
_HIDDEN = ("/etc", "/run", "/var/lib")
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWPID, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x20000000, 0x40000000
_PR_SET_PDEATHSIG = 1
_SENT_BY_A_PROCESS = 0
_PASSED_ON = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})


def namespaces_obstacle() -> str:
    """Returns why a session cannot have a real Slurm in namespaces of its own here, "" if it can."""
    missing = missing_here()
    if missing:
        return f"a Slurm cluster on this machine needs {missing}"
    for place in (REPOSITORY, Path(sys.prefix), Path(sys.base_prefix), Path(tempfile.gettempdir())):
        hidden = next((folder for folder in _HIDDEN if place.resolve().is_relative_to(folder)), None)
        if hidden is not None:
            return f"{place} lies in {hidden}, of which the cluster needs one of its own"
    with tempfile.TemporaryDirectory() as folder:
        done = _run_prepared(["unshare", *NAMESPACES], folder)
    return "" if done.returncode == 0 else f"this machine lets nobody mount in a namespace: {done.stderr.strip()}"


def enter_session_namespaces(place: Path) -> None:
    """Goes on in a child process in namespaces of its own; this one waits for its end and ends with its exit code.

    Between them is the first process of the namespaces, which takes the orphans. Ids of processes, terminal and process
    group are such that Ctrl-C and `kill` reach the child.

    Args:
        place: a folder of the session, which is removed at its end.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*_PASSED_ON, signal.SIGCHLD})
    _require(libc.unshare(_CLONE_NEWPID))
    first = os.fork()
    if first:
        code = _attend(first)
        shutil.rmtree(place, ignore_errors=True)
        os._exit(code)
    _require(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL))
    _require(libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWNET))
    scratch = place / "namespaces"
    scratch.mkdir()
    done = _run_prepared([], str(scratch))
    assert done.returncode == 0, done.stderr
    session = os.fork()
    if session:
        os._exit(_attend(session))
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _run_prepared(before: Sequence[str], folder: str) -> subprocess.CompletedProcess[str]:
    # `unshare` does it by itself.
    script = f"mount --make-rprivate /\n{PREPARE}"
    words = [*before, "sh", "-c", script, "sh", folder]
    return subprocess.run(words, env={"PATH": SYSTEM_PATH}, capture_output=True, text=True, check=False)


def _require(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _attend(child: int) -> int:
    """Passes signals on to a child until it has ended, and returns its exit code, as a shell does."""
    while True:
        received = signal.sigwaitinfo({*_PASSED_ON, signal.SIGCHLD})
        if received.si_signo != signal.SIGCHLD:
            # The terminal's go to the whole process group.
            if received.si_code == _SENT_BY_A_PROCESS:
                os.kill(child, received.si_signo)
            continue
        ended = _reap()
        if child in ended:
            code = os.waitstatus_to_exitcode(ended[child])
            return code if code >= 0 else 128 - code


def _reap() -> dict[int, int]:
    """Returns the wait status of each child that has ended since the last call."""
    ended = dict[int, int]()
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status
