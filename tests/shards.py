"""Runs the tests that take long, in shards of up to 20 minutes, and records what each gave.

    python -m tests.shards            # all, one after the other
    python -m tests.shards faults     # one of them

`tests/shards.json` has the last result of each shard. `make test-full` fails where one is missing, has a failure, or is
older than a week or 200 commits beside the newest commit: tests that only rarely run would fail unnoticed.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date, datetime
from pathlib import Path
from xml.etree import ElementTree

from tests.homes import homes_in

REPOSITORY = Path(__file__).resolve().parents[1]
RECORDS = Path(__file__).with_name("shards.json")
MOST_DAYS = 7
MOST_COMMITS = 200

# Patterns of the files of each shard; each file with the mark `campaign` is in exactly one.
SHARDS: dict[str, tuple[str, ...]] = {
    "faults": ("tests/tools/doctor/*",),
    "nodes": ("tests/end_to_end/test_lost_nodes_on_slurm.py",),
    "returns": ("tests/end_to_end/test_returns_on_slurm.py",),
    "jobs": (
        "tests/campaigns/test_campaigns_on_slurm.py",
        "tests/end_to_end/test_[b-i]*_on_slurm.py",
        "tests/tools/devcluster/*",
    ),
    "runs": (
        "tests/end_to_end/test_layouts_on_slurm.py",
        "tests/end_to_end/test_[m-q]*_on_slurm.py",
        "tests/end_to_end/test_run_on_slurm.py",
        "tests/end_to_end/test_[s-z]*_on_slurm.py",
    ),
    "examples": (
        "tests/end_to_end/test_callbacks_here.py",
        "tests/end_to_end/test_examples_here.py",
        "tests/end_to_end/test_features_resume_here.py",
    ),
    "local": (
        "tests/campaigns/test_campaigns_local.py",
        "tests/cli/*",
        "tests/end_to_end/test_[h-z]*_here.py",
        "tests/tools/trackers/*",
        "tests/test_wheel.py",
        "tests/worker/*",
    ),
    "training": ("tests/distributed/*", "tests/train/*"),
}


@dataclass(frozen=True, slots=True)
class Record:
    """What a shard gave.

    Args:
        date: the day, e.g. "2026-11-28".
        commit: the revision that was tested, abbreviated.
        passed: number of tests that passed.
        failed: number of tests that failed, errors in fixtures included.
        skipped: number of tests that could not run.
        minutes: by the clock.
    """

    date: str
    commit: str
    passed: int
    failed: int
    skipped: int
    minutes: float


def main(words: Sequence[str]) -> int:
    """Runs the named shards, or all, and returns an exit code: 0 where no test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="*", metavar="SHARD", help=", ".join(SHARDS))
    names = parser.parse_args(words).shards or list(SHARDS)
    unknown = [name for name in names if name not in SHARDS]
    if unknown:
        parser.error(f"no shard {', '.join(unknown)}; there are {', '.join(SHARDS)}")
    records = {}
    for name in names:
        print(f"== shard {name}", flush=True)
        records[name] = run(name)
        write_records(read_records() | {name: records[name]})
    for name, record in records.items():
        print(
            f"== {name}: {record.passed} passed, {record.failed} failed, {record.skipped} skipped, {record.minutes} min"
        )
    return 1 if any(record.failed for record in records.values()) else 0


def run(name: str) -> Record:
    """Runs the tests of a shard.

    Raises:
        RuntimeError: pytest ended without a report.
    """
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        files = [path for path in campaign_files() if shard_of(path) == [name]]
        command = [sys.executable, "-m", "pytest", "--home=campaign", f"--junit-xml={report}", *files]
        code = subprocess.run(command, cwd=REPOSITORY, check=False).returncode
        if not report.exists():
            raise RuntimeError(f"shard {name}: pytest ended with code {code} and left no report")
        suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None, "pytest writes one suite"
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    skipped = int(suite.attrib["skipped"])
    return Record(
        date=date.today().isoformat(),
        commit=git("rev-parse", "--short=8", "HEAD"),
        passed=int(suite.attrib["tests"]) - failed - skipped,
        failed=failed,
        skipped=skipped,
        minutes=round((time.monotonic() - begin_s) / 60, 1),
    )


def campaign_files() -> Iterator[str]:
    """Yields the paths of the files that have a test with the mark `campaign`, in order."""
    for path in sorted((REPOSITORY / "tests").rglob("test_*.py")):
        if "campaign" in homes_in(path.read_text(encoding="utf-8")):
            yield str(path.relative_to(REPOSITORY))


def shard_of(path: str) -> list[str]:
    """Returns the shards whose patterns match a file: one, if the table is right."""
    return [name for name, patterns in SHARDS.items() if any(fnmatch.fnmatch(path, pattern) for pattern in patterns)]


def problems_of(records: Mapping[str, Record], *, newest: date, commits_since: Mapping[str, int]) -> list[str]:
    """Returns why the records do not show that all shards pass.

    Args:
        records: by shard.
        newest: the day of the newest commit; an old checkout does not fail because time passes.
        commits_since: how many commits came after a record's, by commit, where the history has it.
    """
    problems = [f"{name}: it was never run" for name in SHARDS if name not in records]
    for name, record in records.items():
        days = (newest - date.fromisoformat(record.date)).days
        commits = commits_since.get(record.commit, 0)
        if name not in SHARDS:
            problems.append(f"{name}: there is no such shard any more")
        if record.failed or not record.passed:
            problems.append(f"{name}: {record.passed} passed, {record.failed} failed on {record.commit}")
        if days > MOST_DAYS or commits > MOST_COMMITS:
            problems.append(f"{name}: last run {days} days and {commits} commits ago, on {record.commit}")
    return problems


def newest_day() -> date:
    """Returns the day of the newest commit."""
    return datetime.fromisoformat(git("log", "-1", "--format=%cI")).date()


def commits_after(commits: Sequence[str]) -> dict[str, int]:
    """Returns how many commits came after each of these; those that the history does not have are left out."""
    counts = {}
    for commit in commits:
        words = ["git", "rev-list", "--count", f"{commit}..HEAD"]
        done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            counts[commit] = int(done.stdout)
    return counts


def git(*words: str) -> str:
    """Returns what git prints."""
    return subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.strip()


def read_records() -> dict[str, Record]:
    """Returns the last record of each shard that was ever run."""
    if not RECORDS.exists():
        return {}
    return {name: Record(**fields) for name, fields in json.loads(RECORDS.read_text(encoding="utf-8")).items()}


def write_records(records: Mapping[str, Record]) -> None:
    """Writes the records, sorted by name."""
    text = json.dumps({name: asdict(records[name]) for name in sorted(records)}, indent=2)
    RECORDS.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
