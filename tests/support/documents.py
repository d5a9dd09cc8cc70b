"""Finds what a test asks for in the document of a report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.support.html_pages import Page

HOSTILE = [
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "<!--",
    "a & b < c",
    "]]>",
    "${title}",
    "\u2028\u2029",
]
"""Texts that must be shown as they are written and do nothing."""


def document_in(page: Page) -> dict[str, Any]:
    """Returns the document that a page draws."""
    (script,) = page.of("script", type="application/json")
    return dict(json.loads(script.text))


def strings(value: Any) -> Iterator[str]:
    """Yields every text in a document, names and values alike."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from strings([*value, *value.values()])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings(item)


def text_of(document: Any) -> str:
    """Returns all texts of a document in one."""
    return "\n".join(strings(document))


def blocks(document: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    """Returns the blocks with these values, e.g. kind="plot", in the order of the page."""
    every = [block for section in document["sections"] for block in section["blocks"]]
    return [block for block in every if all(block.get(key) == value for key, value in wanted.items())]


def column(table: dict[str, Any], name: str) -> list[str]:
    """Returns the texts of a table's column."""
    place = [head["name"] for head in table["columns"]].index(name)
    return [row[place][0] if isinstance(row[place], (list, tuple)) else row[place] for row in table["rows"]]
