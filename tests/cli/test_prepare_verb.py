from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slurm_train.cli.prepare import main
from slurm_train.data.shards import read_index


def test_prints_the_directory_on_stdout_and_the_counts_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("hello " * 20)
    out = tmp_path / "out"
    assert main([str(tmp_path / "a.txt"), "--out", str(out), "--held-out", "0.25", "--suffix", ".txt"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{out}\n"
    assert "257 token ids (bytes)" in printed.err and "90 bytes" in printed.err
    assert read_index(out).splits["heldout"].bytes == 30


def test_bad_input_is_wrong_use_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.txt"), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/none.txt cannot be read")
    assert main([str(tmp_path), "--out", str(tmp_path / "out"), "--held-out", "2"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_needs_no_torch() -> None:
    modules = "slurm_train.cli.prepare"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout == "False\n"
