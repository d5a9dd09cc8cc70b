"""What rank 0 keeps of the steps: lines of metrics.jsonl, and the display. Ranks but 0 have none."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from slurm_train.metrics.progress import Display, Glance
from slurm_train.rundir.heartbeat import AwakeClock
from slurm_train.rundir.timing import Spent
from slurm_train.train.step import StepResult

# A killed attempt loses what it did since its last account.
ACCOUNT_EVERY_S = 2.0


class LineWriter(Protocol):
    """Takes lines of metrics."""

    def write(self, values: Mapping[str, Any]) -> None:
        """Writes one line."""

    def close(self) -> None:
        """Makes the lines durable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What every line says about its run."""

    attempt: int
    world_size: int
    num_samples: int
    """Samples of one epoch."""
    unit: str
    """What losses are averaged over: "tokens" or "samples"."""
    flops_per_item: float | None
    """Floating-point operations of a training step per item; None where they are not known."""
    peak_flops: float | None
    """Peak of all devices together, per second; None on a CPU."""


class Recorder:
    """Keeps what a step gave; time spent elsewhere (evaluation, saving) is taken out of the step time.

    Args:
        facts: the run.
        writers: where lines go.
        display: what a person sees.
        clock: seconds that never run backwards.
        spent: what this attempt's time was spent on so far.
        account: file that keeps it; None: nothing is kept.
    """

    def __init__(
        self,
        facts: RunFacts,
        *,
        writers: list[LineWriter],
        display: Display,
        spent: Spent | None = None,
        account: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.facts = facts
        self.display = display
        self._writers = writers
        self._clock = clock
        self._window_start = clock()
        self._window_steps = 0
        self._window_items = 0
        self._shown: tuple[float, int] | None = None
        self._newest: StepResult | None = None
        self._account = account
        self._account_due_s = 0.0
        self.spent = Spent(begin_unix_s=time.time()) if spent is None else spent

    def count(self, result: StepResult) -> None:
        """Takes note of a step; shows it when the display is due."""
        self._window_steps += 1
        self._window_items += result.num_items
        self._newest = result
        now = self._clock()
        if self._shown is None:  # the first step's time is start-up; a speed is known from the second on
            self._shown = (now, result.facts.step)
        elif now >= self.display.due_s:
            self._show(result, now, *self._shown)

    def write(self, result: StepResult, *, items: int, data_wait_s: float, digest: int | None) -> None:
        """Writes the line of a step and opens the next window.

        Args:
            result: the step.
            items: items of the whole run up to this step.
            data_wait_s: seconds that this window's steps waited for data on this rank.
            digest: order-free digest of the samples of the step, None where it is not asked for.
        """
        now = self._clock()
        elapsed_s = max(now - self._window_start, 1e-9)
        steps = max(self._window_steps, 1)
        rate = self._window_items / elapsed_s
        facts = self.facts
        line: dict[str, Any] = {
            "step": result.facts.step,
            "epoch": result.facts.samples // facts.num_samples,
            "samples": result.facts.samples,
            "tokens": items if facts.unit == "tokens" else None,
            # JSON has no NaN; a step that was not applied has no loss that counts.
            "loss": result.loss if result.applied else None,
            "lr": result.facts.lr,
            "grad_norm": result.grad_norm if result.applied else None,
            "step_time_s": elapsed_s / steps,
            "data_time_s": data_wait_s / steps,
            f"{facts.unit}_per_s": rate,
            "mfu": self._mfu(rate),
            "attempt": facts.attempt,
            "world_size": facts.world_size,
            "time_unix_s": time.time(),
        }
        if digest is not None:
            line["samples_digest"] = digest
        self._write(line)
        self.book(data_wait_s=data_wait_s)
        if now >= self._account_due_s:
            self._account_due_s = now + ACCOUNT_EVERY_S
            self._keep_account()

    def write_evaluation(self, step: int, samples: int, measures: Mapping[str, float]) -> None:
        """Writes the line of an evaluation."""
        head = {"step": step, "epoch": samples // self.facts.num_samples, "samples": samples}
        tail = {"attempt": self.facts.attempt, "world_size": self.facts.world_size, "time_unix_s": time.time()}
        self._write({**head, **measures, **tail})

    def book(self, *, data_wait_s: float) -> None:
        """Adds the steps of the current window to the account and opens the next one.

        Args:
            data_wait_s: seconds that they waited for data on this rank.
        """
        if self._window_steps:
            self.spent.add_steps(
                self._window_steps, seconds=self._clock() - self._window_start, data_wait_s=data_wait_s
            )
        self.restart_window()

    def restart_window(self) -> None:
        """Begins to measure step times anew."""
        self._window_start, self._window_steps, self._window_items = self._clock(), 0, 0

    def skip(self, seconds: float, cause: str = "") -> None:
        """Takes time that was no step's out of the current window and the display's rate.

        Args:
            seconds: how long it was.
            cause: the account that it belongs to, e.g. "evaluate_s"; see `rundir.timing`.
        """
        self._window_start += seconds
        self.spent.add(cause, seconds)
        if self._shown is not None:
            self._shown = (self._shown[0] + seconds, self._shown[1])

    def close(self) -> None:
        """Closes the display at the newest step and makes the lines durable."""
        if self._newest is not None and self._shown is not None and self._newest.facts.step > self._shown[1]:
            self._show(self._newest, self._clock(), *self._shown)
        self.display.close()
        for writer in self._writers:
            writer.close()
        self._keep_account()

    def _write(self, line: Mapping[str, Any]) -> None:
        for writer in self._writers:
            writer.write(line)

    def _keep_account(self) -> None:
        if self._account is not None:
            if isinstance(self._clock, AwakeClock):
                self.spent.suspended_s = self._clock.away_s
            self.spent.write(self._account)

    def _mfu(self, rate: float) -> float | None:
        if self.facts.flops_per_item is None or self.facts.peak_flops is None:
            return None
        return rate * self.facts.flops_per_item / self.facts.peak_flops

    def _show(self, result: StepResult, now: float, since: float, step_then: int) -> None:
        step = result.facts.step
        step_time_s = max(now - since, 1e-9) / max(step - step_then, 1)
        rate = result.num_items / step_time_s
        self.display.show(Glance(step=step, loss=result.loss, rate=rate, unit=self.facts.unit, step_time_s=step_time_s))
        self._shown = (now, step)
