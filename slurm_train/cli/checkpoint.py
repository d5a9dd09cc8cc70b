"""`checkpoint ls RUN` and `checkpoint verify RUN`: what checkpoints a run has, and whether every byte is as written."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from slurm_train.checkpoint.directory import list_checkpoints, read_manifest, verify
from slurm_train.cli.display import note, table
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, CheckpointError
from slurm_train.rundir.lookup import find_run

_EXAMPLES = """\
examples:
  python -m slurm_train checkpoint ls gpt-stdlib
  python -m slurm_train checkpoint verify 3f9a1c07
"""


def main(words: Sequence[str]) -> int:
    """Prints the table to stdout; `verify` returns 1 if any checkpoint cannot be trusted."""
    parser = argparse.ArgumentParser(
        prog="python -m slurm_train checkpoint",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("ls", "verify"))
    parser.add_argument("run", nargs="?", metavar="RUN", help="run name, run id, job id or path; default: the newest")
    parser.add_argument("--root", default="runs", help="root of the runs (default: runs)")
    arguments = parser.parse_args(list(words))
    root = find_run(Path(arguments.root), arguments.run).checkpoints
    checkpoints = list_checkpoints(root)
    if not checkpoints:
        note(f"no checkpoint in {root}")
        return EXIT_DONE
    rows = [describe(path, check_bytes=arguments.action == "verify") for path in checkpoints]
    print(table(("CHECKPOINT", "STEP", "SAMPLES", "RANKS", "SIZE", "STATE"), rows))
    return EXIT_FAILURE if arguments.action == "verify" and any(row[-1] != "verified" for row in rows) else EXIT_DONE


def describe(path: Path, *, check_bytes: bool) -> tuple[str, ...]:
    """Returns the table row of a checkpoint.

    Args:
        path: its directory.
        check_bytes: hash every file; otherwise only the manifest is read.
    """
    try:
        manifest = verify(path) if check_bytes else read_manifest(path)
    except CheckpointError as err:
        return (path.name, "-", "-", "-", "-", err.message)
    size = sum(record.bytes for record in manifest.files.values())
    state = "verified" if check_bytes else "complete"
    counts = (str(manifest.step), str(manifest.samples), str(manifest.world_size))
    return (path.name, *counts, f"{size / 2**20:.1f} MiB", state)
