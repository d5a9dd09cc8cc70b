"""The environment of a test session: of the person's it has the search path and what a machine's libraries need.

Whatever else is set is left out, so no variable can change a test, and no file of the person's can be read or written:
home is an empty folder of the session. Child processes inherit it, those of pytest-xdist as well.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tests.support.command_line import REPOSITORY

_KEPT = frozenset({"PATH", "TMPDIR", "LD_LIBRARY_PATH", "GPU_TESTS_ON_CPU", "GPU_TESTS_SHARE"})
# Where a GPU's compiler and libraries are, and what pytest tells its own processes.
_KEPT_PREFIXES = ("CUDA_", "NVIDIA_", "PYTEST_")
_UMASK = 0o022


def session_environment(outer: Mapping[str, str], *, home: Path) -> dict[str, str]:
    """Returns the environment of a session that was started in another one.

    Args:
        outer: the environment of the person who starts the session.
        home: the session's home.
    """
    kept = {name: value for name, value in outer.items() if name in _KEPT or name.startswith(_KEPT_PREFIXES)}
    return {
        **kept,
        "HOME": str(home),
        "LANG": "C.UTF-8",
        # Files of the whole machine.
        "GIT_CONFIG_NOSYSTEM": "1",
        "PIP_CONFIG_FILE": os.devnull,
    }


def enter_session_environment(home: Path) -> None:
    """Makes a home, and gives this process and its children the environment of a session."""
    home.mkdir()
    # Git refuses a checkout of another user's, as it is in a container, unless it is named here.
    (home / ".gitconfig").write_text(f'[safe]\n\tdirectory = "{REPOSITORY}"\n', encoding="utf-8")
    environment = session_environment(os.environ, home=home)
    os.environ.clear()
    os.environ.update(environment)
    os.umask(_UMASK)
