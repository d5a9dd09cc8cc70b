"""What a campaign found: counted while it runs, and kept in results.json."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from slurm_train.errors import SlurmTrainError

RESULTS = Path(__file__).with_name("results.json")
T = TypeVar("T")


@dataclass(slots=True)
class Tally:
    """Counts trials and prints each one; a trial with a problem is kept, and the campaign goes on. Thread-safe.

    Args:
        trials: how often the promise was put to the test.
        held: how often it held.
        problems: one line for each that was found, with its trial.
        figures: what was measured, by name, in words for the page.
        table: cells of a table on a page of the campaign's own, by column and row.
    """

    trials: int = 0
    held: int = 0
    problems: list[str] = field(default_factory=list)
    figures: Mapping[str, str] = field(default_factory=dict)
    table: dict[str, dict[str, str]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_kept(self) -> bool:
        """Whether the promise held every time, and was tried at all."""
        return self.trials > 0 and self.held == self.trials and not self.problems

    def add(self, what: str, problems: Sequence[str] = (), *, trials: int = 1) -> None:
        """Counts a trial, or several that share one outcome."""
        with self._lock:
            self.trials += trials
            self.held += 0 if problems else trials
            self.problems += [f"{what}: {problem}" for problem in problems]
            print(f"{self.trials}. {', '.join([what, *problems])}")

    @contextmanager
    def trial(self, what: str) -> Iterator[list[str]]:
        """Counts one trial: the body appends problems to what it is given; a failed wait or command is one, too."""
        problems: list[str] = []
        try:
            yield problems
        except (AssertionError, OSError, subprocess.SubprocessError, SlurmTrainError) as err:
            problems.append(f"{type(err).__name__}: {first_line(err)}")
        self.add(what, problems)

    def try_all(self, planned: Iterable[T], find_problems: Callable[[T], Iterable[str]], *, at_once: int = 1) -> None:
        """Makes one trial of each, some at the same time; `str` names it."""

        def make(one: T) -> None:
            with self.trial(str(one)) as problems:
                problems += find_problems(one)

        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(make, planned))

    def spoil(self, problems: Sequence[str], *, trials: int) -> None:
        """Takes back that so many trials held: a problem showed only in the end."""
        with self._lock:
            self.held = max(0, self.held - (trials if problems else 0))
            self.problems += problems
            for problem in problems:
                print(f"PROBLEM: {problem}")


def first_line(err: Exception) -> str:
    """Returns what an error says in its first line."""
    return str(err).strip().partition("\n")[0]


def only_true(found: Mapping[str, object]) -> list[str]:
    """Returns the sentences that are true: what is wrong, from a table of all that could be."""
    return [sentence for sentence, is_true in found.items() if is_true]


def read_records(path: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Returns the kept record of each campaign by its name."""
    records: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return records


def keep_record(name: str, found: Tally, path: Path = RESULTS, **facts: object) -> None:
    """Puts a result, with where and when it was had (date, seed, wall_s, revision), in the place of the older one."""
    result = {key: getattr(found, key) for key in ("trials", "held", "figures", "problems")}
    result |= {"table": found.table} if found.table else {}
    records = {**read_records(path), name: {"name": name, **facts, "result": result}}
    path.write_text(json.dumps(dict(sorted(records.items())), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
