"""The job of a run: which resources it asks for, and the rules that keep multi-node jobs alive. Pure.

Every flag is based on a fact about Slurm; see docs/slurm.md. Every value in the script passes one of the guards of
`slurm.flags`: one for text that sbatch reads, one for text that bash reads. The template is plain bash; decisions are
made here. Tests compare the text with a golden file.

The command of the ranks, in a container if there is one, comes from `rank_command`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurm_train.config.schema import RunConfig
from slurm_train.distributed.master import PORTS
from slurm_train.errors import ConfigError
from slurm_train.plan.placement import EqualNodes, World
from slurm_train.plan.plan import RunPlan
from slurm_train.request.rank_command import RankCommand
from slurm_train.request.typed_flags import as_text, step_flags, typed_flags, with_typed
from slurm_train.rundir.paths import SETUP_FAILED, RunDirectory
from slurm_train.rundir.timing import warning_lead_s
from slurm_train.slurm.allocation import compact_nodelist, parse_nodelist
from slurm_train.slurm.flags import Flags, check_env_name, resource_flags
from slurm_train.slurm.job_request import JobRequest, guarded, quoted

STEP_NAME = "attempt_{attempt}"


def job_request(plan: RunPlan, *, default_python: str = sys.executable, package: Path | None = None) -> JobRequest:
    """Returns what the job of a run asks for; its text is that of `submit.sh`.

    Args:
        plan: the run; it must ask for a cluster.
        default_python: interpreter in the job where `cluster.python` names none.
        package: the folder of this package on the nodes, for containers; default: where it lies here.

    Raises:
        ConfigError: a value that cannot reach the script unchanged, with the key it came from.
    """
    config = plan.config
    cluster = config.slurm
    python = cluster.python or default_python
    if not Path(python).is_absolute() or not python.isprintable():
        raise ConfigError(
            f"cluster.python={python!r} is not an absolute path", hint="name the interpreter with its full path"
        )
    if cluster.stage_python is not None:
        _check_stage(cluster.stage_python, config)
    for line in cluster.setup:
        # A setup line is shell text of the user and is not changed, but it must be one line.
        if not line.isprintable():
            raise ConfigError(
                f"cluster.setup has a line break or control character: {line!r}",
                hint="give each shell line as an item of its own",
            )
    ranks = RankCommand(config, plan.run, plan.directory, package)
    exports = job_environment(config)
    # A line about what the ranks do, without a script's arguments, which may contain a secret.
    name = plan.program.name
    work = f"{name} on {plan.world.num_ranks} ranks" if name else f"global batch {plan.batch.as_sum()}"
    request = JobRequest(
        components=tuple(sbatch_components(plan)),
        title=f"{plan.run.name}/{plan.run.run_id}: {' '.join(work.split())}",
        exports=exports,
        setup=tuple(_setup_lines(plan)),
        python=python,
        run=str(plan.run.path),
        srun=srun_flags(plan),
        container=_container_flags(ranks.step_flags(exports), cluster.srun),
        worker=tuple(ranks.words(python=python)),
    )
    # What cannot be written is refused here, before anything is.
    request.text()
    return request


def _setup_lines(plan: RunPlan) -> list[str]:
    """Returns the lines of `cluster.setup`, which run in the folder in which the run was first typed.

    A job starts in the folder of the submitting process: a different one after `resume` from another folder, and "/" if
    the supervisor submits the job that continues a run.
    """
    cluster = plan.config.slurm
    if not cluster.setup:
        return []
    working_dir = next((value for name, value in cluster.sbatch.items() if name in ("chdir", "workdir")), None)
    folder = Path(plan.directory, str(working_dir or ""))
    warning = f"warning: {folder} is not on this node: relative paths in cluster.setup lead elsewhere"
    return [
        f"cd {quoted(str(folder))} || echo {quoted(warning)} >&2",
        # A line of a file that is sourced may fail without a word, and `set -e` ends the job.
        f"""set -E; trap 'echo "{SETUP_FAILED}$? of: $BASH_COMMAND" >&2' ERR""",
        *cluster.setup,
        "trap - ERR; set +E",
    ]


def _check_stage(folder: str, config: RunConfig) -> None:
    if not folder.startswith("/") or not folder.isprintable():
        raise ConfigError(
            f"cluster.stage_python={folder!r} is not an absolute path",
            hint="name a folder on the nodes' own disks: cluster.stage_python=/tmp",
        )
    if config.container is not None:
        raise ConfigError(
            f"cluster.stage_python={folder} copies the host's packages, but the ranks import those of container.image",
            hint="leave cluster.stage_python out: an image is read once per node anyway",
        )


def _container_flags(flags: Mapping[str, str], srun_settings: Mapping[str, Any]) -> Mapping[str, str]:
    # These values are only quoted: lists of mounts and variables may be longer than the guard of flags allows.
    twice = [name for name in srun_settings if name.replace("_", "-") in flags]
    if twice:
        raise ConfigError(
            f"cluster.srun.{twice[0]} and container.* both say what runs the ranks",
            hint="use container.image and container.mounts, or leave the container out",
        )
    return flags


# --- flags of sbatch ---


def sbatch_components(plan: RunPlan) -> list[Flags]:
    """Returns the sbatch flags of a run, long names without dashes; True is a flag without a value.

    Nodes with different numbers of GPUs cannot be requested together; then each group of nodes is a component of a
    heterogeneous job. Name and log are set for the first component only. All other flags are set for each, since
    components inherit only some of them.

    Raises:
        ConfigError: `cluster.sbatch` names a flag that the launch decides, or `cluster.nodelist` cannot be shared.
    """
    cluster = plan.config.slurm
    groups = plan.world.groups
    typed = typed_flags("cluster.sbatch", cluster.sbatch)
    hosts = None
    if len(groups) > 1 and cluster.nodelist is not None:
        hosts = parse_nodelist(cluster.nodelist)
        if len(hosts) != plan.world.num_nodes:
            raise ConfigError(
                f"cluster.nodelist={cluster.nodelist} names {len(hosts)} nodes, cluster.gpus_per_node "
                f"{list(plan.world.ranks_per_node)} asks for {plan.world.num_nodes}",
                hint="with uneven nodes name all of them, in the order of cluster.gpus_per_node",
            )
    remaining_hosts = iter(hosts or ())
    components = []
    for index, group in enumerate(groups):
        flags: Flags = {} if index else {"job-name": job_name(plan)}
        spares = cluster.spare_nodes
        flags |= _size_flags(plan, replace(group, num_nodes=group.num_nodes + spares))
        # With a range of nodes, sbatch is given no number of tasks, so each node has one task for it.
        has_whole_node = cluster.launcher == "torchrun" or bool(plan.world.node_counts)
        cpus = _cpus_per_task(plan, group, has_whole_node=has_whole_node)
        flags |= resource_flags(
            cluster,
            per_node=group.ranks_per_node,
            cpus_per_task=cpus,
            runs_per_gpu=plan.config.sweep.runs_per_gpu,
        )
        if cluster.outlives_nodes:
            # Without it Slurm ends the whole job when it loses the first node.
            flags["no-kill"] = True
        if hosts is not None:
            flags["nodelist"] = compact_nodelist(list(itertools.islice(remaining_hosts, group.num_nodes)))
        if index == 0:
            # Without "append" a requeue truncates the log of earlier attempts.
            flags |= {"output": str(plan.run.logs / "batch.log"), "open-mode": "append"}
            if "\\" not in plan.directory and plan.directory.isprintable():
                # Otherwise the submitting process decides, by a path without links, which may be missing on nodes.
                flags["chdir"] = plan.directory
        # A site's JobRequeue may have either default, so the flag is always set.
        flags["requeue" if plan.config.requeue.enabled else "no-requeue"] = True
        # Without "B:", so the warning goes to the ranks. USR2, since NCCL may catch USR1.
        flags["signal"] = warning_signal(plan.config, plan.run)
        components.append(with_typed(flags, typed, cluster=cluster, per_node=group.ranks_per_node))
    return components


def job_name(plan: RunPlan) -> str:
    """Returns the name of a run's job, e.g. "gpt-stdlib-3f9a1c07a2b4", with the prefix that the site requires."""
    return f"{plan.config.slurm.job_name_prefix or ''}{plan.run.name}-{plan.run.run_id}"


def _size_flags(plan: RunPlan, group: EqualNodes) -> Flags:
    if plan.world.node_counts:
        # The number of tasks depends on how many nodes Slurm grants. With tasks per node, sbatch would request those of
        # the smallest number of nodes, and Slurm gives a job no more nodes than tasks (22.05).
        return {"nodes": f"{plan.world.fewest_nodes}-{group.num_nodes}"}
    per_node = _tasks_per_node(plan, group)
    return {
        "nodes": str(group.num_nodes),
        "ntasks": str(group.num_nodes * per_node),
        "ntasks-per-node": str(per_node),
    }


def _tasks_per_node(plan: RunPlan, group: EqualNodes) -> int:
    return 1 if plan.config.slurm.launcher == "torchrun" else group.ranks_per_node


def _cpus_per_task(plan: RunPlan, group: EqualNodes, *, has_whole_node: bool) -> int | None:
    """Returns the CPUs of each task.

    Args:
        plan: the run.
        group: its nodes.
        has_whole_node: whether a task has all ranks of its node; its default would be one core.
    """
    if has_whole_node:
        return (plan.cpus_per_rank or 1) * group.ranks_per_node
    return plan.cpus_per_rank


def renewed_warning(config: RunConfig, run: RunDirectory) -> list[str]:
    """Returns flags of sbatch that replace a script's --signal by a newly chosen one, if its lead is automatic."""
    is_automatic = config.requeue.warn_before_limit_s == "auto"
    return [f"--signal={warning_signal(config, run)}"] if is_automatic else []


def warning_signal(config: RunConfig, run: RunDirectory) -> str:
    """Returns the value of sbatch's --signal, e.g. "USR2@120"; the lead comes from the run's measurements, if any."""
    minutes = config.slurm.time_limit_min
    limit_s = None if minutes is None else 60.0 * minutes
    return f"USR2@{warning_lead_s(config.requeue.warn_before_limit_s, run, limit_s=limit_s)}"


# --- flags of srun, and the environment ---


def srun_flags(plan: RunPlan) -> Flags:
    """Returns the srun flags of a run.

    "{attempt}" in a value is replaced when an attempt starts; "{nodes}", "{tasks}" and "{nodelist}" by how many nodes
    and tasks it has, and which nodes it uses.

    Raises:
        ConfigError: `cluster.srun` names a flag that the launch decides.
    """
    cluster = plan.config.slurm
    groups = plan.world.groups
    is_torchrun = cluster.launcher == "torchrun"
    if len(groups) > 1:
        # Numbers of nodes and tasks would apply to each component; without them each component uses all it has.
        sizes: Flags = {"het-group": ",".join(map(str, range(len(groups))))}
    else:
        sizes = _size_flags(plan, groups[0])
    if plan.world.node_counts:
        per_node = _tasks_per_node(plan, groups[0])
        sizes = {"nodes": "{nodes}", "ntasks": "{tasks}", "ntasks-per-node": str(per_node)}
    if cluster.outlives_nodes:
        sizes["nodelist"] = "{nodelist}"
    if cluster.outlives_nodes or plan.config.requeue.warm_ranks:
        # Two steps run at a time: the ranks and the ranks in waiting; or a new step beside the rest of one on a lost
        # node, which keeps its share of all its nodes until Slurm declares that node down.
        sizes["overlap"] = True
    flags: Flags = {
        **sizes,
        "distribution": "block",
        # By this name the supervisor ends the remains of a step; other steps of an allocation are left alone.
        "job-name": STEP_NAME,
        # By default the others wait for a dead rank for ever; --wait alone would kill them without SIGTERM.
        "kill-on-bad-exit": "1",
        "wait": str(plan.program.wait_for_ranks_s),
        "open-mode": "append",
        # Under `sbatch --export=NAME` srun would pass NAME alone on, without the attempt and the meeting point.
        "export": "ALL",
        "output": str(plan.run.logs / "attempt_{attempt}" / task_log(plan.config, plan.world)),
    }
    if cluster.gpu_flag == "gpus-per-task":
        # Slurm would limit each rank to one device, which cuts peer access.
        flags["gpu-bind"] = "none"
    if is_torchrun and len(groups) > 1:
        # The components' tasks have different numbers of cores, and srun takes one number.
        flags["cpu-bind"] = "none"
    else:
        cpus = _cpus_per_task(plan, groups[0], has_whole_node=is_torchrun)
        if cpus is not None:
            # srun inherits it in some releases only (not from 22.05 to 23.02), so it is set again.
            flags["cpus-per-task"] = str(cpus)
    gpus_per_node = [group.ranks_per_node for group in groups]
    typed = typed_flags("cluster.srun", cluster.srun)
    return step_flags(flags, typed, cluster=cluster, gpus_per_node=gpus_per_node)


def chosen_step_flags(plan: RunPlan) -> list[str]:
    """Returns the flags of srun that are not the launch's own, as words: those of `cluster.srun` and of a container."""
    chosen = typed_flags("cluster.srun", plan.config.slurm.srun)
    container = RankCommand(plan.config, plan.run, plan.directory).step_flags(job_environment(plan.config))
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in (chosen | container).items()]


def task_log(config: RunConfig, world: World) -> str:
    """Returns the name of the log that srun writes for each task: the log of the rank if srun knows its number.

    In a step over several components srun increases "%t" by one with each component (22.05). There, and if a task is
    torchrun, the ranks open their logs themselves.
    """
    if config.slurm.launcher == "torchrun":
        return "node_%t.log"
    return "rank_%t.log" if world.is_even else "task_%t.log"


def job_environment(config: RunConfig) -> dict[str, str]:
    """Returns the variables that the job exports before the ranks start."""
    cluster = config.slurm
    variables = {"PYTHONUNBUFFERED": "1"}
    if cluster.network_interface:
        variables |= dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), cluster.network_interface)
    if cluster.rendezvous_ports:
        variables[PORTS] = cluster.rendezvous_ports
    for name, value in cluster.env.items():
        if value is not None:
            variables[name] = as_text(f"cluster.env.{name}", value)
    for name in variables:
        # The launch's own variable is none that a person may set.
        if name != PORTS:
            guarded(f"export {name}", check_env_name, name)
    return variables
