"""A skip hides a guarantee: where everything is installed, only listed tests may be skipped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.skips import LISTED, Listed, unlisted

REPOSITORY = Path(__file__).resolve().parents[1]


def test_only_a_listed_reason_of_a_listed_test_is_accepted() -> None:
    listed = [Listed("tests/gpu/*", "needs 2 GPUs")]
    skipped = [
        ("tests/gpu/test_a.py::test_x[1]", "Skipped: needs 2 GPUs, there are 0"),
        ("tests/gpu/test_a.py::test_y", "Skipped: no compiler"),
        ("tests/slurm/test_b.py::test_z", "Skipped: needs 2 GPUs"),
    ]
    assert unlisted(skipped, listed) == [
        "tests/gpu/test_a.py::test_y: Skipped: no compiler",
        "tests/slurm/test_b.py::test_z: Skipped: needs 2 GPUs",
    ]


@pytest.mark.parametrize(("words", "code"), [([], 0), (["--listed-skips"], 1)])
def test_a_skip_that_is_not_listed_fails_the_run_if_asked(words: list[str], code: int, tmp_path: Path) -> None:
    program = tmp_path / "test_left_out.py"
    program.write_text("import pytest\ndef test_one():\n    pytest.skip('no reason that anybody knows')\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.skips", "-c", "/dev/null", *words, str(program)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout
    assert ("test_left_out.py::test_one" in done.stdout) == bool(code)


def test_no_entry_accepts_everything() -> None:
    assert [entry for entry in LISTED if not entry.reason] == []
