"""Submits the job arrays of a sweep, one sbatch each, and puts their ids where every reader looks for them.

An array's files are there before sbatch is called, and its name tells which sweep and which of its arrays it is. So a
submitter that is killed before it has written the id down leaves enough to find the array again.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence

from slurm_train.errors import ClusterError
from slurm_train.launch.array import ArrayPlan, render_array
from slurm_train.launch.avoidance import exclude_flags
from slurm_train.rundir.files import write_atomic
from slurm_train.rundir.jobs import record_job
from slurm_train.rundir.sweep import (
    ArrayDirectory,
    SweepDirectory,
    array_job_id,
    existing_arrays,
    read_runs,
    read_table,
    record_array,
    write_table,
)
from slurm_train.slurm.commands import SlurmCommands


def job_name(sweep: SweepDirectory, array: ArrayDirectory) -> str:
    """Returns the name of an array in Slurm, e.g. "sweep-9b1c44e0-0"."""
    return f"sweep-{sweep.sweep_id}-{array.number}"


def next_number(sweep: SweepDirectory) -> int:
    """Returns the number of the next array of a sweep."""
    return max((array.number for array in existing_arrays(sweep)), default=-1) + 1


def submit_arrays(
    sweep: SweepDirectory, plans: Sequence[ArrayPlan], *, env: Mapping[str, str]
) -> Iterator[tuple[ArrayDirectory, str]]:
    """Submits arrays one after the other and yields each with its job id; the table has it by then.

    Raises:
        ClusterError: sbatch refused one; those before it are submitted.
    """
    ids: list[str] = []
    number = next_number(sweep)
    for position, plan in enumerate(plans):
        array = sweep.array(number + position)
        script = render_array(plan, array, name=job_name(sweep, array))
        _write(array, plan, script)
        after = [f"--dependency=afterany:{ids[plan.after]}"] if plan.after is not None else []
        try:
            ids.append(_submit(array, script, flags=[*after, *exclude_flags(script, plan.runs[0], env)], env=env))
        except ClusterError as err:
            shutil.rmtree(array.path)
            raise _refused(err, plans, position) from err
        keep_job_id(sweep, array, ids[-1])
        yield array, ids[-1]


def keep_job_id(sweep: SweepDirectory, array: ArrayDirectory, job_id: str) -> None:
    """Writes an array's id down: beside its script, in the sweep's table, and in each of its runs."""
    write_atomic(array.job, json.dumps({"job_id": job_id, "submit_time_unix_s": time.time()}) + "\n")
    write_table(sweep, record_array(read_table(sweep), array, job_id))
    for task, run in enumerate(read_runs(array)):
        record_job(run, f"{job_id}_{task}", durable=False)


def find_lost_arrays(sweep: SweepDirectory, commands: SlurmCommands) -> list[str]:
    """Looks in Slurm for arrays whose ids were never written down, writes them down and returns them.

    An array that Slurm does not know was not submitted, or is over; its files go.

    Raises:
        ClusterError: Slurm does not answer.
    """
    lost = [array for array in existing_arrays(sweep) if array_job_id(array) is None]
    if not lost:
        return []
    known = commands.named_jobs(job_name(sweep, array) for array in lost)
    found = []
    for array in lost:
        # A sweep of the same runs may lie below another root: the script's path tells the two apart.
        ids = [job_id for (name, script), job_id in known.items() if _is_of(array, sweep, name, script)]
        if ids:
            keep_job_id(sweep, array, ids[-1])
            found.append(ids[-1])
        else:
            shutil.rmtree(array.path)
    return found


def _is_of(array: ArrayDirectory, sweep: SweepDirectory, name: str, script: str) -> bool:
    return name == job_name(sweep, array) and script.startswith(f"{array.path}/")


def _write(array: ArrayDirectory, plan: ArrayPlan, script: str) -> None:
    array.logs.mkdir(mode=0o700, parents=True)
    write_atomic(array.runs, "".join(f"{run.path}\n" for run in plan.runs))
    write_atomic(array.script, script, mode=0o700)


def _submit(array: ArrayDirectory, script: str, *, flags: Sequence[str], env: Mapping[str, str]) -> str:
    from slurm_train.launch.submission import submit_script

    return submit_script(script, folder=array.path / "submitted", env=env, flags=flags)


def _refused(err: ClusterError, plans: Sequence[ArrayPlan], position: int) -> ClusterError:
    if position == 0:
        return err
    done, left = (sum(len(plan.runs) for plan in part) for part in (plans[:position], plans[position:]))
    return ClusterError(
        f"{err.message}; {done} runs are submitted, {left} are not",
        hint="the same command again submits those that are missing; where a limit on jobs is the reason, later",
    )
