"""Ranks for a supervisor that have done what a function does."""

from __future__ import annotations

from collections.abc import Callable

from slurm_train.rundir.ledger import Start
from slurm_train.supervise.step import Step


class FunctionStep(Step):
    """Ranks of one node.

    Args:
        launch: returns their exit code, given the number of the attempt.
        job_id: the job.
        restart_count: how often it was restarted.
        world_size: ranks.
    """

    def __init__(
        self,
        launch: Callable[[int], int],
        *,
        job_id: str | None = None,
        restart_count: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(Start(job_id=job_id, restart_count=restart_count, nodes=("here",), world_size=world_size))
        self._launch = launch

    def run(self, attempt: int) -> int:
        return self._launch(attempt)
