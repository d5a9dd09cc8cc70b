"""What a campaign found: counted while it runs, kept in results.json, and shown in docs/reliability.md."""

from __future__ import annotations

import json
import subprocess
import textwrap
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from slurm_train.errors import SlurmTrainError

RESULTS = Path(__file__).with_name("results.json")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"

_HEAD = """# What was promised, and how often it was tried

Every promise below is put to the test by a campaign with a seed: it does the damage, writes down what happened and
checks it. `make campaign` runs them all on a real Slurm on this machine (hours on two cores) and rewrites this page;
`python -m tests.campaigns NAME --trials 5` runs one of them briefly. Those that need no cluster are marked "local".
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of one campaign.

    Args:
        trials: how often the promise was put to the test.
        held: how often it held.
        figures: what was measured, by name with its unit, in words for the page, e.g. {"latency, p50": "0.4 s"}.
        problems: one line per trial that did not hold, with its seed or number.
    """

    trials: int
    held: int
    figures: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def is_kept(self) -> bool:
        """Whether the promise held every time, and was tried at all."""
        return self.trials > 0 and self.held == self.trials


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of one trial: what was tried, why it did not hold, and what it measured, by name."""

    what: str
    problems: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Tally:
    """Counts trials and prints each one; a trial with a problem is kept, and the campaign goes on. Thread-safe."""

    trials: int = 0
    held: int = 0
    problems: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, what: str, problems: Sequence[str] = (), *, trials: int = 1) -> None:
        """Counts a trial, or several that share one outcome."""
        with self._lock:
            self.trials += trials
            self.held += 0 if problems else trials
            self.problems += [f"{what}: {problem}" for problem in problems]
            print(f"{self.trials}. {', '.join([what, *problems])}", flush=True)

    @contextmanager
    def trial(self, what: str) -> Iterator[list[str]]:
        """Counts one trial: the body appends problems to what it is given; a failed wait or command is one, too."""
        problems: list[str] = []
        try:
            yield problems
        except (AssertionError, OSError, subprocess.SubprocessError, SlurmTrainError) as err:
            problems.append(f"{type(err).__name__}: {str(err).strip().partition(chr(10))[0]}")
        self.add(what, problems)

    def spoil(self, problems: Sequence[str], *, trials: int) -> None:
        """Takes back that so many trials held: a problem showed only in the end."""
        self.held = max(0, self.held - (trials if problems else 0))
        self.problems += problems
        for problem in problems:
            print(f"PROBLEM: {problem}", flush=True)

    def result(self, figures: Mapping[str, str]) -> Result:
        """Returns what was found."""
        return Result(trials=self.trials, held=self.held, figures=dict(figures), problems=tuple(self.problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A result with where and when it was had."""

    name: str
    date: str
    seed: int
    wall_s: float
    revision: str
    """Of the code that was tried."""
    result: Result


def read_records(path: Path = RESULTS) -> dict[str, Record]:
    """Returns the kept record of each campaign by its name."""
    records = {}
    for name, facts in json.loads(path.read_text(encoding="utf-8")).items() if path.exists() else ():
        result = Result(**{**facts["result"], "problems": tuple(facts["result"]["problems"])})
        records[name] = Record(**{**facts, "result": result})
    return records


def keep_record(record: Record, path: Path = RESULTS) -> None:
    """Puts a record in the place of the campaign's older one."""
    records = {**read_records(path), record.name: record}
    ordered = {name: asdict(records[name]) for name in sorted(records)}
    path.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def render(records: Mapping[str, Record]) -> str:
    """Returns the text of docs/reliability.md."""
    # The catalogue's modules report by this one.
    from tests.campaigns.catalogue import CAMPAIGNS

    lines = [_HEAD, "| campaign | promise | held | figures | date, seed, time |", "|---|---|---|---|---|"]
    ends = []
    for name, campaign in CAMPAIGNS.items():
        what = f"| `{name}`{'' if campaign.needs_cluster else ' (local)'} | {campaign.promise} |"
        if (record := records.get(name)) is None:
            lines.append(f"{what} not run | | |")
            continue
        found = record.result
        figures = "; ".join(f"{figure}: {value}" for figure, value in found.figures.items())
        when = f"{record.date}, seed {record.seed}, {record.wall_s / 60:.1f} min, `{record.revision}`"
        lines.append(f"{what} {found.held} of {found.trials} | {figures} | {when} |")
        if found.problems:
            shown = [textwrap.fill(f"- {one}", 120, subsequent_indent="  ") for one in found.problems]
            ends.append("\n".join([f"\n## `{name}`: what did not hold\n", *shown]))
    return "\n".join([*lines, *ends]) + "\n"
