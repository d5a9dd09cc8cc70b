"""The person's own source of a run: the files that it starts with, and those that they import or start. Not run.

Two things are looked for in it before a run is submitted, since they would be missing on the nodes: variables of the
shell (`shell_variables`), and files beside the source (`by_file`).
"""

from __future__ import annotations

import ast
import re
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from slurm_train.code.imports import is_installed, own_paths
from slurm_train.config.program import program_of
from slurm_train.config.schema import RunConfig
from slurm_train.config.target import targets_in

_MOST_FILES = 300
_MOST_BYTES = 1 << 20
SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
_SHELL_SUFFIXES = (".sh", ".bash")
_SHELL_OPTION_WITH_VALUE = re.compile(r"[-+]\w*[oO]|--rcfile|--init-file")
"""E.g. "-euo", which "pipefail" follows."""
_FILE_IN_TEXT = re.compile(r"[\w./-]+\.(?:py|sh|bash)\b")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of Python or of a shell, or the command of `bash -c`."""

    path: Path
    """Of a command, the name of the shell."""
    text: str
    tree: ast.Module | None
    """None for a shell's."""


def read_program(config: RunConfig, cwd: Path, *, paths: Sequence[str] | None = None) -> Iterator[SourceFile]:
    """Yields the source of a run's program, as far as it can be read, each file once.

    Args:
        config: of the run: its script, or the targets that it names.
        cwd: the folder that it is submitted from.
        paths: where Python finds packages; default: as this Python. Installed packages are left out.
    """
    places = [Path(path) for path in (own_paths() if paths is None else paths) if path and not is_installed(path)]
    words = config.script or []
    awaited = deque(_first_files(config, cwd, places))
    for command in shell_commands(words):
        yield SourceFile(Path(words[0]), command, None)
        awaited += _named_files(command, cwd)
    seen = set[Path]()
    while awaited and len(seen) < _MOST_FILES:
        path = awaited.popleft()
        if path in seen:
            continue
        seen.add(path)
        source = _read(path)
        if source is None:
            continue
        yield source
        if source.tree is None:
            awaited += _named_files(source.text, cwd)
        else:
            awaited += _imported(source.tree, path, [path.parent, cwd, *places])


def shell_commands(words: Sequence[str]) -> Iterator[str]:
    """Yields the commands of `bash -c COMMAND` among the words of a script."""
    for index, word in enumerate(words):
        if PurePath(word).name in SHELLS:
            yield from filter(None, shell_argument(words[index + 1 :])[:1])


def shell_argument(words: Sequence[str]) -> tuple[str, str]:
    """Returns the command of `bash -c COMMAND` and the file of `bash FILE`, by what follows the shell; one is ""."""
    behind = iter(words)
    for word in behind:
        if re.fullmatch(r"-\w*c", word):
            return next(behind, ""), ""
        if _SHELL_OPTION_WITH_VALUE.fullmatch(word):
            next(behind, "")
        elif not word.startswith(("-", "+")):
            return "", word
    return "", ""


def _first_files(config: RunConfig, cwd: Path, places: Sequence[Path]) -> Iterator[Path]:
    """Yields the files that the words of a script name, or the targets of the configuration."""
    words = config.script or []
    for index, word in enumerate(words):
        if word == "-m" and index + 1 < len(words):
            # Of a package, `python -m` runs this module.
            yield from _module_files([*words[index + 1].split("."), "__main__"], [cwd, cwd / "src", *places])
        elif (index == 0 or _FILE_IN_TEXT.fullmatch(word)) and (cwd / word).is_file():
            yield cwd / word
    for target in targets_in(program_of(config).sections):
        yield from _module_files(target.split("."), [cwd, cwd / "src", *places])


def _module_files(words: Sequence[str], places: Iterable[Path]) -> Iterator[Path]:
    """Yields the person's own files that the import of "a.b.c" runs; the last words may be names in a module."""
    if words[0] in ("slurm_train", "torch"):
        return
    for place in places:
        folder = place
        found = False
        for word in words:
            file = folder / f"{word}.py"
            folder = folder / word
            if file.is_file():
                yield file
                return
            if not folder.is_dir():
                break
            if (folder / "__init__.py").is_file():
                found = True
                yield folder / "__init__.py"
        if found:
            return


def _named_files(text: str, cwd: Path) -> list[Path]:
    """Returns the files that a shell's commands name."""
    return [cwd / name for name in _FILE_IN_TEXT.findall(_without_comments(text)) if (cwd / name).is_file()]


def _without_comments(text: str) -> str:
    return re.sub(r"(?m)^\s*#.*$", "", text)


def _read(path: Path) -> SourceFile | None:
    try:
        text = path.read_text(encoding="utf-8") if path.stat().st_size < _MOST_BYTES else ""
        if path.suffix == ".py" or re.match(r"#!.*python", text):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return SourceFile(path, text, ast.parse(text))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None
    is_shell = path.suffix in _SHELL_SUFFIXES or re.match(r"#!.*\b(?:ba|z|da|k)?sh\b", text)
    return SourceFile(path, _without_comments(text), None) if is_shell else None


def _imported(tree: ast.Module, path: Path, places: Sequence[Path]) -> Iterator[Path]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _module_files(alias.name.split("."), places)
        elif isinstance(node, ast.ImportFrom):
            words = node.module.split(".") if node.module else []
            if node.level:
                parents = list(path.parents)[node.level - 1 : node.level]
                for alias in node.names:
                    yield from _module_files([*words, alias.name], parents)
            else:
                for alias in node.names:
                    yield from _module_files([*words, alias.name], places)
