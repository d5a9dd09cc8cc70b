"""The campaign in short, and proof that it can fail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slurm_train import trust
from slurm_train.rundir import lookup
from slurm_train.status import run_status
from tests.campaigns import strangers
from tests.campaigns.strangers import KINDS, Outcome, World, all_names, prepared_world, try_one
from tests.support.users import needs_root

pytestmark = [pytest.mark.faults, needs_root, pytest.mark.full]


@pytest.fixture(scope="module")
def prepared() -> Iterator[tuple[World, dict[str, Outcome]]]:
    with prepared_world() as world:
        yield world


def problems_of(prepared: tuple[World, dict[str, Outcome]], name: str, kind: str, *commands: str) -> list[str]:
    world, expected = prepared
    try:
        return try_one(world, name.replace("ID", world.run.run_id), kind, commands, expected)
    finally:
        world.restore()


@pytest.mark.parametrize(
    ("name", "kind", "command"),
    [
        ("aaa/ID/plan.json", "a file", "resume"),
        ("aaa/ID/jobs", "a file", "resume by its job"),
        ("aaa/ID/attempts.jsonl", "a named pipe", "status of all"),
        ("aaa/ID/logs", "a closed folder", "logs"),
        ("aaa/ID/checkpoints", "a link to the user's run", "checkpoint gc"),
        ("sweeps/ID/sweep.jsonl", "a file", "cancel"),
        ("sweeps/ID/sweep.jsonl", "a file nobody may read", "resume"),
        (".submitting_sweeps/lock", "a locked file", "submit a sweep"),
        ("bad_nodes@node.jsonl", "a file", "submit"),
        ("new", "a folder", "submit"),
        ("sweeps", "a link to a trap", "submit a sweep"),
        ("aaa/ID/config.yaml", "a file without end", "evaluate"),
    ],
)
def test_a_command_answers_as_if_the_stranger_was_not_there(
    prepared: tuple[World, dict[str, Outcome]], name: str, kind: str, command: str
) -> None:
    assert name.replace("ID", prepared[0].run.run_id) in all_names(prepared[0]) and kind in KINDS
    assert problems_of(prepared, name, kind, command) == []


@pytest.mark.parametrize(
    ("module", "name", "left_out", "place", "kind", "command"),
    [
        (lookup, "is_own", lambda _: True, "aaa/ID/logs", "a folder", "logs"),
        (trust.os, "O_NONBLOCK", 0, "aaa/ID/attempts.jsonl", "a named pipe", "status of all"),
        (run_status, "is_own", lambda _: True, "aaa/ID/checkpoints", "a file", "status of all"),
    ],
)
def test_a_check_that_is_left_out_is_found(
    prepared: tuple[World, dict[str, Outcome]],
    monkeypatch: pytest.MonkeyPatch,
    module: object,
    name: str,
    left_out: object,
    place: str,
    kind: str,
    command: str,
) -> None:
    monkeypatch.setattr(module, name, left_out)
    monkeypatch.setattr(strangers, "_WITHIN_S", 15.0)
    assert problems_of(prepared, place, kind, command)
