"""What a run needs of its file system is tried before anything is written."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_train.errors import RunError
from slurm_train.rundir.trial import require_calls


def refuses(number: int, *, only: Callable[[Any], bool] = lambda _: True) -> Callable[..., Any]:
    """Returns a call that fails as on a file system that does not have it, where its first argument is so."""

    def call(first: Any, *_: Any, **__: Any) -> None:
        if only(first):
            raise OSError(number, os.strerror(number))

    return call


def is_folder(descriptor: int) -> bool:
    return os.path.isdir(f"/proc/self/fd/{descriptor}")  # noqa: PTH112  # a link to an open folder


# The call that is missing, how it answers, and the words of the refusal; "" where a run goes on without it.
MISSING: dict[str, tuple[str, Callable[..., Any], str]] = {
    "no hard links (gcsfuse)": ("link", refuses(errno.ENOSYS), "makes no hard links"),
    "no hard links (BeeGFS, vfat)": ("link", refuses(errno.EPERM), "makes no hard links"),
    "no hard links (CIFS)": ("link", refuses(errno.EOPNOTSUPP), "makes no hard links"),
    "no modes": ("chmod", refuses(errno.EPERM), "does not change modes"),
    "no fsync of files": ("fsync", refuses(errno.EINVAL, only=lambda fd: not is_folder(fd)), "does not write a file"),
    "no fsync of folders (CIFS)": ("fsync", refuses(errno.EINVAL, only=is_folder), ""),
}


@pytest.mark.parametrize("case", MISSING)
def test_a_call_that_is_missing_is_named(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, call, words = MISSING[case]
    with monkeypatch.context() as patched:
        patched.setattr(os, name, call)
        if words:
            with pytest.raises(RunError) as caught:
                require_calls(tmp_path)
            assert words in caught.value.message and str(tmp_path) in caught.value.message
            assert "run.root=DIR" in caught.value.hint
        else:
            require_calls(tmp_path)
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def test_symbolic_links_are_tried_where_they_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_calls(tmp_path, symlinks=True)
    monkeypatch.setattr(os, "symlink", refuses(errno.EPERM))
    require_calls(tmp_path)
    with pytest.raises(RunError, match="makes no symbolic links"):
        require_calls(tmp_path, symlinks=True)
    assert list(tmp_path.iterdir()) == []
