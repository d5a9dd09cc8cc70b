"""A whole rehearsal: the undisturbed run, the moments that follow from it, the disturbed runs, the rows."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from slurm_train.errors import RunError
from slurm_train.formatting import count, duration, shorten
from slurm_train.tools.rehearsal.case import (
    KILLED,
    Course,
    Disturbance,
    RehearsalSetting,
    SignalsAfter,
    SiteNotice,
    StartOfRun,
    play,
    preemption,
    time_limit,
)
from slurm_train.tools.rehearsal.folder import files_in, in_folders, is_checkpoint
from slurm_train.tools.rehearsal.marks import REPORTS, Mark, MarkReader, choose_kind, without_skipped
from slurm_train.tools.rehearsal.verdict import MARKS_AFTER, Rehearsal, Row, Undisturbed, judge, left_out, noise_of

_LEAST_S = 3.0
"""An undisturbed run is watched so long from its first mark on, however fast its steps are."""
_FIRST_SAVE = 5
"""Step at which the undisturbed run of a program that asks `is_due` saves."""
_SLOW_START = 3
"""The first mark is waited for so many times as long as the undisturbed run may take from there on."""
_BLIND_S = 12.0
"""When a run that says nothing of its steps is disturbed, at the latest."""
_MARGIN = 4.0
_SHARE_OF_START = 0.6
"""Of its way to the first mark, when a run is stopped in its start."""
_LONGER_TO_SAVE = 3
"""A run that is to be killed in a save may take so many times as many steps as the undisturbed one."""
_OF_JOB = "it has the variables of a job, which are not all of the shell's (cluster.export=[NAME])"
LABELS = {
    "again": "not disturbed, once more",
    "preempted": "preempted",
    "time_limit": "at its time limit",
    "killed": "killed",
    "start": "stopped in its start",
    "save": "killed in a save",
    "epoch": "stopped at an epoch's end",
    "ranks": "preempted, other ranks",
}
"""The disturbances by their keys, in the order of the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What is rehearsed, and how long."""

    name: str
    num_steps: int
    """Marks of the undisturbed run."""
    longest_s: float
    """How long the undisturbed run may take from its first mark on."""
    notice: SiteNotice
    num_parallel: int
    is_shell: bool
    other_ranks: tuple[str, ...] | str
    """Words for another number of ranks, or why there are none."""
    not_copied: Sequence[str] = ()
    """What the program looks for beside its source, and what a run does not copy."""
    only: Collection[str] = ()
    """Keys of the disturbances that are tried; none: all."""


def rehearse(setting: RehearsalSetting, scope: Scope, *, say: Callable[[str], None]) -> Rehearsal:
    """Runs a whole rehearsal, and returns what it has found out.

    Args:
        setting: what all its runs share.
        scope: what is rehearsed.
        say: prints a line for the person.

    Raises:
        RunError: the undisturbed run failed, or its folder cannot be copied.
    """
    began_s = time.monotonic()
    course, undisturbed = _undisturbed(setting, scope)
    start = course.starts[0]
    marks = undisturbed.marks
    start_s = (marks[0].seen_s - start.started_s) if marks else course.seconds / 2
    disturbances, rows = _disturbances(scope, undisturbed, start_s=start_s)
    described = _describe(undisturbed, start_s=start_s, seconds=course.seconds)
    say(f"undisturbed: {described}")
    each_s = 2 * start_s + (marks[-1].seen_s - marks[0].seen_s if marks else 2 * _BLIND_S) + _MARGIN
    num_rounds = -(-len(disturbances) // scope.num_parallel)
    say(f"now {count(len(disturbances), 'run')}, {scope.num_parallel} at a time: about {duration(num_rounds * each_s)}")
    courses = _play_all(setting, scope, undisturbed, disturbances, start_s=start_s, say=say)
    noise = "not compared"
    if "again" in courses:
        noise_value, noise = noise_of(courses["again"], undisturbed)
        undisturbed = replace(undisturbed, noise=noise_value)
    judged = {key: judge(course, undisturbed) for key, course in courses.items() if key != "again"}
    by_key = {**{row.key: row for row in rows}, **judged}
    return Rehearsal(
        name=scope.name,
        place=str(setting.place),
        undisturbed=described,
        noise=noise,
        rows=tuple(by_key[key] for key in LABELS if key in by_key),
        facts=_facts(start),
        seconds=round(time.monotonic() - began_s, 1),
    )


# --- the undisturbed run ---


def _undisturbed(setting: RehearsalSetting, scope: Scope) -> tuple[Course, Undisturbed]:
    watch = _Watch(setting, scope)
    words = [f"checkpoint.every_steps={_FIRST_SAVE}"]
    disturbance = Disturbance(key="undisturbed", label="undisturbed")
    course = play(setting, disturbance, enough=watch, words=words)
    start = course.starts[0]
    kind = choose_kind(start.marks)
    has_failed = start.ended_s is not None and start.exit_code != 0
    if has_failed:
        error = start.traceback or start.last_words or next(iter(start.remarks), "")
        not_copied = [start.not_copied] if start.not_copied else scope.not_copied
        beside = (
            f"{shorten(not_copied, 3)}: not in the run's copy of the code, where `__file__` is: give the program an "
            "absolute path, or one relative to its folder; "
        )
        raise RunError(
            f"the undisturbed run failed with exit code {start.exit_code}: {error}",
            hint=f"{beside if not_copied else ''}its output is in {setting.place / 'undisturbed' / 'start_0.log'}; "
            + ("of this shell's variables it gets all but secrets" if setting.job_id is None else _OF_JOB),
        )
    undisturbed = Undisturbed(
        kind=kind,
        marks=tuple(start.of_kind(kind)),
        is_finished=start.is_finished,
        has_joined=kind == REPORTS,
        is_shell=scope.is_shell,
        last_words=start.last_words,
        first_mark_cpu_s=start.first_mark_cpu_s,
        files=start.files,
        saved_at=0 if watch.saved_at is None and _has_saved(start) else watch.saved_at,
        notice=scope.notice,
    )
    return course, undisturbed


def _has_saved(start: StartOfRun) -> bool:
    return bool(start.saved_steps) or any(map(is_checkpoint, start.written))


class _Watch:
    """Says when the undisturbed run has been watched for long enough; knows when it first wrote a checkpoint."""

    def __init__(self, setting: RehearsalSetting, scope: Scope) -> None:
        self._folder = setting.place / "undisturbed"
        self._scope = scope
        self._before: set[str] | None = None
        self._looked_s = 0.0
        self.saved_at: int | None = None

    def __call__(self, reader: MarkReader, seconds: float) -> bool:
        kind = choose_kind(reader.by_kind)
        if kind is None:
            # One that shows a single mark is watched for longer.
            return seconds > _SLOW_START * self._scope.longest_s * (2 if reader.by_kind else 1)
        marks = reader.by_kind[kind]
        since_first_s = time.monotonic() - marks[0].seen_s
        self._look(len(marks))
        num_wanted = self._scope.num_steps
        if self.saved_at is not None:
            num_wanted = max(num_wanted, self.saved_at + 2 + MARKS_AFTER)
        return since_first_s > self._scope.longest_s or (len(marks) >= num_wanted and since_first_s > _LEAST_S)

    def _look(self, num_marks: int) -> None:
        if self.saved_at is not None or time.monotonic() < self._looked_s + 0.5:
            return
        self._looked_s = time.monotonic()
        files = {name for name in files_in(self._folder) if is_checkpoint(name) and "/code/" not in name}
        if self._before is None:
            self._before = files
        elif files - self._before:
            self.saved_at = num_marks


def _describe(undisturbed: Undisturbed, *, start_s: float, seconds: float) -> str:
    marks = undisturbed.marks
    if not marks:
        return f"nothing in its log says how far it is, within {duration(seconds)} (--seconds)"
    by = "by its reports" if undisturbed.has_joined else "by its log"
    took_s = marks[-1].seen_s - marks[0].seen_s
    end = ", its end" if undisturbed.is_finished else ""
    first = f"{marks[0].words} after {duration(start_s)}"
    return f"{first}, {marks[-1].words} {duration(took_s)} later{end}; {count(len(marks), 'mark')} {by}"


def _facts(start: StartOfRun) -> tuple[str, ...]:
    facts = []
    if start.beside_source:
        names = shorten(sorted(start.beside_source), 2)
        facts.append(f"it writes beside its source, in the run's copy of the code: {names}")
    written = in_folders(filter(is_checkpoint, start.written))
    if written:
        facts.append(f"checkpoints that it writes itself: {shorten(written, 3)}")
    return tuple(facts)


# --- the disturbances ---


def _disturbances(scope: Scope, undisturbed: Undisturbed, *, start_s: float) -> tuple[list[Disturbance], list[Row]]:
    """Returns those that apply, and the rows of those that do not."""
    marks = undisturbed.marks
    soft = preemption(scope.notice)
    if not marks:
        blind_s = min(start_s, _BLIND_S)
        found = [
            Disturbance(key="preempted", label=LABELS["preempted"], signals=soft, after_s=blind_s),
            Disturbance(key="killed", label=LABELS["killed"], signals=KILLED, after_s=blind_s),
        ]
        return _only(found, scope), []
    middle = undisturbed.middle
    at = f" at {middle.words}"
    found = [
        Disturbance(key="again", label=LABELS["again"]),
        Disturbance(key="preempted", label=LABELS["preempted"] + at, signals=soft, place=middle.place),
        Disturbance(
            key="time_limit",
            label=LABELS["time_limit"],
            signals=time_limit(scope.notice),
            place=middle.place,
        ),
        Disturbance(key="killed", label=LABELS["killed"] + at, signals=KILLED, place=middle.place),
        _in_start(undisturbed, soft, start_s=start_s),
    ]
    rows = []
    after_save = _after_first_save(undisturbed)
    if after_save is not None:
        found.append(
            Disturbance(key="save", label=LABELS["save"], signals=KILLED, place=after_save.place, in_save=True)
        )
    else:
        rows.append(left_out("save", LABELS["save"], f"it saved nothing within {marks[-1].words}"))
    last_of_epoch = last_mark_of_epoch(marks)
    if last_of_epoch is not None:
        found.append(Disturbance(key="epoch", label=LABELS["epoch"], signals=soft, place=last_of_epoch.place))
    else:
        rows.append(left_out("epoch", LABELS["epoch"], f"no epoch was seen to end within {marks[-1].words}"))
    if isinstance(scope.other_ranks, str):
        rows.append(left_out("ranks", LABELS["ranks"], scope.other_ranks))
    else:
        found.append(
            Disturbance(
                key="ranks",
                label=LABELS["ranks"],
                signals=soft,
                place=middle.place,
                words_after=scope.other_ranks,
            )
        )
    return _only(found, scope), [row for row in rows if not scope.only or row.key in scope.only]


def _in_start(undisturbed: Undisturbed, signals: tuple[SignalsAfter, ...], *, start_s: float) -> Disturbance:
    """Returns what stops a run before its first mark.

    The first start reads libraries from the disk, the next ones from memory, so its seconds say little of theirs.
    """
    cpu_s = undisturbed.first_mark_cpu_s
    return Disturbance(
        key="start",
        label=LABELS["start"],
        signals=signals,
        after_s=_SHARE_OF_START * start_s if cpu_s is None else None,
        after_cpu_s=None if cpu_s is None else _SHARE_OF_START * cpu_s,
    )


def _after_first_save(undisturbed: Undisturbed) -> Mark | None:
    """Returns a mark between the first save and the second one, None where no second save is to be expected."""
    marks = undisturbed.marks
    if undisturbed.saved_at is None:
        return None
    if undisturbed.has_joined:
        return next((mark for mark in marks if mark.place[1] > _save_every(undisturbed)), None)
    return marks[undisturbed.saved_at + 1] if undisturbed.saved_at + 1 < len(marks) else None


def _only(found: Sequence[Disturbance], scope: Scope) -> list[Disturbance]:
    return [one for one in found if not scope.only or one.key in scope.only]


def last_mark_of_epoch(marks: Sequence[Mark]) -> Mark | None:
    """Returns the last mark of the first epoch that has several and is seen to end, None for none."""
    # Where epochs have fractions, as with transformers, 1.0 is the end of the first.
    epochs = [math.ceil(mark.epoch) for mark in marks]
    for before, epoch, after, mark in zip(epochs, epochs[1:], epochs[2:], marks[1:], strict=False):
        if before == epoch < after:
            return mark
    return None


# --- the disturbed runs ---


def _play_all(
    setting: RehearsalSetting,
    scope: Scope,
    undisturbed: Undisturbed,
    disturbances: Sequence[Disturbance],
    *,
    start_s: float,
    say: Callable[[str], None],
) -> dict[str, Course]:
    """Runs the disturbed cases, some at a time; returns their courses by key."""
    marks = undisturbed.marks
    took_s = marks[-1].seen_s - marks[0].seen_s if marks else _BLIND_S
    # Others of this machine may slow it down; a case that began anew is ended sooner.
    longest_s = _MARGIN * (start_s + took_s) + 60.0
    kind = undisturbed.kind

    def has_done_enough(reader: MarkReader, seconds: float, *, of: Disturbance, is_again: bool) -> bool:
        seen = reader.by_kind.get(kind, [])
        if kind is None:
            # The first start ends by its signals, whose moment is a time.
            return is_again and seconds > 2 * _BLIND_S
        taken = without_skipped(seen, marks)
        if is_again and of.place is not None and len(taken) > MARKS_AFTER and taken[0].place <= marks[0].place:
            # It has begun anew, and what it does then is known.
            return True
        if seconds > longest_s:
            return True
        if undisturbed.is_finished:
            return False
        if of.in_save and not is_again:
            # The undisturbed run was not watched to its second save.
            return len(seen) > _LONGER_TO_SAVE * len(marks)
        return bool(seen and seen[-1].place >= marks[-1].place)

    words = [f"checkpoint.every_steps={_save_every(undisturbed)}"]
    lock = threading.Lock()

    def play_one(disturbance: Disturbance) -> Course:
        course = play(
            setting,
            disturbance,
            kind=kind,
            enough=partial(has_done_enough, of=disturbance, is_again=False),
            enough_after=partial(has_done_enough, of=disturbance, is_again=True),
            words=words,
            start_timeout_s=longest_s,
        )
        with lock:
            say(f"  {disturbance.label}: {duration(course.seconds)}")
        return course

    with ThreadPoolExecutor(scope.num_parallel) as pool:
        futures = {disturbance.key: pool.submit(play_one, disturbance) for disturbance in disturbances}
        try:
            return {key: future.result() for key, future in futures.items()}
        except BaseException:
            setting.must_stop.set()
            raise


def _save_every(undisturbed: Undisturbed) -> int:
    """Returns how often a program that asks `is_due` saves, so that one save comes before the middle."""
    if not undisturbed.has_joined:
        return _FIRST_SAVE
    return max(1, round(0.6 * undisturbed.middle.place[1]))


def place_of(root: Path, name: str, digest: str) -> Path:
    """Returns the folder of a rehearsal below a root of runs."""
    return root / "rehearsals" / f"{name}-{digest}"
