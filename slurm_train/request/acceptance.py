"""Asks Slurm, before anything is written, whether it would accept a job; finds nodes that the job should leave out.

A refusal is explained by the keys of the configuration. For runs in an allocation of one's own this module checks that
the allocation is large enough, and makes the command that creates one.
"""

from __future__ import annotations

import contextlib
import difflib
import operator
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TypeVar

from slurm_train.code.job_python import is_in_container
from slurm_train.config.schema import RunConfig
from slurm_train.errors import ClusterError
from slurm_train.plan.cpu_part import CpuPart
from slurm_train.plan.plan import RunPlan
from slurm_train.request.batch_script import chosen_step_flags, job_request
from slurm_train.rundir.events import BAD_NODES_PARTS, BadNode, list_file, read_bad_nodes
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.allocation import parse_nodelist
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.flags import check_flag_name
from slurm_train.slurm.job_limits import (
    Demand,
    Obstacle,
    demand_of,
    limits_unknown,
    longest_limit_min,
    obstacles,
    partitions_that_are_down,
)
from slurm_train.slurm.job_request import JobRequest
from slurm_train.slurm.policy import Partition, chosen_partitions, duration_s, expedites_requeues, tres_gpus
from slurm_train.slurm.records import unix_s
from slurm_train.slurm.refusals import Refusal, TestVerdict
from slurm_train.slurm.site import SiteFacts, site_of

T = TypeVar("T")

# Flags of batch scripts only; salloc does not know them, and an allocation is not requeued.
_OF_BATCH = frozenset({"chdir", "output", "error", "open-mode", "requeue", "no-requeue", "export"})
_ABOUT_LIMITS = frozenset(
    {
        *(Refusal.POLICY, Refusal.TIME_LIMIT, Refusal.NODES, Refusal.RESOURCES, Refusal.CPUS, Refusal.ACCOUNT),
        *(Refusal.QOS, Refusal.PARTITION_ACCOUNT, Refusal.PARTITION_QOS),
    }
)
_ABOUT_NODES = (Refusal.RESOURCES, Refusal.NODES, Refusal.CPUS, Refusal.GPUS, Refusal.SITE, Refusal.OTHER)
_ABOUT_GPUS = re.compile("gpu|gres|generic resource", re.IGNORECASE)
_CLUSTER_VARIABLES = ("SBATCH_CLUSTERS", "SALLOC_CLUSTERS", "SLURM_CLUSTERS")
_UNKNOWN_OPTION = re.compile(r"unrecognized option '--([^'=]+)")
_NEAR = 0.85
"""How alike a misspelt option is to the one that is meant; "container-env" (pyxis) is 0.82 to "container"."""


def require_slurm(commands: SlurmCommands, env: Mapping[str, str]) -> None:
    """Refuses if there are no Slurm commands, in a federation, or if the environment asks for another cluster.

    Raises:
        ClusterError: sbatch is not on the PATH, the cluster is one of a federation, or SLURM_CLUSTERS or the like names
            another cluster.
    """
    if not commands.is_available() and is_in_container(env):
        raise ClusterError(
            "a cluster was asked for, and the container that this Python runs in has no Slurm (no sbatch on the PATH)",
            hint="type this with a Python outside of the container, or mount Slurm's commands, their libraries, "
            "/etc/slurm and munge's socket into it",
        )
    if not commands.is_available():
        raise ClusterError(
            "a cluster was asked for, but there is no Slurm here (no sbatch on the PATH)",
            hint="type this on a login node, or drop +cluster to train on this machine; "
            "to try Slurm on one machine: `python -m slurm_train devcluster up`",
        )
    federation = commands.federation()
    if federation:
        raise ClusterError(
            f"this cluster is one of the federation {federation}: a job may start on any of them, and status, cancel "
            "and requeues ask this one alone",
            hint="runs are not submitted to federations; use a cluster that is in none",
        )
    for name in _CLUSTER_VARIABLES:
        requested = env.get(name)
        if not requested:
            continue
        cluster = commands.show_config().get("ClusterName", "")
        if requested != cluster:
            raise ClusterError(
                f"{name}={requested} asks for another cluster than {cluster or 'that'} of this machine, which is the "
                "one that status, cancel and requeue ask",
                hint=f"submit from a login node of {requested}, or `unset {name}` to submit here",
            )


# --- whether Slurm would accept a job ---


def slurm_verdict(script: str, commands: SlurmCommands) -> TestVerdict:
    """Returns the verdict of `sbatch --test-only` on a script, which is written into a temporary file for it.

    Raises:
        ClusterError: no answer from the controller.
    """
    with NamedTemporaryFile("w", prefix="slurm_train-", suffix=".sh", encoding="utf-8") as file:
        file.write(script)
        file.flush()
        return commands.test_only(Path(file.name))


def require_acceptable(request: JobRequest, commands: SlurmCommands, plan: RunPlan | None = None) -> tuple[str, ...]:
    """Refuses a job that Slurm would not accept, or would accept and never start; returns what else is to be known.

    Args:
        request: the job.
        commands: Slurm.
        plan: the run, to explain a refusal by what its partition has.

    Raises:
        ClusterError: Slurm would not accept it, or never start it; with the reason and the key to change.
    """
    verdict = slurm_verdict(request.text(), commands)
    if not verdict.is_accepted:
        hint = advice(verdict, request, commands, plan)
        raise ClusterError(f"Slurm would not take this job: {verdict.message}", hint=hint)
    outlook = outlook_of(request, commands, start=verdict.start)
    if outlook.obstacle is not None:
        message = f"Slurm would take this job and never start it: {outlook.obstacle.what}"
        raise ClusterError(message, hint=outlook.obstacle.todo)
    refusal, _ = ("", "") if plan is None else step_verdict(plan, commands)
    if refusal:
        raise ClusterError(
            f"srun would not start the ranks of this job: {refusal}", hint="correct or drop that flag of cluster.srun"
        )
    return outlook.remarks


def acceptable_plans(plans: Sequence[RunPlan], ask: Callable[[Sequence[RunPlan]], T]) -> tuple[list[RunPlan], T]:
    """Returns plans that Slurm accepts and its answer: without the automatic CPUs, if it refuses only those.

    Args:
        plans: of one run, or of those of a sweep.
        ask: asks Slurm, and raises `ClusterError` where it refuses.

    Raises:
        ClusterError: what `ask` has raised for the plans as they are.
    """
    try:
        return list(plans), ask(plans)
    except ClusterError as refusal:
        bare = [without_chosen_cpus(plan) or plan for plan in plans]
        if all(map(operator.is_, bare, plans)):
            raise
        try:
            return bare, ask(bare)
        except ClusterError:
            raise refusal from None


def without_chosen_cpus(plan: RunPlan) -> RunPlan | None:
    """Returns a plan that leaves the number of CPUs to Slurm; None if the number was not chosen automatically."""
    if plan.config.slurm.cpus_per_gpu != "auto" or plan.cpus.number is None:
        return None
    return replace(plan, cpus=CpuPart(None, f"as Slurm gives them: it refuses {plan.cpus.number} per rank"))


def advice(verdict: TestVerdict, request: JobRequest, commands: SlurmCommands, plan: RunPlan | None) -> str:
    """Returns which key to change so that Slurm accepts the job; by its limits and the partition's nodes, if known."""
    general = verdict.advice
    if verdict.refusal in _ABOUT_LIMITS:
        hindrances = obstacles(site_of(commands).facts(), demand_of(request.flags))
        if hindrances:
            return f"{hindrances[0].what}: {hindrances[0].todo}"
    if plan is None or verdict.refusal not in (*_ABOUT_NODES, Refusal.PARTITION):
        return general
    partitions = site_of(commands).node_facts().partitions
    cluster = plan.config.slurm
    chosen = _partitions_of(plan, partitions)
    # The job would run in one of several partitions, so the largest one says what is possible.
    largest = max(chosen, key=lambda partition: (partition.gpus_per_node, partition.num_nodes), default=None)
    if largest is None:
        return f"partitions here: {', '.join(partition.name for partition in partitions)}; set cluster.partition"
    # For a range of nodes, the smallest number is enough.
    nodes = plan.world.fewest_nodes
    gpus = max(plan.world.ranks_per_node)
    if verdict.refusal is Refusal.RESOURCES and any(leaf.startswith("block ") for leaf in commands.topology().values()):
        general += (
            "; the network here has blocks (`scontrol show topology`): nodes in cluster.nodelist must be of one block, "
            "and cluster.sbatch.segment must divide the nodes and fit into a block"
        )
    if cluster.gpu_flag == "none":
        return general
    if nodes <= largest.num_nodes and gpus <= largest.gpus_per_node:
        types = sorted({group.gpu_type for group in largest.groups if group.gpus_per_node} - {""})
        # A site's own filter may use any words; a GPU type that the partition lacks explains the refusal.
        is_about_type = cluster.gpu_type not in types and (cluster.gpu_type or _ABOUT_GPUS.search(verdict.message))
        if not types and cluster.gpu_type and largest.gpus_per_node:
            return f"GPUs in partition {largest.name} have no type here: drop cluster.gpu_type={cluster.gpu_type}"
        if not types or not is_about_type:
            return general
        return (
            f"GPUs in partition {largest.name} are of type {', '.join(types)}, and {cluster.gpu_type or 'no type'} was "
            "asked: set cluster.gpu_type; `init` finds out which type and which cluster.gpu_flag the site takes"
        )
    return (
        f"{nodes} nodes with {gpus} GPUs were asked; partition {largest.name} has {largest.num_nodes} nodes, with at "
        f"most {largest.gpus_per_node} GPUs: lower cluster.nodes or cluster.gpus_per_node, or name another "
        "cluster.partition"
    )


@dataclass(frozen=True, slots=True)
class Outlook:
    """What comes of a job that Slurm would take."""

    obstacle: Obstacle | None = None
    """Why it would never start; None if it may."""
    remarks: tuple[str, ...] = ()
    """What is to be known of its start and its end, a line each."""
    waits_for_partition: bool = False
    """Whether none of its partitions is up."""
    unknown: str = ""
    """Why limits of accounting are not known; "" if they are, or if there are none."""


def outlook_of(request: JobRequest, commands: SlurmCommands, *, start: str = "") -> Outlook:
    """Returns what comes of a job: without EnforcePartLimits and DenyOnLimit Slurm takes what it will never start.

    Args:
        request: the job, which Slurm takes.
        commands: Slurm.
        start: the start that Slurm estimates; "" if not known.

    Raises:
        ClusterError: no answer from the controller.
    """
    site = site_of(commands)
    site.begin()
    facts = site.facts()
    remarks = []
    is_down = False
    for flags in request.components:
        demand = demand_of(flags)
        hindrances = obstacles(facts, demand)
        if hindrances:
            longest = max(hindrances, key=lambda obstacle: obstacle.time_min)
            what = "; ".join(dict.fromkeys(obstacle.what for obstacle in hindrances))
            return Outlook(obstacle=replace(longest, what=what))
        down = partitions_that_are_down(facts, demand)
        if down:
            is_down = True
            states = ", ".join(f"{name} is {state}" for name, state in down.items())
            remarks.append(f"partition {states}: it waits until that is UP again")
        remarks += _by_reservations(demand, facts, site.reservations(), start_unix_s=unix_s(start))
    unknown = limits_unknown(facts)
    return Outlook(remarks=tuple(dict.fromkeys(remarks)), waits_for_partition=is_down, unknown=unknown)


def _by_reservations(
    demand: Demand, facts: SiteFacts, reservations: Sequence[Mapping[str, str]], *, start_unix_s: float | None
) -> Iterator[str]:
    """Yields which reservation ends a job before its time limit, and which maintenance it starts after."""
    now_unix_s = time.time()
    limit_min = longest_limit_min(facts, demand)
    for reservation in reservations:
        name = reservation["ReservationName"]
        begin_unix_s = unix_s(reservation.get("StartTime", ""))
        end_unix_s = unix_s(reservation.get("EndTime", ""))
        if begin_unix_s is None or end_unix_s is None:
            continue
        flags = reservation.get("Flags", "").split(",")
        # Jobs may go on for that long after its end; None for ever.
        overrun_s = duration_s(facts.settings.get("ResvOverRun", "0"))
        if name == demand.reservation and "FLEX" not in flags and overrun_s is not None:
            ended_unix_s = end_unix_s + overrun_s
            left_s = ended_unix_s - max(now_unix_s, begin_unix_s)
            if limit_min is None or 60 * limit_min > left_s:
                yield (
                    f"Slurm ends jobs of reservation {name} at {_moment(ended_unix_s)}, without the warning on "
                    "which a run saves: set cluster.time so that it ends before"
                )
        until_begin_min = int((begin_unix_s - now_unix_s) // 60)
        is_after = start_unix_s is not None and start_unix_s >= begin_unix_s and not demand.is_put_off
        is_maintenance = "MAINT" in flags and name != demand.reservation
        if is_maintenance and until_begin_min > 0 and is_after:
            yield (
                f"maintenance {name} begins {_moment(begin_unix_s)}: a job of at most {until_begin_min} min may end "
                "before it"
            )


def _moment(unix_time_s: float) -> str:
    return time.strftime("%d %b %H:%M", time.localtime(unix_time_s))


def step_verdict(plan: RunPlan, commands: SlurmCommands) -> tuple[str, str]:
    """Returns in words why srun would refuse to start the ranks, and what the srun of this machine alone may refuse.

    Nothing is run. "" each where srun takes all flags, and where it cannot be asked. An option that srun does not know,
    and a type of MPI, may be of a plug-in that the nodes have and this machine lacks.
    """
    flags = chosen_step_flags(plan)
    said = commands.refused_flags(flags) if flags else ""
    unknown = _UNKNOWN_OPTION.search(said)
    if unknown is not None:
        near = difflib.get_close_matches(unknown[1], commands.options_of_srun(), n=1, cutoff=_NEAR)
        if near:
            return f"{said}; did you mean --{near[0]}?", ""
    elif "MPI" not in said:
        return said, ""
    return "", said


def refused_by(words: str) -> str:
    """Returns what it means that the srun of this machine, and perhaps not that of the nodes, refuses flags."""
    return f"the srun of this machine says {words}: where that of the nodes lacks the plug-in as well, no rank begins"


def unchecked(plan: RunPlan, commands: SlurmCommands) -> str:
    """Returns which of a job's account and QOS Slurm does not check, in words; "" for none.

    Raises:
        ClusterError: no answer from the controller.
    """
    cluster = plan.config.slurm
    named = {name: getattr(cluster, name, None) for name in ("account", "qos")}
    if not any(named.values()):
        return ""
    setting = commands.settings.get("AccountingStorageEnforce", "")
    enforced = set(setting.lower().replace(" ", "").split(","))
    # All other words but "none" and "nojobs,nosteps" imply associations.
    checks = {
        "account": enforced & {"all", "associations", "limits", "qos", "safe", "wckeys"},
        "qos": enforced & {"all", "qos"},
    }
    passed = [f"cluster.{name}={value}" for name, value in named.items() if value and not checks[name]]
    return f"{' and '.join(passed)} not checked: AccountingStorageEnforce={setting or 'none'} here" if passed else ""


def _partitions_of(plan: RunPlan, partitions: Sequence[Partition]) -> list[Partition]:
    cluster = plan.config.slurm
    requested = cluster.partition or str(cluster.sbatch.get("partition", ""))
    return chosen_partitions(requested, partitions)


# --- nodes that were found bad recently ---


def exclude_flags(request: JobRequest, run: RunDirectory, env: Mapping[str, str]) -> tuple[list[str], str]:
    """Returns flags of sbatch that leave out listed bad nodes, and a line about them for the person ("" for none).

    Nodes are left out if there are enough others. Slurm's commands are called only if nodes are listed.

    Args:
        request: the job; nodes that it excludes itself stay excluded.
        run: a run that it starts; its root has the list.
        env: environment for Slurm's commands.
    """
    if not read_bad_nodes(run, now_unix_s=time.time()):
        return [], ""
    listed = _bad_nodes_here(run, SlurmCommands(env))
    if not listed:
        return [], ""
    own = request.flags
    nodes = [bad.node for bad in listed]
    flags = list[str]()
    # Flags on the command line would reach only the first component of a heterogeneous job. A job that names
    # its nodes must get these.
    if len(request.components) == 1 and "nodelist" not in own:
        excluded = str(own.get("exclude", ""))
        # For a range such as "2-4" the smallest number is enough.
        num_nodes = int(str(own.get("nodes", "1")).partition("-")[0])
        partition = str(own.get("partition", ""))
        if has_enough_without(nodes, excluded, partition, SlurmCommands(env), num_nodes=num_nodes):
            flags = [f"--exclude={','.join(filter(None, (excluded, *nodes)))}"]
    treatment = "left out" if flags else "found bad, and not left out, since the job needs them or its nodes are uneven"
    return flags, f"{treatment}: {'; '.join(map(str, listed))}; see {list_file(run).with_name(BAD_NODES_PARTS)}"


def _bad_nodes_here(run: RunDirectory, commands: SlurmCommands) -> list[BadNode]:
    """Returns the listed nodes that this cluster has: sbatch refuses a job that leaves out others."""
    cluster, known = "", set[str]()
    # Where Slurm does not answer, nothing is left out.
    with contextlib.suppress(ClusterError):
        cluster = commands.cluster
        known = {name for name, _, _ in commands.node_names()}
    listed = read_bad_nodes(run, now_unix_s=time.time(), cluster=cluster)
    return [bad for bad in listed if not known or bad.node in known]


def expedite_flags(request: JobRequest, config: RunConfig, commands: SlurmCommands) -> list[str]:
    """Returns flags of sbatch that make Slurm requeue a job at once after a lost node, if the site supports that.

    They override the script's own --requeue. A job that survives the loss of nodes is requeued by its supervisor, and
    such a requeue is not expedited by Slurm.

    Args:
        request: the job.
        config: the run's.
        commands: Slurm; if it does not answer, the job is submitted as on a site without the feature.
    """
    is_heterogeneous = len(request.components) > 1
    if config.slurm.outlives_nodes or is_heterogeneous or "requeue" not in request.flags:
        return []
    with contextlib.suppress(ClusterError):
        return ["--requeue=expedite"] if expedites_requeues(commands.settings) else []
    return []


def has_enough_without(
    nodes: Sequence[str], excluded: str, partition: str, commands: SlurmCommands, *, num_nodes: int
) -> bool:
    """Returns whether a job's partitions have enough working nodes without some; False if Slurm does not answer.

    A job runs in one of its partitions, so one of them must have enough.

    Args:
        nodes: nodes that are to be left out.
        excluded: node list that the job excludes anyway.
        partition: its name, or several, "gpu,long"; "" for the default.
        commands: Slurm.
        num_nodes: how many nodes the job needs.
    """
    try:
        left_out = {*nodes, *parse_nodelist(excluded)}
        chosen = chosen_partitions(partition, commands.partitions())
        return max((part.num_usable_nodes for part in chosen), default=0) - len(left_out) >= num_nodes
    except ClusterError:
        return False


# --- allocations made by a person ---


def salloc_words(request: JobRequest, script: Path, more_flags: Sequence[str] = ()) -> list[str]:
    """Returns the command that makes an allocation for a run and runs its script in it.

    Args:
        request: what the run's job would ask for.
        script: the run's script.
        more_flags: further flags of salloc, which override the others.
    """
    (component,) = request.components
    flags = {name: value for name, value in component.items() if name not in _OF_BATCH}
    words = [f"--{check_flag_name(name)}" + ("" if value is True else f"={value}") for name, value in flags.items()]
    return ["salloc", *words, *more_flags, "bash", str(script)]


def require_room(plan: RunPlan, job: Mapping[str, str]) -> None:
    """Refuses an allocation that a run does not fit into.

    Args:
        plan: the run.
        job: `scontrol show job` of the allocation.

    Raises:
        ClusterError: it does not fit, with what is missing; or the allocation has ended.
    """
    job_id = job.get("JobId", "?")
    cluster = plan.config.slurm
    if job.get("JobState") != "RUNNING":
        raise ClusterError(
            f"this shell belongs to job {job_id}, which is {job.get('JobState') or 'gone'}",
            hint="leave the shell; outside an allocation launch=interactive makes one",
        )
    # Until 23.02 TRES is what the job has, later AllocTRES; if GPUs are not accounted for, neither contains them.
    tres = job.get("AllocTRES") or job.get("TRES", "")
    # For a range of nodes, the smallest number is enough.
    world = next(plan.world.possible())
    available = {"nodes": job.get("NumNodes", ""), "CPUs": job.get("NumCPUs", "")}
    if cluster.gpu_flag != "none" and tres:
        available["GPUs"] = str(tres_gpus(tres) or 0)
    required = {"nodes": world.num_nodes, "GPUs": world.num_ranks, "CPUs": world.num_ranks * (plan.cpus_per_rank or 1)}
    # A job that waits may have "2-4"; a running one has a single number.
    missing = [
        f"{available[name]} {name}, {number} asked"
        for name, number in required.items()
        if available.get(name, "").isdigit() and int(available[name]) < number
    ]
    if missing:
        enough = salloc_words(job_request(plan), plan.run.submit_script)
        raise ClusterError(
            f"the allocation of job {job_id} is too small for this run: {'; '.join(missing)}",
            hint=f"ask for more ({' '.join(enough[:-2])}), or for a smaller run with cluster=NxG",
        )
