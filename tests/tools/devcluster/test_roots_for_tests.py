"""Roots with another release's Slurm; that one can be built and used is tried by the campaign `versions`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slurm_train.errors import ClusterError
from slurm_train.tools.devcluster import system
from tests.support import cluster_roots
from tests.support.cluster_roots import Root, find_root, install_words
from tests.support.devcluster import main

pytestmark = pytest.mark.full


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster_roots, "CACHE", tmp_path / "cache")
    monkeypatch.setattr("slurm_train.tools.devcluster.cluster.require_root", lambda _verb: None)
    return tmp_path / "cache"


def test_a_root_is_named_by_version_or_suite_and_shares_the_packages_of_its_suite():
    first, second = find_root("24.11"), find_root("trixie/second")
    assert (first, second) == (Root("trixie"), Root("trixie", "second"))
    assert first.tree == second.tree and first.folder != second.folder
    with pytest.raises(ClusterError, match=r"'\.\./x' is no name of a root"):
        find_root("trixie/../x")
    with pytest.raises(ClusterError, match=r"--slurm 23\.02: no such Slurm\nhint: one of 20\.11 \(bullseye\)"):
        find_root("23.02")


@pytest.mark.parametrize(
    ("suite", "libc", "base"),
    [
        ("trixie", (2, 36), "trixie"),
        ("bullseye", (2, 36), "bookworm"),
        ("bullseye", (2, 39), "trixie"),
        ("sid", (2, 99), "sid"),
    ],
)
def test_this_python_finds_a_libc_that_is_new_enough(suite, libc, base):
    words = install_words(suite, target=Path("/target"), libc=libc)
    assert words[words.index("/target") - 1] == base
    assert f"deb http://deb.debian.org/debian {suite} main" in words
    is_pinned = any(f"Package: slurm* libslurm*\\nPin: release n={suite}\\n" in word for word in words)
    assert is_pinned is (base != suite), "Slurm is of the suite that was asked for"


def test_a_command_needs_a_cluster_and_an_installation_needs_mmdebstrap(cache, monkeypatch):
    with pytest.raises(ClusterError, match=r"no cluster with Slurm of Debian trixie is up\nhint: .* up --slurm trixie"):
        main(["exec", "--slurm", "24.11", "--", "sinfo", "-h"])
    monkeypatch.setattr(system, "SYSTEM_PATH", str(cache))
    with pytest.raises(ClusterError, match="needs mmdebstrap\nhint: apt-get install mmdebstrap"):
        main(["up", "--slurm", "sid"])


def test_an_installation_that_fails_leaves_no_tree(cache, monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "mmdebstrap"
    fake.write_text("#!/bin/sh\nexit 25\n")
    fake.chmod(0o755)
    monkeypatch.setattr(system, "SYSTEM_PATH", str(fake.parent))
    monkeypatch.setenv("PATH", str(fake.parent), prepend=":")
    with pytest.raises(ClusterError, match="could not install Slurm of Debian sid: exit code 25"):
        main(["up", "--slurm", "sid"])
    assert not Root("sid").tree.exists()


def test_a_python_of_a_package_manager_is_refused(cache, monkeypatch):
    (Root("sid").tree / "usr").mkdir(parents=True)
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    with pytest.raises(ClusterError, match="this Python lies in /usr, where Debian sid has its own files"):
        main(["up", "--slurm", "sid"])


def test_down_removes_what_was_written_and_keeps_the_packages(cache, capsys):
    its = Root("sid")
    (its.tree / "usr").mkdir(parents=True)
    (its.folder / "upper").mkdir()
    (its.folder / "init").write_text("999999 1\n")
    assert main(["down", "--slurm", "sid"]) == 0
    assert [path.name for path in its.folder.iterdir()] == ["tree"]
    assert main(["down", "--slurm", "24.11"]) == 0
    said = capsys.readouterr().err
    assert f"nothing left in the root of Debian sid; its packages stay in {its.tree}\n" in said
    assert said.endswith("nothing is up in the root of Debian trixie\n")
    assert [path.name for path in cache.iterdir()] == ["sid"], "what never was leaves no folder"
