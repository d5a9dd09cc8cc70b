"""Tells a script whose ranks have no process group: each would train a model of its own, and the run would look well.

Many programs open one only at a word of theirs, or under the variables of another launcher. Looks from a thread of rank
0 at what the script has imported; imports no torch.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping

_OTHER_WAYS = ("horovod", "jax", "mpi4py")
"""Packages by which ranks know of each other without torch.distributed."""
_LOOK_EVERY_S = 0.5
_AFTER_S = 60.0
"""From then on a program that has torch probably trains; loading data rarely takes longer."""


class ApartWatch:
    """Looks whether the script opens a process group, from now on.

    Args:
        env: variables of the rank; nothing is done on others than rank 0 of several.
        after_s: when it says that there is none, before the end of the script.
    """

    def __init__(self, env: Mapping[str, str], *, after_s: float = _AFTER_S) -> None:
        self._num_ranks = int(env.get("WORLD_SIZE", "1"))
        self._after_s = after_s
        self._is_over = env.get("RANK") != "0" or self._num_ranks == 1
        if not self._is_over:
            threading.Thread(target=self._look, name="slurm_train group", daemon=True).start()

    def end(self) -> None:
        """Called where the script has ended well."""
        self._say(", to the end")

    def _look(self) -> None:
        end_s = time.monotonic() + self._after_s
        while not self._is_over and not _has_group():
            if time.monotonic() > end_s:
                self._say(f", {self._after_s:.0f} s after its start")
                return
            time.sleep(_LOOK_EVERY_S)
        self._is_over = True

    def _say(self, when: str) -> None:
        if self._is_over or "torch" not in sys.modules or _has_group():
            return
        if any(name in sys.modules for name in _OTHER_WAYS):
            return
        self._is_over = True
        print(
            f"slurm_train: the program has not opened torch.distributed{when}: its {self._num_ranks} ranks do not know "
            "of each other, and if it trains, each trains a model of its own; for one model, have it call "
            "init_process_group (some do at a word of theirs, e.g. --dist-url=env://); for one rank, +cluster=1x1, or "
            "run.processes=1 on this machine",
            file=sys.stderr,
            flush=True,
        )


def _has_group() -> bool:
    # It may be half imported.
    is_initialized = getattr(sys.modules.get("torch.distributed"), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())
