"""metrics.jsonl: one JSON object per logged step, appended by rank 0, readable at any moment.

Floats are written in full precision, so two runs can be compared bit for bit. Nothing is ever rewritten: after a
resume the newer attempt's lines supersede the older ones, and `read_metrics` returns those that count. No torch here.

Whoever reads the metrics of a run also gets what evaluators have measured of its checkpoints (`evaluate --follow`,
`rundir.scores`): `read_metrics` and `read_series` are the one place where these numbers come together. At a step that
the training has evaluated itself, its own number counts.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from slurm_train.formatting import clock as countdown
from slurm_train.rundir.files import open_file, read_lines, to_json, write_all
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.scores import Score, scores_that_count

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class MetricsWriter:
    """Appends lines to metrics.jsonl; one `write` call each, so a line is whole or absent.

    Args:
        path: the file; made if absent.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        size = os.fstat(self._descriptor).st_size
        # A killed writer has left its last line half.
        self._is_torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"

    def write(self, values: Mapping[str, Any]) -> None:
        """Appends one line; keys keep their order, and a number that is not finite is null.

        A line that a full disk has cut off takes no other with it.
        """
        line = to_json(values, separators=(", ", ": ")) + "\n"
        data = (f"\n{line}" if self._is_torn else line).encode()
        self._is_torn = True
        write_all(self._descriptor, data)
        self._is_torn = False

    def close(self) -> None:
        """Makes the lines durable and closes the file."""
        os.fsync(self._descriptor)
        os.close(self._descriptor)


class LineHead(NamedTuple):
    """The part of a line of metrics that decides whether it counts."""

    attempt: int
    step: int
    trains: bool
    """Whether it is the line of a step, not of an evaluation."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the lines that count, in step order: a newer attempt supersedes older ones from its first step on.

    Args:
        path: the metrics.jsonl of a run; an absent one has no lines.
    """
    lines = list(metric_lines(path))
    heads = [head_of(line) for line in lines]
    counted = [lines[position] for position in counting(heads)]
    scores = scores_that_count(RunDirectory(path.parent))
    if not scores:
        return counted
    has = {(line["step"], key) for line in counted for key in line if key.startswith("eval_")}
    steps = [line["step"] for line in counted]
    attempts = [line["attempt"] for line in counted]
    # The order of lines of one step stays, and scores come after them.
    lines = [*counted, *_score_lines(scores, has=has, steps=steps, attempts=attempts)]
    return sorted(lines, key=lambda line: line["step"])


def _score_lines(
    scores: Iterable[Score], *, has: Collection[tuple[int, str]], steps: Sequence[float], attempts: Sequence[float]
) -> list[dict[str, Any]]:
    """Returns scores of a run's checkpoints as lines.

    Args:
        scores: by step.
        has: steps at which the training has a measure itself.
        steps: of the lines that count.
        attempts: of the same lines; a score is put into the attempt that stands at its step.
    """
    lines = []
    for score in scores:
        values = {
            key: value for key, value in score.values.items() if value is not None and (score.step, key) not in has
        }
        place = bisect_right(steps, score.step)
        attempt = int(attempts[place - 1]) if place else score.attempt
        if values:
            lines.append({"step": score.step, "attempt": attempt, **values, "time_unix_s": score.time_unix_s})
    return lines


def metric_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields all lines of a metrics.jsonl as they were written, superseded ones included."""
    return (line for line in read_lines(path) if type(line.get("step")) is int and type(line.get("attempt")) is int)


def head_of(line: Mapping[str, Any]) -> LineHead:
    """Returns the part of a line that decides whether it counts."""
    return LineHead(line["attempt"], line["step"], "loss" in line)


def counting(heads: Sequence[LineHead]) -> list[int]:
    """Returns the positions of the lines that count, in step order.

    Args:
        heads: of all lines, as they were written.
    """
    positions: dict[int, list[int]] = {}
    for position, head in enumerate(heads):
        positions.setdefault(head.attempt, []).append(position)
    kept: list[int] = []
    # The first step that newer attempts have trained, and the first one that they have evaluated.
    first_trained: float = math.inf
    first_evaluated: float = math.inf
    for attempt in sorted(positions, reverse=True):
        of_attempt = _newest_of(positions[attempt], heads)
        counted = []
        for position in of_attempt:
            head = heads[position]
            # An attempt may begin by evaluating the step that it resumed from again; the line of the step itself stays.
            limit = first_trained if head.trains else min(first_trained, first_evaluated)
            if head.step < limit:
                counted.append(position)
        kept = sorted(counted, key=lambda position: heads[position].step) + kept
        for position in of_attempt:
            head = heads[position]
            if head.trains:
                first_trained = min(first_trained, head.step)
            else:
                first_evaluated = min(first_evaluated, head.step)
    return kept


def _newest_of(positions: Iterable[int], heads: Sequence[LineHead]) -> list[int]:
    """Returns an attempt's lines without those of steps that it went back behind (a rollback)."""
    kept: list[int] = []
    for position in positions:
        if heads[position].trains:
            while kept and heads[kept[-1]].step >= heads[position].step:
                kept.pop()
        kept.append(position)
    return kept


def last_numbers(path: Path) -> dict[str, float | None]:
    """Returns the newest step, its loss and the newest evaluation in a metrics.jsonl; {} where it has no lines.

    An evaluation that was not finite in the end is None: a run that has diverged has no value from before that.
    """
    series = read_series(path)
    values = {key: series.last(key) for key in ("step", "loss", *series.evaluations)}
    numbers: dict[str, float | None] = {key: value for key, value in values.items() if value is not None}
    if "step" in numbers:
        numbers["step"] = int(values["step"] or 0)
    return numbers | dict.fromkeys(series.not_finite)


# Words in the names of measures of which more is better, e.g. "eval_acc", "eval_rouge1", "val/AR@100".
_LARGEST_IS_BEST = re.compile(
    r"(?<!in)accuracy|mfu|_per_s|reward|precision|recall"
    r"|(?<![a-z])(?:acc|ap|ar|auc|auprc|auroc|bleu|chrf|dice|exact_match|f[12]|fbeta|hits?|iou|kappa|map|mcc|meteor|miou"
    r"|mrr|ndcg|pass|pearson|psnr|r2|rouge|rouge_?l|rouge_?lsum|spearman|ssim|success|top|win_rate)(?![a-z])",
    re.IGNORECASE,
)
# Of these less is better, also beside a word from above: "eval_dice_loss", "eval_brier_score", "eval_top1_error".
_SMALLEST_IS_BEST = re.compile(
    r"loss|error|perplexity|(?<![a-z])(?:err|nll|ppl|bits_per_\w+|bp[bcd]|mse|r?msle|rmse|n?mae|s?mape|mpjpe|ade|fde"
    r"|[wc]er|eer|fid|kid|lpips|fpr|fnr|ece|brier|crps|davies_bouldin|cross_entropy|chamfer|hausdorff|latency)(?![a-z])",
    re.IGNORECASE,
)
# With these the name alone does not say it: scikit-learn's "neg_log_loss", "1_minus_ssim", "accuracy_gap", "auc_std".
_TURNS_ROUND = re.compile(
    r"(?<![a-z])(?:neg|negative|minus|inv|inverse|not|non|drop|gap|delta|diff|difference|std|stddev|stderr|var|variance|reduction"
    r"|increase|decrease|improvement)(?![a-z])",
    re.IGNORECASE,
)
# "recall_at_fpr_5" and "precision@recall" are a recall and a precision.
_AT = re.compile(r"@|_at_", re.IGNORECASE)

Column = array  # of "d"; NaN where a line has no such number
_CHUNK = 4096
# Not finite for anybody who wants to look at it; sums of such values would not be either. NaN is not below it.
_HUGE = 1e100


@dataclass(frozen=True, slots=True)
class Series:
    """The lines of a run that count, in step order, by column."""

    columns: Mapping[str, Column[float]]
    num_superseded: int = 0
    """Lines that a newer attempt, or a rollback, has made void."""
    not_finite: tuple[str, ...] = ()
    """Names of what was evaluated and was not finite the last time."""

    def points(self, key: str) -> tuple[Column[float], Column[float]]:
        """Returns the steps and the values of a key, without the lines that lack one of them."""
        pairs = zip(self.columns["step"], self.columns[key], strict=True) if key in self.columns else ()
        finite = [pair for pair in pairs if abs(pair[0]) < _HUGE and abs(pair[1]) < _HUGE]
        return array("d", (x for x, _ in finite)), array("d", (y for _, y in finite))

    def last(self, key: str) -> float | None:
        """Returns the newest value of a key, None where there is none."""
        values = self.columns.get(key, array("d"))
        return next((value for value in reversed(values) if math.isfinite(value)), None)

    @property
    def evaluations(self) -> list[str]:
        """Names of what was evaluated, e.g. ["eval_loss", "eval_accuracy"]."""
        return [key for key in self.columns if key.startswith("eval_")]


def read_series(path: Path) -> Series:
    """Returns what `read_metrics` gives, as columns.

    Args:
        path: a metrics.jsonl; an absent one has no lines.
    """
    heads: list[LineHead] = []
    columns: dict[str, Column[float]] = {}
    newest: dict[str, Any] = {}
    lines = metric_lines(path)
    while chunk := list(islice(lines, _CHUNK)):
        for line in chunk:
            newest |= line
        for key in dict.fromkeys(chain(columns, *chunk)):
            # A column that is new starts with what the lines before it lack.
            column = columns.setdefault(key, array("d", [math.nan]) * len(heads))
            column.extend(_number(line.get(key)) for line in chunk)
        heads += map(head_of, chunk)
    positions = counting(heads)
    counted = {key: array("d", [column[place] for place in positions]) for key, column in columns.items()}
    _add_scores(counted, path)
    with_numbers = {key: column for key, column in counted.items() if not all(map(math.isnan, column))}
    evaluated = {key: _number(value) for key, value in newest.items() if key.startswith("eval_")}
    not_finite = tuple(key for key, value in evaluated.items() if not math.isfinite(value))
    return Series(with_numbers, num_superseded=len(heads) - len(positions), not_finite=not_finite)


def _add_scores(columns: dict[str, Column[float]], path: Path) -> None:
    """Puts the scores of a run's checkpoints into the columns of its lines."""
    valid_scores = scores_that_count(RunDirectory(path.parent))
    if not valid_scores:
        return
    steps = columns.get("step", array("d"))
    evaluated = {key: column for key, column in columns.items() if key.startswith("eval_")}
    has = {
        (int(step), key)
        for key, column in evaluated.items()
        for step, value in zip(steps, column, strict=True)
        if not math.isnan(value)
    }
    scores = _score_lines(valid_scores, has=has, steps=steps, attempts=columns.get("attempt", array("d")))
    num_lines = len(steps)
    all_steps = [*steps, *(score["step"] for score in scores)]
    # The order of lines of one step stays, and scores come after them.
    order = sorted(range(len(all_steps)), key=all_steps.__getitem__)
    for key in dict.fromkeys(chain(columns, *scores)):
        column = columns.get(key, array("d", [math.nan]) * num_lines)
        column.extend(_number(score.get(key)) for score in scores)
        columns[key] = array("d", [column[place] for place in order])


def _number(value: Any) -> float:
    # A comparison of types: true and false are numbers to isinstance.
    kind = type(value)
    return value if kind is float or kind is int else math.nan


def direction_of(name: str) -> str:
    """Returns "max" for a measure of which more is better, "min" for one of which less is, "" if its name says neither.

    Args:
        name: e.g. "eval_accuracy", "eval_loss", "eval_energy".
    """
    head = _AT.split(name, maxsplit=1)[0]
    if _TURNS_ROUND.search(head):
        return ""
    if _SMALLEST_IS_BEST.search(head):
        return "min"
    return "max" if _LARGEST_IS_BEST.search(head) else ""


def largest_is_best(name: str) -> bool:
    """Returns whether the largest value counts as the best in a table; where the name does not say, that of a score."""
    return (direction_of(name) or ("max" if "score" in name.lower() else "min")) == "max"


_BAR_EVERY_S = 0.5
_FIRST_LINE_AFTER_S = 2.0
_LINE_EVERY_S = 10.0


class Display:
    """Speaks to the user: notes, and the progress as a rich bar, drawn by the calling thread, or as lines after 2 s.

    Args:
        stream: where to write, a terminal for a bar; None: stderr, as it is at that moment.
        max_steps: steps of the whole run, where they are known; see `begin`.
        opening: of each line, where the output is mostly that of a program; lines of progress come later there.
        has_bar: draw a bar.
        no_color: draw it without colours.
        every_s: seconds between lines, or between two drawings of the bar.
        clock: seconds that never run backwards.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        max_steps: int = 0,
        opening: str = "",
        has_bar: bool = False,
        no_color: bool = False,
        every_s: float = _LINE_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_steps = max_steps
        self._first_line_after_s = every_s if opening else _FIRST_LINE_AFTER_S
        self.due_s = clock() + (0.0 if has_bar else self._first_line_after_s)
        """The time (of `clock`) from which the next `show` is welcome."""
        self._stream = stream
        self._opening = opening
        self._has_bar = has_bar
        self._no_color = no_color
        self._every_s = every_s
        self._clock = clock
        self._bar: tuple[Progress, TaskID] | None = None

    @property
    def is_due(self) -> bool:
        """Whether the next `show` is welcome."""
        return self._clock() >= self.due_s

    def begin(self, *, max_steps: int) -> None:
        """Says how many steps the whole run has, before the first one is shown."""
        self.max_steps = max_steps
        self.due_s = self._clock() + (0.0 if self._has_bar else self._first_line_after_s)

    def show(self, step: int, *, loss: float, rate: float, unit: str, step_time_s: float) -> None:
        """Moves the bar, or writes a line, e.g. "step 120/400  loss 2.3134  41,210 tokens/s  00:01:12 left".

        Args:
            step: the last one that is done.
            loss: its loss.
            rate: tokens or samples per second over all ranks, or steps.
            unit: what `rate` counts: "tokens", "samples" or "steps".
            step_time_s: seconds per step, for the time that is left.
        """
        self.due_s = self._clock() + self._every_s
        left = countdown((self.max_steps - step) * step_time_s)
        words = f"loss {loss:.4f}  {rate:,.{0 if rate >= 10 else 2}f} {unit}/s  {left} left"
        if self._has_bar:
            if self._bar is None:
                self._bar = self._open()
            bar, task = self._bar
            bar.update(task, completed=step, words=words)
            bar.refresh()
        else:
            self.say(f"step {step}/{self.max_steps}  {words}")

    def show_evaluation(self, num_done: int, num_batches: int, *, elapsed_s: float) -> None:
        """Shows how far an evaluation is that takes long, e.g. "evaluating 1,200/50,000 batches  00:12:00 left".

        Args:
            num_done: batches that this rank has evaluated.
            num_batches: those of the whole evaluation.
            elapsed_s: seconds since it began.
        """
        if elapsed_s < _LINE_EVERY_S or not self.is_due:
            return
        self.due_s = self._clock() + (_LINE_EVERY_S if self._bar is None else self._every_s)
        left = countdown((num_batches - num_done) * elapsed_s / max(num_done, 1))
        text = f"evaluating {num_done:,}/{num_batches:,} batches  {left} left"
        if self._bar is None:
            self.say(text)
        else:
            bar, task = self._bar
            bar.update(task, words=text)
            bar.refresh()

    def say(self, text: str) -> None:
        """Writes a line that stays, above the bar if there is one."""
        if self._bar is None:
            print(f"{self._opening}{text}", file=self._stream or sys.stderr, flush=True)
        else:
            self._bar[0].console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Stops drawing and leaves the last state on the screen."""
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None

    def _open(self) -> tuple[Progress, TaskID]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        console = Console(file=self._stream, no_color=self._no_color)
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[words]}"))
        # No refresh thread: it would take the interpreter away from a step at any moment.
        bar = Progress(*columns, console=console, auto_refresh=False)
        bar.start()
        return bar, bar.add_task("training", total=self.max_steps, words="")


class SilentDisplay(Display):
    """That of all ranks but the first."""

    def say(self, text: str) -> None:
        """Writes nothing."""

    def show(self, step: int, *, loss: float, rate: float, unit: str, step_time_s: float) -> None:
        """Shows nothing."""

    def show_evaluation(self, num_done: int, num_batches: int, *, elapsed_s: float) -> None:
        """Shows nothing."""


SILENT = SilentDisplay()


def open_display(stream: TextIO, *, max_steps: int, env: Mapping[str, str]) -> Display:
    """Returns a bar for a terminal and plain lines for anything else.

    Args:
        stream: stderr.
        max_steps: steps of the whole run.
        env: NO_COLOR (any value but "") takes the colours away, TERM=dumb the bar.
    """
    if stream.isatty() and env.get("TERM") != "dumb":
        no_color = bool(env.get("NO_COLOR"))
        return Display(stream, max_steps=max_steps, has_bar=True, no_color=no_color, every_s=_BAR_EVERY_S)
    return Display(stream, max_steps=max_steps)
