"""Before each attempt: is the code snapshot still what was submitted? A requeue runs it again, days later."""

from __future__ import annotations

import socket

from slurm_train.errors import RunError
from slurm_train.launch.code_index import require_sealed
from slurm_train.requeue.best_effort import say
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.marks import FailureMark, leave_mark


def refused_code(run: RunDirectory, attempt: int) -> int | None:
    """Returns the exit code of an attempt whose snapshot was touched, None where it may begin.

    What is wrong is printed and left as the attempt's mark, so that the ledger says it.
    """
    try:
        require_sealed(run)
    except RunError as err:
        say(str(err))
        leave_mark(run, attempt, FailureMark(rank=0, host=socket.gethostname(), exit_code=2, message=err.message))
        return err.exit_code
    return None
