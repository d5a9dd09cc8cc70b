"""A place of its own for tests that build and remove a whole cluster beside one that may be up."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_train.tools.devcluster.cluster import missing_here

_ROOT = Path(__file__).parents[3]
# Own network, processes, host name, /etc, /run and /var/lib: nothing a cluster does in there is seen outside,
# and nothing outlives the script.
_ENTER = """
set -e
for mount in $(awk '$2 ~ "^/run/netns" {print $2}' /proc/mounts | sort -r); do umount -l $mount; done
mount -t tmpfs tmpfs /mnt
mkdir /mnt/upper /mnt/work
mount -t overlay overlay -o lowerdir=/etc,upperdir=/mnt/upper,workdir=/mnt/work /etc
mount -t tmpfs tmpfs /run
mount -t tmpfs -o mode=755 tmpfs /var/lib
rm -f /etc/slurm/slurm.conf
sed -i '/# slurm-train-devcluster/d' /etc/hosts
ip link set lo up
set +e
devcluster() { "$PYTHON" -m slurm_train devcluster "$@"; }
traces() {
  ip -brief link | awk '{print $1}'
  awk '{print $2}' /proc/mounts
  ps -e -o args= | grep -E 'slurm|munge|maria|sleep 7' | grep -v -E 'grep|bash'
  cat /etc/hosts
  ls -A /run /etc/slurm /var/lib
}
traces >/mnt/before
check_no_trace() { traces | diff /mnt/before - && echo "no trace $1"; }
"""

RunScript = Callable[[str], "subprocess.CompletedProcess[str]"]


@pytest.fixture
def sandbox() -> RunScript:
    """Runs a bash script as root in a place where a cluster disturbs nobody; the script has `devcluster`."""
    missing = missing_here()
    if missing:
        pytest.skip(f"a Slurm cluster on this machine needs {missing}")
    probe = _unshare("set -e; mount -t tmpfs tmpfs /mnt; ip link set lo up")
    if probe.returncode != 0:
        pytest.skip(f"this machine lets nobody mount in a namespace: {probe.stderr.strip()}")
    return lambda script: _unshare(_ENTER + script)


def _unshare(script: str) -> subprocess.CompletedProcess[str]:
    flags = ["--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHON": sys.executable}
    words = ["unshare", *flags, "bash", "-c", script]
    return subprocess.run(words, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=240)
