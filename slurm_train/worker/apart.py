"""Notes whether a script's ranks know of each other: without a process group each would train a model of its own.

Many programs open one only at a word of theirs, under the variables of another launcher, or in processes that they
spawn. A thread of rank 0 looks at what the script has imported and at what its main thread does, and leaves a record
for the supervisor. Time alone proves nothing: imports and data may take long. So a program is spoken of before its end
only if it has been seen in an optimizer's step again and again, or in `torch.multiprocessing.spawn`.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from slurm_train.session.client import has_joined

_OTHER_WAYS = ("horovod", "jax", "mpi4py", "ray", "torchft", "hivemind", "bagua", "byteps", "torch_xla")
"""Packages by which ranks know of each other without torch.distributed, or in groups of their own."""
_LOOK_EVERY_S = 0.5
_LOOK_AT_GROUP_EVERY_S = 0.05
"""A program that says hello opens a group and leaves it soon; torch keeps no trace of that."""
_TRAINS_FOR_S = 30.0
"""A program may try out its model before it opens a process group."""
_LEAST_LOOKS = 3
_TRAINING = "trains"
_OPTIMIZERS = "/torch/optim/"
_STEPS = ("step", "wrapper")
"""The step of an optimizer or schedule, and what torch wraps around that of any optimizer, also of another package.
Backward passes prove nothing: inference may have gradients (forces), and other functions lie in torch.autograd."""
_SPAWNS = "/torch/multiprocessing/spawn.py"
_ONE_RANK = "for one rank, +cluster=1x1, or run.processes=1 on this machine"
_ADVICE = (
    "for one model, have it call init_process_group (some do at a word of theirs, e.g. --dist-url=env://); " + _ONE_RANK
)


class ApartWatch:
    """Looks whether the script opens a process group, from now on.

    Args:
        env: variables of the rank; nothing is done on others than rank 0 of several.
        run_directory: of the run.
        trains_for_s: how long the script must have been seen training before it is spoken of.
    """

    def __init__(self, env: Mapping[str, str], run_directory: str, *, trains_for_s: float = _TRAINS_FOR_S) -> None:
        self._num_ranks = int(env.get("WORLD_SIZE", "1"))
        self._attempt = int(env.get("SLURM_TRAIN_ATTEMPT", "0"))
        self._run_directory = run_directory
        self._trains_for_s = trains_for_s
        self._first_seen_s = 0.0
        self._num_seen = 0
        self._is_over = env.get("RANK") != "0" or self._num_ranks == 1
        if not self._is_over:
            threading.Thread(target=self._look, name="slurm_train group", daemon=True).start()

    def end(self) -> None:
        """Called where the script has ended well."""
        # Of a program that has joined the session, the ranks know of each other by that.
        if self._is_over or (has_joined() and not self._num_seen):
            return
        if "torch" in sys.modules:
            self._say("has not opened torch.distributed, to the end", "if it trains, each trains")
        elif _is_jax_alone():
            self._leave_remark(
                "has not called jax.distributed.initialize, to the end", "if it trains, each trains", _ONE_RANK
            )

    def _look(self) -> None:
        next_look_s = 0.0
        while not self._is_over:
            size = _group_size()
            if size:
                self._note_group(size)
                return
            time.sleep(_LOOK_AT_GROUP_EVERY_S if "torch.distributed" in sys.modules else _LOOK_EVERY_S)
            if time.monotonic() < next_look_s:
                continue
            next_look_s = time.monotonic() + _LOOK_EVERY_S
            doing = _activity(sys._current_frames().get(threading.main_thread().ident or 0))
            if doing:
                self._num_seen += 1
                self._first_seen_s = self._first_seen_s or time.monotonic()
                seen_s = time.monotonic() - self._first_seen_s
                if self._num_seen >= _LEAST_LOOKS and seen_s >= self._trains_for_s:
                    each_trains = "each trains" if doing == _TRAINING else "if it trains, each trains"
                    self._say(f"{doing}, and has not opened torch.distributed in {seen_s:.0f} s", each_trains)

    def _note_group(self, size: int) -> None:
        self._is_over = True
        remark = ""
        if size < self._num_ranks and not _has_other_way():
            ranks = "1 rank" if size == 1 else f"{size} ranks"
            remark = (
                f"the program's torch.distributed has {ranks}, and the run has {self._num_ranks}: if the others train, "
                f"they train models of their own; {_ADVICE}"
            )
        self._leave(size, remark)

    def _say(self, what: str, each_trains: str) -> None:
        if self._is_over or "torch" not in sys.modules or _group_size() or _has_other_way():
            return
        self._leave_remark(what, each_trains, _ADVICE)

    def _leave_remark(self, what: str, each_trains: str, advice: str) -> None:
        self._is_over = True
        ranks = f"its {self._num_ranks} ranks do not know of each other by it"
        self._leave(0, f"the program {what}: {ranks}, and {each_trains} a model of its own; {advice}")

    def _leave(self, size: int, remark: str) -> None:
        """Prints the remark into the log of rank 0, and records it for `status` and the run's end."""
        from slurm_train.rundir.paths import RunDirectory
        from slurm_train.rundir.signs import Group, note_group

        if remark:
            print(f"slurm_train: {remark}", file=sys.stderr, flush=True)
        # A file system that refuses costs the record, not the program.
        with contextlib.suppress(OSError):
            note_group(RunDirectory(Path(self._run_directory)), self._attempt, Group(size=size, remark=remark))


def _activity(frame: FrameType | None) -> str:
    """Returns what a main thread does that ranks need a process group for, e.g. "trains"; "" for other things."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith(_SPAWNS):
            return "has spawned processes"
        if _OPTIMIZERS in file and frame.f_code.co_name in _STEPS:
            return _TRAINING
        frame = frame.f_back
    return ""


def _group_size() -> int:
    """Returns the number of ranks of the process group, 0 where there is none."""
    module = sys.modules.get("torch.distributed")
    # It may be half imported.
    is_initialized = getattr(module, "is_initialized", None)
    if module is None or is_initialized is None or not is_initialized():
        return 0
    return int(module.get_world_size())


def _is_jax_alone() -> bool:
    """Returns whether the program has JAX and has not joined its ranks by it; False where JAX does not tell."""
    state: Any = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    return hasattr(state, "client") and state.client is None and not _has_other_way(besides="jax")


def _has_other_way(*, besides: str = "") -> bool:
    return any(name in sys.modules for name in _OTHER_WAYS if name != besides)
