"""provenance.json, and the environment of each attempt."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slurm_train.launch import provenance
from slurm_train.launch.environment import Environment, environment_from
from slurm_train.launch.provenance import environment_of, record_environment, write_provenance
from slurm_train.launch.snapshot import OtherFolder, SourceState
from slurm_train.launch.source import Source
from slurm_train.rundir.layout import RunDirectory


def written(folder: Path, source: Source) -> dict[str, Any]:
    write_provenance(folder / "provenance.json", source, words=["+cluster=2x1"], slurm="22.05.8")
    facts: dict[str, Any] = json.loads((folder / "provenance.json").read_text())
    return facts


def test_words_code_and_versions_are_kept(tmp_path: Path) -> None:
    other = OtherFolder(".folders/lib", Path("/home/ada/lib"), SourceState(("a.py",), "def", ""), ["a.py"])
    source = Source(tmp_path, SourceState(("train.py",), "abc", "diff"), ["train.py"], [other])
    facts = written(tmp_path, source)
    assert facts["words"] == ["+cluster=2x1"] and facts["directory"] == str(tmp_path)
    assert (facts["git_commit"], facts["git_dirty"], facts["git_diff"], facts["num_files"]) == ("abc", True, "diff", 2)
    assert facts["versions"]["torch"] != "not installed" and facts["versions"]["python"].startswith("3.")
    assert facts["environment"]["slurm"] == "22.05.8" and "pytest" in facts["environment"]["packages"]
    assert facts["folders"] == [
        {
            "path": "/home/ada/lib",
            "copied_to": ".folders/lib",
            "git_commit": "def",
            "git_dirty": False,
            "git_diff": "",
        }
    ]


def test_code_that_is_not_copied_is_named_with_its_commit(tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "a.py").write_text("x\n")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", "-C", str(library), *words], check=True)
    source = Source(tmp_path, SourceState(None, None, ""), [], elsewhere=[str(library), str(tmp_path)])
    clean, bare = written(tmp_path, source)["elsewhere"]
    assert len(clean["git_commit"]) == 40 and clean["git_dirty"] is False
    assert (bare["git_commit"], bare["git_dirty"]) == (None, None)
    (library / "a.py").write_text("y\n")
    assert written(tmp_path, source)["elsewhere"][0]["git_dirty"] is True


def packages(**versions: str) -> Environment:
    return environment_from({"python": "3.11.2", "executable": "/bin/python", "packages": versions})


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path)
    for attempt in range(3):
        run.attempt_logs(attempt).mkdir(parents=True)
    run.epochs.mkdir()
    return run


def open_attempt(run: RunDirectory, attempt: int) -> None:
    (run.epochs / f"attempt_{attempt}").touch()


def test_packages_that_change_between_attempts_are_named(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    now = packages(numpy="1.26.4")
    monkeypatch.setattr(provenance, "read_environment", lambda **_words: now)
    write_provenance(run.provenance, Source(run.path, SourceState(None, None, ""), []), words=[], slurm=None)
    open_attempt(run, 0)
    assert record_environment(run, 0, slurm="22.05.8") == []
    now = packages(numpy="2.0.0")
    open_attempt(run, 1)
    assert record_environment(run, 1, slurm="22.05.8") == ["numpy: 1.26.4 -> 2.0.0"]
    open_attempt(run, 2)
    assert record_environment(run, 2, slurm="22.05.8") == []
    assert environment_of(run) == now


def test_another_interpreter_is_no_change_of_packages(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"environment": {**packages(numpy="1").as_json(), "executable": "/other/python"}}
    run.provenance.write_text(json.dumps(facts))
    monkeypatch.setattr(provenance, "read_environment", lambda **_words: packages(numpy="2"))
    open_attempt(run, 0)
    assert record_environment(run, 0, slurm=None) == []


def test_runs_that_are_older_than_environments_have_their_versions(run: RunDirectory) -> None:
    versions = {"python": "3.10.1", "torch": "2.6.0", "numpy": "not installed"}
    run.provenance.write_text(json.dumps({"versions": versions, "python": "/bin/python"}))
    found = environment_of(run)
    assert found is not None
    assert (found.python, found.torch, found.packages) == ("3.10.1", "2.6.0", {"torch": "2.6.0"})
