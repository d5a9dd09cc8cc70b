"""The ranks of one attempt under srun: checks nodes and snapshot, runs and watches the step, records bad nodes."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from slurm_train.config.schema import ClusterSection, RunConfig
from slurm_train.distributed import interfaces
from slurm_train.distributed.master import chosen_address, probe_port
from slurm_train.errors import EXIT_FAILURE, NodesError, SilentNodesError
from slurm_train.rundir.events import (
    BAD_NODES_PARTS,
    Finding,
    add_bad_nodes,
    bad_nodes_of,
    errors_of,
    findings_of,
    forgive_nodes,
    list_file,
    read_bad_nodes,
    read_preflight,
    write_preflight,
)
from slurm_train.rundir.files import create_empty, for_each
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.plan_record import PlanRecord
from slurm_train.slurm.allocation import Allocation, cluster_of, compact_nodelist, fewest_cpus, het_job_ids
from slurm_train.slurm.flags import resource_flags
from slurm_train.slurm.job_variables import with_gpus_for
from slurm_train.slurm.records import NO_STEP
from slurm_train.slurm.share import Share
from slurm_train.supervise.best_effort import BestEffort, say
from slurm_train.supervise.job_judges import GrowthWatch, LostNodes, NextRanks, StepsInTheWay, ended_long_ago
from slurm_train.supervise.judges import FindingsRelay, NoticeKeeper, watch_ranks
from slurm_train.supervise.nodes import NodePool
from slurm_train.supervise.ranks import (
    WAITS,
    RanksInWaiting,
    note_environment,
    require_seen_by_all,
    run_on_each_node,
    run_step,
    start_guard,
    start_step,
)
from slurm_train.supervise.scheduler import SlurmJob
from slurm_train.supervise.staging import stage_python
from slurm_train.supervise.supervisor import refused_code
from slurm_train.supervise.watch import Watch

_GUARD_GONE_S = 5.0
_ANSWERS_WITHIN_S = 25.0


def pool_of(allocation: Allocation, run: RunDirectory, config: RunConfig) -> NodePool:
    """Returns the nodes of a job as the run can use them by its plan; an salloc may have more nodes."""
    world = PlanRecord.read(run.plan).world
    per_node = world.ranks_per_node or allocation.tasks_per_node
    pool = NodePool(
        nodes=allocation.nodes,
        sizes=world.num_nodes or (len(per_node),),
        ranks_per_node=per_node,
        tasks_per_node=per_node,
    )
    cluster = config.cluster
    if cluster is not None and cluster.launcher == "torchrun":
        # One task has all ranks of its node.
        return replace(pool, tasks_per_node=(1,) * len(per_node))
    if len(per_node) > allocation.num_nodes and len(pool.sizes) == 1:
        return NodePool.whole(allocation)
    if cluster is None or not cluster.outlives_nodes:
        return pool
    bad = {bad_node.node for bad_node in read_bad_nodes(run, now_unix_s=time.time())}
    return replace(pool, doubtful=frozenset(bad), outlives_nodes=True)


def within_allocation(words: Sequence[str], env: Mapping[str, str], *, tasks_per_node: int) -> list[str]:
    """Returns srun's words, asking for no more CPUs per task than the allocation has.

    A job of the run's own script has as many as the script asks for. Another allocation (salloc, sbatch with other
    flags) may have fewer, and srun would create no step in it.

    Args:
        words: srun and its arguments.
        env: the job's environment.
        tasks_per_node: of the step.
    """
    flag = "--cpus-per-task="
    allocated_cpus = fewest_cpus(env)
    fitting_words = list(words)
    for index, word in enumerate(words):
        if not word.startswith(flag) or allocated_cpus is None:
            continue
        per_task = max(1, allocated_cpus // tasks_per_node)
        requested = int(word.removeprefix(flag))
        if requested > per_task:
            say(f"this allocation has {per_task} CPUs per task, the run asks for {requested}: its ranks get {per_task}")
            fitting_words[index] = f"{flag}{per_task}"
    return fitting_words


def _address(node: str, job: SlurmJob, cluster: ClusterSection | None, env: Mapping[str, str]) -> str:
    """Returns where the ranks meet rank 0 on its node: as configured, else the node's name.

    Where the name does not resolve, it is Slurm's NodeAddr.

    Args:
        node: of rank 0.
        job: the job.
        cluster: the settings.
        env: the job's environment.
    """
    chosen = "" if cluster is None else chosen_address(cluster, node, address_on=partial(_address_on, node, env=env))
    if chosen:
        return chosen
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        best_effort = BestEffort()
        address = best_effort("the address of rank 0", lambda: job.commands.node_address(node), "", asks_slurm=True)
        return address or node
    return node


def _address_on(node: str, interface: str, *, env: Mapping[str, str]) -> str:
    """Returns the address of a node's interface; "" where it has none, or does not answer, which is said."""
    if env.get("SLURMD_NODENAME") == node:
        address = interfaces.interface_addresses().get(interface, "")
    else:
        question = [sys.executable, interfaces.__file__, interface]
        answer = BestEffort()(
            f"the address of {interface} on {node}",
            lambda: run_on_each_node(question, [node], env, timeout_s=_ANSWERS_WITHIN_S).stdout,
            "",
            asks_slurm=True,
        )
        address = answer.strip()
    if not address:
        say(f"{node} has no address on {interface}, so the ranks meet by its name (cluster.rendezvous_address)")
    return address


@dataclass(frozen=True, slots=True, kw_only=True)
class SrunLaunch:
    """Starts the ranks of an attempt; calling it with the attempt's number returns their exit code."""

    run: RunDirectory
    config: RunConfig
    job: SlurmJob
    command: Sequence[str]
    """srun and its arguments, with {attempt}, {nodes}, {tasks} and {nodelist} for what is known only now."""
    env: Mapping[str, str]
    waiting: RanksInWaiting = field(default_factory=RanksInWaiting)
    """With `requeue.warm_ranks`."""
    guards: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """The step of the guard by node; used in a batch script whose job survives the loss of nodes."""
    stages: dict[tuple[str, ...], dict[str, str]] = field(default_factory=dict)
    """With `cluster.stage_python`, the variables by nodes: the copies are kept for all steps of this job."""

    def __call__(self, attempt: int) -> int:
        """Runs the ranks, and records what they have found out about their nodes."""
        note_environment(self.run, attempt, slurm=self.job.commands.version)
        code = self._start(attempt)
        BestEffort()("the list of bad nodes", lambda: self._note_nodes(attempt), None)
        return code

    def _start(self, attempt: int) -> int:
        run = self.run
        nodes = self.job.start.nodes
        folder = self.run.attempt_logs(attempt)
        self.job.lost.clear()
        self.job.growth = None
        say(f"attempt {attempt} of {run.name}/{run.run_id} on {', '.join(nodes)}; rank logs in {folder}")
        for bad in read_bad_nodes(run, now_unix_s=time.time(), cluster=cluster_of(self.env)):
            if bad.node in nodes:
                say(f"was found bad before and is checked again: {bad}")
        self._make_logs(folder)
        refusal_code = refused_code(run, attempt, self.env)
        if refusal_code is not None:
            return refusal_code
        warm = self.waiting.take(attempt, nodes, folder / "batch.log")
        with (folder / "batch.log").open("ab") as log:
            try:
                # Ranks in waiting run on all nodes already.
                if warm is None:
                    require_seen_by_all(run, nodes, self.env, attempt=attempt)
            except NodesError as err:
                if err.code == "NODE_MISSING" and self.job.pool.outlives_nodes and len(err.nodes) < len(nodes):
                    self.job.lost |= set(err.nodes)
                finding = self._note_unfit(attempt, err)
                # The relay of findings runs only beside ranks, and there are none.
                say(finding.line)
                log.write(f"{finding.line}\n".encode())
                return EXIT_FAILURE if finding.blames_node else err.exit_code
            self._keep_guard()
            in_the_way = StepsInTheWay(attempt, self.job)
            watch = self._watch(attempt)
            if attempt:
                watch.add(in_the_way)
            process = warm or self._start_step(attempt, log=log)
            with watch.running():
                code = run_step(
                    process,
                    log=log,
                    is_overdue=lambda: bool(self.job.lost or in_the_way.stuck_steps) or ended_long_ago(watch.look),
                    beside=watch.check,
                )
            if in_the_way.stuck_steps:
                no_step = (
                    f"{NO_STEP} for job {self.job.job_id}: it still has {in_the_way.stuck_steps} of an earlier attempt"
                )
                log.write(f"srun: error: {no_step}\n".encode())
            return code

    def _watch(self, attempt: int) -> Watch:
        """Returns the watch over the ranks of an attempt."""
        run = self.run
        watch = watch_ranks(
            run,
            attempt,
            self.config,
            world_size=self.job.start.world_size,
            end_ranks=self.job.end_ranks,
            is_halted=self.job.is_halted,
        )
        watch.add(NoticeKeeper(run, ask=self.job.notice), FindingsRelay())
        if self.job.pool.outlives_nodes:
            watch.add(LostNodes(run, self.job, self.env))
        every_min = self.config.requeue.grow_every_min
        if every_min is not None and self._can_grow(self.job.start.nodes):
            watch.add(GrowthWatch(run, attempt, self.job, every_min=every_min))
        if self.config.requeue.warm_ranks:
            watch.add(NextRanks(partial(self._start_next, attempt + 1)))
        return watch

    def close(self) -> None:
        """Ends the ranks in waiting and the guards."""
        self.waiting.dismiss()
        for guard in self.guards.values():
            guard.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                guard.wait(_GUARD_GONE_S)

    @property
    def _is_batch_script(self) -> bool:
        """Whether Slurm has started this process; under salloc a person holds the job."""
        return self.env.get("SLURMD_NODENAME") in self.job.pool.nodes

    def _can_grow(self, nodes: Sequence[str]) -> bool:
        """Returns whether the job may be requeued for more nodes than these."""
        config = self.config
        is_small = self.job.pool.outlives_nodes and len(nodes) < self.job.pool.sizes[-1]
        # A program of a user's own may not save when it is asked to stop.
        return is_small and config.requeue.enabled and config.trains and self._is_batch_script

    def _keep_guard(self) -> None:
        """Starts a guard on one of the attempt's nodes if none runs there."""
        head_node = self.env.get("SLURMD_NODENAME")
        nodes = self.job.start.nodes
        if not (self.job.pool.outlives_nodes and self._is_batch_script):
            return
        if not any(node in nodes and guard.poll() is None for node, guard in self.guards.items()):
            guard_node = next((node for node in nodes if node != head_node), None)
            if guard_node is not None:
                self.guards[guard_node] = start_guard(self.run, guard_node, self.env)

    def _start_step(self, attempt: int, *, log: BinaryIO, waits: Path | None = None) -> subprocess.Popen[bytes]:
        """Starts the ranks of an attempt.

        Args:
            attempt: its number.
            log: file for the output of srun.
            waits: the ranks wait until they are needed; until then all of them write into this file.
        """
        run = self.run
        nodes = self.job.start.nodes
        placeholders = {
            "{attempt}": str(attempt),
            "{nodes}": str(len(nodes)),
            "{tasks}": str(sum(self.job.pool.tasks_per_node[: len(nodes)])),
            "{nodelist}": compact_nodelist(nodes),
        }
        words = list(self.command)
        if waits is not None:
            words = [f"--output={waits}" if word.startswith("--output=") else word for word in words]
        for name, value in placeholders.items():
            words = [word.replace(name, value) for word in words]
        name = f"--job-name={self.job.step_name(attempt)}"
        words = [name if word.startswith("--job-name=") else word for word in words]
        words = self._within_share(words)
        stage = self.config.cluster.stage_python if self.config.cluster is not None else None
        if stage and not self.stages.get(nodes):  # {} after a failure, which is tried again
            self.stages[nodes] = stage_python(stage, run.place, nodes, self.env)
        asks_for_gpus = self.config.cluster is not None and self.config.cluster.gpu_flag != "none"
        env = {
            **(with_gpus_for(self.env, self.job.start.world_size) if asks_for_gpus else self.env),
            **self.stages.get(nodes, {}),
            **({} if waits is None else {WAITS: "1"}),
            "SLURM_TRAIN_ATTEMPT": str(attempt),
            "MASTER_ADDR": _address(nodes[0], self.job, self.config.cluster if len(nodes) > 1 else None, self.env),
            "MASTER_PORT": str(probe_port(str(run.path), attempt=attempt, env=self.env)),
        }
        # The working directory of this process differs: its own imports must not come from unverified code.
        cwd = run.code if run.code.is_dir() else None
        return start_step(words, env=env, log=log, cwd=cwd, waits=waits is not None)

    def _within_share(self, words: list[str]) -> list[str]:
        """Returns the words of srun, limited to the share of the allocation that the run may use."""
        tasks_per_node = max(self.job.pool.tasks_per_node)
        share = Share.from_env(self.env)
        if share is None:
            return within_allocation(words, self.env, tasks_per_node=tasks_per_node)
        cluster = self.config.cluster
        assert cluster is not None, "a run without a cluster is in no pack"
        requested = resource_flags(cluster, per_node=self.job.start.world_size)
        gpus = {
            name: str(value) for name, value in requested.items() if name in ("gres", "gpus-per-node", "gpus-per-task")
        }
        words = within_allocation(words, self.env, tasks_per_node=tasks_per_node * share.num_runs)
        return share.step_words(words, self.env, gpus)

    def _start_next(self, attempt: int) -> None:
        path = self.run.logs / f"waiting_{attempt}.log"
        create_empty(path)
        with path.open("ab") as log:
            process = self._start_step(attempt, log=log, waits=path)
        self.waiting.process = process
        self.waiting.log = path
        self.waiting.attempt = attempt
        self.waiting.nodes = self.job.start.nodes

    def _make_logs(self, folder: Path) -> None:
        """Creates the logs of srun and the tasks; Slurm would create them with the umask of the login shell."""
        for_each(lambda name: create_empty(folder / name), [*self._task_logs(), "batch.log"])

    def _task_logs(self) -> list[str]:
        """Returns the names of the logs that srun may write, from its --output."""
        output = next((word for word in self.command if word.startswith("--output=")), "rank_%t.log")
        num_components = max(1, len(het_job_ids(self.env)))
        # srun counts "%t" on by one with each component of a heterogeneous step (22.05).
        tasks = range(sum(self.job.pool.tasks_per_node) + num_components - 1)
        return [Path(output).name.replace("%t", str(task)) for task in tasks]

    def _note_unfit(self, attempt: int, error: NodesError) -> Finding:
        """Records as a finding why the ranks were not started, and returns it."""
        nodes = self.job.start.nodes
        # If few of many nodes cannot see the path, these nodes are at fault; if one of two or most cannot, the path is
        # not shared.
        is_few = 0 < 2 * len(error.nodes) < len(nodes)
        blames = is_few and not isinstance(error, SilentNodesError)
        finding = Finding(
            code=error.code,
            level="error",
            node=", ".join(error.nodes),
            seen=error.message,
            todo=error.hint,
            blames_node=blames,
        )
        write_preflight(self.run, attempt, {"findings": [finding.as_json()], "table": [], "nodes": list(nodes)})
        return finding

    def _note_nodes(self, attempt: int) -> None:
        """Records what an attempt has found out about its nodes; the run goes on if the list cannot be written."""
        run = self.run
        record = read_preflight(self.run, attempt)
        hours = self.config.preflight.exclude_bad_nodes_h
        findings = findings_of(record)
        bad_nodes = bad_nodes_of(findings)
        with contextlib.suppress(OSError):
            now_unix_s, cluster = time.time(), cluster_of(self.env)
            add_bad_nodes(run, bad_nodes, hours=hours, now_unix_s=now_unix_s, cluster=cluster)
            if bad_nodes and hours > 0:
                lists = list_file(run).with_name(BAD_NODES_PARTS)
                say(f"later submissions leave out {', '.join(bad_nodes)} for {hours:g} h; see {lists}")
            if record and not errors_of(findings):
                for node in forgive_nodes(run, record.get("nodes", ()), now_unix_s=now_unix_s, cluster=cluster):
                    say(f"{node} passed; removed from the bad nodes")
