"""Roots with another release's Slurm; that one can be built and used is tried by the campaign `versions`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slurm_train.cli.devcluster import main
from slurm_train.errors import ClusterError
from slurm_train.tools.devcluster import root, system
from slurm_train.tools.devcluster.root import Root, find_root, install_words


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(root, "CACHE", tmp_path / "cache")
    monkeypatch.setattr("slurm_train.tools.devcluster.cluster.require_root", lambda _verb: None)
    return tmp_path / "cache"


@pytest.mark.parametrize(("asked", "suite"), [("24.11", "trixie"), ("trixie", "trixie"), ("20.11", "bullseye")])
def test_a_root_is_named_by_version_or_suite(asked, suite):
    assert find_root(asked) == Root(suite)


def test_roots_of_one_suite_share_its_packages_and_nothing_else():
    first, second = find_root("24.11"), find_root("trixie/second")
    assert second == Root("trixie", "second") and str(second) == "trixie/second"
    assert first.tree == second.tree and first.folder != second.folder
    with pytest.raises(ClusterError, match=r"'\.\./x' is no name of a root"):
        find_root("trixie/../x")


def test_an_unknown_slurm_is_refused_with_those_that_there_are():
    with pytest.raises(ClusterError, match=r"--slurm 23\.02: no such Slurm") as caught:
        find_root("23.02")
    assert caught.value.hint == "one of 20.11 (bullseye), 22.05 (bookworm), 24.11 (trixie), 26.05 (sid)"


@pytest.mark.parametrize(
    ("suite", "libc", "base"),
    [
        ("trixie", (2, 36), "trixie"),
        ("bullseye", (2, 31), "bullseye"),
        ("bullseye", (2, 36), "bookworm"),
        ("bullseye", (2, 39), "trixie"),
        ("sid", (2, 99), "sid"),
    ],
)
def test_this_python_finds_a_libc_that_is_new_enough(suite, libc, base):
    words = install_words(suite, target=Path("/target"), libc=libc)
    suites = dict.fromkeys((base, suite, *(["bookworm"] if base in ("trixie", "sid") else [])))
    sources = [f"deb http://deb.debian.org/debian {one} main" for one in suites]
    assert words[words.index("/target") - 1 :] == [base, "/target", *sources]
    pinned = [word for word in words if f"Package: slurm* libslurm*\\nPin: release n={suite}\\n" in word]
    assert bool(pinned) is (base != suite), "Slurm is of the suite that was asked for"


def test_the_preferences_are_what_apt_reads(tmp_path):
    (tmp_path / "etc/apt").mkdir(parents=True)
    (hook,) = (word for word in install_words("bullseye", target=tmp_path, libc=(2, 36)) if "hook" in word)
    subprocess.run(["sh", "-c", hook.partition("=")[2], "sh", str(tmp_path)], check=True)
    text = (tmp_path / "etc/apt/preferences").read_text()
    assert text == "Package: slurm* libslurm*\nPin: release n=bullseye\nPin-Priority: 1001\n\n"


def test_a_command_needs_a_cluster(cache):
    with pytest.raises(ClusterError, match="no cluster with Slurm of Debian trixie is up") as caught:
        main(["exec", "--slurm", "24.11", "--", "sinfo", "-h"])
    assert caught.value.hint == "python -m slurm_train devcluster up --slurm trixie"


def test_a_missing_mmdebstrap_is_named(cache, monkeypatch):
    monkeypatch.setattr(system, "SYSTEM_PATH", str(cache))
    with pytest.raises(ClusterError, match="needs mmdebstrap") as caught:
        main(["up", "--slurm", "sid"])
    assert caught.value.hint == "apt-get install mmdebstrap"


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
    Root("sid").tree.mkdir(parents=True)
    (Root("sid").tree / "usr").mkdir()
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
    assert f"nothing left in the root of Debian sid; its packages stay in {its.tree}" in capsys.readouterr().err


def test_down_of_what_never_was_leaves_no_folder(cache, capsys):
    assert main(["down", "--slurm", "24.11"]) == 0
    assert capsys.readouterr().err == "nothing is up in the root of Debian trixie\n"
    assert list(cache.iterdir()) == []


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.campaign
def test_a_cluster_in_a_root_leaves_this_machine_as_it_was():
    """With the packages of trixie if they are installed: it downloads nothing."""
    its = Root("trixie")
    if not its.tree.exists() or its.init() is not None:
        pytest.skip(f"needs {its.tree} (`devcluster up`, then `down`, --slurm trixie) and no cluster up in it")
    devcluster = [sys.executable, "-m", "slurm_train", "devcluster"]

    def types(*words: str) -> str:
        return subprocess.run([*devcluster, *words], capture_output=True, text=True, check=True, timeout=300).stdout

    before = (system.links(), system.namespaces(), system.read_hosts())
    try:
        types("up", "--slurm", "trixie", "--nodes", "2", "--gpus", "2")
        assert types("exec", "--slurm", "24.11", "--", "srun", "--nodes=2", "hostname").split() == ["node1", "node2"]
        assert types("exec", "--slurm", "24.11", "--", "sinfo", "--version").startswith("slurm-wlm 24.11")
        assert (system.links(), system.namespaces(), system.read_hosts()) == before
        init = its.init()
    finally:
        types("down", "--slurm", "trixie")
    assert init is not None and not init.is_alive()
    assert [path.name for path in its.folder.iterdir()] == ["tree"]
