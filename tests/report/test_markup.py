"""Nothing that is shown can become markup."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_train.report.markup import Html, as_json, escape, join, tag
from tests.support.html_pages import Page

HOSTILE = [
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "<!--",
    "a & b < c",
    "javascript:alert(1)",
    "]]>",
    "${title}",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_text_is_shown_as_it_is_written(text: str) -> None:
    page = Page(f"<body>{tag('p', text, title=text, data_v=text)}</body>")
    (element,) = page.of("p")
    assert (element.text, element.attributes) == (text, {"title": text, "data-v": text})
    assert [one.name for one in page.elements] == ["body", "p"] and page.problems == []


@settings(deadline=None)
@given(st.text())
def test_any_text_comes_back_but_for_what_a_browser_would_obey(text: str) -> None:
    shown = Page(f"<body>{escape(text)}</body>").text
    assert len(shown) == len(text)
    assert all(one == other or other == "\N{REPLACEMENT CHARACTER}" for one, other in zip(text, shown, strict=True))


@pytest.mark.parametrize("text", ["\x00", "\x1b[2J", "\ud800", "\u202e", "\u2066", "\r"])
def test_what_a_browser_would_obey_is_replaced(text: str) -> None:
    assert "\N{REPLACEMENT CHARACTER}" in escape(text)
    escape(text).encode()


@pytest.mark.parametrize("text", HOSTILE)
def test_json_cannot_end_the_script_that_holds_it(text: str) -> None:
    markup = as_json({text: [text]})
    assert "<" not in markup and ">" not in markup
    assert json.loads(markup) == {text: [text]}


def test_markup_is_taken_as_it_is_and_the_rest_is_escaped() -> None:
    assert tag("b", Html("<i>"), "<i>", 3, None, ["a", Html("&amp;")]) == "<b><i>&lt;i&gt;3a&amp;</b>"
    assert join() == ""


def test_attributes_that_say_nothing_are_left_out() -> None:
    assert tag("input", checked=True, disabled=False, title=None, class_="a") == '<input checked class="a">'
