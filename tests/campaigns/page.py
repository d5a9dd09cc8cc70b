"""docs/reliability.md, written from the kept results."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

from tests.campaigns.catalogue import CAMPAIGNS
from tests.campaigns.result import Record, read_records

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"

_HEAD = """# What was promised, and how often it was tried

Every promise below is put to the test by a campaign with a seed: it does the damage, writes down what happened and
checks it. `make campaign` runs them all on a real Slurm on this machine (hours on two cores) and rewrites this page;
`python -m tests.campaigns NAME --trials 5` runs one of them briefly. Those that need no cluster are marked "local".
"""


def render(records: Mapping[str, Record]) -> str:
    """Returns the page's text."""
    lines = [_HEAD, "| campaign | promise | held | figures | date, seed, time |", "|---|---|---|---|---|"]
    lines += [_row(name, records.get(name)) for name in CAMPAIGNS]
    problems = [_problems(records[name]) for name in CAMPAIGNS if name in records and records[name].result.problems]
    return "\n".join([*lines, *problems]) + "\n"


def write_page(records: Mapping[str, Record]) -> None:
    """Writes the page."""
    PAGE.write_text(render(records), encoding="utf-8")


def _row(name: str, record: Record | None) -> str:
    campaign = CAMPAIGNS[name]
    where = "" if campaign.needs_cluster else " (local)"
    if record is None:
        return f"| `{name}`{where} | {campaign.promise} | not run | | |"
    figures = "; ".join(f"{what}: {value}" for what, value in record.result.figures.items())
    when = f"{record.date}, seed {record.seed}, {record.wall_s / 60:.1f} min, `{record.revision}`"
    held = f"{record.result.held} of {record.result.trials}"
    return f"| `{name}`{where} | {campaign.promise} | {held} | {figures} | {when} |"


def _problems(record: Record) -> str:
    shown = "\n".join(textwrap.fill(f"- {problem}", 120, subsequent_indent="  ") for problem in record.result.problems)
    return f"\n## `{record.name}`: what did not hold\n\n{shown}"


if __name__ == "__main__":
    write_page(read_records())
