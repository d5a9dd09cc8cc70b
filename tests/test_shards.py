"""Tests that take long run in exactly one shard each, and each shard was run lately."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

import pytest

from tests.shards import (
    REPOSITORY,
    SHARDS,
    Record,
    campaign_files,
    commits_after,
    newest_day,
    problems_of,
    read_records,
    shard_of,
)

_GOOD = Record("2026-11-28", "8140891b", passed=5, failed=0, skipped=0, minutes=9.5)


def test_each_file_of_a_campaign_is_in_one_shard() -> None:
    assert {path: shard_of(path) for path in campaign_files() if len(shard_of(path)) != 1} == {}


@pytest.mark.parametrize(
    ("record", "day", "commits", "expected"),
    [
        (_GOOD, date(2026, 12, 5), 200, []),
        (_GOOD, date(2026, 12, 6), 3, ["8 days"]),
        (_GOOD, date(2026, 11, 28), 201, ["201 commits"]),
        (replace(_GOOD, failed=1), date(2026, 11, 28), 0, ["1 failed"]),
        (replace(_GOOD, passed=0, skipped=5), date(2026, 11, 28), 0, ["0 passed"]),
    ],
)
def test_an_old_or_failed_shard_is_named(record: Record, day: date, commits: int, expected: list[str]) -> None:
    problems = problems_of(dict.fromkeys(SHARDS, record), newest=day, commits_since={record.commit: commits})
    assert len(problems) == len(expected) * len(SHARDS)
    assert all(words in problem for problem in problems for words in expected)


def test_a_shard_that_was_never_run_is_named() -> None:
    assert len(problems_of({}, newest=date(2026, 11, 28), commits_since={})) == len(SHARDS)


@pytest.mark.full
def test_all_shards_passed_lately() -> None:
    if not (REPOSITORY / ".git").exists():
        pytest.skip("an unpacked archive has no history")
    records = read_records()
    commits = commits_after([record.commit for record in records.values()])
    problems = problems_of(records, newest=newest_day(), commits_since=commits)
    assert problems == [], "run `make test-returns`, or one shard of it: `make test-returns SHARD=faults`"
