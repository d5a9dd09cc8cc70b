"""Writes docs/modules.md, the list of all modules, from their docstrings.

python .ci/write_module_list.py            # writes it
python .ci/write_module_list.py --check    # says whether it is up to date
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "slurm_train"
PAGE = REPOSITORY / "docs" / "modules.md"


def render() -> str:
    """Returns the text of the page."""
    about = "The first line of each module's docstring; [design](design.md) says how they go together."
    folders = sorted(file.parent for file in PACKAGE.rglob("__init__.py"))
    return f"# All modules\n\n{about}\n\n{''.join(map(_section, folders)).rstrip()}\n"


def _section(folder: Path) -> str:
    """Returns the part of a package: what it is, and a row for each of its modules."""
    name = "" if folder == PACKAGE else f"{folder.relative_to(PACKAGE)}/"
    rows = [f"| `{name}` | {_in_a_cell(first_line(folder / '__init__.py'))} |"] if name else []
    files = [file for file in sorted(folder.glob("*.py")) if not file.name.startswith("__")]
    rows += [f"| `{name}{file.stem}` | {_in_a_cell(first_line(file))} |" for file in files]
    return "\n".join(["| module | |", "|---|---|", *rows, "", ""])


def first_line(file: Path) -> str:
    """Returns the first line of a module's docstring, or its first sentence where that is longer."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    line = text.partition("\n")[0]
    if line.endswith("."):
        return line
    return " ".join(text.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".") + "."


def _in_a_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<")


def main() -> int:
    """Writes the list, or checks it; returns the exit code."""
    text = render()
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"{PAGE} is out of date: run python .ci/write_module_list.py", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
