"""`make test` installs what tests would be skipped without: `.ci/system-packages.sh` knows every such program."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from slurm_train.tools.devcluster.cluster import PACKAGES
from tests.support import browser, nfs_mounts

SCRIPT = Path(__file__).resolve().parents[1] / ".ci" / "system-packages.sh"
PROGRAMS = {*browser.PROGRAMS, *(program for program, _ in nfs_mounts.NEEDED), "sbatch", "zsh", "fish"}


@pytest.fixture
def bare_folder(tmp_path: Path) -> Path:
    """A search path with `uname`, and an `id` that names a user who is not root."""
    user = tmp_path / "id"
    user.write_text("#!/bin/sh\necho 1000\n")
    user.chmod(0o755)
    uname = shutil.which("uname")
    assert uname is not None
    (tmp_path / "uname").symlink_to(uname)
    return tmp_path


def run_script(search_path: Path) -> list[str]:
    """Returns the lines that the script prints; it must succeed."""
    environment = {"PATH": str(search_path)}
    done = subprocess.run(["/bin/sh", str(SCRIPT)], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def words_after(start: str, lines: list[str]) -> set[str]:
    return {word for line in lines if line.lstrip().startswith(start) for word in line.split()}


def test_without_root_it_names_what_is_missing_and_succeeds(bare_folder: Path) -> None:
    lines = run_script(bare_folder)
    assert words_after("== missing", lines) >= PROGRAMS
    packages = {*PACKAGES.values(), *(package for _, package in nfs_mounts.NEEDED), "libfuse3-dev", "libfaketime"}
    assert words_after("install as root", lines) >= packages


def test_what_is_there_is_not_named(bare_folder: Path) -> None:
    for program in browser.PROGRAMS:
        stand_in = bare_folder / program
        stand_in.write_text("#!/bin/sh\n")
        stand_in.chmod(0o755)
    words = words_after("", run_script(bare_folder))
    assert not words & {*browser.PROGRAMS}
    assert "zsh" in words
