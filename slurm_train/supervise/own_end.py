"""What it means that a person's own program has ended with 0: one table over all that is known of that end.

Exit code 0 alone does not say that a training is over. Programs save and end with 0 when they are asked to stop; a
second start may refuse with 0, since the output of the first one is there; a `break` or a bare `except` ends a loop
before its last step. So `judge` weighs what the program has told its session, who has asked for a stop, and how far an
attempt before has come. It is a pure function; `read_end` reads what it needs.
"""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_train.checkpoint.verify import newest_committed_step
from slurm_train.config.secrets import redact
from slurm_train.formatting import plain
from slurm_train.rundir.attempts import was_saved
from slurm_train.rundir.files import last_lines, read_tail
from slurm_train.rundir.ledger import Attempt
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.timing import read_program, step_of_attempt
from slurm_train.status.failure import last_words

_LOG_BYTES = 256 * 1024
_LEAST_REPEATS = 3
"""So many lines of one form count as the progress of a program."""
_LONGEST_QUOTE = 200
_NO_LETTERS = re.compile(r"[^A-Za-z]+")
_OF_TOTAL = re.compile(r"(\d+)\s*(?:/|of)\s*(\d+)")


class EndKind(enum.Enum):
    """What an end with 0 was."""

    FINISHED = "finished"
    STOPPED = "stopped"
    """The program was asked to stop, and is to be continued."""
    EARLY = "early"
    """The program ended before its end, and nobody had asked it to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnEnd:
    """What is known of a program whose ranks have all ended with 0."""

    was_asked: bool = False
    """Whether anybody has asked for a stop: a signal, the STOP file, Slurm; or the program has called `leave`."""
    is_at_end: bool = False
    """Whether the program has said that its training is over, or has reported its last step."""
    step: int | None = None
    """The step that the program had come to; None where it has told nothing."""
    max_steps: int | None = None
    """Of the whole training, as reported."""
    report_every: int = 1
    """Steps from one report to the next."""
    missing_save: int | None = None
    """Step of a save that had begun and is no checkpoint; None for none."""
    committed: int = -1
    """Step of the newest checkpoint, -1 for none."""
    reached: int = 0
    """The furthest step of an attempt before."""
    repeated_line: str = ""
    """A line of a form that an attempt before printed again and again, and this one never; "" for none."""
    last_words: str = ""
    """What rank 0 printed last."""


def judge(end: OwnEnd) -> tuple[EndKind, str]:
    """Returns what the end was, and why it was early in words, "" for other ends. The first row that applies decides.

    | evidence                                                          | end      |
    |-------------------------------------------------------------------|----------|
    | a save is missing, nobody had asked for a stop                    | early    |
    | the program said its end, or reported its last step               | finished |
    | a stop was asked for                                              | stopped  |
    | more than one report is missing to the reported number of steps   | early    |
    | an attempt before had come further                                | early    |
    | an attempt before printed its progress, this one printed none     | early    |
    | none of this                                                      | finished |

    A program that counts its steps from 0, or reports every tenth, ends below its number of steps.
    """
    words = f"; its last words: {end.last_words}" if end.last_words else ""
    confirm = f'{words}; a program that is right to end there calls `mark("end")` of the session'
    if end.missing_save is not None and not end.was_asked:
        newest = f"the newest is of step {end.committed}" if end.committed >= 0 else "there is none"
        return EndKind.EARLY, (
            f"the program ended with 0 and its save of step {end.missing_save} is no checkpoint, {newest}: it has to "
            f"call `finish()` of its training before `os._exit`{words}"
        )
    if end.is_at_end and end.missing_save is None:
        return EndKind.FINISHED, ""
    if end.was_asked:
        return EndKind.STOPPED, ""
    step = end.step or 0
    if end.step is not None and end.max_steps is not None and step + end.report_every < end.max_steps:
        return EndKind.EARLY, f"the program ended with 0 at step {step} of {end.max_steps}{confirm}"
    if step < end.reached:
        return EndKind.EARLY, (
            f"the program ended with 0 at step {step}, and an attempt before had come to step {end.reached}{confirm}"
        )
    if end.repeated_line:
        return EndKind.EARLY, (
            f"the program ended with 0 and printed no line like {end.repeated_line!r}, which an attempt before printed "
            f"again and again{confirm}"
        )
    return EndKind.FINISHED, ""


def read_end(run: RunDirectory, attempt: int, ledger: Sequence[Attempt], *, was_asked: bool) -> OwnEnd:
    """Returns what is known of the end of an attempt whose ranks have all ended with 0.

    Args:
        run: the run.
        attempt: its number.
        ledger: the attempts, oldest first, this one the last.
        was_asked: whether a stop was asked for, as far as signals, files and Slurm say.

    Raises:
        OSError: the file system refuses.
    """
    told = read_program(run, attempt)
    committed = newest_committed_step(run.checkpoints)
    # After a change that a person has accepted, a program may end elsewhere.
    present = ledger[-1]
    earlier = [before for before in ledger[:-1] if before.start.changes == present.start.changes]
    told_before = [read_program(run, before.number) for before in earlier]
    reached = max((before.end.last_step or 0 for before in earlier if before.end is not None), default=0)
    if any(before is not None and before.newest_step > 0 for before in told_before):
        # A program that saves without the session tells no step that could be compared with its checkpoints.
        reached = max(reached, present.start.first_committed or 0)
    step = None
    if told is not None:
        # A program that ends by `os._exit` may have told more than is written.
        step = max(told.newest_step, step_of_attempt(run, attempt, default=0))
    if not step and any(before is not None and before.is_at_end for before in told_before):
        # Nothing was left to do but what follows the last step.
        reached = 0
    log = read_tail(run.rank_log(attempt, 0), _LOG_BYTES)
    repeated_line = ""
    if told is None and not reached:
        repeated_line = _missing_progress(run, [before.number for before in earlier], log)
    is_missing = told is not None and told.save_step > committed
    return OwnEnd(
        was_asked=was_asked or was_saved(run, attempt),
        is_at_end=told is not None and told.is_at_end,
        step=step,
        max_steps=None if told is None else told.max_steps,
        report_every=_report_every(run),
        missing_save=told.save_step if told is not None and is_missing else None,
        committed=committed,
        reached=reached,
        repeated_line=repeated_line,
        last_words=redact(last_words(log))[:_LONGEST_QUOTE],
    )


def _report_every(run: RunDirectory) -> int:
    """Returns the steps between the two newest reports with a number of steps, 1 where there are fewer than two."""
    steps = sorted({int(line["step"]) for line in last_lines(run.metrics) if "max_steps" in line})
    return steps[-1] - steps[-2] if len(steps) > 1 else 1


def _missing_progress(run: RunDirectory, attempts: Sequence[int], log: str) -> str:
    """Returns a line of the progress that the newest earlier attempt with progress printed; "" where `log` has it, too.

    Args:
        run: the run.
        attempts: the earlier attempts, oldest first.
        log: of rank 0 in this attempt.
    """
    later_lines: list[str] = []
    for attempt in reversed(attempts):
        earlier_log = read_tail(run.rank_log(attempt, 0), _LOG_BYTES)
        line = progress_line(earlier_log)
        if line:
            form = _form_of(line)
            newest = next((later for later in later_lines if _form_of(later) == form), line)
            is_there = form in map(_form_of, _lines_of(log))
            return "" if is_there or _says_all(newest) else newest.strip()[:_LONGEST_QUOTE]
        later_lines += reversed(_lines_of(earlier_log))
    return ""


def progress_line(log: str) -> str:
    """Returns the newest line of the form that a log repeats most, "" where it repeats none.

    Two lines have one form if they differ in numbers and signs only, e.g. "step 5: loss 2.31" and "step 6: loss 1.97".
    """
    lines = _lines_of(log)
    form, count = next(iter(Counter(map(_form_of, lines)).most_common(1)), ("", 0))
    if count < _LEAST_REPEATS:
        return ""
    return next(line for line in reversed(lines) if _form_of(line) == form)


def _lines_of(log: str) -> list[str]:
    return [line for line in plain(log).split("\n") if _form_of(line)]


def _form_of(line: str) -> str:
    return _NO_LETTERS.sub(" ", line).strip()


def _says_all(line: str) -> bool:
    """Returns whether a line of progress says that nothing is left, e.g. "step 120 of 120"."""
    return any(int(done) >= int(total) > 0 for done, total in _OF_TOTAL.findall(line))
