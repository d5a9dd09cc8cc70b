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


def test_much_more_than_was_asked_that_is_held_out_is_said(shell: Any) -> None:
    """Whole files are held out by a hash: of three files two may be."""
    for name in ("b1.txt", "b2.txt", "b3.txt"):
        (shell.folder / name).write_text("hello " * 20)
    done = shell.types("prepare", "b1.txt", "b2.txt", "b3.txt", "--out", "out")
    assert "67% of the tokens are held out, and --held-out 0.1 was asked: whole files are" in done.err
    (shell.folder / "all.txt").write_text("hello " * 60)
    assert "was asked" not in shell.types("prepare", "all.txt", "--out", "other").err
