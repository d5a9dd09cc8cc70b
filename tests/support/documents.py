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


def plots(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the plots of a document by key, in the order of the page."""
    return {block["key"]: block for blocks in document["plots"].values() for block in blocks}
