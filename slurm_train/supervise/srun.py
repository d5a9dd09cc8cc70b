"""The ranks of one attempt under srun: checks nodes and snapshot, runs and watches the step, records bad nodes."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from slurm_train.config.program import program_of
from slurm_train.config.schema import ClusterSection, RunConfig
from slurm_train.distributed import interfaces
from slurm_train.distributed.master import chosen_address, probe_port
from slurm_train.errors import EXIT_FAILURE, EXIT_ORPHANED, ClusterError, NodesError, SilentNodesError
from slurm_train.request.batch_script import STEP_NAME
from slurm_train.rundir.attempts import first_round
from slurm_train.rundir.cause import NOT_CREATED, Cause
from slurm_train.rundir.events import (
    BAD_NODES_PARTS,
    Finding,
    add_bad_nodes,
    bad_nodes_of,
    errors_of,
    findings_of,
    first_mark,
    forgive_nodes,
    list_file,
    read_bad_nodes,
    read_preflight,
    write_preflight,
)
from slurm_train.rundir.files import create_empty, for_each
from slurm_train.rundir.heartbeat import Beat
from slurm_train.rundir.ledger import Start, read_ledger
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.plan_record import PlanRecord
from slurm_train.slurm.allocation import Allocation, cluster_of, compact_nodelist, fewest_cpus, het_job_ids
from slurm_train.slurm.flags import resource_flags
from slurm_train.slurm.job_variables import with_gpus_for
from slurm_train.slurm.pack_slot import PackSlot
from slurm_train.slurm.records import NO_STEP, StepEnd, step_end
from slurm_train.supervise.asking import require_seen_by_all, run_on_each_node, silent_nodes, start_guard
from slurm_train.supervise.best_effort import BestEffort, say
from slurm_train.supervise.continuation import can_avoid
from slurm_train.supervise.growth import Growth
from slurm_train.supervise.job import SlurmJob
from slurm_train.supervise.job_judges import (
    GrowthWatch,
    LostNodes,
    NextRanks,
    StepsInTheWay,
    ended_long_ago,
    present_nodes,
)
from slurm_train.supervise.judges import FindingsRelay, NoticeKeeper, watch_ranks
from slurm_train.supervise.nodes import NodePool
from slurm_train.supervise.ranks import (
    WAITS,
    RanksInWaiting,
    end_step,
    note_environment,
    refused_code,
    run_step,
    start_step,
)
from slurm_train.supervise.staging import stage_python
from slurm_train.supervise.step import Step
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
    cluster = config.slurm
    if cluster.launcher == "torchrun":
        # One task has all ranks of its node.
        return replace(pool, tasks_per_node=(1,) * len(per_node))
    if len(per_node) > allocation.num_nodes and len(pool.sizes) == 1:
        return NodePool.whole(allocation)
    if not cluster.outlives_nodes:
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


def _address(node: str, job: SlurmJob, cluster: ClusterSection, env: Mapping[str, str]) -> str:
    """Returns where the ranks meet rank 0 on its node: as configured, else the node's name.

    Where the name does not resolve, it is Slurm's NodeAddr.

    Args:
        node: of rank 0.
        job: the job.
        cluster: the settings.
        env: the job's environment.
    """
    chosen = chosen_address(cluster, node, address_on=partial(_address_on, node, env=env))
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


class SrunStep(Step):
    """The ranks of a job of Slurm, a step of srun.

    Args:
        run: the run.
        config: its settings.
        job: the job.
        pool: its nodes, among which each attempt chooses.
        command: srun and its arguments, with {attempt}, {nodes}, {tasks} and {nodelist} for what is known only now.
        env: the job's environment.
    """

    can_relaunch = True

    def __init__(
        self,
        run: RunDirectory,
        config: RunConfig,
        job: SlurmJob,
        *,
        pool: NodePool,
        command: Sequence[str],
        env: Mapping[str, str],
    ) -> None:
        # An allocation that is too small is used as it is; srun then reports what is missing.
        nodes = pool.choose() or pool.nodes
        super().__init__(
            Start(
                job_id=job.job_id,
                restart_count=job.restart_count,
                nodes=nodes,
                world_size=pool.num_ranks(len(nodes)),
            )
        )
        self.job = job
        self.pool = pool
        self.lost: set[str] = set()
        """Nodes of the ranks that no longer answer."""
        self._run = run
        self._config = config
        self._command = command
        self._env = env
        self._left_out = set[str]()
        """Nodes that were lost, or found bad, in earlier attempts of this start of the job."""
        self._waiting = RanksInWaiting()
        """With `requeue.warm_ranks`."""
        self._guards: dict[str, subprocess.Popen[bytes]] = {}
        """The step of the guard by node; used in a batch script whose job survives the loss of nodes."""
        self._stages: dict[tuple[str, ...], dict[str, str]] = {}
        """With `cluster.stage_python`, the variables by nodes: the copies are kept for all steps of this job."""

    def run(self, attempt: int) -> int:
        """Runs the ranks, and records what they have found out about their nodes."""
        note_environment(self._run, attempt, slurm=self.job.commands.version)
        code = self._start(attempt)
        BestEffort()("the list of bad nodes", lambda: self._note_nodes(attempt), None)
        return code

    def _start(self, attempt: int) -> int:
        run = self._run
        nodes = self.start.nodes
        folder = self._run.attempt_logs(attempt)
        self.lost.clear()
        self.growth = None
        say(f"attempt {attempt} of {run.name}/{run.run_id} on {', '.join(nodes)}; rank logs in {folder}")
        for bad in read_bad_nodes(run, now_unix_s=time.time(), cluster=cluster_of(self._env)):
            if bad.node in nodes:
                say(f"was found bad before and is checked again: {bad}")
        self._make_logs(folder)
        refusal_code = refused_code(run, attempt, self._env)
        if refusal_code is not None:
            return refusal_code
        warm = self._waiting.start_attempt(attempt, nodes, folder / "batch.log")
        with (folder / "batch.log").open("ab") as log:
            try:
                # Ranks in waiting run on all nodes already.
                if warm is None:
                    require_seen_by_all(run, nodes, self._env, attempt=attempt)
            except NodesError as err:
                if err.code == "NODE_MISSING" and self.pool.outlives_nodes and len(err.nodes) < len(nodes):
                    self.lost |= set(err.nodes)
                finding = self._note_unfit(attempt, err)
                # The relay of findings runs only beside ranks, and there are none.
                say(finding.line)
                log.write(f"{finding.line}\n".encode())
                return EXIT_FAILURE if finding.blames_node else err.exit_code
            self._keep_guard()
            earlier = {self.step_name(number) for number in range(attempt)}
            in_the_way = StepsInTheWay(self.job, self.step_name(attempt), earlier=earlier)
            watch = self._watch(attempt)
            if attempt:
                watch.add(in_the_way)
            process = warm or self._start_step(attempt, log=log)
            with watch.running():
                code = run_step(
                    process,
                    log=log,
                    is_overdue=lambda: bool(self.lost or in_the_way.stuck_steps) or ended_long_ago(watch.look),
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
        run = self._run
        watch = watch_ranks(
            run,
            attempt,
            self._config,
            world_size=self.start.world_size,
            end_ranks=self.end_ranks,
            is_halted=self.job.is_halted,
        )
        watch.add(NoticeKeeper(run, ask=self.job.notice), FindingsRelay())
        if self.pool.outlives_nodes:
            watch.add(LostNodes(self._look_for_lost_nodes))
        every_min = program_of(self._config).used.requeue.grow_every_min
        if every_min is not None and self._can_grow(self.start.nodes):
            growth = GrowthWatch(
                run,
                attempt,
                self.job,
                self.pool,
                nodes=len(self.start.nodes),
                left_out=self._left_out,
                stop=partial(self._stop_for_growth, attempt),
                every_min=every_min,
            )
            watch.add(growth)
        if self._config.requeue.warm_ranks:
            watch.add(NextRanks(partial(self._start_next, attempt + 1)))
        return watch

    def _look_for_lost_nodes(self) -> None:
        self.lost |= set(silent_nodes(self._run, self.start.nodes, self._env))

    def _stop_for_growth(self, attempt: int, growth: Growth) -> None:
        self.growth = growth
        try:
            self.ask_ranks(attempt)
        except ClusterError:
            # Ranks that fail now have failed by themselves.
            self.growth = None
            raise

    def close(self) -> None:
        """Ends the ranks in waiting and the guards."""
        self._waiting.dismiss()
        for guard in self._guards.values():
            guard.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                guard.wait(_GUARD_GONE_S)

    @property
    def _is_batch_script(self) -> bool:
        """Whether Slurm has started this process; under salloc a person holds the job."""
        return self._env.get("SLURMD_NODENAME") in self.pool.nodes

    def _can_grow(self, nodes: Sequence[str]) -> bool:
        """Returns whether the job may be requeued for more nodes than these."""
        config = self._config
        is_small = self.pool.outlives_nodes and len(nodes) < self.pool.sizes[-1]
        return is_small and config.requeue.enabled and self._is_batch_script

    def _keep_guard(self) -> None:
        """Starts a guard on one of the attempt's nodes if none runs there."""
        head_node = self._env.get("SLURMD_NODENAME")
        nodes = self.start.nodes
        if not (self.pool.outlives_nodes and self._is_batch_script):
            return
        if not any(node in nodes and guard.poll() is None for node, guard in self._guards.items()):
            guard_node = next((node for node in nodes if node != head_node), None)
            if guard_node is not None:
                self._guards[guard_node] = start_guard(self._run, guard_node, self._env)

    def _start_step(self, attempt: int, *, log: BinaryIO, waits: Path | None = None) -> subprocess.Popen[bytes]:
        """Starts the ranks of an attempt.

        Args:
            attempt: its number.
            log: file for the output of srun.
            waits: the ranks wait until they are needed; until then all of them write into this file.
        """
        run = self._run
        nodes = self.start.nodes
        placeholders = {
            "{attempt}": str(attempt),
            "{nodes}": str(len(nodes)),
            "{tasks}": str(sum(self.pool.tasks_per_node[: len(nodes)])),
            "{nodelist}": compact_nodelist(nodes),
        }
        words = list(self._command)
        if waits is not None:
            words = [f"--output={waits}" if word.startswith("--output=") else word for word in words]
        for name, value in placeholders.items():
            words = [word.replace(name, value) for word in words]
        name = f"--job-name={self.step_name(attempt)}"
        words = [name if word.startswith("--job-name=") else word for word in words]
        words = self._within_share(words)
        stage = self._config.slurm.stage_python
        if stage and not self._stages.get(nodes):  # {} after a failure, which is tried again
            self._stages[nodes] = stage_python(stage, run.place, nodes, self._env)
        asks_for_gpus = self._config.uses_cluster and self._config.slurm.gpu_flag != "none"
        # Ranks of one node need no way to another.
        chosen = self._config.slurm if len(nodes) > 1 else ClusterSection()
        env = {
            **(with_gpus_for(self._env, self.start.world_size) if asks_for_gpus else self._env),
            **self._stages.get(nodes, {}),
            **({} if waits is None else {WAITS: "1"}),
            "SLURM_TRAIN_ATTEMPT": str(attempt),
            "MASTER_ADDR": _address(nodes[0], self.job, chosen, self._env),
            "MASTER_PORT": str(probe_port(str(run.path), attempt=attempt, env=self._env)),
        }
        # The working directory of this process differs: its own imports must not come from unverified code.
        cwd = run.code if run.code.is_dir() else None
        return start_step(words, env=env, log=log, cwd=cwd, waits=waits is not None)

    def _within_share(self, words: list[str]) -> list[str]:
        """Returns the words of srun, limited to the share of the allocation that the run may use."""
        tasks_per_node = max(self.pool.tasks_per_node)
        slot = PackSlot.from_env(self._env)
        if slot is None:
            return within_allocation(words, self._env, tasks_per_node=tasks_per_node)
        requested = resource_flags(self._config.slurm, per_node=self.start.world_size)
        gpus = {
            name: str(value) for name, value in requested.items() if name in ("gres", "gpus-per-node", "gpus-per-task")
        }
        words = within_allocation(words, self._env, tasks_per_node=tasks_per_node * slot.num_runs)
        return slot.step_words(words, self._env, gpus)

    def _start_next(self, attempt: int) -> None:
        path = self._run.logs / f"waiting_{attempt}.log"
        create_empty(path)
        with path.open("ab") as log:
            process = self._start_step(attempt, log=log, waits=path)
        self._waiting.process = process
        self._waiting.log = path
        self._waiting.attempt = attempt
        self._waiting.nodes = self.start.nodes

    def _make_logs(self, folder: Path) -> None:
        """Creates the logs of srun and the tasks; Slurm would create them with the umask of the login shell."""
        for_each(lambda name: create_empty(folder / name), [*self._task_logs(), "batch.log"])

    def _task_logs(self) -> list[str]:
        """Returns the names of the logs that srun may write, from its --output."""
        output = next((word for word in self._command if word.startswith("--output=")), "rank_%t.log")
        num_components = max(1, len(het_job_ids(self._env)))
        # srun counts "%t" on by one with each component of a heterogeneous step (22.05).
        tasks = range(sum(self.pool.tasks_per_node) + num_components - 1)
        return [Path(output).name.replace("%t", str(task)) for task in tasks]

    def _note_unfit(self, attempt: int, error: NodesError) -> Finding:
        """Records as a finding why the ranks were not started, and returns it."""
        nodes = self.start.nodes
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
        write_preflight(self._run, attempt, {"findings": [finding.as_json()], "table": [], "nodes": list(nodes)})
        return finding

    def _note_nodes(self, attempt: int) -> None:
        """Records what an attempt has found out about its nodes; the run goes on if the list cannot be written."""
        run = self._run
        record = read_preflight(self._run, attempt)
        hours = self._config.preflight.exclude_bad_nodes_h
        findings = findings_of(record)
        bad_nodes = bad_nodes_of(findings)
        with contextlib.suppress(OSError):
            now_unix_s, cluster = time.time(), cluster_of(self._env)
            add_bad_nodes(run, bad_nodes, hours=hours, now_unix_s=now_unix_s, cluster=cluster)
            if bad_nodes and hours > 0:
                lists = list_file(run).with_name(BAD_NODES_PARTS)
                say(f"later submissions leave out {', '.join(bad_nodes)} for {hours:g} h; see {lists}")
            if record and not errors_of(findings):
                for node in forgive_nodes(run, record.get("nodes", ()), now_unix_s=now_unix_s, cluster=cluster):
                    say(f"{node} passed; removed from the bad nodes")

    def ended(self, attempt: int) -> StepEnd:
        """Reads what srun wrote."""
        log = self._run.attempt_logs(first_round(self._run, attempt)) / "batch.log"
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        are_ranks = len(self.job.job_ids) == 1 and self.pool.tasks_per_node == self.pool.ranks_per_node
        return step_end(text, are_ranks=are_ranks)

    def can_avoid(self, nodes: Sequence[str]) -> bool:
        """Asks Slurm about the job's partition."""
        return can_avoid(nodes, self.job.job_id, self.job.commands, num_nodes=self.pool.fewest)

    def lost_nodes(self, job: Mapping[str, str] | None) -> Sequence[str]:
        """Returns the nodes that do not answer, or that Slurm has taken from the job."""
        if not self.pool.outlives_nodes:
            return ()
        present = set(present_nodes(job, self.pool)) - self.lost
        return [node for node in self.start.nodes if node not in present]

    def nodes_without(self, nodes: Sequence[str]) -> Sequence[str]:
        """Chooses among the nodes that Slurm has not taken from the job; a silent node is noticed when it is used."""
        if not nodes or not self.pool.outlives_nodes:
            return ()
        taken = set(self.pool.nodes).difference(present_nodes(self.job.show(), self.pool))
        return self.pool.choose(without={*nodes, *self._left_out, *taken})

    def use(self, nodes: Sequence[str], *, without: Sequence[str]) -> None:
        """Changes what the next attempt is opened with."""
        self._left_out |= set(without)
        self.start = replace(self.start, nodes=tuple(nodes), world_size=self.pool.num_ranks(len(nodes)))

    def step_name(self, attempt: int) -> str:
        """Returns the name of an attempt's step, by which the step is identified; no other run's step has it."""
        name = STEP_NAME.format(attempt=attempt)
        return f"{name}.{self._run.run_id}" if self.job.is_shared else name

    def clear(self, attempt: int) -> bool:
        """Ends the attempt's steps."""
        violent = self.ended(attempt).violent
        if violent is not None and Cause.of(violent.words).kind == NOT_CREATED and self._has_begun_before(attempt):
            # Slurm's record of the job's resources is wrong after a kill of slurmctld, until the job ends (22.05).
            return False
        if self.lost:
            # The step exists until Slurm declares the node down; on the other nodes its ranks are killed at once.
            for step, step_name in self.job.commands.steps(self.job.job_id).items():
                if step_name == self.step_name(attempt):
                    self.job.commands.cancel_step(step, kill=True)
            return True
        mark = first_mark(self._run, attempt)
        # After a kill of slurmstepd no process of Slurm can end its step (22.05: the step exists until the job ends).
        within_s = 10.0 if mark is not None and mark.exit_code == EXIT_ORPHANED else 60.0
        name = self.step_name(first_round(self._run, attempt))
        return all(end_step(job_id, name, self.job.commands, within_s=within_s) for job_id in self.job.job_ids)

    def _has_begun_before(self, attempt: int) -> bool:
        """Returns whether ranks of an earlier attempt were started by this start of the job."""
        earlier = [opened for opened in read_ledger(self._run) if opened.number < attempt]
        return any(opened.start.job_start == self.start.job_start for opened in earlier)

    def ask_ranks(self, attempt: int) -> None:
        """Asks the ranks of an attempt to save and stop, as the warning before the time limit does.

        Raises:
            ClusterError: Slurm refused, or does not answer.
        """
        name = self.step_name(attempt)
        for step, step_name in self.job.commands.steps(self.job.job_id).items():
            if step_name == name:
                self.job.commands.ask_step(step, name="USR2")

    def end_ranks(self, beats: Mapping[int, Beat]) -> None:
        """Kills the steps of the ranks.

        Raises:
            ClusterError: Slurm refused, or does not answer.
        """
        for step_id in {beat.step_id for beat in beats.values()} - {""}:
            job_id, _, step = step_id.partition(".")
            self.job.commands.cancel_step(step_id, kill=True)
            if job_id not in self.job.job_ids:
                continue
            # The step has the same number in each component.
            for component_id in self.job.job_ids:
                if component_id != job_id:
                    self.job.commands.cancel_step(f"{component_id}.{step}", kill=True)
