"""The built-in trainer: the loop over optimizer steps, what happens after each, and when it ends. `build` makes it.

A stop is acted upon only where every rank has read the same reduced value, so all ranks leave at the same boundary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from slurm_train.checkpoint.resumption import Resumption
from slurm_train.checkpoint.saver import Saver
from slurm_train.checkpoint.saves import Copied, Saves
from slurm_train.distributed.pipeline import refuse_saved_buffers
from slurm_train.distributed.seeds import mix
from slurm_train.session.wandb_calls import guard_calls
from slurm_train.train.callbacks import Callback, TrainerView
from slurm_train.train.context import Parts, Rank
from slurm_train.train.evaluate import Evaluator
from slurm_train.train.health import Health, refuse
from slurm_train.train.metrics import format_measures
from slurm_train.train.optimizer import Schedule, averaged, to_average
from slurm_train.train.position import Position
from slurm_train.train.progress import TrainingProgress
from slurm_train.train.samples import Samples
from slurm_train.train.start_up import StartUp, collect_garbage, give_back_garbage, take_over_garbage
from slurm_train.train.step import StepFacts, Stepper, StepResult
from slurm_train.train.stops import Stops

# Time to end in order, so that the supervisor can bring the job back.
_END_S = 3.0


@dataclass(slots=True, kw_only=True, eq=False)
class Trainer:
    """Runs one rank of a training from a position to its end or to an agreed stop."""

    parts: Parts
    """Model, optimizer and data of this rank."""
    max_steps: int
    """Steps of the whole run."""
    position: Position
    """Kept up to date."""
    samples: Samples
    """Of every step."""
    stepper: Stepper
    schedule: Schedule
    health: Health
    """Judges the results of steps."""
    evaluator: Evaluator | None
    """None where there are no held-out samples, or none shall be evaluated."""
    saver: Saver
    """Saves the training, and restores it."""
    resumption: Resumption
    """The checkpoint that this attempt goes on from."""
    stops: Stops
    """How the training ends before its last step."""
    progress: TrainingProgress
    """What steps take, and what their time was spent on."""
    callbacks: Mapping[str, Callback]
    start_up: StartUp | None
    """None once the first step of this attempt is done."""
    measures: dict[str, float] = field(default_factory=dict)
    """The newest evaluation."""

    @property
    def rank(self) -> Rank:
        """This rank: its place, the configuration, the run directory."""
        return self.parts.rank

    @property
    def model(self) -> nn.Module:
        """Whole, or this rank's part of it."""
        return self.parts.model

    @property
    def saves(self) -> Saves:
        """When and how checkpoints are made."""
        return self.saver.saves

    @property
    def newest(self) -> StepResult | None:
        """The newest result of a step that was read; on a GPU that of the step before."""
        return self.health.newest

    def run(self) -> bool:
        """Trains; returns True when the run is finished and evaluated, False when the ranks agreed to stop.

        Either way the last position is in a durable checkpoint, unless `stops.not_saved` says why not.
        """
        self._call("on_start")
        self.progress.restart_window()
        # A run that was killed between its last checkpoint and its result has only the evaluation left.
        if self.position.evaluation_due or self._is_over:
            self._evaluate()
        if not self._is_over:
            self._check_first_batch()
        try:
            self.advance(self.max_steps)
            self._read_pending()
            if self.callbacks and self._agrees_on_end():
                self._evaluate()
        finally:
            give_back_garbage()
            self.progress.book()
        return self._end()

    def advance(self, to_step: int) -> None:
        """Trains up to a step, or to an agreed stop."""
        if self.start_up is not None:
            self.start_up.begin()
        while self.position.step < to_step and not self.stops.is_agreed:
            facts = self._begin_step()
            result = self.stepper.step(facts, self.samples)
            self._account(facts, result)
            if not self._rolled_back():
                self._after_step()
            self._pass_on_news()

    def _begin_step(self) -> StepFacts:
        """Returns the samples and the learning rate of the next step, and seeds its random numbers."""
        position = self.position
        step = position.step + 1
        num_batches = self.samples.num_batches_of(step)
        samples = self.samples.end_of(num_batches, samples=position.samples)
        facts = StepFacts(
            step,
            samples,
            lr=self.schedule.lr_at(samples),
            loss_limit=self.health.losses.limit(),
            size=samples - position.samples,
            num_batches=num_batches,
        )
        # Dropout is keyed by the step, so a resumed run draws what an uninterrupted one would have drawn.
        _reseed(mix(self.rank.config.seed, step, self.rank.random_stream))
        self.rank.heartbeat.step = step
        self.progress.begin_step()
        return facts

    def _account(self, facts: StepFacts, result: StepResult | None) -> None:
        """Counts the step, and reads the newest result; on a GPU that of the step before, None after the first."""
        progress = self.progress
        if self.start_up is None:
            progress.add_step()
        if self.samples.has_digests:
            start_s = self.rank.clock()
            self.samples.exchange_digest(facts.step)
            progress.probe.exchange_s += self.rank.clock() - start_s
        self.position.step = facts.step
        self.position.samples = facts.samples
        if result is not None:
            self._read(result)
        progress.probe.end()

    def _read(self, result: StepResult) -> None:
        """Reads a step's reduced values, which are the same on every rank."""
        step = result.facts.step
        self.health.judge(result, self.position)
        if result.applied:
            self.position.items += result.num_items
            self.position.loss = result.loss
        self.stops.agree(result.stop)
        digest = self.samples.pop_digest(step)
        self.progress.count(result)
        if step % self.rank.config.train.log_every_steps == 0 or step == self.max_steps:
            self.progress.write(result, items=self.position.items, digest=digest)
        self.stops.check_clock()

    def _after_step(self) -> None:
        """Calls the callbacks, evaluates and saves, where that is due."""
        step = self.position.step
        eval_every = self.rank.config.train.eval_every_steps
        self.resumption.move_on()
        self._call("on_step_end")
        if self.start_up is not None:
            self._end_start_up(self.start_up)
        else:
            collect_garbage(step)
        evaluates = step == self.max_steps or bool(eval_every and step % eval_every == 0)
        saves = self.saver.is_due(step)
        # While a GPU is still at the step: when its result has come, the GPU has nothing to do.
        copied = None
        if saves and not evaluates and self._may_copy_early:
            with self.progress.span("checkpoint_stall_s"):
                self.rank.heartbeat.mark("save")
                copied = self.saver.copy(step)
        # What is evaluated or saved has been read before, so nothing that went wrong gets into it.
        if (evaluates or saves or self.saves.is_requested) and self._read_pending():
            return
        self.health.compare_replicas(self.model, step=step)
        if evaluates:
            self._evaluate()
        is_last = step == self.max_steps or self.stops.is_agreed
        if (saves or self.saves.is_requested) and not is_last:
            self._save(copied)

    @property
    def _may_copy_early(self) -> bool:
        """Whether all is copied as it will be when the newest step has been read."""
        # Before a save a callback may change what it saves, and by then it knows the step's result.
        hooks = (getattr(callback.on_save, "__func__", None) for callback in self.callbacks.values())
        return not self.stops.is_agreed and all(hook is Callback.on_save for hook in hooks)

    def _end_start_up(self, start_up: StartUp) -> None:
        start_up.end(self.stepper.passes.buffers)
        if self.parts.group_names is not None:
            refuse_saved_buffers(self.model)
        self.saver.check_first_step()
        if self.rank.config.checkpoint.every_steps is not None:
            self.saver.prepare()
        take_over_garbage()
        # A callback may call it.
        guard_calls(self.rank.stop)
        self.start_up = None

    def _evaluate(self) -> None:
        if self.evaluator is None:
            return
        start_s = self.rank.clock()
        contexts = [averaged(self.stepper.optimizer), *(callback.evaluating() for callback in self.callbacks.values())]
        with self.progress.span("evaluate_s"):
            measures = self.evaluator.evaluate(within=contexts)
        if measures is None:
            self.position.evaluation_due = True
            self.stops.agree(True)
            return
        if self.position.evaluation_due:
            # The checkpoint of this step was written without it, and without what callbacks learn from it.
            self.saves.save_again(self.position.step)
        self.position.evaluation_due = False
        self.measures = measures
        seconds = self.rank.clock() - start_s
        self.progress.write_evaluation(self.position.step, self.position.samples, measures, seconds=seconds)
        self.say(f"step {self.position.step}: {format_measures(measures)}")
        if self.callbacks:
            self._call("on_evaluation", measures)
            self._agrees_on_end()

    def _end(self) -> bool:
        """Saves the last position, if there is time; returns whether the run is finished."""
        position = self.position
        finished = self._is_over and not position.evaluation_due
        if finished and self.newest is not None and not position.items:
            refuse(self.newest, num_empty=position.step, of=position.step)
        self._call("on_end" if finished else "on_stop")
        if finished:
            to_average(self.stepper.optimizer)
        if finished or self._has_time_to_save():
            self._save(waits=True)
        if finished:
            self.saves.close()
        return finished

    def _has_time_to_save(self) -> bool:
        """Returns whether there is time for the save of a stop; if not, waits for a running one while there is."""
        left_s, self.stops.not_saved = self.stops.decide_save(step=self.position.step)
        if not self.stops.not_saved:
            return True
        with self.progress.span("checkpoint_stall_s"):
            self.saves.finish_within(max(0.0, (left_s or 0.0) - _END_S))
            self._pass_on_news()
        return False

    def _check_first_batch(self) -> None:
        with self.progress.span("compile_s"):
            first = self.samples.peek()
            self.say(self.stepper.passes.check_first_batch(first.tensors))

    def _read_pending(self) -> bool:
        """Reads the values that are still on their way; returns whether one of them took the run back."""
        result = self.stepper.drain()
        if result is not None:
            self._read(result)
        return self._rolled_back()

    def _rolled_back(self) -> bool:
        """Goes back to a checkpoint if a step asks for it; the samples consumed so far are not seen again."""
        if self.health.bad_step is None:
            return False
        step_before = self.position.step
        with self.progress.span("load_s"):
            self.stepper.forget()
            self.samples.forget_digests()
            self.rank.heartbeat.mark("start")
            self.health.roll_back(self.position)
        self.progress.spent.rolled_back_steps += step_before - self.position.step
        return True

    def _save(self, copied: Copied | None = None, *, waits: bool = False) -> None:
        step = self.position.step
        with self.progress.span("checkpoint_stall_s"):
            self.health.compare_replicas(self.model, step=step, before_save=True)
            self._call("on_save")
            self.rank.heartbeat.mark("save")
            # The thread that writes the checkpoint makes them durable.
            with contextlib.suppress(OSError):
                self.progress.write_lines()
            self.saver.write(step, copied=copied, waits=waits)

    def _pass_on_news(self) -> None:
        """Passes on what became of background saves; one that ends the run asks for a stop, which all agree on."""
        self.saver.say_news()
        if self.saves.fatal is not None:
            self.stops.request()

    @property
    def _is_over(self) -> bool:
        return self.position.step >= self.max_steps or bool(self.position.ended)

    def _agrees_on_end(self) -> bool:
        """Returns whether the run ends here because a callback of some rank asked for it before now. Collective."""
        if self._is_over:
            return False
        self.position.ended = self.stops.agree_on_end()
        return self._is_over

    def _call(self, hook: str, *values: object) -> None:
        training: TrainerView = self
        for callback in self.callbacks.values():
            getattr(callback, hook)(training, *values)

    def end_early(self, reason: str) -> None:
        """Asks for the end of the run, as finished: for callbacks, on one rank or on all.

        After an evaluation the ranks agree at once, else with the next step, which is then evaluated.

        Args:
            reason: for the result, e.g. "eval_loss has not improved".
        """
        self.stops.request_end(reason)

    def ask_to_save(self) -> None:
        """Asks for a checkpoint of this step in the run directory: for callbacks, on all ranks at the same step."""
        self.saves.request()

    def say(self, text: str | None) -> None:
        """Prints a line, if there is one, on rank 0."""
        self.rank.say(text)

    def span(self, cause: str) -> contextlib.AbstractContextManager[None]:
        """Excludes what is done within it from the time of steps: for callbacks."""
        return self.progress.span(cause)


def _reseed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch says no types here
        torch.cuda.manual_seed(seed)
