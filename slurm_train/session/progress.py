"""The progress of one rank: its heartbeat, the times of its steps, and on rank 0 numbers and account.

`Progress` is the trainer's, too (`train.progress`); `ReportedProgress` is that of a program with its own loop.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from slurm_train.checkpoint.verify import newest_committed_step
from slurm_train.metrics import MetricsWriter
from slurm_train.rundir.files import fsync_file
from slurm_train.rundir.heartbeat import limits_of
from slurm_train.rundir.timing import ProgramProgress, Spent, StepTimes
from slurm_train.session.losses import LossWatch
from slurm_train.session.rank_run import RankRun
from slurm_train.slurm.job_variables import step_id

if TYPE_CHECKING:
    import torch

    from slurm_train.distributed.pace import PaceProbe

_ACCOUNT_EVERY_S = 2.0


class Progress:
    """What one rank has done, and what its time went into; rank 0 writes the lines of metrics.jsonl and the account.

    The heartbeat's thread writes what is not written yet, so a step needs no system call and waits for no disk.

    Args:
        rank: this rank.
        spent: what its time was spent on before.
    """

    def __init__(self, rank: RankRun, *, spent: Spent) -> None:
        self.spent = spent
        """What this rank has used its time for; rank 0's is written."""
        self.heartbeat = rank.heartbeat
        self._rank = rank
        place = rank.place
        self._is_first = place.is_first
        self._times = StepTimes(rank.run, rank.attempt, rank=place.rank, host=place.host, clock=rank.clock)
        self._lines: deque[dict[str, Any]] = deque()
        """Lines of metrics.jsonl that are not written yet."""
        self._writer: MetricsWriter | None = None
        self._lock = threading.Lock()
        self._account_due_s = 0.0
        rank.heartbeat.periodic_work = self._write_when_due

    @contextlib.contextmanager
    def span(self, cause: str) -> Iterator[None]:
        """Excludes what is done within it from the present step.

        Args:
            cause: account of `Spent` that its time goes to.
        """
        start_s = self._rank.clock()
        try:
            yield
        finally:
            self.leave_out(self._rank.clock() - start_s, cause)

    def leave_out(self, seconds: float, cause: str) -> None:
        """Excludes time that belongs to no step from the present one; see `span`."""
        self.spent.add(cause, seconds)

    def add_line(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Adds a line of metrics.jsonl; rank 0 does."""
        if self._is_first:
            facts = {"attempt": self._rank.attempt, "world_size": self._rank.place.world_size}
            self._lines.append({"step": step, **numbers, **facts, "time_unix_s": time.time()})

    def write_lines(self) -> None:
        """Writes the lines of metrics.jsonl."""
        with self._lock:
            if self._lines and self._writer is None:
                self._writer = MetricsWriter(self._rank.run.metrics)
            while self._lines:
                assert self._writer is not None
                self._writer.write(self._lines[0])
                self._lines.popleft()

    def make_lines_durable(self) -> None:
        """Writes the lines, and returns when they are on disk; for rank 0, before a checkpoint is complete.

        No later attempt reports the steps before a checkpoint again. A failure to write them does not stop training.
        """
        if self._is_first:
            with contextlib.suppress(OSError):
                self.write_lines()
                fsync_file(self._rank.run.metrics)

    def close(self) -> None:
        """Writes all that is not written yet; the time from now on belongs to no step."""
        self.write_lines()
        self.make_lines_durable()
        self._times.keep()
        self._write_account()

    def _write_when_due(self) -> None:
        self.write_lines()
        self._times.keep_when_due()
        now_s = time.monotonic()
        if now_s >= self._account_due_s:
            self._account_due_s = now_s + _ACCOUNT_EVERY_S
            self._write_account()

    def _write_account(self) -> None:
        if self._is_first:
            self.spent.suspended_s = self._rank.clock.away_s
            self.spent.write(self._rank.run.account(self._rank.attempt))


class ReportedProgress(Progress):
    """The progress of a program with its own loop, by its reports.

    Wide because its sums and times belong together: all of them change at the same report.

    Args:
        rank: this rank; its heartbeat is not started yet.
        choose_device: returns this rank's device.
        data_wait_s: gives the seconds that this rank has waited for batches so far.
        losses: watches the losses; None on other ranks than rank 0.
    """

    def __init__(
        self,
        rank: RankRun,
        *,
        choose_device: Callable[[], torch.device],
        data_wait_s: Callable[[], float],
        losses: LossWatch | None,
    ) -> None:
        super().__init__(rank, spent=Spent(begin_unix_s=time.time()))
        self._choose_device = choose_device
        self._data_wait_s = data_wait_s
        self._waited_s = 0.0
        """What it gave at the newest reported step."""
        self._losses = losses
        self._told = ProgramProgress()
        """How far the program has come, for the supervisor; rank 0 writes it."""
        self.step: int | None = None
        """The newest reported step; None before the first report."""
        self._step_s: float | None = None
        """Seconds that it took."""
        self._step_data_s = 0.0
        """Of these, seconds of waiting for batches."""
        self._since_s = rank.clock()
        """When it was reported."""
        self._shown: tuple[int, float] | None = None
        """The step that was shown last, and the seconds of all steps by then."""
        self._apart_s = 0.0
        """Seconds since then that belong to no step: mostly saves."""
        self._pace: PaceProbe | None = None
        """Measures this rank's own part of a step; from the second report on."""
        self._told_lock = threading.Lock()

    def start(self) -> None:
        """Starts the heartbeat."""
        rank = self._rank
        heartbeat = self.heartbeat
        heartbeat.phase = "joined"
        heartbeat.record = _newest_collectives
        heartbeat.start(
            rank.run,
            rank.attempt,
            rank=rank.place.rank,
            local_rank=rank.place.local_rank,
            host=rank.place.host,
            limits=limits_of(rank.config),
            step_id=step_id(rank.env),
        )

    def mark(self, phase: str) -> None:
        """Sets the phase of the heartbeat; before the first report there is none but "joined"."""
        if self.heartbeat.phase != "joined":
            self.heartbeat.mark(phase)

    def begin_at(self, step: int) -> None:
        """Sets the step of the checkpoint that the program continues, 0 without one."""
        self._told.step = step
        self._write_told()

    def begin_save(self, step: int) -> None:
        """Notes that a save has begun: a program that ends before it is complete has not come to its end."""
        self._told.save_step = step
        self._write_told()

    def tell_end(self) -> None:
        """Notes that the program has said that its training is over."""
        if not self._told.has_told_end:
            self._told.has_told_end = True
            self._write_told()

    def is_evaluation(self, step: int, numbers: Mapping[str, Any]) -> bool:
        """Returns whether a report is that of an evaluation, where no step is done or a later one is."""
        if self.step is not None and step >= self.step:
            return False
        has_results = step == 0 or any(name.startswith("eval_") for name in numbers)
        return bool(numbers) and "loss" not in numbers and has_results

    def add_evaluation(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Adds the numbers of an evaluation."""
        self.heartbeat.marks += 1
        if self._is_first and not self._is_before_resume(step):
            self.add_line(step, _for_json(numbers))

    def add_step(self, step: int, numbers: Mapping[str, Any], *, resumed_step: int) -> None:
        """Adds the steps since the last report, and numbers.

        Args:
            step: the step that is done; a second report of a step adds numbers only.
            numbers: of this step.
            resumed_step: the step that this attempt has resumed from.
        """
        now_s = self.heartbeat.clock()
        seconds = max(now_s - self._since_s - self._apart_s, 0.0)
        data_wait_s = self._data_wait_s() - self._waited_s
        previous = self.step
        num_steps = 0 if previous is None else step - previous
        self.heartbeat.step = step
        self.heartbeat.phase = "step"
        self.heartbeat.marks += 1
        if num_steps > 0:
            # The start of the first reported step is not known.
            self.heartbeat.settled = True
            if self._step_s is None:
                self._pace = self._probe_pace()
            self._step_s = seconds / num_steps
            self._step_data_s = data_wait_s / num_steps
            self._times.add(self._step_s, self._step_data_s)
            self._sample_pace(num_steps)
        if step != previous:
            self.step = step
            self._since_s = now_s
            self._waited_s += data_wait_s
            self._apart_s = 0.0
        if not self._is_first:
            return
        self._tell_step(step, numbers)
        if previous is None:
            self.spent.first_step = resumed_step
            self.spent.steps = max(step - resumed_step, 0)
            self.spent.add("compile_s", seconds)
        elif num_steps > 0:
            self.spent.add_steps(num_steps, seconds=seconds, data_wait_s=data_wait_s)
        if not numbers:
            return
        line = self._step_line(numbers, is_new=step != previous)
        self.add_line(step, line)
        if self._losses is not None and "loss" in numbers:
            loss = line["loss"]
            # Converted once: for a tensor on a GPU each conversion waits for the GPU. null is NaN or infinite.
            loss = _float(numbers["loss"]) if loss is None else loss
            self._losses.add(step, loss)
            self._show(step, loss)

    def _show(self, step: int, loss: float) -> None:
        """Shows how far the training is and how fast since the last time, where the program has said how long it is."""
        seconds = self.spent.step_s + self.spent.data_wait_s
        if self._shown is None:
            self._shown = (step, seconds)
        shown_step, shown_s = self._shown
        display = self._rank.display
        if self._told.max_steps is None or step <= shown_step or not display.is_due:
            return
        display.max_steps = self._told.max_steps
        step_time_s = max(seconds - shown_s, 1e-9) / (step - shown_step)
        display.show(step, loss=loss, rate=1 / step_time_s, unit="steps", step_time_s=step_time_s)
        self._shown = (step, seconds)

    def _tell_step(self, step: int, numbers: Mapping[str, Any]) -> None:
        told = self._told
        told.step = step
        if "max_steps" in numbers:
            max_steps = _number(numbers["max_steps"])
            told.max_steps = None if max_steps is None else int(max_steps)
        if told.is_at_end:
            # The program may end by `os._exit` right after this report.
            self._write_told()

    def leave_out(self, seconds: float, cause: str) -> None:
        """See `Progress.leave_out`."""
        super().leave_out(seconds, cause)
        self._apart_s += seconds
        if self._pace is not None:
            self._pace.leave_out()

    def add_exchange(self, seconds: float) -> None:
        """Adds time in which this rank waited for others outside of the model's own exchanges."""
        if self._pace is not None:
            self._pace.exchange_s += seconds

    def _write_account(self) -> None:
        super()._write_account()
        self._write_told()

    def _write_told(self) -> None:
        if self._is_first:
            # The thread of the heartbeat writes as well.
            with self._told_lock:
                self._told.write(self._rank.run.program(self._rank.attempt))

    def _is_before_resume(self, step: int) -> bool:
        """Returns whether an evaluation is that of a model into which no checkpoint was loaded yet, in a later attempt.

        Its line would supersede the evaluations of all steps that the attempt goes on from.
        """
        return step == 0 and self._rank.attempt > 0 and newest_committed_step(self._rank.run.checkpoints) > 0

    def _probe_pace(self) -> PaceProbe | None:
        if self._rank.place.world_size == 1 or "torch.distributed" not in sys.modules:
            return None
        from slurm_train.distributed.pace import probe_program

        return probe_program(
            self.heartbeat,
            every=self._rank.config.health.pace_every_steps,
            data_wait_s=self._data_wait_s,
            device=self._choose_device(),
        )

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

    def _step_line(self, numbers: Mapping[str, Any], *, is_new: bool) -> dict[str, Any]:
        line = _for_json(numbers)
        if is_new and not any(name.startswith("eval_") for name in numbers):
            # Readers recognize the line of a step by its loss, and let it supersede what the step has had before.
            line.setdefault("loss", None)
        if self._step_s is not None:
            line["step_time_s"] = self._step_s
            line["data_time_s"] = self._step_data_s
        return line


def _for_json(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _number(value) for name, value in numbers.items() if name != "step"}


def _number(value: Any) -> float | int | None:
    """Returns a number for JSON; None, which becomes null, for one that is not finite, or that no float can hold."""
    number = _float(value)
    if not math.isfinite(number):
        return None
    return value if type(value) is int else number


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # of an integer or a fraction
        return math.inf if value > 0 else -math.inf


def _newest_collectives() -> bytes | None:
    if "torch.distributed" not in sys.modules:
        return None
    from slurm_train.distributed.group import newest_collectives

    return newest_collectives()
