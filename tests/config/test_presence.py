from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slurm_train.config.presence import require_target
from slurm_train.errors import ConfigError


@pytest.fixture
def search(tmp_path: Path) -> list[str]:
    source = "raise RuntimeError\nfrom os import path as p\nclass Net: ...\nX = 1\n"
    (tmp_path / "mine.py").write_text(source)
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("from .inner import *\n")
    (package / "inner.py").write_text("def build(): ...\n")
    (tmp_path / "bare" / "deep").mkdir(parents=True)
    (tmp_path / "bare" / "deep" / "nets.py").write_text("class Net: ...\n")
    return [str(tmp_path)]


@pytest.mark.parametrize(
    "target",
    ["mine.Net", "mine.p", "mine.X", "pack.inner.build", "pack.anything", "fractions.Fraction", "bare.deep.nets.Net"],
)
def test_what_is_there_is_found_without_running_it(target: str, search: list[str]) -> None:
    require_target("model", {"_target_": target}, search=[*search, *sys.path])


@pytest.mark.parametrize(
    ("target", "text", "hint"),
    [
        ("nowhere.Net", "there is no module 'nowhere'", "start from the folder"),
        ("mine.Nett", "mine has no 'Nett'", "did you mean mine.Net?"),
        ("pack.inner.zzz", "pack.inner has no 'zzz'", "it is looked for in"),
        ("bare.deep.nets.Nett", "bare.deep.nets has no 'Nett'", "did you mean bare.deep.nets.Net?"),
        ("Net", "is not a dotted path", "package.module.name"),
    ],
)
def test_what_is_not_there_is_said(target: str, text: str, hint: str, search: list[str]) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        require_target("model", {"_target_": target}, search=search)
    assert hint in caught.value.hint


def test_a_keyword_that_the_target_does_not_take_is_said(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise RuntimeError\nclass Net:\n    def __init__(self, width): ...\n")
    with pytest.raises(ConfigError, match=r"own\.Net does not take 'widht'; it takes width"):
        require_target("model", {"_target_": "own.Net", "widht": 1}, search=[str(tmp_path)])


def test_our_own_and_none_are_not_looked_for() -> None:
    require_target("model", {"_target_": "slurm_train.models.gpt.GPT"}, search=[])
    require_target("task", None, search=[])
