"""Carries out a start for the verbs: as a job, in an allocation, or on this machine; prints where it went."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_train.cli.terminal import answer, note
from slurm_train.code.job_python import with_absolute_python_path
from slurm_train.code.snapshot import Source
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE
from slurm_train.plan.plan import RunPlan
from slurm_train.request.acceptance import require_slurm, salloc_words
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.job_variables import scrubbed
from slurm_train.start.start import Start
from slurm_train.status.activity import wait_for_runs

if TYPE_CHECKING:
    from slurm_train.start.start_sweep import PreparedSweep


def start_run(start: Start, plan: RunPlan, source: Source | RunDirectory | None) -> int:
    """Submits a run, or trains it on this machine or in an allocation; returns the exit code.

    Args:
        start: how it is started.
        plan: the run.
        source: as for `Start.submit`.

    Raises:
        ClusterError: no Slurm here, it refuses the request, or the allocation is too small.
        RunError: the run is active already, or it would not be the same training.
    """
    config = plan.config
    run = plan.run
    if config.cluster is not None and config.launch == "slurm":
        job_id = start.submit(plan, source)
        note(f"submitted; next:\n  python -m slurm_train status {run.run_id}")
        note(f"  python -m slurm_train logs -f {run.run_id}\n  python -m slurm_train cancel {run.run_id}")
        answer(f"{job_id} {run.path}")
        start.write_provenance(run.provenance, source, config)
        return EXIT_DONE
    # Refuses `after=`, which needs a job.
    start.dependency(config, run.place)
    if config.cluster is None:
        from slurm_train.cli.here import train_here

        start.write(plan, source)
        return train_here(run, config, world_size=plan.world.size, env=start.env)
    from slurm_train.cli.here import attend

    require_slurm(start.commands, start.env)
    request = start.write(plan, source, inside=start.env.get("SLURM_JOB_ID"))
    if "SLURM_JOB_ID" in start.env:
        env = with_absolute_python_path(start.env, Path.cwd())
        return attend(run, ["bash", str(run.submit_script)], env=env)
    assert request is not None
    words = salloc_words(plan, start.exclude_flags(request, run))
    return attend(run, words, env=with_absolute_python_path(scrubbed(start.env), Path.cwd()))


def start_sweep(preparing: AbstractContextManager[PreparedSweep]) -> int:
    """Submits the runs of a prepared sweep, or trains them on this machine; returns the exit code.

    Prints `<array job id> <sweep directory>` per array.

    Args:
        preparing: `prepare_sweep` or `prepare_resumed_sweep`.

    Raises:
        SlurmTrainError: something is wrong with the site or one of the runs; nothing was written then.
    """
    with preparing as prepared:
        for job_id in prepared.submit():
            answer(f"{job_id} {prepared.sweep.path}")
        prepared.write_provenance()
        if prepared.config.cluster is not None:
            return EXIT_DONE
        from slurm_train.cli.here import train_each

        answer(f"- {prepared.sweep.path}")
        num_parallel = prepared.config.sweep.max_parallel or 1
        return train_each(prepared.sweep, prepared.elements, num_parallel=num_parallel, env=prepared.start.env)


def wait_for_sweep(start: Start, runs: list[RunDirectory], *, sweep_id: str) -> int:
    """Waits until no run of a sweep is active any more; returns 0 if all are finished, else 1."""
    is_finished = wait_for_runs(runs, start.commands, say=note, see=sweep_id)
    return EXIT_DONE if is_finished else EXIT_FAILURE
