"""Two qualities of service of a campaign's own: jobs of the first are preempted by jobs of the second alone."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def qos_pair(name: str, *, grace_s: int, mode: str = "requeue") -> Iterator[tuple[str, str]]:
    """Adds both, yields (preempted, preempting) and removes them; nobody else's jobs are touched.

    Args:
        name: what their names begin with.
        grace_s: GraceTime of the preempted one.
        mode: its PreemptMode.
    """
    weak, strong = f"{name}weak", f"{name}strong"
    try:
        for qos, words in ((weak, (f"gracetime={grace_s}", f"preemptmode={mode}")), (strong, (f"preempt={weak}",))):
            _sacctmgr("add", "qos", qos, must=False)
            _sacctmgr("modify", "qos", qos, "set", *words)
        _sacctmgr("modify", "account", "dev", "set", f"qos+={weak},{strong}")
        yield weak, strong
    finally:
        _sacctmgr("modify", "account", "dev", "set", f"qos-={weak},{strong}")
        _sacctmgr("delete", "qos", f"{weak},{strong}")


def _sacctmgr(*words: str, must: bool = True) -> None:
    argv = ["sacctmgr", "--immediate", "--quiet", *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    # What an earlier run left behind is there already.
    assert done.returncode == 0 or not must, f"{words}: {done.stdout}{done.stderr}"
