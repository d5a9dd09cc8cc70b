"""Which section of docs/troubleshooting.md explains a message, found by the section's own heading.

`explained.txt` is made of the page's headings; "..." in one stands for values, as in the message's own f-string.
"""

from __future__ import annotations

import functools
import re

from slurm_train.assets import package_dir

PAGE = "docs/troubleshooting.md"


def address_of(message: str) -> str:
    """Returns the section that explains a message, e.g. "docs/troubleshooting.md#is-finished"; "" if none does.

    Of several that fit, the one with the most words in common; none where the message names its section itself.
    """
    if not message or PAGE in message:
        return ""
    lines = message.splitlines()
    fitting = [heading for heading in _headings() if any(_fits(line, heading) for line in lines)]
    return f"{PAGE}#{anchor(max(fitting, key=_words_in_common))}" if fitting else ""


def with_address(text: str, message: str) -> str:
    """Returns the text of an error, message and hint, with the address of the message's section behind it."""
    address = "" if PAGE in text else address_of(message)
    return f"{text} ({address})" if address else text


def anchor(heading: str) -> str:
    """Returns what the site calls a heading in an address."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower())).strip("-")


def headings_of(page: str) -> list[str]:
    """Returns the headings of the page that are messages: none of words such as "The batch", none of codes alone."""
    found = re.findall(r"^### (.+)$", page, re.MULTILINE)
    return [heading.strip("`") for heading in found if not re.fullmatch(r"[A-Z_]+", heading)]


@functools.cache
def _headings() -> tuple[str, ...]:
    return tuple((package_dir() / "explained.txt").read_text(encoding="utf-8").splitlines())


def _fits(line: str, heading: str) -> bool:
    """Returns whether a line has the words of a heading in their order; without "..." in front it begins with them."""
    first, *others = _words(heading)
    if not line.startswith(first):
        return False
    end = len(first)
    for words in others:
        begin = line.find(words, end)
        if begin < 0:
            return False
        end = begin + len(words)
    return True


def _words(heading: str) -> list[str]:
    return [part.strip() for part in heading.split("...")]


def _words_in_common(heading: str) -> tuple[int, str]:
    return sum(map(len, _words(heading))), heading
