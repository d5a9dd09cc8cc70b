"""How far a program is by what it has printed: the newest line of its log that says so. Pure.

A program that does not report to the session still prints its progress, in one of a few dozen forms. A table has a
pattern for each; `docs/watching.md` lists them. Other lines have numbers, too, so a line in a common form ("step 12")
counts only if the log has another one of its kind, and bars of evaluations, downloads and preparations do not count.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from slurm_train.formatting import plain

_LONGEST_LINE = 500
_NOT_TRAINING = re.compile(
    r"(?<![a-z])(?:e?val|evaluat\w*|valid\w*|test\w*|load\w*|download\w*|fetch\w*|extract\w*|scan\w*|map|filter\w*"
    r"|token\w*|pre-?process\w*|prepar\w*|generat\w*|sampl\w*|infer\w*|predict\w*|class\s+images|shards?|sanity)(?![a-z])",
    re.IGNORECASE,
)
"""In front of a bar or a count: it is not the training's."""
_NO_POSITION = re.compile(
    r"(?:max|total|num|number of|n|warm-?up|save|eval|log\w*|per|every|each|decay|start\w*|resum\w*|from|until|accum\w*"
    r"|best|last|time|sub)[ _-]*$",
    re.IGNORECASE,
)
"""In front of "step 12": the number is a setting, or where the program came from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """Where a program is by a line that it has printed."""

    step: int | None = None
    """Of the whole training, as far as the line says."""
    max_steps: int | None = None
    epoch: float | None = None
    max_epochs: int | None = None
    within: tuple[int, int] | None = None
    """How far within the epoch, and how long the epoch is; batches or samples."""

    @property
    def words(self) -> str:
        """For people, e.g. "12/300", "epoch 3/10, 40/100"."""
        parts = []
        if self.epoch is not None:
            parts.append(f"epoch {self.epoch:g}" + (f"/{self.max_epochs}" if self.max_epochs else ""))
        if self.step is not None:
            parts.append(f"{self.step}/{self.max_steps}" if self.max_steps else str(self.step))
        elif self.within is not None:
            parts.append(f"{self.within[0]}/{self.within[1]}")
        return ", ".join(parts)

    @property
    def place(self) -> tuple[float, int]:
        """Greater the further the program is."""
        return self.epoch or 0.0, self.step if self.step is not None else (self.within or (0, 0))[0]


class _Form(NamedTuple):
    name: str
    text: str
    is_certain: bool = True
    """Whether one line is enough."""

    @property
    def pattern(self) -> re.Pattern[str]:
        """Compiled when a line is read: most commands read none."""
        return _compiled(self.text)


@functools.cache
def _compiled(text: str) -> re.Pattern[str]:
    return re.compile(text, re.IGNORECASE)


# Groups: s and S are a step and the number of steps; e and E an epoch and their number; b and B within an epoch.
_BAR = "tqdm"
_DICT = "transformers"
_FORMS = (
    _Form("mmengine", r"epoch\(train\)\s*\[(?P<e>\d+)\]\s*\[\s*(?P<b>\d+)/(?P<B>\d+)\]"),
    _Form("mmengine by iterations", r"iter\(train\)\s*\[\s*(?P<s>\d+)/(?P<S>\d+)\]"),
    _Form("mmcv by iterations", r"\biter \[(?P<s>\d+)/(?P<S>\d+)\]"),
    _Form(
        "torchvision, ImageNet, mmcv, ignite",
        r"epoch:?\s*\[?\s*(?P<e>\d+)(?:/(?P<E>\d+))?\s*\]:?\s*\[\s*(?P<b>\d+)/(?P<B>\d+)\]",
    ),
    _Form("DCGAN", r"\[(?:epoch )?(?P<e>\d+)/(?P<E>\d+)\]\s*\[(?:batch )?(?P<b>\d+)/(?P<B>\d+)\]"),
    _Form("word_language_model", r"\bepoch\s+(?P<e>\d+) \|\s*(?P<b>\d+)/\s*(?P<B>\d+) batches"),
    _Form("Swin", r"\btrain:?\s*\[(?P<e>\d+)/(?P<E>\d+)\]\s*\[(?P<b>\d+)/(?P<B>\d+)\]"),
    _Form(
        "timm",
        r"\btrain:\s+(?P<e>\d+)(?:/(?P<E>\d+))?(?:\s*\(\s*\d+%\))?\s*\[\s*(?P<b>\d+)/(?P<B>\d+)\s*\(\s*\d+%\)\s*\]",
    ),
    _Form("PyTorch's examples, open_clip", r"\btrain epoch:\s*(?P<e>\d+)\s*\[\s*(?P<b>\d+)/(?P<B>\d+)\s*\(\d+%\)\]"),
    _Form("fairseq", r'\b(?:train_)?num_updates"?[=:]\s*"?(?P<s>\d+)'),
    _Form("fairseq by batches", r"\bepoch\s+(?P<e>\d+):?\s+(?P<b>\d+) / (?P<B>\d+) "),
    _Form("detectron2", r"\bd2\.utils\.events\W.*\biter:\s*(?P<s>\d+)\s"),
    _Form("Megatron", r"\biteration\s+(?P<s>\d+)/\s*(?P<S>\d+) \|"),
    _Form("Stable-Baselines3", r"\btotal_timesteps\s*\|\s*(?P<s>\d+)"),
    _Form("Composer", r"\[epoch=(?P<e>\d+)(?:/(?P<E>\d+))?\]\[batch=(?P<b>\d+)/(?P<B>\d+)\]"),
    _Form("Ultralytics", r"^\s*(?P<e>\d+)/(?P<E>\d+)\s+[\d.]+[GM]B?\s.*\|\s*(?P<b>\d+)/(?P<B>\d+)\s*\["),
    _Form(_BAR, r"\|\s*(?P<s>\d+)/(?P<S>\d+)\s*\["),
    _Form("Lightning with rich", r"\bepoch\s+(?P<e>\d+)/(?P<E>\d+)\s+[━╸╺ ]+\s(?P<b>\d+)/(?P<B>\d+)"),
    _Form("Keras", r"(?<![\d\[/])(?P<b>\d+)/(?P<B>\d+)\s+(?:\[[=.>]+\]|━)"),
    _Form(
        _DICT,
        r"""^[^{]*\{(?!.*['"](?:eval_|train_runtime)).*['"]epoch['"]:\s*['"]?(?P<e>\d+(?:\.\d+)?)""",
    ),
    _Form(
        "step with a total",
        r"(?<![a-z])(?:step|iter(?:ation)?|it|update)\]?['\"]?[\s:=#\[(]*(?P<s>\d+)\s*(?:/|of|out of)\s*(?P<S>\d+)",
        is_certain=False,
    ),
    _Form(
        "step",
        r"(?<![a-z])(?:step|iter(?:ation)?|update|episode)['\"]?[\s:=#\[(]*(?P<s>\d+)(?![\d.]*(?:\.\d|\w|/))",
        is_certain=False,
    ),
    _Form("batch", r"(?<![a-z])batch[\s:=#\[(]*(?P<b>\d+)\s*(?:/|of)\s*(?P<B>\d+)", is_certain=False),
    _Form(
        "epoch",
        r"(?<![a-z])epoch['\"]?[\s:=#\[(]*(?P<e>\d+(?:\.\d+)?)(?:\s*(?:/|of|out of)\s*(?P<E>\d+))?(?![\w])",
        is_certain=False,
    ),
)
_EPOCH = _FORMS[-1]
_LEAST_SHARE = 0.5
_NO_LETTERS = re.compile(r"(?:[^A-Za-z]|(?<=\d)e(?=[+-]?\d)|(?<![A-Za-z])(?:nan|inf)(?![A-Za-z]))+")
"""What is left of a line without it tells its kind: numbers, also 1e-05, and signs."""


class Found(NamedTuple):
    """A line of a log that says where the program is."""

    printed: Printed
    kind: tuple[str, str, object]
    """Lines of one kind are compared with each other: their form, their letters, their totals."""
    is_certain: bool


def newest_printed(log: str) -> Printed | None:
    """Returns where a program is by the newest line of its log that says so, None where none does.

    Args:
        log: the end of it.
    """
    # From the end on, since most logs say it in their last lines.
    waiting: dict[tuple[str, str, object], Printed] = {}
    of_dict: Printed | None = None
    for line in reversed(plain(log).splitlines()):
        found = read_line(line)
        if found is None:
            continue
        if found.kind[0] == _DICT:
            # transformers prints it beside a bar, which has the step.
            of_dict = of_dict or found.printed
            continue
        if found.is_certain:
            return found.printed
        later = waiting.setdefault(found.kind, found.printed)
        if later != found.printed:
            return later
    return of_dict


def began_anew(
    begin: str, *, begin_before: str, end_before: str, num_bytes_before: int
) -> tuple[Printed, Printed] | None:
    """Returns where a program began that does again what an earlier attempt had done, and how far that one had come.

    Both attempts are compared by their second place of one kind: a bar of a program that resumes begins at 0, and then
    jumps. A count that begins anew in each epoch says nothing. None where the program goes on, or where the logs do not
    say it.

    Args:
        begin: the begin of the log of an attempt.
        begin_before: that of an attempt before.
        end_before: the end of that log.
        num_bytes_before: the size of that log.
    """
    places_before = _by_kind(begin_before)
    ends_before = _by_kind(end_before)
    for kind, places in _by_kind(begin).items():
        before = places_before.get(kind, [])
        ends = ends_before.get(kind, [])
        if len(places) < 2 or len(before) < 2 or not (_only_grows(before) and _only_grows(ends)):
            continue
        furthest = max((*before, *ends), key=lambda printed: printed.place)
        if places[1].place > before[1].place or furthest.place <= places[1].place:
            continue
        if furthest.epoch is None:
            # As far as it would be if it had gone on as it began; else it has begun anew meanwhile.
            part = min(len(begin_before.encode()) / max(num_bytes_before, 1), 1.0)
            first = before[0].place[1]
            if furthest.place[1] - first < _LEAST_SHARE * (before[-1].place[1] - first) / part:
                continue
        return places[0], furthest
    return None


def _only_grows(places: Sequence[Printed]) -> bool:
    return all(earlier.place <= later.place for earlier, later in pairwise(places))


def newest_line(log: str) -> str:
    """Returns the newest line of a program's log that has a word or a number, without signs for terminals; "" for none.

    Args:
        log: the end of it.
    """
    lines = [line.strip() for line in plain(log).splitlines() if re.search(r"\w", line)]
    of_program = [line for line in lines if not line.startswith("slurm_train: ")]
    return of_program[-1] if of_program else ""


def _by_kind(log: str) -> dict[object, list[Printed]]:
    """Returns the places in a log in their order, each once, by their kind."""
    kinds: dict[object, list[Printed]] = {}
    for found in _found_in(log):
        places = kinds.setdefault(found.kind, [])
        if not places or places[-1] != found.printed:
            places.append(found.printed)
    return kinds


def _found_in(log: str) -> Iterator[Found]:
    for line in plain(log).splitlines():
        found = read_line(line)
        if found is not None:
            yield found


def read_line(line: str) -> Found | None:
    """Returns what one line of a log says of where the program is, None where it says nothing.

    Args:
        line: without what is only for terminals, see `formatting.plain`.
    """
    line = line[:_LONGEST_LINE]
    if not re.search(r"\d", line):
        return None
    for form in _FORMS:
        # Of several bars in one line the last is the newest.
        match = next(iter(deque(form.pattern.finditer(line), maxlen=1)), None)
        if match is None:
            continue
        before = line[: match.start()]
        if _NOT_TRAINING.search(before[-80:]) or (not form.is_certain and _NO_POSITION.search(before)):
            return None
        printed = _printed(match, line, is_bar=form.name == _BAR)
        totals = (printed.max_steps, printed.max_epochs, printed.within and printed.within[1])
        return Found(printed, (form.name, _NO_LETTERS.sub(" ", line).strip(), totals), form.is_certain)
    return None


def _printed(match: re.Match[str], line: str, *, is_bar: bool) -> Printed:
    groups = {name: int(text) for name, text in match.groupdict().items() if text is not None and name != "e"}
    epoch = float(match["e"]) if match.groupdict().get("e") else None
    max_epochs = groups.get("E")
    if epoch is None:
        # It may stand elsewhere in the line.
        named = _EPOCH.pattern.search(line)
        if named is not None and not _NO_POSITION.search(line[: named.start()]):
            epoch, max_epochs = float(named["e"]), int(named["E"]) if named["E"] else None
    step = groups.get("s")
    max_steps = groups.get("S")
    within = (groups["b"], groups["B"]) if "b" in groups else None
    if is_bar and epoch is not None and step is not None and max_steps is not None:
        # Lightning's, and others whose description names the epoch, begin anew in each.
        within = step, max_steps
        step = max_steps = None
    return Printed(step=step, max_steps=max_steps, epoch=epoch, max_epochs=max_epochs, within=within)
