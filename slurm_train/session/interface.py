"""What a program with its own training loop calls, and what the calls do outside of a run.

Under plain Python or another launcher nothing is written, no stop is requested, and `save` yields a temporary
directory, which a line says. In a process that a rank has started, or a job that it has submitted, saves and stops are
refused. In a run the session is `session.joined.JoinedSession`.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from slurm_train.distributed.place import RankPlace
from slurm_train.errors import EXIT_REQUEUE, ConfigError
from slurm_train.session.replays import Replays

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from slurm_train.data.batches import RankBatches
    from slurm_train.data.replay import ReplayedLoader


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint of this run, of which every byte was verified."""

    path: Path
    """Its directory, with the files that all ranks have written."""
    step: int
    world_size: int
    """Ranks that wrote it."""


class Training:
    """A training outside of a run: nothing is saved, and it always begins.

    Args:
        say_unkept: called where something would be saved.
    """

    def __init__(self, say_unkept: Callable[[], None] = lambda: None) -> None:
        self._say_unkept = say_unkept

    def resume(self) -> int:
        """Restores the newest checkpoint that verifies, and returns how many steps are done, 0 for none. Collective.

        Raises:
            CheckpointError: there are checkpoints, but none can be loaded.
            RunError: the model, the optimizer or another object do not fit the checkpoint.
        """
        return 0

    def is_due(self, step: int) -> bool:  # noqa: ARG002  # there is no checkpoint outside of a run
        """Returns whether to save after this step by `checkpoint.every_steps`; to be asked once for each step.

        The same on all ranks, without an exchange.
        """
        return False

    def save(self, step: int) -> None:  # noqa: ARG002  # there is no checkpoint outside of a run
        """Makes a checkpoint of this moment; returns when it is copied, after a stop when it is on disk. Collective.

        A periodic save that fails costs that checkpoint: rank 0 says so in its log, and the one before is intact.

        Args:
            step: how many optimizer steps are done.

        Raises:
            SlurmTrainError: on every rank: this moment cannot be saved, or the save before it ended in a way that ends
                the run.
        """
        self._say_unkept()

    def finish(self) -> None:
        """Waits until a save that is under way is on disk; `leave` and the end of the program do so, too.

        Raises:
            CheckpointError: the newest save has failed; after a program has ended, its exit code is 1.
        """


class Session:
    """One rank of a program, outside of a run: nothing is written, and no stop is requested.

    Args:
        place: this rank.
        env: its environment.
    """

    def __init__(self, place: RankPlace, env: Mapping[str, str]) -> None:
        self._place = place
        self._env = env
        self._has_said_unkept = False
        self._own_replays: Replays | None = None

    @property
    def is_active(self) -> bool:
        """Whether this process is a rank of a run."""
        return False

    @property
    def rank(self) -> int:
        """0 to `world_size` - 1."""
        return self._place.rank

    @property
    def local_rank(self) -> int:
        """Number of the rank on its node."""
        return self._place.local_rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._place.world_size

    @property
    def node(self) -> str:
        """Name of this rank's node."""
        return self._place.host

    @property
    def device(self) -> torch.device:
        """This rank's device: its GPU, or the CPU. Imports torch; does not change the current device."""
        from slurm_train.distributed.group import choose_device

        return choose_device(self._place, self._env)

    @property
    def run_directory(self) -> Path | None:
        """The directory of the run, the same in each attempt; None outside of a run."""
        return None

    @property
    def attempt(self) -> int:
        """Number of this start of the run, from 0."""
        return 0

    def report(self, step: int, /, **numbers: Any) -> None:
        """Reports that a step is done; rank 0 writes numbers into metrics.jsonl. On all ranks, not collective.

        Args:
            step: how many optimizer steps are done, over all attempts.
            **numbers: values that `float` accepts, e.g. loss, lr, eval_loss; from `max_steps`, `status` computes the
                time that is left. Only rank 0 converts them; for a tensor on a GPU it waits for the GPU.
        """

    def mark(self, phase: str) -> None:
        """Reports what this rank does now, and that it makes progress, e.g. in an evaluation, which has no steps.

        Args:
            phase: "data", "step" or "evaluate"; "end" where the training is over, and nothing after it is a hang.
        """

    def begin_training(self) -> None:
        """Says that a training begins which resumes by `newest`; the callbacks for libraries call it, on all ranks.

        Raises:
            ConfigError: another one was over in this program (`mark("end")`).
        """

    def should_stop(self) -> str:
        """Returns why all ranks must save and stop here, "" to go on. Collective.

        Returns:
            How rank 0 was asked: "TERM" (preemption, or cancel), "USR2" or "clock" (the time limit is near), "file"
            (somebody has created the file STOP), or "another rank".
        """
        return ""

    @contextlib.contextmanager
    def save(self, step: int, /) -> Iterator[Path]:  # noqa: ARG002  # there is no checkpoint outside of a run
        """Yields an empty directory on each rank, and makes a checkpoint of the files of all ranks. Collective.

        Args:
            step: how many optimizer steps are done.

        Raises:
            SlurmTrainError: on every rank, if it fails on any; the previous checkpoint is unchanged.
            ConfigError: another rank has called something else, or saves another step; or a later step was saved
                before, also by an earlier attempt without `newest` having been called since, so that no resume would
                choose this one.
        """
        self._say_unkept()
        with tempfile.TemporaryDirectory(prefix="slurm_train_") as folder:
            yield Path(folder)

    def _say_unkept(self) -> None:
        """Says once that nothing is kept."""
        if self._place.is_first and not self._has_said_unkept:
            print(
                "slurm_train: this program is not part of a run, so what `save` is given is removed again; started as "
                '`python -m slurm_train "script=[train.py]"`, it keeps checkpoints',
                file=sys.stderr,
            )
        self._has_said_unkept = True

    def training(
        self,
        model: nn.Module | Mapping[str, nn.Module],  # noqa: ARG002  # nothing is saved outside of a run
        optimizer: Optimizer | Sequence[Optimizer],  # noqa: ARG002
        /,
        **others: Any,  # noqa: ARG002
    ) -> Training:
        """Returns what saves and resumes a training with all that belongs to it. Collective.

        The model's parameters and buffers and the optimizer's state are saved by names, each once over all ranks, the
        shards of DTensors where they are. So a model under `fully_shard`, DDP or neither may load what another one has
        saved, on any number of ranks, compiled or not. Each rank's random generators are saved, too.

        Args:
            model: the model, or the models by name.
            optimizer: of their parameters; several for several models.
            **others: objects with `state_dict` and `load_state_dict`, by a name that stays: a learning-rate schedule, a
                GradScaler, an average of the weights, a stateful loader; also a random generator of torch, numpy or
                Python. States that differ from rank to rank are saved for each rank, and need the same number of ranks
                to be resumed.

        Raises:
            ConfigError: a checkpoint of these could not be complete; or torch.distributed is not open and there are
                several ranks.
        """
        return Training(self._say_unkept)

    def newest(self) -> Checkpoint | None:
        """Returns the newest checkpoint that verifies, the same on all ranks; None where there is none. Collective.

        Raises:
            CheckpointError: there are checkpoints, but none of them verifies.
        """
        return None

    @property
    def saved(self) -> Checkpoint | None:
        """The newest checkpoint that `save` has made in this process; None before, and outside of a run."""
        return None

    def restore_random(self) -> None:
        """Puts this rank's random generators back as they were in the save that `newest` has returned. Not collective.

        Those of Python, numpy and torch, also the current GPU's; each save has them. Call it right before the loop,
        after all that draws while the program starts: first weights, an iterator of a loader. Without a checkpoint it
        does nothing. A rank that was not there, as on more ranks, gets numbers of its own that follow from rank 0's, or
        those of all where all were alike.
        """

    def batches(
        self,
        num_samples: int,
        /,
        *,
        global_size: int,
        steps: int,
        done: int | None = None,
        accumulation: int = 1,
        steps_per_epoch: int | None = None,
        seed: int = 0,
        rank: int | None = None,
        num_ranks: int | None = None,
    ) -> RankBatches:
        """Returns the sample numbers of this rank's batches, for `DataLoader(data, batch_sampler=...)`. Not collective.

        Each step takes the next `global_size` samples of a shuffled order that follows from `seed` and the number of
        the epoch alone. In each epoch every sample counts exactly once, on any number of ranks and after any stop. An
        epoch may end within a step. Where the ranks cannot share a step equally, some have a sample more.

        Args:
            num_samples: samples of the data set.
            global_size: samples of an optimizer step over all ranks.
            steps: optimizer steps of the whole training, over all attempts.
            done: of these, steps that are done; default: those of the checkpoint that `newest` has returned, or 0.
            accumulation: batches of a step on each rank, which are so many times smaller.
            steps_per_epoch: for a loop over epochs: one pass over the loader is the epoch that `set_epoch` of the
                result has named. The first one goes on after the steps that are done; it is `epoch` of the result, and
                `start` batches of it are done.
            seed: of the order.
            rank: this rank among those that read different samples; default: among all.
            num_ranks: number of those; default: all.

        Raises:
            ConfigError: a batch would have no sample; or the order is not that of the checkpoint, so that samples would
                be used twice and others not.
            DataError: there are no samples.
        """
        # Imported late, since they import torch.
        from slurm_train.data.batches import RankBatches
        from slurm_train.data.order import SampleOrder

        follows_checkpoint = done is None
        done = self._steps_done if done is None else done
        batches = RankBatches(
            SampleOrder(num_samples, seed=seed),
            global_size=global_size,
            rank=self.rank if rank is None else rank,
            num_ranks=self.world_size if num_ranks is None else num_ranks,
            accumulation=accumulation,
            steps=steps,
            done=done,
            steps_per_epoch=steps_per_epoch,
        )
        order = {"num_samples": num_samples, "global_size": global_size, "seed": seed}
        self._note_order(order, batches if follows_checkpoint else None, done=done)
        return batches

    def replay(self, loader: Iterable[Any], /, *, seed: int = 0) -> ReplayedLoader:
        """Returns a loader without a state as one that can be gone on with. Not collective.

        For loaders that give their batches from the first on whenever they are iterated. After a resume, the first pass
        reads the batches that were used again and drops them. Each pass follows from `seed` and its number: samplers
        get the number by `set_epoch`, and the random numbers of samples are seeded, apart from those of the training.
        The place at each save is that of the batch that was given last.

            loader = run.replay(loader)
            for epoch in range(loader.epoch, 90):
                for inputs, targets in loader:

        Args:
            loader: e.g. a `DataLoader`; with workers, the same number of them at each start.
            seed: of its passes; a different one on each rank where each draws samples of its own and no sampler divides
                them.
        """
        return self._replays.add(loader, seed=seed)

    @property
    def _replays(self) -> Replays:
        """The loaders that are replayed."""
        if self._own_replays is None:
            self._own_replays = Replays(rank=self.rank, num_ranks=self.world_size)
        return self._own_replays

    @property
    def _steps_done(self) -> int:
        """Steps of the checkpoint that the program continues."""
        return 0

    def _note_order(self, order: dict[str, int], batches: RankBatches | None, *, done: int) -> None:
        """Takes note of what an order of samples follows from, for checkpoints.

        Args:
            order: what it follows from.
            batches: those that begin after the steps of the checkpoint; None where the program has said after which.
            done: that number of steps.

        Raises:
            ConfigError: it is not that of the checkpoint.
        """

    def take_signals(self) -> None:
        """Installs the handlers of this session again, after a library has installed its own for the stop signals."""

    def leave(self) -> NoReturn:
        """Ends the program after a save at a stop: the run continues from there when it is started again."""
        raise SystemExit(EXIT_REQUEUE)


class ChildTraining(Training):
    """A training in a process that is no rank.

    Args:
        why: it is none, see `no_rank_error`.
    """

    def __init__(self, why: str) -> None:
        super().__init__()
        self._why = why

    def save(self, step: int) -> None:  # noqa: ARG002  # it refuses any step
        """Refuses; nothing would be saved."""
        raise no_rank_error("save", self._why)


class ChildSession(Session):
    """A process that a rank of a run has started, or a job that it has submitted: it is no rank, and nothing is saved.

    What such a process calls when it imports the program's file again, up to `newest`, does nothing.

    Args:
        place: the rank whose variables it has.
        env: its environment.
        why: it is no rank, see `no_rank_error`.
    """

    def __init__(self, place: RankPlace, env: Mapping[str, str], why: str) -> None:
        super().__init__(place, env)
        self._why = why

    def should_stop(self) -> str:
        """Refuses; no signal and no agreement would reach it."""
        raise no_rank_error("should_stop", self._why)

    def save(self, step: int, /) -> NoReturn:  # noqa: ARG002  # it refuses any step
        """Refuses; what is saved would go."""
        raise no_rank_error("save", self._why)

    def training(
        self,
        model: nn.Module | Mapping[str, nn.Module],  # noqa: ARG002  # nothing is saved
        optimizer: Optimizer | Sequence[Optimizer],  # noqa: ARG002
        /,
        **others: Any,  # noqa: ARG002
    ) -> Training:
        """Returns a training that refuses to save."""
        return ChildTraining(self._why)


def no_rank_error(call: str, why: str) -> ConfigError:
    """Returns the error for a call of the session in a process that is no rank.

    Args:
        call: e.g. "save".
        why: e.g. "another process is rank 0".
    """
    return ConfigError(
        f"{call} was called in a process that is no rank of the run, since {why}: nothing would be saved, and no stop "
        "would reach it",
        hint="call the session in the process that the launcher has started; let the launcher start all ranks, e.g. "
        "+cluster=1x8; a program with a training of its own is a run of its own, without this run's variables "
        "(`env -u SLURM_TRAIN_RUN_DIR python probe.py`)",
    )


def whole_step(step: Any) -> int:
    """Returns a number of steps as an int, which numpy, a tensor or a division may have made of another type.

    Raises:
        ConfigError: it is no whole number.
    """
    whole = int(step)
    if whole != step:
        raise ConfigError(f"{step!r} was given as a step", hint="a step is a whole number: how many steps are done")
    return whole
