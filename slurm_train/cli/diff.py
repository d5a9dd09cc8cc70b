"""`diff RUN_A [RUN_B]`: what differs between two runs: configuration, code, environment.

With one run: what has changed since in the folder that its code came from, and in the packages installed here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from slurm_train.cli.terminal import build_console, takes_escapes
from slurm_train.config.frozen import in_words
from slurm_train.config.words import read_names
from slurm_train.errors import ConfigError
from slurm_train.launch.comparison import PARTS, Comparison, compare
from slurm_train.rundir.lookup import find_run
from slurm_train.rundir.paths import RunDirectory
from slurm_train.verbs import parse

Line = tuple[str, str]
"""A line and its style for rich; "" for none."""
_BOLD = "bold"
_OF_SIGN = {"+": "green", "-": "red", "@": "cyan"}


def main(words: Sequence[str]) -> int:
    """Prints what differs and returns 0, whether or not something does."""
    arguments = parse("diff", words)
    parts = list(PARTS) if arguments.only is None else read_names(arguments.only)
    if unknown := [name for name in parts if name not in PARTS]:
        raise ConfigError(f"--only {unknown[0]}: there is no such part", hint=f"parts: {', '.join(PARTS)}")
    root = Path(arguments.root)
    old = find_run(root, arguments.run)
    new = find_run(root, arguments.other) if arguments.other else None
    found = compare(old, new, parts=parts, env=os.environ)
    if arguments.json:
        names = {"old": str(old.path), "new": None if new is None else str(new.path)}
        print(json.dumps({**names, **found.as_json()}, indent=2, default=str))
        return 0
    lines = _lines(old, new, found, stat=arguments.stat)
    if not takes_escapes(sys.stdout, os.environ):
        for text, _ in lines:
            print(text)
        return 0
    from rich.text import Text

    console = build_console(sys.stdout, os.environ)
    for text, style in lines:
        console.print(Text(text, style=style), soft_wrap=True)
    return 0


def _lines(old: RunDirectory, new: RunDirectory | None, found: Comparison, *, stat: bool) -> Iterator[Line]:
    yield f"--- {old.name}/{old.run_id}  {old.path}", _BOLD
    yield "+++ now" if new is None else f"+++ {new.name}/{new.run_id}  {new.path}", _BOLD
    if found.config is not None:
        yield from _heading("config", len(found.config))
        width = max((len(change.key) for change in found.config), default=0)
        for change in sorted(found.config, key=lambda one: (one.kind == "harmless", one.key)):
            text = f"  {change.key:<{width}}  {in_words(change.old)} -> {in_words(change.new)}"
            is_harmless = change.kind == "harmless"
            yield (f"{text}  (does not change what is trained)", "dim") if is_harmless else (text, "")
    if found.code is not None:
        revisions = "" if len(set(found.revisions)) == 1 else f": {' -> '.join(found.revisions)}"
        yield from _heading(f"code{revisions}", len(found.code))
        for file in found.code:
            if stat:
                yield f"  {file}", ""
            else:
                lines = enumerate(found.unified(file))
                yield from ((line, _BOLD if index < 2 else _OF_SIGN.get(line[:1], "")) for index, line in lines)
    if found.environment is not None:
        yield from _heading("environment", len(found.environment))
        yield from ((f"  {item}", "") for item in found.environment)
    yield from ((text, "") for text in found.unknown)


def _heading(name: str, num_differences: int) -> Iterator[Line]:
    yield "", ""
    yield name if num_differences else f"{name}: the same", _BOLD
