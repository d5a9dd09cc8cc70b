"""A Lightning Trainer as a part of its run: one callback, and `ckpt_path`.

    callback = SessionCallback(every_steps=1000)
    trainer = L.Trainer(callbacks=[callback], ...)
    trainer.fit(model, loader, ckpt_path=callback.newest())

It takes the place of Lightning's own requeue under Slurm: no signal handler saves, broadcasts or asks for a requeue.
All ranks stop after the same step, and the checkpoint is one of the run. The random streams of each rank are saved as
well, which Lightning leaves out.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint as LightningCheckpoint
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from slurm_train.adapters.epoch_means import EpochMeans
from slurm_train.checkpoint.switches import Switches
from slurm_train.distributed.seeds import mix, rng_state, set_rng_state
from slurm_train.errors import ConfigError
from slurm_train.rundir.paths import RunDirectory, list_checkpoints
from slurm_train.session import Checkpoint, join

_FILE = "lightning.ckpt"
_ENDS = "slurm_train_should_stop"
"""Key in a checkpoint of Lightning: whether something has asked the training to end."""
_SWITCHES = "slurm_train_switches"
"""Key in a checkpoint of Lightning: what the training has frozen, unfrozen or put into another mode."""
_OF_VALIDATION = re.compile("val(?:id(?:ation)?)?[_/](.+)")


class SessionCallback(LightningCheckpoint):  # type: ignore[misc]  # of an extra
    """Reports each step, stops all ranks at the same one, and saves in the run's checkpoints.

    Lightning calls it after callbacks of other kinds, so that what they change in a step is in its checkpoint; and
    it makes none of its own beside it.

    Wide because it keeps what a checkpoint of Lightning leaves out.

    Args:
        every_steps: optimizer steps between two checkpoints; None: only where the ranks stop, and at the end.
        log_every_steps: steps between lines of metrics.jsonl.
    """

    def __init__(self, *, every_steps: int | None = None, log_every_steps: int = 10) -> None:
        self.session = join()
        self._every_steps = every_steps
        self._log_every_steps = log_every_steps
        self._step = self._saved_step = 0
        self._checkpoint: Checkpoint | None = None
        self._is_before_validation = False
        """Whether what is being saved is followed by a validation."""
        self._saves_at_end_of_epoch = False
        self._stops = False
        self._has_trained = False
        self.best_model_path = ""
        """The newest checkpoint of the run, where Lightning looks for what `test(ckpt_path="best")` loads."""
        self._order_seed: int | None = None
        """What the orders follow from that samplers draw."""
        self._batches: list[int | None] = []
        """Samples of a batch of each loader on all ranks, None where that is not known."""
        self._saved_batches: list[int | None] | None = None
        """Those of the checkpoint."""
        self._loaders_of_epoch: int | None = None
        """The epoch in which the loaders were made."""
        self._means = EpochMeans()
        self._switches: Switches | None = None
        self._switched: dict[str, bool] = {}
        """What the training that is resumed had changed of them."""
        self._lacks_epoch_start = False
        """Whether what the program does at the start of an epoch is due, in one that is resumed in its middle."""

    def newest(self) -> str | None:
        """Returns what `fit(ckpt_path=...)` takes. All ranks call it.

        Raises:
            CheckpointError: there are checkpoints, but none of them verifies.
        """
        self._checkpoint = self.session.newest()
        if self._checkpoint is None:
            return None
        self.best_model_path = str(self._checkpoint.path / _FILE)
        return self.best_model_path

    def setup(self, trainer: pl.Trainer, _: pl.LightningModule, stage: str) -> None:
        """Compares Lightning's ranks with those of the run, and has the checkpoint read.

        Raises:
            ConfigError: they are not the same; or another training of this program is over.
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
        # The first one is taken for that which knows the best model.
        trainer.callbacks = [*(other for other in trainer.callbacks if other is not self), self]
        if self.best_model_path:
            _read_any_types(trainer.strategy, Path(self.best_model_path).parent.parent)

    def state_dict(self) -> dict[str, Any]:
        """Returns what Lightning puts into each checkpoint for this callback."""
        return {"order_seed": self._order_seed, "batches": self._batches, "loaders_of_epoch": self._loaders_of_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned, before the training starts."""
        self._order_seed = state_dict["order_seed"]
        self._saved_batches = state_dict["batches"]
        self._loaders_of_epoch = state_dict.get("loaders_of_epoch")

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Restores the random streams and the place in the data, and takes the stop signals back from Lightning.

        Raises:
            ConfigError: other ranks or batches than those of the checkpoint, and it is one from within an epoch.
        """
        self._step = self._saved_step = trainer.global_step
        self.session.take_signals()
        self._switches = Switches(module, has_modes=True)
        self._switches.set(self._switched)
        self._make_loaders_again(trainer)
        loaders = CombinedLoader(trainer.train_dataloader).flattened
        self._batches = [_samples_of_batch(loader, trainer.world_size) for loader in loaders]
        if self._order_seed is None:
            self._order_seed = int(trainer.strategy.broadcast(torch.initial_seed()))
        draws = self._set_orders(trainer)
        if self._checkpoint is None:
            if draws:
                # There are iterators already.
                iter(trainer.fit_loop._data_fetcher)
            return
        self._lacks_epoch_start = trainer.fit_loop.restarted_mid_epoch
        folder = self._checkpoint.path
        streams = _load(folder / f"rng_{self.session.rank}.pt", weights_only=True)
        is_at_end_of_epoch = trainer.fit_loop.resumed_on_epoch_end
        # A new iterator draws a number; that of the present epoch was there when the streams were saved.
        if streams is not None and is_at_end_of_epoch:
            set_rng_state(streams)
        # States and samples of any types, written by this program.
        states, fetched = _load(folder / f"loaders_{self.session.rank}.pt", weights_only=False) or ([], [])
        num_done = 0 if is_at_end_of_epoch else _num_batches_done(trainer)
        if num_done > 0:
            self._require_same_batches(trainer, loaders)
        self._take_means(trainer, module, _load(folder / f"means_{self.session.rank}.pt", weights_only=True), num_done)
        if is_at_end_of_epoch or len(states) < len(loaders) or self._checkpoint.world_size != trainer.world_size:
            # The states are of other places than this rank's, or some loaders have none.
            states = []
            fetched = []
        _begin_in_epoch(trainer, states, fetched, num_done=0 if states else num_done)
        if streams is not None and not is_at_end_of_epoch:
            set_rng_state(streams)

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Makes the order of an epoch follow from its number, so that a resume has the same."""
        self._set_orders(trainer)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        """Begins an epoch that is resumed in its middle."""
        self._start_epoch_again(trainer, module)

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Begins an epoch that is resumed in its middle, with a validation."""
        self._start_epoch_again(trainer, module)

    def on_train_batch_end(self, trainer: pl.Trainer, _: pl.LightningModule, outputs: Any, *__: Any) -> None:
        """Reports a step; saves where that is due; leaves where all ranks are to stop."""
        run = self.session
        step = trainer.global_step
        before = self._step
        self._means.add(trainer)
        if step == before:  # gradients are accumulated
            run.mark("step")
            return
        self._step = step
        # With several optimizers Lightning counts several steps for a batch.
        logs = step // self._log_every_steps > before // self._log_every_steps or step == trainer.max_steps
        run.report(step, **(_numbers(trainer, outputs) if logs else {}))
        is_due = self._every_steps is not None and step // self._every_steps > before // self._every_steps
        self._stops = bool(run.should_stop())
        # The end of the training comes without a stop, with its validation and a save.
        is_last = step == trainer.max_steps or (trainer.should_stop and trainer.fit_loop._can_stop_early)
        if not (self._stops or is_due) or is_last:
            return
        loop = trainer.fit_loop.epoch_loop
        # There are no public names for either.
        self._is_before_validation = loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
        if loop._num_ready_batches_reached() and not self._is_before_validation:
            # From a checkpoint of the last step Lightning (2.6) leaves out an epoch, from one of the end it does not.
            self._saves_at_end_of_epoch = True
        else:
            self._save_and_leave(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Makes the save of the last step of an epoch."""
        self._means.forget()
        loop = trainer.fit_loop
        is_resumed = self._checkpoint is not None and loop.restarting
        if is_resumed and loop.epoch_loop._num_ready_batches_reached():
            # Lightning leaves this out in an epoch that was resumed, though the metrics are there.
            loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        # After the last epoch the training ends, with a save.
        if self._saves_at_end_of_epoch and trainer.current_epoch + 1 != trainer.max_epochs:
            self._save_and_leave(trainer)
        self._saves_at_end_of_epoch = False

    def on_save_checkpoint(self, trainer: pl.Trainer, _: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keeps what Lightning does not, and has the validation made that is due after the save.

        Lightning takes it for done, unless its counters say that the step is over and a batch of validation has begun.
        """
        checkpoint[_ENDS] = bool(trainer.should_stop)
        checkpoint[_SWITCHES] = {} if self._switches is None else self._switches.changed()
        if not self._is_before_validation:
            return
        progress = checkpoint["loops"]["fit_loop"]
        for counts in (progress["epoch_loop.batch_progress"][name] for name in ("total", "current")):
            counts["completed"] += 1
        validated = progress["epoch_loop.val_loop.batch_progress"]
        # Not one more than before: a batch that an earlier resume has begun is counted still.
        validated["total"]["ready"] = validated["total"]["started"] = validated["total"]["processed"] + 1
        # Those of the validation before: Lightning would go on after its last batch.
        validated["current"] |= {"ready": 1, "started": 1, "processed": 0, "completed": 0}

    def on_load_checkpoint(self, trainer: pl.Trainer, _: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Ends a training again that was ended before its last step, as by `EarlyStopping`; Lightning would go on."""
        if self._checkpoint is not None:
            trainer.should_stop |= checkpoint.get(_ENDS, False)
            self._switched = checkpoint.get(_SWITCHES, {})

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """Reports progress within an evaluation; after the training it may take as long as it wants."""
        self.session.mark("end" if self._has_trained else "evaluate")

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Writes what the validation has logged, "val_loss" or "valid_loss" as "eval_loss"."""
        numbers = {}
        for name, value in trainer.callback_metrics.items():
            match = _OF_VALIDATION.fullmatch(name)
            if match is not None:
                numbers[f"eval_{match[1]}"] = value
        if numbers and not trainer.sanity_checking:
            self.session.report(trainer.global_step, **numbers)
        if self._has_trained:
            self.session.mark("end")

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Saves the end; what a program does after its training is no hang."""
        if self._saved_step != trainer.global_step:
            self._save(trainer)
        self._end()

    def teardown(self, trainer: pl.Trainer, _: pl.LightningModule, stage: str) -> None:
        """Says that the training is over where a resume has found it at its end, so that there was nothing to do."""
        # A search for a learning rate or a batch size comes here before the first step.
        if stage == "fit" and trainer.global_step > 0:
            self._end()

    def _end(self) -> None:
        self._has_trained = True
        self.session.mark("end")

    def _start_epoch_again(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Has the program do what it does at the start of an epoch, which Lightning leaves out within a resumed one.

        What it sets by the number of the epoch is in no checkpoint.
        """
        if not self._lacks_epoch_start:
            return
        self._lacks_epoch_start = False
        for callback in trainer.callbacks:
            if callback is not self and _begins_epochs(callback):
                callback.on_train_epoch_start(trainer, module)
        # It says where `log` is called from.
        call._call_lightning_module_hook(trainer, "on_train_epoch_start")

    def _make_loaders_again(self, trainer: pl.Trainer) -> None:
        """Has the loaders made in their epoch at a resume, with `reload_dataloaders_every_n_epochs`.

        Lightning (2.6) makes them in the epoch of the resume, and counts anew until it makes the next ones.
        """
        fit_loop = trainer.fit_loop
        made_in = self._loaders_of_epoch
        every = trainer.reload_dataloaders_every_n_epochs
        if self._checkpoint is None or made_in is None or not every:
            return
        if trainer.current_epoch - made_in >= every:
            # It is time for the next ones, which Lightning makes now.
            fit_loop._last_train_dl_reload_epoch = made_in
        elif fit_loop._last_train_dl_reload_epoch != made_in:
            progress = fit_loop.epoch_progress.current
            present = progress.completed
            progress.completed = made_in
            fit_loop._combined_loader = None
            fit_loop.setup_data()
            progress.completed = present

    def _take_means(
        self, trainer: pl.Trainer, module: pl.LightningModule, means: dict[str, Any] | None, num_done: int
    ) -> None:
        """Goes on with what the steps of the present epoch have added up, and shows what was logged before.

        Args:
            trainer: at the start of its training.
            module: what is trained.
            means: what the checkpoint has of this rank; None in an older one.
            num_done: batches of the epoch that were trained on, 0 if those are all.
        """
        assert self._checkpoint is not None
        if means is None or self._checkpoint.world_size != trainer.world_size:
            return
        self._means.show(trainer, means)
        self._means.restore(module, means, is_within=num_done > 0)
        if num_done == 0 and means["lacks_plateau"]:
            progress = trainer.fit_loop.epoch_progress.current
            # It is counted by the epoch that was saved.
            progress.completed -= 1
            trainer.fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
            progress.completed += 1

    def _set_orders(self, trainer: pl.Trainer) -> bool:
        """Gives the samplers that draw an order a generator of the present epoch, the same on all ranks.

        Returns:
            Whether there are any.
        """
        assert self._order_seed is not None
        epoch = trainer.current_epoch
        num_drawing = 0
        for loader in CombinedLoader(trainer.train_dataloader).flattened:
            for sampler in _samplers(loader):
                # Lightning's `DistributedSamplerWrapper` has what it divides as the sampler of its data set.
                divided = getattr(getattr(sampler, "dataset", None), "_sampler", None)
                seed = mix(self._order_seed, num_drawing)
                if _draws(divided):
                    sampler.dataset._sampler = _DrawnByEpoch(divided, seed)
                    sampler.set_epoch(epoch)
                elif _draws(sampler):
                    sampler.generator = torch.Generator().manual_seed(mix(seed, epoch))
                num_drawing += _draws(divided) or _draws(sampler)
        return num_drawing > 0

    def _require_same_batches(self, trainer: pl.Trainer, loaders: list[Any]) -> None:
        """Refuses what would make the place in an epoch, which is a number of batches, another one.

        Raises:
            ConfigError: other batches, or other ranks that read a stream or batches of unknown size.
        """
        assert self._checkpoint is not None
        before = self._saved_batches
        ranks_before = self._checkpoint.world_size
        has_same_ranks = ranks_before == trainer.world_size
        if before is None or None in self._batches or any(_is_stream(loader) for loader in loaders):
            if has_same_ranks:
                return
            raise ConfigError(
                f"step {trainer.global_step} is within an epoch and was saved by {ranks_before} ranks, these are "
                f"{trainer.world_size}: where they are in a stream, or in batches of unknown size, is not known",
                hint=f"resume on {ranks_before} ranks, or start anew under another run.name",
            )
        if before == self._batches:
            return
        raise ConfigError(
            f"step {trainer.global_step} is within an epoch whose batches have {before} samples on {ranks_before} "
            f"ranks, this start has {self._batches} on {trainer.world_size}: samples would be used twice, others not",
            hint="choose batch_size by the number of ranks: their product is to stay the same",
        )

    def _save_and_leave(self, trainer: pl.Trainer) -> None:
        self._save(trainer)
        self._is_before_validation = False
        if self._stops:
            self.session.leave()

    def _save(self, trainer: pl.Trainer) -> None:
        step = trainer.global_step
        self._loaders_of_epoch = trainer.fit_loop._last_train_dl_reload_epoch
        with self.session.save(step) as folder:
            _require_same_place(trainer)
            trainer.save_checkpoint(folder / _FILE)
            if isinstance(trainer.strategy.checkpoint_io, AsyncCheckpointIO):
                # It waits for its thread, and makes another one at the next save.
                trainer.strategy.checkpoint_io.teardown()
            torch.save(rng_state(), folder / f"rng_{self.session.rank}.pt")
            means = self._means.state(trainer, trainer.lightning_module)
            # Lightning steps `ReduceLROnPlateau` after this.
            means["lacks_plateau"] = self._saves_at_end_of_epoch
            torch.save(means, folder / f"means_{self.session.rank}.pt")
            # Lightning saves the states of rank 0's loaders for all ranks. It loads none where loaders were there
            # before, as with `trainer.estimated_stepping_batches`, and iterators that it makes meanwhile move them.
            states = [loader.state_dict() for loader in _stateful(trainer)]
            if states:
                torch.save((states, _fetched_batches(trainer)), folder / f"loaders_{self.session.rank}.pt")
        self._saved_step = step
        if self.session.run_directory is not None:
            checkpoints = RunDirectory(self.session.run_directory).checkpoints
            # Other nodes may see it later.
            newest = str(list_checkpoints(checkpoints)[0] / _FILE) if trainer.is_global_zero else ""
            self.best_model_path = trainer.strategy.broadcast(newest)


def _read_any_types(strategy: Strategy, checkpoints: Path) -> None:
    """Has a strategy read checkpoints of the run, which may have values of any types: torch reads numbers only.

    Strategies that save in parts read without a `CheckpointIO`.

    Args:
        strategy: what reads.
        checkpoints: where those of the run are.
    """
    vars(strategy).pop("load_checkpoint", None)
    inner = strategy.load_checkpoint

    def load_checkpoint(path: Any, *others: Any, **settings: Any) -> Any:
        if checkpoints in Path(path).parents and settings.get("weights_only", True) is None:
            settings["weights_only"] = False
        return inner(path, *others, **settings)

    strategy.load_checkpoint = load_checkpoint


def _begins_epochs(callback: Any) -> bool:
    """Returns whether a callback does something at the start of an epoch that may be done twice.

    Of Lightning's own ones some would not come to the same: they keep what they have done in their state.
    """
    hook = callback.on_train_epoch_start
    is_of_lightning = str(hook.__module__).partition(".")[0] in ("lightning", "pytorch_lightning")
    return isinstance(callback, (GradientAccumulationScheduler, StochasticWeightAveraging)) or not is_of_lightning


def _numbers(trainer: pl.Trainer, outputs: Any) -> dict[str, Any]:
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    rates = [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers[:1]]
    length = {"max_steps": trainer.max_steps} if trainer.max_steps > 0 else {}
    numbers = {"loss": loss, **({"lr": rates[0]} if rates else {}), **length}
    return {name: value for name, value in numbers.items() if value is not None}


def _load(path: Path, *, weights_only: bool) -> Any:
    return torch.load(path, weights_only=weights_only) if path.is_file() else None


def _stateful(trainer: pl.Trainer) -> list[Any]:
    """Returns the loaders that have a state."""
    loaders = CombinedLoader(trainer.train_dataloader).flattened
    return [loader for loader in loaders if hasattr(loader, "load_state_dict")]


def _fetched_batches(trainer: pl.Trainer) -> list[Any]:
    """Returns the batches that were taken from the loaders and not trained on yet.

    Of a loader without length Lightning takes one ahead, so the state of the loader says that it is done.
    """
    if len(_stateful(trainer)) < len(CombinedLoader(trainer.train_dataloader).flattened):
        return []
    return list(getattr(trainer.fit_loop._data_fetcher, "batches", ()))


def _require_same_place(trainer: pl.Trainer) -> None:
    """Refuses ranks in different places, as after a stream that had less batches on some of them. Collective.

    Lightning saves rank 0's place for all.

    Raises:
        ConfigError: they are.
    """
    here = torch.tensor([trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_progress.current.ready])
    if trainer.world_size == 1:
        return
    places = trainer.strategy.all_gather(here.to(trainer.strategy.root_device)).tolist()
    if any(place != places[0] for place in places):
        words = "; ".join(f"rank {rank}: epoch {place[0]}, batch {place[1]}" for rank, place in enumerate(places))
        raise ConfigError(
            f"the ranks are in different places of their data at step {trainer.global_step}, and a resume would begin "
            f"all of them where rank 0 is: {words}",
            hint="give each rank as many batches in an epoch, e.g. with limit_train_batches=N",
        )


def _samples_of_batch(loader: Any, world_size: int) -> int | None:
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
        if isinstance(sampler, _RestOfEpoch):
            sampler = sampler.sampler
        if sampler is not None and not any(sampler is other for other in samplers):
            samplers.append(sampler)
    return samplers


def _draws(sampler: Any) -> bool:
    """Returns whether the order of a sampler comes from a generator instead of the number of the epoch."""
    return hasattr(sampler, "generator") and not hasattr(sampler, "set_epoch")


class _DrawnByEpoch:
    """A sampler whose order is drawn anew by each iterator, and is the same for all iterators of an epoch.

    Args:
        sampler: what draws.
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


class _RestOfEpoch:
    """A sampler whose first iterator leaves out the samples that are done; later iterators give all samples."""

    def __init__(self, sampler: Any, num_samples: int) -> None:
        self.sampler = sampler
        self._num_samples = num_samples

    def __iter__(self) -> Iterator[Any]:
        num_done = self._num_samples
        self._num_samples = 0
        return itertools.islice(iter(self.sampler), num_done, None)

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        # What Lightning or the program asks it for, such as `set_epoch`.
        return getattr(self.sampler, name)


def _leave_out_samples(loaders: list[Any], num_batches: int) -> bool:
    """Makes the next iterators of loaders begin after so many batches, without loading those.

    Returns:
        Whether they do; False if any of them has no sampler, or is run through more than once in an epoch.
    """
    for loader in loaders:
        # Only of torch's own class is it known that a batch is the next `batch_size` of the sampler.
        if _is_stream(loader) or type(loader.batch_sampler) is not BatchSampler or len(loader) <= num_batches:
            return False
    for loader in loaders:
        batches = loader.batch_sampler
        batches.sampler = _RestOfEpoch(batches.sampler, num_batches * batches.batch_size)
    return True


def _begin_in_epoch(trainer: pl.Trainer, states: list[Any], fetched: list[Any], *, num_done: int) -> None:
    """Makes the loaders continue in the order of the present epoch, at the same place.

    Lightning makes their iterators before it tells the samplers which epoch it is (2.6), so after a resume they would
    continue in the order of the first one. Loaders without a state would begin the epoch anew.

    Args:
        trainer: at the start of its training.
        states: of the loaders, in order; empty if they have none.
        fetched: what was taken from them before that, and not trained on.
        num_done: batches that are left out without states.
    """
    loaders = CombinedLoader(trainer.train_dataloader).flattened
    for loader in loaders:
        for sampler in _samplers(loader):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(trainer.current_epoch)
    for loader, state in zip(loaders, states, strict=False):
        loader.load_state_dict(state)
    # There is no public name for it.
    fetcher = trainer.fit_loop._data_fetcher
    num_ahead = getattr(fetcher, "prefetch_batches", 0)
    if fetched:
        fetcher.prefetch_batches = 0
    is_left_out = num_done == 0 or _leave_out_samples(loaders, num_done)
    iter(fetcher)
    if not is_left_out:
        # In a step that takes an iterator it is that of the fetcher.
        batches = getattr(fetcher, "iterator_wrapper", fetcher)
        for _ in range(num_done):
            next(batches)
        # Lightning adds them itself.
        fetcher.fetched -= num_done
    if fetched:
        fetcher.prefetch_batches = num_ahead
        fetcher.batches = fetched
