"""What the site has beyond docs/: the pages that lie elsewhere in the repository, with their links turned round.

In the repository a link leads to a file; on the site the same page lies beside the others. mkdocs calls these
functions by their names.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

REPOSITORY = Path(__file__).resolve().parents[1]
# Pages of the site that are no files of docs/.
ELSEWHERE = {
    "examples.md": "examples/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changes.md": "CHANGELOG.md",
}
# Who types a message wants its section first, and next how a run ends; what is made from the code names everything.
SEARCH_BOOST = {
    "troubleshooting.md": 1.4,
    "endings.md": 1.3,
    "index.md": 0.2,
    "changes.md": 0.1,
    "api.md": 0.2,
    "modules.md": 0.2,
    "reliability.md": 0.2,
}
# A key breaks behind its dots and underscores, a flag not behind its dashes.
_CELL = re.compile(r"<t[dh][ >].*?</t[dh]>", re.DOTALL)
_CODE = re.compile(r"<code>([^<]+)</code>")
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the pages that lie elsewhere."""
    from mkdocs.structure.files import File

    for name, source in ELSEWHERE.items():
        files.append(File.generated(config, name, abs_src_path=str(REPOSITORY / source)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Returns a page with links that lead to pages of the site, or to nothing where there is no such page."""
    if page.file.src_uri == "index.md":
        # Its navigation would be one entry, and would take the room of the code blocks.
        page.meta["hide"] = ["navigation"]
    if page.file.src_uri in SEARCH_BOOST:
        page.meta["search"] = {"boost": SEARCH_BOOST[page.file.src_uri]}
    folder = Path(ELSEWHERE.get(page.file.src_uri, f"docs/{page.file.src_uri}")).parent
    return _LINK.sub(lambda match: _turned(match, folder), markdown)


def on_post_page(output: str, **_: Any) -> str:
    """Returns a page whose tables break long keys where a reader would; the search has them whole."""
    return _CELL.sub(lambda cell: _CODE.sub(_breakable, cell[0]), output)


def on_post_build(*, config: Any) -> None:
    """Has pages load the search's shim from the site itself: Material 9 names another host for it."""
    site = Path(config["site_dir"])
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        here = "/".join([".."] * (len(path.relative_to(site).parts) - 1) + ["javascripts/iframe-worker.js"])
        path.write_text(text.replace("https://unpkg.com/iframe-worker/shim", here), encoding="utf-8")


def _breakable(code: re.Match[str]) -> str:
    pieces = re.sub(r"(?<=\S)([._/=,]+)(?=\S)", r"\1<wbr>", code[1])
    flags = re.sub(r"(?<![\w-])--?[A-Za-z]+", r'<span class="flag">\g<0></span>', pieces)
    return f"<code>{flags}</code>"


def _turned(match: re.Match[str], folder: Path) -> str:
    text, target, anchor = match[1], match[2], match[3] or ""
    if "://" in target:
        return match[0]
    path = (REPOSITORY / folder / target).resolve()
    if not path.is_relative_to(REPOSITORY):
        return match[0]
    name = str(path.relative_to(REPOSITORY))
    pages = {source: page for page, source in ELSEWHERE.items()}
    if name in pages:
        return f"[{text}]({pages[name]}{anchor})"
    if name.startswith("docs/"):
        return f"[{text}]({name.removeprefix('docs/')}{anchor})"
    # Code and the licence are no pages.
    return text if path.exists() else match[0]
