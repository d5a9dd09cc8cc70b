"""Writes slurm_train/cli/completion_table.py: what a shell may complete, taken from the parsers and the schema.

    python .ci/write_completion_table.py            # writes the module
    python .ci/write_completion_table.py --check    # says whether it is up to date

A TAB has a tenth of a second. Importing the verbs to ask their parsers takes longer than that, so they are asked here.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

REPOSITORY = Path(__file__).resolve().parents[1]
MODULE = REPOSITORY / "slurm_train" / "cli" / "completion_table.py"
LONGEST_TEXT = 60

HEAD = '''\
"""What a shell may complete. Written by `.ci/write_completion_table.py`; do not edit it by hand."""

from __future__ import annotations

'''
# What a flag or a word takes, told by its name: the parsers say it to people only.
KINDS = {
    "root": "path",
    "config_dir": "path",
    "out": "path",
    "state": "path",
    "tokenizer": "path",
    "inputs": "path",
    "target": "path",
    "only": "states",
    "states": "states",
    "accept": "changes",
    "parts": "config|code|environment",
    "trackers": "tensorboard|wandb|mlflow|trackio",
}
# How the name of a word begins that means a run or a sweep.
PLACES = ("RUN", "SWEEP", "A", "B", "WHAT")
RUNS_ONLY = ("logs", "checkpoint", "diff", "track")
# Keys that hold a path, which the schema calls a text.
PATH_KEYS = ("run.root", "checkpoint.local_dir", "data.path", "cluster.python")


class Asked(Exception):
    """A verb has handed over its parser; what would have followed is not wanted."""


def ask_parser(verb: str) -> argparse.ArgumentParser | None:
    """Returns the parser of a verb, None for one that reads settings."""
    found: list[argparse.ArgumentParser] = []

    def hand_over(self: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        found.append(self)
        raise Asked

    parse = argparse.ArgumentParser.parse_args
    argparse.ArgumentParser.parse_args = hand_over  # type: ignore[assignment]
    try:
        # A verb that reads settings prints its help.
        with contextlib.redirect_stdout(io.StringIO()):
            import_module(f"slurm_train.cli.{verb}").main(["--help"])
    except Asked:
        return found[0]
    except SystemExit:
        pass
    finally:
        argparse.ArgumentParser.parse_args = parse  # type: ignore[method-assign]
    return None


def read_verb(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the entries of a verb: its own, and one for each action that follows it."""
    flags: dict[str, list[str]] = {}
    words: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            words.append("|".join(action.choices))
            for inner, its_parser in action.choices.items():
                yield from read_verb(f"{name} {inner}", its_parser)
        elif action.help == argparse.SUPPRESS:
            continue
        elif action.option_strings:
            flags[max(action.option_strings, key=len)] = [_kind(name, action), _short(action.help)]
        else:
            words.append(_kind(name, action) + ("..." if action.nargs in ("*", "+") else ""))
    yield name, {"flags": flags, "words": words}


def _kind(verb: str, action: argparse.Action) -> str:
    """Returns what an action takes: a kind, "a|b" for choices, "" for nothing to complete, "-" for no value at all."""
    if action.nargs == 0:
        return "-"
    if action.choices:
        return "|".join(map(str, action.choices))
    if action.dest in KINDS:
        return KINDS[action.dest]
    if not action.option_strings and str(action.metavar).startswith(PLACES):
        if action.metavar == "SWEEP":
            return "sweep"
        return "run" if verb.split()[0] in RUNS_ONLY else "run or sweep"
    return ""


def _short(text: str | None) -> str:
    first = " ".join((text or "").split()).partition(";")[0]
    return first if len(first) <= LONGEST_TEXT else f"{first[: LONGEST_TEXT - 3].rstrip()}..."


def read_settings_flags() -> dict[str, list[str]]:
    """Returns the flags of a command line of settings."""
    from slurm_train.config import words

    kinds = {"config_dir": "path", "config_path": "path", "config_name": "primary file"}
    flags = {
        flag: ["|".join(words._CHOICES[target]) if target in words._CHOICES else kinds.get(target, ""), ""]
        for flag, target in words._FLAGS.items()
    }
    flags |= {flag: ["-", ""] for flag in words._SWITCHES}
    flags |= {"--info": ["|".join(words._CHOICES["info"]), ""], "--accept": ["changes", ""]}
    return {flag: value for flag, value in sorted(flags.items()) if flag.startswith("--")}


def read_keys() -> dict[str, list[str]]:
    """Returns the keys of the schema with what they take and what they mean."""
    from slurm_train.config.schema import RunConfig
    from slurm_train.config.structure import all_keys

    kinds = all_keys(RunConfig)
    meanings = {key.name: key.meaning for section in _page_writer().read_sections() for key in section.keys}
    return {
        name: [_values(name, kind), _short(meanings.get(name, ""))]
        for name, kind in kinds.items()
        if not any(other.startswith(f"{name}.") for other in kinds)
    }


def _values(name: str, kind: Any) -> str:
    if name in PATH_KEYS:
        return "path"
    options = [kind, *get_args(kind)]
    if any(get_origin(option) is dict for option in options):
        return "open"
    if bool in options:
        return "true|false"
    literals = [value for option in options if get_origin(option) is Literal for value in get_args(option)]
    literals += [value for value in get_args(kind) if get_origin(kind) is Literal]
    values = list(dict.fromkeys(map(str, literals)))
    return "|".join([*values, "null"] if values and type(None) in options else values)


def _page_writer() -> Any:
    path = REPOSITORY / ".ci" / "write_configuration_page.py"
    spec = importlib.util.spec_from_file_location("write_configuration_page", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def render() -> str:
    """Returns the text of the module."""
    from slurm_train.cli.main import VERBS
    from slurm_train.standing.states import STATE_WORDS

    entries: dict[str, dict[str, Any]] = {}
    for verb in VERBS:
        parser = ask_parser(verb)
        entries |= {} if parser is None else dict(read_verb(verb, parser))
    parts = [
        _table("VERBS", "dict[str, str]", "Verbs with what they do.", VERBS),
        _table(
            "FLAGS",
            "dict[str, dict[str, tuple[str, str]]]",
            'Flags of each verb, and of "checkpoint ls" and the like: what they take, and what they mean.',
            {name: entry["flags"] for name, entry in entries.items()},
        ),
        _table(
            "WORDS",
            "dict[str, tuple[str, ...]]",
            "What the bare words of a verb name, in their order.",
            {name: entry["words"] for name, entry in entries.items()},
        ),
        _table(
            "SETTINGS_FLAGS",
            "dict[str, tuple[str, str]]",
            "Flags of a command line of settings.",
            read_settings_flags(),
        ),
        _table("STATES", "tuple[str, ...]", "Words for the state of a run.", list(STATE_WORDS)),
        _table(
            "KEYS", "dict[str, tuple[str, str]]", "Keys of the configuration: values, and what they mean.", read_keys()
        ),
    ]
    return HEAD + "\n".join(parts)


def _table(name: str, kind: str, about: str, value: Mapping[str, Any] | Sequence[str]) -> str:
    return f'{name}: {kind} = {_text(value, "")}\n"""{about}"""\n'


def _text(value: Any, indent: str) -> str:
    if isinstance(value, Mapping):
        if not value:
            return "{}"
        inner = "".join(
            f"{indent}    {json.dumps(key)}: {_text(item, indent + '    ')},\n" for key, item in value.items()
        )
        return f"{{\n{inner}{indent}}}"
    if isinstance(value, (list, tuple)):
        one_line = ", ".join(_text(item, indent) for item in value)
        if not indent:
            return "(\n" + "".join(f"    {json.dumps(item)},\n" for item in value) + ")"
        return f"({one_line}{',' if len(value) == 1 else ''})"
    # As the formatter has it.
    return f"'{value}'" if '"' in value and "'" not in value else json.dumps(value)


def main() -> int:
    """Writes the module, or checks it; returns the exit code."""
    sys.path.insert(0, str(REPOSITORY))
    text = render()
    if "--check" not in sys.argv[1:]:
        MODULE.write_text(text, encoding="utf-8")
        return 0
    if MODULE.is_file() and MODULE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{MODULE} is out of date: run python .ci/write_completion_table.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
