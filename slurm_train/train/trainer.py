"""The built-in trainer: the loop over optimizer steps, what happens after each, and when it ends. `build` makes it.

A stop is acted upon only where every rank has read the same reduced value, so all ranks leave at the same boundary.
`stopping` requests one near the time limit, and decides whether there is time to save.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

from slurm_train.config.batch import num_batches
from slurm_train.data.batches import GlobalBatches, MicroBatch
from slurm_train.data.order import DIGEST_MODULUS, samples_digest
from slurm_train.distributed.group import use_timeout
from slurm_train.distributed.seeds import mix
from slurm_train.rundir.heartbeat import AwakeClock
from slurm_train.rundir.timing import StepTimes
from slurm_train.session.stopping import Stopping
from slurm_train.train.buffers import UnsavedState
from slurm_train.train.callbacks import Callback, Training
from slurm_train.train.compile_cache import CompileCache
from slurm_train.train.context import Rank, gather
from slurm_train.train.evaluate import Evaluator
from slurm_train.train.health import Health, check_replicas, refuse
from slurm_train.train.metrics import PaceProbe, Recorder, format_measures
from slurm_train.train.optimizer import Schedule, averaged, to_average
from slurm_train.train.position import Position
from slurm_train.train.saving import Checkpointer, SavePace
from slurm_train.train.step import StepFacts, Stepper, StepResult

_COLLECT_EVERY_STEPS = 100
# What has lived through a collection of the young is freed by a full one only.
_COLLECT_ALL_EVERY_STEPS = 1000
_NUM_NAMED = 5
# Time to end in order, so that the supervisor can bring the job back.
_END_S = 3.0


@dataclass(slots=True, kw_only=True, eq=False)
class Trainer:
    """All that one rank of a training holds; runs it from a position to its end or to an agreed stop.

    Wide because it is the place where the parts of a training meet: each decides one thing, and this orders them.
    """

    rank: Rank
    position: Position
    """Kept up to date."""
    model: nn.Module
    """Whole, or this rank's part of it."""
    max_steps: int
    """Of the whole run."""
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
    callbacks: Mapping[str, Callback]
    compile_cache: CompileCache
    newest: StepResult | None = None
    """The newest step that was read."""
    measures: dict[str, float] = field(default_factory=dict)
    """The newest evaluation."""
    not_saved: str = ""
    """Why the last position is in no checkpoint."""
    _clock: AwakeClock = field(init=False)
    _random_stream: int = field(init=False)
    _digests: dict[int, int] = field(default_factory=dict)
    """Of steps whose result has not been read."""
    _digest: int = 0
    """Of this rank's samples of the present step."""
    _stops: bool = False
    _saves_now: bool = False
    _end_reason: str = ""
    _settled: bool = False
    _waited_s: float = 0.0
    _checked_step: int = 0
    _unsaved: UnsavedState | None = None
    """Until the first step is done."""

    def __post_init__(self) -> None:
        """Looks up what every step needs."""
        rank = self.rank
        config = rank.config
        self._clock = rank.clock
        self._stops = bool(self.position.ended)
        by_positions = config.parallel.sequence_parallel
        self._random_stream = rank.layout.random_stream(rank.place.rank, splits_positions=by_positions)

    def run(self) -> bool:
        """Trains; returns True when the run is finished and evaluated, False when the ranks agreed to stop.

        Either way the last position is in a durable checkpoint, unless `not_saved` says why not.
        """
        self._call("on_start")
        if self.recorder is not None:
            self.recorder.restart_window()
        # A run that was killed between its last checkpoint and its result has only the evaluation left.
        if self.position.evaluation_due or self._is_over:
            self._evaluate()
        if not self._is_over:
            self._look_at_first_batch()
        try:
            self.advance(self.max_steps)
            self._read_pending()
            if self.callbacks and self._agrees_to_end():
                self._evaluate()
        finally:
            gc.unfreeze()
            gc.enable()
            if self.recorder is not None:
                self.recorder.book(data_wait_s=self._waited())
            self.step_times.keep()
        finished = self._is_over and not self.position.evaluation_due
        if finished and self.newest is not None and not self.position.items:
            refuse(self.newest, num_empty=self.position.step, of=self.position.step)
        self._call("on_end" if finished else "on_stop")
        if finished:
            to_average(self.stepper.optimizer)
        if finished or self._may_save():
            start = self._clock()
            self._before_save()
            self.checkpointer.save(self.position)
            self._pass_on_news()
            self.book_time(start, "checkpoint_stall_s")
        if finished:
            self.checkpointer.close()
        return finished

    def advance(self, to_step: int) -> None:
        """Trains up to a step, or to an agreed stop."""
        if not self._settled:
            self._unsaved = UnsavedState(self.model)
        while self.position.step < to_step and not self._stops:
            self._step()
            if not self._rolled_back():
                self._after_step()
            self._pass_on_news()

    def end_early(self, reason: str) -> None:
        """Asks for the end of the run, as finished: for callbacks, on one rank or on all.

        After an evaluation the ranks agree at once, else with the next step, which is then evaluated.

        Args:
            reason: for the result, e.g. "eval_loss has not improved".
        """
        self._end_reason = self._end_reason or reason
        self.rank.stop.request("callback")

    def ask_to_save(self) -> None:
        """Asks for a checkpoint of this step in the run directory: for callbacks, on all ranks at the same step."""
        self._saves_now = True

    @property
    def _is_over(self) -> bool:
        return self.position.step >= self.max_steps or bool(self.position.ended)

    def _call(self, hook: str, *values: object) -> None:
        training: Training = self
        for callback in self.callbacks.values():
            getattr(callback, hook)(training, *values)

    def _agrees_to_end(self) -> bool:
        """Returns whether the run ends here because a callback of some rank asked for it before now. Collective."""
        if self._is_over:
            return False
        self.position.ended = next(filter(None, gather(self._end_reason)), "")
        # The request has done its work; the evaluation of the end is not to be broken off by it.
        self.rank.stop.withdraw("callback")
        self._stops = self._stops or self._is_over
        return self._is_over

    def _may_save(self) -> bool:
        """Returns whether there is time for the save of a stop; if not, waits for one under way while there is."""
        left_s, self.not_saved = self.stopping.decide_save(step=self.position.step)
        if self.not_saved:
            start = self._clock()
            self.checkpointer.finish_within(max(0.0, (left_s or 0.0) - _END_S))
            self._pass_on_news()
            self.book_time(start, "checkpoint_stall_s")
        return not self.not_saved

    def _look_at_first_batch(self) -> None:
        # The first micro-batch is looked at, not consumed: it is the first step's as well.
        start = self._clock()
        first = next(self.batches)
        self.say(self.stepper.passes.arrange(first.tensors, bucket_order=self.position.bucket_order))
        self.book_time(start, "compile_s")
        batches = chain((first,), self.batches)
        self.batches = self._add_digests(batches) if self.rank.config.train.samples_digest else batches

    def _step(self) -> None:
        position = self.position
        step = position.step + 1
        samples = position.samples
        growth = self.rank.config.batch.growth
        num_taken = num_batches(growth, step) - num_batches(growth, step - 1)
        for _ in range(num_taken):
            samples += self.global_batches.size_at(samples)
        # Dropout is keyed by the step, so a resumed run draws what an uninterrupted one would have drawn.
        _reseed(mix(self.rank.config.seed, step, self._random_stream))
        facts = StepFacts(
            step,
            samples,
            self.schedule.lr_at(samples),
            self.health.loss_limit(position),
            size=samples - position.samples,
            num_batches=num_taken,
        )
        self.rank.heartbeat.step = step
        self._digest = 0
        self.probe.begin()
        passes = self.stepper.passes
        start = self._clock()
        waited_s = passes.data_wait_s
        result = self.stepper.step(facts, self.batches)
        if self._settled:  # an attempt's first step is not counted, its time is start-up
            self.step_times.add(self._clock() - start, passes.data_wait_s - waited_s)
        if self.rank.config.train.samples_digest:
            start = self._clock()
            owns_samples = self.rank.layout.owns_samples(self.rank.place.rank)
            self._digests[step] = _sum_over_ranks(self._digest if owns_samples else 0)
            self.probe.exchange_s += self._clock() - start
        position.step = step
        position.samples = samples
        if result is not None:
            self._read_result(result)
        self.probe.end()

    def _read_result(self, result: StepResult) -> None:
        """Reads a step's reduced values; on a GPU they are the previous step's, on every rank alike."""
        step = result.facts.step
        self.newest = result
        self.health.take(result, self.position)
        if result.applied:
            self.position.items += result.num_items
            self.position.loss = result.loss
        self._stops = self._stops or result.stop
        digest = self._digests.pop(step, None)
        if self.recorder is None:
            return
        self.recorder.count(result)
        if step % self.rank.config.train.log_every_steps == 0 or step == self.max_steps:
            self.recorder.write(result, items=self.position.items, data_wait_s=self._waited(), digest=digest)
        self.stopping.look()

    def _after_step(self) -> None:
        step = self.position.step
        eval_every = self.rank.config.train.eval_every_steps
        self.checkpointer.move_on()
        if self.callbacks:
            self._call("on_step_end")
        if not self._settled:
            self._end_start_up()
        else:
            collect_garbage(step)
        evaluates = step == self.max_steps or bool(eval_every and step % eval_every == 0)
        saves = self.save_pace.is_due(step)
        # What is evaluated or saved has been read before, so nothing that went wrong gets into it.
        if (evaluates or saves or self._saves_now) and self._read_pending():
            return
        check_every = self.rank.config.health.check_replicas_every_steps
        if check_every and step % check_every == 0:
            self._check_replicas()
        if evaluates:
            self._evaluate()
        if (saves or self._saves_now) and step < self.max_steps and not self._stops:
            start = self._clock()
            self._before_save()
            self.checkpointer.save_soon(self.position, is_kept=self._saves_now)
            self._saves_now = False
            costs = self.checkpointer
            self.say(self.save_pace.saved(step, blocked_s=costs.blocked_s, save_s=costs.last_save_s))
            self.book_time(start, "checkpoint_stall_s")

    def _read_pending(self) -> bool:
        """Reads the values still under way; returns whether one of them took the run back."""
        result = self.stepper.drain()
        if result is not None:
            self._read_result(result)
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
        scale = self.stepper.scale
        if scale is not None:
            scale.restore(self.position.loss_scale)
        self.book_time(start, "load_s")
        if self.recorder is not None:
            self.recorder.spent.rolled_back_steps += step_before - self.position.step
        return True

    def _end_start_up(self) -> None:
        """After the first step everything that stays is there: take it out of the collector's sight.

        From now on garbage is collected at the same step on all ranks; one rank's pause would be everyone's.
        """
        config = self.rank.config
        self.position.bucket_order = self.stepper.passes.bucket_order or self.position.bucket_order
        self._share_unsaved_state()
        self.compile_cache.keep()
        self._settled = self.rank.heartbeat.settled = True
        use_timeout(self.rank.collective_timeout_s(config.train.steady_timeout_s))
        if config.checkpoint.every_steps is not None:
            self.checkpointer.prepare()
        gc.collect()
        gc.freeze()
        gc.disable()

    def _share_unsaved_state(self) -> None:
        """Finds what the first steps have changed and no checkpoint has, and says so. Collective."""
        assert self._unsaved is not None
        changed = {name for names in gather(self._unsaved.changed_buffers()) for name in names}
        self.stepper.passes.buffers.add(changed)
        names = [*sorted(changed), *self._unsaved.changed_numbers()]
        self._unsaved = None
        if names:
            text = ", ".join(names[:_NUM_NAMED]) + (", ..." if len(names) > _NUM_NAMED else "")
            self.say(
                f"training changes {text} of the model, which no checkpoint has: a resume begins with the first value; "
                "register_buffer (persistent) or get_extra_state saves it"
            )

    def _evaluate(self) -> None:
        evaluator = self.evaluator
        recorder = self.recorder
        if evaluator is None:
            return
        start = self._clock()
        contexts = [averaged(self.stepper.optimizer), *(callback.evaluating() for callback in self.callbacks.values())]
        measures = evaluator.evaluate(within=contexts)
        self.book_time(start, "evaluate_s")
        if measures is None:
            self._stops = self.position.evaluation_due = True
            return
        self.position.evaluation_due = False
        self.measures = measures
        if recorder is not None:
            recorder.write_evaluation(self.position.step, self.position.samples, measures)
            self.say(f"step {self.position.step}: {format_measures(measures)}")
            spent = recorder.spent
            spent.longest_evaluation_s = max(spent.longest_evaluation_s, self._clock() - start)
        if self.callbacks:
            self._call("on_evaluation", measures)
            self._agrees_to_end()

    def _check_replicas(self) -> None:
        if self._checked_step != self.position.step:
            self._checked_step = self.position.step
            check_replicas(self.rank, self.model.parameters(), step=self.position.step)

    def _before_save(self) -> None:
        scale = self.stepper.scale
        self.position.loss_scale = None if scale is None else scale.state()
        if self.rank.config.health.check_replicas_every_steps:
            self._check_replicas()
        self._call("on_save")
        self.rank.heartbeat.mark("save")

    def _pass_on_news(self) -> None:
        """Passes on what became of background saves; one that ends the run asks for a stop, which all agree on."""
        checkpointer = self.checkpointer
        recorder = self.recorder
        for line in checkpointer.news():
            self.say(line)
        if recorder is not None:
            recorder.spent.longest_save_s = max(recorder.spent.longest_save_s, checkpointer.longest_save_s)
        if checkpointer.fatal is not None:
            self.rank.stop.request()

    def say(self, text: str | None) -> None:
        """Prints a line, if there is one, on rank 0."""
        if text is not None and self.recorder is not None:
            self.recorder.display.say(text)

    def book_time(self, start: float, cause: str) -> None:
        """Books the time since `start`, which was no step's."""
        if self.recorder is not None:
            self.recorder.skip(self._clock() - start, cause)

    def _waited(self) -> float:
        """Returns the seconds that steps waited for data since this was last asked."""
        before = self._waited_s
        self._waited_s = self.stepper.passes.data_wait_s
        return self._waited_s - before

    def _add_digests(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        for batch in batches:
            self._digest = (self._digest + samples_digest(batch.indices)) % DIGEST_MODULUS
            yield batch


def collect_garbage(step: int) -> None:
    """Collects what has become garbage, after some steps; the collector itself is off."""
    if step % _COLLECT_EVERY_STEPS == 0:
        gc.collect(2 if step % _COLLECT_ALL_EVERY_STEPS == 0 else 1)


def _reseed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch says no types here
        torch.cuda.manual_seed(seed)


def _sum_over_ranks(digest: int) -> int:
    total = torch.tensor(digest, dtype=torch.int64)
    dist.all_reduce(total)
    return int(total.item()) % DIGEST_MODULUS
