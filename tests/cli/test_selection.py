"""Which runs are meant by `--where` and `--since`; the other filters are tested with `status`."""

from __future__ import annotations

from datetime import datetime

from slurm_train.cli.selection import filter_where, read_since
from slurm_train.errors import ConfigError
from slurm_train.rundir.sweep import Element
from tests.cli.conftest import Shell
from tests.support.refusals import refusal

CHOICES: dict[tuple[str, ...], str] = {
    (): "abc",
    ("optim.lr=1e-3",): "ac",
    ("seed=1.0",): "ab",
    ("+seed=1", "optim.lr=3e-4"): "b",
    ("cluster=null",): "c",
    ("requeue.enabled=True",): "abc",
    ("seed=77",): "",
    ("data=text",): "a",
}
REFUSED = {
    "optim.lr": "--where 'optim.lr' is not KEY=VALUE",
    "=1": "--where '=1' is not KEY=VALUE",
    "optim.lrr=1": "no run has the key 'optim.lrr'",
}


def test_runs_are_chosen_by_their_values(shell: Shell) -> None:
    subjects = [
        Element(
            run=shell.has_run(run_id="aaaa0000"), index=0, overrides={"optim.lr": "0.001", "seed": "1", "data": "text"}
        ),
        Element(run=shell.has_run(run_id="bbbb0000"), index=1, overrides={"optim.lr": "0.0003", "seed": "1"}),
        Element(run=shell.has_run(run_id="cccc0000", cluster=False)),
    ]
    found = {asked: "".join(one.run.run_id[0] for one in filter_where(subjects, asked)) for asked in CHOICES}
    assert found == CHOICES
    for condition, message in REFUSED.items():
        assert refusal(ConfigError, filter_where, subjects, [condition]).message == message
    subjects[0].run.config.unlink()
    assert filter_where(subjects[:1], ["seed=1"]) == subjects[:1], "its sweep gave it that"
    assert filter_where(subjects[:2], ["requeue.enabled=true"]) == subjects[1:2]


def test_since_is_a_span_ago_or_a_date() -> None:
    spans = {"90m": 5400, "12h": 43200, "1.5 d": 129600, "1w": 604800}
    assert {text: 1e9 - read_since(text, now_unix_s=1e9) for text in spans} == spans
    assert read_since("2026-01-31T09:00", now_unix_s=0.0) == datetime(2026, 1, 31, 9).timestamp()
