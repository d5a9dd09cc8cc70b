"""The options of a program, from their names and defaults; and what a program prints as JSON."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


def read_options(*arguments: str, **defaults: Any) -> Any:
    """Returns what the command line says; `--help` shows the docstring of the program that runs.

    Args:
        *arguments: names of words that must be there.
        **defaults: by name; a type stands for an option without a default, a tuple for one that takes several words.
    """
    program = sys.modules["__main__"]
    parser = argparse.ArgumentParser(description=program.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in arguments:
        parser.add_argument(name)
    for name, default in defaults.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, tuple):
            parser.add_argument(flag, nargs="*", default=default)
        elif isinstance(default, type):
            parser.add_argument(flag, type=default)
        else:
            parser.add_argument(flag, type=type(default), default=default)
    return parser.parse_args()


def json_of(module: str, *words: str, env: Mapping[str, str] | None = None) -> Any:
    """Returns what a module prints in its last line, run in a process of its own with additions to the environment."""
    argv = [sys.executable, "-W", "ignore", "-m", module, *words]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **(env or {})})
    return json.loads(done.stdout.splitlines()[-1])
