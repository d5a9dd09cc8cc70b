"""A rank of a run, as a program with its own training loop sees it; `client.join` gives it.

It has a heartbeat from `join` on, which `status` and the watchdog read; `report` records the progress; `should_stop`,
`save`, `training` and `newest` are collective decisions of all ranks. The ranks exchange values by torch.distributed if
the program has opened it, else by sockets (`session.peers`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from slurm_train.checkpoint.agreement import on_rank_zero
from slurm_train.checkpoint.manifest import DIRECTORY
from slurm_train.errors import EXIT_REQUEUE, ConfigError
from slurm_train.rundir.attempts import note_saved
from slurm_train.rundir.events import note_signal
from slurm_train.session.calls import CollectiveCalls
from slurm_train.session.checkpoints import SessionCheckpoints
from slurm_train.session.gradients import note_of_gradients
from slurm_train.session.interface import Checkpoint, Session, Training, whole_step
from slurm_train.session.losses import LossWatch
from slurm_train.session.peers import GroupChooser
from slurm_train.session.progress import ReportedProgress
from slurm_train.session.random_streams import RANDOM
from slurm_train.session.rank_run import RankRun
from slurm_train.session.replays import Replays
from slurm_train.session.saving import DirectorySave
from slurm_train.session.signals import install
from slurm_train.session.stopping import Stopping
from slurm_train.session.wandb_calls import guard_calls

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from slurm_train.data.batches import RankBatches
    from slurm_train.session.training import RunTraining


class JoinedSession(Session):
    """One rank of a run.

    Args:
        rank: this rank; its heartbeat is not started yet.
        is_under_agent: whether torchrun's agent sees the exit code of this process.
    """

    def __init__(self, rank: RankRun, *, is_under_agent: bool = False) -> None:
        super().__init__(rank.place, rank.env)
        self._rank = rank
        self._is_under_agent = is_under_agent
        group = GroupChooser(rank)
        losses = LossWatch(rank) if rank.place.is_first else None
        self._checkpoints = SessionCheckpoints(rank, losses=losses)
        passes = self._checkpoints.passes
        self._progress = ReportedProgress(
            rank, choose_device=lambda: self.device, data_wait_s=lambda: passes.wait_s, losses=losses
        )
        self._calls = CollectiveCalls(rank.place, group, self._progress)
        self._stopping = Stopping(rank, spent=self._progress.spent, group=group)
        self._training: RunTraining | None = None
        self._stop_reason = ""
        """What `should_stop` has answered; "" while the program goes on."""
        self._has_warned = False
        """Whether signal handlers that replaced this session's were reported."""
        self._has_ended = False
        """Whether a training of the program is over."""
        self._saved: Checkpoint | None = None
        self._progress.start()

    @property
    def is_active(self) -> bool:
        """Whether this process is a rank of a run."""
        return True

    @property
    def run_directory(self) -> Path:
        """The directory of the run, the same in each attempt."""
        return self._rank.run.path

    @property
    def attempt(self) -> int:
        """Number of this start of the run, from 0."""
        return self._rank.attempt

    def report(self, step: int, /, **numbers: Any) -> None:
        """See `Session.report`."""
        step = whole_step(step)
        progress = self._progress
        if progress.is_evaluation(step, numbers):
            progress.add_evaluation(step, numbers)
            return
        if progress.step is None and self._training is not None:
            self._training.check_first_step()
        if step != progress.step:
            self._checkpoints.add_step(step)
        progress.add_step(step, numbers, resumed_step=self._checkpoints.resumed_step)

    def mark(self, phase: str) -> None:
        """See `Session.mark`."""
        if phase == "end":
            self._has_ended = True
            # A loop that breaks off where it is to stop comes to the line after it, too.
            if not self._stop_reason:
                self._progress.tell_end()
        self._progress.mark(phase)

    def begin_training(self) -> None:
        """See `Session.begin_training`."""
        if self._has_ended:
            step = max(self._progress.step or 0, self._checkpoints.newest_step)
            raise ConfigError(
                f"a training of this program is over, at step {step}, and another begins: a run has the checkpoints of "
                "one training, so a resume would give those of one to the other",
                hint="make each training a run: a sweep for folds and seeds, another run.name for a second stage; or "
                "leave the SessionCallback out of those that may be repeated",
            )

    def should_stop(self) -> str:
        """See `Session.should_stop`."""
        guard_calls(self._rank.stop)
        self._stopping.check_clock()
        self._warn_of_other_handlers()
        if self._stop_reason:
            return self._stop_reason
        if not self._calls.meet("should_stop", requested=bool(self._rank.stop.requested)):
            return ""
        step = self._progress.step or 0
        self._stop_reason, left_s = self._stopping.announce(step=step)
        remaining = "" if left_s is None else f"; {left_s:.0f} s are left"
        self._rank.say(f"asked to stop at step {step} ({self._stop_reason}){remaining}")
        return self._stop_reason

    def training(
        self, model: nn.Module | Mapping[str, nn.Module], optimizer: Optimizer | Sequence[Optimizer], /, **others: Any
    ) -> Training:
        """See `Session.training`."""
        self._calls.require_rank("training")
        if self._training is not None:
            raise ConfigError(
                "this program has two trainings, and a run has the checkpoints of one",
                hint="hand over all models and optimizers in one call of `training`, or make each training a run",
            )
        self._calls.meet("training")
        self._training = self._build_training(model, optimizer, others)
        return self._training

    @contextlib.contextmanager
    def save(self, step: int, /) -> Iterator[Path]:
        """See `Session.save`."""
        self._calls.require_rank("save")
        if self._training is not None:
            raise ConfigError(
                "the checkpoints of this program are those of its `training`, which `save` would stand between",
                hint="call save of the training; write what belongs to no checkpoint into run.run_directory",
            )
        step = whole_step(step)
        local_dir = self._rank.config.checkpoint.local_dir
        if self._saved is None and local_dir is not None:
            self._rank.say(
                f"files of `save` go into the run directory at once: checkpoint.local_dir={local_dir} is for those of "
                "a `training`"
            )
        checkpoints = self._checkpoints
        clock = self._rank.clock
        start_s = clock()
        num_bytes = 0
        error = ""
        try:
            with self._around_save(step):
                if step == checkpoints.newest_step and self._place.is_first:
                    # Something was done since, such as an evaluation or the end of an epoch.
                    checkpoints.place.save_again(step)
                save = DirectorySave(checkpoints.place, checkpoints.header(step, kind=DIRECTORY), self._calls.group())
                with save.folder() as folder:
                    yield folder
                    checkpoints.random.write(folder)
                self._progress.make_lines_durable()
                saved = save.end()
            num_bytes = saved.num_bytes
            self._saved = Checkpoint(path=saved.path, step=step, world_size=self.world_size)
        except BaseException as err:
            error = f"{type(err).__name__}: {err}"
            raise
        finally:
            seconds = clock() - start_s
            checkpoints.log_save(step, seconds, num_bytes=num_bytes, error=error)
        self._progress.spent.add_save(seconds)
        self._rank.say(*saved.problems)

    def newest(self) -> Checkpoint | None:
        """See `Session.newest`."""
        if self._training is not None:
            raise ConfigError(
                "this program has a `training`, whose checkpoints `newest` cannot give",
                hint="call resume() of the training",
            )
        with self._around_load():
            choice = self._checkpoints.choose(self._calls.group())
            notes = self._checkpoints.continue_from(choice)
            if choice is not None:
                self._rank.say(*choice.warnings, *notes, choice.resuming)
        return self._checkpoints.loaded

    @property
    def saved(self) -> Checkpoint | None:
        """See `Session.saved`."""
        return self._saved

    def restore_random(self) -> None:
        """See `Session.restore_random`."""
        self._checkpoints.restore_random()

    def take_signals(self) -> None:
        """See `Session.take_signals`."""
        install(self._rank.stop)

    def leave(self) -> NoReturn:
        """See `Session.leave`."""
        # Before anything is raised: a bare `except` of the program may catch it, and the program may end with 0.
        note_saved(self._rank.run, self._rank.attempt)
        self.close()
        if self._is_under_agent:
            # The agent would restart ranks that end with a code other than 0.
            raise SystemExit(0)
        raise SystemExit(EXIT_REQUEUE)

    def close(self) -> None:
        """Writes all that is not written yet; the time from now on belongs to no step."""
        if not self._calls.is_rank:
            return  # a child that was forked ends as the program does
        try:
            if self._training is not None:
                self._warn_of_steps_without_a_save()
                self._training.end(is_done=not self._has_failed and not self._stop_reason)
        finally:
            if self._place.is_first and self._rank.stop.requested and not self._stop_reason:
                note_signal(self._rank.run, self._rank.attempt, self._rank.stop.ask()[0])
            self._rank.heartbeat.mark("end")
            self._progress.close()
            self._rank.stop.let_children_end()

    def _warn_of_steps_without_a_save(self) -> None:
        """Says that the last weights are in no checkpoint; not of a program that has failed, which goes on from it."""
        step = self._progress.step or 0
        saved = self._checkpoints.newest_step
        if step > saved and not self._has_failed:
            self._rank.say(
                f"the program has ended at step {step}, and its newest checkpoint is of step {saved}: "
                "training.save(step) after the loop keeps the last weights"
            )

    @property
    def _has_failed(self) -> bool:
        """Whether an exception has ended the program."""
        # Set as by the interpreter, also where `worker.script_main` runs the program.
        return getattr(sys, "last_value", None) is not None

    def _build_training(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        others: Mapping[str, Any],
    ) -> RunTraining:
        # Imported late, since they import torch.
        from torch import nn
        from torch.distributed import ProcessGroup
        from torch.optim import Optimizer

        from slurm_train.checkpoint.contents import State, Terms
        from slurm_train.checkpoint.saves import build_saves
        from slurm_train.session.training import RunTraining

        group = self._calls.group()
        if group is not None and not isinstance(group, ProcessGroup):
            raise ConfigError(
                "`training` was called before torch.distributed was opened",
                hint="call init_process_group first; or write the files yourself in `with run.save(step)`",
            )
        is_listed = isinstance(optimizer, Sequence)
        optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        strangers = [type(part).__name__ for part in optimizers if not isinstance(part, Optimizer)]
        if strangers:
            raise ConfigError(
                f"`training` was given a {strangers[0]} {'among the optimizers' if is_listed else 'as optimizer'}",
                hint="hand over an optimizer of torch, or a list of them: training(model, [first, second])",
            )
        state = State(
            model if isinstance(model, nn.Module) else nn.ModuleDict(model),
            optimizers,
            others,
            group=group,
            terms=Terms(host=self._place.host),
        )
        state.add(RANDOM, self._checkpoints.random, of="rank")
        saves = build_saves(
            self._rank.run,
            place=self._checkpoints.place,
            rank_place=self._place,
            settings=self._rank.config.checkpoint,
            env=self._env,
            device=state.device,
            clock=self._rank.clock,
            peers=group,
            keeps_copies=self._rank.config.slurm.outlives_nodes,
        )
        return RunTraining(
            state,
            saves,
            self._checkpoints,
            spent=self._progress.spent,
            saving=self._around_training_save,
            loading=self._around_load,
            say=self._rank.say,
        )

    @contextlib.contextmanager
    def _around_save(self, step: int) -> Iterator[None]:
        """Surrounds each save: the ranks meet, a step that no resume would choose is refused, the time is set apart."""
        self._calls.require_rank("save")
        progress = self._progress
        phase = progress.heartbeat.phase
        progress.mark("save")
        try:
            with progress.span("checkpoint_stall_s"):
                self._calls.meet("save", step=step)
                self._rank.say(note_of_gradients(step, self._training))
                on_rank_zero(self._calls.group(), lambda: self._checkpoints.require_resumable(step))
                progress.begin_save(step)
                yield
                self._checkpoints.add_save(step)
        finally:
            progress.heartbeat.mark(phase)

    @contextlib.contextmanager
    def _around_training_save(self, step: int) -> Iterator[bool]:
        """Surrounds a save of a training; gives whether to wait until it is on disk."""
        with self._around_save(step):
            # The thread that writes the checkpoint makes the lines durable.
            with contextlib.suppress(OSError):
                self._progress.write_lines()
            yield bool(self._stop_reason)

    @contextlib.contextmanager
    def _around_load(self) -> Iterator[None]:
        """Surrounds the choice and the loading of a checkpoint: the ranks meet, the time is set apart."""
        with self._progress.span("load_s"):
            self._calls.meet("newest")
            yield
            self._progress.begin_at(self._checkpoints.resumed_step)

    @property
    def _replays(self) -> Replays:
        return self._checkpoints.replays

    @property
    def _steps_done(self) -> int:
        return self._checkpoints.orders.done

    def _note_order(self, order: dict[str, int], batches: RankBatches | None, *, done: int) -> None:
        self._rank.say(self._checkpoints.orders.add(order, batches, done=done))

    def _warn_of_other_handlers(self) -> None:
        """Says once that a library or the program has installed other handlers of the stop signals since `join`."""
        is_asked = self._place.is_first and not self._has_warned
        replaced = self._rank.stop.replaced() if is_asked else []
        if not replaced:
            return
        self._has_warned = True
        self._rank.say(
            f"{' and '.join(replaced)} got another handler after `join()`, so `should_stop` does not see "
            f"{'them' if len(replaced) > 1 else 'it'} and the ranks will not save before they are ended; call "
            "`take_signals()` of the session afterwards"
        )
