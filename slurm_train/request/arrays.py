"""The job arrays of a sweep: which run is an element of which array, their scripts, and their submission.

An element is a run, or with `sweep.pack` a pack: that many runs side by side in one allocation of one node.

The elements of an array have the same resources, so runs of another shape go into another array, and no array has more
elements than the site's MaxArraySize. Elements are numbered from 0; a file next to the script says which run an element
is. The element then executes the run's own `submit.sh`, like a run that was submitted alone. If a site accepts no job
arrays, each run is a separate job, with the same files as an array of one run.

An array's files are written before sbatch is called. So if a submitter is killed before it has recorded the job id, the
array can still be found by the path of its script.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from slurm_train.assets import read_template
from slurm_train.config.schema import SweepSection
from slurm_train.errors import EXIT_REQUEUE, ClusterError
from slurm_train.formatting import count
from slurm_train.plan.plan import RunPlan
from slurm_train.request.acceptance import exclude_flags, require_acceptable, slurm_verdict
from slurm_train.rundir.files import for_each, write_atomic
from slurm_train.rundir.jobs import number_of, record_job, write_request
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.removal import remove_tree
from slurm_train.rundir.sweep import (
    ArrayDirectory,
    SweepDirectory,
    array_job_id,
    element_jobs,
    existing_arrays,
    read_table,
    record_array,
    write_table,
)
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.flags import Flags
from slurm_train.slurm.job_request import JobRequest, directives
from slurm_train.trust import read_text

_DEFAULT_MAX_ARRAY_SIZE = 1001
# Flags of a run's job that its array replaces by its own.
_OWN_FLAGS = ("job-name", "output", "array")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPlan:
    """One job array as it would be submitted."""

    runs: tuple[RunDirectory, ...]
    """Element i is the run at position i, or the i-th pack of them."""
    components: tuple[Flags, ...]
    """The flags that its runs have in common; they request the resources of one run."""
    pack: int = 1
    """Runs that share the allocation of an element."""
    runs_per_gpu: int = 1
    """Runs of a pack that share a GPU; more than 1 only where a run has one GPU."""
    throttle: int | None = None
    """Elements that may run at once; None: as many as there is room for."""
    predecessor: int | None = None
    """Position of the array whose end it waits for."""
    name_prefix: str = ""
    """Prefix of its name that the site requires."""
    is_alone: bool = False
    """Whether it is a plain job for its one run or pack, for a site that accepts no arrays."""

    @property
    def num_elements(self) -> int:
        """Number of jobs."""
        return math.ceil(len(self.runs) / self.pack)

    @property
    def num_gpu_shares(self) -> int:
        """Number of GPUs of an element, in units of the GPUs of one run."""
        return math.ceil(self.pack / self.runs_per_gpu)


def max_array_size(settings: Mapping[str, str]) -> int:
    """Returns how many elements an array may have at a site, from `scontrol show config`; 0: no arrays."""
    limit = settings.get("MaxArraySize", "")
    # The setting is a limit of the index, which counts from 0, so it is also the number of elements.
    size = int(limit) if limit.isdigit() else _DEFAULT_MAX_ARRAY_SIZE
    count = re.search(r"\bmax_array_tasks=(\d+)", settings.get("SchedulerParameters", ""))
    if count is not None:
        size = min(size, int(count[1]))
    return size


def cut_arrays(
    requests: Sequence[tuple[RunDirectory, JobRequest]],
    *,
    max_size: int,
    max_parallel: int | None,
    pack: int = 1,
    runs_per_gpu: int = 1,
) -> list[ArrayPlan]:
    """Returns the arrays for runs with their own requests, in the order in which they are to be submitted.

    Slurm throttles each array separately and has no throttle over several, so a limit is divided among them. Arrays
    beyond the limit wait for the end of an earlier one, so that never more than the limit run.

    Args:
        requests: each run with its request.
        max_size: elements that an array may have; 0: each run is a job of its own.
        max_parallel: runs of the whole sweep that may run at once, at least a pack; None: no limit.
        pack: runs that share the allocation of an element.
        runs_per_gpu: of these, runs that share a GPU.
    """
    by_shape: dict[tuple[str, str], list[RunDirectory]] = {}
    components: dict[str, tuple[Flags, ...]] = {}
    for run, request in requests:
        shared = _shared(request)
        shape = directives(shared)
        components[shape] = shared
        by_shape.setdefault((_name_prefix(request, run), shape), []).append(run)
    arrays: list[ArrayPlan] = []
    for (prefix, shape), runs in by_shape.items():
        # Fewer runs than a pack request only what they need.
        unlimited = ArrayPlan(
            runs=tuple(runs),
            components=components[shape],
            pack=min(pack, len(runs)),
            runs_per_gpu=runs_per_gpu,
            name_prefix=prefix,
            is_alone=max_size == 0,
        )
        step = max(1, max_size) * unlimited.pack
        arrays += [replace(unlimited, runs=unlimited.runs[start : start + step]) for start in range(0, len(runs), step)]
    if max_parallel is None:
        return arrays
    most_elements = max(1, max_parallel // pack)
    num_lanes = min(most_elements, len(arrays))
    shares = _split(most_elements, [array.num_elements for array in arrays[:num_lanes]])
    return [
        replace(
            array,
            throttle=min(shares[position % num_lanes], array.num_elements),
            predecessor=position - num_lanes if position >= num_lanes else None,
        )
        for position, array in enumerate(arrays)
    ]


def _shared(request: JobRequest) -> tuple[Flags, ...]:
    """Returns the flags of a run's job that its array has, too."""
    first = {name: value for name, value in request.flags.items() if name not in _OWN_FLAGS}
    return (first, *request.components[1:])


def _name_prefix(request: JobRequest, run: RunDirectory) -> str:
    """Returns the prefix before a run's own name in the name of its job."""
    name = f"{run.name}-{run.run_id}"
    return request.name.removesuffix(name) if request.name.endswith(name) else ""


def _split(total: int, weights: Sequence[int]) -> list[int]:
    """Returns whole numbers of at least 1 that add up to `total`, as close to the weights as possible."""
    shares = [1] * len(weights)
    for _ in range(total - len(weights)):
        neediest = max(range(len(weights)), key=lambda position: weights[position] / shares[position])
        shares[neediest] += 1
    return shares


def array_request(plan: ArrayPlan, sweep: SweepDirectory, number: int) -> JobRequest:
    """Returns the job of a sweep's array of this number."""
    array = sweep.array(number)
    name = f"{plan.name_prefix}sweep-{sweep.sweep_id}-{number}"
    spec = f"0-{plan.num_elements - 1}" + (f"%{plan.throttle}" if plan.throttle is not None else "")
    own_flags: Flags = {"job-name": name, "array": spec, "output": str(array.logs / "%a.log")}
    if plan.is_alone:
        own_flags = {"job-name": name, "output": str(array.logs / "0.log")}
    first, *others = map(partial(_packed, plan=plan), plan.components)
    components = (own_flags | first, *others)
    packs = f", {plan.pack} in a job" if plan.pack > 1 else ""
    # A run with GPUs of its own does not need their number.
    gpus = f"/{plan.num_gpu_shares}" if plan.runs_per_gpu > 1 else ""
    script = read_template("pack.sh" if plan.pack > 1 else "array.sh").format(
        title=f"{name}: {count(len(plan.runs), 'run')}{packs}",
        index="0" if plan.is_alone else "${SLURM_ARRAY_TASK_ID:?this script is for sbatch}",
        sbatch=directives(components),
        runs=shlex.quote(str(array.runs)),
        pack=plan.pack,
        gpus=gpus,
        requeue=EXIT_REQUEUE,
    )
    return JobRequest(components=components, pack=plan.pack, script=script)


_COUNTED = re.compile(r"(?P<before>(?:.*:)?)(?P<number>[0-9]+)(?P<after>G?)")


def _packed(flags: Flags, *, plan: ArrayPlan) -> Flags:
    """Returns the flags that request the resources of a pack, on one node."""
    factors = {
        **dict.fromkeys(("ntasks", "ntasks-per-node", "mem"), plan.pack),
        **dict.fromkeys(("gpus-per-node", "gres"), plan.num_gpu_shares),
    }
    packed: Flags = {}
    for name, value in flags.items():
        if name == "gpus-per-task" and plan.pack > 1 and plan.runs_per_gpu > 1:
            # There are more tasks than GPUs.
            name = "gpus-per-node"
        counted = _COUNTED.fullmatch(str(value)) if name in factors else None
        if counted is not None:
            value = f"{counted['before']}{int(counted['number']) * factors[name]}{counted['after']}"
        packed[name] = value
    return packed


def next_number(sweep: SweepDirectory) -> int:
    """Returns the number of the next array of a sweep."""
    return max((array.number for array in existing_arrays(sweep)), default=-1) + 1


def plan_arrays(
    sweep: SweepDirectory,
    requests: Sequence[tuple[RunDirectory, JobRequest]],
    commands: SlurmCommands,
    *,
    limits: SweepSection,
    example: RunPlan | None = None,
) -> list[ArrayPlan]:
    """Returns the arrays for the runs; Slurm would accept each shape.

    Args:
        sweep: the sweep.
        requests: each run with its request.
        commands: Slurm.
        limits: how many of the runs may run at once, and share a job and a GPU.
        example: a run of the sweep, to explain a refusal.

    Raises:
        ClusterError: Slurm would not accept them.
    """
    if not requests:
        return []
    max_size = max_array_size(commands.show_config())
    cut = partial(
        cut_arrays,
        requests,
        max_parallel=limits.max_parallel,
        pack=limits.pack,
        runs_per_gpu=limits.runs_per_gpu,
    )
    arrays = cut(max_size=max_size)
    # A limit on submitted jobs counts the elements of all arrays, so Slurm is asked first about the largest possible
    # array.
    largest = arrays[0]
    if not largest.is_alone:
        largest = replace(largest, runs=tuple(run for run, _ in requests)[: max_size * largest.pack], throttle=None)
    try:
        _require_all_acceptable([largest, *arrays], sweep, commands, example)
    except ClusterError:
        if not refuses_arrays(largest, sweep, commands):
            raise
        arrays = cut(max_size=0)
        _require_all_acceptable(arrays, sweep, commands, example)
    return arrays


def _require_all_acceptable(
    arrays: Sequence[ArrayPlan], sweep: SweepDirectory, commands: SlurmCommands, example: RunPlan | None
) -> None:
    """Refuses arrays that Slurm would not accept; of each shape only the first array is tested."""
    by_shape = {directives(array.components): array for array in reversed(arrays)}
    for array in reversed(by_shape.values()):
        request = array_request(array, sweep, next_number(sweep))
        try:
            require_acceptable(request, commands, example if array is arrays[0] else None)
        except ClusterError as err:
            if _are_too_many(array, sweep, commands):
                raise ClusterError(err.message, hint=_hint_for_fewer(array)) from err
            if array.pack == 1:
                raise
            asked = f"a pack asks for {array.pack} runs' GPUs, CPUs and memory on one node"
            raise ClusterError(err.message, hint=f"{asked}: lower sweep.pack; else {err.hint}") from err


def _are_too_many(plan: ArrayPlan, sweep: SweepDirectory, commands: SlurmCommands) -> bool:
    """Returns whether Slurm refuses an array, and would accept one of its elements: a limit counts them."""
    if plan.num_elements == 1:
        return False
    first = replace(plan, runs=plan.runs[: plan.pack], throttle=None)
    number = next_number(sweep)
    return [_is_accepted(array, sweep, number, commands) for array in (plan, first)] == [False, True]


def _is_accepted(plan: ArrayPlan, sweep: SweepDirectory, number: int, commands: SlurmCommands) -> bool:
    return slurm_verdict(array_request(plan, sweep, number).text(), commands).is_accepted


def _hint_for_fewer(plan: ArrayPlan) -> str:
    return (
        f"Slurm counts {plan.num_elements} jobs, waiting ones too, and would take fewer: sweep fewer values at a time "
        "(with more values later, only the runs that are missing are submitted), or let several runs share a job with "
        "sweep.pack=N"
    )


def refuses_arrays(plan: ArrayPlan, sweep: SweepDirectory, commands: SlurmCommands) -> bool:
    """Returns whether Slurm would accept a run of an array as a plain job, but not as an array of one element.

    Raises:
        ClusterError: no answer from the controller.
    """
    if plan.is_alone:
        return False
    listed = replace(plan, runs=plan.runs[: plan.pack], throttle=None)
    alone = replace(listed, is_alone=True)
    number = next_number(sweep)
    return [_is_accepted(array, sweep, number, commands) for array in (listed, alone)] == [False, True]


def submit_arrays(
    sweep: SweepDirectory, plans: Sequence[ArrayPlan], *, env: Mapping[str, str], depends: str = ""
) -> Iterator[str]:
    """Submits arrays one after the other and yields their job ids, each after it is in the table.

    Args:
        sweep: the sweep.
        plans: its arrays.
        env: the environment.
        depends: the dependency of all of them, e.g. "afterok:12"; "" for nothing.

    Raises:
        ClusterError: sbatch refused an array; those before it are submitted.
    """
    from slurm_train.request.submission import UnreadAnswer, submit_request

    # Before an array is in the queue: what it says is recorded with each.
    cluster = SlurmCommands(env).cluster
    ids: list[str] = []
    for number, plan in enumerate(plans, next_number(sweep)):
        array = sweep.array(number)
        request = array_request(plan, sweep, number)
        array.logs.mkdir(mode=0o700, parents=True)
        write_atomic(array.runs, "".join(f"{run.path}\n" for run in plan.runs))
        write_request(array.script, request)
        write_atomic(array.cluster, f"{cluster}\n")
        dependencies = [] if not depends else [depends]
        if plan.predecessor is not None:
            dependencies.append(f"afterany:{ids[plan.predecessor]}")
        flags = []
        if dependencies:
            # A flag on the command line replaces the runs' own cluster.sbatch.dependency in the script.
            dependencies.append(str(request.flags.get("dependency", "")))
            flags = [f"--dependency={','.join(filter(None, dependencies))}"]
        flags += exclude_flags(request, plan.runs[0], env)[0]
        try:
            ids.append(submit_request(request, folder=array.path / "submitted", env=env, flags=flags))
        except ClusterError as err:
            # An array that may be in the queue keeps its files.
            if isinstance(err, UnreadAnswer):
                write_atomic(array.unread, f"{err.message}\n")
            else:
                remove_tree(array.path)
            if not ids and plan.num_elements > 1 and not isinstance(err, UnreadAnswer):
                hint = f"{err.hint}; where it is the number: {_hint_for_fewer(plan)}"
                raise ClusterError(err.message, hint=hint) from err
            if not ids:
                raise
            num_submitted = sum(len(submitted.runs) for submitted in plans[: len(ids)])
            num_missing = sum(len(missing.runs) for missing in plans[len(ids) :])
            raise ClusterError(
                f"{err.message}; {num_submitted} runs are submitted, {num_missing} are not",
                hint="the same command submits those that are missing; where a limit on jobs is the reason, later",
            ) from err
        _record(sweep, array, ids[-1], cluster=cluster)
        yield ids[-1]


def _record(sweep: SweepDirectory, array: ArrayDirectory, job_id: str, *, cluster: str) -> None:
    """Writes an array's id down: next to its script, in the sweep's table, and in each of its runs."""
    write_atomic(array.job, json.dumps({"job_id": job_id, "submit_time_unix_s": time.time()}) + "\n")
    write_table(sweep, record_array(read_table(sweep), array, job_id))
    jobs = element_jobs(array, job_id)
    is_packed = JobRequest.read(array.script).pack > 1

    def record(pair: tuple[RunDirectory, str]) -> None:
        run, element = pair
        record_job(run, element, cluster=cluster, durable=False, is_packed=is_packed)

    for_each(record, jobs.items())


def _lies_in(script: str, folder: Path) -> bool:
    # When the script was submitted, the path of the folder may have been another one, through a link.
    return os.path.realpath(script).startswith(f"{os.path.realpath(folder)}/")


def find_lost_arrays(sweep: SweepDirectory, commands: SlurmCommands) -> list[str]:
    """Searches Slurm for arrays whose ids were never recorded, records the ids and returns them.

    An array that Slurm does not know was not submitted, or has ended; its files are removed, unless Slurm may have it
    under another script (a wrapper may have submitted a copy), or another cluster may have it.

    Raises:
        ClusterError: Slurm does not answer.
    """
    lost = [array for array in existing_arrays(sweep) if array_job_id(array) is None]
    scripts = commands.own_scripts() if lost else {}
    found_ids = []
    for array in lost:
        # An array's script lies in its own folder, where no other user's script is.
        ids = {number_of(job_id) for job_id, script in scripts.items() if _lies_in(script, array.path)}
        if ids:
            _record(sweep, array, str(max(ids)), cluster=commands.cluster)
            found_ids.append(str(max(ids)))
        elif not array.unread.exists() and _cluster_of(array) in ("", commands.cluster):
            remove_tree(array.path)
    return found_ids


def _cluster_of(array: ArrayDirectory) -> str:
    """Returns the cluster to which an array was submitted, "" where that is not known."""
    return read_text(array.cluster).strip() if array.cluster.exists() else ""
