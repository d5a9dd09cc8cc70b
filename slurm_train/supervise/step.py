"""The ranks of an attempt, as the supervisor sees them: where they run, how they ended, where the next ones may run."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm_train.rundir.ledger import Start
from slurm_train.slurm.records import StepEnd
from slurm_train.supervise.growth import Growth

_KERNEL_COUNTS = Path("/proc/vmstat")


class Step:
    """Ranks on nodes that nobody knows anything of, and that are not changed.

    Args:
        start: what an attempt is opened with: job, restart, nodes and ranks.
    """

    can_relaunch = False
    """Whether failed ranks are started again here automatically."""
    growth: Growth | None = None
    """Set if the ranks were asked to stop for more nodes: the reason."""

    def __init__(self, start: Start) -> None:
        self.start = start

    def run(self, attempt: int) -> int:
        """Starts the ranks of the attempt with this number, waits for them, and returns their exit code.

        Raises:
            OSError: they could not be started.
        """
        raise NotImplementedError

    def ended(self, _attempt: int) -> StepEnd:
        """Returns how the ranks of an attempt ended, as far as what has started them tells it."""
        return StepEnd()

    def num_oom_kills(self) -> int:
        """Returns how many processes of this machine the kernel has ended for lack of memory since it booted."""
        with contextlib.suppress(OSError):
            match = re.search(r"^oom_kill (\d+)$", _KERNEL_COUNTS.read_text(encoding="ascii"), re.MULTILINE)
            if match:
                return int(match[1])
        return 0

    def lost_nodes(self, _job: Mapping[str, str] | None) -> Sequence[str]:
        """Returns which nodes of the ranks are lost; only where Slurm leaves the job its other nodes.

        Args:
            _job: the job's record, None where Slurm does not answer.
        """
        return ()

    def can_avoid(self, _nodes: Sequence[str]) -> bool:
        """Returns whether there are enough nodes for another start of the job without these."""
        return False

    def nodes_without(self, _nodes: Sequence[str]) -> Sequence[str]:
        """Returns the nodes that the next attempt in this job can use without these; empty if too few are left."""
        return ()

    def use(self, _nodes: Sequence[str], *, without: Sequence[str]) -> None:
        """Sets the nodes of the next attempt; no later attempt of this job uses those in `without`."""

    def clear(self, _attempt: int) -> bool:
        """Ends what is left of an attempt's ranks; returns whether its nodes are free again."""
        return True
