"""The progress of the built-in trainer: what steps take, on rank 0 their lines of metrics.jsonl and the display."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping

from torch import nn

from slurm_train.config.batch import BatchShare
from slurm_train.data.source import describe
from slurm_train.distributed.pace import PaceProbe, WaitTimer
from slurm_train.rundir.timing import Spent
from slurm_train.session.progress import Progress
from slurm_train.train.context import Parts, Rank
from slurm_train.train.ddp import sent_bytes
from slurm_train.train.metrics import GpuReader, peak_flops
from slurm_train.train.passes import Passes
from slurm_train.train.step import StepResult


class TrainingProgress(Progress):
    """Measures the steps of this rank, and records the results on rank 0; the same calls do nothing on the others.

    A window is the steps since the last line of metrics.jsonl; rates and times in a line are those of its window. Time
    spent otherwise (evaluation, saving) does not count as step time.

    Wide because it holds the sums of a window, which are reset together.

    Args:
        parts: of the training.
        spent: what this attempt's time was spent on so far; changed here.
        probe: measures in sampled steps how long this rank works and how long it waits for other ranks.
        data_wait_s: returns the seconds that this rank has waited for data so far.
        max_steps: steps of the whole run, written into each line; None where the plan has them.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        spent: Spent,
        probe: PaceProbe,
        data_wait_s: Callable[[], float],
        max_steps: int | None = None,
    ) -> None:
        rank = parts.rank
        super().__init__(rank, spent=spent)
        self.probe = probe
        self._data_wait_s = data_wait_s
        self._length = {} if max_steps is None else {"max_steps": max_steps}
        self._unit = "tokens" if describe(parts.train_data).bytes_per_target is not None else "samples"
        self._num_samples = len(parts.train_data)
        on_gpu = self._is_first and rank.device.type == "cuda"
        self._gpu = GpuReader(rank.device, clock=time.monotonic) if on_gpu else None
        self._peak: float | None = None
        """Peak of all ranks in operations per second; None where it is not known, or samples are no text."""
        peak = peak_flops(rank.device)
        if peak is not None and self._unit == "tokens":
            self._peak = peak * rank.place.world_size
        self._flops, self._papers_flops = parts.flops_per_token
        self._step_since = (0.0, 0.0)
        """When the present step began, and how long data had been waited for by then."""
        self._logged_wait_s = 0.0
        self._shown: tuple[float, int] | None = None
        self._newest: StepResult | None = None
        self.restart_window()

    def begin_step(self) -> None:
        """Starts to measure a step; to be called before it."""
        self.probe.begin()
        self._step_since = (self._rank.clock(), self._data_wait_s())

    def add_step(self) -> None:
        """Adds the step that has just ended to the histograms; not called for an attempt's first, which is start-up."""
        start_s, start_wait_s = self._step_since
        self._times.add(self._rank.clock() - start_s, self._data_wait_s() - start_wait_s)

    def count(self, result: StepResult) -> None:
        """Counts a step; shows it when the display is due."""
        if not self._is_first:
            return
        self._window_steps += 1
        self._window_items += self._items_of(result)
        self._newest = result
        now = self._rank.clock()
        if self._shown is None:  # the first step's time is start-up; a speed is known from the second on
            self._shown = (now, result.facts.step)
            self._start_up_s = now - self._window_start
            self._start_up_items = self._window_items
        elif self._rank.display.is_due:
            self._show(result, now, *self._shown)

    def write(self, result: StepResult, *, items: int, digest: int | None) -> None:
        """Adds the line of a step and opens the next window.

        Args:
            result: the step.
            items: items of the whole run up to this step.
            digest: order-free digest of the samples of the step, None where it is not asked for.
        """
        if not self._is_first:
            return
        elapsed_s = self._rank.clock() - self._window_start
        data_wait_s = self._take_data_wait_s()
        steps = max(self._window_steps, 1)
        num_items = self._window_items
        if self._start_up_s and steps > 1:
            elapsed_s -= self._start_up_s
            steps -= 1
            num_items -= self._start_up_items
        elapsed_s = max(elapsed_s, 1e-9)
        rate = num_items / elapsed_s
        line = {
            "epoch": result.facts.samples // self._num_samples,
            "samples": result.facts.samples,
            "tokens": items if self._unit == "tokens" else None,
            # JSON has no NaN, and the loss of a step that was not applied does not count.
            "loss": result.loss if result.applied else None,
            "lr": result.facts.lr,
            "grad_norm": result.grad_norm if result.applied else None,
            "step_time_s": elapsed_s / steps,
            "data_time_s": data_wait_s / max(self._window_steps, 1),
            f"{self._unit}_per_s": rate,
            "mfu": None if self._peak is None else rate * self._flops / self._peak,
            "mfu_6n_12ltc": rate * self._papers_flops / self._peak if self._peak and self._papers_flops else None,
            **({} if self._gpu is None else self._gpu.read()),
            **({} if digest is None else {"samples_digest": digest}),
        }
        self.add_line(result.facts.step, line | self._length)
        self._book(data_wait_s)

    def write_evaluation(self, step: int, samples: int, measures: Mapping[str, float], *, seconds: float) -> None:
        """Adds the line of an evaluation that took so long."""
        self.spent.longest_evaluation_s = max(self.spent.longest_evaluation_s, seconds)
        facts = {"epoch": samples // self._num_samples, "samples": samples}
        self.add_line(step, {**facts, **measures, **self._length})

    def book(self) -> None:
        """Adds the steps of the current window to the account and opens the next window."""
        self._book(self._take_data_wait_s())

    def restart_window(self) -> None:
        """Begins to measure step times anew."""
        self._window_start = self._rank.clock()
        self._window_steps = 0
        self._window_items = 0
        self._start_up_s = 0.0
        """Time of the attempt's first step, in the window that it is in, and its items."""
        self._start_up_items = 0

    def leave_out(self, seconds: float, cause: str) -> None:
        """Takes time that was spent outside of steps out of the current window and of the display's rate."""
        super().leave_out(seconds, cause)
        self._window_start += seconds
        if self._shown is not None:
            self._shown = (self._shown[0] + seconds, self._shown[1])

    def close(self) -> None:
        """Closes the display at the newest step and writes all that is not written yet."""
        if self._newest is not None and self._shown is not None and self._newest.facts.step > self._shown[1]:
            self._show(self._newest, self._rank.clock(), *self._shown)
        self._rank.display.close()
        self.heartbeat.periodic_work = None
        super().close()

    def _book(self, data_wait_s: float) -> None:
        if self._window_steps:
            seconds = self._rank.clock() - self._window_start
            self.spent.add_steps(self._window_steps, seconds=seconds, data_wait_s=data_wait_s)
        self.restart_window()

    def _take_data_wait_s(self) -> float:
        """Returns the seconds that steps have waited for data since this was last called."""
        before_s = self._logged_wait_s
        self._logged_wait_s = self._data_wait_s()
        return self._logged_wait_s - before_s

    def _items_of(self, result: StepResult) -> int:
        """Returns the tokens of a step, or its samples: a loss may count pixels or labels in place of them."""
        return result.num_items if self._unit == "tokens" else result.facts.size

    def _show(self, result: StepResult, now: float, since: float, step_then: int) -> None:
        step = result.facts.step
        step_time_s = max(now - since, 1e-9) / max(step - step_then, 1)
        rate = self._items_of(result) / step_time_s
        self._rank.display.show(step, loss=result.loss, rate=rate, unit=self._unit, step_time_s=step_time_s)
        self._shown = (now, step)


def build_progress(
    parts: Parts, passes: Passes, share: BatchShare, *, spent: Spent, first_step: int, max_steps: int
) -> TrainingProgress:
    """Returns the record of this attempt's steps."""
    rank = parts.rank
    batch = rank.config.batch
    spent.first_step = first_step
    if rank.place.is_first:
        rank.display.begin(max_steps=max_steps)
        if rank.layout.is_replicated:
            _write_sent_bytes(rank, parts.model)

    def data_wait_s() -> float:
        return passes.data_wait_s

    probe = PaceProbe(
        passes.ddp,
        rank.heartbeat,
        every=rank.config.health.pace_every_steps,
        data_wait_s=data_wait_s,
        on_device=rank.device.type != "cpu",
        # Weights are meant to make up for the speed of a rank; batches by length are equal work.
        work=share.work if batch.shares == "even" and not batch.by_length else 1.0,
        # None for DDP, which has timers of its own, and for one rank, which waits for nobody.
        waits=None if rank.layout.is_replicated else WaitTimer(rank.device, sees_functions=not rank.compiles),
    )
    return TrainingProgress(
        parts,
        spent=spent,
        probe=probe,
        data_wait_s=data_wait_s,
        max_steps=None if rank.config.train.max_epochs is None else max_steps,
    )


def _write_sent_bytes(rank: Rank, model: nn.Module) -> None:
    """Records how many bytes of gradients a step sends where ranks hold whole replicas. Rank 0 only."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    comm = rank.config.ddp.comm
    facts = {
        "comm": comm,
        "gradient_bytes": sent_bytes(parameters, comm="none"),
        "sent_bytes": sent_bytes(parameters, comm=comm),
    }
    # An error of the file system costs this figure and must not end the run.
    with contextlib.suppress(OSError):
        rank.append_event("exchange", **facts)
