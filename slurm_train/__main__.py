"""`python -m slurm_train` and the console script `slurm-train`."""

from __future__ import annotations

import sys

from slurm_train.verbs import run


def main() -> int:
    """Runs the words of the command line and returns the exit code."""
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
