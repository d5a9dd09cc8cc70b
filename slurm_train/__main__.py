"""`python -m slurm_train` and the console script `slurm-train`."""

from __future__ import annotations

import os
import sys

from slurm_train.verbs import run


def main() -> int:
    """Runs the words of the command line and returns the exit code."""
    _open_closed_streams()
    return run(sys.argv[1:])


def _open_closed_streams() -> None:
    """Opens /dev/null in place of the standard streams that are closed (`>&-`), as some daemons start programs.

    Nothing could be printed, not even the id of a job that is submitted; and files of a run would get their numbers.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The lowest number that is free is that of the stream.
            stream = open(os.devnull, mode)  # noqa: PTH123, SIM115  # it stays open
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


if __name__ == "__main__":
    sys.exit(main())
