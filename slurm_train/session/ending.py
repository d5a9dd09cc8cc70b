"""The end of a rank's process: what the interpreter does at its end, short of finalizing itself.

A gloo thread may still hold Python objects of the last collective when a program's last line has run. Finalizing the
interpreter then aborts the process (torch 2.13: "terminate called without an active exception", about 1 in 12 starts
of a four-rank script on a busy machine), and a finished run would count as failed. Destroying a process group waits for
peers that may never arrive; that has blocked allocations for hours. So the program's threads are joined, its exit
functions run, its namespaces are cleared as the interpreter clears them, so that open files are written and closed, and
then the process ends by `os._exit`. Uses the standard library only.
"""

from __future__ import annotations

import _io
import atexit
import contextlib
import ctypes
import gc
import os
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import NoReturn

from slurm_train.code.imports import is_below, is_installed
from slurm_train.errors import EXIT_DONE, EXIT_REQUEUE
from slurm_train.session.signals import ignore_handled_signals

_FAILED_ENDS_WITHIN_S = 60.0
"""Longest time for the threads and exit functions of a program that has failed: its peers may wait for this rank."""
_CLOSES_WITHIN_S = 30.0
"""Longest time for the files of a program after that; a file system may not answer."""


def end_process(code: int, *, places: Iterable[str]) -> NoReturn:
    """Ends this process as the interpreter would; called in its main thread.

    The threads and exit functions of a program that has not failed may take as long as they want.

    Args:
        code: the exit code.
        places: as for `close_and_exit`.
    """
    with _exit_late(code, within_s=None if code in (EXIT_DONE, EXIT_REQUEUE) else _FAILED_ENDS_WITHIN_S):
        # The interpreter does the same at its end; both functions are private, and have existed since 3.4.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    close_and_exit(code, places=places)


def close_and_exit(code: int, *, places: Iterable[str]) -> NoReturn:
    """Writes and closes the files of the program, and ends this process; its exit functions have run.

    Args:
        code: the exit code.
        places: folders of the program's modules; `__main__` belongs to it in any case.
    """
    with _exit_late(code, within_s=_CLOSES_WITHIN_S):
        # Handlers and threads of the program go on without its names, and would fail.
        ignore_handled_signals()
        threading.excepthook = lambda _: None
        _forget_exceptions()
        _clear_namespaces([os.path.realpath(place) for place in places])
        _flush_files()
        os._exit(code)


@contextlib.contextmanager
def _exit_late(code: int, *, within_s: float | None) -> Iterator[None]:
    """Ends the process if the body takes longer, and says so; what is in buffers is written if that takes no longer."""
    is_over = threading.Event()

    def watch() -> None:
        if is_over.wait(within_s):
            return
        threads = [thread.name for thread in threading.enumerate() if not thread.daemon]
        print(
            f"slurm_train: the end of the program has taken {within_s:.0f} s, so the process ends now; it waited for "
            f"an exit function, a file, or one of the threads {', '.join(threads)}",
            file=sys.stderr,
            flush=True,
        )
        writer = threading.Thread(target=_flush_files, daemon=True)
        writer.start()
        writer.join(_CLOSES_WITHIN_S)
        os._exit(code)

    threading.Thread(target=watch, name="slurm_train end", daemon=True).start()
    yield
    is_over.set()


def _forget_exceptions() -> None:
    """Lets the variables of the functions go through which exceptions have ended the program."""
    for error in (sys.exc_info()[1], getattr(sys, "last_value", None)):
        cause = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__context__
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            setattr(sys, name, None)


def _clear_namespaces(folders: list[str]) -> None:
    """Clears the program's modules, the newest first; the others stay, since torch and running threads need them."""
    modules = [module for name, module in list(sys.modules.items()) if _is_of_program(name, module, folders)]
    gc.collect()
    for module in reversed(modules):
        # As CPython does (`_PyModule_Clear`): first the names with an underscore, then the others.
        names = [name for name in vars(module) if name != "__builtins__"]
        private = [name for name in names if name.startswith("_") and not name.startswith("__")]
        for name in [*private, *(name for name in names if name not in private)]:
            vars(module)[name] = None
    gc.collect()


def _is_of_program(name: str, module: ModuleType, folders: list[str]) -> bool:
    if name == "__main__":
        return True
    # Not by getattr: some libraries import a module when an attribute of it is asked for.
    file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    if not isinstance(file, str) or name.partition(".")[0] == "slurm_train":
        return False
    path = os.path.realpath(file)
    return not is_installed(path) and any(is_below(path, folder) for folder in folders)


def _flush_files() -> None:
    """Writes what is still in the buffers of open files, also of those of C libraries, and names those that fail."""
    # By the type: to ask an object for its class may import something.
    files = [item for item in gc.get_objects() if issubclass(type(item), _io._IOBase)]
    for file in files:
        try:
            if not file.closed and file.writable():
                file.flush()
        except ValueError:
            continue  # Its buffer has been detached.
        except Exception as err:  # whatever a class of a library raises; the other files are to be written
            with contextlib.suppress(OSError):
                name = getattr(file, "name", file)
                print(f"slurm_train: {name!r} could not be written: {err}", file=sys.stderr, flush=True)
    ctypes.CDLL(None).fflush(None)
