"""Finds tracebacks in logs. Text in, text out.

A traceback is what Python prints: a headline, indented lines, the exception's own line and what its message goes on
with; chained ones belong together. One that was cut off by a kill counts, too.
"""

from __future__ import annotations

import re

HEADLINE = "Traceback (most recent call last):"
_ONE = (
    rf"{re.escape(HEADLINE)}\n(?:[ \t].*(?:\n|\Z))+"
    # A message may have several lines; what follows without a blank line is taken for it, to an extent.
    rf"(?:\S.*(?:\n(?!{re.escape(HEADLINE)})\S.*){{0,20}})?"
)
_LINK = (
    r"\n\n(?:During handling of the above exception, another exception occurred"
    r"|The above exception was the direct cause of the following exception):\n\n"
)
_CHAIN = re.compile(rf"^{_ONE}(?:{_LINK}{_ONE})*", re.MULTILINE)


def tracebacks(text: str) -> list[str]:
    """Returns the tracebacks in a log, oldest first, without the lines around them."""
    return [match[0].rstrip("\n") for match in _CHAIN.finditer(text)]


def traceback_of(text: str, message: str) -> str:
    """Returns the last traceback in a log that has a message, else the last of all; "" where there is none.

    Args:
        text: the log.
        message: what the rank said last, e.g. "ValueError: no such layer"; the exception's module is not in it.
    """
    found = tracebacks(text)
    said = message.partition(": ")[2] or message
    named = [block for block in found if said and said in block]
    return (named or found or [""])[-1]
