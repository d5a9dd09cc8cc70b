"""A rank of a run, as a program with its own training loop sees it; `join` gives it.

It has a heartbeat from `join` on, which `status` and the watchdog read; `report` records the progress; `should_stop`,
`save` and `newest` are collective decisions of all ranks. The ranks exchange values by torch.distributed if the program
has opened it, else by sockets (`session.peers`).
"""

from __future__ import annotations

import atexit
import contextlib
import math
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from slurm_train.checkpoint.agreement import on_every_rank, on_rank_zero
from slurm_train.checkpoint.manifest import DIRECTORY, PROGRAM, CheckpointHeader
from slurm_train.checkpoint.resumption import Resumption, run_place
from slurm_train.checkpoint.verify import newest_committed_step
from slurm_train.config.frozen import load_config
from slurm_train.config.schema import RunConfig
from slurm_train.distributed.master import is_under_torchrun
from slurm_train.distributed.place import RankPlace
from slurm_train.errors import EXIT_FAILURE, EXIT_REQUEUE, CheckpointError, ConfigError, SlurmTrainError
from slurm_train.metrics import MetricsWriter
from slurm_train.rundir.attempts import note_saved
from slurm_train.rundir.events import SaveLog
from slurm_train.rundir.files import fsync_file, read_json
from slurm_train.rundir.heartbeat import Heartbeat, limits_of
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.timing import Spent, StepTimes
from slurm_train.session.interface import Checkpoint, ChildSession, Session
from slurm_train.session.orders import ORDERS, Orders
from slurm_train.session.peers import GroupChooser
from slurm_train.session.random_streams import RandomStreams
from slurm_train.session.saving import DirectorySave
from slurm_train.session.signals import StopFlag, handled, install
from slurm_train.session.stopping import Stopping
from slurm_train.session.training import RunTraining, SessionPart, Training, no_rank_error, whole_step
from slurm_train.session.wandb_calls import guard_calls
from slurm_train.slurm.job_variables import step_id

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from slurm_train.checkpoint.load import Choice
    from slurm_train.distributed.pace import PaceProbe

RUN_DIR = "SLURM_TRAIN_RUN_DIR"
"""Variable with the directory of the run, for scripts: a place for their files, the same at each attempt."""
_ATTEMPT = "SLURM_TRAIN_ATTEMPT"
_ACCOUNT_EVERY_S = 2.0
_CALLS = ("should_stop", "save", "newest", "training")
"""What all ranks call together."""
# Longer than a suspension of a job; the watchdog, which notices suspensions, ends ranks that hang.
_WATCHED_TIMEOUT_S = 7 * 86400.0


@dataclass(slots=True)
class _Steps:
    """Counts and times since the newest report."""

    since_s: float
    step: int | None = None
    """The newest reported step."""
    step_s: float | None = None
    """Seconds that it took."""
    apart_s: float = 0.0
    """Seconds since then that belong to no step: mostly saves."""
    account_due_s: float = 0.0
    lines: deque[dict[str, Any]] = field(default_factory=deque)
    """Lines of metrics.jsonl that are not written yet."""


class JoinedSession(Session):
    """One rank of a run.

    Wide because it is the only object by which a program uses its run.

    Args:
        run: the run.
        config: its configuration.
        place: this rank.
        env: its environment.
        attempt: number of the attempt.
        stop: set by the signal handlers, which are installed already.
        heartbeat: not started yet.
        is_under_agent: whether torchrun's agent sees the exit code of this process.
    """

    def __init__(
        self,
        run: RunDirectory,
        config: RunConfig,
        place: RankPlace,
        env: Mapping[str, str],
        *,
        attempt: int,
        stop: StopFlag,
        heartbeat: Heartbeat,
        is_under_agent: bool = False,
    ) -> None:
        super().__init__(place, env)
        self._is_under_agent = is_under_agent
        self._pid = os.getpid()
        self._run = run
        self._config = config
        self._attempt = attempt
        self._stop = stop
        self._heartbeat = heartbeat
        self._begin_unix_s = time.time()
        has_watchdog = limits_of(config) is not None
        self._group = GroupChooser(
            run,
            attempt,
            place,
            env,
            start_timeout_s=config.train.start_timeout_s,
            timeout_s=_WATCHED_TIMEOUT_S if has_watchdog else config.checkpoint.save_timeout_s,
        )
        self._checkpoints = run_place(run, attempt, keep=config.checkpoint.keep, is_leader=place.is_first)
        self._resumption = Resumption(run, self._checkpoints)
        self._spent = Spent(begin_unix_s=self._begin_unix_s) if place.is_first else None
        self._stopping = Stopping(run, attempt, stop, spent=self._spent, group=self._group)
        self._saves = SaveLog(run, attempt) if place.is_first else None
        self._times = StepTimes(run, attempt, rank=place.rank, host=place.host, clock=heartbeat.clock)
        self._steps = _Steps(heartbeat.clock())
        self._writer: MetricsWriter | None = None
        self._pace_every_steps = config.health.pace_every_steps
        self._pace: PaceProbe | None = None
        """Measures this rank's own part of a step; from the second report on."""
        self._lock = threading.Lock()
        self._orders = Orders()
        self._random = RandomStreams(place.rank)
        self._checkpoint: Checkpoint | None = None
        """What `newest` has returned."""
        self._training: RunTraining | None = None
        self._reason = ""
        self._has_warned = False
        self._has_ended = False
        """Whether a training of the program is over."""
        self._newest_step = 0
        """Step of the newest checkpoint that this attempt has saved or loaded."""
        self._is_behind = False
        """Whether a step before that was reported since."""
        self._open_heartbeat(config)

    @property
    def is_active(self) -> bool:
        """Whether this process is a rank of a run."""
        return True

    @property
    def run_directory(self) -> Path:
        """The directory of the run, the same in each attempt."""
        return self._run.path

    @property
    def attempt(self) -> int:
        """Number of this start of the run, from 0."""
        return self._attempt

    def report(self, step: int, /, **numbers: Any) -> None:
        """See `Session.report`."""
        step = whole_step(step)
        heartbeat = self._heartbeat
        steps = self._steps
        if (steps.step is None or step < steps.step) and _is_no_step(step, numbers):
            heartbeat.marks += 1
            if self._spent is not None and not self._is_before_resume(step):
                steps.lines.append(self._line(step, numbers, {}, is_new=False))
            return
        now_s = heartbeat.clock()
        seconds = max(now_s - steps.since_s - steps.apart_s, 0.0)
        is_first_report = steps.step is None
        num_new_steps = 0 if steps.step is None else step - steps.step
        is_new = num_new_steps != 0 or is_first_report
        if is_first_report and self._training is not None:
            self._training.look()
        self._is_behind |= is_new and step < self._newest_step
        heartbeat.step = step
        heartbeat.phase = "step"
        heartbeat.marks += 1
        if num_new_steps > 0:
            # The start of the first reported step is not known.
            heartbeat.settled = True
            if steps.step_s is None:
                self._pace = self._probe_pace()
            steps.step_s = seconds / num_new_steps
            self._times.add(steps.step_s, 0.0)
            self._sample_pace(num_new_steps)
        if is_new:
            steps.step = step
            steps.since_s = now_s
            steps.apart_s = 0.0
            self._warn_of_repeats()
        if self._spent is None:
            return
        if is_first_report:
            self._spent.first_step = self._resumption.origin.step
            self._spent.steps = max(step - self._resumption.origin.step, 0)
            self._spent.add("compile_s", seconds)
        elif num_new_steps > 0:
            self._spent.add_steps(num_new_steps, seconds=seconds, data_wait_s=0.0)
        if numbers:
            timing = {} if steps.step_s is None else {"step_time_s": steps.step_s}
            steps.lines.append(self._line(step, numbers, timing, is_new=is_new))
        self._resumption.move_on()

    def mark(self, phase: str) -> None:
        """See `Session.mark`."""
        self._has_ended |= phase == "end"
        if self._heartbeat.phase != "joined":
            self._heartbeat.mark(phase)

    def begin_training(self) -> None:
        """See `Session.begin_training`."""
        if self._has_ended:
            step = max(self._heartbeat.step, self._newest_step)
            raise ConfigError(
                f"a training of this program is over, at step {step}, and another begins: a run has the checkpoints of "
                "one training, so a resume would give those of one to the other",
                hint="make each training a run: a sweep for folds and seeds, another run.name for a second stage; or "
                "leave the SessionCallback out of those that may be repeated",
            )

    def should_stop(self) -> str:
        """See `Session.should_stop`."""
        guard_calls(self._stop)
        if self._spent is not None:
            self._stopping.look()
            self._warn_of_other_handlers()
        if self._reason or not self._meet("should_stop", requested=self._stop.requested):
            return self._reason
        self._reason, left_s = self._stopping.announce(step=self._heartbeat.step)
        if self._place.is_first:
            remaining = "" if left_s is None else f"; {left_s:.0f} s are left"
            message = f"slurm_train: asked to stop at step {self._heartbeat.step} ({self._reason}){remaining}"
            print(message, file=sys.stderr)
        return self._reason

    def training(
        self, model: nn.Module | Mapping[str, nn.Module], optimizer: Optimizer | Sequence[Optimizer], /, **others: Any
    ) -> Training:
        """See `Session.training`."""
        self._require_rank("training")
        if self._training is not None:
            raise ConfigError(
                "this program has two trainings, and a run has the checkpoints of one",
                hint="hand over all models and optimizers in one call of `training`, or make each training a run",
            )
        self._meet("training")
        self._training = self._build_training(model, optimizer, others)
        return self._training

    @contextlib.contextmanager
    def save(self, step: int, /) -> Iterator[Path]:
        """See `Session.save`."""
        self._require_rank("save")
        if self._training is not None:
            raise ConfigError(
                "the checkpoints of this program are those of its `training`, which `save` would stand between",
                hint="call save of the training; write what belongs to no checkpoint into run.run_directory",
            )
        step = whole_step(step)
        start = self._heartbeat.clock()
        phase = self._heartbeat.phase
        if phase != "joined":
            self._heartbeat.mark("save")
        save = DirectorySave(self._checkpoints, self._header(step, DIRECTORY), self._group())
        error = ""
        num_bytes = 0
        try:
            self._meet("save")
            on_rank_zero(self._group(), lambda: self._require_ahead(step))
            if step == self._newest_step and self._place.is_first:
                # Something was done since, such as an evaluation or the end of an epoch.
                self._checkpoints.save_again(step)
            folder = save.begin()
            try:
                yield folder
                self._random.write(folder)
            except BaseException as err:
                # The other ranks wait for this one; they raise the same error.
                with contextlib.suppress(SlurmTrainError):
                    save.fail(err)
                raise
            save.fail(None)
            self._make_metrics_durable()
            saved = save.end()
            num_bytes = saved.num_bytes
            self._newest_step = step
            for problem in saved.problems if self._place.is_first else ():
                print(f"slurm_train: {problem}", file=sys.stderr)
        except BaseException as err:
            error = f"{type(err).__name__}: {err}"
            raise
        finally:
            self._count_save(step, self._heartbeat.clock() - start, num_bytes=num_bytes, error=error)
            self._heartbeat.mark(phase)

    def newest(self) -> Checkpoint | None:
        """See `Session.newest`."""
        # Imported late, since it imports torch.
        from slurm_train.checkpoint.load import choose_checkpoint

        if self._training is not None:
            raise ConfigError(
                "this program has a `training`, whose checkpoints `newest` cannot give",
                hint="call resume() of the training",
            )
        place = self._checkpoints
        with self._loading():
            choice = choose_checkpoint(place.root, group=self._group(), attempt=place.attempt, fence=place.fence)
        if choice is not None and not choice.manifest.is_directory:
            other = "a `training` of a session" if choice.manifest.is_program else "the built-in trainer"
            raise CheckpointError(
                f"{choice.path} was saved by {other}, not by `save`",
                hint="load it with resume() of the training, or start the program under another run.name",
            )
        self._take(choice)
        return self._checkpoint

    def restore_random(self) -> None:
        """See `Session.restore_random`."""
        if self._checkpoint is None:
            return
        said = self._random.restore(self._checkpoint.path, world_size=self._checkpoint.world_size)
        if said and self._place.is_first:
            print(f"slurm_train: {said}", file=sys.stderr)

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

        from slurm_train.checkpoint.program import ProgramState
        from slurm_train.checkpoint.saves import build_saves

        group = self._group()
        if group is not None and not isinstance(group, ProcessGroup):
            raise ConfigError(
                "`training` was called before torch.distributed was opened",
                hint="call init_process_group first; or write the files yourself in `with run.save(step)`",
            )
        state = ProgramState(
            model if isinstance(model, nn.Module) else nn.ModuleDict(model),
            [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer),
            others,
            group=group,
        )
        settings = self._config.checkpoint
        if settings.local_dir is not None:
            # The last save of a program would be on the nodes alone.
            settings = replace(settings, local_dir=None)
            if self._place.is_first:
                print(
                    f"slurm_train: checkpoints of a program go into the run directory; checkpoint.local_dir="
                    f"{self._config.checkpoint.local_dir} is for the built-in trainer",
                    file=sys.stderr,
                )
        saves = build_saves(
            self._run,
            place=self._checkpoints,
            rank_place=self._place,
            settings=settings,
            env=self._env,
            device=state.device,
            clock=self._heartbeat.clock,
            peers=group,
        )
        part = SessionPart(
            is_first=self._place.is_first,
            saving=self._saving,
            loading=self._loading,
            header=partial(self._header, kind=PROGRAM),
            take=self._take,
            newest_step=lambda: self._newest_step,
            random=self._random,
        )
        return RunTraining(state, saves, part)

    @contextlib.contextmanager
    def _saving(self, step: int) -> Iterator[bool]:
        """Does what belongs to a save of a training, around it; gives whether to wait until it is on disk."""
        self._require_rank("save")
        start = self._heartbeat.clock()
        phase = self._heartbeat.phase
        if phase != "joined":
            self._heartbeat.mark("save")
        try:
            self._meet("save")
            on_rank_zero(self._group(), lambda: self._require_ahead(step))
            if self._place.is_first:
                # The thread that writes the checkpoint makes them durable.
                with contextlib.suppress(OSError):
                    self._write_lines()
            yield bool(self._reason)
            self._newest_step = step
        finally:
            self._set_apart(self._heartbeat.clock() - start, "checkpoint_stall_s")
            if self._spent is not None and self._training is not None:
                self._spent.longest_save_s = max(self._spent.longest_save_s, self._training.longest_save_s)
            self._heartbeat.mark(phase)

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        """Does what belongs to the loading of a checkpoint, around it."""
        start = self._heartbeat.clock()
        self._meet("newest")
        yield
        self._set_apart(self._heartbeat.clock() - start, "load_s")

    def _take(self, choice: Choice | None) -> None:
        """Takes over what training goes on from."""
        self._resumption.take(choice)
        self._newest_step = self._resumption.origin.step
        self._is_behind = False
        self._checkpoint = None
        if choice is None:
            self._orders.take(0, [])
            return
        manifest = choice.manifest
        self._orders.take(manifest.step, manifest.extra.get(ORDERS, []))
        self._checkpoint = Checkpoint(path=choice.path, step=manifest.step, world_size=manifest.world_size)
        if self._place.is_first:
            for line in (*choice.warnings, choice.resuming):
                print(f"slurm_train: {line}", file=sys.stderr)
            if manifest.world_size != self._place.world_size and not self._orders.saved:
                print(
                    f"slurm_train: {manifest.world_size} ranks have saved it, and these are {self._place.world_size}: "
                    "the program itself has to find its place in the data",
                    file=sys.stderr,
                )
        if manifest.is_program:
            self.restore_random()

    @property
    def _steps_done(self) -> int:
        return self._orders.done

    def _note_order(self, order: dict[str, int], *, done: int) -> None:
        self._orders.add(order, done=done)

    def take_signals(self) -> None:
        """See `Session.take_signals`."""
        install(self._stop)

    def leave(self) -> NoReturn:
        """See `Session.leave`."""
        self.close()
        if self._is_under_agent:
            # The agent would restart ranks that end with a code other than 0.
            note_saved(self._run, self._attempt)
            raise SystemExit(0)
        raise SystemExit(EXIT_REQUEUE)

    def close(self) -> None:
        """Writes all that is not written yet; the time from now on belongs to no step."""
        if os.getpid() != self._pid:
            return  # a child that was forked ends as the program does
        try:
            if self._training is not None:
                self._training.finish()
        finally:
            self._end()

    def _end(self) -> None:
        self._heartbeat.mark("end")
        self._write_lines()
        self._times.keep()
        if self._spent is not None:
            self._spent.write(self._run.account(self._attempt))
        self._stop.let_children_end()

    def _open_heartbeat(self, config: RunConfig) -> None:
        heartbeat = self._heartbeat
        place = self._place
        heartbeat.phase = "joined"
        heartbeat.periodic_work = self._write_now_and_then
        heartbeat.record = _newest_collectives
        heartbeat.start(
            self._run,
            self._attempt,
            rank=place.rank,
            local_rank=place.local_rank,
            host=place.host,
            limits=limits_of(config),
            step_id=step_id(self._env),
        )

    def _is_before_resume(self, step: int) -> bool:
        """Returns whether an evaluation is that of a model into which no checkpoint was loaded yet, in a later attempt.

        Its line would supersede the evaluations of all steps that the attempt goes on from.
        """
        return step == 0 and self._attempt > 0 and newest_committed_step(self._run.checkpoints) > 0

    def _require_ahead(self, step: int) -> None:
        """Refuses to save a step that a resume would not choose.

        Raises:
            ConfigError: the steps were counted anew since a save of this or a later step.
        """
        if not self._is_behind or step > self._newest_step:
            return
        raise ConfigError(
            f"step {step} is to be saved, and step {self._newest_step} was before: a resume begins at the largest "
            "step, so this save would be lost",
            hint="a run is one training: count its steps on, make another training another run, and call `newest()` to "
            "go back to a checkpoint",
        )

    def _warn_of_other_handlers(self) -> None:
        """Says once that a library or the program has installed other handlers of the stop signals since `join`."""
        replaced = [] if self._has_warned else self._stop.replaced()
        if not replaced:
            return
        self._has_warned = True
        print(
            f"slurm_train: {' and '.join(replaced)} got another handler after `join()`, so `should_stop` does not see "
            f"{'them' if len(replaced) > 1 else 'it'} and the ranks will not save before they are ended; call "
            "`take_signals()` of the session afterwards",
            file=sys.stderr,
        )

    def _warn_of_repeats(self) -> None:
        """Says once that this attempt draws the random numbers of the training's first steps."""
        repeated = self._random.look(self._checkpoint.path if self._checkpoint is not None else None)
        if repeated:
            print(
                f"slurm_train: since the resume, rank {self._place.rank} draws the random numbers of the first steps "
                f"again ({', '.join(repeated)}): call `restore_random()` of the session right before the loop",
                file=sys.stderr,
            )

    def _require_rank(self, call: str) -> None:
        """Refuses a call in a process that was forked from this rank.

        Raises:
            ConfigError: it is one.
        """
        if os.getpid() != self._pid:
            raise no_rank_error(call)

    def _meet(self, call: str, *, requested: int = 0) -> bool:
        """Returns whether any rank passes a request. Collective; each exchange of the session begins with it.

        Args:
            call: what the program has called, one of `_CALLS`.
            requested: 1 for a request to stop, else 0.

        Raises:
            ConfigError: another rank has called something else; or this process was forked from a rank.
        """
        self._require_rank(call)
        group = self._group()
        self._heartbeat.marks += 1
        if group is None:
            return bool(requested)
        start = self._heartbeat.clock()
        code = 2 * _CALLS.index(call) + requested
        try:
            if hasattr(group, "gather_values"):
                codes = on_every_rank(group, lambda: code)
            else:
                import torch
                import torch.distributed as dist

                box = torch.tensor([code, -code], dtype=torch.int32)
                dist.all_reduce(box, op=dist.ReduceOp.MAX, group=group)
                codes = [int(box[0]), -int(box[1])]
        finally:
            if self._pace is not None:
                self._pace.exchange_s += self._heartbeat.clock() - start
        others = {_CALLS[other // 2] for other in codes} - {call}
        if others:
            raise ConfigError(
                f"rank {self._place.rank} has called {call}, and another rank {min(others)}: all ranks have to call "
                "them alike, and as often",
                hint="where rank 0 alone has something to write: `if run.rank == 0` inside of `with run.save(step)`",
            )
        return any(other % 2 for other in codes)

    def _probe_pace(self) -> PaceProbe | None:
        if self._place.world_size == 1 or "torch.distributed" not in sys.modules:
            return None
        from slurm_train.distributed.pace import probe_program

        return probe_program(self._heartbeat, every=self._pace_every_steps, device=self.device)

    def _sample_pace(self, num_steps: int) -> None:
        """Called where a step has ended and the next one begins."""
        if self._pace is None:
            return
        if num_steps > 1:
            # The time between two reports would count as one step, so it is left out.
            self._pace.leave_out()
            return
        self._pace.end()
        self._pace.begin()

    def _line(
        self, step: int, numbers: Mapping[str, Any], timing: Mapping[str, float], *, is_new: bool
    ) -> dict[str, Any]:
        values = {name: _number(value) for name, value in numbers.items() if name != "step"}
        if is_new and not any(name.startswith("eval_") for name in values):
            # Readers recognize the line of a step by its loss, and let it supersede what the step has had before.
            values.setdefault("loss", None)
        facts = {"attempt": self._attempt, "world_size": self._place.world_size, "time_unix_s": time.time()}
        return {"step": step, **values, **timing, **facts}

    def _write_now_and_then(self) -> None:
        """Called by the heartbeat's thread, so that a step needs no system call."""
        self._write_lines()
        self._times.keep_when_due()
        now_s = time.monotonic()
        if self._spent is not None and now_s >= self._steps.account_due_s:
            self._steps.account_due_s = now_s + _ACCOUNT_EVERY_S
            self._spent.write(self._run.account(self._attempt))

    def _write_lines(self) -> None:
        lines = self._steps.lines
        with self._lock:
            if lines and self._writer is None:
                self._writer = MetricsWriter(self._run.metrics)
            while lines:
                assert self._writer is not None
                self._writer.write(lines[0])
                lines.popleft()

    def _make_metrics_durable(self) -> None:
        # No later attempt reports the steps before a checkpoint again. A failure to write them does not stop training.
        if self._place.is_first:
            with contextlib.suppress(OSError):
                self._write_lines()
                fsync_file(self._run.metrics)

    def _set_apart(self, seconds: float, cause: str) -> None:
        """Excludes time that belongs to no step from the present step."""
        self._steps.apart_s += seconds
        if self._pace is not None:
            self._pace.leave_out()
        if self._spent is not None:
            self._spent.add(cause, seconds)

    def _count_save(self, step: int, seconds: float, *, num_bytes: int, error: str) -> None:
        self._set_apart(seconds, "checkpoint_stall_s")
        if self._spent is not None and not error:
            self._spent.longest_save_s = max(self._spent.longest_save_s, seconds)
        if self._saves is not None:
            self._saves.stalled(step, seconds)
            self._saves.ended(step, num_bytes=num_bytes, save_s=seconds, error=error)

    def _header(self, step: int, kind: str) -> CheckpointHeader:
        place = self._place
        plan = read_json(self._run.plan) or {}
        try:
            torch_version = version("torch")
        except PackageNotFoundError:
            torch_version = ""
        orders = self._orders.present
        samples = step * orders[0]["global_size"] if orders else 0
        epoch = samples // orders[0]["num_samples"] if orders else 0
        return CheckpointHeader(
            step=step,
            samples=samples,
            epoch=epoch,
            mesh={"dp_replicate": place.world_size},
            batch_plan={},
            config_hash=str(plan.get("config_hash", self._run.run_id)),
            data_fingerprint="",
            torch_version=torch_version,
            **self._resumption.facts_of_save(world_size=place.world_size, host=place.host, env=self._env),
            extra={"kind": kind, ORDERS: orders},
        )


_joined: list[Session] = []


def join() -> Session:
    """Returns this process's part in its run; the same object each time.

    Call it early: until then a stop signal ends the process. A process that a rank has started, such as a worker of a
    data loader, is outside of the run; where it would save or stop, it is refused.

    Raises:
        SlurmTrainError: the run directory cannot be read.
        ConfigError: the first call in a rank is not in its main thread.
    """
    if not _joined:
        env = dict(os.environ)
        place = RankPlace.from_env(env)
        is_in_run = bool(env.get(RUN_DIR)) and _ATTEMPT in env
        if not is_in_run:
            _joined.append(Session(place, env))
        elif multiprocessing.parent_process() is not None:
            _joined.append(ChildSession(place, env))
        else:
            _joined.append(_join(RunDirectory(Path(env[RUN_DIR])), place, env))
    return _joined[0]


def enter(
    run: RunDirectory,
    config: RunConfig,
    place: RankPlace,
    env: Mapping[str, str],
    *,
    attempt: int,
    stop: StopFlag,
    heartbeat: Heartbeat,
) -> JoinedSession:
    """Opens the session that `join` returns from now on; the worker calls it for a user's own function."""
    session = JoinedSession(run, config, place, env, attempt=attempt, stop=stop, heartbeat=heartbeat)
    _joined[:] = [session]
    return session


def _join(run: RunDirectory, place: RankPlace, env: Mapping[str, str]) -> JoinedSession:
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            f"`join()` was called in the thread {threading.current_thread().name}: Python installs handlers of signals "
            "in the main thread only, so no stop would reach the program",
            hint="call `session.join()` in the main thread, early; each thread gets the same session afterwards",
        )
    stop = StopFlag()
    before = handled()
    install(stop)
    if before and place.is_first:
        print(
            f"slurm_train: `join()` takes the place of the program's handler of {' and '.join(before)}, which is not "
            "called any more; `should_stop` says when to save",
            file=sys.stderr,
        )
    guard_calls(stop)
    # `get_start_method` alone would settle it.
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if method != "fork" and place.is_first:
        print(
            f"slurm_train: processes begin by {method} here, and Slurm's stop signals end those at once: let loaders "
            'with workers have multiprocessing_context="fork", else the program fails before it saves',
            file=sys.stderr,
        )
    session = JoinedSession(
        run,
        load_config(run.config),
        place,
        env,
        attempt=int(env[_ATTEMPT]),
        stop=stop,
        heartbeat=Heartbeat(),
        is_under_agent=is_under_torchrun(env),
    )
    # It comes before the exit function of `multiprocessing`, which is imported already, ends its children by TERM.
    atexit.register(_close_at_exit, session)
    return session


def _close_at_exit(session: JoinedSession) -> None:
    """Closes the session at the end of the program, which has failed if its last checkpoint has."""
    try:
        session.close()
    except SlurmTrainError as err:
        print(f"slurm_train: {err}", file=sys.stderr, flush=True)
        # The exit code is settled already.
        os._exit(EXIT_FAILURE)


def _newest_collectives() -> bytes | None:
    if "torch.distributed" not in sys.modules:
        return None
    from slurm_train.distributed.group import newest_collectives

    return newest_collectives()


def _is_no_step(step: int, numbers: Mapping[str, Any]) -> bool:
    """Returns whether a report is an evaluation, where no step is done or a later one is."""
    is_evaluation = step == 0 or any(name.startswith("eval_") for name in numbers)
    return bool(numbers) and "loss" not in numbers and is_evaluation


def _number(value: Any) -> float | int | None:
    """Returns a number for JSON; None, which becomes null, for one that is not finite."""
    number = value if type(value) is int else float(value)
    return number if math.isfinite(number) else None
