"""What the verbs about runs have in common on the command line: their look, their examples, and where runs lie."""

from __future__ import annotations

import argparse
import os
import pwd
from collections.abc import Sequence

RUN_HELP = "run name, run id, job id or path"


def login_name() -> str:
    """Returns the name of the user who types, as accounting knows it; the uid where it has no entry in passwd."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def build_run_parser(verb: str, *, description: str | None, examples: str) -> argparse.ArgumentParser:
    """Returns a parser with `--root`, to which the verb adds what is its own.

    Args:
        verb: the word that picks it, e.g. "status".
        description: the verb's module docstring.
        examples: shown as written below the options.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m slurm_train {verb}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--root", default="runs", help="root of the runs (default: runs)")
    return parser


def parse_run_and_settings(
    parser: argparse.ArgumentParser, words: Sequence[str], *, run_help: str
) -> tuple[argparse.Namespace, list[str]]:
    """Returns the flags, with the run as `run`, and the settings among the words, on either side of run and flags.

    What a flag is given is its value, also with an equals sign in it: `--root /a=b`.

    Args:
        parser: with the verb's flags, and no words without a flag.
        words: what was typed behind the verb.
        run_help: what the run may be.
    """
    parser.add_argument("words", nargs="*", metavar="RUN", help=run_help)
    arguments = parser.parse_intermixed_args(list(words))
    # A path may have an equals sign, too; no key begins like one.
    settings = [word for word in arguments.words if "=" in word and not word.startswith(("/", ".", "~/"))]
    runs = [word for word in arguments.words if word not in settings]
    if len(runs) != 1:
        what = f"several runs are named: {' '.join(runs)}" if runs else "the following arguments are required: RUN"
        parser.error(what)
    arguments.run = runs[0]
    return arguments, settings
