"""The callback for Lightning: when it is called, what it makes of a validation, what a stop and a resume change."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset

from slurm_train.errors import ConfigError
from slurm_train.rundir.events import read_saves
from slurm_train.session.signals import StopFlag
from tests.support.extras import NEEDS_LIGHTNING
from tests.support.joined_runs import evaluated_steps, evaluations, joined, new_run

# What Lightning itself warns of is not ours.
pytestmark = [NEEDS_LIGHTNING, pytest.mark.filterwarnings("ignore"), pytest.mark.full]


def test_it_comes_after_what_changes_a_step_and_is_the_only_one_that_saves() -> None:
    from lightning import pytorch as lightning

    from slurm_train.adapters import lightning as adapter
    from tests.support import lightning_programs as programs

    callback = adapter.SessionCallback()
    # Stands for one that averages weights after each step.
    averaging = lightning.Callback()
    trainer = lightning.Trainer(callbacks=[callback, averaging], **programs.QUIET)
    assert trainer.callbacks[-1] is callback and averaging in trainer.callbacks
    assert [found for found in trainer.callbacks if isinstance(found, lightning.callbacks.Checkpoint)] == [callback]


def test_outside_of_a_run_lightning_keeps_its_own_checkpoint(tmp_path: Path) -> None:
    from lightning import pytorch as lightning

    from slurm_train.adapters import lightning as adapter
    from tests.support import lightning_programs as programs

    loader = DataLoader(TensorDataset(torch.arange(16.0).unsqueeze(1)), batch_size=2)
    settings = {"max_epochs": 1, **programs.QUIET, "default_root_dir": tmp_path}
    trainer = lightning.Trainer(callbacks=[adapter.SessionCallback()], **settings)
    trainer.fit(programs.Training("step"), loader)
    assert [path.name for path in tmp_path.rglob("*.ckpt")] == ["epoch=0-step=8.ckpt"]


def test_the_measures_of_a_validation_are_told_by_one_name() -> None:
    from slurm_train.adapters import lightning as adapter

    told: list[tuple[int, dict[str, Any]]] = []
    callback = adapter.SessionCallback()
    callback.session = SimpleNamespace(report=lambda step, **numbers: told.append((step, numbers)), mark=lambda _: None)
    logged = {"val_loss": 1, "valid_accuracy": 2, "validation/f1": 3, "value": 4, "train_loss": 5}
    callback.on_validation_end(SimpleNamespace(callback_metrics=logged, sanity_checking=False, global_step=7))
    callback.on_validation_end(SimpleNamespace(callback_metrics={"value": 4}, sanity_checking=False, global_step=8))
    assert told == [(7, {"eval_loss": 1, "eval_accuracy": 2, "eval_f1": 3})]


def test_a_second_training_is_refused_also_where_the_first_is_found_at_its_end(tmp_path: Path) -> None:
    from lightning import pytorch as lightning

    from slurm_train.adapters import lightning as adapter
    from tests.support import lightning_programs as programs

    run = new_run(tmp_path)
    loader = DataLoader(TensorDataset(torch.arange(16.0).unsqueeze(1)), batch_size=2)

    def fit() -> None:
        callback = adapter.SessionCallback()
        trainer = lightning.Trainer(max_epochs=1, callbacks=[callback], **programs.QUIET)
        trainer.validate(programs.Training("step"), loader, verbose=False)
        trainer.fit(programs.Training("step"), loader, loader, ckpt_path=callback.newest())

    for _ in range(2):
        with joined(run):
            fit()
            with pytest.raises(ConfigError, match="a training of this program is over, at step 8, and another begins"):
                fit()
    # A model that no checkpoint was loaded into is evaluated at the first start alone; twice, since another was made.
    assert evaluated_steps(run) == [0, 8, 0]


@pytest.mark.parametrize("ended_by", ["EarlyStopping", "the program"])
def test_what_was_ended_early_is_trained_no_further(ended_by: str, tmp_path: Path) -> None:
    """What came after the training went wrong, say, and the ranks are started again."""
    from lightning import pytorch as lightning

    from slurm_train.adapters import lightning as adapter
    from tests.support import lightning_programs as programs

    class Ending(lightning.Callback):  # type: ignore[misc]  # Any: of an extra
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop |= trainer.global_step == 11

    run = new_run(tmp_path)
    loader = DataLoader(TensorDataset(torch.arange(16.0).unsqueeze(1)), batch_size=2)
    steps = []
    for _ in range(2):
        stop = StopFlag()
        with joined(run, stop):
            callback = adapter.SessionCallback(every_steps=11)
            ending = Ending()
            if ended_by == "EarlyStopping":
                ending = lightning.callbacks.EarlyStopping("val_loss", patience=1)
            # In the last step a stop has nothing to stop.
            callbacks = [programs.Stopping(stop, 11 if ended_by == "the program" else None), ending, callback]
            trainer = lightning.Trainer(max_epochs=5, callbacks=callbacks, **programs.QUIET)
            module = programs.Training("step")
            trainer.fit(module, loader, loader, ckpt_path=callback.newest())
        steps.append((trainer.global_step, sum(step[0] >= 0 for step in module.steps)))
    num_steps = 16 if ended_by == "EarlyStopping" else 11
    assert steps == [(num_steps, num_steps), (num_steps, 0)]
    assert evaluated_steps(run) == ([8, 16] if ended_by == "EarlyStopping" else [8, 11])


@pytest.mark.parametrize("is_own", [True, False], ids=["own", "none"])
def test_the_best_model_is_that_of_the_own_callback_or_the_newest(is_own: bool, tmp_path: Path) -> None:
    from lightning import pytorch as lightning

    from slurm_train.adapters import lightning as adapter
    from tests.support import lightning_programs as programs

    run = new_run(tmp_path)
    loader = DataLoader(TensorDataset(torch.arange(16.0).unsqueeze(1)), batch_size=2)
    own = lightning.callbacks.ModelCheckpoint(tmp_path / "own", monitor="val_loss", mode="max")
    for _ in range(2):
        with joined(run):
            callback = adapter.SessionCallback()
            callbacks = [callback, own] if is_own else [callback]
            trainer = lightning.Trainer(max_epochs=2, callbacks=callbacks, **programs.QUIET)
            module = programs.WithSettings()
            trainer.fit(module, loader, loader, ckpt_path=callback.newest())
            best = trainer.checkpoint_callback.best_model_path
            if not is_own:
                trainer.test(dataloaders=loader, verbose=False)
        assert Path(best).parent.parent == (tmp_path if is_own else run.checkpoints)


class Drawing(Sampler[list[int]]):
    """Batches of two, in an order that follows from the epoch; Lightning takes it as it is."""

    epoch = 0
    batch_size = 2

    @property
    def sampler(self) -> Drawing:
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(16, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return (order[first : first + 2] for first in range(0, 16, 2))


def by_sampler(kind: Any, data: Any) -> Any:
    return kind(data, batch_size=2, sampler=DistributedSampler(data, num_replicas=1, rank=0))


def with_own_generator(kind: Any, data: Any) -> Any:
    return kind(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(5))


LOADERS: dict[str, Callable[[Any, Any], Any]] = {
    "sampler": by_sampler,
    "shuffled": lambda kind, data: kind(data, batch_size=2, shuffle=True),
    "own generator": with_own_generator,
    "own batches": lambda kind, data: kind(data, batch_sampler=Drawing()),
    # The shorter one is run through again and again.
    "two": lambda kind, data: [kind(data, batch_size=2), kind(data, batch_size=6, shuffle=True)],
}


# How a stateful loader continues batches of one's own, and two loaders, is torchdata's.
WITH_A_STATE = [name for name in LOADERS if name not in ("own batches", "two")]


@pytest.mark.parametrize(
    ("is_stateful", "name"), [*((True, name) for name in WITH_A_STATE), *((False, name) for name in LOADERS)]
)
def test_a_resumed_epoch_goes_on_in_its_own_order(is_stateful: bool, name: str, tmp_path: Path) -> None:
    from lightning import pytorch as lightning

    from slurm_train.adapters import lightning as adapter
    from tests.support import lightning_programs as programs

    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    data = TensorDataset(torch.arange(16.0).unsqueeze(1))

    def seen(run: Any, stop_at: int = 0) -> list[list[float]]:
        stop = StopFlag()
        module = programs.Looking()
        with joined(run, stop):
            callback = adapter.SessionCallback()
            callbacks = [programs.Stopping(stop, stop_at), callback]
            trainer = lightning.Trainer(max_epochs=3, callbacks=callbacks, **programs.QUIET)
            loaders = LOADERS[name](stateful if is_stateful else DataLoader, data)
            try:
                trainer.fit(module, loaders, ckpt_path=callback.newest())
            except SystemExit as ended:
                assert ended.code == 75 and stop_at
        return module.seen

    torch.manual_seed(0)
    expected = seen(new_run(tmp_path / "undisturbed"))
    # Eight steps are an epoch.
    for stop_at in (3, 11):
        torch.manual_seed(0)
        run = new_run(tmp_path / str(stop_at))
        before = seen(run, stop_at)
        # Another start has drawn other numbers.
        torch.manual_seed(1)
        assert before + seen(run) == expected
    assert name == "two" or sorted(itertools.chain(*expected[8:16])) == list(range(16))


def test_other_batches_within_an_epoch_are_refused(tmp_path: Path) -> None:
    from lightning import pytorch as lightning

    from slurm_train.adapters import lightning as adapter
    from tests.support import lightning_programs as programs

    data = TensorDataset(torch.arange(16.0).unsqueeze(1))
    run = new_run(tmp_path)

    def train(batch_size: int, stop_at: int = 0) -> None:
        stop = StopFlag()
        with joined(run, stop):
            callback = adapter.SessionCallback()
            callbacks = [programs.Stopping(stop, stop_at), callback]
            trainer = lightning.Trainer(max_epochs=2, callbacks=callbacks, **programs.QUIET)
            trainer.fit(programs.Looking(), DataLoader(data, batch_size=batch_size), ckpt_path=callback.newest())

    with pytest.raises(SystemExit):
        train(2, stop_at=3)
    with pytest.raises(ConfigError, match=r"batches have \[2\] samples on 1 ranks, this start has \[4\] on 1"):
        train(4)


def test_other_ranks_than_those_of_the_run_are_refused(tmp_path: Path) -> None:
    from slurm_train.adapters import lightning as adapter

    with joined(new_run(tmp_path)):
        callback = adapter.SessionCallback()
        trainer = SimpleNamespace(global_rank=0, world_size=4)
        with pytest.raises(ConfigError, match="calls this rank 0 of 4; it is 0 of 1 in the run"):
            callback.setup(trainer, None, "fit")


@pytest.mark.parametrize("other", [[0, 5], [1, 1]])
def test_ranks_in_different_places_of_their_data_are_refused(other: list[int]) -> None:
    """A stream that ends earlier on a rank is begun again there, and Lightning saves rank 0's place for all."""
    from slurm_train.adapters.lightning import _require_same_place

    here = SimpleNamespace(current=SimpleNamespace(ready=5))
    strategy = SimpleNamespace(
        root_device=torch.device("cpu"), all_gather=lambda place: torch.stack([place, torch.tensor(other)])
    )
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=here))
    trainer = SimpleNamespace(current_epoch=0, global_step=5, world_size=2, strategy=strategy, fit_loop=loop)
    if other == [0, 5]:
        _require_same_place(trainer)
        return
    with pytest.raises(ConfigError, match=r"at step 5, and .*: rank 0: epoch 0, batch 5; rank 1: epoch 1, batch 1"):
        _require_same_place(trainer)


EVERY_3: dict[str, Any] = {"val_check_interval": 3}
ACROSS_EPOCHS: dict[str, Any] = {"val_check_interval": 12, "check_val_every_n_epoch": None}
EVERY_2_EPOCHS: dict[str, Any] = {"check_val_every_n_epoch": 2}
NO_VALIDATION: dict[str, Any] = {"limit_val_batches": 0}
IN_STEPS: dict[str, Any] = {"max_steps": 40, "max_epochs": -1}
STREAM: dict[str, Any] = {"limit_val_batches": 1.0}


# Eight steps are an epoch.
@pytest.mark.parametrize(
    ("schedule", "settings", "stops"),
    [
        pytest.param("step", EVERY_3, [3], id="where a validation is due"),
        pytest.param("step", EVERY_3, [3, 6], id="where two validations of an epoch are due"),
        pytest.param("step", EVERY_3, [8], id="at the end of an epoch after its validations"),
        pytest.param("step", {}, [8], id="at the end of an epoch where a validation is due"),
        pytest.param("epoch", {}, [16], id="where a rate falls by the epoch"),
        pytest.param("plateau", {}, [10, 16], id="where a rate falls on a plateau"),
        pytest.param("step", ACROSS_EPOCHS, [8, 12], id="where validations do not follow epochs"),
        pytest.param("epoch", EVERY_2_EPOCHS, [8, 16], id="where every second epoch has a validation"),
        pytest.param("epoch", NO_VALIDATION, [16, 40], id="at the end of epochs without validation"),
        pytest.param("epoch", NO_VALIDATION | IN_STEPS, [16, 35], id="at the end of an epoch, counted in steps"),
        pytest.param("epoch", IN_STEPS, [8, 16], id="where a validation is due, counted in steps"),
        pytest.param("step", STREAM, [3, 10, 16], id="of a stream, from which a batch is taken ahead"),
    ],
)
def test_a_stop_changes_no_step_and_no_validation(
    schedule: str, settings: dict[str, Any], stops: list[int], tmp_path: Path
) -> None:
    from lightning import pytorch as lightning

    from slurm_train.adapters import lightning as adapter
    from tests.support import lightning_programs as programs

    is_stream = settings is STREAM
    loader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    data = TensorDataset(torch.arange(16.0).unsqueeze(1))

    def train(run: Any, stop_at: int | None = None) -> tuple[int, list[tuple[float, ...]]]:
        stop = StopFlag()

        module = programs.Training(schedule)
        callbacks: list[Any] = [programs.Stopping(stop, stop_at)]
        if settings.get("limit_val_batches") != 0:
            callbacks.append(lightning.callbacks.EarlyStopping("val_loss", patience=4))
        with joined(run, stop):
            callback = adapter.SessionCallback()
            length = {"max_epochs": 5, "num_sanity_val_steps": 0} | settings
            trainer = lightning.Trainer(callbacks=[*callbacks, callback], **programs.QUIET, **length)
            sampler = DistributedSampler(data, num_replicas=1, rank=0)
            samples = (
                loader(programs.Stream(), batch_size=2) if is_stream else loader(data, batch_size=2, sampler=sampler)
            )
            # Several batches of each: a validation that is made after a resume is a whole one.
            held_out = [DataLoader(data, batch_size=8), DataLoader(data, batch_size=6)]
            try:
                trainer.fit(module, samples, held_out, ckpt_path=callback.newest())
            except SystemExit as ended:
                return int(str(ended.code)), module.steps
        return 0, module.steps

    undisturbed = new_run(tmp_path / "undisturbed")
    _, expected = train(undisturbed)
    num_steps = sum(step[0] >= 0 for step in expected)
    run = new_run(tmp_path / "stopped")
    steps = []
    for stop_at in stops:
        code, some = train(run, stop_at)
        # A stop in the very last step stops nothing.
        assert code == (75 if stop_at < num_steps else 0)
        steps += some
    if len(steps) < len(expected):
        steps += train(run)[1]
    assert steps == expected
    assert evaluated_steps(run) == evaluated_steps(undisturbed)


@pytest.mark.parametrize("stop_at", [2, 10, 13])
def test_what_begins_an_epoch_is_done_again_where_it_is_resumed(stop_at: int, tmp_path: Path) -> None:
    """Lightning leaves it out; eight, four and two steps are an epoch, each with two validations."""
    from lightning import pytorch as lightning
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    from slurm_train.adapters import lightning as adapter
    from tests.support import lightning_programs as programs

    data = TensorDataset(torch.arange(16.0).unsqueeze(1))

    def train(run: Any, stop_at: int | None = None) -> list[Any]:
        stop = StopFlag()
        module = programs.ByEpoch("epoch")
        accumulation = lightning.callbacks.GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})
        averaging = lightning.callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=2)
        callbacks = [programs.Stopping(stop, stop_at), programs.Noting(), accumulation, averaging]
        with joined(run, stop):
            callback = adapter.SessionCallback()
            settings = {"max_epochs": 3, "num_sanity_val_steps": 0, "val_check_interval": 0.5}
            trainer = lightning.Trainer(
                callbacks=[*callbacks, callback], plugins=[AsyncCheckpointIO()], **programs.QUIET, **settings
            )
            try:
                trainer.fit(module, DataLoader(data, 2), DataLoader(data, 16), ckpt_path=callback.newest())
            except SystemExit as ended:
                assert ended.code == 75
        return [*module.steps, *(measure["eval_factor"] for measure in evaluations(run))]

    expected = train(new_run(tmp_path / "undisturbed"))
    run = new_run(tmp_path / "stopped")
    before = [step for step in train(run, stop_at) if isinstance(step, tuple)]
    assert before + train(run) == expected


@pytest.mark.parametrize("stop_at", [3, 8, 11, 19, 20, 24])
@pytest.mark.parametrize(
    ("monitor", "settings"),
    [
        ("loss_epoch", {"limit_val_batches": 0}),
        ("mean", {"val_check_interval": 4}),
        ("val_loss", {"check_val_every_n_epoch": 2}),
    ],
    ids=["no validation", "validations within an epoch", "a validation every second epoch"],
)
def test_means_of_a_resumed_epoch_are_those_of_the_whole(
    monitor: str, settings: dict[str, Any], stop_at: int, tmp_path: Path
) -> None:
    from lightning import pytorch as lightning

    from slurm_train.adapters import lightning as adapter
    from tests.support import lightning_programs as programs

    data = TensorDataset(torch.arange(16.0).unsqueeze(1))

    def train(run: Any, stop_at: int | None = None) -> list[Any]:
        stop = StopFlag()
        module = programs.Averaging(monitor)
        with joined(run, stop):
            callback = adapter.SessionCallback()
            # It ends nothing; it fails where there is no such mean.
            patience = lightning.callbacks.EarlyStopping("loss_epoch", patience=9, check_on_train_epoch_end=True)
            callbacks = [programs.Stopping(stop, stop_at), programs.SeeingMeans(), patience, callback]
            trainer = lightning.Trainer(
                max_epochs=4, num_sanity_val_steps=0, callbacks=callbacks, **programs.QUIET, **settings
            )
            try:
                trainer.fit(module, DataLoader(data, 2), DataLoader(data, 8), ckpt_path=callback.newest())
            except SystemExit as ended:
                assert ended.code == 75
        return module.steps

    run = new_run(tmp_path / "stopped")
    assert train(run, stop_at) + train(run) == train(new_run(tmp_path / "undisturbed"))


@pytest.mark.parametrize("stop_at", [3, 11, 16, 19])
def test_what_an_epoch_has_unfrozen_stays_so(stop_at: int, tmp_path: Path) -> None:
    """As by `BackboneFinetuning`, which does it in one epoch alone, and freezes at each start."""
    from lightning import pytorch as lightning

    from slurm_train.adapters import lightning as adapter
    from tests.support import lightning_programs as programs

    data = TensorDataset(torch.arange(16.0).unsqueeze(1))

    def train(run: Any, stop_at: int | None = None) -> list[Any]:
        stop = StopFlag()
        module = programs.Unfreezing()
        with joined(run, stop):
            callback = adapter.SessionCallback()
            callbacks = [programs.Stopping(stop, stop_at), callback]
            trainer = lightning.Trainer(max_epochs=3, num_sanity_val_steps=0, callbacks=callbacks, **programs.QUIET)
            try:
                trainer.fit(module, DataLoader(data, 2), DataLoader(data, 16), ckpt_path=callback.newest())
            except SystemExit as ended:
                assert ended.code == 75
        return module.steps

    run = new_run(tmp_path / "stopped")
    assert train(run, stop_at) + train(run) == train(new_run(tmp_path / "undisturbed"))


@pytest.mark.parametrize("stop_at", [6, 8, 13])
def test_loaders_are_those_of_their_epoch(stop_at: int, tmp_path: Path) -> None:
    """Made again every second epoch; four steps are one."""
    from lightning import pytorch as lightning

    from slurm_train.adapters import lightning as adapter
    from tests.support import lightning_programs as programs

    def seen(run: Any, stop_at: int | None = None) -> list[list[float]]:
        stop = StopFlag()
        module = programs.OfItsEpoch()
        with joined(run, stop):
            callback = adapter.SessionCallback()
            trainer = lightning.Trainer(
                max_epochs=5,
                callbacks=[programs.Stopping(stop, stop_at), callback],
                reload_dataloaders_every_n_epochs=2,
                **programs.QUIET,
            )
            try:
                trainer.fit(module, ckpt_path=callback.newest())
            except SystemExit as ended:
                assert ended.code == 75
        return module.seen

    run = new_run(tmp_path / "stopped")
    assert seen(run, stop_at) + seen(run) == seen(new_run(tmp_path / "undisturbed"))


def test_steps_of_several_optimizers_pass_no_save_and_what_follows_is_no_hang(tmp_path: Path) -> None:
    from lightning import pytorch as lightning

    from slurm_train.adapters import lightning as adapter
    from tests.support import lightning_programs as programs

    run = new_run(tmp_path)
    loader = DataLoader(TensorDataset(torch.arange(48.0).unsqueeze(1)), batch_size=2)
    with joined(run) as session:
        callback = adapter.SessionCallback(every_steps=10)
        trainer = lightning.Trainer(max_epochs=1, callbacks=[callback], **programs.QUIET)
        module = programs.Adversaries()
        trainer.fit(module, loader)
        assert session._progress.heartbeat.phase == "end"
        trainer.validate(module, loader, verbose=False)
        assert session._progress.heartbeat.phase == "end"
    # 24 batches are 72 steps; each save is at the first step at or after a multiple of ten.
    assert [line["step"] for line in read_saves(run)] == [12, 21, 30, 42, 51, 60, 72]


@pytest.mark.parametrize("stop_at", [3, 11])
@pytest.mark.parametrize("kind", ["Estimating", "OfAnotherRank"])
def test_each_rank_continues_where_its_own_loaders_were(kind: str, stop_at: int, tmp_path: Path) -> None:
    from lightning import pytorch as lightning

    from slurm_train.adapters import lightning as adapter
    from tests.support import lightning_programs as programs

    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    data = TensorDataset(torch.arange(16.0).unsqueeze(1))

    def seen(run: Any, stop_at: int = 0) -> list[list[float]]:
        stop = StopFlag()

        module = getattr(programs, kind)()
        with joined(run, stop):
            callback = adapter.SessionCallback()
            trainer = lightning.Trainer(
                max_epochs=3, callbacks=[programs.Stopping(stop, stop_at), callback], **programs.QUIET
            )
            loader = stateful(data, batch_size=2, sampler=DistributedSampler(data, num_replicas=1, rank=0))
            try:
                trainer.fit(module, loader, ckpt_path=callback.newest())
            except SystemExit as ended:
                assert ended.code == 75 and stop_at
        return module.seen

    expected = seen(new_run(tmp_path / "undisturbed"))
    run = new_run(tmp_path / "stopped")
    assert seen(run, stop_at) + seen(run) == expected
