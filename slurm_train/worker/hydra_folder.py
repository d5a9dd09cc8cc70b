"""The folder of a script that is a Hydra application: the same at each start, not one that is named by the time.

Hydra's default is `outputs/<date>/<time>`, so a start after a preemption has another folder, finds no checkpoint of the
first one, and each rank may make its own. A folder that the script's configuration fixes stays. Imports neither Hydra
nor torch, and runs nothing of the script.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from slurm_train.trust import read_text

_KEY = "hydra.run.dir"
_NOW = "${now:"
_PLAIN = re.compile(r"[\w./+@%-]+")
_MOST_FILES = 300


def hydra_folder_word(file: Path, arguments: Sequence[str], folder: Path) -> str:
    """Returns the word that gives a Hydra application its folder, "" where it needs none.

    Args:
        file: of the script.
        arguments: of the script; those that choose a folder, or several runs, count.
        folder: to be used.
    """
    if any(word.lstrip("+~").startswith((_KEY, "hydra.sweep.")) or word in ("-m", "--multirun") for word in arguments):
        return ""
    main = _decorator(file)
    if main is None or not _is_named_by_time(_texts(file, main)):
        return ""
    text = str(folder)
    return f"{_KEY}={text}" if _PLAIN.fullmatch(text) else f"{_KEY}='{text}'"


def _decorator(file: Path) -> ast.expr | None:
    """Returns the `hydra.main` of a file, with its arguments if it has some; None of a file without."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in ("hydra", "hydra.main")
        for alias in node.names
        if alias.name == "main"
    }
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for decorator in node.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            if ast.unparse(called) == "hydra.main" or (isinstance(called, ast.Name) and called.id in names):
                return decorator
    return None


def _texts(file: Path, main: ast.expr) -> list[str]:
    """Returns the texts of the configuration files that a `hydra.main` names, as far as they can be read."""
    given = {keyword.arg: keyword.value for keyword in main.keywords} if isinstance(main, ast.Call) else {}
    path = given.get("config_path")
    if not isinstance(path, ast.Constant) or not isinstance(path.value, str):
        return []
    texts = []
    for found in sorted((file.parent / path.value).rglob("*.y*ml"))[:_MOST_FILES]:
        try:
            texts.append(read_text(found, errors="replace"))
        except OSError:
            continue
    return texts


def _is_named_by_time(texts: Sequence[str]) -> bool:
    """Returns whether a folder of Hydra's is named by the time: its default is, and one that refers to the time.

    Args:
        texts: of the configuration's files.
    """
    folders = [folder for text in texts for folder in _folders_in(text)]
    if not folders:
        return True
    has_time = any(_NOW in text for text in texts)
    return all(_NOW in folder or ("${" in folder and has_time) for folder in folders)


def _folders_in(text: str) -> Iterator[str]:
    """Yields the values of `hydra.run.dir` in a file; those of the group `hydra` begin at `run`."""
    try:
        content: Any = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return
    if not isinstance(content, dict):
        return
    for section in (content.get("hydra"), content):
        run = section.get("run") if isinstance(section, dict) else None
        if isinstance(run, dict) and isinstance(run.get("dir"), str):
            yield run["dir"]
