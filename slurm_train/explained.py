"""Which section of docs/troubleshooting.md explains a message, found by the section's own heading.

`explained.txt` is made of the page's headings; "..." in one stands for values, as in the message's own f-string.
"""

from __future__ import annotations

import functools
import re

from slurm_train.assets import package_dir

PAGE = "docs/troubleshooting.md"
# A heading with fewer letters of its own, such as `srun: ...`, names only messages that begin so.
_FEW_LETTERS = 12


def address_of(message: str) -> str:
    """Returns the section that explains a message, e.g. "docs/troubleshooting.md#is-finished"; "" if none does.

    Of several that fit, the one with the most words in common; none where the message names its section itself.
    """
    if PAGE in message:
        return ""
    fitting = [(letters, heading) for letters, heading, pattern in _sections() if pattern.search(message)]
    return f"{PAGE}#{anchor(max(fitting)[1])}" if fitting else ""


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
def _sections() -> tuple[tuple[int, str, re.Pattern[str]], ...]:
    """Returns the letters that each heading has of its own, the heading, and what fits it."""
    text = (package_dir() / "explained.txt").read_text(encoding="utf-8")
    return tuple(_section(heading) for heading in text.splitlines())


def _section(heading: str) -> tuple[int, str, re.Pattern[str]]:
    words = [part.strip() for part in heading.split("...")]
    letters = sum(map(len, words))
    begins = r"^" if letters < _FEW_LETTERS or words[0] else ""
    return letters, heading, re.compile(begins + ".*".join(map(re.escape, words)), re.MULTILINE)
