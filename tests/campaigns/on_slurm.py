"""What the campaigns on the one-machine cluster share: tiny runs, a tally, and what a fault must not have cost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_train.checkpoint.directory import read_manifest
from slurm_train.errors import CheckpointError
from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.files import read_lines
from slurm_train.rundir.layout import RunDirectory, list_checkpoints, name_of
from tests.campaigns.result import Result
from tests.support.command_line import TINY, Person, new_project
from tests.support.slurm_runs import job_state, wait_until_finished
from tests.support.waiting import wait_for

PATIENCE_S = 240.0


@dataclass(slots=True)
class Tally:
    """Counts trials and says each one; a trial with a problem is kept, and the campaign goes on."""

    trials: int = 0
    held: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, what: str, problems: Sequence[str] = (), *, trials: int = 1) -> None:
        """Takes note of a trial, or of several that share one outcome."""
        self.trials += trials
        self.held += 0 if problems else trials
        words = [what] if trials == 1 else [f"{trials} trials: {what}"]
        self.problems += [f"{words[0]}: {problem}" for problem in problems]
        print(f"{self.trials}. {': '.join([*words, *problems])}", flush=True)

    def result(self, figures: Mapping[str, str]) -> Result:
        """Returns what was found."""
        return Result(trials=self.trials, held=self.held, figures=dict(figures), problems=tuple(self.problems))


@dataclass(frozen=True, slots=True)
class Seen:
    """What was looked at right before a fault."""

    attempt: int
    committed: int
    """The newest step with a valid COMPLETE; 0 before the first."""


@contextmanager
def at_work(folder: Path) -> Iterator[Person]:
    """Gives somebody in a folder with the tiny model; their jobs are cancelled at the end, whatever happened."""
    person = Person(new_project(folder / "project"))
    try:
        yield person
    finally:
        for path in person.folder.glob("runs/*/*/job.json"):
            with suppress(OSError, ValueError, KeyError):
                person.runs("scancel", "--quiet", *json.loads(path.read_text())["job_ids"])


def submit(person: Person, name: str, *words: str) -> tuple[str, RunDirectory]:
    """Submits a tiny run that logs every step, and returns job and run."""
    return person.types(*TINY, "train.threads=1", f"run.name={name}", *words).job_and_run


def newest_commit(run: RunDirectory) -> int:
    """Returns the newest step that was durably saved at this moment: its COMPLETE holds its manifest's hash."""
    for path in list_checkpoints(run.checkpoints):
        with suppress(CheckpointError):
            read_manifest(path)
            return name_of(path).step
    return 0


def look(run: RunDirectory, attempt: int) -> Seen:
    """Looks at a run; call it right before the fault."""
    return Seen(attempt, newest_commit(run))


def newest_attempt(run: RunDirectory) -> int:
    """Returns the number of the newest attempt, -1 before the first."""
    return int(read_ledger(run)[-1]["attempt"]) if read_ledger(run) else -1


def lines_of(run: RunDirectory) -> list[dict[str, Any]]:
    """Returns every step's line of metrics.jsonl, superseded ones too."""
    return [line for line in read_lines(run.metrics) if "loss" in line and "attempt" in line]


def spans(lines: Iterable[Mapping[str, Any]]) -> dict[int, tuple[int, int]]:
    """Returns by attempt the step that it resumed from and the last one that it did; every step must be logged."""
    found: dict[int, tuple[int, int]] = {}
    for line in lines:
        step, attempt = int(line["step"]), int(line["attempt"])
        first, last = found.get(attempt, (step - 1, step))
        found[attempt] = (min(first, step - 1), max(last, step))
    return found


def lost_commits(seen: Sequence[Seen], steps: Mapping[int, tuple[int, int]]) -> list[str]:
    """Returns where a later attempt resumed before a step that was committed earlier; empty if none did.

    Args:
        seen: what was looked at before each fault, oldest first.
        steps: the step that each attempt resumed from and its last one; absent where it made none.
    """
    found = [
        f"attempt {attempt} resumed from step {first}, but step {before.committed} was committed before attempt "
        f"{before.attempt} was struck"
        for before in seen
        for attempt, (first, _) in steps.items()
        if attempt > before.attempt and first < before.committed
    ]
    pairs = itertools.pairwise(seen)
    return found + [
        f"step {early.committed} was committed in attempt {early.attempt}, only {late.committed} in attempt "
        f"{late.attempt}"
        for early, late in pairs
        if late.committed < early.committed
    ]


def lost_steps(steps: Mapping[int, tuple[int, int]], attempt: int) -> int | None:
    """Returns how many steps of an attempt were done again by those after it; None where no later one trained."""
    later = [first for number, (first, _) in steps.items() if number > attempt]
    return max(0, steps[attempt][1] - min(later)) if later and attempt in steps else None


def weights(run: RunDirectory, *, within_s: float = PATIENCE_S) -> str:
    """Waits for the end of a run and returns the digest of its weights.

    Raises:
        AssertionError: it did not end in time, or stopped before its end.
    """
    return str(wait_until_finished(run, within_s=within_s)["weights_digest"])


def end_problems(run: RunDirectory, golden: str, *, within_s: float = PATIENCE_S) -> list[str]:
    """Waits for the end of a run; returns what is wrong with it."""
    try:
        digest = weights(run, within_s=within_s)
    except AssertionError as err:
        return [f"{run.path} did not finish: {str(err).partition(chr(10))[0]}"]
    return [] if digest == golden else [f"{run.path} ends with weights {digest}, the golden run with {golden}"]


def take_nodes(person: Person, nodes: str, *, num_nodes: int) -> None:
    """Preempts whatever runs on some nodes ("node[1-4]") with an urgent job that takes them whole, and ends at once.

    Returns when that job has ended; the runs are on their way back then.

    Raises:
        AssertionError: the urgent job did not run.
    """
    words = ("--qos=urgent", f"--nodes={num_nodes}", f"--nodelist={nodes}", "--exclusive", "--parsable")
    done = person.runs("sbatch", *words, "--job-name=urgent", "--output=/dev/null", "--wrap=true")
    assert done.code == 0, f"no urgent job on {nodes}: {done.err}"
    job = done.out.strip()
    # `sbatch --wait` looks only every half minute.
    wait_for(lambda: job_state(job) == "COMPLETED", within_s=PATIENCE_S, what=f"the end of the urgent job {job}")
