"""What a run needs from the machine it is typed on, looked at before anything is written: its data and its own code."""

from __future__ import annotations

import sys
from pathlib import Path

from slurm_train.data.presence import require_readable
from slurm_train.launch.plan import RunPlan


def refuse_missing_inputs(plan: RunPlan, *, cwd: Path) -> None:
    """Does nothing where the data can be read and every `_target_` exists, as far as that can be told from here.

    Raises:
        DataError: prepared text is asked for, and there is none.
        ConfigError: a `_target_` names a module or a name that does not exist.
    """
    config = plan.config
    if config.trains:
        require_readable(config.data or {}, cwd=cwd)
    from slurm_train.config.presence import require_target

    # A rank's Python starts in this directory, or in the snapshot of it.
    search = [str(cwd), *sys.path]
    own = {"task": config.task} if config.task else {"model": config.model, "data": config.data}
    for key, mapping in own.items() if config.script is None else ():
        require_target(key, mapping, search=search)
