"""Reads the commands of the pages, as a person would who copies them: each with the output that the page shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# What a line of a code block begins with, a prompt and settings of variables aside, if it is to be typed.
_PROGRAMS = (
    "accelerate",
    "apt-get",
    "cd",
    "cp",
    "export",
    "git",
    "ip",
    "ln",
    "make",
    "mlflow",
    "pip",
    "python",
    "salloc",
    "sbatch",
    "scancel",
    "scontrol",
    "slurm_train",
    "srun",
    "ssh",
    "sudo",
    "tc",
    "torchrun",
    "touch",
    "wandb",
)
_COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{'|'.join(_PROGRAMS)})(?: |$)")
_CODE = re.compile(r"^```(\w*)\n(.*?)^```$|((?:^    [^\n]*\n(?:\n(?=    ))*)+)", re.MULTILINE | re.DOTALL)
_OTHER_LANGUAGES = ("python", "yaml", "text", "mermaid")


@dataclass(frozen=True, slots=True)
class PageCommand:
    """A command of a page.

    Args:
        page: the page's name.
        line: what is typed, without the remark behind it.
        shown: the lines below it, where the page shows what it prints.
    """

    page: str
    line: str
    shown: tuple[str, ...] = ()


def commands_of(path: Path) -> Iterator[PageCommand]:
    """Yields the commands of a page in its order."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    for language, fenced, indented in _CODE.findall(text):
        if language not in _OTHER_LANGUAGES:
            yield from _commands_in(fenced or indented, page=path.name)


def _commands_in(block: str, *, page: str) -> Iterator[PageCommand]:
    found = list[tuple[str, list[str]]]()
    for line in block.splitlines():
        bare = line.strip()
        if _COMMAND.match(bare.removeprefix("$ ")):
            found.append((re.split(r"\s+# ", bare)[0], []))
        elif found and bare and not bare.startswith("#"):
            found[-1][1].append(bare)
    for typed, below in found:
        # Without a prompt the lines below are no output.
        yield PageCommand(page, typed.removeprefix("$ "), tuple(below) if typed.startswith("$ ") else ())
