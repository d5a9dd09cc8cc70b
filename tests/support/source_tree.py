"""The package as a tree of parsed modules, for rules about it.

A rule is a function of a tree that returns what breaks it, so that a small tree can show that the rule can fail.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = "slurm_train"


class Tree:
    """A package on disk, parsed once.

    Args:
        root: the folder of the package, e.g. ".../slurm_train".
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.paths = {self._name(path): path for path in sorted(root.rglob("*.py"))}
        self.parsed = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in self.paths.items()}

    def _name(self, path: Path) -> str:
        words = path.relative_to(self.root).with_suffix("").parts
        return ".".join(words[:-1] if len(words) > 1 and words[-1] == "__init__" else words)

    def imports(self, module: str, *, lazy: bool = True) -> Iterator[str]:
        """Yields the modules of the package that a module imports, also inside functions and for type checkers."""
        nodes = ast.walk(self.parsed[module]) if lazy else self._eager(self.parsed[module])
        for node in nodes:
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module}: relative import"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            yield from (own for name in names if (own := self._own(name)))

    def _eager(self, tree: ast.Module) -> Iterator[ast.AST]:
        """Yields what runs when the module is imported: no function bodies, no `if TYPE_CHECKING`."""
        pending: list[ast.AST] = list(tree.body)
        while pending:
            node = pending.pop()
            yield node
            is_for_checkers = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
            if not is_for_checkers and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                pending += ast.iter_child_nodes(node)

    def _own(self, name: str) -> str | None:
        words = name.split(".")
        if words[0] != PACKAGE:
            return None
        while len(words) > 1:
            if ".".join(words[1:]) in self.paths:
                return ".".join(words[1:])
            words.pop()
        return "__init__"


Rule = Callable[[Tree], list[str]]


@functools.cache
def package_tree() -> Tree:
    """Returns the package itself."""
    return Tree(REPOSITORY / PACKAGE)


def small_tree(folder: Path, files: Mapping[str, str]) -> Tree:
    """Writes a package of these files, e.g. {"plan/a.py": "x = 1"}, and returns it."""
    root = folder / PACKAGE
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Tree(root)


def room_of(module: str) -> str:
    """Returns the folder of a module; each tool is a room of its own: "tools.devcluster"."""
    words = module.split(".")
    return ".".join(words[:2]) if words[0] == "tools" else words[0]


def of_rooms(tree: Tree, rooms: tuple[str, ...]) -> Iterator[tuple[str, ast.Module]]:
    """Yields the modules of some rooms."""
    for module, parsed in tree.parsed.items():
        if room_of(module) in rooms:
            yield module, parsed


def uses(tree: Tree, is_use: Callable[[ast.AST], bool]) -> list[str]:
    """Returns the modules that have such a node."""
    return [module for module, parsed in tree.parsed.items() if any(is_use(node) for node in ast.walk(parsed))]


def calls(tree: Tree, names: tuple[str, ...], rooms: tuple[str, ...]) -> Iterator[tuple[str, ast.Call]]:
    """Yields the calls of functions of these names."""
    for module, parsed in of_rooms(tree, rooms):
        for node in ast.walk(parsed):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in names:
                yield module, node


def conditions_in(node: ast.AST) -> list[ast.expr]:
    """Returns what a node decides by; `value or default` asks for a value and decides nothing."""
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        return [node.test]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return [node.operand]
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        return node.values
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
        return [node.left]
    return node.ifs if isinstance(node, ast.comprehension) else []
