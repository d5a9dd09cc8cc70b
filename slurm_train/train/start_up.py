"""The first step of an attempt: slower than the others, and what it leaves behind is kept for them and for resumes."""

from __future__ import annotations

import gc

from torch import nn

from slurm_train.checkpoint.rules.watched import Watched
from slurm_train.distributed.group import use_timeout
from slurm_train.errors import ConfigError
from slurm_train.formatting import shorten
from slurm_train.train.buffers import SharedBuffers
from slurm_train.train.compilation import CompileCache
from slurm_train.train.context import Rank, gather

_COLLECT_EVERY_STEPS = 100
# What has lived through a collection of the young is freed by a full one only.
_COLLECT_ALL_EVERY_STEPS = 1000


class StartUp:
    """Ends an attempt's start-up after its first step.

    Args:
        rank: this rank.
        model: this rank's part of the model.
        watched: what the rules about saves know of the training.
        compile_cache: keeps what torch has compiled.
    """

    def __init__(self, rank: Rank, model: nn.Module, *, watched: Watched, compile_cache: CompileCache) -> None:
        self._rank = rank
        self._model = model
        self._watched = watched
        self._compile_cache = compile_cache
        self._parameters = {name for name, _ in model.named_parameters()}

    def begin(self) -> None:
        """Remembers what the model has and no checkpoint saves; called before the first step."""
        self._watched.begin()

    def end(self, buffers: SharedBuffers) -> None:
        """Keeps what was compiled, and lets collectives and the watchdog use the times of a usual step. Collective.

        Args:
            buffers: those that all ranks have alike; gets what the first step has changed.

        Raises:
            ConfigError: the step has made parameters, which the optimizer does not have.
        """
        changed = {name for names in gather(self._watched.unsaved.changed_buffers()) for name in names}
        buffers.add(changed)
        buffers.add_new(self._model)
        self._compile_cache.keep()
        self._rank.heartbeat.settled = True
        use_timeout(self._rank.collective_timeout_s(self._rank.config.train.steady_timeout_s))
        made = sorted({name for name, _ in self._model.named_parameters()} - self._parameters)
        if made:
            raise ConfigError(
                f"the first step has made parameters that the optimizer does not have: {shorten(made)}; they would not "
                "be trained",
                hint="make all parameters in the constructor of the model",
            )


def take_over_garbage() -> None:
    """Switches Python's collector off, after all that stays was made: it is taken out of the collector's sight.

    From now on garbage is collected at the same step on all ranks; one rank's pause would be everyone's.
    """
    gc.collect()
    gc.freeze()
    gc.disable()


def collect_garbage(step: int) -> None:
    """Collects what has become garbage, after some steps; the collector itself is off."""
    if step % _COLLECT_EVERY_STEPS == 0:
        gc.collect(2 if step % _COLLECT_ALL_EVERY_STEPS == 0 else 1)


def give_back_garbage() -> None:
    """Switches Python's collector on again."""
    gc.unfreeze()
    gc.enable()
