"""A place of its own for tests that build and remove a whole cluster beside one that may be up."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.session_namespaces import NAMESPACES, PREPARE

_ROOT = Path(__file__).parents[3]
# In the namespaces of the tests of the session, so nothing that a cluster does in there is seen by them, and nothing
# outlives the script.
_FUNCTIONS = """
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
def sandbox(slurm_room: None) -> RunScript:
    """Runs a bash script as root in a place where a cluster disturbs nobody; the script has `devcluster`."""

    def run_script(script: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHON": sys.executable}
        words = ["unshare", *NAMESPACES, "bash", "-c", PREPARE + _FUNCTIONS + script, "bash", "/mnt"]
        return subprocess.run(words, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=240)

    return run_script
