"""Writes the loop into docs/training-loop.md: when the trainer calls each hook and each part, from the code itself.

python .ci/write_loop.py            # writes it
python .ci/write_loop.py --check    # says whether it is up to date

What is printed are the calls of `train.build.build_trainer` and of `train.trainer.Trainer` that reach a callback or a
part of the trainer, with the loops and conditions around them. A method that is called once is printed in its place;
one that is called more often, or that returns early, by its name and below. A hook that is not found ends this with
an error.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "training-loop.md"
BEGIN = "<!-- loop: written by .ci/write_loop.py -->"
TRAIN = REPOSITORY / "slurm_train" / "train"
PARTS = {
    "samples",
    "stepper",
    "passes",
    "schedule",
    "health",
    "evaluator",
    "saver",
    "saves",
    "stops",
    "start_up",
}
HOOK = "callback."
LONGEST = 88
NOT_OF_THE_LOOP = {"say", "span", "end_early", "ask_to_save"}


def main() -> int:
    """Writes the page, or checks it; returns the exit code."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    assert rest, f"{PAGE} has no line {BEGIN}"
    after = rest.partition("```\n\n")[2]
    lines = loop()
    missing = [name for name in hooks() if not any(f"{HOOK}{name}(" in line for line in lines)]
    assert not missing, f"no call of {', '.join(missing)} was found"
    block = "\n".join(lines)
    made = f"{before}{BEGIN}\n\n```text\n{block}\n```\n\n{after}"
    if made == text:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"{PAGE} is out of date: run python .ci/write_loop.py", file=sys.stderr)
        return 1
    PAGE.write_text(made, encoding="utf-8")
    return 0


def loop() -> list[str]:
    """Returns the lines of the loop."""
    build = _functions(TRAIN / "build.py")
    printed = Printed(_functions(TRAIN / "trainer.py", of="Trainer"))
    started = printed.body(build["build_trainer"].body, "")
    lines = [line.strip() for line in started if HOOK in line or "saver.resume" in line]
    lines += printed.body(printed.functions["run"].body, "")
    for name in printed.named:
        lines += ["", f"{_shown(name)}:", *printed.body(printed.functions[name].body, "    ")]
    return lines


def hooks() -> list[str]:
    """Returns the hooks of a callback that the trainer calls."""
    names = _functions(TRAIN / "callbacks.py", of="Callback")
    return [name for name in names if name.startswith("on_") or name in ("attach", "evaluating")]


class Printed:
    """The calls of functions, as text.

    Args:
        functions: of the trainer, by name.
    """

    def __init__(self, functions: dict[str, ast.FunctionDef]) -> None:
        self.functions = functions
        self.named: list[str] = []
        """Methods that were named and are still to be printed; grows while they are."""
        self._num_calls = Counter(
            _text(call.func) for function in functions.values() for call in _calls(function) if _is_own(call)
        )

    def body(self, statements: list[ast.stmt], indent: str) -> list[str]:
        """Returns the lines of some statements; none where they reach no hook and no part."""
        return [line for statement in statements for line in self._lines(statement, indent)]

    def _lines(self, statement: ast.stmt, indent: str) -> list[str]:
        deeper = indent + "    "
        if isinstance(statement, (ast.If, ast.While)):
            word = "if" if isinstance(statement, ast.If) else "while"
            condition = self._condition(statement.test)
            inner = self.body(statement.body, deeper)
            if isinstance(statement.body[-1], ast.Return) and (inner or len(statement.body) == 1):
                inner.append(f"{deeper}return")
            lines = [f"{indent}{word} {condition}:", *inner] if inner else []
            other = self.body(statement.orelse, deeper)
            return [*lines, f"{indent}else:", *other] if other else lines
        if isinstance(statement, ast.For):
            inner = self.body(statement.body, deeper)
            return [f"{indent}for {_text(statement.target)} in {_text(statement.iter)}:", *inner] if inner else []
        if isinstance(statement, (ast.With, ast.Try)):
            last = statement.finalbody if isinstance(statement, ast.Try) else []
            return self.body([*statement.body, *last], indent)
        calls = list(_calls(statement))
        within = {id(inner) for call in calls if self._is_shown(call) for inner in _calls(call) if inner is not call}
        return [line for call in calls if id(call) not in within for line in self._call(call, statement, indent)]

    def _call(self, call: ast.Call, statement: ast.stmt, indent: str) -> list[str]:
        name = _text(call.func)
        if name == "_call" or name.startswith(HOOK):
            return [f"{indent}{_hook(call)}"]
        if self._is_method(call):
            return self._method(name, indent)
        if not self._is_shown(call):
            return []
        text = _text(call)
        target = _text(statement.targets[0]) if isinstance(statement, ast.Assign) and statement.value is call else ""
        if target and target not in PARTS:
            text = f"{target} = {text}"
        # What the part calls while it runs, given as a lambda.
        hooks_within = [f"{indent}    {_hook(inner)}" for inner in _calls(call) if _text(inner.func) == "_call"]
        return [f"{indent}{text if len(indent + text) <= LONGEST else name + '(...)'}", *hooks_within]

    def _method(self, name: str, indent: str) -> list[str]:
        lines = self.functions[name].body
        returns_early = any(isinstance(node, ast.Return) for line in lines[:-1] for node in ast.walk(line))
        is_named = returns_early or self._num_calls[name] > 1
        return [f"{indent}{self._name(name)}"] if is_named else self.body(lines, indent)

    def _is_shown(self, call: ast.Call) -> bool:
        part, dot, _ = _text(call.func).partition(".")
        return bool(dot) and part in PARTS

    def _is_method(self, call: ast.Call) -> bool:
        """Returns whether a call is one of the trainer's own that reaches a hook or a part."""
        name = _text(call.func)
        if not _is_own(call) or name not in self.functions or name in NOT_OF_THE_LOOP:
            return False
        lines = Printed(self.functions).body(self.functions[name].body, "")
        return any("(" in line for line in lines)

    def _name(self, name: str) -> str:
        if name not in self.named:
            self.named.append(name)
        return f"{_shown(name)}()"

    def _condition(self, test: ast.expr) -> str:
        text = _text(test)
        for call in _calls(test):
            if self._is_method(call):
                text = text.replace(_text(call), self._name(_text(call.func)))
        return re.sub(r"\b_(?=[a-z])", "", text)


def _is_own(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "self"


def _shown(name: str) -> str:
    return name.strip("_")


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    """Yields calls in the order in which they are made: arguments before the call."""
    for child in ast.iter_child_nodes(node):
        yield from _calls(child)
    if isinstance(node, ast.Call):
        yield node


def _hook(call: ast.Call) -> str:
    if _text(call.func) != "_call":
        return _text(call)
    name, *values = call.args
    # An end is one of two hooks.
    names = [part.value for part in ast.walk(name) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    words = ", ".join(["trainer", *map(_text, values)])
    called = " else ".join(f"{HOOK}{hook}({words})" for hook in names)
    return called if len(names) == 1 else called.replace(" else ", f" if {_text(name.test)} else ", 1)  # type: ignore[attr-defined]


def _text(node: ast.AST) -> str:
    return ast.unparse(node).replace("self.", "")


def _functions(path: Path, *, of: str = "") -> dict[str, ast.FunctionDef]:
    tree: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
    if of:
        tree = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == of)
    return {node.name: node for node in ast.iter_child_nodes(tree) if isinstance(node, ast.FunctionDef)}


if __name__ == "__main__":
    sys.exit(main())
