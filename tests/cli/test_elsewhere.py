"""Runs are found by their ids from any folder: the places with runs are remembered in one small file."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

import slurm_train
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


@pytest.mark.parametrize("word", ["4711", "{run.run_id}", "{run.name}/{run.run_id}"])
@pytest.mark.parametrize("verb", ["status", "cancel", "checkpoint ls", "report", "diff"])
def test_a_verb_finds_a_run_by_an_id_from_any_folder(verb: str, word: str, run: RunDirectory, shell: Shell) -> None:
    named = word.format(run=run)
    done = shell.types(f"{verb} {named}")
    assert f"{named} is below {run.path.parent.parent}" in done.err and "no run matches" not in done.err
    assert done.code == 0 or verb == "checkpoint ls", done


def test_resume_logs_after_and_python_find_it_as_well(run: RunDirectory, shell: Shell) -> None:
    shell.refuses("has no log yet", "logs 4711")
    shell.refuses("is active already", "resume 4711")
    shell.slurm.next_job(4712)
    shell.submits("+cluster=2x8 seed=2 after=4711")
    assert "--dependency=afterok:4711" in shell.slurm.said("submitted_words")
    assert slurm_train.find("4711") == slurm_train.find(run.run_id) == slurm_train.Run(run.path)


def test_a_sweep_is_found_by_its_id(shell: Shell) -> None:
    sweep = shell.submits_sweep("-m +cluster=1x8 seed=1,2")
    shell.patch.chdir(shell.folder.parent)
    assert f"{sweep.sweep_id} is below" in shell.types(f"collate {sweep.sweep_id}").err
    assert shell.types("status 4711").out.count("gpt-stdlib") == 0, "it is the sweep's table"


@pytest.mark.parametrize("words", ["cancel gpt-stdlib", "cancel 4711 --root .", "cancel 4799", "logs 4711 --root x"])
def test_a_name_means_a_run_of_this_folder_and_a_typed_root_is_the_only_one(
    words: str, run: RunDirectory, shell: Shell
) -> None:
    shell.refuses("no run matches", words)
    assert run.config.exists() and shell.slurm.said("cancelled") is None


def test_what_is_here_comes_first(run: RunDirectory, shell: Shell) -> None:
    mine = RunDirectory(Path("runs") / "mine" / run.run_id)
    mine.path.mkdir(parents=True)
    mine.config.write_text(run.config.read_text())
    done = shell.types(f"status {run.run_id}")
    assert "is below" not in done.err and "mine/" in done.out


def test_status_without_runs_here_shows_the_newest_elsewhere(run: RunDirectory, shell: Shell) -> None:
    done = shell.types("status")
    assert (done.code, "your newest runs elsewhere" in done.err, run.run_id in done.out) == (0, True, True)
    assert json.loads(shell.types("status --json --last 1").out)[0]["job_id"] == "4711"
    assert "no such run below" in shell.types("status --root .").err


@pytest.mark.parametrize("words", ["-w 4711", "4711 -w", "4711 -w 9", "-w 9 4711", "-w {run.run_id}"])
def test_status_finds_a_run_from_any_folder_on_either_side_of_w(words: str, run: RunDirectory, shell: Shell) -> None:
    run.result.write_text("{}")
    done = shell.types(f"status --json {words.format(run=run)}")
    assert (done.code, "is below" in done.err) == (0, True), done
    assert [one["run"] for one in json.loads(done.out)] == [f"{run.name}/{run.run_id}"]


def test_the_list_is_short_forgets_what_is_gone_and_may_be_lost(tmp_path: Path) -> None:
    env, file = {"XDG_STATE_HOME": str(tmp_path / "state")}, tmp_path / "state" / "slurm-train" / "roots.jsonl"
    roots = [tmp_path / name for name in "abc"]
    for root in roots:
        root.mkdir()
    threads = [threading.Thread(target=remember_root, args=(root, env)) for root in roots * 5]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(known_roots(env)) == roots
    remember_root(roots[0], env)
    with file.open("a") as broken:
        broken.write('{"root": "/half')
    roots[1].rmdir()
    assert sorted(known_roots(env)) == [roots[0], roots[2]]
    assert len(file.read_text().splitlines()) == 2
    file.unlink()
    assert known_roots(env) == []


@pytest.mark.parametrize("state", ["/dev/full", "/dev/null", "/proc", ""])
def test_a_home_that_cannot_be_written_is_no_error(state: str, tmp_path: Path) -> None:
    env = {"XDG_STATE_HOME": state, "HOME": "/"}
    remember_root(tmp_path, env)
    assert known_roots(env) == []


def test_the_state_folder_follows_the_home(tmp_path: Path) -> None:
    remember_root(tmp_path, {"HOME": str(tmp_path), "XDG_STATE_HOME": "relative"})
    assert known_roots({"HOME": str(tmp_path)}) == [tmp_path]
    assert (tmp_path / ".local" / "state" / "slurm-train" / "roots.jsonl").stat().st_mode & 0o777 == 0o600
