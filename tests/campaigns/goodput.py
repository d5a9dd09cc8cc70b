"""One failure a minute for so many minutes: how much of the allocated time went into steps that count.

A run of two ranks saves every few steps; in every minute one rank is killed at a moment drawn at random. The figure is
the ledger's own, as `status` shows it; what is not productive is told by cause.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.timing import goodput
from tests.campaigns.on_slurm import Tally, at_work, lines_of, newest_attempt, submit
from tests.campaigns.result import Result
from tests.support.process_faults import kill, rank_pid
from tests.support.slurm_runs import wait_until_step
from tests.support.waiting import wait_for

_WORDS = (
    "+cluster=1x2",
    "cluster.nodelist=node1",
    "train.max_steps=1000000",
    "model.step_s=0.05",
    "checkpoint.every_steps=20",
)
_MINUTE_S = 60.0
_PROMISED = 0.90
_BACK_WITHIN_S = 45.0
_NO_CAUSE = {"step_s", "queue_s", "time_unix_s", "end_time_unix_s"}


def run(*, seed: int, trials: int, folder: Path) -> Result:
    """Kills one rank a minute for `trials` minutes."""
    dice, tally = random.Random(seed), Tally()
    with at_work(folder) as person:
        _, one = submit(person, "goodput", *_WORDS)
        wait_until_step(one, 1)
        problems = [problem for minute in range(trials) if (problem := kill_once(one, minute, dice))]
        one.stop_file.touch()
        wait_for(lambda: "action" in read_ledger(one)[-1], within_s=60, what="the end of the run")
    ledger = read_ledger(one)
    share = goodput(ledger).share
    if share < _PROMISED:
        problems.append(f"goodput {share:.3f}, promised {_PROMISED}")
    if (failures := sum(entry["reason"] == "failed" for entry in ledger)) != trials:
        problems.append(f"{trials} kills, but the ledger tells of {failures} failures")
    tally.add(f"goodput {share:.3f}", problems, trials=trials)
    return tally.result(figures(ledger, trials))


def kill_once(run: RunDirectory, minute: int, dice: random.Random) -> str:
    """Kills one rank in a minute that begins now; returns at its end, with what went wrong, "" if nothing did."""
    end, struck_at_s, rank = time.monotonic() + _MINUTE_S, dice.uniform(0.0, _MINUTE_S), dice.randrange(2)
    time.sleep(struck_at_s)
    attempt = newest_attempt(run)
    try:
        pid = wait_for(lambda: find(run, rank), within_s=_BACK_WITHIN_S, what=f"a rank {rank}", poll_s=0.05)
        kill(pid)
        struck_s = time.monotonic()
        wait_for(
            lambda: any(line["attempt"] > attempt for line in lines_of(run)[-1:]),
            within_s=_BACK_WITHIN_S,
            what=f"a step after the kill in minute {minute + 1}",
        )
    except AssertionError as err:
        return str(err)
    back_s = time.monotonic() - struck_s
    print(
        f"minute {minute + 1}: rank {rank} killed after {struck_at_s:.0f} s, the next step {back_s:.1f} s later",
        flush=True,
    )
    time.sleep(max(0.0, end - time.monotonic()))
    return ""


def find(run: RunDirectory, rank: int) -> int | None:
    """Returns the process of a rank, None while there is none."""
    try:
        return rank_pid(run, rank, attempt=newest_attempt(run))
    except AssertionError:
        return None


def figures(ledger: Sequence[Mapping[str, Any]], failures: int) -> dict[str, str]:
    """Returns goodput, and what each failure cost by cause."""
    measured = goodput(ledger)
    causes = {name for entry in ledger for name in entry if name.endswith("_s")} - _NO_CAUSE
    sums = {name: sum(float(entry.get(name, 0.0)) for entry in ledger) for name in sorted(causes)}
    steps_s = sum(float(entry.get("step_s", 0.0)) for entry in ledger)
    rest_s = measured.allocated_s - steps_s - sum(sums.values()) + sums.get("lost_work_s", 0.0)
    each = {**sums, "end_and_detection_s": rest_s}
    words = [f"{name.removesuffix('_s').replace('_', ' ')} {seconds / failures:.2f}" for name, seconds in each.items()]
    return {
        "goodput": f"{measured.share:.3f} of {measured.allocated_s:.0f} s",
        "seconds per failure": ", ".join(words),
    }
