"""provenance.json, and the environment of each attempt: packages, torch, driver and GPUs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slurm_train.code import provenance
from slurm_train.code.git import SourceState
from slurm_train.code.provenance import (
    EnvironmentChange,
    environment_changes,
    environment_of,
    read_environment,
    record_environment,
    write_provenance,
)
from slurm_train.code.snapshot import Source
from slurm_train.config.schema import RunConfig
from slurm_train.rundir.paths import RunDirectory


def test_where_a_package_comes_from_is_kept_without_passwords(tmp_path: Path) -> None:
    editable = {"url": "file:///home/ada/mine", "dir_info": {"editable": True}}
    cloned = {"url": "https://ada:pass@example.org/x.git", "vcs_info": {"vcs": "git", "commit_id": "0a1b2c"}}
    installed = {
        "one/my_package-0.1.dist-info": editable,
        "one/Cloned-2.0.dist-info": cloned,
        "one/torch-2.6.0.dist-info": None,
        "two/torch-1.0.dist-info": None,
    }
    for place, source in installed.items():
        folder = tmp_path / place
        folder.mkdir(parents=True)
        name, version = folder.name.removesuffix(".dist-info").split("-")
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        if source is not None:
            (folder / "direct_url.json").write_text(json.dumps(source))
    found = read_environment(slurm=None, paths=[str(tmp_path / name) for name in ("one", "two", "none")])
    assert found["packages"] == {"cloned": "2.0", "my-package": "0.1", "torch": "2.6.0"}
    assert found["sources"] == {
        "cloned": {"url": "https://[redacted]@example.org/x.git", "commit": "0a1b2c"},
        "my-package": {"url": "file:///home/ada/mine", "editable": True},
    }


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("cuda: Optional[str] = '12.4'\nhip: Optional[str] = None\n", "12.4"),
        ("cuda = None\nhip = '6.2.41'\n", "rocm 6.2.41"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", None),
    ],
)
def test_what_torch_was_built_for_is_read_without_it(text: str, cuda: str | None, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '1'\n{text}")
    assert read_environment(slurm=None, paths=[str(tmp_path)])["cuda"] == cuda


def test_driver_and_gpus_are_read_where_there_are_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "_DRIVER", tmp_path)
    none = read_environment(slurm=None, paths=[])
    assert (none["driver"], none["gpus"]) == (None, [])
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\nGCC\n")
    for number in range(2):
        (tmp_path / "gpus" / str(number)).mkdir(parents=True)
        (tmp_path / "gpus" / str(number) / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 1\n")
    some = read_environment(slurm=None, paths=[])
    assert (some["driver"], some["gpus"]) == ("550.54.15", ["NVIDIA H100 80GB HBM3"] * 2)


def test_what_differs_is_said_fact_by_fact() -> None:
    before = {"torch": "2.6.0", "gone": "1", "same": "1", "mine": "0.1"}
    old = {"python": "3.10.1", "torch": "2.6.0", "packages": before}
    new = {
        "python": "3.10.1",
        "torch": "2.7.0",
        "cuda": "12.8",
        "gpus": ["H100", "H100"],
        "packages": {"torch": "2.7.0", "same": "1", "mine": "0.1"},
        "sources": {"mine": {"url": "file:///x", "editable": True}},
    }
    assert environment_changes(old, new) == [
        EnvironmentChange("torch", "2.6.0", "2.7.0"),
        EnvironmentChange("cuda", None, "12.8"),
        EnvironmentChange("gpus", None, "2 x H100"),
        EnvironmentChange("gone", "1", None, is_package=True),
        EnvironmentChange("mine", "0.1", "0.1 (editable file:///x)", is_package=True),
    ]
    assert str(environment_changes(old, new)[3]) == "gone: 1 -> none"


def written(folder: Path, source: Source) -> dict[str, Any]:
    write_provenance(folder / "provenance.json", source, words=["+cluster=2x1"], slurm="22.05.8", config=RunConfig())
    facts: dict[str, Any] = json.loads((folder / "provenance.json").read_text())
    return facts


def test_words_code_and_versions_are_kept(tmp_path: Path) -> None:
    lib, other = Path("/home/ada/lib"), ".folders/lib"
    files = {"train.py": tmp_path / "train.py", f"{other}/a.py": lib / "a.py"}
    states = {"": SourceState(commit="abc", difference="diff"), other: SourceState(commit="def")}
    facts = written(tmp_path, Source({"": tmp_path, other: lib}, files, states))
    assert facts["words"] == ["+cluster=2x1"] and facts["directory"] == str(tmp_path)
    assert (facts["git_commit"], facts["git_dirty"], facts["git_diff"], facts["num_files"]) == ("abc", True, "diff", 2)
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


def test_a_new_file_in_the_copy_is_a_difference_to_the_commit(tmp_path: Path) -> None:
    states = {"": SourceState(("train.py", "new.py", "runs/x"), "abc", untracked=frozenset({"new.py", "runs/x"}))}
    for copied, is_dirty in (("train.py", False), ("new.py", True)):
        facts = written(tmp_path, Source({"": tmp_path}, {copied: tmp_path / copied}, states))
        assert facts["git_dirty"] is is_dirty, copied


def test_code_that_is_not_copied_is_named_with_its_commit(tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "a.py").write_text("x\n")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", "-C", str(library), *words], check=True)
    source = Source({"": tmp_path}, elsewhere=[str(library), str(tmp_path)])
    clean, bare = written(tmp_path, source)["elsewhere"]
    assert len(clean["git_commit"]) == 40 and clean["git_dirty"] is False
    assert (bare["git_commit"], bare["git_dirty"]) == (None, None)
    (library / "a.py").write_text("y\n")
    assert written(tmp_path, source)["elsewhere"][0]["git_dirty"] is True


def packages(**versions: str) -> dict[str, Any]:
    return {"python": "3.11.2", "executable": "/bin/python", "packages": versions}


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
    write_provenance(run.provenance, Source({"": run.path}), words=[], slurm=None, config=RunConfig())
    open_attempt(run, 0)
    assert record_environment(run, 0, slurm="22.05.8") == []
    now = packages(numpy="2.0.0")
    open_attempt(run, 1)
    assert record_environment(run, 1, slurm="22.05.8") == ["numpy: 1.26.4 -> 2.0.0"]
    open_attempt(run, 2)
    assert record_environment(run, 2, slurm="22.05.8") == []
    assert environment_of(run) == now


def test_another_interpreter_is_no_change_of_packages(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"environment": {**packages(numpy="1"), "executable": "/other/python"}}
    run.provenance.write_text(json.dumps(facts))
    monkeypatch.setattr(provenance, "read_environment", lambda **_words: packages(numpy="2"))
    open_attempt(run, 0)
    assert record_environment(run, 0, slurm=None) == []
