"""What a rank is doing, noted in a file that is mapped into its memory, and a SIGKILL at a moment of it.

The phases are the product's own functions; they are only wrapped, so that somebody outside can tell what a rank was at
when it died, and so that a kill can be aimed at what takes a thousandth of the time.
"""

from __future__ import annotations

import importlib
import os
import signal
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Phase(NamedTuple):
    """A function of the product, and how long it lasts about."""

    module: str
    function: str
    lasts_s: float
    only_first: bool = False
    """Whether rank 0 alone does it."""


PHASES = {
    "meet": Phase("slurm_train.train.context", "open_store", 0.05),
    "group": Phase("slurm_train.distributed.group", "init_group", 0.05),
    "resume": Phase("slurm_train.checkpoint.saver", "Saver.resume", 0.05),
    "step": Phase("slurm_train.train.step", "Stepper.step", 0.005),
    "copy": Phase("slurm_train.checkpoint.state", "StagingBuffers.stage", 0.001),
    "save": Phase("slurm_train.checkpoint.saves", "save_to", 0.05),
    "tensors": Phase("slurm_train.checkpoint.tensors", "write_tensors", 0.02),
    "commit": Phase("slurm_train.checkpoint.commit", "Place.commit", 0.005, only_first=True),
    "prune": Phase("slurm_train.checkpoint.commit", "Place.prune", 0.005, only_first=True),
    "finish": Phase("slurm_train.checkpoint.saves", "Saves.save", 0.05),
    "result": Phase("slurm_train.train.ending", "write_result", 0.003, only_first=True),
    "exit": Phase("slurm_train.train.build", "shutdown", 0.005),
}
AT_THE_END = ("finish", "result", "exit")
FOLLOWING = {
    "next": Phase("slurm_train.evaluation.follower", "Follower.next", 0.01, only_first=True),
    "pin": Phase("slurm_train.evaluation.follower", "pin_save", 0.002, only_first=True),
    "weights": Phase("slurm_train.evaluation.follow", "load_weights", 0.03),
    "measure": Phase("slurm_train.evaluation.follow", "measure", 0.05),
    "record": Phase("slurm_train.evaluation.follower", "Follower.record", 0.004, only_first=True),
    "line": Phase("slurm_train.evaluation.follower", "append_score", 0.002, only_first=True),
    "release": Phase("slurm_train.evaluation.follower", "release_pin", 0.001, only_first=True),
}
"""Of an evaluator that follows a run."""
_ALL = {**PHASES, **FOLLOWING}

NOTE = struct.Struct("<12s12sq")
"""Fields of a `Note` in its file; the phases are filled up with zeros."""


class Moment(NamedTuple):
    """When a rank kills itself: so long after it has begun a phase for the n-th time."""

    phase: str
    nth: int
    delay_s: float


class Note(NamedTuple):
    """What a rank noted last.

    Args:
        main: phase of its main thread, "start" before the first.
        saver: phase of the thread that saves, "" outside a save.
        visible: step of the newest complete checkpoint right before it killed itself; -1 if it did not.
    """

    main: str
    saver: str
    visible: int

    @property
    def phase(self) -> str:
        """The phase that a kill counts for: what the saving thread was at, else the main thread."""
        return self.saver or self.main

    @classmethod
    def read(cls, path: Path) -> Note:
        """Reads what is noted in a file."""
        main, saver, visible = NOTE.unpack(path.read_bytes())
        return cls(main.rstrip(b"\0").decode(), saver.rstrip(b"\0").decode(), visible)

    @staticmethod
    def write_phase(memory: Any, phase: str, *, is_saver: bool) -> None:
        """Notes what one of the two threads is at."""
        start = 12 if is_saver else 0
        memory[start : start + 12] = phase.encode().ljust(12, b"\0")


def note_phases(memory: Any, *, moment: Moment | None, run: Path) -> None:
    """Makes this process note the phases that it goes through, and kill itself at a moment of them.

    Args:
        memory: a `NOTE`, mapped from a file.
        moment: None: it lives on.
        run: the run directory; which checkpoint was complete right before the kill is noted as well.
    """
    entered = 0

    def on_enter(phase: str) -> None:
        nonlocal entered
        if moment is None or phase != moment.phase:
            return
        entered += 1
        if entered == moment.nth:
            timer = threading.Timer(moment.delay_s, kill)
            timer.daemon = True
            timer.start()

    def kill() -> None:
        memory[24:32] = struct.pack("<q", newest_complete(run / "checkpoints"))
        os.kill(os.getpid(), signal.SIGKILL)

    for phase in _ALL:
        _wrap(phase, memory, on_enter)


def newest_complete(checkpoints: Path) -> int:
    """Returns the step of the newest checkpoint with a marker, 0 where there is none; reads names only."""
    try:
        names = [name for name in os.listdir(checkpoints) if "." not in name]  # noqa: PTH208
    except OSError:
        return 0
    complete = (name for name in sorted(names, reverse=True) if os.path.exists(checkpoints / name / "COMPLETE"))  # noqa: PTH110
    return int(next(complete, "checkpoint_0").split("_")[1])


def _wrap(phase: str, memory: Any, on_enter: Callable[[str], None]) -> None:
    owner: Any = importlib.import_module(_ALL[phase].module)
    *classes, name = _ALL[phase].function.split(".")
    for part in classes:
        owner = getattr(owner, part)
    real = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        is_saver = threading.current_thread().name == "checkpoint_0"
        around = _around[is_saver]
        around.append(phase)
        Note.write_phase(memory, phase, is_saver=is_saver)
        on_enter(phase)
        try:
            return real(*args, **kwargs)
        finally:
            around.pop()
            Note.write_phase(memory, around[-1], is_saver=is_saver)

    setattr(owner, name, call)


_around: dict[bool, list[str]] = {False: ["between"], True: [""]}


def main() -> None:
    """A rank that notes its phases: `moments.py FOLDER_OF_MODULES MODULES NOTES MOMENT worker RUN_DIRECTORY`."""
    import json
    import mmap
    import sys

    folder, modules, notes, moment, *_, run = sys.argv[1:]
    sys.path.insert(0, folder)
    for name in json.loads(modules):
        importlib.import_module(name)
    with Path(notes).open("r+b") as file:
        memory = mmap.mmap(file.fileno(), NOTE.size)
    asked = json.loads(moment)
    note_phases(memory, moment=Moment(*asked) if asked else None, run=Path(run))
    from slurm_train.worker.main import main as work

    sys.exit(work([run]))


if __name__ == "__main__":
    main()
