"""`diff RUN_A [RUN_B]`: what differs between two runs: configuration, code, environment.

With one run: what has changed since in the folder that its code came from, and in the packages installed here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from slurm_train.cli.terminal import BOLD, painted, takes_escapes
from slurm_train.config.frozen import in_words
from slurm_train.config.words import read_names
from slurm_train.errors import ConfigError
from slurm_train.launch.comparison import PARTS, Comparison, compare
from slurm_train.rundir.lookup import find_run
from slurm_train.rundir.paths import RunDirectory
from slurm_train.verbs import parse

_STYLES = {"---": BOLD, "+++": BOLD, "+": "32", "-": "31", "@@": "36"}
"""Of a line by its beginning, the first that fits; 32 is green, 31 red, 36 cyan."""


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
    in_colour = takes_escapes(sys.stdout, os.environ)
    for line in _lines(old, new, found, stat=arguments.stat):
        style = next((style for start, style in _STYLES.items() if line.startswith(start)), "")
        print(painted(line, style if in_colour else ""))
    return 0


def _lines(old: RunDirectory, new: RunDirectory | None, found: Comparison, *, stat: bool) -> Iterator[str]:
    yield f"--- {old.name}/{old.run_id}  {old.path}"
    yield "+++ now" if new is None else f"+++ {new.name}/{new.run_id}  {new.path}"
    if found.config is not None:
        yield _heading("config", found.config)
        width = max((len(change.key) for change in found.config), default=0)
        for change in sorted(found.config, key=lambda one: (one.kind == "harmless", one.key)):
            remark = "  (does not change what is trained)" if change.kind == "harmless" else ""
            yield f"  {change.key:<{width}}  {in_words(change.old)} -> {in_words(change.new)}{remark}"
    if found.code is not None:
        revisions = "" if len(set(found.revisions)) == 1 else f": {' -> '.join(found.revisions)}"
        yield _heading(f"code{revisions}", found.code)
        for file in found.code:
            yield from [f"  {file}"] if stat else found.unified(file)
    if found.environment is not None:
        yield _heading("environment", found.environment)
        yield from (f"  {item}" for item in found.environment)
    yield from found.unknown


def _heading(name: str, differences: Sequence[object]) -> str:
    return f"\n{name}{'' if differences else ': the same'}"
