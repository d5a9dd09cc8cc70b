from __future__ import annotations

import fractions
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from slurm_train.config.target import instantiate, require_target, resolve_target
from slurm_train.errors import ConfigError
from tests.support.refusals import refusal


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    root = tmp_path / "my_pkg_for_targets"
    root.mkdir()
    (root / "__init__.py").write_text("from .main import main\nfrom .point import Point\n")
    (root / "main.py").write_text("def main(*, width=1):\n    return width\n")
    (root / "point.py").write_text("class Point:\n    def __init__(self, x, y=0):\n        self.at = (x, y)\n")
    (root / "broken.py").write_text("import a_module_that_is_not_here\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield root.name
    for name in [name for name in sys.modules if name.startswith(root.name)]:
        del sys.modules[name]


def test_a_dotted_path_gives_what_it_names() -> None:
    assert resolve_target("math.hypot") is math.hypot
    assert resolve_target("fractions.Fraction.from_float")(0.5) == fractions.Fraction(1, 2)
    with pytest.raises(ConfigError, match="there is no module 'int' here"):
        resolve_target("int.from_bytes")


def test_name_of_the_package_wins_over_a_module_of_that_name(package: str) -> None:
    assert resolve_target(f"{package}.main")(width=4) == 4


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("Point", "_target_='Point' is not a dotted path\nhint: write it as package.module.name"),
        ("{p}.", "_target_='{p}.' is not a dotted path\nhint: write it as package.module.name"),
        ("{p}.Piont", "_target_={p}.Piont: {p} has no 'Piont'\nhint: did you mean Point, point?"),
        ("{p}.brokn.X", "_target_={p}.brokn.X: {p} has no 'brokn'\nhint: see python -c 'help(\"{p}\")'"),
        (
            "{p}.broken.X",
            "_target_={p}.broken.X: importing {p}.broken failed: No module named 'a_module_that_is_not_here'\n"
            "hint: try: python -c 'import {p}.broken'",
        ),
        ("{p}.point", "_target_={p}.point is a module\nhint: name a class or a function in it: {p}.point.<name>"),
        ("{p}.Point.at.x", "_target_={p}.Point.at.x: {p}.Point has no 'at'\nhint: see python -c 'help(\"{p}.Point\")'"),
    ],
)
def test_message_of_a_wrong_path(package: str, path: str, text: str) -> None:
    assert str(refusal(ConfigError, resolve_target, path.format(p=package))) == text.format(p=package)


def test_nested_targets_are_built_first(package: str) -> None:
    inner = {"_target_": f"{package}.main", "width": 3}
    point = instantiate({"_target_": f"{package}.Point", "x": inner, "y": [inner, {"z": inner}]})
    assert point.at == (3, [3, {"z": 3}])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"x": 1, "yy": 2}, "{p}.Point got an unexpected keyword argument 'yy'\nhint: it takes x, y"),
        ({"y": 2}, "{p}.Point missing a required argument: 'x'\nhint: it takes x, y"),
    ],
)
def test_message_of_wrong_keywords(package: str, words: dict[str, int], text: str) -> None:
    assert str(refusal(ConfigError, instantiate, {"_target_": f"{package}.Point", **words})) == text.format(p=package)


def test_mapping_without_target_and_target_that_is_no_callable(package: str) -> None:
    with pytest.raises(ConfigError, match=r"a mapping with the keys \['x'\] has no _target_"):
        instantiate({"x": 1})
    with pytest.raises(ConfigError, match=r"_target_=math\.pi is a float and cannot be called"):
        instantiate({"_target_": "math.pi"})


ACTING = (
    *("os.system", "os.path.join", "posix.system", "subprocess.run", "builtins.eval", "builtins.exec", "builtins.open"),
    *("builtins.__import__", "importlib.import_module", "runpy.run_path", "pickle.loads", "ctypes.CDLL", "sys.exit"),
    *("shutil.rmtree", "socket.create_connection", "timeit.timeit", "pty.spawn", "operator.methodcaller"),
    *("torch.load", "torch.hub.load", "torch.serialization.load", "torch.utils.cpp_extension.load_inline"),
    *(
        "hydra.utils.call",
        "slurm_train.tools.devcluster.system.run_command",
        "slurm_train.slurm.commands.run_process",
    ),
)


@pytest.mark.parametrize("path", ACTING)
def test_what_acts_on_the_machine_is_no_target(path: str) -> None:
    for mapping in ({"_target_": path}, {"_target_": "fractions.Fraction", "a": [{"_target_": path}]}):
        with pytest.raises(ConfigError, match=r"part of a run|machinery of this package"):
            instantiate(mapping)
        with pytest.raises(ConfigError, match=r"part of a run|machinery of this package"):
            require_target("model", mapping, search=sys.path)


@pytest.mark.parametrize("way", ["os.system", "run", "helper.subprocess.run", "evaluate", "loader"])
def test_a_way_around_through_a_users_own_module_ends_at_the_same_place(package: str, way: str) -> None:
    root = Path(sys.path[0]) / package
    (root / "__init__.py").write_text("import os\nfrom subprocess import run\nfrom . import helper\nevaluate = eval\n")
    (root / "helper.py").write_text("import subprocess\n")
    with (root / "__init__.py").open("a") as file:
        file.write("from pickle import loads as loader\n")
    with pytest.raises(ConfigError, match="part of a run"):
        resolve_target(f"{package}.{way}")


DIRECTIONS = [
    ({"_args_": [3, 4]}, (3, 4)),
    ({"_args_": [3], "y": 5}, (3, 5)),
    ({"x": 1, "_convert_": "all"}, (1, 0)),
    ({"x": {"_target_": "fractions.Fraction"}, "_recursive_": False}, ({"_target_": "fractions.Fraction"}, 0)),
]


@pytest.mark.habit("`_target_`, `_args_`, `_partial_`, `_recursive_`, `_convert_`")
@pytest.mark.parametrize(("keys", "at"), DIRECTIONS, ids=str)
def test_what_hydras_instantiate_takes_beside_keywords_is_taken(
    package: str, keys: dict[str, object], at: object
) -> None:
    assert instantiate({"_target_": f"{package}.Point", **keys}).at == at


def test_a_partial_is_called_later_and_its_keywords_are_checked_now(package: str) -> None:
    mapping = {"_target_": f"{package}.Point", "_partial_": True, "y": 7}
    assert instantiate(mapping)(x=1).at == (1, 7)
    with pytest.raises(ConfigError, match="unexpected keyword argument 'z'"):
        instantiate({**mapping, "z": 1})


# On the login node, from the source alone


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
    (tmp_path / "signatures.py").write_text(SIGNATURES)
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "__init__.py").write_text("from .deep import Net as Again\n")
    (tmp_path / "again" / "deep.py").write_text("from signatures import Net\n")
    return [str(tmp_path)]


@pytest.mark.parametrize(
    "target",
    [
        *("mine.Net", "mine.p", "mine.X", "pack.inner.build", "pack.anything", "fractions.Fraction"),
        *("bare.deep.nets.Net", "slurm_train.models.gpt.GPT"),
    ],
)
def test_what_is_there_is_found_without_running_it(target: str, search: list[str]) -> None:
    require_target("model", {"_target_": target}, search=[*search, *sys.path])
    require_target("task", None, search=[])


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
def test_what_is_not_there_is_refused_with_the_nearest(target: str, text: str, hint: str, search: list[str]) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        require_target("model", {"_target_": target}, search=search)
    assert hint in caught.value.hint


SIGNATURES = """
raise RuntimeError
from again import Again as Renamed
class Net(Module):
    def __init__(self, width, depth=2, *, act="relu"): ...
class Data:
    def __init__(self, path, split="train"): ...
class Stream:
    def __init__(self, path, rank, num_ranks): ...
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


@pytest.mark.parametrize(
    ("key", "name", "words", "text", "hint"),
    [
        ("model", "Net", {"width": 1, "depht": 3}, "unexpected keyword argument 'depht'", "it takes width, depth, act"),
        ("model", "Net", {"depth": 3}, "missing a required argument: 'width'", "it takes width, depth, act"),
        ("data", "Data", {"path": "x", "zzz": 1}, "unexpected keyword argument 'zzz'", "it takes path, split"),
        ("data", "Data", {}, "missing a required argument: 'path'", "it takes path"),
        ("task", "main", {"round": 1}, "unexpected keyword argument 'round'", "it takes context, rounds"),
        # Through two modules that import it.
        ("model", "Renamed", {"width": 1, "depht": 3}, "unexpected keyword argument 'depht'", "it takes width, depth"),
    ],
)
def test_wrong_keywords_are_read_from_the_source(
    key: str, name: str, words: dict[str, Any], text: str, hint: str, search: list[str]
) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        require_target(key, {"_target_": f"signatures.{name}", **words}, search=search)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("key", "name", "words"),
    [
        ("model", "Net", {"width": 1, "act": "gelu"}),
        ("model", "Net", {"_args_": [1]}),
        ("model", "Net", {"_partial_": True}),
        ("data", "Data", {"path": "x", "num_workers": 2, "heldout": {"path": "y"}, "keyed_randomness": False}),
        ("data", "Stream", {"path": "x", "prefetch": 2, "allow_world_change": True}),
        ("task", "main", {}),
        # What the source does not say plainly is left to the rank.
        *(("model", name, {"zzz": 1}) for name in ("Open", "Inherits", "Decorated", "Twice", "wrapped", "late")),
    ],
)
def test_right_keywords_pass(key: str, name: str, words: dict[str, Any], search: list[str]) -> None:
    require_target(key, {"_target_": f"signatures.{name}", **words}, search=search)
