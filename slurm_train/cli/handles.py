"""Runs as Python values, for notebooks and scripts: `slurm_train.submit([...])`, `slurm_train.find(word)`.

The words are those of the command line, and what they do is done by the same code as there; only nothing is printed.
A handle has no state but its folder, so it may be made again at any time, and may be used in another process.
Every error is one of `slurm_train.errors`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from slurm_train.cli.run import begin
from slurm_train.cli.terminal import quiet
from slurm_train.errors import EXIT_DONE, ConfigError, RunError, TimedOutError
from slurm_train.rundir.files import read_json
from slurm_train.rundir.jobs import read_job
from slurm_train.rundir.lookup import find_run, find_sweep, root_of
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.sweep import Element, SweepDirectory, read_table
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.start.cancel import cancel_run, cancel_sweep
from slurm_train.status.logs import choose_log
from slurm_train.status.run_status import RunStatus, until_over
from slurm_train.status.selection import build_surveyor
from slurm_train.trust import read_text
from slurm_train.verbs import DEFAULT_ROOT

if TYPE_CHECKING:
    from slurm_train.cli.on import RemoteRun

_POLL_S = 5.0


@dataclass(frozen=True, slots=True)
class Run:
    """A run that was submitted at some time."""

    path: Path
    """Its directory."""

    @property
    def run_id(self) -> str:
        """What `status`, `logs` and the other verbs call it, e.g. "3f9a1c07e2d4"."""
        return self._files.run_id

    @property
    def job_id(self) -> str | None:
        """Its newest job in Slurm; None if it never had one."""
        record = read_job(self._files)
        return None if record is None else record.job_id

    def status(self) -> RunStatus:
        """Returns what is known now: `state`, `note`, `step`, `loss` and so on; `as_json()` has all of it."""
        return _look([Element(run=self._files)])[0]

    def wait(self, *, timeout_s: float | None = None) -> RunStatus:
        """Returns the status when the run has ended, however it has; a requeued run has not.

        The files are read every few seconds. Slurm is asked less often.

        Args:
            timeout_s: None: without limit.

        Raises:
            TimedOutError: it has not ended by then, and goes on.
        """
        return _wait([Element(run=self._files)], timeout_s)[0]

    def result(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Waits, and returns the final measures: `result.json`, e.g. {"step": 1000, "eval_loss": 1.25, ...}.

        Args:
            timeout_s: as for `wait`.

        Raises:
            RunError: it ended without a result, with the reason.
            TimedOutError: as for `wait`.
        """
        return _result_of(self.wait(timeout_s=timeout_s))

    def logs(self, *, rank: int = 0, attempt: int | None = None) -> str:
        """Returns the log of a rank, or of the batch script while the rank has none; "" before there is one.

        Args:
            rank: -1: the batch script.
            attempt: None: the newest.

        Raises:
            RunError: there was no such attempt.
        """
        log = choose_log(self._files, attempt=attempt, rank=rank)
        return "" if log is None else read_text(log.path, errors="replace")

    def cancel(self) -> None:
        """Ends its jobs; `python -m slurm_train resume` continues it.

        Raises:
            RunError: nothing of it is queued or running.
            ClusterError: Slurm refused.
        """
        cancel_run(self._files, SlurmCommands(os.environ))

    @property
    def _files(self) -> RunDirectory:
        return RunDirectory(self.path)


@dataclass(frozen=True, slots=True)
class Sweep:
    """The runs of one `-m`, in the order of their values; its methods do what those of `Run` do, for all of them."""

    path: Path
    """Its directory."""

    @property
    def sweep_id(self) -> str:
        """What the verbs call it, e.g. "9b1c44e0"."""
        return self._files.sweep_id

    @property
    def runs(self) -> list[Run]:
        """Its runs; `status()[i].subject.overrides` says what run i was given."""
        return [Run(subject.run.path) for subject in self._subjects]

    def status(self) -> list[RunStatus]:
        """Returns the status of each run."""
        return _look(self._subjects)

    def wait(self, *, timeout_s: float | None = None) -> list[RunStatus]:
        """Returns the status of each run when all have ended; `timeout_s` as for a run."""
        return _wait(self._subjects, timeout_s)

    def result(self, *, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """Waits, and returns the final measures of each run; the first that has none is an error."""
        return [_result_of(status) for status in self.wait(timeout_s=timeout_s)]

    def cancel(self) -> None:
        """Ends the jobs of all runs that are active."""
        cancel_sweep(self._files, SlurmCommands(os.environ))

    @property
    def _files(self) -> SweepDirectory:
        return SweepDirectory(self.path)

    @property
    def _subjects(self) -> list[Element]:
        return read_table(self._files)


@overload
def submit(
    words: Sequence[str], *, after: Sequence[Run | Sweep] = (), verbose: bool = False, on: None = None
) -> Run | Sweep: ...


@overload
def submit(words: Sequence[str], *, after: Sequence[RemoteRun] = (), verbose: bool = False, on: str) -> RemoteRun: ...


def submit(
    words: Sequence[str],
    *,
    after: Sequence[Run | Sweep | RemoteRun] = (),
    verbose: bool = False,
    on: str | None = None,
) -> Run | Sweep | RemoteRun:
    """Submits the run of a command line, e.g. ["+cluster=2x4", "optim.lr=3e-4"], and returns it; with "-m" a sweep.

    A run that is finished is returned as it is.

    Args:
        words: those of a command line, one text each.
        after: what Slurm waits for, as `after=RUN`: it starts when all of these have finished. They are of the same
            machine.
        verbose: print the plan and the notes, as the command line does.
        on: the login node to submit on by ssh, HOST or HOST:FOLDER; None: this machine.

    Raises:
        ConfigError: a word is wrong, or the run would be trained here.
        ClusterError: Slurm is absent or refuses.
        RunError: the run is active already, or would not be the same training.
    """
    elsewhere = next((run for run in after if getattr(run, "on", None) != on), None)
    if elsewhere is not None:
        raise ConfigError(
            f"after={elsewhere.path} is not a run of {on or 'this machine'}, whose Slurm does not know its job",
            hint="wait() for it first, or submit both in one place",
        )
    words = [*words, *(f"after={run.path}" for run in after)]
    if on is not None:
        from slurm_train.cli.on import submit_there

        return submit_there(on, words, verbose=verbose)
    with nullcontext() if verbose else quiet():
        _, directory = begin(words, only_submits=True)
    assert directory is not None, "what was submitted has a directory"
    return Run(directory.path) if isinstance(directory, RunDirectory) else Sweep(directory.path)


def main(words: Sequence[str]) -> int:
    """Submits, for a program on another machine; prints the directory as JSON and returns 0."""
    verbose = words[:1] == ["--verbose"]
    print(json.dumps(str(submit(words[int(verbose) :], verbose=verbose).path)))
    return EXIT_DONE


def find(word: str, *, root: str | None = None) -> Run | Sweep:
    """Returns an existing run or sweep by its id, job id, name (the newest run of that name) or path.

    Args:
        word: as said; an id is looked for in all folders that you have started runs in, a name in this one.
        root: the only folder to look in; default: `runs`, and those folders.

    Raises:
        RunError: there is none.
    """
    place = root_of(word, Path(DEFAULT_ROOT), os.environ) if root is None else Path(root)
    sweep = find_sweep(place, word)
    return Run(find_run(place, word).path) if sweep is None else Sweep(sweep.path)


def _look(subjects: Sequence[Element]) -> list[RunStatus]:
    return list(build_surveyor(os.environ).look(subjects).statuses)


def _wait(subjects: Sequence[Element], timeout_s: float | None) -> list[RunStatus]:
    surveyor = build_surveyor(os.environ)
    deadline_s = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)

    def sleep(seconds: float) -> None:
        time.sleep(max(0.0, min(seconds, deadline_s - time.monotonic())))

    statuses: Sequence[RunStatus] = ()
    for survey in until_over(lambda: surveyor.look(subjects), every_s=_POLL_S, sleep=sleep):
        statuses = survey.statuses
        active = [status for status in survey.statuses if status.is_active]
        if not survey.is_over and time.monotonic() >= deadline_s:
            which = f"{active[0].label} is {active[0].state.label}" if active else "Slurm does not answer"
            raise TimedOutError(
                f"not ended within {timeout_s:g} s: {which}", hint="wait() again, or cancel(); the run goes on"
            )
    return list(statuses)


def _result_of(status: RunStatus) -> dict[str, Any]:
    result = read_json(status.run.result)
    if result is None:
        why = ": ".join(filter(None, [status.state.label, status.note]))
        raise RunError(
            f"{status.label} ended without a result: {why}",
            hint=f"logs() shows more; `resume {status.run.run_id}` continues it",
        )
    return result
