"""`diff RUN_A [RUN_B]`: what differs between two runs: configuration, code, environment.

With one run: what has changed since in the folder that its code came from, and in the packages installed here.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_train.cli.arguments import RUN_HELP, build_run_parser
from slurm_train.cli.terminal import build_console, takes_escapes
from slurm_train.config.frozen import Change, in_words
from slurm_train.config.words import read_names
from slurm_train.errors import ConfigError
from slurm_train.launch.comparison import PARTS, Comparison, as_json, compare_runs, compare_with_now
from slurm_train.rundir.lookup import find_run

if TYPE_CHECKING:
    from slurm_train.rundir.layout import RunDirectory

_EXAMPLES = """\
examples:
  python -m slurm_train diff 3f9a1c07 7e497dfb                  configuration, code and environment
  python -m slurm_train diff 3f9a1c07 7e497dfb --only code      a unified diff of the two copies of the code
  python -m slurm_train diff 3f9a1c07 7e497dfb --stat           lines added and removed per file
  python -m slurm_train diff 3f9a1c07                           what you have changed since
"""
Line = tuple[str, str]
"""A line and its style: "title", "head", "added", "removed", "hunk" or "" for none."""
_STYLES = {"title": "bold", "head": "bold", "added": "green", "removed": "red", "hunk": "cyan", "faint": "dim"}


def main(words: Sequence[str]) -> int:
    """Prints what differs and returns 0, whether or not something does."""
    arguments = _parse(words)
    parts = _parts(arguments.parts)
    root = Path(arguments.root)
    old = find_run(root, arguments.run)
    new = find_run(root, arguments.other) if arguments.other else None
    found = compare_with_now(old, parts=parts, env=os.environ) if new is None else compare_runs(old, new, parts=parts)
    if arguments.json:
        names = {"old": str(old.path), "new": None if new is None else str(new.path)}
        print(json.dumps({**names, **as_json(found)}, indent=2, default=str))
        return 0
    _put_out(_lines(old, new, found, stat=arguments.stat), os.environ)
    return 0


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = build_run_parser("diff", description=__doc__, examples=_EXAMPLES)
    parser.add_argument("run", metavar="RUN_A", help=RUN_HELP)
    parser.add_argument("other", metavar="RUN_B", nargs="?", help="default: the folder of RUN_A as it is now")
    parser.add_argument("--only", dest="parts", metavar="PARTS", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--stat", action="store_true", help="of code, lines added and removed per file")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    return parser.parse_args(list(words))


def _parts(text: str | None) -> list[str]:
    if text is None:
        return list(PARTS)
    names = read_names(text)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise ConfigError(f"--only {unknown[0]}: there is no such part", hint=f"parts: {', '.join(PARTS)}")
    return names


def _lines(old: RunDirectory, new: RunDirectory | None, found: Comparison, *, stat: bool) -> Iterator[Line]:
    yield f"--- {old.name}/{old.run_id}  {old.path}", "title"
    yield "+++ now" if new is None else f"+++ {new.name}/{new.run_id}  {new.path}", "title"
    if found.config is not None:
        yield from _section("config", len(found.config))
        yield from _config_lines(found.config)
    if found.code is not None:
        revisions = "" if found.revisions[0] == found.revisions[1] else f": {' -> '.join(found.revisions)}"
        yield from _section(f"code{revisions}", len(found.code))
        for change in found.code:
            if stat:
                yield f"  {change}", ""
            else:
                yield from ((line, _style_of(line, index)) for index, line in enumerate(found.unified(change)))
    if found.environment is not None:
        yield from _section("environment", len(found.environment))
        for item in found.environment:
            yield f"  {item}", ""
    for text in found.unknown:
        yield text, ""


def _section(name: str, num_differences: int) -> Iterator[Line]:
    yield "", ""
    yield name if num_differences else f"{name}: the same", "head"


def _config_lines(changes: Sequence[Change]) -> Iterator[Line]:
    width = max((len(change.key) for change in changes), default=0)
    for change in sorted(changes, key=lambda one: (one.kind == "harmless", one.key)):
        text = f"  {change.key:<{width}}  {in_words(change.old)} -> {in_words(change.new)}"
        is_harmless = change.kind == "harmless"
        yield f"{text}  (does not change what is trained)" if is_harmless else text, "faint" if is_harmless else ""


def _style_of(line: str, index: int) -> str:
    if index < 2:
        return "head"
    return {"+": "added", "-": "removed", "@": "hunk"}.get(line[:1], "")


def _put_out(lines: Iterator[Line], env: Mapping[str, str]) -> None:
    if not takes_escapes(sys.stdout, env):
        for text, _ in lines:
            print(text)
        return
    from rich.text import Text

    console = build_console(sys.stdout, env)
    for text, style in lines:
        console.print(Text(text, style=_STYLES.get(style, "")), soft_wrap=True)
