"""Features of the trainer in combinations, which tests of one feature each do not see.

A trial draws one of each kind: model and data, layout, optimizer, batch, precision and so on. Of several candidates it
takes the one with most pairs that no trial had yet. What is typed trains, or is refused with a sentence. A run that
trains is trained once more, stopped at a random step and typed again: losses, tensors and callbacks must be the same,
bit for bit. A third one is stopped and resumed in another layout, and the weights are evaluated by themselves.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slurm_train.data.prepare import PrepareOptions, prepare
from slurm_train.errors import EXIT_DONE, EXIT_REQUEUE
from tests.campaigns.record import Tally
from tests.support.command_line import REPOSITORY, Done, Person
from tests.support.run_ends import End, end_of
from tests.support.warm_commands import WarmPerson

STEPS = 8
_CANDIDATES = 20
_ONCE_IN = 6
"""So often a choice is taken as it is drawn, though it may be known to be refused."""
_TOLERANCE = 1e-3
_CALLBACKS = "slurm_train.train.callbacks"
_GPT = ("model.width=16", "model.num_layers=2", "model.num_heads=2", "model.tied=false", "data.context=16")
_MODULE = """
import os, signal
from torch import nn
from slurm_train.train.callbacks import Callback

class StopAt(Callback):
    def on_step_end(self, trainer):
        place = trainer.rank.place
        if trainer.position.step + 1 == int(os.environ.get("STOP_AT", 0)) and place.rank == place.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)

class Statistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, images):
        return self.layers(images)
"""
_HELD_OUT = "data.heldout={_target_: own_model.Waves, split: heldout}"
KINDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "subject": {
        "text": ("model=gpt", *_GPT, "data=text", "data.path=web"),
        "mix": ("model=gpt", *_GPT, "data=mix", "data.sources={web: {path: web, weight: 3}, code: {path: code}}"),
        "images": ("model=cnn", "model.features=8", "data=digits"),
        "statistics": ("model._target_=parts.Statistics", "data=digits"),
        "stream": ("model._target_=own_model.Regressor", "data._target_=own_stream.Shards", "data.path=tar", _HELD_OUT),
    },
    "layout": {
        "DDP 2": ("run.processes=2",),
        "one rank": ("run.processes=1",),
        "DDP 3": ("run.processes=3",),
        "FSDP 2": ("run.processes=2", "parallel.dp_replicate=1", "parallel.dp_shard=2"),
        "TP 2": ("run.processes=2", "parallel.tp=2"),
        "PP 2": ("run.processes=2", "parallel.pp=2"),
        "CP 2": ("run.processes=2", "parallel.cp=2"),
        "HSDP": ("run.processes=4", "parallel.dp_replicate=2", "parallel.dp_shard=2"),
    },
    "optimizer": {
        "AdamW": (),
        "SGD": ("optim=sgd",),
        "Muon": ("optim=muon",),
        "NAdam": ("optim._target_=torch.optim.NAdam",),
        "SGD for some": ("optim.groups=[{dims: 1, _target_: torch.optim.SGD, momentum: 0.9}]",),
    },
    "batch": {
        "plain": ("batch.global_size=16",),
        "accumulated": ("batch.global_size=16", "batch.accumulation=2"),
        "odd": ("batch.global_size=17",),
        "grows": ("batch.global_size=8", "batch.growth={2: 2, 5: 3}"),
    },
    "precision": {
        "float32": (),
        "bfloat16": ("train.precision=bfloat16",),
        "float16": ("train.precision=float16",),
        "bfloat16 parameters": ("train.param_dtype=bfloat16",),
    },
    "callbacks": {
        "none": (),
        "average": (f"{{_target_: {_CALLBACKS}.EMA, decay: 0.9, evaluate: true}}",),
        "best": (f"{{_target_: {_CALLBACKS}.BestCheckpoint}}",),
        "patience": (f"{{_target_: {_CALLBACKS}.EarlyStopping, patience: 1, min_delta: 0.02}}",),
    },
    "saves": {
        "every 3": ("checkpoint.every_steps=3",),
        "at the end": ("checkpoint.every_steps=null",),
        "one, waited for": ("checkpoint.every_steps=2", "checkpoint.keep=1", "checkpoint.background=false"),
    },
    "ddp": {"plain": (), "static": ("ddp.static_graph=true",), "bfloat16": ("ddp.comm=bf16",)},
    "blocks": {"plain": (), "recomputed": ("parallel.activation_checkpointing=full",)},
}
_REPLICAS = ("parallel.dp_replicate=-1", "parallel.dp_shard=auto", "parallel.tp=1", "parallel.pp=1", "parallel.cp=1")
Choice = dict[str, str]


def choices(number: int, *, of_seed: int) -> Iterator[Choice]:
    """Yields so many combinations, which have as many pairs of features as may be."""
    drawing, seen = random.Random(of_seed), set[tuple[tuple[str, str], ...]]()

    def draw() -> Choice:
        choice = {kind: drawing.choice(list(names)) for kind, names in KINDS.items()}
        return choice if drawing.randrange(_ONCE_IN) == 0 else _without_refusals(choice)

    for _ in range(number):
        best = max((draw() for _ in range(_CANDIDATES)), key=lambda one: len(_pairs(one) - seen))
        seen |= _pairs(best)
        yield best


def _without_refusals(choice: Choice) -> Choice:
    """Returns a choice that is like it, and of which most are not refused."""
    possible = dict(choice)
    if choice["subject"] not in ("text", "mix"):
        possible["blocks"] = "plain"
        possible["layout"] = choice["layout"] if choice["layout"][:2] not in ("TP", "PP", "CP") else "FSDP 2"
    if not possible["layout"].startswith(("DDP", "one")):
        possible["ddp"] = "plain"
    if possible["layout"] == "PP 2":
        possible["batch"] = "accumulated"
    return possible


def _pairs(choice: Choice) -> set[tuple[tuple[str, str], ...]]:
    return set(itertools.combinations(choice.items(), 2))


def words_of(choice: Choice) -> list[str]:
    """Returns what is typed for a combination, without a name."""
    parts = {kind: KINDS[kind][name] for kind, name in choice.items()}
    callbacks = ", ".join(["{_target_: parts.StopAt}", *parts.pop("callbacks")])
    words = [word for part in parts.values() for word in part]
    words += ["optim.lr=3e-3", f"train.max_steps={STEPS}", "train.eval_every_steps=3", f"callbacks=[{callbacks}]"]
    return [*words, "train.log_every_steps=1", "train.samples_digest=true", "train.threads=1", "train.sample_tokens=0"]


def differences(found: End, expected: End) -> list[str]:
    """Returns what differs between two runs that must be the same bit for bit."""
    # torch's generator is seeded at each step; ranks that read the same samples get its state from one of them.
    states = [[{**(state or {}), "rng": None} for state in end.ranks] for end in (found, expected)]
    wrong = {
        "losses differ": found.lines != expected.lines,
        "tensors differ": found.tensors != expected.tensors,
        "states of ranks differ": states[0] != states[1],
    }
    return [sentence for sentence, is_wrong in wrong.items() if is_wrong]


def far_apart(found: End, expected: End, *, compares_losses: bool) -> list[str]:
    """Returns what differs between two runs in different layouts by more than the order of additions."""
    problems = []
    for ours, theirs in itertools.zip_longest(found.lines, expected.lines, fillvalue=dict[str, Any]()):
        exact = ("step", "samples_digest", "lr")
        problems += [f"{key} of step {theirs.get('step')} differs" for key in exact if ours.get(key) != theirs.get(key)]
        pairs = [(ours.get(key), theirs.get(key)) for key in ("loss", "eval_loss")] if compares_losses else []
        for one, other in pairs:
            if (one is None) != (other is None) or (one and not math.isclose(one, other or 0.0, rel_tol=_TOLERANCE)):
                problems.append(f"{one} and {other} in step {theirs.get('step')}")
    return problems


class Trial:
    """One combination, tried in a folder that has code and data."""

    def __init__(self, person: WarmPerson, choice: Choice, drawing: random.Random) -> None:
        self.person, self.choice, self.drawing = person, choice, drawing
        self.words = words_of(choice)
        self.problems: list[str] = []
        self.outcomes: list[str] = []
        self.of_refused = set[Path]()

    def run(self) -> None:
        """Trains, stops, moves and evaluates; leaves no run behind."""
        shutil.rmtree(self.person.folder / "runs", ignore_errors=True)
        whole = self._types(*self.words, "run.name=whole")
        if whole.code:
            self.outcomes.append("refused")
            is_sentence = "error: " in whole.err and "hint: " in whole.err
            self.problems += [] if is_sentence else [f"ended with {whole.code} and no sentence"]
            return
        self.outcomes.append("trained")
        expected = end_of(self._path("whole"))
        self._stops("cut", expected)
        again = self._types(*self.words, "run.name=cut")
        if again.code:
            self.problems.append(f"typed again it ended with {again.code}: {again.err[-200:]}")
        else:
            self.problems += differences(end_of(self._path("cut")), expected)
        self._moves(expected)
        self._evaluates(expected)

    def _stops(self, name: str, expected: End) -> None:
        last = max(line["step"] for line in expected.lines)
        done = self._types(*self.words, f"run.name={name}", env={"STOP_AT": str(self.drawing.randint(2, last))})
        if done.code != EXIT_REQUEUE:
            self.problems.append(f"{name}: asked to stop it ended with {done.code}")

    def _moves(self, expected: End) -> None:
        """Resumes in another layout; a stream stays on as many ranks, and patience may end at another step."""
        name = self.drawing.choice([name for name in KINDS["layout"] if name != self.choice["layout"]])
        if self.choice["subject"] == "stream" or self.choice["callbacks"] == "patience":
            return
        self._stops("moved", expected)
        settings = {word.partition("=")[0]: word for word in (*_REPLICAS, *KINDS["layout"][name])}
        moved = self._types("resume", str(self._path("moved")), *settings.values())
        self.outcomes.append(f"resumed in another layout{', refused' if moved.code else ''}")
        if not moved.code:
            # Statistics are those of one rank's samples.
            is_like = self.choice["precision"] == "float32" and self.choice["subject"] != "statistics"
            is_like = is_like and self.choice["ddp"] != "bfloat16" and self.choice["optimizer"] != "Muon"
            self.problems += [
                f"in {name}: {problem}"
                for problem in far_apart(end_of(self._path("moved")), expected, compares_losses=is_like)[:3]
            ]

    def _evaluates(self, expected: End) -> None:
        measured = self._types("evaluate", str(self._path("whole")))
        of_run = [line["eval_loss"] for line in expected.lines if line["eval_loss"] is not None]
        loss = json.loads(measured.out)["eval_loss"] if measured.code == 0 else math.nan
        tolerance = 1e-5 if self.choice["precision"] == "float32" else 0.03
        if not math.isclose(loss, of_run[-1], rel_tol=tolerance):
            self.problems.append(f"evaluated: {loss}, in the run {of_run[-1]}")

    def _path(self, name: str) -> Path:
        (path,) = (self.person.folder / "runs" / name).iterdir()
        return path

    def _types(self, *words: str, env: dict[str, str] | None = None) -> Done:
        done = self.person.types(*words, env=env)
        logs = self.person.folder.glob("runs/*/*/logs/*/rank_*.log")
        with_traceback = {path for path in logs if "Traceback" in path.read_text(errors="replace")}
        if done.code not in (EXIT_DONE, EXIT_REQUEUE):
            # Where one rank has refused, others may miss it in an exchange.
            self.of_refused |= with_traceback
        if "Traceback" in done.err or with_traceback - self.of_refused:
            self.problems.append(f"a traceback: {' '.join(words[:2])} ... {words[-1]}")
        return done


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Tries so many combinations."""
    person = WarmPerson(folder / "project")
    fill(person.folder)
    outcomes = Counter[str]()
    pairs = set[Any]()
    for number, choice in enumerate(choices(trials, of_seed=seed)):
        trial = Trial(person, choice, random.Random(seed * 1000 + number))
        with tally.trial(f"{number}: {', '.join(choice.values())}") as problems:
            trial.run()
            problems += trial.problems
        outcomes.update(trial.outcomes)
        pairs |= _pairs(choice)
    return {
        **{outcome: str(count) for outcome, count in sorted(outcomes.items())},
        "pairs of features": str(len(pairs)),
    }


def fill(folder: Path) -> None:
    """Writes the code and the data of all subjects."""
    folder.mkdir(parents=True)
    (folder / "parts.py").write_text(_MODULE)
    for name in ("own_model.py", "own_stream.py"):
        shutil.copy(REPOSITORY / "examples" / name, folder)
    person = Person(folder)
    assert person.runs(person.python, "own_stream.py", "tar").code == 0
    for name in ("web", "code"):
        (folder / f"{name}.txt").write_text(f"the words of {name}, one after the other\n" * 400)
        prepare([folder / f"{name}.txt"], out=folder / name, options=PrepareOptions())
