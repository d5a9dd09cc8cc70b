"""The ranks of one attempt under srun: checks nodes and snapshot, runs and watches the step, records bad nodes."""

from __future__ import annotations

import contextlib
import math
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal

from slurm_train.config.schema import ClusterSection, RunConfig
from slurm_train.distributed import interfaces
from slurm_train.distributed.master import chosen_address, probe_port
from slurm_train.errors import EXIT_FAILURE, EXIT_ORPHANED, ClusterError, NodesError, SilentNodesError
from slurm_train.rundir.attempts import newest_round, read_ledger
from slurm_train.rundir.events import (
    BAD_NODES_PARTS,
    Finding,
    add_bad_nodes,
    append_event,
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
from slurm_train.rundir.files import create_empty, for_each, last_lines, read_json, read_record
from slurm_train.rundir.heartbeat import read_beats
from slurm_train.rundir.paths import RunDirectory, list_checkpoints, name_of
from slurm_train.rundir.timing import CAUSES, Spent, last_step, read_notice
from slurm_train.slurm.allocation import Allocation, cluster_of, compact_nodelist, fewest_cpus, het_job_ids
from slurm_train.slurm.flags import resource_flags
from slurm_train.slurm.job_variables import with_gpus_for
from slurm_train.slurm.records import NO_STEP
from slurm_train.slurm.share import Share
from slurm_train.supervise.growth import (
    Growth,
    Prospect,
    assess,
    newest_growth_unix_s,
    restart_seconds,
    step_seconds,
    wait_seconds,
)
from slurm_train.supervise.monitor import (
    BestEffort,
    FindingsRelay,
    Monitor,
    NoticeKeeper,
    Task,
    note_environment,
    say,
    watch_ranks,
)
from slurm_train.supervise.nodes import NodePool
from slurm_train.supervise.ranks import (
    LINGER_S,
    ORPHAN_LINGER_S,
    WAITS,
    RanksInWaiting,
    require_seen_by_all,
    run_on_each_node,
    run_step,
    silent_nodes,
    start_guard,
    start_step,
)
from slurm_train.supervise.scheduler import SlurmJob
from slurm_train.supervise.staging import stage_python
from slurm_train.supervise.supervisor import refused_code

_GUARD_GONE_S = 5.0
_ANSWERS_WITHIN_S = 25.0


def pool_of(allocation: Allocation, run: RunDirectory, config: RunConfig) -> NodePool:
    """Returns the nodes of a job as the run can use them by its plan; an salloc may have more nodes."""
    world = (read_json(run.plan) or {}).get("world", {})
    per_node = tuple(world.get("ranks_per_node") or allocation.tasks_per_node)
    pool = NodePool(
        nodes=allocation.nodes,
        sizes=tuple(world.get("num_nodes") or (len(per_node),)),
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


class _LostNodes(Task):
    """Detects lost nodes before Slurm does, which needs SlurmdTimeout for it (300 s by default).

    The nodes are asked if ranks have failed and srun does not end, or if the heartbeats of a node have stopped.
    """

    name = "the look for lost nodes"
    every_s = 2.0
    _FAILED_S = 3.0
    _SILENT_S = 12.0

    def __init__(self, run: RunDirectory, attempt: int, job: SlurmJob, env: Mapping[str, str]) -> None:
        self._run = run
        self._attempt = attempt
        self._job = job
        self._env = env
        self._beats: dict[str, tuple[int, float]] = {}
        """For each node the sum of its ranks' beats, and since when it has not changed."""
        self._last_question_s = -math.inf

    def look(self) -> None:
        """Asks the nodes if there is a reason to, at most once a minute."""
        now_s = time.monotonic()
        sums = Counter[str]()
        for beat in read_beats(self._run, self._attempt).values():
            # More than 0 from the first heartbeat on.
            sums[beat.host] += beat.beats + 1
        for host, total in sums.items():
            if self._beats.get(host, (0, 0.0))[0] != total:
                self._beats[host] = (total, now_s)
        mark = first_mark(self._run, self._attempt)
        has_failed = mark is not None and time.time() - mark.time_unix_s > self._FAILED_S
        is_silent = any(now_s - since_s > self._SILENT_S for _, since_s in self._beats.values())
        if (has_failed or is_silent) and now_s - self._last_question_s > 60.0 and not self._job.lost:
            self._last_question_s = now_s
            self._job.lost |= set(silent_nodes(self._run, self._job.start.nodes, self._env))


class _EndOfRanks(Task):
    """Detects that the ranks ended so long ago that srun must have missed their end."""

    name = "the look for the end of the ranks"

    def __init__(self, run: RunDirectory, attempt: int) -> None:
        self._run = run
        self._attempt = attempt
        self.is_overdue = False

    def look(self) -> None:
        """Reads the mark of the rank that failed first."""
        mark = first_mark(self._run, newest_round(self._run, self._attempt))
        if mark is not None:
            linger_s = ORPHAN_LINGER_S if mark.exit_code == EXIT_ORPHANED else LINGER_S
            self.is_overdue |= time.time() - mark.time_unix_s > linger_s


class _StepsInTheWay(Task):
    """Detects a step of an earlier attempt that keeps srun from starting the ranks, and that cannot be ended.

    A slurmctld that was killed restarts from its state files. If a step ended after these were written, slurmctld
    regards it as running until the job ends, also after it was cancelled (22.05), and srun waits for its cores.
    """

    name = "the look for steps in the way"
    every_s = 10.0
    _MOST_LOOKS = 3

    def __init__(self, run: RunDirectory, attempt: int, job: SlurmJob) -> None:
        self._run = run
        self._attempt = attempt
        self._job = job
        self._earlier = {job.step_name(earlier) for earlier in range(attempt)}
        self._has_begun = False
        self._looks = 0
        self.stuck_steps = ""
        """The ids of such steps that could not be ended, "" for none."""

    def look(self) -> None:
        """Cancels such steps, and after some looks reports those that remain."""
        self._has_begun = self._has_begun or bool(read_beats(self._run, self._attempt))
        if self._has_begun:
            return
        steps: dict[str, str] = {}
        for job_id in self._job.job_ids:
            steps |= self._job.commands.steps(job_id)
        self._has_begun = self._job.step_name(self._attempt) in steps.values()
        earlier_steps = [step for step, name in steps.items() if name in self._earlier]
        self._looks = self._looks + 1 if earlier_steps and not self._has_begun else 0
        if self._looks >= self._MOST_LOOKS:
            self.stuck_steps = ", ".join(earlier_steps)
        elif self._looks:
            for step in earlier_steps:
                self._job.commands.cancel_step(step)


class _GrowthWatch(Task):
    """Asks after saves whether a requeue for more nodes would pay off, and if so stops the ranks for it.

    Args:
        run: the run.
        attempt: number of the attempt.
        job: the job; its `growth` tells the supervisor why the ranks ended.
        every_min: `requeue.grow_every_min`; "auto" for a default, but never where jobs may be preempted.
    """

    name = "the look for more nodes"
    every_s = 5.0
    _AUTO_MIN = 30

    def __init__(self, run: RunDirectory, attempt: int, job: SlurmJob, *, every_min: int | Literal["auto"]) -> None:
        self._run = run
        self._attempt = attempt
        self._job = job
        self._is_auto = every_min == "auto"
        ledger = read_ledger(run)
        every_s = 60.0 * (self._AUTO_MIN if every_min == "auto" else every_min)
        self._wait_s = wait_seconds(ledger, every_s=every_s)
        since_growth_s = time.time() - newest_growth_unix_s(ledger)
        self._due_s = time.monotonic() + max(self._wait_s - since_growth_s, every_s)
        self._last_seen_step: int | None = None
        self._newest_note = ""

    def look(self) -> None:
        """Asks Slurm when the question is due and a checkpoint was completed after that."""
        if self._job.growth is not None or time.monotonic() < self._due_s:
            return
        newest = next((name_of(path).step for path in list_checkpoints(self._run.checkpoints)), 0)
        if self._last_seen_step is None or newest <= self._last_seen_step:
            self._last_seen_step = newest
            return
        self._last_seen_step = None
        self._due_s = time.monotonic() + self._wait_s
        if self._is_auto and self._job.may_be_preempted():
            self._note("it does not grow: jobs of its QOS and partition may be preempted (requeue.grow_every_min)")
            self._due_s = math.inf
            return
        growth = self._assess()
        if growth is None:
            return
        if not growth.is_worth_it:
            self._note(f"it does not grow: {growth.sentence}")
            return
        self._note(f"it grows: {growth.sentence}")
        self._job.growth = growth
        try:
            self._job.ask_ranks(self._attempt)
        except ClusterError:
            self._job.growth = None
            raise

    def _assess(self) -> Growth | None:
        """Returns what a requeue would gain now, None where there is no room or nothing was measured yet."""
        run = self._run
        room = self._job.room()
        nodes = len(self._job.start.nodes)
        larger = max((size for size in self._job.pool.sizes if size <= room.nodes), default=0)
        if larger <= nodes:
            if room.limit_reason:
                self._note(f"it does not grow: {room.limit_reason}")
            return None
        spent = read_record(run.account(self._attempt), Spent)
        if spent is None:
            return None
        ledger = read_ledger(run)
        ledger[-1] |= {
            "first_step": spent.first_step,
            "last_step": spent.first_step + spent.steps,
            "start_s": spent.begin_unix_s - float(ledger[-1]["time_unix_s"]),
            **{cause: getattr(spent, cause) for cause in CAUSES[1:-1]},
        }
        pace = step_seconds(ledger, nodes=nodes, larger=larger)
        if pace is None:
            return None
        step, larger_step = pace
        end_unix_s = read_notice(run, self._attempt).end_unix_s
        growth = assess(
            Prospect(
                nodes=nodes,
                larger=larger,
                step=step,
                larger_step=larger_step,
                restart=restart_seconds(ledger, delay_s=self._job.requeue_delay_s(), save_s=spent.longest_save_s),
                steps_left=_steps_left(run),
                time_left_s=None if end_unix_s is None else end_unix_s - time.time(),
            )
        )
        return replace(growth, exclude=room.exclude)

    def _note(self, sentence: str) -> None:
        """Prints a sentence and writes it down, if it differs from the one before."""
        if sentence == self._newest_note:
            return
        self._newest_note = sentence
        say(sentence)
        append_event(self._run, "growth", attempt=self._attempt, sentence=sentence)


def _steps_left(run: RunDirectory) -> int | None:
    """Returns how many steps a run has not taken yet, None where it has no end that is known."""
    # A run that is counted in epochs has its number of steps in the metrics, not in the plan.
    lines = last_lines(run.metrics)
    max_steps = lines[-1].get("max_steps") if lines else None
    max_steps = max_steps or (read_json(run.plan) or {}).get("max_steps")
    return None if max_steps is None else max(0, int(max_steps) - last_step(run))


class _NextRanks(Task):
    """Starts the ranks in waiting when the ranks of the attempt train, so that they take no cores from their start."""

    name = "the start of the ranks in waiting"
    every_s = 1.0

    def __init__(self, run: RunDirectory, attempt: int, *, world_size: int, start: Callable[[], None]) -> None:
        self._run = run
        self._attempt = attempt
        self._world_size = world_size
        self._start = start
        self._has_started = False

    def look(self) -> None:
        """Starts them, once."""
        if self._has_started:
            return
        beats = read_beats(self._run, self._attempt)
        if len(beats) == self._world_size and all(beat.settled for beat in beats.values()):
            self._has_started = True
            self._start()


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
            end = _EndOfRanks(run, attempt)
            in_the_way = _StepsInTheWay(run, attempt, self.job)
            monitor = self._monitor(attempt)
            for task in (end, in_the_way) if attempt else (end,):
                monitor.add(task)
            process = warm or self._start_step(attempt, log=log)
            with monitor.running():
                code = run_step(
                    process,
                    log=log,
                    is_overdue=lambda: end.is_overdue or bool(self.job.lost or in_the_way.stuck_steps),
                    beside=monitor.check,
                )
            if in_the_way.stuck_steps:
                no_step = (
                    f"{NO_STEP} for job {self.job.job_id}: it still has {in_the_way.stuck_steps} of an earlier attempt"
                )
                log.write(f"srun: error: {no_step}\n".encode())
            return code

    def _monitor(self, attempt: int) -> Monitor:
        """Returns what is done beside the ranks of an attempt, whatever else they are watched for."""
        run = self.run
        world_size = self.job.start.world_size
        monitor = watch_ranks(
            run,
            attempt,
            self.config,
            world_size=world_size,
            end_ranks=self.job.end_ranks,
            is_halted=self.job.is_halted,
        )
        monitor.add(NoticeKeeper(run, attempt, ask=self.job.notice))
        monitor.add(FindingsRelay(run, attempt))
        if self.job.pool.outlives_nodes:
            monitor.add(_LostNodes(run, attempt, self.job, self.env))
        every_min = self.config.requeue.grow_every_min
        if every_min is not None and self._can_grow(self.job.start.nodes):
            monitor.add(_GrowthWatch(run, attempt, self.job, every_min=every_min))
        if self.config.requeue.warm_ranks:
            start = partial(self._start_next, attempt + 1)
            monitor.add(_NextRanks(run, attempt, world_size=world_size, start=start))
        return monitor

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
            self.stages[nodes] = stage_python(stage, run.path.parent.parent, nodes, self.env)
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
