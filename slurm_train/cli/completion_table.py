"""Builds the table that `complete` answers from: the flags of all verbs, and the keys of the configuration.

It asks the verbs' own parsers and the schema, which takes as long as importing all verbs (about half a second), so it
is done once for an installation.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Literal, get_args, get_origin

from slurm_train.assets import asset_dir, package_dir
from slurm_train.cli.main import VERBS
from slurm_train.config import words
from slurm_train.config.schema import RunConfig, all_keys
from slurm_train.metrics.trackers.catalogue import NAMES
from slurm_train.standing.states import STATE_WORDS

_LONGEST_TEXT = 60
# What a flag or a word takes, by its name in the parser.
_TAKES = {
    **dict.fromkeys(("root", "config_dir", "config_path", "out", "state", "tokenizer", "inputs", "target"), "path"),
    **dict.fromkeys(("only", "states"), ",".join(STATE_WORDS)),
    "accept": "changes",
    "parts": "config,code,environment",
    "trackers": ",".join(NAMES),
    "config_name": "primary file",
}
# How the name of a word begins that means a run or a sweep.
_PLACES = ("RUN", "SWEEP", "A", "B", "WHAT")
_RUNS_ONLY = ("logs", "checkpoint", "diff", "track")
# Keys that hold a path, which the schema calls a text.
_PATH_KEYS = ("run.root", "checkpoint.local_dir", "data.path", "cluster.python")
# The schema has no text for these.
_ROOT_MEANINGS = {
    "seed": "Seed of everything random: weights, order of the samples, dropout",
    "launch": "slurm: as a job; interactive: in an salloc; local: here",
    "site": "site=NAME: a file with the values of your cluster",
    "task": "task._target_=my_package.main: your function on every rank",
    "script": "script=[train.py,--flag]: your script on every rank",
}
_HYDRA = {
    "hydra.run.dir": "path",
    **dict.fromkeys(("hydra.sweep.dir", "hydra.sweep.subdir", "hydra.output_subdir", "hydra.job.name"), ""),
    "hydra.mode": "RUN|MULTIRUN",
    "hydra.searchpath": "",
    "hydra/launcher": "basic",
    "hydra/sweeper": "basic",
}


def build_lines() -> list[str]:
    """Returns the lines of the table: part, name, what it takes and what it means, with tabs between them."""
    rows = [("folders", str(asset_dir("conf")), "", ""), ("folders", "~/.config/slurm_train", "", "")]
    rows += [("flags ", flag, takes, "") for flag, takes in sorted(_read_settings_flags().items())]
    for verb in VERBS:
        parser = _ask_parser(verb)
        rows += [] if parser is None else _read_verb(verb, parser)
    rows += _read_keys()
    rows += [("keys", name, takes, "a setting of Hydra's") for name, takes in _HYDRA.items()]
    return ["\t".join(row) + "\n" for row in rows]


class _Asked(Exception):
    """A verb has made its parser; what would have followed is not wanted."""


def _ask_parser(verb: str) -> argparse.ArgumentParser | None:
    """Returns the parser of a verb, None for one that reads settings and prints a help of its own."""
    found: list[argparse.ArgumentParser] = []

    def stop(self: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        found.append(self)
        raise _Asked

    # Each verb makes its parser inside its main: parsing is replaced while it is asked; nothing else runs then.
    parsing = argparse.ArgumentParser.parse_args, argparse.ArgumentParser.parse_intermixed_args
    argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_intermixed_args = stop  # type: ignore[assignment]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(_Asked, SystemExit):
            import_module(f"slurm_train.cli.{verb}").main(["--help"])
    finally:
        argparse.ArgumentParser.parse_args, argparse.ArgumentParser.parse_intermixed_args = parsing  # type: ignore[method-assign]
    return found[0] if found else None


def _read_verb(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, str, str]]:
    """Yields the rows of a verb, and of each action that follows it ("checkpoint ls")."""
    for index, action in enumerate(parser._actions):
        if isinstance(action, argparse._SubParsersAction):
            yield f"words {name}", str(index), "|".join(action.choices), ""
            for inner, its_parser in action.choices.items():
                yield from _read_verb(f"{name} {inner}", its_parser)
        elif action.help == argparse.SUPPRESS:
            continue
        elif action.option_strings:
            yield f"flags {name}", max(action.option_strings, key=len), _takes(name, action), _short(action.help)
        else:
            repeats = "..." if action.nargs in ("*", "+") else ""
            yield f"words {name}", str(index), _takes(name, action) + repeats, ""


def _takes(verb: str, action: argparse.Action) -> str:
    if action.nargs == 0:
        return "-"
    if action.choices:
        return "|".join(map(str, action.choices))
    if action.dest in _TAKES:
        return _TAKES[action.dest]
    if action.option_strings or not str(action.metavar).startswith(_PLACES):
        return ""
    if action.metavar == "SWEEP":
        return "sweep"
    return "run" if verb.split()[0] in _RUNS_ONLY else "run or sweep"


def _short(text: str | None) -> str:
    first = " ".join((text or "").split()).partition(";")[0]
    return first if len(first) <= _LONGEST_TEXT else f"{first[: _LONGEST_TEXT - 3].rstrip()}..."


def _read_settings_flags() -> dict[str, str]:
    """Returns the flags of a command line of settings, with what they take."""
    choices = {target: "|".join(values) for target, values in words._CHOICES.items()}
    flags = {flag: choices.get(target) or _TAKES.get(target, "") for flag, target in words._FLAGS.items()}
    flags |= dict.fromkeys(words._SWITCHES, "-") | {"--info": choices["info"], "--accept": "changes"}
    return {flag: takes for flag, takes in flags.items() if flag.startswith("--")}


def _read_keys() -> Iterator[tuple[str, str, str, str]]:
    """Yields the rows of the schema's keys."""
    kinds, meanings = all_keys(RunConfig), _ROOT_MEANINGS | _read_meanings()
    for name, kind in kinds.items():
        if not any(other.startswith(f"{name}.") for other in kinds):
            yield "keys", name, _takes_key(name, kind), _short(meanings.get(name))


def _takes_key(name: str, kind: Any) -> str:
    if name in _PATH_KEYS:
        return "path"
    options = [kind, *get_args(kind)]
    if any(get_origin(option) is dict for option in options):
        return "open"
    if bool in options:
        return "true|false"
    literals = [str(value) for option in options if get_origin(option) is Literal for value in get_args(option)]
    return "|".join([*literals, "null"] if literals and type(None) in options else literals)


def _read_meanings() -> dict[str, str]:
    """Returns the text under each field of the schema by its key, e.g. {"optim.lr": "Peak learning rate ..."}."""
    tree = ast.parse((package_dir() / "config" / "schema.py").read_text(encoding="utf-8"))
    classes = {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}

    def read(owner: str, prefix: str) -> Iterator[tuple[str, str]]:
        for field, below in zip(classes[owner], [*classes[owner][1:], None], strict=True):
            if isinstance(field, ast.AnnAssign):
                name, kind = prefix + ast.unparse(field.target), ast.unparse(field.annotation).removesuffix(" | None")
                if kind in classes:
                    yield from read(kind, f"{name}.")
                elif isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                    yield name, str(below.value.value)

    return dict(read("RunConfig", ""))
