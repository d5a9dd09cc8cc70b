"""Which steps a run has taken, and their losses: from its reports, else from its log. Pure but for reading files."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from slurm_train.formatting import as_float, plain
from slurm_train.status.printed import read_line

REPORTS = "reports"
"""The kind of marks that come from `metrics.jsonl`; others are named after a form of lines."""
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|nan|inf)"
_LOSS = re.compile(
    rf"(?<![a-z])loss(?:_step|_[dg]| \(batch\))?['\"]?\s*(?:[:=|]|is)?\s*['\"]?({_NUMBER})(?![\w/])", re.IGNORECASE
)
_LOSS_OF_TABLE = re.compile(r"\|\s*loss\s*\|")
_OWN = "pattern"
NOTES = ("slurm_train: ", "error: ", "hint: ", "  run ", "  ranks ", "  warning ")
"""How lines of this package begin, which are in the same file."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of a training by its own word: a step, or a place within an epoch."""

    place: tuple[float, float]
    """Epoch and step; grows during a training. Without an epoch it is (0, step)."""
    words: str
    """For people, e.g. "step 12", "epoch 3, 40/100"."""
    loss: float | None
    seen_s: float = field(compare=False, default=0.0)
    """When it was read, by the monotonic clock."""
    total: int | None = None
    """Steps of the whole training, where the line says so."""
    epoch: float = 0.0
    """By the line, or by the report; 0 where neither has one."""
    samples_digest: int | None = None
    """Of all samples of the step, whatever their order, by the report; None where it has none."""


class MarkReader:
    """Reads the marks of one start of a run as they come.

    Args:
        log: what rank 0 prints.
        pattern: the person's own, with the group `step` and perhaps `loss` and `epoch`; None: the common forms.
    """

    def __init__(self, log: Path, pattern: re.Pattern[str] | None = None) -> None:
        self.log = log
        self.by_kind: dict[object, list[Mark]] = defaultdict(list)
        self._pattern = pattern
        self._offsets: dict[Path, int] = {}
        self._newest: object = None
        """The kind of the newest mark of the log."""
        self._epoch = 0.0
        """The newest that stood on a line without a count, as Keras prints it."""

    def read(self, metrics: Path | None, *, attempt: int) -> None:
        """Reads what is new.

        Args:
            metrics: the run's `metrics.jsonl`, None as long as it is not known.
            attempt: the attempt of this start; reports of others are left out.
        """
        now_s = time.monotonic()
        for line in self._new_lines(self.log):
            self._take_line(line, now_s)
        for line in self._new_lines(metrics) if metrics is not None else []:
            self._take_report(line, attempt, now_s)

    def of_kind(self, kind: object) -> list[Mark]:
        """Returns the marks of one kind, each place once, in their order."""
        return list(self.by_kind.get(kind, []))

    def _new_lines(self, path: Path) -> list[str]:
        try:
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                new = file.read()
        except OSError:
            return []
        # A bar of tqdm ends with a carriage return, or begins with one: then its newest line comes with the next.
        end = max(new.rfind(b"\n"), new.rfind(b"\r")) + 1
        self._offsets[path] = self._offsets.get(path, 0) + end
        return plain(new[:end].decode(errors="replace")).splitlines()

    def _take_line(self, line: str, now_s: float) -> None:
        if line.startswith(NOTES):
            return
        match = _LOSS.search(line)
        loss = float(match[1]) if match else None
        if self._pattern is not None:
            own = self._pattern.search(line)
            if own is not None:
                groups = own.groupdict()
                step = float(groups["step"])
                loss = float(groups["loss"]) if groups.get("loss") else loss
                epoch = float(groups.get("epoch") or 0)
                self._add(_OWN, Mark((epoch, step), f"step {step:g}", loss, now_s, epoch=epoch))
            return
        found = read_line(line)
        if found is None:
            if loss is not None and _LOSS_OF_TABLE.match(line):
                self._take_loss_of_table(loss)
            return
        name, letters, totals = found.kind
        printed = found.printed
        if printed.epoch is not None and printed.step is None and printed.within is None:
            self._epoch = printed.epoch
        elif printed.epoch is None and printed.within is not None and self._epoch:
            printed = replace(printed, epoch=self._epoch)
        epoch, step = printed.place
        words = printed.words.partition("/")[0] if printed.epoch is None else printed.words
        words = f"step {words}" if printed.epoch is None and printed.step is not None else words
        # The letters of a bar change with its speed: s/it, it/s.
        kind = (name, "" if found.is_certain else letters, totals)
        self._add(kind, Mark((epoch, float(step)), words, loss, now_s, printed.max_steps, epoch))
        self._newest = kind

    def _take_loss_of_table(self, loss: float) -> None:
        """Gives a loss to the newest mark: tables as those of Stable-Baselines3 have the two on different lines."""
        marks = self.by_kind.get(self._newest)
        if marks and marks[-1].loss is None:
            marks[-1] = replace(marks[-1], loss=loss)

    def _take_report(self, line: str, attempt: int, now_s: float) -> None:
        try:
            report = json.loads(line)
        except ValueError:
            return
        step = report.get("step")
        if not isinstance(step, int) or report.get("attempt") != attempt or "eval_loss" in report:
            return
        loss = as_float(report.get("loss"))
        epoch = as_float(report.get("epoch")) or 0.0
        total = report.get("max_steps")
        digest = report.get("samples_digest")
        self._add(REPORTS, Mark((0.0, float(step)), f"step {step}", loss, now_s, total, epoch, digest))

    def _add(self, kind: object, mark: Mark) -> None:
        marks = self.by_kind[kind]
        if marks and marks[-1].place == mark.place:
            # A bar moves first, with the loss of the step before, and is drawn again with its own.
            if mark.loss is not None:
                marks[-1] = replace(mark, seen_s=marks[-1].seen_s)
            return
        # A bar is drawn before its first step.
        if not (isinstance(kind, tuple) and kind[0] == "tqdm" and mark.place[1] == 0):
            marks.append(mark)


def choose_kind(by_kind: Mapping[object, Sequence[Mark]]) -> object | None:
    """Returns which marks of an undisturbed run are compared; None where nothing says how far it is.

    Reports have priority; then what only grows, has losses, and comes most often.
    """
    if len(by_kind.get(REPORTS, ())) >= 2:
        return REPORTS
    kinds = [kind for kind, marks in by_kind.items() if len(marks) >= 2 and only_grows(marks)]
    if not kinds:
        return None

    def worth(kind: object) -> tuple[bool, int]:
        marks = by_kind[kind]
        return sum(mark.loss is not None for mark in marks) > len(marks) // 2, len(marks)

    return max(kinds, key=worth)


def without_skipped(marks: Sequence[Mark], expected: Sequence[Mark]) -> list[Mark]:
    """Returns marks without those in front that have no loss where others have one: batches that a resume skips.

    Args:
        marks: of one start.
        expected: of an undisturbed run.
    """
    with_loss = {mark.place for mark in expected if mark.loss is not None}
    begin = next(
        (i for i, mark in enumerate(marks) if mark.loss is not None or mark.place not in with_loss), len(marks)
    )
    return list(marks[begin:])


def only_grows(marks: Sequence[Mark]) -> bool:
    """Returns whether no mark is behind the one before."""
    return all(earlier.place < later.place for earlier, later in pairwise(marks))
