"""Runs are found by their ids from any folder: the places with runs are remembered in one small file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_train.rundir.lookup import known_roots, remember_root
from slurm_train.rundir.paths import RunDirectory
from tests.cli.conftest import Shell


@pytest.fixture
def run(shell: Shell) -> RunDirectory:
    """A run that was submitted in another folder than the one where the person is now."""
    found = shell.submits("+cluster=1x8")
    shell.slurm.queue("4711", "RUNNING")
    elsewhere = shell.folder.with_name("elsewhere")
    elsewhere.mkdir()
    shell.patch.chdir(elsewhere)
    return found


@pytest.mark.parametrize("word", ["4711", "{run.name}/{run.run_id}"])
@pytest.mark.parametrize("verb", ["status", "cancel", "checkpoint ls", "track"])
def test_a_verb_finds_a_run_by_an_id_from_any_folder(verb: str, word: str, run: RunDirectory, shell: Shell) -> None:
    named = word.format(run=run)
    done = shell.types(f"{verb} {named}")
    assert f"{named} is below {run.path.parent.parent}" in done.err and "no run matches" not in done.err
    assert done.code == 0 or verb in ("checkpoint ls", "track"), done
    assert "your newest runs elsewhere" in shell.types("status").err


@pytest.mark.parametrize("words", ["cancel gpt-stdlib", "cancel 4711 --root ."])
def test_a_name_means_a_run_of_this_folder_and_a_typed_root_is_the_only_one(
    words: str, run: RunDirectory, shell: Shell
) -> None:
    shell.refuses("no run matches", words)
    assert run.config.exists() and shell.slurm.said("cancelled") is None


def test_the_list_of_places_is_short_forgets_what_is_gone_and_may_be_lost(tmp_path: Path) -> None:
    env, file = {"XDG_STATE_HOME": str(tmp_path / "state")}, tmp_path / "state" / "slurm-train" / "roots.jsonl"
    roots = [tmp_path / name for name in "abc"]
    for root in roots:
        root.mkdir()
        remember_root(root, env)
    assert sorted(known_roots(env)) == roots
    remember_root(roots[0], env)
    with file.open("a") as broken:
        broken.write('{"root": "/half')
    roots[1].rmdir()
    assert sorted(known_roots(env)) == [roots[0], roots[2]]
    assert len(file.read_text().splitlines()) == 2
    file.unlink()
    assert known_roots(env) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to another user needs root")
def test_a_list_of_places_that_a_stranger_has_written_is_not_read(tmp_path: Path) -> None:
    env, file = {"XDG_STATE_HOME": str(tmp_path)}, tmp_path / "slurm-train" / "roots.jsonl"
    remember_root(tmp_path, env)
    assert known_roots(env) == [tmp_path]
    os.chown(file, 65534, 65534)
    assert known_roots(env) == []


@pytest.mark.parametrize("state", ["/dev/full", "/proc"])
def test_a_home_that_cannot_be_written_is_no_error(state: str, tmp_path: Path) -> None:
    env = {"XDG_STATE_HOME": state, "HOME": "/"}
    remember_root(tmp_path, env)
    assert known_roots(env) == []
