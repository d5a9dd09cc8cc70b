"""Twenty pairs of jobs, both of a pair on the same two nodes at the same time: none may meet the other's ranks.

    python -m tests.campaigns.port_pairs [--pairs 20]

Needs a Slurm cluster with two nodes (`python -m slurm_train devcluster up`). Prints a line per pair and ends with 1 if
any job did not finish in its first attempt, with its own two ranks.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.layout import RunDirectory
from tests.support.command_line import TINY, Person, new_project
from tests.support.slurm_runs import wait_until_finished

_WORDS = ("+cluster=2x1", *TINY, "cluster.nodelist=node[1-2]", "model.step_s=0.05")


def main() -> int:
    """Runs the pairs one after the other and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    pairs = parser.parse_args().pairs
    folder = Path(tempfile.mkdtemp(prefix="slurm_train-ports-"))
    person = Person(new_project(folder))
    bad = 0
    for number in range(pairs):
        runs = [person.types(*_WORDS, f"seed={2 * number + one}").job_and_run[1] for one in range(2)]
        problems = [problem for run in runs if (problem := what_is_wrong(run))]
        overlap = "" if at_once(runs) else " (not at the same time)"
        print(f"pair {number + 1}: {'; '.join(problems) or 'both finished'}{overlap}", flush=True)
        bad += bool(problems)
    print(f"{pairs - bad} of {pairs} pairs did not disturb each other")
    if not bad:
        shutil.rmtree(folder)
    return int(bad > 0)


def what_is_wrong(run: RunDirectory) -> str:
    """Returns why a run is not as it should be, "" if it is."""
    try:
        result = wait_until_finished(run)
    except AssertionError as err:
        return str(err).partition("\n")[0]
    ledger = read_ledger(run)
    return "" if (result["world_size"], len(ledger)) == (2, 1) else f"{run.path}: {result}, {len(ledger)} attempts"


def at_once(runs: list[RunDirectory]) -> bool:
    """Returns whether the runs' only attempts overlapped in time."""
    entries = [entry for run in runs for entry in read_ledger(run)]
    spans = [(entry["time_unix_s"], entry.get("end_time_unix_s", float("inf"))) for entry in entries]
    return max(start for start, _ in spans) < min(end for _, end in spans)


if __name__ == "__main__":
    sys.exit(main())
