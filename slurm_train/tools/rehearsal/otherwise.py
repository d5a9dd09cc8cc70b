"""Which variables and words a program's processes have otherwise at a second start. No value of one leaves this module.

A shell around a program names a folder by the time, or exports a number of its own: the next start has another one,
and what follows from it (a folder, a seed, a tracker's run) is another one, too. A start's processes are read from
/proc while they run; those of two starts are compared by their names. What a program sets within itself is not seen.
"""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slurm_train.code.program_source import SHELLS
from slurm_train.processes import environment_of
from slurm_train.slurm.job_variables import is_job_variable

_NUM_FIRST_WORDS = 2
"""By so many words, e.g. "python train.py", a process of one start is known in another one."""
_BY_NATURE = {
    "_": "the shell's last command",
    "TMPDIR": "a job's folder for temporary files",
    "*_PID": "a process of this start",
    "*_PORT": "a free port of this start",
    "*_ADDR": "a host and port of this start",
    "*_ADDRESS": "a host and port of this start",
    "*_SOCKET": "a socket of this start",
    "WANDB_SERVICE": "where the process of wandb answers",
    "KMP_*": "an address within libomp",
}
"""Variables that differ by their nature, with the reason; besides those of the job, its step and its ranks."""
_OF_HELPERS = {
    "*slurm_train/worker/watcher.py": "is started beside each rank, with its number",
    "*multiprocessing*": "has numbers of open files",
    "*wandb*": "has the number of the process that it serves, and a temporary folder",
    "*/ray/*": "has ports and a folder of its session",
}
"""Words of processes whose own words differ by their nature, with the reason."""


@dataclass(frozen=True, slots=True)
class ProgramProcess:
    """A process of a rank's program, as it was started."""

    words: tuple[str, ...] = field(repr=False)
    variables: Mapping[str, int] = field(repr=False)
    """Name -> hash of the value, which may be a secret."""

    @property
    def is_shell(self) -> bool:
        """Whether it is a shell."""
        return Path(self.words[0]).name in SHELLS


def read_process(pid: int) -> ProgramProcess | None:
    """Returns a process of this machine, None where it has ended."""
    variables = {name: hash(value) for name, value in environment_of(pid).items()}
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:-1]
    except OSError:
        return None
    return ProgramProcess(tuple(words), variables) if words and variables else None


def other_names(first: Iterable[ProgramProcess], second: Iterable[ProgramProcess]) -> list[str]:
    """Returns what has another value in the processes of a second start: variables by name, words by their option.

    A process is compared with those that begin with the same words and have as many. Where several do, as ranks do, a
    variable counts only if no value of the one start is one of the other.

    Args:
        first: of the first start.
        second: of the second one.

    Returns:
        E.g. ["RUN_ID", "--out of train.py"].
    """
    groups, groups_again = _grouped(first), _grouped(second)
    names: set[str] = set()
    words: set[str] = set()
    for key in groups.keys() & groups_again.keys():
        names |= _other_variables(groups[key], groups_again[key])
        words |= _other_words(groups[key], groups_again[key])
    return [*sorted(names), *sorted(words)]


_Key = tuple[int, tuple[str, ...]]


def _grouped(processes: Iterable[ProgramProcess]) -> dict[_Key, list[ProgramProcess]]:
    groups: dict[_Key, list[ProgramProcess]] = defaultdict(list)
    for process in processes:
        if not any(fnmatch.fnmatchcase(word, helper) for word in process.words[:3] for helper in _OF_HELPERS):
            groups[len(process.words), process.words[:_NUM_FIRST_WORDS]].append(process)
    return groups


def _other_variables(first: list[ProgramProcess], second: list[ProgramProcess]) -> set[str]:
    values, values_again = _values(first), _values(second)
    both = values.keys() & values_again.keys()
    return {name for name in both if not _is_by_nature(name) and values[name].isdisjoint(values_again[name])}


def _values(processes: list[ProgramProcess]) -> dict[str, set[int]]:
    values: dict[str, set[int]] = defaultdict(set)
    for process in processes:
        for name, value in process.variables.items():
            values[name].add(value)
    return values


def _is_by_nature(name: str) -> bool:
    return is_job_variable(name) or any(fnmatch.fnmatchcase(name, pattern) for pattern in _BY_NATURE)


def _other_words(first: list[ProgramProcess], second: list[ProgramProcess]) -> set[str]:
    found = set()
    words = first[0].words
    for index in range(_NUM_FIRST_WORDS, len(words)):
        values = {process.words[index] for process in first}
        if values.isdisjoint({process.words[index] for process in second}):
            found.add(f"{_option_of(words, index)} of {_program_of(words)}")
    return found


def _option_of(words: tuple[str, ...], index: int) -> str:
    """Returns what names a word, e.g. "--out" for "--out=out/1764425000" and for the word behind "--out"."""
    name, equals, _ = words[index].partition("=")
    if equals:
        return name
    return words[index - 1] if words[index - 1].startswith("-") else f"word {index}"


def _program_of(words: tuple[str, ...]) -> str:
    return Path(next((word for word in words[1:] if not word.startswith("-")), words[0])).name
