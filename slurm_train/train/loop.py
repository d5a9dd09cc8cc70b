"""The loop over optimizer steps: what happens after each, and when it ends. It assembles nothing.

A stop is acted upon only where every rank has read the same reduced value, so all ranks leave at the same boundary.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from slurm_train.data.order import DIGEST_MODULUS, samples_digest
from slurm_train.data.stream import MicroBatch
from slurm_train.distributed.seeds import mix
from slurm_train.rundir.heartbeat import Heartbeat
from slurm_train.rundir.step_times import StepTimes
from slurm_train.supervise.signals import StopFlag
from slurm_train.train.exchange import Exchange
from slurm_train.train.health import Finding, Health
from slurm_train.train.pace import PaceProbe
from slurm_train.train.recorder import Recorder
from slurm_train.train.save_pace import SavePace
from slurm_train.train.saving import Checkpointer, Position
from slurm_train.train.schedule import Schedule
from slurm_train.train.step import HasTensors, StepFacts, StepResult
from slurm_train.train.stopping import Stopping

_COLLECT_EVERY_STEPS = 100
# Time to end in order, so that the supervisor can bring the job back.
_LAST_WORDS_S = 3.0


class TakesSteps(Protocol):
    """Optimizer steps, see `step.Stepper`."""

    @property
    def data_wait_s(self) -> float:
        """Seconds that steps have waited for data."""

    def arrange(self, tensors: tuple[Tensor, ...]) -> None:
        """Gets ready before the first step. Collective."""

    def step(self, facts: StepFacts, batches: Iterator[HasTensors]) -> StepResult | None:
        """Takes a step. Collective."""

    def drain(self) -> StepResult | None:
        """Returns a result that is still on its way."""

    def forget(self) -> None:
        """Drops it."""


class Evaluates(Protocol):
    """Measures on held-out samples, see `evaluate.Evaluator`."""

    def evaluate(self) -> dict[str, float] | None:
        """Returns the measures, None if some rank was asked to stop meanwhile. Collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopParts:
    """What the loop drives."""

    stepper: TakesSteps
    batches: Iterator[MicroBatch]
    size_at: Callable[[int], int]
    """Samples of the global batch at a position."""
    schedule: Schedule
    checkpointer: Checkpointer
    save_pace: SavePace
    evaluator: Evaluates | None
    """None where there are no held-out samples."""
    recorder: Recorder | None
    """Rank 0's; None on the others."""
    stop: StopFlag
    stopping: Stopping
    on_first_step: Callable[[], None]
    """Called once, after the first step."""
    health: Health
    heartbeat: Heartbeat
    step_times: StepTimes
    probe: PaceProbe
    exchange: Exchange | None
    """How gradients are exchanged if not in full."""
    check_replicas: Callable[[int], None]
    """Raises on every rank if the ranks' parameters differ; given the step. Collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPace:
    """When what happens, in optimizer steps."""

    max_steps: int
    log_every: int
    eval_every: int | None
    seed: int
    random_stream: int
    """Number of this rank's stream of dropout."""
    counts: bool
    """Whether this rank counts for its samples; others may read the same."""
    digest: bool
    check_every: int | None


class Loop:
    """Runs a training from a position to its end or to an agreed stop.

    Args:
        parts: what it drives.
        pace: when what happens.
        position: where it begins; kept up to date.
    """

    def __init__(self, parts: LoopParts, *, pace: LoopPace, position: Position) -> None:
        self.position = position
        self.measures: dict[str, float] = {}
        """The newest evaluation."""
        self.not_saved = ""
        """Why the last position is in no checkpoint."""
        self._parts, self._pace = parts, pace
        self._clock = parts.heartbeat.clock
        self._stopping = self._settled = False
        self._digests: dict[int, int] = {}
        self._batches: Iterator[MicroBatch] = self._digesting(parts.batches) if pace.digest else parts.batches
        self._digest = 0
        self._waited_s = 0.0
        self._went_wrong: Finding | None = None
        self._checked_step = 0

    def run(self) -> bool:
        """Trains; returns True when the last step is done and evaluated, False when the ranks agreed to stop.

        Either way the last position is in a durable checkpoint, unless `not_saved` says why not.
        """
        if self._parts.recorder is not None:
            self._parts.recorder.restart_window()
        # A run that was killed between its last checkpoint and its result has only the evaluation left.
        if self.position.evaluation_due or self.position.step >= self._pace.max_steps:
            self._evaluate()
        if self.position.step < self._pace.max_steps:
            self._arrange()
        try:
            self.advance(self._pace.max_steps)
            self._settle_account()
        finally:
            gc.unfreeze()
            gc.enable()
            self._book()
            self._parts.step_times.keep()
        finished = self.position.step >= self._pace.max_steps and not self.position.evaluation_due
        if finished or self._may_save():
            self._save_last()
        if finished:
            self._parts.checkpointer.close()
        return finished

    def _may_save(self) -> bool:
        """Returns whether there is time for the save of a stop; if not, waits for one under way while there is."""
        verdict = self._parts.stopping.decide(step=self.position.step)
        self.not_saved = verdict.why
        if not verdict.is_made:
            start = self._clock()
            self._parts.checkpointer.finish_within(max(0.0, (verdict.left_s or 0.0) - _LAST_WORDS_S))
            self._hear()
            self._charge(start, "checkpoint_stall_s")
        return verdict.is_made

    def _arrange(self) -> None:
        # The first micro-batch is looked at, not consumed: it is the first step's as well.
        start = self._clock()
        first = next(self._parts.batches)
        self._parts.stepper.arrange(first.tensors)
        self._charge(start, "compile_s")
        batches = chain((first,), self._parts.batches)
        self._batches = self._digesting(batches) if self._pace.digest else batches

    def advance(self, to_step: int) -> None:
        """Trains up to a step, or to an agreed stop."""
        while self.position.step < to_step and not self._stopping:
            self._step()
            if not self._rolled_back():
                self._after_step()
            self._hear()

    def _step(self) -> None:
        position, pace = self.position, self._pace
        step, samples = position.step + 1, position.samples + self._parts.size_at(position.samples)
        # Dropout is keyed by the step, so a resumed run draws what an uninterrupted one would have drawn.
        _reseed(mix(pace.seed, step, pace.random_stream))
        limit = self._parts.health.loss_limit(position)
        facts = StepFacts(step, samples, self._parts.schedule.lr_at(samples), limit)
        self._parts.heartbeat.step = step
        self._digest = 0
        self._parts.probe.begin()
        if self._parts.exchange is not None:
            self._parts.exchange.begin(step)
        result = self._timed(facts)
        self._exchange_more(step)
        position.step, position.samples = step, samples
        if result is not None:
            self._take(result)
        self._parts.probe.end()

    def _timed(self, facts: StepFacts) -> StepResult | None:
        """Takes the step; an attempt's first is not counted, its time is start-up."""
        stepper, start = self._parts.stepper, self._clock()
        waited_s = stepper.data_wait_s
        result = stepper.step(facts, self._batches)
        if self._settled:
            self._parts.step_times.add(self._clock() - start, stepper.data_wait_s - waited_s)
        return result

    def _exchange_more(self, step: int) -> None:
        """Does what has to be exchanged beside the gradients."""
        exchange, digest = self._parts.exchange, self._pace.digest
        if exchange is None and not digest:
            return
        start = self._clock()
        if exchange is not None:
            exchange.after_update(step)
        if digest:
            self._digests[step] = _sum_over_ranks(self._digest if self._pace.counts else 0)
        self._parts.probe.exchange_s += self._clock() - start

    def _take(self, result: StepResult) -> None:
        """Reads a step's reduced values; on a GPU they are the previous step's, on every rank alike."""
        finding = self._parts.health.take(result, self.position)
        if finding is not None and finding.action == "rollback":
            self._went_wrong = finding
        if result.applied:
            self.position.items += result.num_items
            self.position.loss = result.loss
        elif self._parts.exchange is not None:
            self._parts.exchange.forget()
        self._stopping = self._stopping or result.stop
        digest = self._digests.pop(result.facts.step, None)
        recorder = self._parts.recorder
        if recorder is None:
            return
        recorder.count(result)
        if result.facts.step % self._pace.log_every == 0 or result.facts.step == self._pace.max_steps:
            recorder.write(result, items=self.position.items, data_wait_s=self._waited(), digest=digest)
        self._parts.stopping.look()

    def _after_step(self) -> None:
        step, pace = self.position.step, self._pace
        if not self._settled:
            self._settle()
        elif step % _COLLECT_EVERY_STEPS == 0:
            gc.collect(1)
        evaluates = step == pace.max_steps or bool(pace.eval_every and step % pace.eval_every == 0)
        saves = self._parts.save_pace.is_due(step) and step < pace.max_steps
        # What is evaluated or saved has been read before, so nothing that went wrong gets into it.
        if (evaluates or saves) and self._settle_account():
            return
        if pace.check_every and step % pace.check_every == 0:
            self._check_replicas()
        if evaluates:
            self._evaluate()
        if saves and not self._stopping:
            self._save()

    def _check_replicas(self) -> None:
        if self._checked_step != self.position.step:
            self._checked_step = self.position.step
            self._parts.check_replicas(self.position.step)

    def _rolled_back(self) -> bool:
        """Goes back to a checkpoint if a step asks for it; the samples consumed so far are not seen again."""
        finding, self._went_wrong = self._went_wrong, None
        if finding is None:
            return False
        start = self._clock()
        self._parts.stepper.forget()
        self._digests.clear()
        self._parts.heartbeat.mark("start")
        step_before = self.position.step
        self.position = self._parts.health.roll_back(finding, samples=self.position.samples)
        self._charge(start, "load_s")
        if (recorder := self._parts.recorder) is not None:
            recorder.spent.rolled_back_steps += step_before - self.position.step
        return True

    def _settle(self) -> None:
        """After the first step everything that stays is there: take it out of the collector's sight.

        From now on garbage is collected at the same step on all ranks; one rank's pause would be everyone's.
        """
        self._settled = self._parts.heartbeat.settled = True
        self._parts.on_first_step()
        gc.collect()
        gc.freeze()
        gc.disable()

    def _evaluate(self) -> None:
        evaluator = self._parts.evaluator
        if evaluator is None:
            return
        start = self._clock()
        self._settle_exchange()
        measures = evaluator.evaluate()
        self._charge(start, "evaluate_s")
        if measures is None:
            self._stopping = self.position.evaluation_due = True
            return
        self.position.evaluation_due = False
        self.measures = measures
        if (recorder := self._parts.recorder) is not None:
            recorder.write_evaluation(self.position.step, self.position.samples, measures)
            recorder.display.say(f"step {self.position.step}: {in_words(measures)}")
            spent = recorder.spent
            spent.longest_evaluation_s = max(spent.longest_evaluation_s, self._clock() - start)

    def _hear(self) -> None:
        """Passes on what became of background saves; one that ends the run asks for a stop, which all agree on."""
        checkpointer, recorder = self._parts.checkpointer, self._parts.recorder
        for line in checkpointer.news():
            if recorder is not None:
                recorder.display.say(line)
        if recorder is not None:
            recorder.spent.longest_save_s = max(recorder.spent.longest_save_s, checkpointer.longest_save_s)
        if checkpointer.fatal is not None:
            self._parts.stop.request()

    def _save(self) -> None:
        start = self._clock()
        self._before_save()
        self._parts.checkpointer.save_soon(self.position)
        news = self._parts.save_pace.saved(self.position.step, self._parts.checkpointer)
        if news is not None and self._parts.recorder is not None:
            self._parts.recorder.display.say(news)
        self._charge(start, "checkpoint_stall_s")

    def _save_last(self) -> None:
        """Saves where the loop ends, and waits until that is durable."""
        start = self._clock()
        self._before_save()
        self._parts.checkpointer.save(self.position)
        self._hear()
        self._charge(start, "checkpoint_stall_s")

    def _settle_exchange(self) -> None:
        if self._parts.exchange is not None:
            self._parts.exchange.settle()

    def _before_save(self) -> None:
        self._settle_exchange()
        if self._pace.check_every:
            self._check_replicas()
        self._parts.heartbeat.mark("save")

    def _charge(self, start: float, cause: str) -> None:
        """Books the time since `start`, which was no step's."""
        if (recorder := self._parts.recorder) is not None:
            recorder.skip(self._clock() - start, cause)

    def _book(self) -> None:
        """Books the steps since the last line of metrics."""
        if (recorder := self._parts.recorder) is not None:
            recorder.book(data_wait_s=self._waited())

    def _waited(self) -> float:
        """Returns the seconds that steps waited for data since this was last asked."""
        before, self._waited_s = self._waited_s, self._parts.stepper.data_wait_s
        return self._waited_s - before

    def _settle_account(self) -> bool:
        """Reads the values still under way; returns whether one of them took the run back."""
        result = self._parts.stepper.drain()
        if result is not None:
            self._take(result)
        return self._rolled_back()

    def _digesting(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        for batch in batches:
            self._digest = (self._digest + samples_digest(batch.indices)) % DIGEST_MODULUS
            yield batch


def _reseed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch says no types here
        torch.cuda.manual_seed(seed)


def _sum_over_ranks(digest: int) -> int:
    total = torch.tensor(digest, dtype=torch.int64)
    dist.all_reduce(total)
    return int(total.item()) % DIGEST_MODULUS


def in_words(measures: dict[str, float]) -> str:
    """Returns measures for people, e.g. "eval_loss 1.2345, eval_accuracy 0.9832"."""
    return ", ".join(f"{name} {value:.4f}" for name, value in measures.items())
