"""What a command of Slurm has answered, whatever a site's wrapper, banner or filter says around it. Pure text in.

Sites put scripts of their own in place of Slurm's commands, and filters that talk to the person. So an answer is looked
for among other lines, and where a command refuses, all that it has said is kept: the site's explanation may be on
stdout, or many lines above the last one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from slurm_train.formatting import plain

# `sbatch --parsable` prints "26", or "26;lab" for another cluster; without it sbatch prints a sentence.
_LONE_ID = re.compile(r"^[ \t]*(?P<id>[0-9]+)(?:;(?P<cluster>[\w.-]+))?[ \t]*$", re.MULTILINE)
_SENTENCE = re.compile(r"\bsubmitted batch job (?P<id>[0-9]+)(?: on cluster (?P<cluster>[\w.-]+))?", re.IGNORECASE)
# In front of a line of sbatch's stderr: who speaks, and that it is an error.
_PREFIX = re.compile(
    r"^(?:s(?:batch|alloc|run): )?(?:error: |fatal: |lua: )*"
    r"(?:allocation failure: |Batch job submission failed: |Job submit/allocate failed: )?"
)
_FEW_LINES = 2


def said(stdout: str, stderr: str) -> list[str]:
    """Returns the lines that a command has written, stdout's first, without empty ones and "sbatch: error: "."""
    lines = [*plain(stdout).splitlines(), *plain(stderr).splitlines()]
    spoken = (without_prefix(line) for line in lines)
    return [line for line in spoken if line.strip() and not line.startswith("Try ")]


def without_prefix(line: str) -> str:
    """Returns a line without "sbatch: error: ", "allocation failure: " and their like."""
    return _PREFIX.sub("", line.rstrip())


def in_words(lines: list[str]) -> str:
    """Returns lines as they stand in a message: few of them in one line, several below each other."""
    if len(lines) <= _FEW_LINES:
        return "; ".join(line.strip() for line in lines)
    return "".join(f"\n    {line}" for line in lines)


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job that sbatch says it has submitted."""

    job_id: str
    cluster: str = ""
    """The cluster that has taken it, where the answer names one."""


def numbers_in(stdout: str) -> set[str]:
    """Returns all whole numbers in an answer, one of which may be the id of a job."""
    return set(re.findall(r"(?<![\w.-])[0-9]+(?![\w-]|\.[0-9])", plain(stdout)))


def submitted_jobs(stdout: str) -> list[Submitted]:
    """Returns the jobs that an answer of sbatch may name; the last one is meant, unless Slurm knows better.

    Args:
        stdout: of `sbatch --parsable`, e.g. "26\\n", "26;lab\\n" or "Submitted batch job 26 on cluster lab\\n".
    """
    text = plain(stdout)
    matches = [*_SENTENCE.finditer(text), *_LONE_ID.finditer(text)]
    return list(dict.fromkeys(Submitted(match["id"], match["cluster"] or "") for match in matches))
