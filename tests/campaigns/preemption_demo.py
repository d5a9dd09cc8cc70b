"""One run is left alone; its twin is preempted, loses a node and loses a rank. Both end with the same bits.

    python -m tests.campaigns.preemption_demo [--steps 600]

Trains scikit-learn's digits on 2 nodes x 4 ranks of the one-machine cluster (`python -m slurm_train devcluster up`).
Compares loss, learning rate, gradient norm and sample digest of every step, also of those done twice, and the
final weights; prints the ledger and ends with 1 if anything differs. The node that is crashed is started again.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from slurm_train.formatting import table
from slurm_train.rundir.timing import goodput
from slurm_train.tools.devcluster.cluster import crash_node, start_node
from slurm_train.tools.devcluster.plan import DEFAULT_STATE_DIR
from tests.campaigns.checker import History, read_history, unlike_golden
from tests.campaigns.victims import Victim
from tests.support.cluster_faults import start_urgent_job
from tests.support.command_line import Person
from tests.support.process_faults import kill
from tests.support.slurm_runs import wait_until_finished, wait_until_step

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
_SHOWN = ("attempt", "nodes", "first_step", "last_step", "reason", "action", "queue_s", "start_s", "step_s")
_PATIENCE_S = 400.0


def main() -> int:
    """Runs both and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    steps = parser.parse_args().steps
    person = Person(Path(tempfile.mkdtemp(prefix="slurm_train-demo-")))
    words = (*_WORDS, f"train.max_steps={steps}")
    golden = _finished(person, "golden", words)
    say(f"golden run: {steps} steps, nothing happened to it")
    run = person.types(*words, "run.name=disturbed").job_and_run[1]
    disturb(Victim(run=run, person=person, dice=random.Random()), steps)
    wait_until_finished(run, within_s=_PATIENCE_S)
    disturbed = read_history(run)
    rows = [[_shown(entry.get(name, "-")) for name in (*_SHOWN, "lost_work_s", "note")] for entry in disturbed.ledger]
    print(table([name.upper() for name in (*_SHOWN, "lost_work_s", "note")], rows))
    measured = goodput(disturbed.ledger)
    say(f"goodput {measured.share:.0%}: {measured.productive_s:.0f} s of steps in {measured.allocated_s:.0f} s")
    differences = list(unlike_golden(disturbed, golden))
    for difference in differences[:5]:
        say(f"DIFFERENT: {difference}")
    say(f"{len(differences)} differences in {steps} steps and the weights" if differences else "equal bit for bit")
    return int(bool(differences))


def _finished(person: Person, name: str, words: tuple[str, ...]) -> History:
    run = person.types(*words, f"run.name={name}").job_and_run[1]
    wait_until_finished(run, within_s=_PATIENCE_S)
    return read_history(run)


def disturb(victim: Victim, steps: int) -> None:
    """Preempts the run, crashes its first node, kills a rank: each in a quarter of its own."""
    _strike_at(victim, steps // 4, "an urgent job takes its nodes")
    start_urgent_job(victim.nodes)
    victim.wait_for_attempt(after=0)
    _strike_at(victim, steps // 2, "its first node crashes, with the supervisor on it")
    node = victim.nodes[0]
    crash_node(DEFAULT_STATE_DIR, node=node)
    try:
        victim.wait_for_attempt(after=1)
        _strike_at(victim, 3 * steps // 4, "rank 5 is killed")
        kill(victim.pid(5))
        victim.wait_for_attempt(after=2)
    finally:
        start_node(DEFAULT_STATE_DIR, node=node)


def _strike_at(victim: Victim, step: int, what: str) -> None:
    wait_until_step(victim.run, step, within_s=_PATIENCE_S)
    say(f"step {victim.step}: {what}")


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def say(text: str) -> None:
    """Prints a line with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
