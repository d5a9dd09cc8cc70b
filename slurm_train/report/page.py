"""The page around the content: style and scripts inside it, and a policy that lets it load and run nothing else.

The policy names the script by its hash. So even a text that got through unescaped could neither run nor call anybody.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from string import Template

from slurm_train.assets import read_asset
from slurm_train.report.markup import Html, escape, join, tag
from slurm_train.report.quantity import moment

_FOLDER = "report/page"
_SCRIPTS = ("readout.js", "tables.js", "sweep.js", "shell.js")

GOOD, BAD, BUSY, CALM = "good", "bad", "busy", "calm"
_MOODS = {
    "finished": GOOD,
    "running": BUSY,
    "queued": BUSY,
    "requeued": BUSY,
    "finishing": BUSY,
    "not started": CALM,
    "stopped": CALM,
    "completed": CALM,
}


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page with a heading; empty content leaves it out."""

    key: str
    title: str
    content: Html


def page(*, title: str, head: Html, sections: Sequence[Section], now_unix_s: float) -> str:
    """Returns a whole HTML document that needs nothing else.

    Args:
        title: of the window.
        head: what stands above all sections.
        sections: in order.
        now_unix_s: when it is written.
    """
    shown = [section for section in sections if section.content]
    script = "\n".join(read_asset(_FOLDER, name) for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    links = [tag("a", section.title, href=f"#{section.key}") for section in shown]
    return Template(read_asset(_FOLDER, "page.html")).substitute(
        title=escape(title),
        policy=escape(
            "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
            f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
        ),
        style=read_asset(_FOLDER, "page.css"),
        script=script,
        head=head,
        links=join(links),
        body=join(_section(section) for section in shown),
        written=escape(f"written {moment(now_unix_s)} by slurm_train report"),
    )


def _section(section: Section) -> Html:
    return tag("section", tag("h2", section.title), section.content, id=section.key)


def chip(state: str) -> Html:
    """Returns a state as a coloured word."""
    return tag("span", state.replace("_", " "), class_=f"chip {mood(state)}")


def mood(state: str) -> str:
    """Returns whether a state is good, bad, busy or calm."""
    return _MOODS.get(state.replace("_", " "), BAD)


def tiles(pairs: Sequence[tuple[str, str, str]]) -> Html:
    """Returns figures to be read first: name, value, remark."""
    found = [
        tag("div", tag("dt", name), tag("dd", value), tag("small", remark) if remark else None, class_="tile")
        for name, value, remark in pairs
    ]
    return tag("dl", found, class_="tiles")


def plots(figures: Sequence[Html]) -> Html:
    """Returns plots side by side, as many as there is room for."""
    return tag("div", figures, class_="plots") if figures else Html("")
