"""Which rank of an attempt failed first, and its traceback: the one excerpt of thousands of lines that explains them.

The ledger names the rank: ranks leave a mark when they fail, and srun reports those that were killed, whose peers then
fail as well. Where no rank is named, as with a script of the user's own, the log that ended first with a traceback is
taken. A traceback is what Python prints, chained ones included; one that was cut off by a kill counts, too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_train.formatting import plain
from slurm_train.rundir.cause import CHILD_CRASH
from slurm_train.rundir.events import FailureMark, first_of, read_marks
from slurm_train.rundir.files import change_times, listed, read_tail
from slurm_train.rundir.ledger import Attempt, Reason, Start, read_attempt
from slurm_train.rundir.paths import RunDirectory

HEADLINE = "Traceback (most recent call last):"
_CRASH_HEADLINE = "Fatal Python error: "
"""How faulthandler begins."""
_ONE = (
    rf"{re.escape(HEADLINE)}\n(?:[ \t].*(?:\n|\Z))+"
    # A message may have several lines; what follows without a blank line is taken for it, to an extent.
    rf"(?:\S.*(?:\n(?!{re.escape(HEADLINE)}).*\S.*){{0,20}})?"
)
_LINK = (
    r"\n\n(?:During handling of the above exception, another exception occurred"
    r"|The above exception was the direct cause of the following exception):\n\n"
)
_CHAIN = re.compile(rf"^{_ONE}(?:{_LINK}{_ONE})*", re.MULTILINE)
# torch puts the rank before each line of a traceback where a program has a process group, and a NUL or a blank behind
# what it says of a bus error.
_PREFIX = re.compile(rf"^(?:\[rank\d+\]: ?|[\0 ]+(?={re.escape(HEADLINE)}))", re.MULTILINE)
# What torchrun and `accelerate launch` print when a process of theirs has failed, whose own traceback comes before.
_OF_LAUNCHER = re.compile(r"^\S*(?:ChildFailedError|CalledProcessError)\b", re.MULTILINE)
_OF_STEP = re.compile(r"slurmstepd\S*: error: (.+)")
_TAIL_BYTES = 1 << 18
_LAST_LINES = 20


def tracebacks(text: str) -> list[str]:
    """Returns the tracebacks in a log, oldest first, without the lines around them."""
    return [match[0].rstrip("\n") for match in _CHAIN.finditer(_PREFIX.sub("", text))]


def last_words(text: str) -> str:
    """Returns the line of a log that says why its program ended: what the last traceback is about, else the last line.

    Args:
        text: the end of the log.
    """
    text = plain(text)
    frames_and_error = _last_traceback(tracebacks(text)).rpartition(HEADLINE)[2]
    errors = [line for line in frames_and_error.splitlines() if line and not line.startswith(" ")]
    if errors:
        return errors[0]
    # Not the frame that a program draws around its last message.
    lines = [line.strip() for line in text.splitlines() if re.search(r"\w", line)]
    # Where a plug-in of Slurm fails, e.g. one for containers, the last line says only that it did.
    of_step = [match[1] for match in itertools.takewhile(bool, map(_OF_STEP.match, reversed(lines))) if match]
    if of_step:
        return f"slurmstepd: {'; '.join(reversed(of_step))}"
    return lines[-1] if lines else ""


def error_at_end(text: str) -> str:
    """Returns the error whose traceback is the last thing that a log has, "" where something else is.

    One of several lines is passed over: the later ones may be of a program that goes on.

    Args:
        text: the end of the log.
    """
    found = [block.rpartition(HEADLINE)[2].splitlines() for block in tracebacks(text)[-1:]]
    errors = [line for lines in found for line in lines if line and not line.startswith((" ", "\t"))]
    return errors[0] if len(errors) == 1 and text.rstrip().endswith(errors[0]) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailure:
    """How an attempt failed."""

    attempt: int
    note: str
    """The ledger's, e.g. "rank 3 on node2: ValueError: no; the ranks are started again in this allocation"."""
    rank: int | None
    """The first to fail, None where that is not known."""
    host: str
    log: Path | None
    """Its log, None where it has none."""
    source: Path | None
    """The file that has the excerpt."""
    wrote_to_terminal: bool
    """Whether its words are in a terminal instead, as those of rank 0 of a run on this machine."""
    excerpt: str
    """Its traceback, the stacks of a rank that hung, or the last lines of its log."""
    kind: str
    """What the excerpt is: "traceback", "stacks" or "last lines"; "" where there is none."""

    def lines(self, *, rank_shown: int) -> list[str]:
        """Returns what is printed before the excerpt.

        Args:
            rank_shown: the rank whose output the person has seen.
        """
        lines = [f"attempt {self.attempt} failed: {self.note}"]
        if self.rank is None:
            return lines
        first = f"rank {self.rank}{f' on {self.host}' if self.host else ''} failed first; "
        if self.log is None:
            where = ": it wrote to the terminal that the run was started in" if self.wrote_to_terminal else ""
            return [*lines, f"{first}it has no log of its own{where}"]
        if not self.kind:
            return [*lines, f"{first}its log is empty"]
        if self.is_in_log_of(rank_shown):
            lines_are = "traceback is" if self.kind == "traceback" else "last lines are"
            return [*lines, f"{first}its {lines_are} above"]
        return [*lines, f"{first}its {self.kind}, from {self.source}:"]

    def is_in_log_of(self, rank: int) -> bool:
        """Returns whether the excerpt is a part of this rank's log."""
        return self.rank == rank and self.kind != "stacks"


def find_failure(run: RunDirectory, attempt: int) -> AttemptFailure | None:
    """Returns how an attempt failed, None for one that did not, or that still runs."""
    found = read_attempt(run, attempt)
    if found is None or found.reason is not Reason.FAILED:
        return None
    rank, host, mark = _first_failed(run, found)
    log = None if rank is None else run.rank_log(attempt, rank)
    is_here = found.start.job_id is None
    # An empty one is made for what a crash of the interpreter would write.
    has_log = log is not None and log.is_file() and not (is_here and log.stat().st_size == 0)
    log = log if has_log else None
    excerpt = ""
    kind = ""
    source = log
    if rank is not None and run.stacks(attempt, rank).is_file():
        source = run.stacks(attempt, rank)
        excerpt = read_tail(source, _TAIL_BYTES).rstrip()
        kind = "stacks"
    elif log is not None:
        text = read_tail(log, _TAIL_BYTES)
        excerpt = _traceback_of(text, mark)
        kind = "traceback"
        if not excerpt:
            excerpt = "\n".join(text.rstrip().splitlines()[-_LAST_LINES:])
            kind = "last lines" if excerpt else ""
    in_terminal = is_here and rank == 0 and log is None
    return AttemptFailure(
        attempt=attempt,
        note=found.note,
        rank=rank,
        host=host,
        log=log,
        source=source,
        wrote_to_terminal=in_terminal,
        excerpt=excerpt,
        kind=kind,
    )


def first_failed_rank(run: RunDirectory, attempt: int) -> int | None:
    """Returns the rank that failed first as far as is known now, also of an attempt that has not ended yet."""
    found = read_attempt(run, attempt)
    return _first_failed(run, found or Attempt(attempt, Start()))[0]


def _first_failed(run: RunDirectory, attempt: Attempt) -> tuple[int | None, str, FailureMark | None]:
    """Returns rank and host of the first rank to fail, as far as known, and the mark that it has left."""
    cause = None if attempt.end is None else attempt.end.cause
    marks = read_marks(run, attempt.number)
    if cause is not None and cause.ranks:
        rank = cause.ranks[0]
        return rank, cause.node, next((mark for mark in marks if mark.rank == rank), None)
    first = first_of(marks)
    if first is not None:
        return first.rank, first.host, first
    # A lost node or a killed srun takes ranks along whose tracebacks explain nothing.
    is_unknown = attempt.end is not None and cause is None
    return _first_log_with_traceback(run, attempt.number) if is_unknown else None, "", None


def _first_log_with_traceback(run: RunDirectory, attempt: int) -> int | None:
    times = change_times(listed(run.attempt_logs(attempt)))
    names = {path: re.fullmatch(r"rank_(\d+)\.log", path.name) for path in times}
    logs = sorted((times[path], int(match[1]), path) for path, match in names.items() if match)
    return next((rank for _, rank, path in logs if tracebacks(read_tail(path, _TAIL_BYTES))), None)


def crash_in(text: str) -> str:
    """Returns what faulthandler wrote when a signal ended the rank; "" for no crash, or one before an exception."""
    _, headline, stacks = text.rpartition(_CRASH_HEADLINE)
    return "" if not headline or HEADLINE in stacks else (headline + stacks).rstrip()


def crash_of_child_in(text: str) -> str:
    """Returns the stacks that a process of a loader, or a spawned one, wrote before its rank failed; "" for none."""
    _, headline, stacks = text.rpartition(_CRASH_HEADLINE)
    return (headline + stacks.partition(HEADLINE)[0]).strip("\n \0") if headline else ""


def _traceback_of(text: str, mark: FailureMark | None) -> str:
    """Returns the last traceback in a log that has the message of a mark; else a crash; else the last traceback of all.

    A mark holds e.g. "ValueError: no such layer"; the exception's module is not in it. "" where there is none of them.
    """
    blocks = tracebacks(text)
    message = "" if mark is None else mark.message
    error_text = message.partition(": ")[2] or message
    named = [block for block in blocks if error_text and error_text in block]
    crash = "" if named else crash_in(text)
    if crash:
        # A library says why it aborts before it does.
        before = text[: text.rindex(crash)].rstrip().splitlines()
        return "\n".join([*before[-_LAST_LINES:], crash])
    if not named:
        return _last_traceback(blocks)
    crash = crash_of_child_in(text) if mark is not None and mark.cause.kind == CHILD_CRASH else ""
    return "\n\n".join(filter(None, [crash, named[-1]]))


def _last_traceback(blocks: Sequence[str]) -> str:
    """Returns the last traceback that is not a launcher's, else the last of all; "" where there is none."""
    own = [block for block in blocks if not _OF_LAUNCHER.search(block)]
    return (own or list(blocks) or [""])[-1]
