"""What follows a step that went wrong: a NaN, an infinite value, a loss far above the last ones.

Only reduced values are judged, which every rank has alike, and the step itself has decided by the same values whether
it was applied; so all ranks do the same without a further exchange.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from slurm_train.checkpoint.agreement import on_every_rank, on_rank_zero
from slurm_train.checkpoint.retention import discard_from
from slurm_train.config.schema import HealthSection
from slurm_train.errors import SlurmTrainError
from slurm_train.rundir.attempts import check_fence
from slurm_train.rundir.events import append_event, read_events
from slurm_train.rundir.layout import RunDirectory
from slurm_train.train.saving import Checkpointer, Position
from slurm_train.train.step import StepResult

Action = Literal["log", "skip", "rollback", "stop"]
_MOST_IDS = 256


@dataclass(frozen=True, slots=True)
class Finding:
    """A step that went wrong."""

    result: StepResult
    kind: Literal["non_finite", "spike"]
    action: Action


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthParts:
    """What a health policy works with."""

    settings: HealthSection
    run: RunDirectory
    attempt: int
    is_first: bool
    """Whether this is rank 0, which writes."""
    size_before: Callable[[int], int]
    """Gives the number of samples of the step that brought the run to a position."""
    sample_ids: Callable[[int, int], list[int]]
    """Gives the samples at so many positions of the run's order, from one on."""
    say: Callable[[str], None]
    checkpointer: Checkpointer
    group: Any
    """A gloo group of all ranks."""


class Health:
    """Judges steps, writes them to events@<host>.jsonl, and takes a run back where that is asked.

    Args:
        parts: what it works with.
        num_rollbacks: how many this run has had.
    """

    def __init__(self, parts: HealthParts, *, num_rollbacks: int = 0) -> None:
        self._parts, self._settings = parts, parts.settings
        self._num_rollbacks = num_rollbacks

    def loss_limit(self, position: Position) -> float:
        """Returns the loss above which the next step is a spike, infinity where nothing is."""
        settings, recent = self._settings, position.recent_losses
        if settings.spike_factor is None or len(recent) < settings.spike_window:
            return float("inf")
        median = statistics.median(recent)
        return settings.spike_factor * median if median > 0 else float("inf")

    def take(self, result: StepResult, position: Position) -> Finding | None:
        """Judges a step: remembers the loss of a good one, tells of one that went wrong.

        Raises:
            SlurmTrainError: the run has to stop because of it.
        """
        if not result.num_items:
            refuse(result)
        if result.is_finite and not result.is_spike:
            self._remember(result.loss, position)
            return None
        finding = (
            Finding(result, "spike", self._settings.on_spike)
            if result.is_finite
            else Finding(result, "non_finite", self._settings.on_non_finite)
        )
        self._tell(finding)
        if finding.action == "stop":
            refuse(result)
        if finding.action == "log":
            self._remember(result.loss, position)
        return finding

    def roll_back(self, finding: Finding, *, samples: int) -> Position:
        """Restores the newest verified checkpoint from before a step; the samples since are passed over. Collective.

        Args:
            finding: the step.
            samples: global samples consumed up to now.

        Raises:
            SlurmTrainError: the run has been taken back too often, or there is nothing to go back to.
        """
        bad_step = finding.result.facts.step
        if self._num_rollbacks >= self._settings.max_rollbacks:
            raise SlurmTrainError(
                f"step {bad_step} went wrong after {self._num_rollbacks} rollbacks of this run",
                hint="look at events@*.jsonl in the run directory; health.max_rollbacks allows more",
            )
        self._num_rollbacks += 1
        # A save under way may be of a step that is to be forgotten.
        self._parts.checkpointer.finish()
        # On the nodes first: what is left there after a kill could be brought in again.
        on_every_rank(self._parts.group, lambda: self._parts.checkpointer.discard_local_from(bad_step))
        on_rank_zero(self._parts.group, lambda: self._discard_from(bad_step))
        position, notes = self._parts.checkpointer.resume()
        if position.step == 0:
            raise SlurmTrainError(
                f"step {bad_step} went wrong and there is no checkpoint to go back to",
                hint="lower checkpoint.every_steps, or set health.on_non_finite=skip",
            )
        on_rank_zero(self._parts.group, lambda: self._note_rollback(bad_step, position, samples))
        for note in notes:
            self._say(note)
        position.samples = samples
        return position

    def _discard_from(self, step: int) -> None:
        run, attempt = self._parts.run, self._parts.attempt
        discard_from(run.checkpoints, step, attempt=attempt, fence=lambda: check_fence(run, attempt))

    def _note_rollback(self, bad_step: int, position: Position, samples: int) -> None:
        append_event(
            self._parts.run,
            "rollback",
            attempt=self._parts.attempt,
            step=bad_step,
            to_step=position.step,
            checkpoint_samples=position.samples,
            resume_samples=samples,
        )
        self._say(
            f"step {bad_step}: back to step {position.step}; samples {position.samples} to {samples} are passed over"
        )

    def _remember(self, loss: float, position: Position) -> None:
        if self._settings.spike_factor is not None:
            position.recent_losses.append(loss)
            del position.recent_losses[: -self._settings.spike_window]

    def _tell(self, finding: Finding) -> None:
        if not self._parts.is_first:
            return
        facts = finding.result.facts
        size = self._parts.size_before(facts.samples)
        first = facts.samples - size
        append_event(
            self._parts.run,
            finding.kind,
            attempt=self._parts.attempt,
            action=finding.action,
            step=facts.step,
            samples=[first, facts.samples],
            sample_ids=self._parts.sample_ids(first, min(size, _MOST_IDS)),
            value=finding.result.loss,
            grad_norm=finding.result.grad_norm,
            limit=facts.loss_limit,
            lr=facts.lr,
        )
        self._say(
            f"step {facts.step}: loss {finding.result.loss:.4g}, gradient norm {finding.result.grad_norm:.4g} "
            f"({finding.kind.replace('_', '-')}); {finding.action}; samples {first} to {facts.samples}"
        )

    def _say(self, text: str) -> None:
        if self._parts.is_first:
            self._parts.say(text)


def position_after_rollbacks(run: RunDirectory, position: Position, *, group: Any) -> tuple[int, int]:
    """Returns the samples consumed at a restored position, and the rollbacks so far. Collective.

    A run that ended between a rollback and its next checkpoint resumes from the checkpoint that it went back to; the
    samples that were passed over stay so. Samples only ever grow, so they tell which checkpoint that was.
    """

    def read() -> tuple[int, int]:
        events = read_events(run, "rollback")
        moved = [int(line["resume_samples"]) for line in events if line["checkpoint_samples"] == position.samples]
        return max([position.samples, *moved]), len(events)

    return on_rank_zero(group, read)


def refuse(result: StepResult) -> None:
    """Raises for a step that stops the run; the same on every rank, since it judges reduced values.

    Raises:
        SlurmTrainError: the loss or the gradients are not finite, the loss is a spike, or no item counted.
    """
    step = result.facts.step
    if not result.num_items:
        raise SlurmTrainError(
            f"no item of step {step} counts: every target is passed over",
            hint="check the targets of the data set; -100 marks those that do not count",
        )
    if result.is_finite:
        raise SlurmTrainError(
            f"step {step} is a spike: loss {result.loss:.4g}, the limit was {result.facts.loss_limit:.4g}",
            hint="see events@*.jsonl for its samples; health.on_spike=skip or rollback goes on by itself",
        )
    what = f"loss {result.loss} ({result.num_non_finite} micro-batches)" if result.num_non_finite else "loss is finite"
    raise SlurmTrainError(
        f"step {step} is not finite: {what}, gradient norm {result.grad_norm}, lr {result.facts.lr:.3g}",
        hint="lower optim.lr or optim.grad_clip_norm, look at the samples of this step (events@*.jsonl), then resume: "
        "the newest checkpoint is from before it; health.on_non_finite=skip or rollback goes on by itself",
    )
