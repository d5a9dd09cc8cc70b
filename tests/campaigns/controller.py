"""slurmctld is killed again and again while runs train, save, fail and are requeued: no run is lost.

Three runs on a node each; before each kill something is begun, or not: a save, a preemption, a warning before the time
limit (the run requeues itself), a killed rank (the supervisor asks Slurm how the job stands). The controller comes back
after one to five seconds. A run that is finished gives way to another; all of them end with the golden run's weights.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.layout import RunDirectory
from slurm_train.tools.devcluster.plan import DEFAULT_STATE_DIR, ClusterPlan, load_plan
from tests.campaigns.on_slurm import PATIENCE_S, Tally, at_work, end_problems, lines_of, newest_attempt, submit, weights
from tests.campaigns.result import Result
from tests.support.command_line import Person
from tests.support.controller_faults import controller_away, kill_wait
from tests.support.process_faults import kill, rank_pid
from tests.support.waiting import wait_for

_STEPS = 400
_WORDS = ("+cluster=1x1", f"train.max_steps={_STEPS}", "model.step_s=0.1", "checkpoint.every_steps=5")
_NODES = 3
# A job that slurmctld took on less than five seconds before it was killed is not in its files yet, and is gone.
_KNOWN_AFTER_S = 6.0
# Slurm's default. A requeue is forgotten likewise, and the supervisor asks for it again as long as it lives.
_KILL_WAIT_S = 30


def run(*, seed: int, trials: int, folder: Path) -> Result:
    """Kills the controller `trials` times."""
    dice, tally = random.Random(seed), Tally()
    plan = load_plan(DEFAULT_STATE_DIR)
    assert plan is not None, "no cluster is up"
    runs: list[RunDirectory] = []
    done: Counter[str] = Counter()
    away: list[float] = []
    with kill_wait(plan, _KILL_WAIT_S), at_work(folder) as person:
        golden = weights(submit(person, "golden", *_WORDS)[1])
        current: dict[int, RunDirectory] = {}
        while tally.trials < trials:
            for node in range(1, _NODES + 1):
                if node not in current or current[node].result.exists():
                    current[node] = submitted(person, f"run-{len(runs)}", node)
                    runs.append(current[node])
            what = dice.choice(list(_BEGIN))
            problems = try_once(person, plan, current, what, dice, away)
            done[what] += 1
            tally.add(f"killed during {what}, away for {away[-1]:.1f} s" if away else what, problems)
        for number, one in enumerate(runs):
            if problems := end_problems(one, golden):
                tally.held -= 1
                tally.problems += problems
                print(f"run {number}: {'; '.join(problems)}", flush=True)
    return tally.result(
        {
            "runs": f"{len(runs)}, all ended" if not tally.problems else str(len(runs)),
            "killed": ", ".join(f"{count} during {what}" for what, count in sorted(done.items())),
            "away, median": f"{statistics.median(away):.1f} s" if away else "never",
        }
    )


def submitted(person: Person, name: str, node: int) -> RunDirectory:
    """Submits a run to a node of its own; a controller that has just come back refuses until the node reported."""

    def try_it() -> RunDirectory | None:
        with suppress(AssertionError):
            return submit(person, name, *_WORDS, f"cluster.nodelist=node{node}")[1]
        return None

    run = wait_for(try_it, within_s=60.0, what=f"a job for {name}", poll_s=2.0)
    assert run is not None
    return run


def try_once(
    person: Person,
    plan: ClusterPlan,
    runs: dict[int, RunDirectory],
    what: str,
    dice: random.Random,
    away: list[float],
) -> list[str]:
    """Begins something, kills the controller in the middle of it; returns what is wrong once all runs train again."""
    try:
        for one in runs.values():
            wait_for(partial(goes_on, one, newest_step(one)), within_s=PATIENCE_S, what=f"steps of {one.path}")
        time.sleep(_KNOWN_AFTER_S if any(is_young(one) for one in runs.values()) else 0.0)
        begun = dice.choice([one for one in runs.values() if not one.result.exists()] or [*runs.values()])
        _BEGIN[what](person, begun)
        if what != "save":
            time.sleep(dice.uniform(0.0, 3.0))
        started = time.monotonic()
        with controller_away(plan):
            time.sleep(dice.uniform(1.0, 5.0))
        away.append(time.monotonic() - started)
        for one in runs.values():
            wait_for(partial(goes_on, one, newest_step(one)), within_s=PATIENCE_S, what=f"steps of {one.path}")
    except AssertionError as err:
        # What became of them is looked at again at the end; the next trials have runs of their own.
        runs.clear()
        return [str(err).partition("\n")[0]]
    return []


def goes_on(run: RunDirectory, step: int) -> bool:
    """Returns whether a run is finished, or does steps in its newest attempt beyond the one that was the newest."""
    if run.result.exists():
        return True
    newest = lines_of(run)[-1:]
    return any(line["attempt"] == newest_attempt(run) and line["step"] != step for line in newest)


def newest_step(run: RunDirectory) -> int:
    """Returns the step that was logged last, 0 before the first."""
    return next((int(line["step"]) for line in lines_of(run)[-1:]), 0)


def is_young(run: RunDirectory) -> bool:
    """Returns whether Slurm may not have written down yet that it has started a run."""
    return time.time() - float(read_ledger(run)[0]["time_unix_s"]) < _KNOWN_AFTER_S


def begin_nothing(person: Person, run: RunDirectory) -> None:
    """Lets the run train on."""


def begin_save(person: Person, run: RunDirectory) -> None:
    """Returns when a save is under way."""

    def is_saving() -> bool:
        return run.result.exists() or any(run.checkpoints.glob("*.tmp"))

    wait_for(is_saving, within_s=PATIENCE_S, what=f"a save of {run.path}", poll_s=0.001)


def begin_preemption(person: Person, run: RunDirectory) -> None:
    """Has the run's node taken by an urgent job, and does not wait for it."""
    node = str(read_ledger(run)[-1]["nodes"][0])
    words = ("--qos=urgent", "--nodes=1", f"--nodelist={node}", "--exclusive", "--job-name=urgent")
    person.runs("sbatch", *words, "--output=/dev/null", "--wrap=true")


def begin_requeue(person: Person, run: RunDirectory) -> None:
    """Warns the rank as before a time limit: the supervisor requeues the job."""
    with suppress(AssertionError, ProcessLookupError):
        os.kill(rank_pid(run, 0, attempt=newest_attempt(run)), signal.SIGUSR2)


def begin_failure(person: Person, run: RunDirectory) -> None:
    """Kills the rank: the supervisor asks how the job stands, and starts it again."""
    with suppress(AssertionError, ProcessLookupError):
        kill(rank_pid(run, 0, attempt=newest_attempt(run)))


_BEGIN: dict[str, Callable[[Person, RunDirectory], None]] = {
    "training": begin_nothing,
    "save": begin_save,
    "preemption": begin_preemption,
    "requeue": begin_requeue,
    "failure": begin_failure,
}
