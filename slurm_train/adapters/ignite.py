"""Makes the training of an ignite `Engine` a part of its run.

    loader = attach(trainer, loader, model, optimizer, schedule=schedule)  # after all other handlers
    trainer.run(loader, max_epochs=3)

The engine skips no batch when it is resumed within an epoch, and begins a new pass; so the loader is replayed.
"""

from __future__ import annotations

from typing import Any

from ignite.engine import Engine, Events
from torch import nn
from torch.optim import Optimizer

from slurm_train.adapters.boundaries import Boundaries
from slurm_train.session import join


def attach(engine: Engine, loader: Any, model: nn.Module, optimizer: Optimizer, /, **others: Any) -> Any:
    """Has a training engine report, stop, save and resume, and returns the loader to run it on. On all ranks.

    A stop at the last iteration of an epoch comes after the other handlers of the epoch's end, so call it last.

    Args:
        engine: that trains; a step is an iteration.
        loader: of the training.
        model: that is trained.
        optimizer: of its parameters.
        **others: as of `Session.training`: schedules, a GradScaler, averages of weights.
    """
    session = join()
    training = session.training(model, optimizer, engine=engine, **others)
    replayed = session.replay(loader)
    training.resume()
    boundaries = Boundaries(session, save=training.save, is_due=training.is_due)
    limit = engine.state.max_epochs
    was_over = bool(limit) and engine.state.iteration >= limit * len(replayed)

    def begin() -> None:
        if was_over:
            # `run` has made a new state; a program that is started again after its end takes no step.
            engine.terminate()

    def end_iteration() -> None:
        state = engine.state
        outputs = state.output if isinstance(state.output, dict) else {"loss": state.output}
        max_steps = state.max_iters or (state.max_epochs or 0) * (state.epoch_length or 0)
        boundaries.report(state.iteration, outputs, max_steps=max_steps or None)
        if state.iteration % len(replayed):
            boundaries.pass_by(state.iteration)

    def end_epoch() -> None:
        # The engine ends an epoch by its length, and has not seen the end of the pass.
        replayed.set_epoch(engine.state.epoch)
        boundaries.pass_by(engine.state.iteration)

    def end() -> None:
        if not was_over:
            boundaries.end(engine.state.iteration)

    engine.add_event_handler(Events.STARTED, begin)
    engine.add_event_handler(Events.ITERATION_COMPLETED, end_iteration)
    engine.add_event_handler(Events.EPOCH_COMPLETED, end_epoch)
    engine.add_event_handler(Events.COMPLETED, end)
    return replayed
