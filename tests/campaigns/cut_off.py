"""The command that submits a sweep is killed, interrupted or loses its terminal at any moment; then it is typed again.

Each trial is a sweep of six held runs in two arrays, one of one node and one of two. Afterwards Slurm's queue must
hold each run exactly once, as the sweep's own table says. The last trial lets the runs train: a driver that waits for
them (`--wait`) is killed, and the same words attach to them again.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from slurm_train.rundir.sweep import Element, SweepDirectory, read_table
from tests.campaigns.record import Tally
from tests.support.command_line import TINY, Person
from tests.support.ledgers import ledger_lines
from tests.support.slurm_runs import at_work, command, wait_until_step
from tests.support.waiting import wait_for

_SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGHUP)
_RUNS = 6
_LONGEST_S = 1.5
"""A submission takes about so long."""
_WORDS = ("-m", "+cluster=1x1,2x1", "seed=1,2,3", *TINY, "train.threads=1")


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Cuts `trials` - 1 submissions off, and one driver that waits."""
    dice, found = random.Random(seed), Counter[str]()
    with at_work(folder) as person:
        for number in range(trials - 1):
            how, after_s = dice.choice(_SIGNALS), dice.uniform(0.0, _LONGEST_S)
            words = (*_WORDS, f"run.name=cut{number}_${{cluster.nodes}}", "cluster.sbatch.hold=true")
            left = cut(person, words, how, after_s)
            found[left] += 1
            tally.add(f"{how.name} after {after_s:.2f} s, {left}", list(held_once(person, words, number)))
        tally.add("a driver that waits is killed", list(waiting_again(person)))
    return {"when it was cut off": ", ".join(f"{left} {count}" for left, count in found.most_common())}


def start(person: Person, words: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """Types the words and returns at once."""
    return subprocess.Popen(
        [person.python, "-m", "slurm_train", *words],
        cwd=person.folder,
        env=person.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def cut(person: Person, words: tuple[str, ...], how: signal.Signals, after_s: float) -> str:
    """Starts a submission, ends it, and returns what was there by then."""
    before = queue()
    process = start(person, words)
    try:
        process.wait(after_s)
        return "it was through"
    except subprocess.TimeoutExpired:
        process.send_signal(how)
        process.wait(60)
    arrays = len({job.partition("_")[0] for job in queue() - before})
    return f"{arrays} of 2 arrays in the queue"


def queue() -> set[str]:
    """Returns the elements of all arrays in Slurm's queue."""
    return set(command("squeue", "--noheader", "--array", "--format=%i").split())


def held_once(person: Person, words: tuple[str, ...], number: int) -> Iterator[str]:
    """Types the words again and yields what is wrong with the queue; cancels the runs."""
    done = person.types(*words)
    again = person.types(*words)
    if done.code or again.code or again.out:
        yield f"typed again: code {done.code}, then {again.code} and {again.out!r}: {done.err.strip()[-200:]}"
    table = table_of(person, f"cut{number}_1")
    jobs = [element.job for element in table]
    lines = command("squeue", "--noheader", "--array", "--format=%i %o", "--user=root").splitlines()
    ours = sorted(line.split()[0] for line in lines if str(person.folder) in line)
    if len(jobs) != _RUNS or sorted(str(job) for job in jobs) != ours:
        yield f"the table has {jobs}, the queue {ours}"
    command("scancel", *{job.partition("_")[0] for job in ours})
    wait_for(lambda: not queue() & set(ours), within_s=60, what="an empty queue")


def table_of(person: Person, name: str) -> list[Element]:
    """Returns the table of the sweep that has runs of this name."""
    for path in (person.folder / "runs" / "sweeps").iterdir():
        table = read_table(SweepDirectory(path))
        if table and table[0].run.name == name:
            return list(table)
    return []


def waiting_again(person: Person) -> Iterator[str]:
    """Kills a driver that waits for its runs, types the same words again, and yields what is not as it should be."""
    words = (*_WORDS, "run.name=waited_${cluster.nodes}", "model.step_s=0.5", "--wait")
    driver = start(person, words)
    try:
        wait_for(lambda: len(table_of(person, "waited_1")) == _RUNS, within_s=60, what="the sweep")
        runs = [element.run for element in table_of(person, "waited_1")]
        wait_until_step(runs[0], 3, within_s=120)
    finally:
        driver.kill()
        driver.wait()
    began_s = time.monotonic()
    done = person.types(*words, timeout_s=400)
    print(f"  attached again for {time.monotonic() - began_s:.0f} s: {done.err.strip().splitlines()[-1:]}")
    if done.code or done.out:
        yield f"typed again: code {done.code}, {done.out!r}"
    for run in runs:
        reasons = [entry.get("reason") for entry in ledger_lines(run)]
        if reasons != ["done"]:
            yield f"{run.path.name}: attempts ended with {reasons}"
