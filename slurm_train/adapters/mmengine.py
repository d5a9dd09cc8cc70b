"""Makes the training of an mmengine `Runner` a part of its run: one hook.

    runner = Runner(..., train_cfg=dict(by_epoch=True, max_epochs=3), custom_hooks=[SessionHook()])
    runner.train()

A step is an iteration of `EpochBasedTrainLoop`. Within an epoch the loader is replayed, since the loop cannot begin in
the middle of it. Resume and saves of mmengine itself are left out: `resume=False`, no `CheckpointHook`.
"""

from __future__ import annotations

from typing import Any

from mmengine.hooks import Hook
from mmengine.runner import EpochBasedTrainLoop

from slurm_train.adapters.boundaries import Boundaries
from slurm_train.adapters.library_names import MMENGINE
from slurm_train.errors import ConfigError
from slurm_train.session import join


class SessionHook(Hook):  # type: ignore[misc]  # of an extra
    """Reports, stops, saves and resumes; model, optimizer, loss scaler and schedules are saved, averages are not.

    Args:
        **others: as of `Session.training`: further objects with a state.
    """

    priority = "LOWEST"

    def __init__(self, **others: Any) -> None:
        self.session = join()
        self._others = others

    def before_train(self, runner: Any) -> None:
        """Restores what was saved, and has the loop go on there.

        Raises:
            ConfigError: the loop goes by iterations, or the optimizer takes a step only every few of them.
        """
        loop = runner.train_loop
        if not isinstance(loop, EpochBasedTrainLoop):
            raise ConfigError(
                f"SessionHook was given a {type(loop).__name__}, which begins its loader anew at a resume",
                hint="train by epochs: train_cfg=dict(by_epoch=True, max_epochs=N)",
            )
        wrapper = runner.optim_wrapper
        MMENGINE.check(loop=loop, optim_wrapper=wrapper)
        if wrapper._accumulative_counts != 1:
            raise ConfigError(
                f"accumulative_counts={wrapper._accumulative_counts}: gradients of a step that is not done are in no "
                "checkpoint",
                hint="accumulative_counts=1 and a larger batch",
            )
        self.session.begin_training()
        schedules = runner.param_schedulers or []
        objects = {f"schedule_{number}": schedule for number, schedule in enumerate(schedules)}
        if hasattr(wrapper, "loss_scaler"):
            objects["loss_scaler"] = wrapper.loss_scaler
        training = self.session.training(runner.model, wrapper.optimizer, **objects, **self._others)
        self._boundaries = Boundaries(self.session, save=training.save, is_due=training.is_due)
        self._length = len(loop.dataloader)
        self._loader = self.session.replay(loop.dataloader)
        loop.dataloader = self._loader
        step = training.resume()
        loop._iter = step
        loop._epoch = step // self._length
        wrapper.initialize_count_status(runner.model, loop.iter, loop.max_iters)

    def before_train_epoch(self, runner: Any) -> None:
        """Stops and saves between two epochs, behind the evaluation of the first of them."""
        if runner.epoch > self._loader.epoch:
            self._loader.set_epoch(runner.epoch)
            self._boundaries.pass_by(runner.iter)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:  # noqa: ARG002
        """Reports the step; stops and saves within an epoch."""
        step = runner.iter + 1
        self._boundaries.report(step, outputs or {}, max_steps=runner.max_iters)
        if step % self._length:
            self._boundaries.pass_by(step)

    def after_train(self, runner: Any) -> None:
        """Saves the last step."""
        self._boundaries.end(runner.iter)
