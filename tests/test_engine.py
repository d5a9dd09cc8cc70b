"""The engine counted: one mechanism where there could be several. Each row names what is found beyond it.

As in `test_architecture` a row is a function of a source tree, and a small tree that breaks it is found.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import GeneratorType
from typing import Any

import numpy as np
import pytest

from slurm_train.config.batch import BatchShare
from slurm_train.data.batches import BatchStream, GlobalBatches, Prefetch
from slurm_train.data.order import SampleOrder
from slurm_train.train.samples import Samples
from tests.support.source_tree import (
    PACKAGE,
    REPOSITORY,
    Rule,
    Tree,
    calls,
    of_rooms,
    package_tree,
    room_of,
    small_tree,
)

ROOMS = ("train", "evaluation", "session")
# Outside of a run there is no RankRun.
SPEAKERS = {"session.interface"}
ENGINE = (*ROOMS, "data", "models", "distributed", "checkpoint", "adapters")
# Public, one for each library.
SAME_NAME = {"SessionCallback"}
REPLACEMENTS = "### What is replaced in objects of others"
# Switches that a library offers, and what belongs to the process.
_OF_TORCH = ("torch.backends", "torch.utils.deterministic", "torch._dynamo.config", "torch._inductor.config")
SETTINGS = (*_OF_TORCH, "sys", "os")
OWN_DUNDERS = ("__cause__", "__file__", "__loader__")
# An optional part, and the one module that makes it: the rest of the core meets its interface alone, which is `Tier`, a
# decorator of `models.first_weights`, `GlobalBatches` with `Divide`, and `WorkerChoice`.
OPTIONAL = {
    "checkpoint.local": ("checkpoint.saves",),
    "checkpoint.copies": ("checkpoint.filling",),
    "models.causal_lm": ("models.pretrained",),
    "models.pretrained": ("models.build", "cli.checkpoint"),
    "data.length_batches": ("train.samples", "train.evaluate"),
    "data.workers.AutoWorkers": ("train.build",),
}
# What a rank knows is made in steps, of which each returns a value of its own.
OF_A_RANK = {"session.rank_run", "train.context"}


def other_speakers(tree: Tree) -> list[str]:
    """Lines of rank 0 that do not go through `RankRun.say`."""
    found = []
    for module, parsed in of_rooms(tree, ROOMS):
        for node in ast.walk(parsed):
            is_own_way = isinstance(node, ast.FunctionDef) and node.name in ("_say", "_print")
            if isinstance(node, ast.If) and "is_first" in ast.unparse(node.test):
                calls = [inner for line in node.body for inner in ast.walk(line) if isinstance(inner, ast.Call)]
                is_own_way = any(
                    ast.unparse(call).startswith("print(") and "sys.stderr" in ast.unparse(call) for call in calls
                )
            if is_own_way and module not in SPEAKERS:
                found.append(f"{module}:{node.lineno}")
    return found


def set_later(tree: Tree) -> list[str]:
    """What a rank knows that could be set after it was made."""
    found = []
    for module, parsed in of_rooms(tree, ROOMS):
        for node in ast.walk(parsed):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) in ("rank", "parts", "built"):
                    found.append(f"{module}:{node.lineno} sets {ast.unparse(target)}")
            if isinstance(node, ast.ClassDef) and module in OF_A_RANK:
                words = [ast.unparse(decorator) for decorator in node.decorator_list]
                if not any("frozen=True" in word for word in words):
                    found.append(f"{module}:{node.lineno} {node.name} is not frozen")
    return found


def other_contents(tree: Tree) -> list[str]:
    """What puts together what a checkpoint has of a training, or reads it, beside `checkpoint.contents`."""
    found = [
        f"{module}:{call.lineno}"
        for module, call in calls(tree, ("Content", "StateParts"), rooms=ENGINE)
        if module != "checkpoint.contents"
    ]
    # Earlier versions' keys are known in one place.
    readers = ("checkpoint.earlier", "evaluation.evaluate_checkpoint")
    return found + [
        f"{module}:{call.lineno}"
        for module, call in calls(tree, ("load_rank_state",), rooms=ENGINE)
        if module not in readers
    ]


def other_savers(tree: Tree) -> list[str]:
    """What chooses, restores or saves a training beside `checkpoint.saver`."""
    names = ("save_soon", "check_before_save", "check_after_first_step")
    return [f"{module}:{call.lineno}" for module, call in calls(tree, names, ENGINE) if module != "checkpoint.saver"]


def other_comparisons(tree: Tree) -> list[str]:
    """What compares the parameters of ranks beside `checkpoint.replicas`."""
    names = ("names_that_differ", "digest_of_parameters", "find_divergent")
    found = calls(tree, names, ENGINE)
    return [f"{module}:{call.lineno}" for module, call in found if module != "checkpoint.replicas"]


def files_read_again(tree: Tree) -> list[str]:
    """Files of a save that are read to be hashed, beside those that a program has written by itself."""
    found = calls(tree, ("seal_file",), ENGINE)
    return [f"{module}:{call.lineno}" for module, call in found if module != "session.saving"]


def other_records(tree: Tree) -> list[str]:
    """What writes metrics.jsonl, or counts the times of steps, beside `session.progress`."""
    names = ("MetricsWriter", "StepTimes")
    return [f"{module}:{call.lineno}" for module, call in calls(tree, names, ROOMS) if module != "session.progress"]


def other_agreements(tree: Tree) -> list[str]:
    """Ways to agree on a stop beside the two carriers of `train.stops`, and a session's `should_stop`."""
    exchanges = ("gather", "all_reduce", "all_gather_object", "on_every_rank")
    found = []
    for module, call in calls(tree, exchanges, ROOMS):
        if "requested" in ast.unparse(call) and module not in ("train.stops", "session.calls"):
            found.append(f"{module}:{call.lineno}")
    for module, parsed in of_rooms(tree, ROOMS):
        for node in ast.walk(parsed):
            if isinstance(node, ast.Assign) and "is_agreed" in ast.unparse(node.targets[0]) and module != "train.stops":
                found.append(f"{module}:{node.lineno}")
    return found


def compared_targets(tree: Tree) -> list[str]:
    """Names of this package's data sets outside of the one module that knows what each is."""
    found = []
    for module, parsed in tree.parsed.items():
        if module == "config.data_kinds":
            continue
        for node in ast.walk(parsed):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if re.fullmatch(r"slurm_train\.data\.\w+\.build\w*", text):
                found.append(f"{module}:{node.lineno} names {text}")
    return found


def asked_attributes(tree: Tree) -> list[str]:
    """Questions to a source by the names of attributes that it may have, beside `data.source.describe`."""
    names = {"lengths", "bytes_per_target", "encoding", "shards", "draws_at_random", "collates_at_random", "context"}
    found = []
    for module, call in calls(tree, ("hasattr", "getattr"), ("train", "data")):
        asked = call.args[1].value if isinstance(call.args[1], ast.Constant) else None
        # A map-style data set is a user's own, and no source yet.
        if asked in names and module not in ("data.source", "data.mapstyle"):
            found.append(f"{module}:{call.lineno}")
    return found


def repeated_classes(tree: Tree) -> list[str]:
    """Classes that have the name of another one."""
    places: dict[str, list[str]] = {}
    for module, parsed in tree.parsed.items():
        for node in ast.walk(parsed):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    return [
        f"{name}: {', '.join(modules)}"
        for name, modules in places.items()
        if len(modules) > 1 and name not in SAME_NAME
    ]


def other_shares(tree: Tree) -> list[str]:
    """Shares of a global batch that `BatchPlan.share` has not made."""
    found = calls(tree, ("BatchShare",), rooms=(*ENGINE, "config", "plan"))
    return [f"{module}:{call.lineno}" for module, call in found if module != "config.batch"]


def vague_verbs(tree: Tree) -> list[str]:
    """Functions whose name does not say what is done: `check_` raises or gives notes, `find_` and `read_` return.

    `look` has one meaning, the newest reading of what other processes write, and the engine has none.
    """
    found = []
    for module, parsed in tree.parsed.items():
        words = "take|look|look_.*" if room_of(module) in ENGINE else "take"
        for node in ast.walk(parsed):
            if isinstance(node, ast.FunctionDef) and re.fullmatch(f"_?({words})", node.name):
                found.append(f"{module}:{node.lineno} {node.name}")
    return found


def unlisted_replacements(tree: Tree) -> list[str]:
    """Modules that change objects of others and are not in the list of docs/design.md, with the reason."""
    page = (REPOSITORY / "docs" / "design.md").read_text(encoding="utf-8")
    listed = re.split(r"\n#+ ", page.partition(REPLACEMENTS)[2])[0]
    found = []
    for module, parsed in of_rooms(tree, (*ENGINE, "worker")):
        imports = [node for node in ast.walk(parsed) if isinstance(node, (ast.Import, ast.ImportFrom))]
        foreign = {
            alias.asname or alias.name.partition(".")[0]
            for node in imports
            if not str(getattr(node, "module", "")).startswith(PACKAGE)
            for alias in node.names
        }
        lines = tree.paths[module].read_text(encoding="utf-8").splitlines()
        changes = any(
            _changes_another(node, foreign) or "method-assign" in lines[getattr(node, "lineno", 1) - 1]
            for node in ast.walk(parsed)
            if hasattr(node, "lineno")
        )
        if changes and f"`{module.replace('.', '/')}`" not in listed:
            found.append(module)
    return found


def adapters_beyond_the_session(tree: Tree) -> list[str]:
    """Imports of adapters from the package beside the public session, the errors, and adapters."""
    found = []
    for module, parsed in of_rooms(tree, ("adapters",)):
        for node in ast.walk(parsed):
            name = getattr(node, "module", None) if isinstance(node, ast.ImportFrom) else None
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [name or ""]
            for imported in names:
                room = imported.removeprefix(f"{PACKAGE}.")
                is_public = room in ("session", "errors") or room.startswith("adapters")
                if imported.partition(".")[0] == PACKAGE and not is_public:
                    found.append(f"{module}:{node.lineno} imports {imported}")
    return found


def unlisted_private_names(tree: Tree) -> list[str]:
    """Private names of a library that an adapter uses and `adapters.library_names` does not list."""
    listed: set[str] = set()
    for _, parsed in of_rooms(tree, ("adapters",)):
        for node in ast.walk(parsed):
            is_list = isinstance(node, ast.Call) and ast.unparse(node.func) == "Library"
            if is_list:
                listed |= {inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant)}
    found = []
    for module, parsed in of_rooms(tree, ("adapters",)):
        for node in ast.walk(parsed):
            name = ""
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self":
                name = node.attr
            elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith(PACKAGE):
                name = next((alias.name for alias in node.names if alias.name.startswith("_")), "")
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
                name = str(node.args[1].value) if isinstance(node.args[1], ast.Constant) else ""
            if re.match("_[a-z]", name, re.IGNORECASE) and name not in listed:
                found.append(f"{module}:{node.lineno} uses {name}")
    return found


def beside_a_seam(tree: Tree) -> list[str]:
    """Imports of an optional part by other modules than those that make it."""
    found = []
    for module, parsed in tree.parsed.items():
        for node in ast.walk(parsed):
            if not isinstance(node, ast.ImportFrom):
                continue
            imported = {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
            for part, makers in OPTIONAL.items():
                if f"{PACKAGE}.{part}" in imported and module not in makers:
                    found.append(f"{module}:{node.lineno} imports {part}")
    return found


def _changes_another(node: ast.AST, foreign: set[str]) -> bool:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
        return ast.unparse(node.args[0]) != "self"
    for target in node.targets if isinstance(node, ast.Assign) else []:
        if not isinstance(target, ast.Attribute):
            continue
        owner = ast.unparse(target.value)
        is_method = target.attr.startswith("__") and owner != "self" and target.attr not in OWN_DUNDERS
        # `weakref.finalize(...).atexit = False` sets a switch of an object that was just made.
        is_foreign = owner.partition(".")[0] in foreign and "(" not in owner and not owner.startswith(SETTINGS)
        if is_method or is_foreign:
            return True
    return False


ROWS: dict[str, Rule] = {
    "rank 0 speaks in one way": other_speakers,
    "what a rank knows is frozen": set_later,
    "one saver": other_savers,
    "replicas are compared in one place": other_comparisons,
    "a save is hashed while it is written": files_read_again,
    "one record of progress": other_records,
    "what is saved is defined in one place": other_contents,
    "a stop is agreed on by two carriers": other_agreements,
    "what a data set is, one module knows": compared_targets,
    "a source describes itself": asked_attributes,
    "a class name is unique": repeated_classes,
    "a batch is cut in one place": other_shares,
    "a verb says what is done": vague_verbs,
    "what is replaced in objects of others is listed": unlisted_replacements,
    "an adapter uses the public session": adapters_beyond_the_session,
    "private names of libraries are listed": unlisted_private_names,
    "an optional part has one interface": beside_a_seam,
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_the_row_is_met(row: Rule) -> None:
    assert row(package_tree()) == []


BREACHES = [
    ("rank 0 speaks in one way", "train/a.py", "if place.is_first:\n    print(1, file=sys.stderr)\n", "train.a:1"),
    ("rank 0 speaks in one way", "session/a.py", "class A:\n    def _say(self): pass\n", "session.a:2"),
    ("what a rank knows is frozen", "train/a.py", "parts.measured = 1\n", "train.a:1 sets parts.measured"),
    (
        "what a rank knows is frozen",
        "train/context.py",
        "@dataclass(slots=True)\nclass Rank: pass\n",
        "train.context:2 Rank is not frozen",
    ),
    ("what is saved is defined in one place", "train/a.py", "Content(tensors={})\n", "train.a:1"),
    ("what is saved is defined in one place", "session/a.py", "load_rank_state(path, 0)['rng']\n", "session.a:1"),
    ("one saver", "train/a.py", "saves.save_soon(copied, step=1)\n", "train.a:1"),
    ("replicas are compared in one place", "train/a.py", "digest_of_parameters(tensors)\n", "train.a:1"),
    ("a save is hashed while it is written", "checkpoint/a.py", "seal_file(path)\n", "checkpoint.a:1"),
    ("one record of progress", "train/a.py", "MetricsWriter(run.metrics)\n", "train.a:1"),
    ("a stop is agreed on by two carriers", "train/a.py", "any(gather(bool(stop.requested)))\n", "train.a:1"),
    (
        "what a data set is, one module knows",
        "start/a.py",
        "x = 'slurm_train.data.text.build'\n",
        "start.a:1 names slurm_train.data.text.build",
    ),
    ("a class name is unique", "cli/a.py", "class A: pass\nclass A: pass\n", "A: cli.a, cli.a"),
    ("a batch is cut in one place", "data/a.py", "BatchShare(rank=0, accumulation=1, shares=(8,))\n", "data.a:1"),
    ("a verb says what is done", "session/a.py", "class A:\n    def look(self): pass\n", "session.a:2 look"),
    ("a verb says what is done", "worker/a.py", "def _take(): pass\n", "worker.a:1 _take"),
    (
        "what is replaced in objects of others is listed",
        "session/a.py",
        "import torch.distributed as dist\ndist.barrier = f\n",
        "session.a",
    ),
    (
        "an adapter uses the public session",
        "adapters/a.py",
        "from slurm_train.rundir.files import f\n",
        "adapters.a:1 imports slurm_train.rundir.files",
    ),
    (
        "an optional part has one interface",
        "train/a.py",
        "from slurm_train.checkpoint import local\n",
        "train.a:1 imports checkpoint.local",
    ),
    ("private names of libraries are listed", "adapters/a.py", "trainer.loop._data\n", "adapters.a:1 uses _data"),
    (
        "private names of libraries are listed",
        "adapters/a.py",
        "LIB = Library(names={'loop': ('_data',)})\nloop._data\ngetattr(loop, '_batch')\n",
        "adapters.a:3 uses _batch",
    ),
    ("what is replaced in objects of others is listed", "train/a.py", "kind.__next__ = f\n", "train.a"),
    ("a source describes itself", "train/a.py", "hasattr(source, 'encoding')\n", "train.a:1"),
    ("a stop is agreed on by two carriers", "train/a.py", "self.stops.is_agreed = True\n", "train.a:1"),
]


@pytest.mark.parametrize(
    ("row", "file", "text", "finding"), BREACHES, ids=[f"{row}: {file}" for row, file, _, _ in BREACHES]
)
def test_a_breach_is_found(row: str, file: str, text: str, finding: str, tmp_path: Path) -> None:
    assert ROWS[row](small_tree(tmp_path, {file: text})) == [finding]


class Numbers:
    """A source that reads samples by number."""

    def batch(self, indices: Any) -> Any:
        return {"x": np.asarray(indices)}


def layers_of(iterator: Any) -> list[str]:
    """Returns the iterators through which an item comes, the last one first."""
    layers = []
    while iterator is not None:
        layers.append(type(iterator).__name__)
        held = iterator.gi_frame.f_locals if isinstance(iterator, GeneratorType) else vars(iterator)
        iterator = next((value for value in held.values() if isinstance(value, Iterator)), None)
    return layers


@pytest.mark.parametrize(("adds_one", "num_layers"), [(False, 4), (True, 5)])
def test_a_batch_comes_through_four_iterators(adds_one: bool, num_layers: int) -> None:
    source: Any = Numbers()
    batches = GlobalBatches(SampleOrder(97, seed=5), global_size=8)
    draws = batches.draws(BatchShare(rank=0, accumulation=1, shares=(8,)), start_samples=0)
    stream: Any = BatchStream(source, draws)
    prefetch = Prefetch((batch for batch in stream) if adds_one else stream, depth=1)
    samples = Samples(batches, prefetch, growth={})
    assert len(next(samples).indices) == 8
    prefetch.close()
    assert len(layers_of(samples)) == num_layers, layers_of(samples)
