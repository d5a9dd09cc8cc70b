"""Packages are told by the folders that installers leave; what pip and importlib.metadata say is the same."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from slurm_train.launch import environment
from slurm_train.launch.environment import (
    EnvironmentChange,
    environment_changes,
    environment_from,
    read_environment,
    read_packages,
)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_names_and_versions_are_those_of_the_metadata() -> None:
    found = read_environment(slurm=None)
    expected: dict[str, str] = {}
    for item in distributions():
        expected.setdefault(canonical(item.metadata["Name"]), item.version)
    assert len(expected) > 20
    assert found.packages == expected


def test_names_and_versions_are_those_of_pip() -> None:
    command = [sys.executable, "-m", "pip", "list", "--format=json", "--disable-pip-version-check"]
    listed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    found = read_environment(slurm=None).packages
    assert {canonical(one["name"]): one["version"] for one in listed}.items() <= found.items()


def info(folder: Path, name: str, **files: str) -> None:
    (folder / name).mkdir(parents=True)
    for file, text in files.items():
        (folder / name / file.replace("PKG_INFO", "PKG-INFO").replace("_json", ".json")).write_text(text)


def test_where_a_package_comes_from_is_kept_without_passwords(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    editable = json.dumps({"url": "file:///home/ada/mine", "dir_info": {"editable": True}})
    vcs = {"vcs": "git", "commit_id": "0a1b2c"}
    cloned = json.dumps({"url": "https://ada:pass@example.org/x.git", "vcs_info": vcs})
    info(one, "my_package-0.1.dist-info", direct_url_json=editable)
    info(one, "Cloned-2.0.dist-info", direct_url_json=cloned)
    info(one, "torch-2.6.0+cu124.dist-info")
    info(two, "torch-1.0.dist-info")
    info(two, "old.egg-info", PKG_INFO="Metadata-Version: 1.0\nVersion: 3\n")
    (two / "debian_one-1.5-py3.11.egg-info").write_text("")
    packages, sources = read_packages([str(one), str(two), str(tmp_path / "none")])
    assert packages == {
        "cloned": "2.0",
        "debian-one": "1.5",
        "my-package": "0.1",
        "old": "3",
        "torch": "2.6.0+cu124",
    }
    assert sources == {
        "cloned": {"url": "https://[redacted]@example.org/x.git", "commit": "0a1b2c"},
        "my-package": {"url": "file:///home/ada/mine", "editable": True},
        "old": {"url": two.as_uri(), "editable": True},
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
    assert read_environment(slurm=None, paths=[str(tmp_path)]).cuda == cuda


def test_driver_and_gpus_are_read_where_there_are_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_DRIVER", tmp_path)
    none = read_environment(slurm=None, paths=[])
    assert (none.driver, none.gpus) == (None, [])
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\nGCC\n")
    for number in range(2):
        (tmp_path / "gpus" / str(number)).mkdir(parents=True)
        (tmp_path / "gpus" / str(number) / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 1\n")
    some = read_environment(slurm=None, paths=[])
    assert (some.driver, some.gpus) == ("550.54.15", ["NVIDIA H100 80GB HBM3"] * 2)


def test_what_differs_is_said_fact_by_fact() -> None:
    old = environment_from(
        {"python": "3.10.1", "torch": "2.6.0", "packages": {"torch": "2.6.0", "gone": "1", "same": "1", "mine": "0.1"}}
    )
    new = environment_from(
        {
            "python": "3.10.1",
            "torch": "2.7.0",
            "cuda": "12.8",
            "gpus": ["H100", "H100"],
            "packages": {"torch": "2.7.0", "same": "1", "mine": "0.1"},
            "sources": {"mine": {"url": "file:///x", "editable": True}},
        }
    )
    assert environment_changes(old, new) == [
        EnvironmentChange("torch", "2.6.0", "2.7.0"),
        EnvironmentChange("cuda", None, "12.8"),
        EnvironmentChange("gpus", None, "2 x H100"),
        EnvironmentChange("gone", "1", None, is_package=True),
        EnvironmentChange("mine", "0.1", "0.1 (editable file:///x)", is_package=True),
    ]
    assert str(environment_changes(old, new)[3]) == "gone: 1 -> none"


def test_an_environment_comes_back_from_json() -> None:
    found = read_environment(slurm="22.05.8")
    assert environment_from(json.loads(json.dumps(found.as_json()))) == found
