"""How a training ends before its last step: who asks for it, what all ranks agree on, whether there is time to save.

A rank is asked by a signal, the STOP file, the end of the time limit, or a callback. Only what all ranks have agreed on
counts, so they stop at the same step boundary. Two carriers bring a request to all of them: it travels with the
gradients of each step (`train.ddp`, no exchange is added), and where none are sent, in an evaluation or while a rank
waits for checkpoints, `by_exchange`. Nothing here knows a model or a trainer.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from slurm_train.rundir.timing import Spent
from slurm_train.session.rank_run import RankRun
from slurm_train.session.signals import StopFlag
from slurm_train.session.stopping import Stopping
from slurm_train.train.context import gather

_BY_CALLBACK = "callback"


class Stops(Stopping):
    """One rank's part in ending a training early: by the clock, as any program, and by callbacks.

    Args:
        rank: this rank.
        spent: what this rank has measured so far.
    """

    def __init__(self, rank: RankRun, *, spent: Spent) -> None:
        super().__init__(rank, spent=spent, group=lambda: dist.group.WORLD)
        self._is_agreed = False
        self.not_saved = ""
        """Why the last position is in no checkpoint; "" where it is in one."""
        self._end_reason = ""

    @property
    def is_agreed(self) -> bool:
        """Whether all ranks leave at this step boundary."""
        return self._is_agreed

    def agree(self, is_requested: bool) -> None:
        """Takes what a carrier has brought: whether any rank was asked to stop, the same on all ranks."""
        self._is_agreed = self._is_agreed or is_requested

    def request(self) -> None:
        """Asks for a stop, e.g. since a save has failed in a way that ends the run; one rank is enough."""
        self._rank.stop.request()

    def request_end(self, reason: str) -> None:
        """Asks for the end of the run, as finished; one rank is enough. `agree_on_end` finds it.

        Args:
            reason: for the result, e.g. "eval_loss has not improved".
        """
        self._end_reason = self._end_reason or reason
        self._rank.stop.request(_BY_CALLBACK)

    def agree_on_end(self) -> str:
        """Returns why the run ends here as finished, "" where no rank has asked for that. Collective."""
        reasons = [reason for reason in gather(self._end_reason) if reason]
        # The request has been answered; the evaluation of the end must not be interrupted by it.
        self._rank.stop.withdraw(_BY_CALLBACK)
        self.agree(bool(reasons))
        return reasons[0] if reasons else ""


def by_exchange(stop: StopFlag) -> bool:
    """Returns whether any rank was asked to stop. Collective over all ranks, on the host."""
    requested = torch.tensor(int(bool(stop.requested)), dtype=torch.int64)
    dist.all_reduce(requested, op=dist.ReduceOp.MAX)
    return bool(requested.item())
