from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from slurm_train.config.target import instantiate, keywords_in_source, require_target, resolve_target
from slurm_train.errors import ConfigError, PreflightError
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


def test_name_of_the_package_wins_over_a_module_of_that_name(package: str) -> None:
    assert resolve_target(f"{package}.main")(width=4) == 4


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("Point", "_target_='Point' is not a dotted path\nhint: write it as package.module.name"),
        ("{p}.Piont", "_target_={p}.Piont: {p} has no 'Piont'\nhint: did you mean Point, point?"),
        (
            "{p}.broken.X",
            "_target_={p}.broken.X: importing {p}.broken failed: No module named 'a_module_that_is_not_here'\n"
            "hint: try: python -c 'import {p}.broken'",
        ),
        ("{p}.point", "_target_={p}.point is a module\nhint: name a class or a function in it: {p}.point.<name>"),
    ],
)
def test_message_of_a_wrong_path(package: str, path: str, text: str) -> None:
    assert str(refusal(ConfigError, resolve_target, path.format(p=package))) == text.format(p=package)


def test_a_library_that_this_node_lacks_may_be_on_another(package: str, tmp_path: Path) -> None:
    lacks = 'raise ImportError("libcudart.so.12: cannot open shared object file: No such file or directory")\n'
    (tmp_path / package / "lacks.py").write_text(lacks)
    error = refusal(PreflightError, resolve_target, f"{package}.lacks.X")
    assert "libcudart.so.12" in error.message and error.exit_code == 1


@pytest.mark.parametrize(
    ("mapping", "text"),
    [
        ({"_target_": "fractions.Fraction", "yy": 2}, "got an unexpected keyword argument 'yy'"),
        ({"_target_": "int.from_bytes"}, "there is no module 'int' here"),
        ({"x": 1}, "a mapping with the keys ['x'] has no _target_"),
        ({"_target_": "math.pi"}, "_target_=math.pi is a float and cannot be called"),
    ],
)
def test_what_cannot_be_built_is_refused(mapping: dict[str, Any], text: str) -> None:
    assert text in str(refusal(ConfigError, instantiate, mapping))


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


def test_a_file_with_the_name_of_a_module_of_python_is_to_be_renamed() -> None:
    error = refusal(ConfigError, require_target, "model", {"_target_": "queue.Net"}, search=sys.path)
    assert "is in Python's module queue, which acts on the machine" in error.message
    assert error.hint.endswith("; a file queue.py of yours needs another name")


DIRECTIONS = [
    ({"_args_": [3, 4]}, (3, 4)),
    ({"x": 1, "_convert_": "all"}, (1, 0)),
    (
        {"x": {"_target_": "math.sqrt", "_args_": [9]}, "y": [{"z": {"_target_": "math.sqrt", "_args_": [4]}}]},
        (3, [{"z": 2}]),
    ),
    ({"x": {"_target_": "fractions.Fraction"}, "_recursive_": False}, ({"_target_": "fractions.Fraction"}, 0)),
]


@pytest.mark.habit("`_target_`, `_args_`, `_partial_`, `_recursive_`, `_convert_`")
@pytest.mark.parametrize(("keys", "at"), DIRECTIONS, ids=str)
def test_what_hydras_instantiate_takes_beside_keywords_is_taken(
    package: str, keys: dict[str, object], at: object
) -> None:
    mapping = {"_target_": f"{package}.Point", **keys}
    assert instantiate(mapping).at == instantiate({**mapping, "_partial_": True})().at == at


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


FOUND = ["mine.p", "mine.X", "pack.anything", "fractions.Fraction", "bare.deep.nets.Net", "slurm_train.models.gpt.GPT"]
NOT_FOUND = [
    ("nowhere.Net", "there is no module 'nowhere'", "start from the folder"),
    ("pack.inner.zzz", "pack.inner has no 'zzz'", "it is looked for in"),
    ("bare.deep.nets.Nett", "bare.deep.nets has no 'Nett'", "did you mean bare.deep.nets.Net?"),
]


def test_what_is_there_is_found_without_running_it(search: list[str]) -> None:
    for target in FOUND:
        require_target("model", {"_target_": target}, search=[*search, *sys.path])
    require_target("task", None, search=[])
    (Path(search[0]) / "broken.py").write_text("import torch\nclass Net\n    pass\n")
    broken = {"_target_": "broken.Net"}
    error = refusal(ConfigError, require_target, "model", broken, search=search)
    assert error.message.startswith("model._target_=broken.Net: SyntaxError in line 2 of ") and "class Net" in str(
        error
    )
    require_target("model", broken, search=search, judges_syntax=False)  # another Python may read it
    for target, text, hint in NOT_FOUND:
        error = refusal(ConfigError, require_target, "model", {"_target_": target}, search=search)
        assert text in error.message and hint in error.hint


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
class Lit(LightningModule):
    def training_step(self, batch, number): ...
class Both(Lit):
    def training_step(self, batch, number): ...
    def training_loss(self, batch): ...
"""


TAKES = "it takes width, depth, act"
KEYWORDS: list[tuple[str, str, dict[str, Any], str, str]] = [
    ("model", "Net", {"depth": 3}, "missing a required argument: 'width'", TAKES),
    ("model", "Renamed", {"width": 1, "depht": 3}, "unexpected keyword argument 'depht'", TAKES),
    ("data", "Data", {"path": "x", "zzz": 1}, "unexpected keyword argument 'zzz'", "it takes path, split"),
    ("task", "main", {"round": 1}, "unexpected keyword argument 'round'", "it takes context, rounds"),
    ("model", "Lit", {}, "signatures.Lit has a training_step", "script=[train.py]"),
    ("model", "Both", {}, "", ""),
    ("model", "Net", {"_args_": [1]}, "", ""),
    ("data", "Data", {"path": "x", "num_workers": 2, "heldout": {"path": "y"}, "keyed_randomness": False}, "", ""),
    ("data", "Stream", {"path": "x", "prefetch": 2, "allow_world_change": True}, "", ""),
    # What the source does not say plainly is left to the rank.
    *(("model", name, {"zzz": 1}, "", "") for name in ("Open", "Inherits", "Decorated", "Twice", "wrapped", "late")),
]


@pytest.mark.parametrize(("key", "name", "words", "text", "hint"), KEYWORDS)
def test_keywords_are_checked_against_the_source(
    key: str, name: str, words: dict[str, Any], text: str, hint: str, search: list[str]
) -> None:
    mapping = {"_target_": f"signatures.{name}", **words}
    if not text:
        require_target(key, mapping, search=search)
        return
    error = refusal(ConfigError, require_target, key, mapping, search=search)
    assert text in error.message and hint in error.hint


def test_what_a_data_set_takes_is_read_in_its_source(tmp_path: Path) -> None:
    (tmp_path / "some_data.py").write_text(
        "class Whole:\n    def __init__(self, size, *, split='train'): pass\n"
        "class Any:\n    def __init__(self, **words): pass\nclass Bare: pass\n"
    )
    taken = {name: keywords_in_source(f"some_data.{name}", search=[str(tmp_path)]) for name in ("Whole", "Any", "Bare")}
    assert taken == {"Whole": {"size", "split"}, "Any": None, "Bare": None}
    assert keywords_in_source("no_such_module_here.X", search=[str(tmp_path)]) is None
