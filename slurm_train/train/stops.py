"""How a training ends before its last step: who asks for it, what all ranks agree on, whether there is time to save.

A rank is asked by a signal, the STOP file, the end of the time limit, or a callback. Its request is reduced over the
ranks with each step's gradients (`train.step`), and only the reduced value counts: so all ranks stop at the same step
boundary. Nothing here knows a model or a trainer.
"""

from __future__ import annotations

import torch.distributed as dist

from slurm_train.rundir.timing import Spent
from slurm_train.session.rank_run import RankRun
from slurm_train.session.stopping import Stopping
from slurm_train.train.context import gather

_BY_CALLBACK = "callback"


class Stops(Stopping):
    """One rank's part in ending a training early: by the clock, as any program, and by callbacks.

    Args:
        rank: this rank.
        spent: what rank 0 has measured so far; None on the others, which do not look at the clock.
    """

    def __init__(self, rank: RankRun, *, spent: Spent | None) -> None:
        super().__init__(rank, spent=spent, group=lambda: dist.group.WORLD)
        self.is_agreed = False
        """All ranks leave at this step boundary."""
        self.not_saved = ""
        """Why the last position is in no checkpoint; "" where it is in one."""
        self._end_reason = ""

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
        return reasons[0] if reasons else ""
