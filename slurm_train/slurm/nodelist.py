"""Slurm's compact host and task lists, written out.

`parse_nodelist` gives what `scontrol show hostnames` prints, in the same order, on machines that have no scontrol
(containers, some compute nodes). Two things differ on purpose: text after the last bracket ("gpu[1-2].lan") is
expanded where Slurm 22.05 refuses it, and text that scontrol turns into nonsense ("a[1,2" -> "a]") is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from slurm_train.errors import ClusterError

# Slurm's own limit on one range, and our limit on a whole list (it has no cluster larger than this).
_MAX_HOSTS = 65536
# Slurm counts in 64 bits; longer numbers are clamped by it, silently.
_MAX_DIGITS = 18

_SEPARATOR = re.compile(r"[, \t\n]+")
_LITERAL = re.compile(r"[A-Za-z0-9._-]+")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_NUMBERED = re.compile(r"(.*?)([0-9]{1,15})")
_TASKS = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


class NodeListError(ClusterError):
    """A host list or task list that is not in Slurm's compact form."""

    def __init__(self, text: str, position: int, problem: str) -> None:
        super().__init__(
            f"{text!r} is not a Slurm list: {problem} at character {position + 1}",
            hint='write hosts as in "n01", "rack[1-2]node[3-4]", "a[1],b[2-3]"; tasks per node as in "2(x3),1"',
        )
        self.text = text
        self.position = position


def parse_nodelist(text: str) -> list[str]:
    """Returns every host of a compact list, e.g. "a[1],b[08-10]" -> ["a1", "b08", "b09", "b10"].

    Order, zero padding and repeated hosts are kept as `scontrol show hostnames` has them; an empty list gives [].

    Raises:
        NodeListError: brackets do not match, a range runs backwards or is too large, or a character cannot be
            part of a host name; the message names the position.
    """
    hosts: list[str] = []
    position = _skip_separators(text, 0)
    while position < len(text):
        literals, groups, end = _read_member(text, position)
        hosts.extend(_expand(literals, groups))
        if len(hosts) > _MAX_HOSTS:
            raise NodeListError(text, position, f"more than {_MAX_HOSTS} hosts")
        if end < len(text) and _skip_separators(text, end) == end:
            raise NodeListError(text, end, f"unexpected {text[end]!r}")
        position = _skip_separators(text, end)
    return hosts


def compact_nodelist(hosts: Sequence[str]) -> str:
    """Returns hosts in the compact form, e.g. ["n8", "n9", "n10", "m1"] -> "n[8-10],m1"; for people to read.

    The order is kept, so `parse_nodelist` gives the same hosts back, but for names that Slurm does not know of.
    """
    parts: list[str] = []
    for prefix, numbers in _runs_of_numbers(hosts):
        first, last = numbers[0], numbers[-1]
        parts.append(f"{prefix}{first}" if len(numbers) == 1 else f"{prefix}[{first}-{last}]")
    return ",".join(parts)


def _runs_of_numbers(hosts: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Returns neighbours that differ in a last number counting upwards: their common beginning and their numbers."""
    found: list[tuple[str, list[str]]] = []
    for host in hosts:
        match = _NUMBERED.fullmatch(host)
        prefix, digits = (match[1], match[2]) if match else (host, "")
        if found and digits and found[-1][0] == prefix and _follows(found[-1][1][-1], digits):
            found[-1][1].append(digits)
        else:
            found.append((prefix, [digits]))
    return found


def _follows(digits: str, other: str) -> bool:
    # Slurm takes the width from the range's first number, so 08 to 10 is one range and 9 to 010 is none.
    return bool(digits) and other == str(int(digits) + 1).zfill(len(digits))


def parse_tasks_per_node(text: str) -> list[int]:
    """Returns the number of tasks on each node of a step, e.g. "2(x3),1" -> [2, 2, 2, 1].

    Raises:
        NodeListError: the text is empty or not of that form.
    """
    counts: list[int] = []
    position = 0
    for part in text.split(","):
        match = _TASKS.fullmatch(part)
        if match is None or len(part) > _MAX_DIGITS:
            raise NodeListError(text, position, f"expected a count, found {part!r}")
        repeat = int(match[2] or 1)
        if not 1 <= repeat <= _MAX_HOSTS - len(counts):
            raise NodeListError(text, position, f"cannot repeat a count {repeat} times")
        counts += [int(match[1])] * repeat
        position += len(part) + 1
    return counts


def _skip_separators(text: str, position: int) -> int:
    match = _SEPARATOR.match(text, position)
    return match.end() if match else position


def _read_member(text: str, start: int) -> tuple[list[str], list[list[str]], int]:
    """Reads one member; there is always one literal more than bracket groups. Returns also where it ends."""
    literals: list[str] = []
    groups: list[list[str]] = []
    position, num_hosts = start, 1
    while True:
        match = _LITERAL.match(text, position)
        literals.append(match[0] if match else "")
        position = match.end() if match else position
        if position >= len(text) or text[position] != "[":
            break
        group, position = _read_group(text, position)
        groups.append(group)
        num_hosts *= len(group)
        if num_hosts > _MAX_HOSTS:
            raise NodeListError(text, start, f"more than {_MAX_HOSTS} hosts")
    if position == start:
        raise NodeListError(text, position, f"unexpected {text[position]!r}")
    return literals, groups, position


def _read_group(text: str, opening: int) -> tuple[list[str], int]:
    """Reads "[1-3,07]" from its opening bracket. Returns the numbers as written and where the group ends."""
    closing = text.find("]", opening)
    if closing < 0:
        raise NodeListError(text, opening, "'[' is never closed")
    numbers: list[str] = []
    position = opening + 1
    for part in text[opening + 1 : closing].split(","):
        numbers += _read_range(text, position, part)
        position += len(part) + 1
    return numbers, closing + 1


def _read_range(text: str, position: int, part: str) -> list[str]:
    match = _RANGE.fullmatch(part)
    if match is None:
        raise NodeListError(text, position, f"expected a number or a range, found {part!r}")
    low, high = match[1], match[2] or match[1]
    if max(len(low.lstrip("0")), len(high.lstrip("0"))) > _MAX_DIGITS:
        raise NodeListError(text, position, f"number too large in {part!r}")
    if int(high) < int(low):
        raise NodeListError(text, position, f"range {part!r} runs backwards")
    if int(high) - int(low) >= _MAX_HOSTS:
        raise NodeListError(text, position, f"more than {_MAX_HOSTS} hosts in {part!r}")
    # The width is that of the lower end alone: [1-010] is 1..10, [08-12] is 08..12.
    return [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]


def _expand(literals: list[str], groups: list[list[str]]) -> list[str]:
    """Combines literals and groups in Slurm's order.

    Slurm runs through the last group fastest, then through the *first*, the second, and so on:
    a[1-2]b[3-4]c[5] is a1b3c5, a2b3c5, a1b4c5, a2b4c5.
    """
    if not groups:
        return [literals[0]]
    heads = [literals[0]]
    for literal, group in zip(literals[1:], groups[:-1], strict=False):
        heads = [head + number + literal for number in group for head in heads]
    return [head + number + literals[-1] for head in heads for number in groups[-1]]
