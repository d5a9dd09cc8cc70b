from __future__ import annotations

from typing import Any

from slurm_train.data.shards import read_index


def test_it_prints_the_directory_on_stdout_and_the_counts_on_stderr(shell: Any) -> None:
    (shell.folder / "a.txt").write_text("hello " * 20)
    out = shell.folder / "out"
    done = shell.types("prepare", "a.txt", "--out", str(out), "--held-out", "0.25", "--suffix", ".txt")
    assert (done.code, done.out) == (0, f"{out}\n")
    assert "257 token ids (bytes)" in done.err and "90 bytes" in done.err
    assert read_index(out).splits["heldout"].bytes == 30
