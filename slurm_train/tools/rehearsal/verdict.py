"""What a disturbance did to a run, by its course and that of the undisturbed run: one row, one sentence. Pure."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from slurm_train.formatting import count, duration, number, shorten, table
from slurm_train.rundir.ledger import Action
from slurm_train.tools.rehearsal.case import Course, SiteNotice, StartOfRun
from slurm_train.tools.rehearsal.folder import in_folders, is_checkpoint, renamed_folder, unfinished_in
from slurm_train.tools.rehearsal.marks import Mark, without_skipped
from slurm_train.tools.rehearsal.otherwise import other_names

MARKS_AFTER = 4
"""So many are wanted behind the place of the disturbance."""
_MOST_AFTER_SIGNAL = 8
"""A program that takes so many steps after a signal does not act upon it."""
_IGNORES = "it does not act upon the signal: where it is killed at the end of the notice, nothing is saved"
_NOISE_FACTOR = 3.0
"""Losses that differ by more than so many times what two undisturbed runs differ by are other losses."""
_OTHER_RANKS = 1e-3
"""Relative difference of losses on another number of ranks, which add up in another order."""
_LONGEST_QUOTE = 160
_CUT_FILE = re.compile(r"EOF|truncat|corrupt|zip archive|unpickl|PytorchStreamReader|invalid load key", re.IGNORECASE)
_CHECKPOINT = re.compile(r"checkpoint_\d{7,}\w*")
_EXISTS = re.compile(
    r"(?<!no )already (?:exists|present)|\bexists\b.*(?:specify|choose|use|remove|delete|overwrite)", re.IGNORECASE
)

LINES = "docs/own-training-program.md"
FOLDERS = "docs/session.md#folders-and-logs-of-the-program"
ORDER = "docs/session.md#the-order-of-samples"
SAMPLES = "docs/design.md#order-and-exactness"
RANDOM = "docs/session.md#random-numbers"
EXIT_0 = "docs/endings.md#exit-code-0-of-a-program"
OWN_RESUME = "docs/scripts.md#the-scripts-own-resume"
TROUBLE = "docs/troubleshooting.md"
_PAGE = "docs/rehearse.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Undisturbed:
    """What disturbed runs are compared with."""

    kind: object
    """Of the marks; None where nothing says how far the run is."""
    marks: tuple[Mark, ...]
    noise: float = 0.0
    """The largest difference of a loss between two undisturbed runs."""
    is_finished: bool = False
    """Whether it came to its own end."""
    has_joined: bool = False
    """Whether it reports to the session, as the trainer does."""
    is_shell: bool = False
    """Whether a shell is what the ranks run."""
    last_words: str = ""
    """Its last line."""
    first_mark_cpu_s: float | None = None
    """How long its ranks had computed at the first mark, None where that is not seen."""
    files: Mapping[str, tuple[int, int]]
    """At its end."""
    saved_at: int | None = None
    """Marks at its first save, None where none was seen."""
    notice: SiteNotice

    @property
    def middle(self) -> Mark:
        """Where a run is disturbed: in the middle, after a save if there is one, and with some marks behind it.

        Never at the first mark: a run that comes back there would look like one that begins anew.
        """
        wanted = max(len(self.marks) // 2, (self.saved_at or 0) + 1)
        return self.marks[max(1, min(wanted, len(self.marks) - 1 - MARKS_AFTER))]

    @property
    def total(self) -> int | None:
        """Steps of the whole training, where that is known."""
        return next((mark.total for mark in reversed(self.marks) if mark.total), None)


class ReturnOutcome(str, enum.Enum):
    """What a run came to after a disturbance."""

    CAME_BACK = "came_back"
    """It went on behind its first step, or had nothing left to do."""
    BEGAN_ANEW = "began_anew"
    ENDED_EARLY = "ended_early"
    """With 0, before its end."""
    FAILED_AGAIN = "failed_again"
    """Its second start took steps, and then failed."""
    NEVER_STARTED = "never_started"
    """Its second start took no step."""
    WENT_ON = "went_on"
    """It took no notice of the signal, and came to its end."""
    UNKNOWN = "unknown"
    """It was started again, and nothing says at which step it is."""
    REFUSED = "refused"
    """It says itself that it does not go on so, before anything is lost."""
    LEFT_OUT = "left_out"
    """It was not disturbed, or not started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of a run after a disturbance."""

    key: str
    label: str
    outcome: ReturnOutcome
    is_good: bool | None
    """None: it was left out, or says nothing."""
    came_back: str
    """The outcome in words."""
    repeated: int | None = None
    """Steps, as the marks count them, that were taken again."""
    left_out: int | None = None
    """Steps that were never taken."""
    losses: str = ""
    samples_equal: bool | None = None
    """Whether each step had the samples of the undisturbed run; None where no digests of them were seen."""
    ended_after_s: float | None = None
    """From the first signal to the end of the ranks."""
    facts: tuple[str, ...] = ()
    advice: str = ""
    see: str = ""
    seconds: float = 0.0


def left_out(key: str, label: str, why: str, *, seconds: float = 0.0) -> Row:
    """Returns the row of a disturbance that does not apply, or did not come to its end."""
    return Row(
        key=key,
        label=label,
        outcome=ReturnOutcome.LEFT_OUT,
        is_good=None,
        came_back=f"left out, {why}",
        seconds=seconds,
    )


def noise_of(course: Course, undisturbed: Undisturbed) -> tuple[float, str]:
    """Returns how far the losses of two undisturbed runs differ at most, and that in words."""
    marks = course.starts[0].of_kind(undisturbed.kind)
    difference = _compare(marks, undisturbed.marks)
    if difference is None:
        return 0.0, "no losses were seen"
    return difference.largest, f"losses {difference.words}"


@dataclass(frozen=True, slots=True)
class _Difference:
    largest: float
    relative: float
    words: str


def _compare(marks: Sequence[Mark], expected: Sequence[Mark]) -> _Difference | None:
    """Returns how the losses of marks differ from those expected at the same places; None where there are none."""
    losses = {mark.place: mark.loss for mark in expected if mark.loss is not None}
    pairs = [(mark, mark.loss, losses[mark.place]) for mark in marks if mark.loss is not None and mark.place in losses]
    if not pairs:
        return None
    others = [
        (mark, _distance(loss, loss_there))
        for mark, loss, loss_there in pairs
        if loss != loss_there and not (math.isnan(loss) and math.isnan(loss_there))
    ]
    if not others:
        return _Difference(0.0, 0.0, f"equal ({len(pairs)})")
    largest = max(distance for _, distance in others)
    scale = max(abs(loss) for loss in losses.values() if math.isfinite(loss)) or 1.0
    return _Difference(largest, largest / scale, f"differ from {others[0][0].words} on, by up to {largest:.2g}")


def _with_other_samples(marks: Sequence[Mark], expected: Sequence[Mark]) -> list[Mark] | None:
    """Returns the marks with other samples than those expected at the same places; None where no digests are."""
    digests = {mark.place: mark.samples_digest for mark in expected if mark.samples_digest is not None}
    compared = [mark for mark in marks if mark.samples_digest is not None and mark.place in digests]
    if not compared:
        return None
    return [mark for mark in compared if mark.samples_digest != digests[mark.place]]


def _distance(first: float, second: float) -> float:
    distance = abs(first - second)
    return math.inf if math.isnan(distance) else distance


def judge(course: Course, undisturbed: Undisturbed) -> Row:
    """Returns the row of a disturbed run."""
    row = _judge(course, undisturbed)
    ended_before = course.starts[0].ended_before
    if row.is_good is False and ended_before:
        row = replace(row, facts=(*row.facts, f"ended after the signal, before it: {shorten(ended_before, 3)}"))
    return row


_NewRow = Callable[..., Row]
"""`Row` with what every disturbed run has: its disturbance, how long it took to end, what else was seen."""


def _judge(course: Course, undisturbed: Undisturbed) -> Row:
    key, label = course.disturbance.key, course.disturbance.label
    seconds = round(course.seconds, 1)
    first = course.starts[0]
    if first.signalled_s is None:
        return left_out(key, label, _why_not_signalled(course, undisturbed), seconds=seconds)
    new_row = partial(
        Row,
        key=key,
        label=label,
        seconds=seconds,
        ended_after_s=None if first.ended_s is None else round(first.ended_s - first.signalled_s, 2),
        facts=_facts(course, undisturbed),
    )
    if first.is_finished:
        return _after_a_finish(new_row, first, undisturbed)
    second = course.starts[1] if len(course.starts) > 1 else None
    if second is None:
        return left_out(key, label, "the rehearsal was stopped", seconds=seconds)
    if undisturbed.kind is None:
        return _without_marks(new_row, first, second, undisturbed)
    return _judge_return(new_row, course, first, second, undisturbed)


def _why_not_signalled(course: Course, undisturbed: Undisturbed) -> str:
    first, disturbance = course.starts[0], course.disturbance
    if first.ended_s is None:
        marks = first.of_kind(undisturbed.kind)
        if disturbance.in_save and disturbance.place and marks and marks[-1].place >= disturbance.place:
            return f"it saved only once within {marks[-1].words}"
        if disturbance.place is None and marks:
            return "its start was over before the moment came"
        return "it was too slow to come to the moment"
    if first.exit_code == 0:
        return "it ended before the moment came"
    return f"it failed before the moment came: {_error(first)!r}"


def _after_a_finish(new_row: _NewRow, first: StartOfRun, undisturbed: Undisturbed) -> Row:
    """Returns the row of a run that has a result after the signal."""
    marks = first.of_kind(undisturbed.kind)
    last = marks[-1] if marks else None
    is_at_end = last is not None and (
        (undisturbed.is_finished and last.place >= undisturbed.marks[-1].place)
        or (undisturbed.total is not None and last.place[1] >= undisturbed.total)
    )
    if is_at_end or undisturbed.kind is None:
        return new_row(outcome=ReturnOutcome.WENT_ON, is_good=None, came_back="went on to its end before it was killed")
    num_after = len(_after_signal(first, marks))
    if num_after >= _MOST_AFTER_SIGNAL:
        came_back = f"took {count(num_after, 'step')} after the signal, to its end"
        return new_row(outcome=ReturnOutcome.WENT_ON, is_good=False, came_back=came_back, advice=_IGNORES, see=LINES)
    return _ended_early(new_row, last, undisturbed)


def _ended_early(new_row: _NewRow, last: Mark | None, undisturbed: Undisturbed) -> Row:
    return new_row(
        outcome=ReturnOutcome.ENDED_EARLY,
        is_good=False,
        came_back=f"ended with 0 at {_of_total(last, undisturbed)}",
        advice="an exit code of 0 says that the training is done: end with 75 after a stop, or let `run.leave()` do it",
        see=EXIT_0,
    )


def _of_total(mark: Mark | None, undisturbed: Undisturbed) -> str:
    words = "no step" if mark is None else mark.words
    total = undisturbed.total
    if mark is None or total is None or "/" in words:
        return words
    return f"{words} of {total}"


def _without_marks(new_row: _NewRow, first: StartOfRun, second: StartOfRun, undisturbed: Undisturbed) -> Row:
    if second.ended_s is not None and second.exit_code != 0:
        return _never_started(new_row, first, second, undisturbed)
    advice = (
        f"nothing in its log says how far it is, such as {undisturbed.last_words[:_LONGEST_QUOTE]!r}: name the form of "
        "its lines by --pattern 'step (?P<step>\\d+)', or wait longer for the first one: --seconds"
        if undisturbed.last_words
        else "it printed nothing: let it print its step and loss, or wait longer for a slow start: --seconds"
    )
    came_back = "started again; its log does not say at which step"
    return new_row(outcome=ReturnOutcome.UNKNOWN, is_good=False, came_back=came_back, advice=advice, see=_PAGE)


def _without_steps_again(
    new_row: _NewRow, course: Course, second: StartOfRun, last: Mark | None, undisturbed: Undisturbed
) -> Row:
    """Returns the row of a run whose second start took no step."""
    first = course.starts[0]
    has_done_all = undisturbed.is_finished and last is not None and last.place >= undisturbed.marks[-1].place
    if has_done_all and second.is_finished:
        return new_row(
            outcome=ReturnOutcome.CAME_BACK, is_good=True, came_back="had nothing left to do", repeated=0, left_out=0
        )
    if second.ended_s is None:
        return new_row(
            outcome=ReturnOutcome.NEVER_STARTED,
            is_good=False,
            came_back="never came to a step again",
            advice="it was given four times what the undisturbed run took, and a minute: it waits for what is "
            "not there, or this machine was busy with something else",
            see=TROUBLE,
        )
    if second.exit_code == 2 and course.disturbance.words_after:
        refusal = (second.traceback or second.last_words)[:_LONGEST_QUOTE]
        return new_row(outcome=ReturnOutcome.REFUSED, is_good=None, came_back=f"refused: {refusal}")
    return (
        _ended_early(new_row, last, undisturbed)
        if second.exit_code == 0
        else _never_started(new_row, first, second, undisturbed)
    )


def _judge_return(
    new_row: _NewRow, course: Course, first: StartOfRun, second: StartOfRun, undisturbed: Undisturbed
) -> Row:
    """Returns the row of a run that was started again."""
    kind = undisturbed.kind
    marks_before = first.of_kind(kind)
    marks_after = without_skipped(second.of_kind(kind), undisturbed.marks)
    last = marks_before[-1] if marks_before else None
    begin = undisturbed.marks[0]
    if not marks_after:
        return _without_steps_again(new_row, course, second, last, undisturbed)
    back = marks_after[0]
    repeated = 0 if last is None else sum(mark.place <= last.place for mark in marks_after[: _upto(marks_after, last)])
    skipped = [] if last is None else [mark for mark in undisturbed.marks if last.place < mark.place < back.place]
    if last is None:
        skipped = [mark for mark in undisturbed.marks if mark.place < back.place]
    # The newest of a bar may not have been drawn with its own loss yet.
    settled = marks_after if undisturbed.has_joined else marks_after[:-1]
    compared = [*_after_signal(first, marks_before), *settled]
    difference = _compare(compared, undisturbed.marks)
    with_others = _with_other_samples(compared, undisturbed.marks)
    row = new_row(
        outcome=ReturnOutcome.CAME_BACK,
        is_good=True,
        came_back=f"came back at {back.words}",
        repeated=repeated,
        left_out=len(skipped),
        losses="none seen" if difference is None else difference.words,
        samples_equal=None if with_others is None else not with_others,
    )
    if last is not None and back.place <= begin.place < last.place:
        repeated = max(repeated, _done(last, undisturbed))
        row = replace(row, outcome=ReturnOutcome.BEGAN_ANEW, came_back=f"began anew at {back.words}", repeated=repeated)
        return _began_anew(row, course, has_joined=undisturbed.has_joined)
    if skipped:
        return replace(
            row,
            is_good=False,
            advice=f"{count(len(skipped), 'step')} between its last and its next were never taken: it counts on from "
            "another number than it saved",
            see=LINES,
        )
    if _is_early(second, marks_after, undisturbed):
        return _ended_early(new_row, marks_after[-1], undisturbed)
    if second.ended_s is not None and second.exit_code != 0:
        came_back = f"failed again at {marks_after[-1].words}"
        return replace(
            _never_started(new_row, first, second, undisturbed), outcome=ReturnOutcome.FAILED_AGAIN, came_back=came_back
        )
    if with_others:
        return _with_changed_samples(row, with_others[0])
    if difference is not None and _are_others(
        difference, undisturbed, has_other_ranks=bool(course.disturbance.words_after)
    ):
        return _with_other_losses(row, second, undisturbed)
    return row


def _upto(marks: Sequence[Mark], last: Mark) -> int:
    """Returns how many marks come before the first beyond `last`."""
    return next((index for index, mark in enumerate(marks) if mark.place > last.place), len(marks))


def _done(last: Mark, undisturbed: Undisturbed) -> int:
    return sum(mark.place <= last.place for mark in undisturbed.marks)


def _after_signal(first: StartOfRun, marks: Sequence[Mark]) -> list[Mark]:
    return [mark for mark in marks if first.signalled_s is not None and mark.seen_s > first.signalled_s]


def _is_early(second: StartOfRun, marks: Sequence[Mark], undisturbed: Undisturbed) -> bool:
    """Returns whether a second start has ended with 0 before the place that the undisturbed run came to."""
    has_ended = second.ended_s is not None and second.exit_code == 0
    return has_ended and marks[-1].place < undisturbed.marks[-1].place


def _are_others(difference: _Difference, undisturbed: Undisturbed, *, has_other_ranks: bool) -> bool:
    if has_other_ranks and difference.relative <= _OTHER_RANKS:
        return False
    return difference.largest > _NOISE_FACTOR * undisturbed.noise


def _with_changed_samples(row: Row, first: Mark) -> Row:
    advice = (
        f"from {first.words} on its samples are others than those of the undisturbed run: their number, seed and "
        "batch.global_size have to stay the same"
    )
    return replace(row, is_good=False, advice=advice, see=SAMPLES)


def _with_other_losses(row: Row, second: StartOfRun, undisturbed: Undisturbed) -> Row:
    said = [line for line in second.remarks if re.search(r"\b(order|batch|random|state|sample|loader|episode)", line)]
    if said:
        return replace(
            row,
            is_good=False,
            advice=f"the log says: {_CHECKPOINT.sub('the checkpoint', said[0])[:_LONGEST_QUOTE]}",
            see=ORDER,
        )
    if undisturbed.has_joined:
        advice = "it goes on with other samples or random numbers: `run.batches` or `run.replay`, `run.restore_random`"
        return replace(row, is_good=False, advice=advice, see=ORDER)
    advice = "what it restores is not all: optimizer, schedule, order of samples, random numbers"
    return replace(row, is_good=False, advice=advice, see=LINES)


def _error(start: StartOfRun) -> str:
    return (start.traceback or start.last_words or f"exit code {start.exit_code}")[:_LONGEST_QUOTE]


def _never_started(new_row: _NewRow, first: StartOfRun, second: StartOfRun, undisturbed: Undisturbed) -> Row:
    error = _error(second)
    advice, see = _of_error(error, first, second, undisturbed)
    return new_row(
        outcome=ReturnOutcome.NEVER_STARTED, is_good=False, came_back="never started again", advice=advice, see=see
    )


def _of_error(error: str, first: StartOfRun, second: StartOfRun, undisturbed: Undisturbed) -> tuple[str, str]:
    """Returns what to change where a second start ends with an error, and the page that says how."""
    if _EXISTS.search(error):
        words = "it refuses the folder of its first start: name its own word for a resume, `own_resume.words`"
        return f"{error!r}: {words}", OWN_RESUME
    if second.beside_source:
        names = shorten(sorted(second.beside_source), 2)
        words = f"it writes beside its source ({names}): give it a folder below $SLURM_TRAIN_RUN_DIR"
        return f"{error!r}: {words}", FOLDERS
    unfinished = unfinished_in(second.traceback, first.files, undisturbed.files)
    if unfinished:
        words = f"it chooses {unfinished}, which was not written to its end"
        return f"{error!r}: {words}: choose the newest that is whole, or save by the session", LINES
    if _CUT_FILE.search(error):
        return f"{error!r}: it loads a file that was cut: write beside it and rename, or save by the session", LINES
    return f"its second start ends with {error!r}", TROUBLE


def _began_anew(row: Row, course: Course, *, has_joined: bool) -> Row:
    """Returns the row of a run that takes its first steps again, with what most probably keeps it from going on."""
    first, second = course.starts[:2]
    renamed = renamed_folder(first.written, second.written)
    saved = in_folders(filter(is_checkpoint, first.written))
    if renamed is not None:
        advice = f"each start writes into another {renamed}: name a folder below $SLURM_TRAIN_RUN_DIR"
        return replace(row, is_good=False, advice=advice, see=FOLDERS)
    if second.resumed_from:
        advice = (
            f"it loaded {Path(second.resumed_from).name} and counts from its first step again: its own resume restores "
            "no step, so add the session's lines"
        )
        return replace(row, is_good=False, advice=advice, see=LINES)
    if first.saved_steps:
        advice = (
            "checkpoints are there and were not loaded: call `training.resume()`, or `run.newest()`, before the loop"
        )
        return replace(row, is_good=False, advice=advice, see=LINES)
    if saved:
        wrote = f"it had written {shorten(saved, 2)} and did not load it"
        advice = f"{wrote}: name its own word for a resume, `own_resume.words`, or add the session's lines"
        return replace(row, is_good=False, advice=advice, see=OWN_RESUME)
    if first.killed_by_notice:
        return replace(row, is_good=False, advice=_IGNORES, see=LINES)
    if row.key in ("killed", "save") and has_joined:
        # It may save at every thousandth step, or only when it is asked to.
        fact = "it had not saved yet: more --steps, or saves more often, would tell (docs/rehearse.md)"
        return replace(row, is_good=None, facts=(*row.facts, fact))
    return replace(row, is_good=False, advice="it had saved nothing by then: add the session's lines", see=LINES)


def _facts(course: Course, undisturbed: Undisturbed) -> tuple[str, ...]:
    """Returns what else was seen of a disturbed run."""
    first = course.starts[0]
    facts = []
    is_asked = len(course.disturbance.signals) > 1
    if first.killed_by_notice:
        given_s = sum(signals.wait_s for signals in course.disturbance.signals)
        facts.append(f"did not end within {duration(given_s)}, and was killed")
    # It may have given its place to the program by `exec`. In an allocation its processes are not seen.
    is_shell = undisturbed.is_shell and (not first.processes or any(process.is_shell for process in first.processes))
    if is_shell and is_asked:
        facts.append("the signal reaches the shell alone, not the program that it has started: begin that with `exec`")
    end = first.end
    if end is not None and end.exit_code == 0 and end.action is not Action.FINISH and is_asked:
        marks = first.of_kind(undisturbed.kind)
        where = _of_total(marks[-1] if marks else None, undisturbed)
        facts.append(f"ended with 0 at {where}: this run is started again, plain Slurm would call the job COMPLETED")
    if first.outlived_by:
        facts.append(f"outlived by {shorten(first.outlived_by, 3)}")
    cut = [
        f"{name} ({size:,} of {undisturbed.files[name][0]:,} bytes)"
        for name, (size, _) in sorted(first.files.items())
        if is_checkpoint(name) and name in undisturbed.files and size < undisturbed.files[name][0] / 2
    ]
    if cut:
        facts.append(f"cut: {shorten(cut, 2)}")
    if course.disturbance.in_save and not first.was_in_save:
        facts.append("no save was under way")
    # Other words of this package give the ranks other variables.
    is_same_again = len(course.starts) > 1 and not course.disturbance.words_after
    others = other_names(first.processes, course.starts[1].processes) if is_same_again else []
    if others:
        facts.append(
            f"another value at its second start: {shorten(others, 4)}; $SLURM_TRAIN_RUN_DIR stays the same, to make "
            f"names and seeds from ({FOLDERS})"
        )
    return tuple(facts)


# --- the whole ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """All that a rehearsal has found out."""

    name: str
    place: str
    undisturbed: str
    """What the undisturbed run did, in a line."""
    noise: str
    rows: tuple[Row, ...]
    facts: tuple[str, ...] = ()
    """Of the undisturbed run: where it writes."""
    seconds: float

    @property
    def survives(self) -> bool:
        """Whether no row is bad, and it has come back from something."""
        verdicts = [row.is_good for row in self.rows]
        return False not in verdicts and True in verdicts

    @property
    def verdict(self) -> str:
        """For people, e.g. "train.py does not survive 2 of 3"."""
        num_bad = sum(row.is_good is False for row in self.rows)
        num_judged = sum(row.is_good is not None for row in self.rows)
        if num_judged == 0:
            return f"{self.name} was not judged"
        return f"{self.name} survives" if num_bad == 0 else f"{self.name} does not survive {num_bad} of {num_judged}"

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        return {"survives": self.survives, **asdict(self)}

    def text(self) -> str:
        """Returns the table, and below it one sentence for each row that is not good."""
        tried = [row for row in self.rows if row.outcome not in (ReturnOutcome.LEFT_OUT, ReturnOutcome.REFUSED)]
        lines = [table(HEADER, [cells_of(row) for row in tried])] if tried else []
        advice: dict[str, list[str]] = {}
        for row in self.rows:
            if row.is_good is False:
                advice.setdefault(f"{row.advice} ({row.see})", []).append(row.label)
        lines += [f"{', '.join(labels)}: {sentence}" for sentence, labels in advice.items()]
        facts: dict[str, list[str]] = {}
        for row in self.rows:
            for fact in row.facts:
                facts.setdefault(fact, []).append(row.label)
        lines += [f"note, {', '.join(labels)}: {fact}" for fact, labels in facts.items()]
        lines += [f"note: {fact}" for fact in self.facts]
        lines += [f"{row.came_back}: {row.label}" for row in self.rows if row not in tried]
        lines.append(f"{self.verdict}; two undisturbed runs: {self.noise}; took {duration(self.seconds)}")
        return "\n".join(lines)


HEADER = ("", "AFTER IT WAS", "IT", "REPEATED", "LEFT OUT", "LOSSES", "ENDED AFTER")


def cells_of(row: Row) -> tuple[str, ...]:
    """Returns what the table has of a row, a text for each name of `HEADER`."""
    sign = {True: "ok", False: "BAD", None: "-"}[row.is_good]
    repeated = "" if row.repeated is None else str(row.repeated)
    skipped = "" if row.left_out is None else str(row.left_out)
    ended = "" if row.ended_after_s is None else f"{number(row.ended_after_s)} s"
    return sign, row.label, row.came_back, repeated, skipped, row.losses, ended
