"""How an attempt failed, in the lines that `logs` and a run on this machine say before a rank's own words."""

from __future__ import annotations

from slurm_train.cli.display import note
from slurm_train.rundir.layout import RunDirectory, existing_attempts
from slurm_train.standing.failure import Failure, find_failure


def failure_lines(failure: Failure, *, rank_shown: int) -> list[str]:
    """Returns what is said before the failing rank's own words.

    Args:
        failure: how the attempt failed.
        rank_shown: the rank whose output the person has seen.
    """
    lines = [f"attempt {failure.attempt} failed: {failure.note}"]
    if failure.rank is None:
        return lines
    rank = f"rank {failure.rank}{f' on {failure.host}' if failure.host else ''}"
    if failure.log is None:
        return [*lines, f"{rank} failed first; it has no log of its own"]
    if not failure.kind:
        return [*lines, f"{rank} failed first; its log is empty"]
    if failure.rank == rank_shown and failure.kind != "stacks":
        where = "its traceback is above" if failure.kind == "traceback" else "its last lines are above"
        return [*lines, f"{rank} failed first; {where}"]
    return [*lines, f"{rank} failed first; its {failure.kind}, from {failure.log}:"]


def tell_unseen_failure(run: RunDirectory) -> None:
    """Prints what a rank said that failed first on this machine, where the terminal is rank 0's."""
    failure = find_failure(run, max(existing_attempts(run), default=0))
    if failure is not None and failure.rank and failure.excerpt:
        for line in [*failure_lines(failure, rank_shown=0)[1:], *failure.excerpt.splitlines()]:
            note(line)
