"""Makes the training of a Lightning Trainer a part of its run: one callback, and `ckpt_path`.

    callback = SessionCallback(every_steps=1000)
    trainer = L.Trainer(callbacks=[callback], ...)
    trainer.fit(model, loader, ckpt_path=callback.newest())

The callback replaces Lightning's own requeue under Slurm: no signal handler saves, broadcasts or requeues. All ranks
stop after the same step, and their checkpoint is one of the run's. It also holds what a checkpoint of Lightning lacks:
the random streams of each rank, the states of each rank's loaders, and the sums of an epoch's means.

Lightning (2.6) has no public names for some of this, so private attributes of its loops are read and set here.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.callbacks import Checkpoint as LightningCheckpoint
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from slurm_train.adapters.epoch_means import EpochMeans
from slurm_train.adapters.library_names import LIGHTNING
from slurm_train.adapters.plain_values import allow_data_in
from slurm_train.errors import ConfigError
from slurm_train.session import Checkpoint, Switches, join, mix

_FILE = "lightning.ckpt"
_ENDED_KEY = "slurm_train_should_stop"
"""Key in a checkpoint of Lightning: whether `trainer.should_stop` was set, e.g. by `EarlyStopping`."""
_SWITCHES_KEY = "slurm_train_switches"
"""Key in a checkpoint of Lightning: parameters and modules that the training has frozen or unfrozen, or whose mode it
has changed."""
_VALIDATION_NAME = re.compile("val(?:id(?:ation)?)?[_/](.+)")


class SessionCallback(LightningCheckpoint):  # type: ignore[misc]  # of an extra
    """Reports each step, stops all ranks at the same step, and saves into the run's checkpoints.

    It derives from Lightning's `Checkpoint` for two reasons: Lightning calls it after callbacks of other kinds, so its
    checkpoint has what they change in a step, and in a run Lightning adds no `ModelCheckpoint` of its own.

    Wide because it keeps what a checkpoint of Lightning leaves out.

    Args:
        every_steps: optimizer steps between two checkpoints; None saves only where the ranks stop, and at the end.
        log_every_steps: optimizer steps between two lines of metrics.jsonl.
    """

    def __init__(self, *, every_steps: int | None = None, log_every_steps: int = 10) -> None:
        self.session = join()
        self._every_steps = every_steps
        self._log_every_steps = log_every_steps
        self._step = 0
        """The newest step that was reported."""
        self._saved_step = 0
        """The newest step that was saved, or loaded."""
        self._checkpoint: Checkpoint | None = None
        """What the training resumes from; None at its beginning."""
        self._is_before_validation = False
        """Whether a validation follows the save of this step."""
        self._saves_at_end_of_epoch = False
        """Whether the save of this step is left to `on_train_epoch_end`."""
        self._is_stopping = False
        """Whether the ranks have agreed to stop after this step."""
        self._has_trained = False
        self._has_noted_refused = False
        self.best_model_path = ""
        """The newest checkpoint of the run; Lightning loads it for `test(ckpt_path="best")`."""
        self._order_seed: int | None = None
        """Seed of the orders that samplers draw, the same on all ranks; None before the training."""
        self._batch_sizes: list[int | None] = []
        """Samples of a batch over all ranks, for each loader; None where a loader does not say it."""
        self._saved_batch_sizes: list[int | None] | None = None
        """The same at the checkpoint."""
        self._loaders_made_in_epoch: int | None = None
        self._means = EpochMeans()
        self._switches: Switches | None = None
        self._saved_switches: dict[str, bool] = {}
        """The switches that had changed at the checkpoint."""
        self._epoch_start_is_due = False
        """Whether hooks of the start of the epoch are still to be called, in an epoch that is resumed in its middle."""

    def newest(self) -> str | None:
        """Returns what `fit(ckpt_path=...)` takes: the path of the newest checkpoint, None without one. Collective.

        Raises:
            CheckpointError: there are checkpoints, but none of them verifies.
        """
        self._checkpoint = self.session.newest()
        if self._checkpoint is None:
            return None
        self.best_model_path = str(self._checkpoint.path / _FILE)
        return self.best_model_path

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        """Compares Lightning's ranks with those of the run, and prepares the strategy to read the checkpoint.

        Outside of a run Lightning gets the `ModelCheckpoint` that it would have without this callback.

        Raises:
            ConfigError: Lightning and the run number the ranks differently; or another training of this program has
                ended.
        """
        run = self.session
        if stage == "fit":
            run.begin_training()
        if run.is_active and (trainer.global_rank, trainer.world_size) != (run.rank, run.world_size):
            raise ConfigError(
                f"Lightning calls this rank {trainer.global_rank} of {trainer.world_size}; it is {run.rank} of "
                f"{run.world_size} in the run",
                hint="pass num_nodes and devices as in the cluster: +cluster=2x4 is num_nodes=2, devices=4",
            )
        # For `ckpt_path="best"` Lightning asks the first checkpoint callback: one of the user's comes before this one.
        others = [callback for callback in trainer.callbacks if callback is not self]
        if run.run_directory is None and trainer.checkpoint_callbacks == [self]:
            default = ModelCheckpoint()
            default.setup(trainer, module, stage)
            others.append(default)
        trainer.callbacks = [*others, self]
        fit_loop = trainer.fit_loop
        LIGHTNING.check(trainer=trainer, fit_loop=fit_loop, call=call)
        LIGHTNING.check(epoch_loop=fit_loop.epoch_loop, logger_connector=trainer._logger_connector)
        if self.best_model_path:
            allow_data_in(Path(self.best_model_path))

    def state_dict(self) -> dict[str, Any]:
        """Returns what each checkpoint of Lightning has of this callback."""
        return {
            "order_seed": self._order_seed,
            "batches": self._batch_sizes,
            "loaders_of_epoch": self._loaders_made_in_epoch,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned, before the training starts."""
        self._order_seed = state_dict["order_seed"]
        self._saved_batch_sizes = state_dict["batches"]
        self._loaders_made_in_epoch = state_dict.get("loaders_of_epoch")

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Restores random streams and the place in the data, and installs the session's stop signals over Lightning's.

        Raises:
            ConfigError: the checkpoint is from within an epoch, and this start has other ranks or batch sizes.
        """
        self._step = self._saved_step = trainer.global_step
        _begin_next_epoch(trainer)
        fetcher = trainer.fit_loop._data_fetcher
        LIGHTNING.check(**{"wrapping_fetcher" if hasattr(fetcher, "iterator_wrapper") else "fetcher": fetcher})
        self.session.take_signals()
        self._switches = Switches(module, has_modes=True)
        self._switches.set(self._saved_switches)
        self._recreate_loaders(trainer)
        loaders = CombinedLoader(trainer.train_dataloader).flattened
        self._batch_sizes = [_global_batch_size(loader, trainer.world_size) for loader in loaders]
        if self._order_seed is None:
            self._order_seed = int(trainer.strategy.broadcast(torch.initial_seed()))
        has_drawing_samplers = self._set_orders(trainer)
        if self._checkpoint is not None:
            self._restore_rank(trainer, module, loaders)
        elif has_drawing_samplers:
            # The iterators that are there already have drawn another order.
            iter(trainer.fit_loop._data_fetcher)

    def _restore_rank(self, trainer: pl.Trainer, module: pl.LightningModule, loaders: list[Any]) -> None:
        """Restores what the checkpoint has of this rank: means, place in the data, random streams.

        Raises:
            ConfigError: see `on_train_start`.
        """
        assert self._checkpoint is not None
        self._epoch_start_is_due = trainer.fit_loop.restarted_mid_epoch
        folder = self._checkpoint.path
        rank = self.session.rank
        means = _load(folder / f"means_{rank}.pt")
        refused = allow_data_in(folder / f"loaders_{rank}.pt")
        if refused:
            raise ConfigError(
                f"the states of the loaders in {folder.name} name {', '.join(refused)}, which is not loaded: it could "
                "run code",
                hint="let the states of loaders and data sets be tensors, numbers and texts, or objects of your own",
            )
        states, fetched = _load(folder / f"loaders_{rank}.pt") or ([], [])
        is_at_end_of_epoch = trainer.fit_loop.resumed_on_epoch_end
        # A new iterator draws a number. At the end of an epoch the saved streams come before that number, within an
        # epoch after it.
        if is_at_end_of_epoch:
            self.session.restore_random()
        num_done = 0 if is_at_end_of_epoch else _num_batches_done(trainer)
        if num_done > 0:
            self._require_same_batches(trainer, loaders)
        self._restore_means(trainer, module, means, num_done)
        has_same_ranks = self._checkpoint.world_size == trainer.world_size
        if is_at_end_of_epoch or not has_same_ranks or len(states) < len(loaders):
            # The states do not say where this rank is, or some loaders have none.
            states = []
            fetched = []
        _seek_in_epoch(trainer, states, fetched, num_done=0 if states else num_done)
        if not is_at_end_of_epoch:
            self.session.restore_random()

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Seeds the order of the epoch with its number, so that a resume has the same order."""
        self._set_orders(trainer)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        """Calls the hooks of the epoch's start in an epoch that is resumed in its middle."""
        self._repeat_epoch_start(trainer, module)

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Calls the hooks of the epoch's start where a resumed epoch begins with a validation."""
        self._repeat_epoch_start(trainer, module)

    def on_train_batch_end(self, trainer: pl.Trainer, _: pl.LightningModule, outputs: Any, *__: Any) -> None:
        """Reports the step, saves where that is due, and ends the program where all ranks are to stop."""
        run = self.session
        step = trainer.global_step
        step_before = self._step
        self._means.add(trainer)
        if step == step_before:  # gradients are accumulated
            run.mark("step")
            return
        self._step = step
        # With several optimizers Lightning counts several steps for a batch, and passes over multiples.
        is_logged = step // self._log_every_steps > step_before // self._log_every_steps or step == trainer.max_steps
        metrics = _metrics_of_step(trainer, outputs) if is_logged else {}
        run.report(step, **metrics)
        every = self._every_steps
        is_save_due = every is not None and step // every > step_before // every
        self._is_stopping = bool(run.should_stop())
        # After the last step Lightning validates, and `on_train_end` saves: nothing is to be stopped.
        is_last = step == trainer.max_steps or (trainer.should_stop and trainer.fit_loop._can_stop_early)
        if is_last or not (self._is_stopping or is_save_due):
            return
        loop = trainer.fit_loop.epoch_loop
        self._is_before_validation = loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
        if loop._num_ready_batches_reached() and not self._is_before_validation:
            # Lightning (2.6) skips an epoch when it resumes from here, and not when it resumes from the epoch's end.
            self._saves_at_end_of_epoch = True
        else:
            self._save_and_leave(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Makes the save that was due at the last step of the epoch."""
        self._means.forget()
        loop = trainer.fit_loop
        is_resumed = self._checkpoint is not None and loop.restarting
        if is_resumed and loop.epoch_loop._num_ready_batches_reached():
            # Lightning leaves this out in an epoch that was resumed, although the metrics are there.
            loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        # After the last epoch `on_train_end` saves.
        if self._saves_at_end_of_epoch and trainer.current_epoch + 1 != trainer.max_epochs:
            self._save_and_leave(trainer)
        self._saves_at_end_of_epoch = False

    def on_save_checkpoint(self, trainer: pl.Trainer, _: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds what Lightning does not save, and lets a resume begin with the validation that follows this save.

        Lightning takes that validation for done, unless the saved counters say that the training batch has ended and
        that one batch of the validation has begun.
        """
        checkpoint[_ENDED_KEY] = bool(trainer.should_stop)
        checkpoint[_SWITCHES_KEY] = {} if self._switches is None else self._switches.changed()
        if not self._is_before_validation:
            return
        progress = checkpoint["loops"]["fit_loop"]
        trained = progress["epoch_loop.batch_progress"]
        trained["total"]["completed"] += 1
        trained["current"]["completed"] += 1
        validated = progress["epoch_loop.val_loop.batch_progress"]
        # One more than were processed: "ready" still counts a batch that an earlier resume has begun.
        num_started = validated["total"]["processed"] + 1
        validated["total"] |= {"ready": num_started, "started": num_started}
        # These still count the validation before, behind whose last batch Lightning would continue.
        validated["current"] |= {"ready": 1, "started": 1, "processed": 0, "completed": 0}

    def on_load_checkpoint(self, trainer: pl.Trainer, _: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keeps a training ended that e.g. `EarlyStopping` had ended before its last step; Lightning would continue."""
        if self._checkpoint is not None:
            trainer.should_stop |= checkpoint.get(_ENDED_KEY, False)
            self._saved_switches = checkpoint.get(_SWITCHES_KEY, {})

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """Marks progress within an evaluation; one after the training has no time limit."""
        self.session.mark("end" if self._has_trained else "evaluate")

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Writes the metrics of the validation into metrics.jsonl, "val_loss" or "valid_loss" as "eval_loss"."""
        numbers = {}
        for name, value in trainer.callback_metrics.items():
            match = _VALIDATION_NAME.fullmatch(name)
            if match is not None:
                numbers[f"eval_{match[1]}"] = value
        if numbers and not trainer.sanity_checking:
            self.session.report(trainer.global_step, **numbers)
        if self._has_trained:
            self.session.mark("end")

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Saves the last step; whatever the program does after it is not taken for a hang."""
        if self._saved_step != trainer.global_step:
            self._save(trainer)
        self._end()

    def teardown(self, trainer: pl.Trainer, _: pl.LightningModule, stage: str) -> None:
        """Marks the end where a resume has found the training finished, so that Lightning calls no `on_train_end`."""
        # Lightning's searches for a learning rate or a batch size call this before the first step.
        if stage == "fit" and trainer.global_step > 0:
            self._end()

    def _end(self) -> None:
        self._has_trained = True
        self.session.mark("end")

    def _repeat_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Calls the hooks of the epoch's start, which Lightning leaves out in an epoch that is resumed in its middle.

        What a program sets there by the number of the epoch is in no checkpoint.
        """
        if not self._epoch_start_is_due:
            return
        self._epoch_start_is_due = False
        for callback in trainer.callbacks:
            if callback is not self and _acts_at_epoch_start(callback):
                callback.on_train_epoch_start(trainer, module)
        # Through Lightning: it records from which hook `log` is called.
        call._call_lightning_module_hook(trainer, "on_train_epoch_start")

    def _recreate_loaders(self, trainer: pl.Trainer) -> None:
        """Creates the loaders as in the epoch that had created them, with `reload_dataloaders_every_n_epochs`.

        At a resume Lightning (2.6) creates them in the present epoch, and counts from there to the next ones.
        """
        fit_loop = trainer.fit_loop
        made_in = self._loaders_made_in_epoch
        every = trainer.reload_dataloaders_every_n_epochs
        if self._checkpoint is None or made_in is None or not every:
            return
        if trainer.current_epoch - made_in >= every:
            # The next loaders are due, and Lightning creates them now.
            fit_loop._last_train_dl_reload_epoch = made_in
        elif fit_loop._last_train_dl_reload_epoch != made_in:
            progress = fit_loop.epoch_progress.current
            present_epoch = progress.completed
            progress.completed = made_in
            fit_loop._combined_loader = None
            fit_loop.setup_data()
            progress.completed = present_epoch

    def _restore_means(
        self, trainer: pl.Trainer, module: pl.LightningModule, means: dict[str, Any] | None, num_done: int
    ) -> None:
        """Restores the sums of the present epoch's means, and the metrics that were logged before.

        Args:
            trainer: at the start of its training.
            module: the trained module.
            means: this rank's part of the checkpoint; None in a checkpoint of an older version.
            num_done: batches of the epoch that were trained on, 0 if those are all.
        """
        assert self._checkpoint is not None
        if means is None or self._checkpoint.world_size != trainer.world_size:
            return
        self._means.show(trainer, means)
        self._means.restore(module, means, is_within=num_done > 0)
        if num_done == 0 and means["lacks_plateau"]:
            progress = trainer.fit_loop.epoch_progress.current
            # `ReduceLROnPlateau` has not seen the epoch that was saved; Lightning steps it by the number of the epoch.
            progress.completed -= 1
            trainer.fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
            progress.completed += 1

    def _set_orders(self, trainer: pl.Trainer) -> bool:
        """Gives each sampler that draws an order a generator seeded for the present epoch, the same on all ranks.

        Returns:
            Whether there is such a sampler.
        """
        assert self._order_seed is not None
        epoch = trainer.current_epoch
        num_drawing = 0
        for loader in CombinedLoader(trainer.train_dataloader).flattened:
            for sampler in _samplers(loader):
                # It keeps the sampler that it divides among ranks in its data set.
                if isinstance(sampler, DistributedSamplerWrapper):
                    LIGHTNING.check(divided_data=sampler.dataset)
                inner = getattr(getattr(sampler, "dataset", None), "_sampler", None)
                seed = mix(self._order_seed, num_drawing)
                if isinstance(inner, _SamplerSeededByEpoch):
                    # Seeded in an earlier epoch; it counts, or the seeds of the samplers after it would change.
                    num_drawing += 1
                elif _draws_order(inner):
                    sampler.dataset._sampler = _SamplerSeededByEpoch(inner, seed)
                    sampler.set_epoch(epoch)
                    num_drawing += 1
                elif _draws_order(sampler):
                    sampler.generator = torch.Generator().manual_seed(mix(seed, epoch))
                    num_drawing += 1
        return num_drawing > 0

    def _require_same_batches(self, trainer: pl.Trainer, loaders: list[Any]) -> None:
        """Checks that the saved number of batches leads to the same place in the epoch.

        Raises:
            ConfigError: the batches have other sizes; or other ranks read a stream, or batches of unknown size.
        """
        assert self._checkpoint is not None
        saved_sizes = self._saved_batch_sizes
        ranks_before = self._checkpoint.world_size
        if saved_sizes is None or None in self._batch_sizes or any(_is_stream(loader) for loader in loaders):
            if ranks_before == trainer.world_size:
                return
            raise ConfigError(
                f"step {trainer.global_step} is within an epoch and was saved by {ranks_before} ranks, these are "
                f"{trainer.world_size}: where they are in a stream, or in batches of unknown size, is not known",
                hint=f"resume on {ranks_before} ranks, or start anew under another run.name",
            )
        if saved_sizes == self._batch_sizes:
            return
        raise ConfigError(
            f"step {trainer.global_step} is within an epoch whose batches have {saved_sizes} samples on {ranks_before} "
            f"ranks, this start has {self._batch_sizes} on {trainer.world_size}: samples would be used twice, others "
            "not",
            hint="choose batch_size by the number of ranks: their product is to stay the same",
        )

    def _save_and_leave(self, trainer: pl.Trainer) -> None:
        self._save(trainer)
        self._is_before_validation = False
        if self._is_stopping:
            self.session.leave()

    def _note_refused(self, folder: Path) -> None:
        """Says at the first save what a resume will not load of it."""
        for name in (_FILE, f"loaders_{self.session.rank}.pt"):
            refused = [] if self._has_noted_refused else allow_data_in(folder / name)
            if refused:
                print(
                    f"slurm_train: {name} of the checkpoint names {', '.join(refused)}, which a resume does not load: "
                    "it could run code; leave it out of save_hyperparameters and of states, or call "
                    "fit(..., weights_only=False)",
                    file=sys.stderr,
                    flush=True,
                )

    def _save(self, trainer: pl.Trainer) -> None:
        step = trainer.global_step
        self._loaders_made_in_epoch = trainer.fit_loop._last_train_dl_reload_epoch
        with self.session.save(step) as folder:
            _require_same_place(trainer)
            trainer.save_checkpoint(folder / _FILE)
            if isinstance(trainer.strategy.checkpoint_io, AsyncCheckpointIO):
                # Waits for the thread that writes; the next save starts another one.
                trainer.strategy.checkpoint_io.teardown()
            means = self._means.state(trainer, trainer.lightning_module)
            # At the end of an epoch Lightning steps `ReduceLROnPlateau` after this save.
            means["lacks_plateau"] = self._saves_at_end_of_epoch
            torch.save(means, folder / f"means_{self.session.rank}.pt")
            # Lightning saves the states of rank 0's loaders for all ranks. It loads none where loaders exist already,
            # e.g. after `trainer.estimated_stepping_batches`, and iterators that it creates meanwhile change them.
            states = [loader.state_dict() for loader in _stateful_loaders(trainer)]
            if states:
                torch.save((states, _fetched_batches(trainer)), folder / f"loaders_{self.session.rank}.pt")
            self._note_refused(folder)
        self._saved_step = step
        self._has_noted_refused = True
        if self.session.saved is not None:
            self.best_model_path = str(self.session.saved.path / _FILE)


def _begin_next_epoch(trainer: pl.Trainer) -> None:
    """Lets a training that is counted in steps go on with the next epoch where it was saved at the end of one.

    Lightning (2.6) goes on so where `max_epochs` counts. With `max_steps` it would take another batch for the epoch
    that is over, and begin the next one after it.
    """
    loop = trainer.fit_loop
    if not loop.restarted_on_epoch_end:
        return
    # Its property sets it back where steps count.
    loop._restarting = False
    loop.epoch_loop.restarting = False
    loop.update_restart_stage()
    loop.epoch_progress.increment_completed()


def _acts_at_epoch_start(callback: Any) -> bool:
    """Returns whether `on_train_epoch_start` of a callback may be called again within an epoch.

    Most of Lightning's own callbacks keep in their state what they have done there, so they are left alone.
    """
    hook = callback.on_train_epoch_start
    is_of_lightning = str(hook.__module__).partition(".")[0] in ("lightning", "pytorch_lightning")
    return isinstance(callback, (GradientAccumulationScheduler, StochasticWeightAveraging)) or not is_of_lightning


def _metrics_of_step(trainer: pl.Trainer, outputs: Any) -> dict[str, Any]:
    """Returns loss, learning rate and length of the training, as far as they are known."""
    metrics: dict[str, Any] = {}
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if loss is not None:
        metrics["loss"] = loss
    if trainer.optimizers:
        metrics["lr"] = trainer.optimizers[0].param_groups[0]["lr"]
    if trainer.max_steps > 0:
        metrics["max_steps"] = trainer.max_steps
    return metrics


def _load(path: Path) -> Any:
    return torch.load(path, weights_only=True) if path.is_file() else None


def _stateful_loaders(trainer: pl.Trainer) -> list[Any]:
    """Returns the loaders that can save and load their state."""
    loaders = CombinedLoader(trainer.train_dataloader).flattened
    return [loader for loader in loaders if hasattr(loader, "load_state_dict")]


def _fetched_batches(trainer: pl.Trainer) -> list[Any]:
    """Returns the batches that were taken from the loaders and not trained on yet.

    From a loader without a length Lightning takes one batch ahead, which the state of the loader counts as read. Where
    some loader has no state there are none: the batches are read again.
    """
    if len(_stateful_loaders(trainer)) < len(CombinedLoader(trainer.train_dataloader).flattened):
        return []
    return list(getattr(trainer.fit_loop._data_fetcher, "batches", ()))


def _require_same_place(trainer: pl.Trainer) -> None:
    """Checks that all ranks are at the same batch of the same epoch. Collective.

    Lightning saves rank 0's place for all.

    Raises:
        ConfigError: they are not, as after a stream that had fewer batches on some ranks.
    """
    if trainer.world_size == 1:
        return
    batch = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    own_place = torch.tensor([trainer.current_epoch, batch], device=trainer.strategy.root_device)
    places = trainer.strategy.all_gather(own_place).tolist()
    if any(place != places[0] for place in places):
        shown = "; ".join(f"rank {rank}: epoch {place[0]}, batch {place[1]}" for rank, place in enumerate(places))
        raise ConfigError(
            f"the ranks are in different places of their data at step {trainer.global_step}, and a resume would begin "
            f"all of them where rank 0 is: {shown}",
            hint="give each rank as many batches in an epoch, e.g. with limit_train_batches=N",
        )


def _global_batch_size(loader: Any, world_size: int) -> int | None:
    """Returns the samples of a batch over all ranks, None where the loader does not say its batch size."""
    for holder in (loader, getattr(loader, "batch_sampler", None)):
        batch_size = getattr(holder, "batch_size", None)
        if batch_size is not None:
            return int(batch_size) * world_size
    return None


def _is_stream(loader: Any) -> bool:
    return not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset)


def _num_batches_done(trainer: pl.Trainer) -> int:
    """Returns the batches of the present epoch that were trained on, 0 if those are all."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    is_over = progress.is_last_batch or progress.current.ready >= trainer.num_training_batches
    return 0 if is_over else int(progress.current.ready)


def _samplers(loader: Any) -> list[Any]:
    """Returns the samplers of a loader, each once."""
    samplers: list[Any] = []
    for holder in (loader, getattr(loader, "batch_sampler", None)):
        sampler = getattr(holder, "sampler", None)
        if isinstance(sampler, _SamplerBehindSamples):
            sampler = sampler.sampler
        if sampler is not None and not any(sampler is other for other in samplers):
            samplers.append(sampler)
    return samplers


def _draws_order(sampler: Any) -> bool:
    """Returns whether the order of a sampler comes from a generator instead of the number of the epoch."""
    return hasattr(sampler, "generator") and not hasattr(sampler, "set_epoch")


class _SamplerSeededByEpoch:
    """A sampler whose iterators have the same order within an epoch, and another order in each epoch.

    Args:
        sampler: draws the order from its `generator`.
        seed: the same on all ranks.
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        self._sampler = sampler
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        self._sampler.generator = torch.Generator().manual_seed(mix(self._seed, self._epoch))
        return iter(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)


class _SamplerBehindSamples:
    """A sampler whose first iterator skips some samples; later iterators give all of them."""

    def __init__(self, sampler: Any, num_skipped: int) -> None:
        self.sampler = sampler
        self._num_skipped = num_skipped

    def __iter__(self) -> Iterator[Any]:
        num_skipped = self._num_skipped
        self._num_skipped = 0
        return itertools.islice(iter(self.sampler), num_skipped, None)

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        # Lightning and the program use other methods of the sampler, such as `set_epoch`.
        return getattr(self.sampler, name)


def _skip_samples(loaders: list[Any], num_batches: int) -> bool:
    """Lets the next iterators of loaders begin behind so many batches, without loading those.

    Returns:
        Whether that is possible; False if a loader has no sampler, or is iterated more than once in an epoch.
    """
    for loader in loaders:
        # Other classes than torch's may take other samples for a batch than the next `batch_size` of the sampler.
        if _is_stream(loader) or type(loader.batch_sampler) is not BatchSampler or len(loader) <= num_batches:
            return False
    for loader in loaders:
        batches = loader.batch_sampler
        batches.sampler = _SamplerBehindSamples(batches.sampler, num_batches * batches.batch_size)
    return True


def _seek_in_epoch(trainer: pl.Trainer, states: list[Any], fetched: list[Any], *, num_done: int) -> None:
    """Lets the loaders continue at their place in the order of the present epoch.

    Lightning (2.6) creates their iterators before it tells the samplers the number of the epoch, so after a resume they
    would continue in the order of the first epoch. Loaders without a state would begin the epoch anew.

    Args:
        trainer: at the start of its training.
        states: of the loaders, in order; empty if they have none.
        fetched: batches that had been taken from the loaders and not trained on.
        num_done: batches to skip, where there are no states.
    """
    loaders = CombinedLoader(trainer.train_dataloader).flattened
    for loader in loaders:
        for sampler in _samplers(loader):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(trainer.current_epoch)
    for loader, state in zip(loaders, states, strict=False):
        loader.load_state_dict(state)
    fetcher = trainer.fit_loop._data_fetcher
    num_ahead = getattr(fetcher, "prefetch_batches", 0)
    if fetched:
        fetcher.prefetch_batches = 0
    is_skipped = num_done == 0 or _skip_samples(loaders, num_done)
    iter(fetcher)
    if not is_skipped:
        # A `training_step` that takes an iterator gets the fetcher's wrapper.
        batches = getattr(fetcher, "iterator_wrapper", fetcher)
        for _ in range(num_done):
            next(batches)
        # Lightning adds the batches that were done itself.
        fetcher.fetched -= num_done
    if fetched:
        fetcher.prefetch_batches = num_ahead
        fetcher.batches = fetched
