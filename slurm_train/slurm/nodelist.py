"""Slurm's compact host and task lists, written out.

`parse_nodelist` gives what `scontrol show hostnames` prints, in the same order, on machines that have no scontrol
(containers, some compute nodes). Two things differ on purpose: text after the last bracket ("gpu[1-2].lan") is
expanded where Slurm 22.05 refuses it, and text that scontrol turns into nonsense ("a[1,2" -> "a]") is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from slurm_train.errors import ClusterError

# Slurm's own limit on one range, and our limit on a whole list (it has no cluster larger than this).
_MAX_HOSTS = 65536
# Slurm counts in 64 bits; longer numbers are clamped by it, silently.
_MAX_DIGITS = 18

# Separators, a member, or a character that has no place here.
_TOKEN = re.compile(r"[, \t\n]+|(?P<member>(?:[A-Za-z0-9._-]|\[[^\[\]]*\])+)|(?P<unexpected>.)", re.DOTALL)
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_NUMBERED = re.compile(r"(.*?)([0-9]{1,15})")
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


class NodeListError(ClusterError):
    """A host list or task list that is not in Slurm's compact form."""

    def __init__(self, text: str, problem: str) -> None:
        super().__init__(
            f"{text!r} is not a Slurm list: {problem}",
            hint='write hosts as in "n01", "rack[1-2]node[3-4]", "a[1],b[2-3]"; tasks per node as in "2(x3),1"',
        )


def parse_nodelist(text: str) -> list[str]:
    """Returns every host of a compact list, e.g. "a[1],b[08-10]" -> ["a1", "b08", "b09", "b10"].

    Order, zero padding and repeated hosts are kept as `scontrol show hostnames` has them; an empty list gives [].

    Raises:
        NodeListError: brackets do not match, a range runs backwards or is too large, or a character cannot be
            part of a host name; the message quotes the part.
    """
    hosts: list[str] = []
    for token in _TOKEN.finditer(text):
        if token["unexpected"]:
            raise NodeListError(text, f"unexpected {token[0]!r} at character {token.start() + 1}")
        if not token["member"]:
            continue
        literals, groups = _split_groups(text, token[0])
        if len(hosts) + math.prod(map(len, groups)) > _MAX_HOSTS:
            raise NodeListError(text, f"more than {_MAX_HOSTS} hosts")
        # Slurm runs through the last group fastest, then through the *first*, the second, and so on:
        # a[1-2]b[3-4]c[5] is a1b3c5, a2b3c5, a1b4c5, a2b4c5.
        heads = [literals[0]]
        for literal, group in zip(literals[1:], groups[:-1], strict=False):
            heads = [head + number + literal for number in group for head in heads]
        hosts += [head + number + literals[-1] for head in heads for number in groups[-1]] if groups else heads
    return hosts


def _split_groups(text: str, member: str) -> tuple[list[str], list[list[str]]]:
    """Returns the literals of a member, one more than groups, and the numbers of each group as they are written."""
    pieces = re.split(r"\[([^\]]*)\]", member)
    groups = []
    for group in pieces[1::2]:
        numbers: list[str] = []
        for part in group.split(","):
            match = _RANGE.fullmatch(part)
            if match is None:
                raise NodeListError(text, f"expected a number or a range, found {part!r}")
            low, high = match[1], match[2] or match[1]
            if max(len(low.lstrip("0")), len(high.lstrip("0"))) > _MAX_DIGITS:
                raise NodeListError(text, f"number too large in {part!r}")
            if not int(low) <= int(high) < int(low) + _MAX_HOSTS - len(numbers):
                raise NodeListError(text, f"range {part!r} runs backwards or has more than {_MAX_HOSTS} hosts")
            # The width is that of the lower end alone: [1-010] is 1..10, [08-12] is 08..12.
            numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
        groups.append(numbers)
    return pieces[::2], groups


def compact_nodelist(hosts: Sequence[str]) -> str:
    """Returns hosts in the compact form, e.g. ["n8", "n9", "n10", "m1"] -> "n[8-10],m1"; for people to read.

    The order is kept, so `parse_nodelist` gives the same hosts back, except names that Slurm does not know of.
    """
    ranges: list[tuple[str, str, str]] = []  # prefix, first and last number
    for host in hosts:
        match = _NUMBERED.fullmatch(host)
        prefix, digits = (match[1], match[2]) if match else (host, "")
        before, first, last = ranges[-1] if ranges else ("", "", "")
        # Slurm takes the width from the range's first number, so 08 to 10 is one range and 9 to 010 is none.
        if digits and last and before == prefix and digits == str(int(last) + 1).zfill(len(last)):
            ranges[-1] = (prefix, first, digits)
        else:
            ranges.append((prefix, digits, digits))
    parts = (f"{prefix}{first}" if first == last else f"{prefix}[{first}-{last}]" for prefix, first, last in ranges)
    return ",".join(parts)


def parse_tasks_per_node(text: str) -> list[int]:
    """Returns the number of tasks on each node of a step, e.g. "2(x3),1" -> [2, 2, 2, 1].

    Raises:
        NodeListError: the text is empty or not of that form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            raise NodeListError(text, f"expected a count, found {part!r}")
        repeat = int(match[2] or 1)
        if not 1 <= repeat <= _MAX_HOSTS - len(counts):
            raise NodeListError(text, f"cannot repeat a count {repeat} times")
        counts += [int(match[1])] * repeat
    return counts
