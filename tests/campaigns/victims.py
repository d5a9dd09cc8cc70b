"""Runs on the one-machine Slurm that are struck on purpose: how they are submitted, when they are struck, and by what.

A victim trains `counted.Net` on `counted.Samples`, so that every optimizer step leaves the samples that it was given.
Whatever was done to it, its history must be that of its golden run, which nobody struck (`checker.check`).
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from slurm_train.rundir.files import read_lines
from slurm_train.rundir.paths import RunDirectory
from tests.campaigns.checker import History, Look, check, look, read_history
from tests.support.cluster_faults import controller_away, daemons_stopped, node_down, start_urgent_job
from tests.support.command_line import Person
from tests.support.ledgers import ledger_lines
from tests.support.process_faults import is_alive, kill, rank_pid, srun_pid, stepd_pid, supervisor_pid
from tests.support.slurm_runs import all_logs, command, wait_for_state, wait_until_finished
from tests.support.waiting import wait_for

PATIENCE_S = 240.0
NUM_SAMPLES = 97
COUNTED_MODULE = Path(__file__).with_name("counted.py")
COUNTED = (
    "model._target_=counted.Net",
    "data._target_=counted.Samples",
    f"data.size={NUM_SAMPLES}",
    "train.log_every_steps=1",
    "train.samples_digest=true",
    "train.sample_tokens=0",
    "train.threads=1",
    "batch.global_size=8",
)
UNSHARED = "callbacks=[{_target_:counted.Unshared}]"
"""Word for state that the ranks do not share."""


@dataclass(slots=True, kw_only=True)
class Victim:
    """A run that is struck, and who may type `resume`."""

    run: RunDirectory
    person: Person
    dice: random.Random
    faults: list[str] = field(default_factory=list)
    seen: list[Look] = field(default_factory=list)
    """Its checkpoints right before each fault, and what else was looked at."""

    @classmethod
    def submit(cls, person: Person, dice: random.Random, name: str, *words: str) -> Victim:
        """Submits a run."""
        shutil.copy(COUNTED_MODULE, person.folder)
        run = person.types(*COUNTED, "train.eval_every_steps=null", f"run.name={name}", *words).job_and_run[1]
        return cls(run=run, person=person, dice=dice)

    @property
    def ledger(self) -> list[dict[str, Any]]:
        """Its attempts."""
        return list(ledger_lines(self.run))

    @property
    def attempt(self) -> int:
        """Number of the newest attempt, -1 before the first."""
        return newest_attempt(self.run)

    @property
    def job(self) -> str:
        """The job of the newest attempt."""
        return str(self.ledger[-1]["job_id"])

    @property
    def nodes(self) -> list[str]:
        """The nodes of the newest attempt."""
        return list(map(str, self.ledger[-1]["nodes"]))

    @property
    def step(self) -> int:
        """The newest step of the newest attempt, 0 before its first."""
        (newest,) = lines_of(self.run)[-1:] or [{"attempt": None}]
        return int(newest["step"]) if newest["attempt"] == self.attempt else 0

    @property
    def is_finished(self) -> bool:
        """Whether it has a result."""
        return self.run.result.exists()

    def pid(self, rank: int) -> int:
        """Returns the process of a rank of the newest attempt."""
        return rank_pid(self.run, rank, attempt=self.attempt)

    def note(self, what: str) -> None:
        """Looks at the checkpoints right before a fault, which is on record from now on."""
        self.seen.append(look(self.run))
        self.faults.append(what)

    def wait_for_attempt(self, after: int) -> None:
        """Returns when a newer attempt than this one has begun, or the run is finished."""
        wait_for(
            lambda: self.attempt > after or self.is_finished,
            within_s=PATIENCE_S,
            what=f"an attempt of {self.run.path} after {after}",
            poll_s=0.02,
        )

    def wait_for_steps(self, count: int, *, after: int = -1) -> None:
        """Returns when the newest attempt, a newer one than `after`, has done so many steps, or the run is finished."""

        def done() -> bool:
            newest = self.attempt
            return self.is_finished or (
                newest > after and sum(line["attempt"] == newest for line in lines_of(self.run)) >= count
            )

        wait_for(done, within_s=PATIENCE_S, what=f"{count} steps of {self.run.path} after attempt {after}")

    def history(self) -> History:
        """Waits for the end and returns the history, as far as it came where it did not end."""
        with suppress(AssertionError):
            wait_until_finished(self.run, within_s=2 * PATIENCE_S)
        return read_history(self.run, seen=self.seen, faults=self.faults)

    def problems(self, golden: History) -> list[str]:
        """Waits for the end and returns what is wrong with the whole history."""
        found = check(self.history(), golden=golden, num_samples=NUM_SAMPLES)
        if found and not self.is_finished:
            print(all_logs(self.run)[-3000:])
        return [f"{self.run.name}: {problem}" for problem in found[:20]]


def golden_run(person: Person, name: str, *words: str) -> History:
    """Trains a run that nobody strikes, and returns its history."""
    victim = Victim.submit(person, random.Random(), name, *words)
    wait_until_finished(victim.run, within_s=2 * PATIENCE_S)
    return read_history(victim.run)


@dataclass(slots=True, kw_only=True)
class Fleet:
    """Runs that go on at the same time, a place each; one that has finished gives way to another."""

    person: Person
    dice: random.Random
    words: tuple[str, ...]
    places: Sequence[tuple[str, ...]]
    """Words of each place, e.g. its node."""
    all: list[Victim] = field(default_factory=list)
    current: dict[int, Victim] = field(default_factory=dict)

    def fill(self) -> list[Victim]:
        """Submits what is missing and returns the runs under way, in the order of their places."""
        for place, words in enumerate(self.places):
            if place not in self.current or self.current[place].is_finished:
                self.current[place] = self._submit(f"run-{len(self.all)}", words)
                self.all.append(self.current[place])
        return [self.current[place] for place in range(len(self.places))]

    def _submit(self, name: str, words: tuple[str, ...]) -> Victim:
        def try_it() -> Victim | None:
            # A controller that has just come back refuses until the node has reported.
            with suppress(AssertionError):
                return Victim.submit(self.person, self.dice, name, *self.words, *words)
            return None

        victim = wait_for(try_it, within_s=60.0, what=f"a job for {name}", poll_s=2.0)
        assert victim is not None
        return victim


def newest_attempt(run: RunDirectory) -> int:
    """Returns the number of the newest attempt, -1 before the first."""
    ledger = ledger_lines(run)
    return int(ledger[-1]["attempt"]) if ledger else -1


def lines_of(run: RunDirectory) -> list[dict[str, Any]]:
    """Returns every step's line of metrics.jsonl, superseded ones too."""
    return [line for line in read_lines(run.metrics) if "loss" in line and "attempt" in line]


def lost_steps(history: History, attempt: int) -> int | None:
    """Returns how many steps of an attempt were done again by those after it; None where no later one trained.

    What an attempt did after its successor was open is not its loss.
    """
    until_unix_s = min((at for number, at in history.opened_unix_s.items() if number > attempt), default=0.0)
    own = [line["step"] for line in history.lines if line["attempt"] == attempt and line["time_unix_s"] < until_unix_s]
    later = [line["step"] for line in history.lines if line["attempt"] > attempt]
    return max(0, max(own, default=0) - min(later) + 1) if later and own else None


def figures_of(histories: Sequence[History]) -> dict[str, str]:
    """Returns what was done to some runs, and what it cost them."""
    struck = Counter(fault for history in histories for fault in history.faults)
    ends = Counter(str(entry.get("reason", "none")) for history in histories for entry in history.ledger)
    again = [lost_steps(one, number) for one in histories for number in range(len(one.started) - 1)]
    known = [steps for steps in again if steps is not None]
    away = [
        after["time_unix_s"] - before["end_time_unix_s"]
        for one in histories
        for before, after in pairwise(one.ledger)
        if "end_time_unix_s" in before
    ]
    return {
        "runs": str(len(histories)),
        "struck by": in_words(struck),
        "attempts ended as": in_words(ends),
        "steps done again per attempt": f"{mean(known):.1f}, at most {max(known)}" if known else "none",
        "from an attempt to the next": f"{median(away):.1f} s (median), at most {max(away):.1f} s" if away else "none",
    }


def in_words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))


# Moments: where a process is when it is killed.


def wait_for_moment(victim: Victim, moment: str, *, share: float, pid: int, last_step: int) -> bool:
    """Waits for a moment of an attempt; returns whether the process is still there then.

    Args:
        victim: the run.
        moment: one of `MOMENTS`, or "exit", when the last step is on record.
        share: where in the moment, from 0 to 1.
        pid: the process.
        last_step: of the run.
    """
    if moment in ("start", "rendezvous"):
        # Imports take the first second; ranks meet, load and build in the second one.
        time.sleep(share if moment == "start" else 0.8 + 1.7 * share)
        return is_alive(pid)
    deadline, attempt, known = time.monotonic() + PATIENCE_S, victim.attempt, _names(victim.run)
    saves = {_save_id(name) for name in known}

    def has_come() -> bool:
        if moment in ("step", "exit"):
            last = lines_of(victim.run)[-1:]
            return any(line["step"] == last_step if moment == "exit" else line["attempt"] == attempt for line in last)
        names = _names(victim.run)
        # A new attempt renames what it goes on from; the id of the save stays.
        if moment == "prune":
            gone = saves - {_save_id(name) for name in names}
            saves.update(_save_id(name) for name in names)
            return bool(gone)
        new = [name for name in names if name.startswith("checkpoint_") and _save_id(name) not in saves]
        return any(name.endswith(".tmp") == (moment == "save") for name in new)

    while is_alive(pid) and time.monotonic() < deadline:
        if has_come():
            time.sleep({"step": share, "exit": 0.5 * share}.get(moment, 0.0))
            return is_alive(pid)
        time.sleep(0.01 if moment in ("step", "exit") else 0.0005)
    return False


MOMENTS = ("start", "rendezvous", "step", "step", "save", "commit", "prune")


def _save_id(name: str) -> str:
    return name.removesuffix(".tmp").rpartition("_")[2]


def _names(run: RunDirectory) -> set[str]:
    try:
        return set(os.listdir(run.checkpoints))  # noqa: PTH208  # names are enough, a thousand times a second
    except FileNotFoundError:
        return set()


# Faults: what is done to a run; each is undone where it would outlast the run.


def _kill_a_rank(victim: Victim) -> None:
    kill(victim.pid(victim.dice.randrange(1, max(2, victim.ledger[-1]["world_size"]))))


def _cancel_and_resume(victim: Victim) -> None:
    _end_and_resume(victim, lambda: command("scancel", victim.job), "CANCELLED")


def _kill_the_batch_script(victim: Victim) -> None:
    _end_and_resume(victim, lambda: kill(supervisor_pid(victim.run)), "FAILED")


def _end_and_resume(victim: Victim, end: Callable[[], object], state: str) -> None:
    job = victim.job
    end()
    wait_for_state(job, state, within_s=PATIENCE_S)
    resumed = victim.person.types("resume", victim.run.name)
    assert resumed.code == 0, resumed.err


def _warn_of_the_limit(victim: Victim) -> None:
    # What `--signal=USR2@...` does before a time limit.
    with suppress(AssertionError, ProcessLookupError):
        for rank in range(victim.ledger[-1]["world_size"]):
            os.kill(victim.pid(rank), signal.SIGUSR2)


def _until_another_attempt(fault: AbstractContextManager[None], victim: Victim) -> None:
    with fault:
        victim.wait_for_attempt(after=victim.attempt)


def _kill_slurmctld_and_a_rank(victim: Victim) -> None:
    with controller_away():
        _kill_a_rank(victim)
        time.sleep(victim.dice.uniform(1.0, 3.0))


FAULTS: dict[str, Callable[[Victim], object]] = {
    "rank killed": _kill_a_rank,
    "rank 0 killed": lambda victim: kill(victim.pid(0)),
    "srun killed": lambda victim: kill(srun_pid(victim.run)),
    "slurmstepd killed": lambda victim: kill(stepd_pid(victim.run, attempt=victim.attempt)),
    "batch script killed, resumed": _kill_the_batch_script,
    "cancelled, resumed": _cancel_and_resume,
    "preempted": lambda victim: start_urgent_job(victim.nodes),
    "requeued": lambda victim: command("scontrol", "requeue", victim.job),
    "warned of the limit": _warn_of_the_limit,
    # The ranks live on for a while, beside their successors.
    "slurmd stopped": lambda victim: _until_another_attempt(
        daemons_stopped([victim.dice.choice(victim.nodes)]), victim
    ),
    "node down": lambda victim: _until_another_attempt(node_down(victim.dice.choice(victim.nodes)), victim),
    "slurmctld and a rank killed": _kill_slurmctld_and_a_rank,
}
