"""Reads a page as a browser would: its elements, their texts, and whether every one is closed."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, field
from html.parser import HTMLParser

_VOID = {"meta", "input", "br", "hr", "col"}


@dataclass(slots=True)
class Element:
    """One element with the text in it."""

    name: str
    attributes: dict[str, str | None]
    text: str = ""


@dataclass(slots=True)
class Page(HTMLParser):
    """A parsed page.

    Args:
        source: its text.
    """

    source: str
    elements: list[Element] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _open: list[Element] = field(default_factory=list)

    def __post_init__(self) -> None:
        HTMLParser.__init__(self, convert_charrefs=True)
        self.feed(self.source)
        self.close()
        self.problems += [f"{element.name} is not closed" for element in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        self.elements.append(element)
        if tag not in _VOID:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open[-1].name != tag:
            self.problems.append(f"{tag} closes nothing")
            return
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def of(self, name: str, **attributes: str) -> list[Element]:
        """Returns the elements of a name; `class_` must be among an element's classes, others must be equal."""
        css = attributes.pop("class_", None)
        return [
            element
            for element in self.elements
            if element.name == name
            and (css is None or css in (element.attributes.get("class") or "").split())
            and all(element.attributes.get(key) == value for key, value in attributes.items())
        ]

    @property
    def text(self) -> str:
        """What a person reads."""
        return self.of("body")[0].text

    def requests(self) -> list[str]:
        """Returns what a browser would load or could call."""
        names = ("src", "href", "action", "srcset", "data", "poster", "formaction", "xlink:href")
        found = [element.attributes.get(name) for element in self.elements for name in names]
        return [value for value in found if value is not None and not value.startswith("#")]

    def handlers(self) -> list[str]:
        """Returns attributes that hold scripts."""
        return [name for element in self.elements for name in element.attributes if name.startswith("on")]

    def running_scripts(self) -> list[Element]:
        """Returns the scripts that a browser would run."""
        return [one for one in self.of("script") if one.attributes.get("type") != "application/json"]

    def allows(self, script: Element) -> bool:
        """Returns whether the page's own policy lets a script run."""
        (policy,) = [
            one.attributes["content"] or ""
            for one in self.of("meta")
            if one.attributes.get("http-equiv") == "Content-Security-Policy"
        ]
        digest = base64.b64encode(hashlib.sha256(script.text.encode()).digest()).decode()
        return f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
