"""Your own function on every rank: `task._target_: my_package.main` is called with a `TaskContext`.

The process group is open, the device chosen, the threads set, the stop signals caught. What the function returns is
the exit code: None or 0 done, 75 "saved, run me again".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slurm_train.config.schema import RunConfig
from slurm_train.config.target import instantiate
from slurm_train.distributed.group import choose_device, shutdown, use_steady_timeout
from slurm_train.distributed.place import RankPlace
from slurm_train.distributed.seeds import seed_everything
from slurm_train.errors import EXIT_DONE, ConfigError
from slurm_train.rundir.layout import RunDirectory
from slurm_train.supervise.signals import StopFlag
from slurm_train.train.build import set_determinism, set_threads
from slurm_train.train.start import RankStart


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskContext:
    """What a task function gets besides its own keywords."""

    config: RunConfig
    """The frozen configuration."""
    run: RunDirectory
    """Where this run keeps its files."""
    place: RankPlace
    """Rank, local rank, node rank, world size."""
    device: torch.device
    """This rank's device; already the current one."""
    stop: StopFlag
    """`stop.requested` turns 1 when this rank is asked to stop; agree on it with the others, save, return 75."""
    attempt: int
    """Counts the starts of this run, from 0."""


def run_task(start: RankStart) -> int:
    """Calls the configured function on this rank and returns its exit code. All ranks call it.

    Raises:
        ConfigError: `task._target_` cannot be called, or it returned something else than an exit code.
    """
    config = start.config
    assert config.task is not None
    set_determinism(config.train)
    set_threads(config.train, place=start.place)
    device = choose_device(start.place)
    start.join(device=device)
    use_steady_timeout(config.train.steady_timeout_s)
    seed_everything(config.seed, data_parallel_rank=start.place.rank)
    context = TaskContext(
        config=config, run=start.run, place=start.place, device=device, stop=start.stop, attempt=start.attempt
    )
    code = instantiate(config.task, context=context)
    if code is not None and type(code) is not int:
        raise ConfigError(
            f"task._target_={config.task.get('_target_')} returned {code!r}, which is no exit code",
            hint="return None or 0 when done, 75 to be run again",
        )
    shutdown()
    return EXIT_DONE if code is None else code
