"""The calls of a program that all ranks make together: each begins with an exchange that shows whether they do."""

from __future__ import annotations

import os
import sys

from slurm_train.checkpoint.agreement import Group, on_every_rank
from slurm_train.distributed.place import RankPlace
from slurm_train.errors import ConfigError
from slurm_train.session.interface import no_rank_error
from slurm_train.session.peers import GroupChooser
from slurm_train.session.progress import ReportedProgress

_CALLS = ("should_stop", "save", "newest", "training")


class CollectiveCalls:
    """One rank's part in the calls that all ranks make together.

    Args:
        place: this rank.
        group: returns the group of the ranks at this moment.
        progress: of this rank.
    """

    def __init__(self, place: RankPlace, group: GroupChooser, progress: ReportedProgress) -> None:
        self.group = group
        self._place = place
        self._progress = progress
        self._pid = os.getpid()

    @property
    def is_rank(self) -> bool:
        """Whether this process is the rank, and was not forked from it."""
        return os.getpid() == self._pid

    def require_rank(self, call: str) -> None:
        """Refuses a call in a process that was forked from this rank.

        Raises:
            ConfigError: it is one.
        """
        if not self.is_rank:
            raise no_rank_error(call, "it was forked from the rank")

    def meet(self, call: str, *, requested: bool = False, step: int = 0) -> bool:
        """Returns whether any rank passes a request. Collective.

        Args:
            call: what the program has called, one of `_CALLS`.
            requested: whether this rank requests to stop.
            step: the step that the call is about, 0 for none.

        Raises:
            ConfigError: another rank has called something else, or for another step; or this process was forked from a
                rank.
        """
        self.require_rank(call)
        group = self.group()
        self._progress.heartbeat.marks += 1
        if group is None:
            return requested
        clock = self._progress.heartbeat.clock
        start_s = clock()
        try:
            codes, steps = _exchange(group, 2 * _CALLS.index(call) + int(requested), step)
        except (RuntimeError, OSError):
            print(
                f"slurm_train: rank {self._place.rank} waited in `{call}`, which all ranks call together, and another "
                "rank did not come: it failed, see its log, or its program ended without this call",
                file=sys.stderr,
                flush=True,
            )
            raise
        finally:
            self._progress.add_exchange(clock() - start_s)
        others = {_CALLS[code // 2] for code in codes} - {call}
        if others:
            raise ConfigError(
                f"rank {self._place.rank} has called {call}, and another rank {min(others)}: all ranks have to call "
                "them alike, and as often",
                hint="where rank 0 alone has something to write: `if run.rank == 0` inside of `with run.save(step)`",
            )
        other_steps = set(steps) - {step}
        if other_steps:
            raise ConfigError(
                f"rank {self._place.rank} has called {call} for step {step}, and another rank for step "
                f"{min(other_steps)}: a checkpoint is of one step",
                hint="count optimizer steps alike on all ranks; where their data differ in length, end at the shortest",
            )
        return any(code % 2 for code in codes)


def _exchange(group: Group, code: int, step: int) -> tuple[list[int], list[int]]:
    """Returns the codes and the steps of all ranks, or the largest and the smallest of each. Collective."""
    if hasattr(group, "gather_values"):
        pairs = on_every_rank(group, lambda: (code, step))
        return [code for code, _ in pairs], [step for _, step in pairs]
    import torch
    import torch.distributed as dist

    # One reduction is cheaper than gathering, and differing values show in it as well.
    largest = torch.tensor([code, -code, step, -step])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    largest_code, smallest_code, largest_step, smallest_step = largest.tolist()
    return [largest_code, -smallest_code], [largest_step, -smallest_step]
