"""Makes the training of a `transformers.Trainer` a part of its run: one callback, and `resume_from_checkpoint`.

    callback = SessionCallback()
    trainer = Trainer(..., callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.newest())

The Trainer writes its checkpoints where its arguments say so, and where all ranks stop. Each becomes a checkpoint of
the run instead of a `checkpoint-N` in the output directory: while it is written, the callback sets `args.output_dir` to
the directory of a save of the session.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, SkipBatchSampler
from accelerate.utils import gather_object
from torch.utils.data import IterableDataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments, optimization
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy, IntervalStrategy, SaveStrategy, has_length

from slurm_train.adapters.library_names import TRANSFORMERS
from slurm_train.errors import ConfigError
from slurm_train.session import Switches, join, rng_state, set_rng_state

_METRIC_NAMES = {"learning_rate": "lr"}
"""Names in metrics.jsonl of what the Trainer logs under another name."""
_STRATEGIES_BY_BATCH = ("group_by_length", "batch_rebalance")
"""Sampling strategies whose order depends on how the global batch is divided among ranks and micro-batches."""
# Schedules that depend on the measures of evaluations; older versions of the library have no `GreedyLR`.
_SCHEDULES_BY_MEASURE = tuple(
    kind for kind in (torch.optim.lr_scheduler.ReduceLROnPlateau, getattr(optimization, "GreedyLR", None)) if kind
)
_FACTS_FILE = "slurm_train.json"
"""File in a checkpoint with what the Trainer does not write, see `_begin_save`."""


class SessionCallback(TrainerCallback):  # type: ignore[misc]  # of an extra
    """Reports each step, stops all ranks at the same one, and saves in the run's checkpoints.

    Wide because it keeps what one call of the Trainer tells for the next ones, and the Trainer has no place for it.
    """

    def __init__(self) -> None:
        TRANSFORMERS.check(TrainingArguments=TrainingArguments, TrainerState=TrainerState)
        self.session = join()
        self._save = contextlib.ExitStack()
        """Holds the session's save while the Trainer writes."""
        self._output_dir = ""
        """`args.output_dir` while it is replaced for a save, "" at other times."""
        self._saved_step = 0
        """The newest step that was saved, or loaded."""
        self._lacks_evaluation = False
        """Whether a stop had left out the evaluation of the resumed step, and it was not made yet."""
        self._is_stopping = False
        """Whether the ranks have agreed to stop before the end of the training."""
        self._resumed_from: Path | None = None
        self._has_trained = False
        self._has_reached_end = False
        """Whether the checkpoint is one of the end: the Trainer takes one more step all the same."""
        self._order = torch.Generator()
        """Generator of the sampler that draws the order."""
        self._steps_per_epoch: int | None = None
        """None for a data set that has no length."""
        self._is_resumed = False
        """Whether the training is resumed, and its first epoch has not begun."""
        self._num_epochs_begun = 0
        self._switches: Switches | None = None
        self._eval_on_start: bool | None = None
        """`args.eval_on_start` as the program has set it, while it is replaced at a resume; None at other times."""
        self._random: dict[str, Any] | None = None
        """States of the random generators before an evaluation that is due."""

    def on_init_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        """Lets the Trainer restore the states of other callbacks at a resume; it saves them in any case."""
        if self.session.is_active:
            args.restore_callback_states_from_checkpoint = True

    def newest(self) -> str | None:
        """Returns the path for `Trainer.train(resume_from_checkpoint=...)`, None without a checkpoint.

        All ranks call it, before the training.

        Raises:
            CheckpointError: there are checkpoints, but none of them verifies.
        """
        checkpoint = self.session.newest()
        self._resumed_from = None if checkpoint is None else checkpoint.path
        return None if checkpoint is None else str(checkpoint.path)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **objects: Any) -> None:
        """Refuses settings that cannot be resumed, and restores what the Trainer does not.

        Raises:
            ConfigError: see `_require_resumable` and `_compare_with_checkpoint`; or another training of this program
                has ended.
        """
        self.session.begin_training()
        self._saved_step = state.global_step
        self._has_reached_end = 0 < state.max_steps <= state.global_step
        self._lacks_evaluation = _lacks_evaluation(args, state) and not self._has_reached_end
        self._is_stopping = False
        self._is_resumed = state.global_step > 0
        self._num_epochs_begun = 0
        model = objects.get("model")
        # Modes are not kept: the Trainer sets them at each step.
        self._switches = None if model is None else Switches(model, has_modes=False)
        loader = objects.get("train_dataloader")
        self._steps_per_epoch = _steps_per_epoch(args, loader) if has_length(loader) else None
        if not self.session.is_active:
            return
        _require_resumable(args, self._steps_per_epoch)
        if self._resumed_from is not None and state.global_step > 0:
            self._compare_with_checkpoint(args, state, self._resumed_from)
        if self._is_resumed and args.eval_on_start != self._lacks_evaluation:
            # The run has made the evaluation of its start; early stopping would count another one.
            self._eval_on_start = args.eval_on_start
            args.eval_on_start = self._lacks_evaluation

    def _compare_with_checkpoint(self, args: TrainingArguments, state: TrainerState, checkpoint: Path) -> None:
        """Compares this start with the checkpoint, and restores whether the training had ended, and its switches.

        Raises:
            ConfigError: the global batch or the length of an epoch differs.
        """
        facts = _read_json(checkpoint / _FACTS_FILE)
        _require_same_batch(args, state, facts)
        _require_same_epoch(state, facts.get("steps_per_epoch"), now=self._steps_per_epoch)
        self._has_reached_end |= _has_ended_early(checkpoint, facts)
        if self._switches is not None:
            self._switches.set(facts.get("switches", {}))

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        """Marks progress within a step."""
        self.session.mark("step")

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        """Marks progress within an evaluation; one after the training has no time limit."""
        self.session.mark("end" if self._has_trained else "evaluate")

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **objects: Any) -> None:
        """Seeds the order of the epoch with its number, so that a resume has the same order.

        Raises:
            ConfigError: a data set without a length has ended before the training.
        """
        loader = objects.get("train_dataloader")
        if self._eval_on_start is not None:
            args.eval_on_start = self._eval_on_start
            self._eval_on_start = None
        self._lacks_evaluation = False
        self._num_epochs_begun += 1
        begins_again = self._num_epochs_begun > 1 and not self._has_reached_end
        if self.session.is_active and begins_again and not has_length(loader):
            raise ConfigError(
                f"the data set has no length and has ended before step {state.max_steps}, at {state.global_step}: the "
                "Trainer begins it again, and would not find its place in it after a resume",
                hint="give the data set a __len__, its number of samples, or let it go on without an end",
            )
        epoch = int(state.epoch or 0)
        self._skip_dispatched(args, state, loader)
        for sampler in _samplers(loader):
            if hasattr(sampler, "set_epoch"):
                # In a resumed epoch accelerate (1.15) wraps the batch sampler to skip batches, and sets no epoch below.
                sampler.set_epoch(epoch)
        sampler = _drawing_sampler(loader)
        if sampler is None:
            return
        seed = args.seed if args.data_seed is None else args.data_seed
        self._order.manual_seed(seed + epoch)
        sampler.generator = self._order

    def on_pre_optimizer_step(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        """Drops the gradients of the step that the Trainer takes after the end."""
        if self._has_reached_end and optimizer is not None:
            optimizer.zero_grad()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Reports the step, and asks whether all ranks are to stop after it."""
        if self._has_reached_end:
            # The step without gradients does not count.
            state.global_step -= 1
            control.should_training_stop = True
            control.should_log = False
            control.should_evaluate = False
            control.should_save = False
            return
        self.session.report(state.global_step)
        if self.session.should_stop() and state.global_step < state.max_steps:
            self._is_stopping = True
            control.should_training_stop = True
            # An evaluation may take longer than the time that is left; it is made after the resume.
            control.should_evaluate = False
            control.should_save = True
        self._prepare(args, state, control)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Completes an evaluation at a resume, and prepares for a save that follows an evaluation.

        The random generators are restored, so that an evaluation which is made again after a resume changes no draw of
        the training.
        """
        if self._random is not None:
            set_rng_state(self._random)
        if self._lacks_evaluation:
            _apply_measure(args, state, objects["metrics"], objects["lr_scheduler"])
            # Early stopping may just have asked for the end; the Trainer would take another step.
            self._has_reached_end |= control.should_training_stop
        self._begin_save(args, state, control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Prepares for a save at the end of the epoch.

        Raises:
            ConfigError: a callback has ended the epoch before its last step, and the training goes on.
        """
        steps = self._steps_per_epoch
        is_cut_short = control.should_epoch_stop and steps is not None and state.global_step % steps > 0
        if self.session.is_active and is_cut_short and not control.should_training_stop:
            raise ConfigError(
                f"a callback has ended an epoch of {steps} steps after step {state.global_step} (should_epoch_stop): "
                "the Trainer finds its place by the number of steps, and would not find it after a resume",
                hint="give the data set the samples of such an epoch only, or end the training there",
            )
        if self._is_stopping:
            # The Trainer calls this where it stops, in the middle of an epoch as well.
            control.should_evaluate = False
            control.should_save = False
        else:
            self._prepare(args, state, control)

    def on_log(self, _: TrainingArguments, state: TrainerState, *__: Any, logs: dict[str, Any], **___: Any) -> None:
        """Writes what the Trainer logs into metrics.jsonl, but for its summary of the whole training."""
        metrics = {_METRIC_NAMES.get(name, name): value for name, value in logs.items() if _is_number(value)}
        # Not told by `train_runtime`: with `include_num_input_tokens_seen` the log of a step has it, too.
        if "train_steps_per_second" not in metrics:
            self.session.report(state.global_step, **metrics, max_steps=state.max_steps)
        if self._has_trained:
            self.session.mark("end")

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Completes the checkpoint of the run with what the Trainer has just written.

        Raises:
            ConfigError: a callback that comes after this one has asked for the save.
        """
        if not self._output_dir:
            if self.session.is_active:
                raise ConfigError(
                    f"step {state.global_step} was saved in {args.output_dir}, where no resume looks: a callback that "
                    "comes after the SessionCallback has asked for it",
                    hint="name the SessionCallback last: callbacks=[..., callback]",
                )
            return
        folder = Path(args.output_dir)
        args.output_dir = self._output_dir
        self._output_dir = ""
        # Ranks that write nothing have no such folder.
        written = folder / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if written.is_dir():
            for path in sorted(written.iterdir()):
                shutil.move(path, folder)
            written.rmdir()
        self._save.close()
        self._saved_step = state.global_step

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Ends the program where the ranks have stopped before the end; else marks the end of the training."""
        if self._is_stopping:
            self.session.leave()
        self._has_trained = True
        self.session.mark("end")

    def _skip_dispatched(self, args: TrainingArguments, state: TrainerState, loader: Any) -> None:
        """Skips the batches that other ranks have taken, where rank 0 reads for all and an epoch is resumed.

        accelerate (1.15) skips there only as many batches as one rank has taken.
        """
        is_resumed = self._is_resumed
        self._is_resumed = False
        if not isinstance(loader, DataLoaderDispatcher) or isinstance(loader.dataset, IterableDataset):
            return
        # Removes what an earlier epoch has set below; the class then gives the loader's own batch sampler.
        vars(loader).pop("batch_sampler", None)
        if not is_resumed or args.ignore_data_skip or loader.split_batches:
            return
        num_done = state.global_step % _steps_per_epoch(args, loader)
        num_others = num_done * args.gradient_accumulation_steps * (args.world_size - 1)
        if num_others > 0:
            loader.batch_sampler = SkipBatchSampler(loader.batch_sampler, skip_batches=num_others)

    def _prepare(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """Prepares for what the Trainer does next, an evaluation or a save; `on_evaluate` prepares for a later save."""
        if control.should_evaluate:
            self._random = rng_state()
        else:
            self._begin_save(args, state, control)

    def _begin_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """Begins a save of the session where the Trainer is about to write a checkpoint. Collective."""
        has_begun = bool(self._output_dir)
        if has_begun or not control.should_save or not self.session.is_active:
            return
        if self._saved_step == state.global_step:
            control.should_save = False
            return
        # The Trainer writes into a folder of its output directory, and then calls `on_save`.
        folder = self._save.enter_context(self.session.save(state.global_step))
        facts = {
            "global_batch": _global_batch(args),
            "batches": _batches(args),
            "steps_per_epoch": self._steps_per_epoch,
            "leaves": self._is_stopping,
            "switches": {} if self._switches is None else self._switches.changed(),
        }
        (folder / _FACTS_FILE).write_text(json.dumps(facts))
        self._output_dir = str(args.output_dir)
        args.output_dir = str(folder)


def _require_resumable(args: TrainingArguments, steps_per_epoch: int | None) -> None:
    """Checks that a run can resume a training with these arguments. Collective.

    Args:
        args: of the Trainer.
        steps_per_epoch: of this rank; None for a data set without a length.

    Raises:
        ConfigError: the best checkpoint is to be kept or loaded, or each to be pushed; checkpoints are to have no
            optimizer; the library is to handle SIGTERM; the callback was added too late to have the states of others
            restored; or the ranks have epochs of different lengths.
    """
    for name, is_set in (
        ("load_best_model_at_end=True", args.load_best_model_at_end),
        ("save_strategy='best'", args.save_strategy == SaveStrategy.BEST),
    ):
        if is_set:
            raise ConfigError(
                f"{name} needs checkpoints in the output directory, and those of a run are in its own",
                hint="save by steps or epochs, and evaluate at the same; metrics.jsonl tells the best step",
            )
    if args.push_to_hub and args.hub_strategy != HubStrategy.END:
        raise ConfigError(
            "push_to_hub=True pushes the output directory at each save, and a run's checkpoints are in its own",
            hint="set hub_strategy='end', and call trainer.push_to_hub() after the training",
        )
    # Versions from before this setting have no such attribute.
    if getattr(args, "enable_jit_checkpoint", False):
        raise ConfigError(
            "enable_jit_checkpoint=True saves into the output directory at SIGTERM and ends the training as if it "
            "were over; this callback would not get the signal",
            hint="leave it out: the callback saves at SIGTERM, and the run continues from there",
        )
    if args.save_only_model:
        raise ConfigError(
            "save_only_model=True: a run that is requeued would continue with a new optimizer and learning rate",
            hint="leave it out; checkpoint.keep says how many checkpoints are kept",
        )
    _require_same_steps(steps_per_epoch)
    if not args.restore_callback_states_from_checkpoint:
        raise ConfigError(
            "the Trainer would not restore the states of its callbacks at a resume (EarlyStoppingCallback counts "
            "anew then): restore_callback_states_from_checkpoint=False",
            hint="pass callbacks=[callback] to the Trainer instead of calling add_callback, or set it to True",
        )


def _apply_measure(args: TrainingArguments, state: TrainerState, metrics: dict[str, float], schedule: Any) -> None:
    """Steps the schedule and updates the best value, which the Trainer leaves out after an evaluation at its start."""
    if args.metric_for_best_model is None:
        return
    measure = metrics.get(f"eval_{args.metric_for_best_model.removeprefix('eval_')}")
    if measure is None:
        return  # the evaluation of another one of several data sets
    if isinstance(schedule, _SCHEDULES_BY_MEASURE):
        schedule.step(measure)
    best = state.best_metric
    is_better = best is None or (measure > best if args.greater_is_better else measure < best)
    if is_better:
        state.best_metric = measure
        if args.save_strategy in (SaveStrategy.STEPS, SaveStrategy.EPOCH):
            state.best_global_step = state.global_step


def _lacks_evaluation(args: TrainingArguments, state: TrainerState) -> bool:
    """Returns whether the newest evaluation that was due is missing, since the ranks stopped at its step."""
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


def _has_ended_early(checkpoint: Path, facts: dict[str, Any]) -> bool:
    """Returns whether a callback had ended the training before it was saved, as early stopping does."""
    saved = _read_json(checkpoint / TRAINER_STATE_NAME)
    control = (saved.get("stateful_callbacks") or {}).get("TrainerControl") or {}
    has_stopped = bool((control.get("args") or {}).get("should_training_stop"))
    # The flag is also set at the last step and where the ranks stopped.
    return has_stopped and facts.get("leaves") is False and saved["global_step"] < saved["max_steps"]


def _read_json(path: Path) -> dict[str, Any]:
    """Returns what a file of a checkpoint says, {} where the checkpoint has no such file."""
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _global_batch(args: TrainingArguments) -> int:
    return math.prod(_batches(args))


def _batches(args: TrainingArguments) -> list[int]:
    """Returns samples of a micro-batch, micro-batches of a step on each rank, and number of ranks."""
    return [args.train_batch_size, args.gradient_accumulation_steps, args.world_size]


def _size_in_words(per_device: int, accumulated: int, ranks: int) -> str:
    return f"{per_device} per device x {accumulated} x {ranks} ranks"


def _require_same_batch(args: TrainingArguments, state: TrainerState, saved: dict[str, Any]) -> None:
    """Checks the global batch: the Trainer finds its place in the data and the schedule by the number of steps.

    Raises:
        ConfigError: its size differs; or it is divided in another way, and the order of samples depends on that.
    """
    before = saved.get("global_batch")
    now = _global_batch(args)
    if before in (None, now):
        strategy = args.train_sampling_strategy
        if strategy in _STRATEGIES_BY_BATCH and saved.get("batches", _batches(args)) != _batches(args):
            raise ConfigError(
                f"step {state.global_step} was trained with batches of {_size_in_words(*saved['batches'])}, this start "
                f"has {_size_in_words(*_batches(args))}: the order of train_sampling_strategy={strategy!r} would be "
                "another one",
                hint="resume on the same number of ranks, with the same sizes",
            )
        return
    size = _size_in_words(*_batches(args))
    raise ConfigError(
        f"step {state.global_step} was trained with a global batch of {before}, this start has {now} = {size}: the "
        "Trainer would use samples twice and leave others out",
        hint="choose per_device_train_batch_size and gradient_accumulation_steps by the number of ranks: their product "
        f"is to stay {before}",
    )


def _steps_per_epoch(args: TrainingArguments, loader: Any) -> int:
    accumulated: int = args.gradient_accumulation_steps
    return math.ceil(len(loader) / accumulated)


def _require_same_epoch(state: TrainerState, before: int | None, *, now: int | None) -> None:
    """Checks the length of an epoch: the Trainer finds the epoch and the place in it by the number of steps.

    Raises:
        ConfigError: an epoch has another number of steps than at the save.
    """
    if before in (None, now):
        return
    raise ConfigError(
        f"an epoch had {before} steps when step {state.global_step} was saved, and has {now or 'no known number'} now: "
        "the Trainer would go on at another place",
        hint="take the same data set; with dataloader_drop_last, divide the global batch as before",
    )


def _require_same_steps(steps_per_epoch: int | None) -> None:
    """Checks that an epoch has the same number of steps on all ranks. Collective.

    Raises:
        ConfigError: it has not, so the ranks would be in different epochs.
    """
    steps_of_ranks = gather_object([steps_per_epoch])
    if len(set(steps_of_ranks)) > 1:
        raise ConfigError(
            f"an epoch has {', '.join(map(str, steps_of_ranks))} steps on the ranks: they would train in different "
            "epochs, and each checkpoint would have the place of one of them",
            hint="leave out even_batches=False, or set dataloader_drop_last=True",
        )


def _samplers(loader: Any) -> list[Any]:
    """Returns the samplers of a loader: its batch samplers, the outermost first, and last its sampler of samples."""
    samplers = []
    holder = loader
    while getattr(holder, "batch_sampler", None) is not None:
        holder = holder.batch_sampler
        samplers.append(holder)
    if getattr(holder, "sampler", None) is not None:
        samplers.append(holder.sampler)
    return samplers


def _drawing_sampler(loader: Any) -> Any:
    """Returns the sampler that draws an order from a generator, None where the order follows from `set_epoch`."""
    samplers = _samplers(loader)
    if not samplers:
        return None
    sampler = samplers[-1]
    return sampler if hasattr(sampler, "generator") and not hasattr(sampler, "set_epoch") else None
