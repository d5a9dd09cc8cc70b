from __future__ import annotations

import ast
from typing import Any

import pytest

from slurm_train.config.signature import read_signature, require_keywords
from slurm_train.errors import ConfigError

SOURCE = """
class Net(Module):
    def __init__(self, width, depth=2, *, act="relu"): ...
class Data:
    def __init__(self, path, split="train"): ...
class Open(Module):
    def __init__(self, **words): ...
class Inherits(Module): ...
@dataclass
class Decorated:
    x: int
    def __init__(self, x): ...
class Twice:
    def __init__(self, a): ...
Twice = wrap(Twice)
def main(context, *, rounds=3): ...
@wrap
def wrapped(context): ...
if fast:
    def late(x): ...
"""
TREE = ast.parse(SOURCE)


@pytest.mark.parametrize("name", ["Open", "Inherits", "Decorated", "Twice", "wrapped", "late", "absent"])
def test_what_the_source_does_not_say_plainly_is_left_to_the_rank(name: str) -> None:
    assert read_signature(TREE, name) is None


@pytest.mark.parametrize(
    ("key", "name", "words", "text", "hint"),
    [
        ("model", "Net", {"width": 1, "depht": 3}, "does not take 'depht'; it takes width, depth, act", "model.depth?"),
        ("model", "Net", {"depth": 3}, "needs width", "set model.width=<value>"),
        ("data", "Data", {"path": "x", "zzz": 1}, "does not take 'zzz'; it takes path\n", "leave data.zzz out"),
        ("data", "Data", {}, "needs path\n", "set data.path=<value>"),
        ("task", "main", {"round": 1}, "does not take 'round'; it takes rounds", "task.rounds?"),
    ],
)
def test_wrong_keywords_are_said(key: str, name: str, words: dict[str, Any], text: str, hint: str) -> None:
    signature = read_signature(TREE, name)
    assert signature is not None
    with pytest.raises(ConfigError, match=text) as caught:
        require_keywords(key, {"_target_": f"mine.{name}", **words}, signature)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("key", "name", "words"),
    [
        ("model", "Net", {"width": 1, "act": "gelu"}),
        ("model", "Net", {"_args_": [1]}),
        ("model", "Net", {"_partial_": True}),
        ("data", "Data", {"path": "x", "num_workers": 2, "heldout": {"path": "y"}, "keyed_randomness": False}),
        ("task", "main", {}),
    ],
)
def test_right_keywords_pass(key: str, name: str, words: dict[str, Any]) -> None:
    signature = read_signature(TREE, name)
    assert signature is not None
    require_keywords(key, {"_target_": f"mine.{name}", **words}, signature)
