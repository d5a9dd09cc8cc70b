"""What the script of `completion` asks at every TAB; people do not type it.

complete bash LINE BREAKS      the line up to the cursor, and where the shell cuts words
complete zsh|fish WORD...      the words after the program; the last one is at the cursor
"""

from __future__ import annotations

from collections.abc import Sequence

from slurm_train.cli.candidates import Candidate, complete

# What a shell would read something into. Such a name can be typed, but is not put into somebody's line.
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=.,:/@%~")


def main(words: Sequence[str]) -> int:
    """Prints one candidate per line and returns 0."""
    shell, *rest = words
    if shell == "bash":
        line, breaks = rest
        lines = _for_bash(line, breaks)
    else:
        found = _plain(complete(_after_program(rest[:-1]), rest[-1]))
        lines = [_for_zsh(one) if shell == "zsh" else _for_fish(one) for one in found]
    print("\n".join(lines))
    return 0


def _plain(candidates: Sequence[Candidate]) -> list[Candidate]:
    return [one for one in candidates if _PLAIN.issuperset(one.text)]


def _for_zsh(one: Candidate) -> str:
    return f"{'more' if one.goes_on else 'done'}\t{one.text}\t{_about(one)}"


def _for_fish(one: Candidate) -> str:
    return f"{one.text}\t{_about(one)}"


def _about(one: Candidate) -> str:
    return " ".join(one.about.split())


def _for_bash(line: str, breaks: str) -> list[str]:
    """Returns the ends of candidates that bash puts in place of what it takes for the current word."""
    words, quote = split_line(line)
    *before, current = _after_assignments(words)
    found = _plain(complete(_after_program(before[1:]), current))
    # Inside quotes the shell takes everything since the quote for the word.
    start = 0 if quote else max((current.rfind(mark) for mark in breaks if not mark.isspace()), default=-1) + 1
    return [one.text[start:] + ("" if one.goes_on else quote + " ") for one in found]


def _after_assignments(words: Sequence[str]) -> list[str]:
    """Leaves out `NAME=value` in front of a command; the word at the cursor always stays."""
    index = 0
    while index < len(words) - 2 and words[index].partition("=")[0].isidentifier() and "=" in words[index]:
        index += 1
    return list(words[index:])


def _after_program(words: Sequence[str]) -> list[str]:
    """Leaves out the rest of `python -m slurm_train`."""
    return list(words[2:] if list(words[:2]) == ["-m", "slurm_train"] else words)


def split_line(line: str) -> tuple[list[str], str]:
    """Returns the words of a line as a shell reads them, the last one up to the cursor, and the quote it is in.

    Args:
        line: e.g. `slurm-train -m "seed=ra`.
    """
    words, quote = [""], ""
    escaped = False
    for char in line:
        if escaped:
            words[-1] += char
            escaped = False
        elif char == "\\" and quote != "'":
            escaped = True
        elif quote:
            quote, words[-1] = ("", words[-1]) if char == quote else (quote, words[-1] + char)
        elif char in "'\"":
            quote = char
        elif not char.isspace():
            words[-1] += char
        elif words[-1]:
            words.append("")
    return words, quote
