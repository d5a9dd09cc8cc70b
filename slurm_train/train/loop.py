"""The loop over optimizer steps: what happens after each, and when it ends. `trainer` builds its parts.

A stop is acted upon only where every rank has read the same reduced value, so all ranks leave at the same boundary.
Near the time limit rank 0 requests a stop; the request goes out with the next gradient exchange, as after a signal.
Rank 0 also decides whether there is time to save, once all ranks have stopped.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from slurm_train.checkpoint.agreement import on_rank_zero
from slurm_train.data.batches import MicroBatch
from slurm_train.data.order import DIGEST_MODULUS, samples_digest
from slurm_train.distributed.group import use_steady_timeout
from slurm_train.distributed.seeds import mix
from slurm_train.rundir.events import append_event
from slurm_train.rundir.timing import (
    Measured,
    Notice,
    Spent,
    is_worth_saving,
    lead_s,
    read_measured,
    read_notice,
    time_left_s,
)
from slurm_train.train.context import Rank
from slurm_train.train.health import check_replicas
from slurm_train.train.saving import Position
from slurm_train.train.step import StepFacts, StepResult

if TYPE_CHECKING:
    from slurm_train.train.trainer import Trainer

_COLLECT_EVERY_STEPS = 100
# Time to end in order, so that the supervisor can bring the job back.
_END_S = 3.0
_READ_NOTICE_EVERY_S = 5.0


class Loop:
    """Runs a training from a position to its end or to an agreed stop.

    Args:
        trainer: what it drives.
        position: where it begins; kept up to date.
    """

    def __init__(self, trainer: Trainer, position: Position) -> None:
        self.position = position
        self.measures: dict[str, float] = {}
        """The newest evaluation."""
        self.not_saved = ""
        """Why the last position is in no checkpoint."""
        rank, config = trainer.rank, trainer.rank.config
        self._trainer, self._rank, self._clock = trainer, rank, rank.clock
        self._max_steps = config.train.max_steps
        self._check_every = config.health.check_replicas_every_steps
        self._seed = config.seed
        layout, splits_positions = rank.layout, config.parallel.sequence_parallel
        self._random_stream = layout.random_stream(rank.place.rank, splits_positions=splits_positions)
        self._owns_samples = layout.owns_samples(rank.place.rank)
        self._digests_samples = config.train.samples_digest
        self._digests: dict[int, int] = {}
        self._digest = 0
        self._stopping = self._settled = False
        self._waited_s = 0.0
        self._checked_step = 0
        self._batches = self._digesting(trainer.batches)

    def run(self) -> bool:
        """Trains; returns True when the last step is done and evaluated, False when the ranks agreed to stop.

        Either way the last position is in a durable checkpoint, unless `not_saved` says why not.
        """
        trainer = self._trainer
        if trainer.recorder is not None:
            trainer.recorder.restart_window()
        # A run that was killed between its last checkpoint and its result has only the evaluation left.
        if self.position.evaluation_due or self.position.step >= self._max_steps:
            self._evaluate()
        if self.position.step < self._max_steps:
            self._arrange()
        try:
            self.advance(self._max_steps)
            self._read_pending()
        finally:
            gc.unfreeze()
            gc.enable()
            if trainer.recorder is not None:
                trainer.recorder.book(data_wait_s=self._waited())
            trainer.step_times.keep()
        finished = self.position.step >= self._max_steps and not self.position.evaluation_due
        if finished or self._may_save():
            start = self._clock()
            self._before_save()
            trainer.checkpointer.save(self.position)
            self._pass_on_news()
            self._charge(start, "checkpoint_stall_s")
        if finished:
            trainer.checkpointer.close()
        return finished

    def advance(self, to_step: int) -> None:
        """Trains up to a step, or to an agreed stop."""
        while self.position.step < to_step and not self._stopping:
            self._step()
            if not self._rolled_back():
                self._after_step()
            self._pass_on_news()

    def _may_save(self) -> bool:
        """Returns whether there is time for the save of a stop; if not, waits for one under way while there is."""
        decision = self._trainer.stopping.decide(step=self.position.step)
        self.not_saved = decision.why
        if not decision.is_made:
            start = self._clock()
            self._trainer.checkpointer.finish_within(max(0.0, (decision.left_s or 0.0) - _END_S))
            self._pass_on_news()
            self._charge(start, "checkpoint_stall_s")
        return decision.is_made

    def _arrange(self) -> None:
        # The first micro-batch is looked at, not consumed: it is the first step's as well.
        start = self._clock()
        first = next(self._trainer.batches)
        self._trainer.stepper.passes.arrange(first.tensors)
        self._charge(start, "compile_s")
        self._batches = self._digesting(chain((first,), self._trainer.batches))

    def _step(self) -> None:
        trainer, position = self._trainer, self.position
        step, samples = position.step + 1, position.samples + trainer.global_batches.size_at(position.samples)
        # Dropout is keyed by the step, so a resumed run draws what an uninterrupted one would have drawn.
        _reseed(mix(self._seed, step, self._random_stream))
        facts = StepFacts(step, samples, trainer.schedule.lr_at(samples), trainer.health.loss_limit(position))
        self._rank.heartbeat.step = step
        self._digest = 0
        trainer.probe.begin()
        trainer.exchange.begin(step)
        passes = trainer.stepper.passes
        start, waited_s = self._clock(), passes.data_wait_s
        result = trainer.stepper.step(facts, self._batches)
        if self._settled:  # an attempt's first step is not counted, its time is start-up
            trainer.step_times.add(self._clock() - start, passes.data_wait_s - waited_s)
        if trainer.exchange.is_active or self._digests_samples:
            start = self._clock()
            trainer.exchange.after_update(step)
            if self._digests_samples:
                self._digests[step] = _sum_over_ranks(self._digest if self._owns_samples else 0)
            trainer.probe.exchange_s += self._clock() - start
        position.step, position.samples = step, samples
        if result is not None:
            self._take(result)
        trainer.probe.end()

    def _take(self, result: StepResult) -> None:
        """Reads a step's reduced values; on a GPU they are the previous step's, on every rank alike."""
        trainer, step = self._trainer, result.facts.step
        trainer.health.take(result, self.position)
        if result.applied:
            self.position.items += result.num_items
            self.position.loss = result.loss
        else:
            trainer.exchange.forget()
        self._stopping = self._stopping or result.stop
        digest = self._digests.pop(step, None)
        if trainer.recorder is None:
            return
        trainer.recorder.count(result)
        if step % self._rank.config.train.log_every_steps == 0 or step == self._max_steps:
            trainer.recorder.write(result, items=self.position.items, data_wait_s=self._waited(), digest=digest)
        trainer.stopping.look()

    def _after_step(self) -> None:
        trainer, step, eval_every = self._trainer, self.position.step, self._rank.config.train.eval_every_steps
        if not self._settled:
            self._settle()
        elif step % _COLLECT_EVERY_STEPS == 0:
            gc.collect(1)
        evaluates = step == self._max_steps or bool(eval_every and step % eval_every == 0)
        saves = trainer.save_pace.is_due(step) and step < self._max_steps
        # What is evaluated or saved has been read before, so nothing that went wrong gets into it.
        if (evaluates or saves) and self._read_pending():
            return
        if self._check_every and step % self._check_every == 0:
            self._check_replicas()
        if evaluates:
            self._evaluate()
        if saves and not self._stopping:
            start = self._clock()
            self._before_save()
            trainer.checkpointer.save_soon(self.position)
            costs = trainer.checkpointer
            self._say(trainer.save_pace.saved(step, blocked_s=costs.blocked_s, save_s=costs.last_save_s))
            self._charge(start, "checkpoint_stall_s")

    def _read_pending(self) -> bool:
        """Reads the values still under way; returns whether one of them took the run back."""
        result = self._trainer.stepper.drain()
        if result is not None:
            self._take(result)
        return self._rolled_back()

    def _rolled_back(self) -> bool:
        """Goes back to a checkpoint if a step asks for it; the samples consumed so far are not seen again."""
        trainer = self._trainer
        if trainer.health.bad_step is None:
            return False
        start = self._clock()
        trainer.stepper.forget()
        self._digests.clear()
        self._rank.heartbeat.mark("start")
        step_before = self.position.step
        self.position = trainer.health.roll_back(samples=self.position.samples)
        self._charge(start, "load_s")
        if trainer.recorder is not None:
            trainer.recorder.spent.rolled_back_steps += step_before - self.position.step
        return True

    def _settle(self) -> None:
        """After the first step everything that stays is there: take it out of the collector's sight.

        From now on garbage is collected at the same step on all ranks; one rank's pause would be everyone's.
        """
        config = self._rank.config
        self._settled = self._rank.heartbeat.settled = True
        use_steady_timeout(self._rank.collective_timeout_s(config.train.steady_timeout_s))
        if config.checkpoint.every_steps is not None:
            self._trainer.checkpointer.prepare()
        gc.collect()
        gc.freeze()
        gc.disable()

    def _evaluate(self) -> None:
        evaluator, recorder = self._trainer.evaluator, self._trainer.recorder
        if evaluator is None:
            return
        start = self._clock()
        self._trainer.exchange.settle()
        measures = evaluator.evaluate()
        self._charge(start, "evaluate_s")
        if measures is None:
            self._stopping = self.position.evaluation_due = True
            return
        self.position.evaluation_due = False
        self.measures = measures
        if recorder is not None:
            recorder.write_evaluation(self.position.step, self.position.samples, measures)
            self._say(f"step {self.position.step}: {format_measures(measures)}")
            spent = recorder.spent
            spent.longest_evaluation_s = max(spent.longest_evaluation_s, self._clock() - start)

    def _check_replicas(self) -> None:
        if self._checked_step != self.position.step:
            self._checked_step = self.position.step
            check_replicas(self._rank, self._trainer.model.parameters(), step=self.position.step)

    def _before_save(self) -> None:
        self._trainer.exchange.settle()
        if self._check_every:
            self._check_replicas()
        self._rank.heartbeat.mark("save")

    def _pass_on_news(self) -> None:
        """Passes on what became of background saves; one that ends the run asks for a stop, which all agree on."""
        checkpointer, recorder = self._trainer.checkpointer, self._trainer.recorder
        for line in checkpointer.news():
            self._say(line)
        if recorder is not None:
            recorder.spent.longest_save_s = max(recorder.spent.longest_save_s, checkpointer.longest_save_s)
        if checkpointer.fatal is not None:
            self._rank.stop.request()

    def _say(self, text: str | None) -> None:
        """Prints a line, if there is one, on rank 0."""
        if text is not None and self._trainer.recorder is not None:
            self._trainer.recorder.display.say(text)

    def _charge(self, start: float, cause: str) -> None:
        """Books the time since `start`, which was no step's."""
        if self._trainer.recorder is not None:
            self._trainer.recorder.skip(self._clock() - start, cause)

    def _waited(self) -> float:
        """Returns the seconds that steps waited for data since this was last asked."""
        before, self._waited_s = self._waited_s, self._trainer.stepper.passes.data_wait_s
        return self._waited_s - before

    def _digesting(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        return self._add_digests(batches) if self._digests_samples else batches

    def _add_digests(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        for batch in batches:
            self._digest = (self._digest + samples_digest(batch.indices)) % DIGEST_MODULUS
            yield batch


class StopSave(NamedTuple):
    """Whether the save of a stop is made."""

    is_made: bool
    left_s: float | None
    """Seconds until the ranks are killed, None where that is not known."""
    why: str
    """Why not, for the log; "" where it is made."""


class Stopping:
    """One rank's part in stopping by the clock, and in the decision whether there is time to save.

    Args:
        rank: this rank.
        spent: what rank 0 has measured so far; None on the others, which do not look at the clock.
        now: seconds since 1970.
    """

    def __init__(self, rank: Rank, *, spent: Spent | None, now: Callable[[], float] = time.time) -> None:
        self._rank, self._spent, self._now = rank, spent, now
        # Before the first save of this attempt the last one's is the best guess.
        self._before = read_measured(rank.run) if spent is not None else None
        self._notice, self._next_read_s = Notice(), 0.0

    def look(self) -> None:
        """Asks for a stop where the STOP file exists, or the end of the time limit comes near. Rank 0 only."""
        stop = self._rank.stop
        stop.look_at(self._rank.run.stop_file)
        notice = self._read()
        if notice.end_unix_s is None or stop.requested:
            return
        if notice.end_unix_s - self._now() <= lead_s(self._measured, limit_s=notice.limit_s):
            stop.request("clock")

    def decide(self, *, step: int) -> StopSave:
        """Returns whether to save where the ranks have stopped, and leaves an event that tells why. Collective."""
        return on_rank_zero(dist.group.WORLD, lambda: self._decide(step))

    @property
    def _measured(self) -> Measured | None:
        """What a stop takes, as slow as this attempt, or before its first save the one before it, has seen it."""
        spent = self._spent
        if spent is None or not spent.longest_save_s:
            return self._before
        return Measured(
            save_s=spent.longest_save_s, step_s=spent.longest_step_s, evaluation_s=spent.longest_evaluation_s
        )

    def _decide(self, step: int) -> StopSave:
        ask, measured = self._rank.stop.ask(), self._measured
        self._next_read_s = 0.0
        left_s = time_left_s(ask, self._read(), now_unix_s=self._now())
        save_s = measured.save_s if measured is not None else None
        is_made = is_worth_saving(left_s, save_s=save_s)
        facts = {"step": step, "asked_by": ask.by, "left_s": left_s, "save_s": save_s, "saved": is_made}
        append_event(self._rank.run, "stop", attempt=self._rank.attempt, **facts)
        return StopSave(is_made, left_s, "" if is_made else f"{left_s:.0f} s are left and a save takes {save_s:.0f} s")

    def _read(self) -> Notice:
        now = time.monotonic()
        if now >= self._next_read_s:
            self._next_read_s = now + _READ_NOTICE_EVERY_S
            self._notice = read_notice(self._rank.run, self._rank.attempt)
        return self._notice


def format_measures(measures: dict[str, float]) -> str:
    """Returns measures for people, e.g. "eval_loss 1.2345, eval_accuracy 0.9832"."""
    return ", ".join(f"{name} {value:.4f}" for name, value in measures.items())


def _reseed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch says no types here
        torch.cuda.manual_seed(seed)


def _sum_over_ranks(digest: int) -> int:
    total = torch.tensor(digest, dtype=torch.int64)
    dist.all_reduce(total)
    return int(total.item()) % DIGEST_MODULUS
