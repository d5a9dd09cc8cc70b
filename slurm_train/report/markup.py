"""Markup that cannot be broken by what it shows: every text is escaped unless it was made here.

`Html` marks text that is markup already. A name like `</script>` or `" onload=` in a configuration is shown as it is
written, and what a browser would obey (control characters, turned writing directions) becomes a question mark.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable
from typing import Any, TypeAlias

# Control characters but tab and line feed, lone surrogates, and marks that turn the writing direction.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_VOID = {"br", "hr", "input", "meta", "col"}


class Html(str):
    """Text that is markup."""

    __slots__ = ()


Child: TypeAlias = "str | int | float | Html | Iterable[Child] | None"


def escape(text: object) -> Html:
    """Returns a text as markup that shows it."""
    return Html(html.escape(_UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", str(text)), quote=True))


def tag(name: str, /, *children: Child, **attributes: object) -> Html:
    """Returns an element.

    Args:
        name: e.g. "div".
        children: markup as it is, other texts escaped, lists one after the other; None is nothing.
        attributes: "class_" is class, "data_x" is data-x; None or False leaves one out, True gives it no value.
    """
    opening = f"<{name}{''.join(_attribute(key, value) for key, value in attributes.items())}>"
    return Html(opening) if name in _VOID else Html(f"{opening}{join(*children)}</{name}>")


def join(*children: Child) -> Html:
    """Returns markup one after the other."""
    return Html("".join(_text(child) for child in children))


def as_json(value: Any) -> Html:
    """Returns JSON that can stand inside a script element, whatever texts are in it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Html(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _text(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, (str, int, float)):
        return escape(child)
    return "".join(_text(one) for one in child)


def _attribute(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(value)}"'
