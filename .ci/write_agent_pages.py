"""Writes AGENTS.md and llms.txt from docs/, for programs that drive the toolkit.

    python .ci/write_agent_pages.py           # writes both files

AGENTS.md is docs/agents.md and the table of commands, with links that lead from the top of the repository. llms.txt is
the list of all pages in the order of the site's navigation, in the form of https://llmstxt.org. A test compares both
with what this gives.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"
AGENTS = REPOSITORY / "AGENTS.md"
LLMS = REPOSITORY / "llms.txt"
# Pages of the site that lie outside docs/, as in site_hooks.py.
ELSEWHERE = {
    "examples.md": "examples/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changes.md": "CHANGELOG.md",
}
WRITTEN = "<!-- Written by .ci/write_agent_pages.py from docs/; do not edit it by hand. -->"
_LABEL = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_LINK = re.compile(r"\]\(([^)\s#:]*)(#[^)\s]*)?\)")


def render_agents() -> str:
    """Returns the text of AGENTS.md."""
    guide = _from_the_top((DOCS / "agents.md").read_text(encoding="utf-8"), page="agents.md")
    commands = _from_the_top((DOCS / "commands.md").read_text(encoding="utf-8"), page="commands.md")
    heading, _, rest = commands.partition("\n")
    return f"{WRITTEN}\n\n{guide}\n#{heading}\n{rest}"


def render_llms() -> str:
    """Returns the text of llms.txt."""
    summary = _summary((DOCS / "index.md").read_text(encoding="utf-8"))
    lines = ["# slurm_train", "", f"> {summary}", "", "How a program drives it: [AGENTS.md](AGENTS.md)."]
    for section, pages in _navigation((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")).items():
        lines += ["", f"## {section}", ""]
        lines += [_entry(page) for page in pages]
    return "\n".join(lines) + "\n"


def _navigation(text: str) -> dict[str, list[str]]:
    """Returns the pages of each door of the navigation, e.g. {"Run": ["sweeps.md"]}, without the first one."""
    sections: dict[str, list[str]] = {}
    section = ""
    for line in text.partition("\nnav:\n")[2].splitlines():
        if heading := re.match(r"  - ([^:]+):", line):
            section = heading[1]
        if page := re.fullmatch(r"  +- (?:[^:]+: )?([\w-]+\.md)", line):
            sections.setdefault(section, []).append(page[1])
    return {section: pages for section, pages in sections.items() if pages != ["index.md"]}


def _entry(page: str) -> str:
    path = ELSEWHERE.get(page, f"docs/{page}")
    text = (REPOSITORY / path).read_text(encoding="utf-8")
    title = text.partition("\n")[0].removeprefix("# ")
    summary = _summary(text)
    return f"- [{title}]({path}): {summary}" if summary else f"- [{title}]({path})"


def _summary(text: str) -> str:
    """Returns the first sentence of a page; "" where it begins with code, a table, a list or a section."""
    blocks = [block for block in text.partition("\n")[2].split("\n\n") if block.strip() and "Written by" not in block]
    paragraph = blocks[0].lstrip("\n")
    if paragraph.startswith(("    ", "```", "|", "#", "-")):
        return ""
    prose = _LABEL.sub(r"\1", " ".join(paragraph.split())).replace("**", "")
    sentence = re.match(r".*?\.(?= |$)", prose)
    return sentence[0] if sentence else f"{prose.rstrip(':')}."


def _from_the_top(text: str, *, page: str) -> str:
    """Returns a page of docs/ with relative links that lead from the top of the repository."""

    def turned(match: re.Match[str]) -> str:
        target = match[1] or page
        return f"]({os.path.normpath(f'docs/{target}')}{match[2] or ''})"

    return _LINK.sub(turned, text)


def main() -> None:
    """Writes both files."""
    AGENTS.write_text(render_agents(), encoding="utf-8")
    LLMS.write_text(render_llms(), encoding="utf-8")


if __name__ == "__main__":
    main()
