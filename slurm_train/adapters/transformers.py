"""A `transformers.Trainer` as a part of its run: one callback, and `resume_from_checkpoint`.

    callback = SessionCallback()
    trainer = Trainer(..., callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.newest())

The Trainer writes its own checkpoint, when its arguments say so and when all ranks stop; it becomes one of the run
instead of a `checkpoint-N` in the output directory.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy, SaveStrategy

from slurm_train.errors import ConfigError
from slurm_train.session import join

_NAMES = {"learning_rate": "lr"}
"""Numbers of the Trainer that have another name in metrics.jsonl."""


class SessionCallback(TrainerCallback):  # type: ignore[misc]  # of an extra
    """Reports each step, stops all ranks at the same one, and saves in the run's checkpoints."""

    def __init__(self) -> None:
        self.session = join()
        self._save = contextlib.ExitStack()
        self._output_dir = ""
        self._saved_step = 0
        self._has_to_evaluate = False
        self._leaves = False

    def on_init_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        """Has the Trainer restore the states of other callbacks at a resume, which it saves anyway."""
        if self.session.is_active:
            args.restore_callback_states_from_checkpoint = True

    def newest(self) -> str | None:
        """Returns what `Trainer.train(resume_from_checkpoint=...)` takes. All ranks call it, before training.

        Raises:
            CheckpointError: there are checkpoints, but none of them verifies.
        """
        checkpoint = self.session.newest()
        return None if checkpoint is None else str(checkpoint.path)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Refuses what cannot be resumed from, and what would look for checkpoints where there are none.

        Raises:
            ConfigError: the best checkpoint is to be kept or loaded; checkpoints are to have no optimizer; the callback
                came too late to have the states of others restored.
        """
        self._saved_step = state.global_step
        self._has_to_evaluate = _lacks_evaluation(args, state)
        self._leaves = False
        if not self.session.is_active:
            return
        for name, is_set in (
            ("load_best_model_at_end=True", args.load_best_model_at_end),
            ("save_strategy='best'", args.save_strategy == SaveStrategy.BEST),
        ):
            if is_set:
                raise ConfigError(
                    f"{name} needs checkpoints in the output directory, and those of a run are in its own",
                    hint="save by steps or epochs, and evaluate at the same; metrics.jsonl tells the best step",
                )
        if args.save_only_model:
            raise ConfigError(
                "save_only_model=True: a run that is requeued would continue with a new optimizer and learning rate",
                hint="leave it out; checkpoint.keep says how many checkpoints are kept",
            )
        if not args.restore_callback_states_from_checkpoint:
            raise ConfigError(
                "the Trainer would not restore the states of its callbacks at a resume (EarlyStoppingCallback counts "
                "anew then): restore_callback_states_from_checkpoint=False",
                hint="pass callbacks=[callback] to the Trainer instead of calling add_callback, or set it to True",
            )

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        """Reports progress within a step."""
        self.session.mark("step")

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        """Reports progress within an evaluation."""
        self.session.mark("evaluate")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Reports a step, and asks whether all ranks are to stop after it."""
        self.session.report(state.global_step)
        if self.session.should_stop() and state.global_step < state.max_steps:
            self._leaves = True
            control.should_training_stop = True
            # It may take longer than there is time; it is made after the resume.
            control.should_evaluate = False
            control.should_save = True
        elif self._has_to_evaluate:
            self._has_to_evaluate = False
            control.should_evaluate = True
        # An evaluation comes between this and the save.
        if not control.should_evaluate:
            self._begin_save(args, state, control)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Prepares for a save of the Trainer's own that follows the evaluation."""
        self._begin_save(args, state, control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Prepares for a save of the Trainer's own."""
        if self._leaves:
            # The Trainer comes here in the middle of an epoch as well, where it stops.
            control.should_evaluate = False
            control.should_save = False
        elif not control.should_evaluate:
            self._begin_save(args, state, control)

    def on_log(self, _: TrainingArguments, state: TrainerState, *__: Any, logs: dict[str, Any], **___: Any) -> None:
        """Writes the Trainer's numbers into metrics.jsonl; those at the end of the training are no step's."""
        numbers = {_NAMES.get(name, name): value for name, value in logs.items() if _is_number(value)}
        if "train_runtime" not in numbers:
            self.session.report(state.global_step, **numbers, max_steps=state.max_steps)

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Makes a checkpoint of the run of what the Trainer has just written."""
        if not self._output_dir:
            return
        folder = Path(args.output_dir)
        args.output_dir = self._output_dir
        self._output_dir = ""
        written = folder / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        for path in sorted(written.iterdir()) if written.is_dir() else ():
            shutil.move(path, folder)
        if written.is_dir():
            written.rmdir()
        self._save.close()
        self._saved_step = state.global_step

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Leaves where the ranks have stopped before the end."""
        if self._leaves:
            self.session.leave()

    def _begin_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        if not (control.should_save and self.session.is_active) or self._output_dir:
            return
        if self._saved_step == state.global_step:
            control.should_save = False
            return
        # The Trainer writes into a folder of its output directory, and calls `on_save` when it has.
        folder = self._save.enter_context(self.session.save(state.global_step))
        self._output_dir, args.output_dir = str(args.output_dir), str(folder)


def _lacks_evaluation(args: TrainingArguments, state: TrainerState) -> bool:
    """Returns whether the newest evaluation that was due was not made, since the ranks stopped at its step."""
    evaluations = [entry for entry in state.log_history if any(name.startswith("eval_") for name in entry)]
    if args.eval_strategy == IntervalStrategy.STEPS:
        due = state.global_step // state.eval_steps * state.eval_steps
        newest = max((entry["step"] for entry in evaluations), default=0)
    elif args.eval_strategy == IntervalStrategy.EPOCH:
        due = math.floor(state.epoch or 0)
        newest = max((entry["epoch"] for entry in evaluations), default=0)
    else:
        return False
    return bool(due > 0 and due >= args.eval_delay and newest < due)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
