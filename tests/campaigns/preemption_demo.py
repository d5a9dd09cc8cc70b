"""One run is left alone; its twin is preempted, loses a node and loses a rank. Both end with the same bits.

    python -m tests.campaigns.preemption_demo [--steps 600]

Trains scikit-learn's digits on 2 nodes x 4 ranks of the one-machine cluster (`python -m slurm_train devcluster up`).
Compares loss, learning rate, gradient norm and sample digest of every step, also of those done twice, and the
final weights; prints the ledger and ends with 1 if anything differs. The node that is crashed is started again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from slurm_train.formatting import table
from slurm_train.metrics.writer import read_metrics
from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.timing import goodput
from slurm_train.tools.devcluster.cluster import crash_node, start_node
from slurm_train.tools.devcluster.plan import DEFAULT_STATE_DIR
from tests.support.command_line import Person
from tests.support.process_faults import kill, rank_pid
from tests.support.slurm_runs import losses, wait_until_finished, wait_until_step
from tests.support.waiting import wait_for

_WORDS = (
    "experiment=digits",
    "+cluster=2x4",
    "model.dropout=0.1",
    "train.threads=1",
    "train.deterministic=true",
    "train.samples_digest=true",
    "train.log_every_steps=1",
    "train.eval_every_steps=null",
    "checkpoint.every_steps=50",
)
_COMPARED = ("loss", "lr", "grad_norm", "samples", "samples_digest")
_PATIENCE_S = 400.0


def main() -> int:
    """Runs both and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    steps = parser.parse_args().steps
    person = Person(Path(tempfile.mkdtemp(prefix="slurm_train-demo-")))
    golden = submit(person, "golden", steps)
    wait_until_finished(golden, within_s=_PATIENCE_S)
    say(f"golden run: {steps} steps, nothing happened to it; {golden.path}")
    disturbed = submit(person, "disturbed", steps)
    disturb(person, disturbed, steps)
    wait_until_finished(disturbed, within_s=_PATIENCE_S)
    wait_for(lambda: "reason" in read_ledger(disturbed)[-1], within_s=60, what="the ledger's last line")
    print_ledger(disturbed)
    differences = compare(golden, disturbed)
    for difference in differences[:5]:
        say(f"DIFFERENT: {difference}")
    if len(differences) > 5:
        say(f"and {len(differences) - 5} more differences")
    if not differences:
        digest = read_result(golden)["weights_digest"]
        say(f"equal bit for bit: {steps} steps of {', '.join(_COMPARED)}, and the weights ({digest})")
    return 1 if differences else 0


def submit(person: Person, name: str, steps: int) -> RunDirectory:
    """Submits the run under a name and returns it."""
    return person.types(*_WORDS, f"train.max_steps={steps}", f"run.name={name}").job_and_run[1]


def disturb(person: Person, run: RunDirectory, steps: int) -> None:
    """Preempts the run, crashes its first node, kills a rank: each in a quarter of its own."""
    wait_until_step(run, steps // 4, within_s=_PATIENCE_S)
    say(f"step {newest(run)}: an urgent job takes all nodes")
    person.runs("sbatch", "--qos=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    wait_for_attempt(run, 1)
    wait_until_step(run, steps // 2, within_s=_PATIENCE_S)
    node = str(read_ledger(run)[-1]["nodes"][0])
    say(f"step {newest(run)}: {node} crashes, with the supervisor on it")
    crash_node(DEFAULT_STATE_DIR, node=node)
    try:
        wait_for_attempt(run, 2)
        wait_until_step(run, 3 * steps // 4, within_s=_PATIENCE_S)
        say(f"step {newest(run)}: rank 5 is killed")
        kill(rank_pid(run, 5, attempt=int(read_ledger(run)[-1]["attempt"])))
        wait_for_attempt(run, 3)
    finally:
        start_node(DEFAULT_STATE_DIR, node=node)


def wait_for_attempt(run: RunDirectory, attempt: int) -> None:
    """Returns when an attempt has begun."""
    wait_for(
        lambda: read_ledger(run)[-1]["attempt"] >= attempt,
        within_s=_PATIENCE_S,
        what=f"attempt {attempt} of {run.path}",
    )


def compare(golden: RunDirectory, disturbed: RunDirectory) -> list[str]:
    """Returns what differs; every line of a step must be the golden run's, also where it was done twice."""
    expected = {line["step"]: line for line in read_metrics(golden.metrics) if "loss" in line}
    lines = [line for line in read_metrics(disturbed.metrics) if "loss" in line]
    found = [
        f"step {line['step']} {name}: {line[name]!r}, golden {expected[line['step']][name]!r}"
        for line in lines
        for name in _COMPARED
        if line[name] != expected[line["step"]][name]
    ]
    if {line["step"] for line in lines} != expected.keys():
        found.append("the steps on record")
    weights = [read_result(run)["weights_digest"] for run in (golden, disturbed)]
    if weights[0] != weights[1]:
        found.append(f"weights: {weights[1]}, golden {weights[0]}")
    return found


def print_ledger(run: RunDirectory) -> None:
    """Prints the ledger as a table."""
    names = ("attempt", "nodes", "first_step", "last_step", "reason", "action", "queue_s", "start_s", "step_s")
    names += ("checkpoint_stall_s", "lost_work_s", "note")
    ledger = read_ledger(run)
    print(
        table([name.upper() for name in names], [[shown(entry.get(name, "-")) for name in names] for entry in ledger])
    )
    measured = goodput(ledger)
    say(f"goodput {measured.share:.0%}: {measured.productive_s:.0f} s of steps in {measured.allocated_s:.0f} s")


def shown(value: Any) -> str:
    """Returns a value of the ledger for people."""
    if isinstance(value, list):
        return ",".join(str(item) for item in value)
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def read_result(run: RunDirectory) -> dict[str, Any]:
    """Returns a finished run's result."""
    result: dict[str, Any] = json.loads(run.result.read_text())
    return result


def newest(run: RunDirectory) -> int:
    """Returns the newest step on record."""
    return max(losses(run))


def say(text: str) -> None:
    """Prints a line with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.TimeoutExpired as err:
        sys.exit(str(err))
