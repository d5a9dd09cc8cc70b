"""Where runs go that are ready to start: into Slurm's queue, an allocation of one's own, or this machine."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from slurm_train.cli.terminal import answer, note
from slurm_train.code.job_python import with_absolute_python_path
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE
from slurm_train.request.acceptance import salloc_words
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.job_variables import scrubbed
from slurm_train.start.start import Batch, Starter
from slurm_train.status.activity import wait_for_runs


class Destination(Protocol):
    """Where runs are started."""

    def begin(self, batch: Batch) -> int | None:
        """Does what has to be done while the runs are held; returns the exit code where that was all."""

    def finish(self, batch: Batch) -> int:
        """Does the rest, and returns the exit code."""


def carry_out(preparing: AbstractContextManager[Batch]) -> int:
    """Starts runs where their configuration says, and returns the exit code.

    Args:
        preparing: makes them ready: `Starter.fresh`, `Starter.as_written`, `fresh_sweep` or `sweep_as_written`.

    Raises:
        SlurmTrainError: something is wrong with the site or one of the runs; nothing was written then.
    """
    with preparing as batch:
        destination: Destination = MyAllocation()
        if batch.config.is_submitted:
            destination = SlurmQueue()
        elif not batch.requests:
            destination = Here()
        code = destination.begin(batch)
    return destination.finish(batch) if code is None else code


class SlurmQueue:
    """Slurm's queue; prints `<job id> <directory>` for each job."""

    def begin(self, batch: Batch) -> None:
        """See `Destination`."""
        for job_id in batch.submit():
            if batch.sweep is None:
                note(_after_submission(batch.elements[0].run, is_as_written=batch.is_as_written))
            answer(f"{job_id} {batch.path}")

    def finish(self, batch: Batch) -> int:
        """See `Destination`."""
        batch.write_provenance()
        return EXIT_DONE


def _after_submission(run: RunDirectory, *, is_as_written: bool) -> str:
    if is_as_written:
        return f"submitted again; it continues from the newest verified checkpoint in {run.checkpoints}"
    words = "\n".join(f"  python -m slurm_train {verb} {run.run_id}" for verb in ("status", "logs -f", "cancel"))
    return f"submitted; next:\n{words}"


class MyAllocation:
    """An allocation that a person waits for: that of the shell's job, or else a new one."""

    def begin(self, batch: Batch) -> None:
        """See `Destination`."""
        batch.write_provenance()

    def finish(self, batch: Batch) -> int:
        """See `Destination`."""
        from slurm_train.cli.here import attend

        ((run, request),) = batch.requests
        env = batch.start.env
        if "SLURM_JOB_ID" in env:
            words = ["bash", str(run.submit_script)]
        else:
            words = salloc_words(request, run.submit_script, batch.start.exclude_flags(request, run))
            env = scrubbed(env)
        return attend(run, words, env=with_absolute_python_path(env, Path.cwd()))


class Here:
    """This machine."""

    def begin(self, batch: Batch) -> int | None:
        """See `Destination`."""
        batch.write_provenance()
        if batch.sweep is None:
            return None
        from slurm_train.cli.here import train_each

        answer(f"- {batch.path}")
        num_parallel = batch.config.sweep.max_parallel or 1
        return train_each(batch.sweep, batch.elements, num_parallel=num_parallel, env=batch.start.env)

    def finish(self, batch: Batch) -> int:
        """See `Destination`."""
        from slurm_train.cli.here import train_here

        return train_here(batch.elements[0].run, env=batch.start.env)


def wait_for_sweep(start: Starter, runs: list[RunDirectory], *, sweep_id: str) -> int:
    """Waits until no run of a sweep is active any more; returns 0 if all are finished, else 1."""
    is_finished = wait_for_runs(runs, start.commands, say=note, see=sweep_id)
    return EXIT_DONE if is_finished else EXIT_FAILURE
