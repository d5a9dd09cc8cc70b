"""Callbacks: code that the trainer calls at certain moments, the base class and those that come with the package.

`callbacks=[{_target_: my_package.Mine, every: 10}]` names classes that derive from `Callback`. Every hook is called on
every rank, at the same step and in the order of the list, so it may use collectives if all ranks do. Nothing is called
where there is no callback.

Imported without torch: the login node makes the callbacks of this module, so wrong values are refused before anything
is submitted.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from slurm_train.config.program import program_of
from slurm_train.config.schema import RunConfig
from slurm_train.config.target import TARGET, instantiate, keywords_in_source
from slurm_train.errors import ConfigError
from slurm_train.metrics import direction_of
from slurm_train.rundir.scores import values_of
from slurm_train.train.continuity import EvaluationBasis

if TYPE_CHECKING:
    from torch import Tensor, nn

    from slurm_train.train.context import Parts, Rank
    from slurm_train.train.position import Position
    from slurm_train.train.step import StepResult

# A follower's scores are minutes apart.
_LOOK_AT_SCORES_S = 10.0
# A best checkpoint whose save failed gives way to the next best that is on disk.
_NUM_SPARE = 3


class TrainerView(Protocol):
    """What callbacks use of the trainer (`train.trainer.Trainer`)."""

    @property
    def rank(self) -> Rank:
        """This rank: the configuration, the run directory, its place."""

    @property
    def position(self) -> Position:
        """Where the run is; `position.step` is the step that was just done."""

    @property
    def newest(self) -> StepResult | None:
        """The newest result of a step that was read: on a GPU that of the step before. None before the first."""

    @property
    def measures(self) -> Mapping[str, float]:
        """The newest evaluation."""

    @property
    def model(self) -> nn.Module:
        """This rank's model, or its part of it."""

    def say(self, text: str | None) -> None:
        """Prints a line, if there is one, on rank 0."""

    def end_early(self, reason: str) -> None:
        """Asks for the end of the run, as finished; one rank is enough."""

    def ask_to_save(self) -> None:
        """Asks for a checkpoint of this step, on all ranks at the same step."""

    def span(self, cause: str) -> AbstractContextManager[None]:
        """Excludes what is done within it from the time of steps; `cause` is a time of `Spent`, e.g. "evaluate_s"."""


class Callback:
    """Derive from it and define the hooks that are needed; the others do nothing.

    `trainer.position.step` is the step that was just done, `trainer.newest` the newest result of a step that was read:
    on a GPU that of the step before, since nothing waits for the device. `trainer.rank` has the configuration, the run
    directory and the place of this rank. `trainer.end_early` and `trainer.ask_to_save` are for callbacks.
    """

    def attach(self, parts: Parts) -> None:
        """Called once, before a checkpoint is loaded: keep `parts.model` here, make the tensors of `state_dict`."""

    def on_start(self, trainer: TrainerView) -> None:
        """Called once, before the first step of an attempt, when the state of a checkpoint is there."""

    def on_step_end(self, trainer: TrainerView) -> None:
        """Called after each optimizer step; must not wait for the GPU at each."""

    def on_evaluation(self, trainer: TrainerView, measures: Mapping[str, float]) -> None:
        """Called after an evaluation; the measures are the same on every rank, e.g. {"eval_loss": 1.2}."""

    def on_save(self, trainer: TrainerView) -> None:
        """Called before each checkpoint; `state_dict` is asked after it."""

    def on_stop(self, trainer: TrainerView) -> None:
        """Called when the ranks have agreed to stop and the run will go on later; a save follows if there is time."""

    def on_end(self, trainer: TrainerView) -> None:
        """Called when the run is finished, before its last save."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Returns what evaluations run in."""
        return nullcontext()

    def kept_steps(self) -> dict[str, Any] | None:
        """Returns which checkpoints stay whatever their age, None for no wish.

        {"name": "best eval_loss", "keep": 1, "steps": [[300, 1.2], [200, 1.3]]}: the first `keep` of these steps that
        are on disk, each with a value to show; those of "earlier" stay as well, and are not the best. Or {"name": ...,
        "keep": 1, "measure": "eval_loss", "mode": "min"}: the best of those that a follower has scored, at the time
        when somebody asks. Rank 0's counts.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps.

        Tensors in it, also in nested dictionaries, are saved as those of the model are, shards included; they must be
        there since `attach` and keep their names and shapes. A rank may leave out tensors that it does not have; those
        of one name are the same on all ranks that return it. Of everything else (numbers, texts, lists) rank 0's is
        saved, for all ranks.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave; its tensors are filled already.

        Not called on a rank that returns {} where the state has tensors of other ranks.
        """


def build_callbacks(mappings: Sequence[Mapping[str, Any]]) -> dict[str, Callback]:
    """Returns callbacks in their order, by the name of their state: number among those of one target, and target.

    Args:
        mappings: `callbacks` of the configuration, e.g. a callback of it is named "0 my_package.Mine".

    Raises:
        ConfigError: one cannot be made, or is no `Callback`.
    """
    callbacks: dict[str, Callback] = {}
    num_of_target = Counter[str]()
    for number, mapping in enumerate(mappings):
        built = instantiate(mapping)
        target = str(mapping[TARGET])
        if not isinstance(built, Callback):
            raise ConfigError(
                f"callbacks[{number}].{TARGET}={target} gave a {type(built).__name__}, not a callback",
                hint="derive the class from slurm_train.train.callbacks.Callback",
            )
        callbacks[f"{num_of_target[target]} {target}"] = built
        num_of_target[target] += 1
    return callbacks


def check_callbacks(config: RunConfig, *, search: Sequence[str]) -> None:
    """Builds the callbacks that come with this package, to find wrong arguments before a run is submitted.

    Args:
        config: the run's.
        search: folders in which the class of `data._target_` is looked for, without importing it.

    Raises:
        ConfigError: wrong arguments, a run that calls no callbacks, a callback that compares a measure of which nobody
            says what is better, or that compares evaluations in a run that makes none.
    """
    if not config.callbacks:
        return
    if not program_of(config).used.callbacks:
        raise ConfigError(
            "callbacks are called by the built-in trainer, not by a task or a script", hint="leave callbacks out"
        )
    shipped = [
        callback
        for callback in config.callbacks
        if str(callback.get(TARGET, "slurm_train.")).startswith("slurm_train.")
    ]
    monitors = [callback for callback in build_callbacks(shipped).values() if isinstance(callback, Monitor)]
    for monitor in monitors:
        if not monitor.is_told:
            raise ConfigError(
                f"a callback compares {monitor.monitor}, whose name does not say whether more or less of it is better",
                hint=f"add mode:max to monitor:{monitor.monitor} if more is better, else mode:min",
            )
    of_training = [monitor for monitor in monitors if not monitor.follower]
    if of_training:
        _require_evaluations(config, of_training, search=search)


def _require_evaluations(config: RunConfig, monitors: Sequence[Monitor], *, search: Sequence[str]) -> None:
    """Checks that a run evaluates what its callbacks compare, and often enough.

    Raises:
        ConfigError: it does not.
    """
    train = config.train
    if not (train.evaluate and train.eval_every_steps):
        raise ConfigError(
            "a callback compares evaluations, and the run makes none on its way",
            hint="set train.eval_every_steps=100, and leave train.evaluate at true",
        )
    for monitor in monitors:
        if not isinstance(monitor, EarlyStopping) or train.max_epochs is not None:
            continue
        earliest = monitor.patience * train.eval_every_steps
        if earliest >= train.max_steps:
            raise ConfigError(
                f"EarlyStopping with patience {monitor.patience} and train.eval_every_steps={train.eval_every_steps} "
                f"can end a run at step {earliest:,} at the earliest, and this one has {train.max_steps:,} steps",
                hint="evaluate more often, lower the patience, or leave the callback out",
            )
    data = config.data or {}
    if data.get(TARGET) and not data.get("heldout"):
        keywords = keywords_in_source(str(data[TARGET]), search=search)
        if keywords is not None and "split" not in keywords:
            raise ConfigError(
                f"a callback compares evaluations, and data._target_={data[TARGET]} has no held-out samples: it "
                "takes no `split`, and data.heldout is not set",
                hint="set data.heldout to the arguments that differ for them, or leave the callback out",
            )


def _require_list(key: str, value: object) -> None:
    """Checks that a value is a list.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{key} must be a list, got {value!r}", hint=f"write {key}: [{value}]; see docs/callbacks.md")


def _require(key: str, value: float, *, least: float, below: float = math.inf) -> None:
    """Checks a number; a limit that is an int asks for a whole one.

    Raises:
        ConfigError: it is no number, or outside of the limits.
    """
    must_be_whole = isinstance(least, int)
    is_number = isinstance(value, int if must_be_whole else (int, float)) and not isinstance(value, bool)
    if not is_number or not least <= value < below:
        kind = "a whole number" if must_be_whole else "a number"
        limit = "" if below == math.inf else f" and below {below:g}"
        raise ConfigError(
            f"{key} must be {kind}, at least {least:g}{limit}, got {value!r}", hint="see docs/callbacks.md"
        )


class Monitor(Callback):
    """Base class of callbacks that compare the measures of evaluations.

    Args:
        monitor: the measure, e.g. "eval_loss".
        mode: "min" if less is better, "max" if more is; "auto": what the name of the measure says.
        follower: the measure is one that `evaluate --follow` gives to checkpoints, and not the training's own.

    Raises:
        ConfigError: a wrong value.
    """

    def __init__(self, *, monitor: str, mode: str, follower: bool = False) -> None:
        if mode not in ("auto", "min", "max"):
            raise ConfigError(
                f"mode must be min, max or auto, got {mode!r}", hint="min: less is better, as for eval_loss"
            )
        if not isinstance(follower, bool):
            raise ConfigError(f"follower must be true or false, got {follower!r}", hint="see docs/callbacks.md")
        self.monitor = monitor
        direction = direction_of(monitor) if mode == "auto" else mode
        self.is_told = bool(direction)
        """Whether the mode or the name says what is better; a run is submitted only then (`check_callbacks`)."""
        # A run that began when "min" was the default goes on as it began.
        self.mode = direction or "min"
        self.sign = 1.0 if self.mode == "min" else -1.0
        self.follower = follower
        self.measured: EvaluationBasis | None = None

    def attach(self, parts: Parts) -> None:
        """Keeps what evaluations of this attempt measure; scores of a follower are of what it measures."""
        self.measured = None if self.follower else parts.measured

    def state_dict(self) -> dict[str, Any]:
        """Returns what the values in the state are measures of."""
        return {} if self.measured is None else {"measured": asdict(self.measured)}

    def can_compare(self, state: Mapping[str, Any]) -> bool:
        """Returns whether the values of a state are measures of the same samples and weights as those to come."""
        return self.measured is None or not self.measured.differs_from(EvaluationBasis.of(state.get("measured")))

    def read(self, measures: Mapping[str, float]) -> float:
        """Returns the measure.

        Raises:
            ConfigError: there is none of this name.
        """
        if self.monitor not in measures:
            raise ConfigError(
                f"a callback looks at {self.monitor}, which evaluations do not give",
                hint=f"they give {', '.join(sorted(measures)) or 'nothing: there are no held-out samples'}",
            )
        return measures[self.monitor]


class EarlyStopping(Monitor):
    """Ends a run, as finished, when a measure has not improved for some evaluations in a row.

    Args:
        monitor: the measure.
        patience: evaluations without improvement after which the run ends.
        min_delta: a smaller improvement counts as none.
        mode: see `Monitor`.
        follower: see `Monitor`. Scores are counted by step, whenever they come; rank 0 looks for new ones now and then.
    """

    def __init__(
        self,
        *,
        monitor: str = "eval_loss",
        patience: int = 3,
        min_delta: float = 0.0,
        mode: str = "auto",
        follower: bool = False,
    ) -> None:
        super().__init__(monitor=monitor, mode=mode, follower=follower)
        _require("patience", patience, least=1)
        _require("min_delta", min_delta, least=0.0)
        self.patience = patience
        self.min_delta = min_delta
        self.best = math.inf
        self.best_step = 0
        self.num_worse = 0
        self._next_look_s = 0.0

    def on_evaluation(self, trainer: TrainerView, measures: Mapping[str, float]) -> None:
        """Compares the measure with the best one, and asks for the end of the run where it is due."""
        if not self.follower:
            self._compare(self.read(measures), step=trainer.position.step)
            self._end_if_due(trainer)

    def on_step_end(self, trainer: TrainerView) -> None:
        """Reads the scores of a follower, on rank 0; the request to end reaches all ranks with a step's exchange."""
        rank = trainer.rank
        if not self.follower or not rank.place.is_first or rank.clock() < self._next_look_s:
            return
        self._next_look_s = rank.clock() + _LOOK_AT_SCORES_S
        # The file has all scores, so counting anew loses none and counts none twice, also after a resume.
        self.best = math.inf
        self.best_step = 0
        self.num_worse = 0
        try:
            scores = values_of(rank.run, self.monitor)
        except OSError:
            return
        for scored in scores:
            self._compare(scored.value, step=scored.step)
        self._end_if_due(trainer)

    def _compare(self, value: float, *, step: int) -> None:
        self.num_worse += 1
        if self.sign * value < self.best - self.min_delta:
            self.best = self.sign * value
            self.best_step = step
            self.num_worse = 0

    def _end_if_due(self, trainer: TrainerView) -> None:
        if self.num_worse >= self.patience:
            best = f"best {self.sign * self.best:.4f} at step {self.best_step}"
            trainer.end_early(f"{self.monitor} has not improved in {self.num_worse} evaluations, {best}")

    def state_dict(self) -> dict[str, Any]:
        """Returns the best value, its step, and the evaluations since."""
        facts = {"best": self.best, "best_step": self.best_step, "num_worse": self.num_worse}
        return super().state_dict() | facts

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned; begins anew where it is of other held-out samples."""
        if not self.can_compare(state):
            self.best, self.best_step, self.num_worse = math.inf, 0, 0
            return
        self.best = state["best"]
        self.best_step = state["best_step"]
        self.num_worse = state["num_worse"]


class BestCheckpoint(Monitor):
    """Saves after an evaluation that is among the best, and keeps the best checkpoints beyond `checkpoint.keep`.

    Args:
        monitor: the measure.
        mode: see `Monitor`.
        keep: how many stay.
        follower: see `Monitor`. Then no additional checkpoints are saved: the best of those with a score stay.
    """

    def __init__(
        self, *, monitor: str = "eval_loss", mode: str = "auto", keep: int = 1, follower: bool = False
    ) -> None:
        super().__init__(monitor=monitor, mode=mode, follower=follower)
        _require("keep", keep, least=1)
        self.keep = keep
        self.steps: list[list[Any]] = []
        self.earlier: list[list[Any]] = []
        """The best steps by measures of other held-out samples, which stay as well."""

    def on_evaluation(self, trainer: TrainerView, measures: Mapping[str, float]) -> None:
        """Adds the step to the best ones, and asks for a save if it is one to keep."""
        if self.follower:
            return
        value = self.read(measures)
        step = trainer.position.step
        if not math.isfinite(value):
            return
        other_steps = [entry for entry in self.steps if entry[0] != step]
        self.steps = sorted([*other_steps, [step, value]], key=lambda entry: self.sign * entry[1])
        del self.steps[self.keep + _NUM_SPARE :]
        if [step, value] in self.steps[: self.keep]:
            trainer.ask_to_save()

    def kept_steps(self) -> dict[str, Any] | None:
        """Returns the best steps, or the measure of a follower by which they are found."""
        rule = {"name": f"best {self.monitor}", "keep": self.keep}
        if self.follower:
            return rule | {"measure": self.monitor, "mode": self.mode}
        return rule | {"steps": self.steps} | ({"earlier": self.earlier} if self.earlier else {})

    def state_dict(self) -> dict[str, Any]:
        """Returns the best steps with their values."""
        return super().state_dict() | {"steps": self.steps, "earlier": self.earlier}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned; what is of other held-out samples stays and is compared no more."""
        self.steps = state["steps"]
        self.earlier = state.get("earlier", [])
        if not self.can_compare(state):
            self.earlier = self.steps[: self.keep] or self.earlier
            self.steps = []


class EMA(Callback):
    """Exponential moving average of the trained parameters; each rank keeps its part of it.

    The average adapts faster at the beginning: the decay of update n is at most (1 + n) / (10 + n). It is kept in the
    parameters' type, at least float32; buffers are not averaged. `checkpoint export --ema` writes it.

    Args:
        decay: average = decay x average + (1 - decay) x parameters after each step; from 0 to below 1.
        evaluate: whether evaluations use the averaged parameters in place of the trained ones.
    """

    def __init__(self, *, decay: float = 0.999, evaluate: bool = False) -> None:
        _require("decay", decay, least=0.0, below=1.0)
        self.decay = decay
        self.evaluate = evaluate
        self.num_updates: int | None = None

    def attach(self, parts: Parts) -> None:
        """Creates the average, with the same shards as the parameters."""
        import torch

        self.model = parts.model
        self.parameters = [parameter for parameter in parts.model.parameters() if parameter.requires_grad]
        self.average = [
            parameter.detach().clone().to(torch.promote_types(parameter.dtype, torch.float32))
            for parameter in self.parameters
        ]

    def on_start(self, _trainer: TrainerView) -> None:
        """Begins with the parameters as they are, unless a checkpoint had an average."""
        if self.num_updates is None:
            self.num_updates = 0
            _copy(self.average, self.parameters)

    def on_step_end(self, _trainer: TrainerView) -> None:
        """Moves the average towards the parameters."""
        import torch

        assert self.num_updates is not None
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        average = _local(self.average)
        now = [tensor.to(averaged.dtype) for tensor, averaged in zip(_local(self.parameters), average, strict=True)]
        torch._foreach_lerp_(average, now, 1 - decay)

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        from slurm_train.checkpoint.state import sharded_modules

        trained = [parameter.detach().clone() for parameter in self.parameters]
        # Parameters that FSDP2 has gathered have the old values.
        sharded = sharded_modules(self.model)
        try:
            _copy(self.parameters, self.average)
            for module in sharded:
                module.reshard()
            yield
        finally:
            _copy(self.parameters, trained)
            for module in sharded:
                module.reshard()

    def evaluating(self) -> AbstractContextManager[None]:
        """Returns a context with the averaged parameters in the model; the trained ones come back bit for bit."""
        return self._averaged() if self.evaluate else nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Returns the average by the parameters' names."""
        average = {id(parameter): tensor for parameter, tensor in zip(self.parameters, self.average, strict=True)}
        names = self.model.named_parameters(remove_duplicate=False)
        named = {name: average[id(parameter)] for name, parameter in names if id(parameter) in average}
        return {"num_updates": self.num_updates, "average": named}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the count; the average is filled already."""
        self.num_updates = state["num_updates"]


def _local(tensors: Sequence[Tensor]) -> list[Tensor]:
    from slurm_train.checkpoint.state import local_part

    return [local_part(tensor.detach()) for tensor in tensors]


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies what this rank holds of tensors into others."""
    for target, source in zip(_local(targets), _local(sources), strict=True):
        target.copy_(source)


class ProfilerWindow(Callback):
    """Profiles some steps with torch.profiler, and writes the traces into `profiles/` of the run directory.

    Args:
        start_step: the first step of the window; choose a later one than the first of an attempt, which is start-up.
        steps: number of steps.
        ranks: ranks that are profiled.
    """

    def __init__(self, *, start_step: int = 20, steps: int = 5, ranks: Sequence[int] = (0,)) -> None:
        _require("start_step", start_step, least=1)
        _require("steps", steps, least=1)
        _require_list("ranks", ranks)
        for rank in ranks:
            _require("ranks", rank, least=0)
        self.first = start_step
        self.last = start_step + steps - 1
        self.ranks = ranks
        self._profiler: Any = None

    def on_start(self, trainer: TrainerView) -> None:
        """Opens the window, if the next step is in it."""
        self.on_step_end(trainer)

    def on_step_end(self, trainer: TrainerView) -> None:
        """Opens the window before its first step, and closes it after its last."""
        is_inside = self.first <= trainer.position.step + 1 <= self.last
        if self._profiler is not None and not is_inside:
            self._close(trainer)
        elif self._profiler is None and is_inside and trainer.rank.place.rank in self.ranks:
            import torch

            self._profiler = torch.profiler.profile()
            self._profiler.start()

    def on_stop(self, trainer: TrainerView) -> None:
        """Closes the window."""
        self._close(trainer)

    def on_end(self, trainer: TrainerView) -> None:
        """Closes the window."""
        self._close(trainer)

    def _close(self, trainer: TrainerView) -> None:
        if self._profiler is None:
            return
        rank = trainer.rank
        profiler = self._profiler
        self._profiler = None
        profiler.stop()
        rank.run.profiles.mkdir(exist_ok=True)
        path = rank.run.profiles / f"step_{self.first}_attempt_{rank.attempt}_rank_{rank.place.rank}.json.gz"
        profiler.export_chrome_trace(str(path))
        trainer.say(f"profile up to step {trainer.position.step}: {path}")


class TextSamples(Callback):
    """Lets a language model continue prompts every n steps, into `samples.jsonl` of the run directory.

    The data must be prepared text, which gives the encoding, and the model must have `generate`; else, and with
    pipeline, context or sequence parallelism, a line says so and nothing is written.

    Args:
        every_steps: steps between samples.
        prompts: text or texts to continue; "" is the beginning of a document.
        num_tokens: length of a continuation.
    """

    def __init__(self, *, every_steps: int = 500, prompts: str | Sequence[str] = "", num_tokens: int = 100) -> None:
        _require("every_steps", every_steps, least=1)
        _require("num_tokens", num_tokens, least=1)
        self.every_steps = every_steps
        self.num_tokens = num_tokens
        if isinstance(prompts, str):
            prompts = [prompts]
        _require_list("prompts", prompts)
        self.prompts = list(prompts)

    def attach(self, parts: Parts) -> None:
        """Keeps model and data."""
        from slurm_train.data.source import describe

        self.parts = parts
        layout = parts.rank.layout
        self.encoding = describe(parts.train_data).encoding
        can_generate = hasattr(parts.model, "generate") and self.encoding is not None
        # Sequence parallelism divides positions, and a text may have any number of them.
        splits_positions = parts.rank.config.parallel.sequence_parallel
        self.is_possible = can_generate and layout.pp == layout.cp == 1 and not splits_positions

    def on_start(self, trainer: TrainerView) -> None:
        """Prints a line if there will be no samples."""
        if not self.is_possible:
            trainer.say(
                "no text samples: they need prepared text, a model with generate, and no pp, cp or sequence_parallel"
            )

    def on_step_end(self, trainer: TrainerView) -> None:
        """Writes the samples of a step, when they are due."""
        rank = trainer.rank
        step = trainer.position.step
        # All ranks compute a model that is cut together.
        takes_part = rank.place.is_first or not rank.layout.is_replicated
        if step % self.every_steps or not self.is_possible or not takes_part:
            return
        from slurm_train.train.preserve import preserved
        from slurm_train.train.texts import sample_text

        model = self.parts.model
        assert self.encoding is not None
        encoding = self.encoding()
        with trainer.span("evaluate_s"):
            with preserved(model):
                texts = [sample_text(model, encoding, prompt, num_tokens=self.num_tokens) for prompt in self.prompts]
            if rank.place.is_first:
                with rank.run.samples.open("a", encoding="utf-8") as file:
                    for prompt, text in zip(self.prompts, texts, strict=True):
                        print(json.dumps({"step": step, "prompt": prompt, "text": text}), file=file)
