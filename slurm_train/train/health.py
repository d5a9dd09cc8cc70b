"""What to do after a bad step (a NaN, an infinite value, a loss far above the last ones), and whether all replicas hold
the same parameters.

Only reduced values are checked, which are the same on every rank, and `step` has already applied or skipped the update
by the same values; so all ranks do the same without a further exchange.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from slurm_train.checkpoint.agreement import on_rank_zero
from slurm_train.checkpoint.replicas import require_replicas
from slurm_train.checkpoint.resumption import Resumption
from slurm_train.checkpoint.saver import Saver
from slurm_train.config.schema import HealthSection
from slurm_train.data.batches import GlobalBatches
from slurm_train.errors import SlurmTrainError
from slurm_train.rundir.events import read_events
from slurm_train.rundir.lineage import Origin
from slurm_train.rundir.paths import RunDirectory
from slurm_train.train.context import Rank
from slurm_train.train.position import Position
from slurm_train.train.step import StepResult

# Sample ids of a bad step in its event, at most.
_MOST_IDS = 256
# Steps without an item that counts end a run: so many in a row (before any item has counted, and afterwards), or more
# than half of the steps of the window.
_EMPTY_AT_FIRST = 3
_EMPTY_IN_A_ROW = 10
_EMPTY_WINDOW = 100


class RecentLosses:
    """The newest losses of good steps, oldest first; only kept where spikes are looked for.

    Args:
        settings: the section `health` of the configuration.
    """

    def __init__(self, settings: HealthSection) -> None:
        self._settings = settings
        self._values: list[float] = []

    def state_dict(self) -> dict[str, list[float]]:
        """Returns {"values": losses}."""
        return {"values": self._values}

    def load_state_dict(self, state: Mapping[str, Iterable[float]]) -> None:
        """Takes over what `state_dict` returned."""
        self._values = list(state["values"])

    def add(self, loss: float) -> None:
        """Takes note of the loss of a good step."""
        if self._settings.spike_factor is not None:
            self._values = [*self._values, loss][-self._settings.spike_window :]

    def limit(self) -> float:
        """Returns the loss above which the next step is a spike, infinity where nothing is."""
        settings = self._settings
        if settings.spike_factor is None or len(self._values) < settings.spike_window:
            return float("inf")
        median = statistics.median(self._values)
        return settings.spike_factor * median if median > 0 else float("inf")


class Health:
    """Checks the result of each step, writes bad ones to events@<host>.jsonl, and rolls the run back where configured.

    Args:
        rank: this rank.
        batches: the global batches of the run.
        saver: restores the checkpoint of a rollback.
        resumption: which one that was.
        losses: of the newest good steps.
        num_rollbacks: rollbacks of this run so far.
    """

    def __init__(
        self,
        rank: Rank,
        *,
        batches: GlobalBatches,
        saver: Saver,
        resumption: Resumption,
        losses: RecentLosses,
        num_rollbacks: int,
    ) -> None:
        self.bad_step: int | None = None
        """A step before which the run has to go back, with `roll_back`; None where no step has to."""
        self.newest: StepResult | None = None
        """The newest result that was checked."""
        self._rank = rank
        self._settings = rank.config.health
        self._batches = batches
        self._saver = saver
        self._resumption = resumption
        self.losses = losses
        self._num_rollbacks = num_rollbacks
        self._compared_step = 0
        self._empty_steps: deque[bool] = deque(maxlen=_EMPTY_WINDOW)

    def judge(self, result: StepResult, position: Position) -> None:
        """Checks the result of a step: records the loss of a good step, writes an event for a bad one.

        Raises:
            SlurmTrainError: the run has to stop because of this step.
        """
        self.newest = result
        if self._is_empty(result, position):
            return
        if result.overflowed:
            self._rank.say(
                f"step {result.facts.step} is not applied: its float16 gradients overflow; the loss scale is halved"
            )
            return
        settings = self._settings
        action = "log"
        if not result.is_finite or result.is_spike:
            action = settings.on_spike if result.is_finite else settings.on_non_finite
            if self._rank.place.is_first:
                self._write(result, "spike" if result.is_finite else "non_finite", action)
        if action == "stop":
            refuse(result)
        if action == "rollback":
            self.bad_step = result.facts.step
        if action == "log":
            self.losses.add(result.loss)

    def _is_empty(self, result: StepResult, position: Position) -> bool:
        """Returns whether no item of a step counts, so that nothing is learned from it; writes an event then.

        Raises:
            SlurmTrainError: too many of the last steps are empty.
        """
        is_empty = not result.num_items
        self._empty_steps.append(is_empty)
        if not is_empty:
            return False
        position.empty_steps += 1
        if self._rank.place.is_first:
            self._write(result, "no_items", "skip")
        most_in_a_row = _EMPTY_IN_A_ROW if position.items else _EMPTY_AT_FIRST
        are_last_empty = sum(list(self._empty_steps)[-most_in_a_row:]) == most_in_a_row
        num_empty = sum(self._empty_steps)
        if are_last_empty or num_empty > _EMPTY_WINDOW // 2:
            refuse(result, num_empty=num_empty, of=len(self._empty_steps))
        return True

    def roll_back(self, position: Position) -> None:
        """Restores the newest verified checkpoint from before `bad_step`. Collective.

        Args:
            position: becomes that of the checkpoint, but for the samples consumed up to now: the run continues behind
                them, so none of the samples since the checkpoint is seen again.

        Raises:
            SlurmTrainError: the run has been rolled back too often, or there is no checkpoint to go back to.
        """
        samples = position.samples
        bad_step = self.bad_step
        self.bad_step = None
        assert bad_step is not None
        if self._num_rollbacks >= self._settings.max_rollbacks:
            raise SlurmTrainError(
                f"step {bad_step} went wrong after {self._num_rollbacks} rollbacks of this run",
                hint="look at events@*.jsonl in the run directory; health.max_rollbacks allows more",
            )
        self._num_rollbacks += 1
        group = dist.group.WORLD
        # A save under way may be of a step that is discarded below.
        self._saver.saves.finish()
        self._saver.saves.discard_from(bad_step)
        self._saver.resume()
        if self._saver.resumed_from is None:
            raise SlurmTrainError(
                f"step {bad_step} went wrong and there is no checkpoint to go back to",
                hint="lower checkpoint.every_steps, or set health.on_non_finite=skip",
            )
        origin = self._resumption.origin
        facts = {
            "to_step": position.step,
            "checkpoint_samples": position.samples,
            "resume_samples": samples,
            "saved_in": origin.saved_in,
            "parent": origin.parent,
        }
        on_rank_zero(group, lambda: self._rank.append_event("rollback", step=bad_step, **facts))
        span = f"samples {position.samples} to {samples}"
        self._rank.say(f"step {bad_step}: back to step {position.step}; {span} are passed over")
        position.samples = samples

    def compare_replicas(self, model: nn.Module, *, step: int, before_save: bool = False) -> None:
        """Compares the replicas of the model where that is due: every so many steps, and before each save. Collective.

        Args:
            model: this rank's part of it.
            step: the step that was just done.
            before_save: a save of it follows.

        Raises:
            SlurmTrainError: they differ.
        """
        every = self._settings.check_replicas_every_steps
        if every is None or not (before_save or step % every == 0) or step == self._compared_step:
            return
        self._compared_step = step
        layout = self._rank.layout
        # Offloaded parameters are on the host.
        require_replicas(
            model,
            group=dist.group.WORLD,
            host=self._rank.place.host,
            moment=f"at step {step}",
            hint="resume goes on from a checkpoint from before; if it comes back, exclude that node (cluster.exclude)",
            exact_on=self._rank.device,
            replicas=None if layout.is_replicated else layout.groups(("dp_replicate",)),
        )

    def _write(self, result: StepResult, kind: str, action: str) -> None:
        facts = result.facts
        first = facts.samples - facts.size
        self._rank.append_event(
            kind,
            action=action,
            step=facts.step,
            samples=[first, facts.samples],
            sample_ids=self._batches.sample_ids(first, min(facts.size, _MOST_IDS)).tolist(),
            value=result.loss,
            grad_norm=result.grad_norm,
            limit=facts.loss_limit,
            lr=facts.lr,
        )
        if kind == "no_items":
            self._rank.say(
                f"step {facts.step}: no item counts, so nothing is learned; samples {first} to {facts.samples}"
            )
            return
        self._rank.say(
            f"step {facts.step}: loss {result.loss:.4g}, gradient norm {result.grad_norm:.4g} "
            f"({kind.replace('_', '-')}); {action}; samples {first} to {facts.samples}"
        )


def position_after_rollbacks(run: RunDirectory, position: Position, origin: Origin) -> tuple[int, int]:
    """Returns the samples consumed at a restored position, and the number of rollbacks so far. Collective.

    A run that ended between a rollback and its next save resumes from the checkpoint that it had gone back to, and
    passes over the same samples again. That holds only for this very checkpoint: one of another past of the run may
    have the same step and samples.

    Args:
        run: the run.
        position: the restored position.
        origin: the checkpoint that it was restored from.
    """

    def went_back_here(line: Mapping[str, Any]) -> bool:
        # An older version wrote the samples only.
        save = (line.get("saved_in", origin.saved_in), line.get("parent", origin.parent))
        return bool(line["checkpoint_samples"] == position.samples and save == (origin.saved_in, origin.parent))

    def read() -> tuple[int, int]:
        events = read_events(run, "rollback")
        resume_samples = [int(line["resume_samples"]) for line in events if went_back_here(line)]
        return max([position.samples, *resume_samples]), len(events)

    return on_rank_zero(dist.group.WORLD, read)


def refuse(result: StepResult, *, num_empty: int = 1, of: int = 1) -> None:
    """Raises the error for a step that stops the run; the same on every rank, since reduced values are checked.

    Args:
        result: the step.
        num_empty: steps without an item among the last ones.
        of: how many those are.

    Raises:
        SlurmTrainError: the loss or the gradients are not finite, the loss is a spike, or no item counted.
    """
    step = result.facts.step
    if not result.num_items:
        raise SlurmTrainError(
            f"no item of step {step} counts: every target is passed over, as in {num_empty} of the last {of} steps",
            hint="check the targets of the data set; -100 marks those that do not count. Training continues after a "
            "few such steps, these are too many; a larger batch.global_size makes them rare",
        )
    if result.is_finite:
        raise SlurmTrainError(
            f"step {step} is a spike: loss {result.loss:.4g}, the limit was {result.facts.loss_limit:.4g}",
            hint="see events@*.jsonl for its samples; health.on_spike=skip or rollback goes on by itself",
        )
    loss_text = (
        f"loss {result.loss} ({result.num_non_finite} micro-batches)" if result.num_non_finite else "loss is finite"
    )
    raise SlurmTrainError(
        f"step {step} is not finite: {loss_text}, gradient norm {result.grad_norm}, lr {result.facts.lr:.3g}",
        hint="lower optim.lr or optim.grad_clip_norm (or leave float16), look at the samples of this step "
        "(events@*.jsonl), then resume: no checkpoint has this step; health.on_non_finite=skip or rollback "
        "goes on by itself",
    )
