"""Runs a user's script as `__main__` and ends the process when it has ended, without tearing the interpreter down.

A gloo thread may still hold Python objects of the last collective when a script's last line has run; finalising the
interpreter then aborts the process (torch 2.13: "terminate called without an active exception", about 1 in 12 starts
of a four-rank script on a busy machine), and a finished run would count as failed. So the script's own threads are
joined and its atexit functions run as always, and then the process ends. Started by path, with the run directory
before the script and its arguments.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import threading
import traceback
from types import TracebackType


def main() -> None:
    """Runs the script named by the second argument; never returns."""
    sys.argv = sys.argv[1:]
    import_from_copy(sys.argv.pop(0))
    script = sys.argv[0]
    sys.path.insert(0, os.path.dirname(script))  # noqa: PTH120  # sys.path holds strings
    code = run(script)
    # What the interpreter does first when it ends by itself; both are private, and have been there since 3.4.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def import_from_copy(run_directory: str) -> None:
    """Has the script import the user's packages from the run's copy of the code; the worker has said so already."""
    # The first entry is the folder of this file; the package itself is found from its parent, wherever that is.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
    from slurm_train.launch.imports import take_snapshot

    del sys.path[0]
    take_snapshot(run_directory, python_path="")


def run(script: str) -> int:
    """Runs a script to its end and returns its exit code; an exception is printed as Python would."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return _exit_code(end)
    except BaseException as err:
        traceback.print_exception(type(err), err, _from_script(err.__traceback__, script))
        return 130 if isinstance(err, KeyboardInterrupt) else 1
    return 0


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _from_script(trace: TracebackType | None, script: str) -> TracebackType | None:
    """Returns the part of a traceback that begins in the script, without the lines of what ran it."""
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main()
