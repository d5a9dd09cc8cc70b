"""What a campaign found: trials, how many of them held, figures; kept in a file, so the page can be written anew."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

RESULTS = Path(__file__).with_name("results.json")


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
    if not path.exists():
        return {}
    loaded = json.loads(path.read_text(encoding="utf-8"))
    return {name: _record(name, facts) for name, facts in loaded.items()}


def keep_record(record: Record, path: Path = RESULTS) -> None:
    """Puts a record in the place of the campaign's older one."""
    records = {**read_records(path), record.name: record}
    ordered = {name: asdict(records[name]) for name in sorted(records)}
    path.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _record(name: str, facts: dict[str, object]) -> Record:
    result = dict(facts["result"])  # type: ignore[call-overload]
    result["problems"] = tuple(result["problems"])
    return Record(**{**facts, "name": name, "result": Result(**result)})  # type: ignore[arg-type]
