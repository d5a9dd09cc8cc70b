"""The built-in trainer: the loop over optimizer steps, what happens after each, and when it ends. `build` makes it.

A stop is acted upon only where every rank has read the same reduced value, so all ranks leave at the same boundary.
Near the time limit rank 0 requests a stop; the request goes out with the next gradient exchange, as after a signal.
Rank 0 also decides whether there is time to save, once all ranks have stopped.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

from slurm_train.checkpoint.agreement import on_rank_zero
from slurm_train.data.batches import GlobalBatches, MicroBatch
from slurm_train.data.order import DIGEST_MODULUS, samples_digest
from slurm_train.distributed.group import use_steady_timeout
from slurm_train.distributed.seeds import mix
from slurm_train.rundir.events import append_event
from slurm_train.rundir.heartbeat import AwakeClock
from slurm_train.rundir.timing import (
    Notice,
    Spent,
    StepTimes,
    lead_s,
    read_measured,
    read_notice,
    time_left_s,
)
from slurm_train.train.context import Rank
from slurm_train.train.evaluate import Evaluator
from slurm_train.train.health import Health, check_replicas
from slurm_train.train.metrics import PaceProbe, Recorder, format_measures
from slurm_train.train.optimizer import Schedule
from slurm_train.train.saving import Checkpointer, Position, SavePace
from slurm_train.train.step import Exchange, StepFacts, Stepper, StepResult

_COLLECT_EVERY_STEPS = 100
# Time to end in order, so that the supervisor can bring the job back.
_END_S = 3.0
_READ_NOTICE_EVERY_S = 5.0


@dataclass(slots=True, kw_only=True, eq=False)
class Trainer:
    """All that one rank of a training holds; runs it from a position to its end or to an agreed stop."""

    rank: Rank
    position: Position
    """Kept up to date."""
    model: nn.Module
    """Whole, or this rank's part of it."""
    exchange: Exchange
    checkpointer: Checkpointer
    save_pace: SavePace
    global_batches: GlobalBatches
    """The samples of every step."""
    batches: Iterator[MicroBatch]
    """This rank's micro-batches."""
    health: Health
    stepper: Stepper
    schedule: Schedule
    evaluator: Evaluator | None
    """None where there are no held-out samples, or none shall be evaluated."""
    recorder: Recorder | None
    """Rank 0's; None on the others."""
    stopping: Stopping
    step_times: StepTimes
    probe: PaceProbe
    measures: dict[str, float] = field(default_factory=dict)
    """The newest evaluation."""
    not_saved: str = ""
    """Why the last position is in no checkpoint."""
    _clock: AwakeClock = field(init=False)
    _max_steps: int = field(init=False)
    _random_stream: int = field(init=False)
    _digests: dict[int, int] = field(default_factory=dict)
    """Of steps whose result has not been read."""
    _digest: int = 0
    """Of this rank's samples of the present step."""
    _stops: bool = False
    _settled: bool = False
    _waited_s: float = 0.0
    _checked_step: int = 0

    def __post_init__(self) -> None:
        """Looks up what every step needs."""
        rank, config = self.rank, self.rank.config
        self._clock, self._max_steps = rank.clock, config.train.max_steps
        by_positions = config.parallel.sequence_parallel
        self._random_stream = rank.layout.random_stream(rank.place.rank, splits_positions=by_positions)

    def run(self) -> bool:
        """Trains; returns True when the last step is done and evaluated, False when the ranks agreed to stop.

        Either way the last position is in a durable checkpoint, unless `not_saved` says why not.
        """
        if self.recorder is not None:
            self.recorder.restart_window()
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
            if self.recorder is not None:
                self.recorder.book(data_wait_s=self._waited())
            self.step_times.keep()
        finished = self.position.step >= self._max_steps and not self.position.evaluation_due
        if finished or self._may_save():
            start = self._clock()
            self._before_save()
            self.checkpointer.save(self.position)
            self._pass_on_news()
            self._charge(start, "checkpoint_stall_s")
        if finished:
            self.checkpointer.close()
        return finished

    def advance(self, to_step: int) -> None:
        """Trains up to a step, or to an agreed stop."""
        while self.position.step < to_step and not self._stops:
            self._step()
            if not self._rolled_back():
                self._after_step()
            self._pass_on_news()

    def _may_save(self) -> bool:
        """Returns whether there is time for the save of a stop; if not, waits for one under way while there is."""
        left_s, self.not_saved = self.stopping.decide(step=self.position.step)
        if self.not_saved:
            start = self._clock()
            self.checkpointer.finish_within(max(0.0, (left_s or 0.0) - _END_S))
            self._pass_on_news()
            self._charge(start, "checkpoint_stall_s")
        return not self.not_saved

    def _arrange(self) -> None:
        # The first micro-batch is looked at, not consumed: it is the first step's as well.
        start = self._clock()
        first = next(self.batches)
        self.stepper.passes.arrange(first.tensors)
        self._charge(start, "compile_s")
        batches = chain((first,), self.batches)
        self.batches = self._add_digests(batches) if self.rank.config.train.samples_digest else batches

    def _step(self) -> None:
        position = self.position
        step, samples = position.step + 1, position.samples + self.global_batches.size_at(position.samples)
        # Dropout is keyed by the step, so a resumed run draws what an uninterrupted one would have drawn.
        _reseed(mix(self.rank.config.seed, step, self._random_stream))
        facts = StepFacts(step, samples, self.schedule.lr_at(samples), self.health.loss_limit(position))
        self.rank.heartbeat.step = step
        self._digest = 0
        self.probe.begin()
        self.exchange.begin(step)
        passes = self.stepper.passes
        start, waited_s = self._clock(), passes.data_wait_s
        result = self.stepper.step(facts, self.batches)
        if self._settled:  # an attempt's first step is not counted, its time is start-up
            self.step_times.add(self._clock() - start, passes.data_wait_s - waited_s)
        digests = self.rank.config.train.samples_digest
        if self.exchange.is_active or digests:
            start = self._clock()
            self.exchange.after_update(step)
            if digests:
                owns_samples = self.rank.layout.owns_samples(self.rank.place.rank)
                self._digests[step] = _sum_over_ranks(self._digest if owns_samples else 0)
            self.probe.exchange_s += self._clock() - start
        position.step, position.samples = step, samples
        if result is not None:
            self._take(result)
        self.probe.end()

    def _take(self, result: StepResult) -> None:
        """Reads a step's reduced values; on a GPU they are the previous step's, on every rank alike."""
        step = result.facts.step
        self.health.take(result, self.position)
        if result.applied:
            self.position.items += result.num_items
            self.position.loss = result.loss
        else:
            self.exchange.forget()
        self._stops = self._stops or result.stop
        digest = self._digests.pop(step, None)
        if self.recorder is None:
            return
        self.recorder.count(result)
        if step % self.rank.config.train.log_every_steps == 0 or step == self._max_steps:
            self.recorder.write(result, items=self.position.items, data_wait_s=self._waited(), digest=digest)
        self.stopping.look()

    def _after_step(self) -> None:
        step, eval_every = self.position.step, self.rank.config.train.eval_every_steps
        if not self._settled:
            self._settle()
        elif step % _COLLECT_EVERY_STEPS == 0:
            gc.collect(1)
        evaluates = step == self._max_steps or bool(eval_every and step % eval_every == 0)
        saves = self.save_pace.is_due(step) and step < self._max_steps
        # What is evaluated or saved has been read before, so nothing that went wrong gets into it.
        if (evaluates or saves) and self._read_pending():
            return
        check_every = self.rank.config.health.check_replicas_every_steps
        if check_every and step % check_every == 0:
            self._check_replicas()
        if evaluates:
            self._evaluate()
        if saves and not self._stops:
            start = self._clock()
            self._before_save()
            self.checkpointer.save_soon(self.position)
            costs = self.checkpointer
            self._say(self.save_pace.saved(step, blocked_s=costs.blocked_s, save_s=costs.last_save_s))
            self._charge(start, "checkpoint_stall_s")

    def _read_pending(self) -> bool:
        """Reads the values still under way; returns whether one of them took the run back."""
        result = self.stepper.drain()
        if result is not None:
            self._take(result)
        return self._rolled_back()

    def _rolled_back(self) -> bool:
        """Goes back to a checkpoint if a step asks for it; the samples consumed so far are not seen again."""
        if self.health.bad_step is None:
            return False
        start = self._clock()
        self.stepper.forget()
        self._digests.clear()
        self.rank.heartbeat.mark("start")
        step_before = self.position.step
        self.position = self.health.roll_back(samples=self.position.samples)
        self._charge(start, "load_s")
        if self.recorder is not None:
            self.recorder.spent.rolled_back_steps += step_before - self.position.step
        return True

    def _settle(self) -> None:
        """After the first step everything that stays is there: take it out of the collector's sight.

        From now on garbage is collected at the same step on all ranks; one rank's pause would be everyone's.
        """
        config = self.rank.config
        self._settled = self.rank.heartbeat.settled = True
        use_steady_timeout(self.rank.collective_timeout_s(config.train.steady_timeout_s))
        if config.checkpoint.every_steps is not None:
            self.checkpointer.prepare()
        gc.collect()
        gc.freeze()
        gc.disable()

    def _evaluate(self) -> None:
        evaluator, recorder = self.evaluator, self.recorder
        if evaluator is None:
            return
        start = self._clock()
        self.exchange.settle()
        measures = evaluator.evaluate()
        self._charge(start, "evaluate_s")
        if measures is None:
            self._stops = self.position.evaluation_due = True
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
            check_replicas(self.rank, self.model.parameters(), step=self.position.step)

    def _before_save(self) -> None:
        self.exchange.settle()
        if self.rank.config.health.check_replicas_every_steps:
            self._check_replicas()
        self.rank.heartbeat.mark("save")

    def _pass_on_news(self) -> None:
        """Passes on what became of background saves; one that ends the run asks for a stop, which all agree on."""
        checkpointer, recorder = self.checkpointer, self.recorder
        for line in checkpointer.news():
            self._say(line)
        if recorder is not None:
            recorder.spent.longest_save_s = max(recorder.spent.longest_save_s, checkpointer.longest_save_s)
        if checkpointer.fatal is not None:
            self.rank.stop.request()

    def _say(self, text: str | None) -> None:
        """Prints a line, if there is one, on rank 0."""
        if text is not None and self.recorder is not None:
            self.recorder.display.say(text)

    def _charge(self, start: float, cause: str) -> None:
        """Books the time since `start`, which was no step's."""
        if self.recorder is not None:
            self.recorder.skip(self._clock() - start, cause)

    def _waited(self) -> float:
        """Returns the seconds that steps waited for data since this was last asked."""
        before, self._waited_s = self._waited_s, self.stepper.passes.data_wait_s
        return self._waited_s - before

    def _add_digests(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        for batch in batches:
            self._digest = (self._digest + samples_digest(batch.indices)) % DIGEST_MODULUS
            yield batch


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

    def decide(self, *, step: int) -> tuple[float | None, str]:
        """Decides whether to save where the ranks have stopped, and leaves an event that tells why. Collective.

        Returns:
            Seconds until the ranks are killed, None where that is not known; and why not to save, "" to save.
        """
        return on_rank_zero(dist.group.WORLD, lambda: self._decide(step))

    @property
    def _measured(self) -> Spent | None:
        """The longest times of this attempt; before its first save those of the attempt before it."""
        spent = self._spent
        return spent if spent is not None and spent.longest_save_s else self._before

    def _decide(self, step: int) -> tuple[float | None, str]:
        (asked_by, since_s), measured = self._rank.stop.ask(), self._measured
        self._next_read_s = 0.0
        left_s = time_left_s(self._read(), asked_by=asked_by, since_s=since_s, now_unix_s=self._now())
        save_s = measured.longest_save_s if measured is not None else None
        # What is not known does not forbid it.
        is_made = left_s is None or not save_s or save_s <= left_s
        facts = {"step": step, "asked_by": asked_by, "left_s": left_s, "save_s": save_s, "saved": is_made}
        append_event(self._rank.run, "stop", attempt=self._rank.attempt, **facts)
        return left_s, "" if is_made else f"{left_s:.0f} s are left and a save takes {save_s:.0f} s"

    def _read(self) -> Notice:
        now = time.monotonic()
        if now >= self._next_read_s:
            self._next_read_s = now + _READ_NOTICE_EVERY_S
            self._notice = read_notice(self._rank.run, self._rank.attempt)
        return self._notice


def _reseed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch says no types here
        torch.cuda.manual_seed(seed)


def _sum_over_ranks(digest: int) -> int:
    total = torch.tensor(digest, dtype=torch.int64)
    dist.all_reduce(total)
    return int(total.item()) % DIGEST_MODULUS
