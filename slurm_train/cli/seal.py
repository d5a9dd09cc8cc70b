"""Before each attempt: is the code snapshot still what was submitted? A requeue runs it again, days later."""

from __future__ import annotations

from collections.abc import Mapping

from slurm_train.errors import RunError
from slurm_train.launch.code_index import require_sealed
from slurm_train.rundir.events import FailureMark, leave_mark
from slurm_train.rundir.layout import RunDirectory
from slurm_train.slurm.environment import node_name
from slurm_train.supervise.monitor import say


def refused_code(run: RunDirectory, attempt: int, env: Mapping[str, str]) -> int | None:
    """Returns the exit code of an attempt whose snapshot was touched, None where it may begin.

    What is wrong is printed and left as the attempt's mark, so that the ledger says it.
    """
    try:
        require_sealed(run)
    except RunError as err:
        say(str(err))
        leave_mark(run, attempt, FailureMark(rank=0, host=node_name(env), exit_code=2, message=err.message))
        return err.exit_code
    return None
