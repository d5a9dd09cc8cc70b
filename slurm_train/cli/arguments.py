"""What the verbs about runs have in common on the command line: their look, their examples, and where runs lie."""

from __future__ import annotations

import argparse
import os
import pwd

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
