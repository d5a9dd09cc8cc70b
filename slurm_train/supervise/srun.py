"""The ranks of one attempt under srun: nodes asked, snapshot checked, step run and watched, bad nodes noted."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from slurm_train.config.schema import RunConfig
from slurm_train.distributed.master import probe_port
from slurm_train.errors import EXIT_FAILURE, EXIT_ORPHANED, NodesError, SilentNodesError
from slurm_train.frozen_class import frozen
from slurm_train.rundir.attempts import newest_round
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
from slurm_train.rundir.files import create_empty, read_json
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.allocation import Allocation, het_job_ids
from slurm_train.supervise.monitor import (
    BestEffort,
    FindingsRelay,
    NoticeKeeper,
    Task,
    note_environment,
    say,
    watch_ranks,
)
from slurm_train.supervise.ranks import LINGER_S, ORPHAN_LINGER_S, require_seen_by_all, run_step
from slurm_train.supervise.scheduler import SlurmJob
from slurm_train.supervise.staging import stage_python
from slurm_train.supervise.supervisor import refused_code


def share_of(allocation: Allocation, run: RunDirectory, config: RunConfig) -> tuple[Allocation, int]:
    """Returns the part of an allocation that the run takes, and its number of ranks.

    An salloc may have more nodes, or other task counts.
    """
    per_node = (read_json(run.plan) or {}).get("world", {}).get("ranks_per_node") or allocation.tasks_per_node
    nodes = allocation.nodes[: len(per_node)]
    if config.cluster is not None and config.cluster.launcher == "torchrun":
        # Slurm may have granted fewer nodes than were planned for. One task has all ranks of its node.
        share = replace(allocation, nodes=nodes, tasks_per_node=(1,) * len(nodes))
        return share, sum(per_node[: len(nodes)])
    if len(per_node) <= allocation.num_nodes:
        allocation = replace(allocation, nodes=nodes, tasks_per_node=tuple(per_node))
    return allocation, allocation.num_tasks


def _address(node: str, job: SlurmJob) -> str:
    """Returns how a node is reached: its name, or Slurm's NodeAddr where the name does not resolve."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        return (
            BestEffort()("the address of rank 0", lambda: job.commands.node_address(node), "", asks_slurm=True) or node
        )
    return node


class _EndOfRanks(Task):
    """Finds out that the ranks have ended so long ago that srun must have missed it."""

    name = "the look for the end of the ranks"

    def __init__(self, run: RunDirectory, attempt: int) -> None:
        self._run, self._attempt = run, attempt
        self.is_overdue = False

    def look(self) -> None:
        """Looks at the first mark of a rank."""
        if (mark := first_mark(self._run, newest_round(self._run, self._attempt))) is not None:
            linger_s = ORPHAN_LINGER_S if mark.exit_code == EXIT_ORPHANED else LINGER_S
            self.is_overdue |= time.time() - mark.time_unix_s > linger_s


@frozen
class SrunLaunch:
    """Starts the ranks of an attempt; calling it with the attempt's number returns their exit code."""

    run: RunDirectory
    config: RunConfig
    job: SlurmJob
    command: Sequence[str]
    """srun and its words, with {attempt} and {nodes} for what is known now only."""
    allocation: Allocation
    """What the run takes of the job's."""
    env: Mapping[str, str]

    def __call__(self, attempt: int) -> int:
        """Runs the ranks, and writes down what they have found out about their nodes."""
        note_environment(self.run, attempt, slurm=self.job.commands.version)
        code = self._start(attempt)
        BestEffort()("the list of bad nodes", lambda: self._note_nodes(attempt), None)
        return code

    def _start(self, attempt: int) -> int:
        run, nodes, folder = self.run, self.allocation.nodes, self.run.attempt_logs(attempt)
        say(f"attempt {attempt} of {run.name}/{run.run_id} on {', '.join(nodes)}; rank logs in {folder}")
        for bad in read_bad_nodes(run, now_unix_s=time.time()):
            if bad.node in nodes:
                say(f"was found bad before and is checked again: {bad}")
        # Slurm would make them by the umask of the login shell.
        for name in (*self._task_logs(), "batch.log"):
            create_empty(folder / name)
        with (folder / "batch.log").open("ab") as log:
            try:
                require_seen_by_all(run, nodes, self.env, attempt=attempt)
            except NodesError as err:
                finding = self._note_unfit(attempt, err)
                # The relay of findings runs beside the ranks, of which there are none.
                say(finding.line)
                log.write(f"{finding.line}\n".encode())
                return EXIT_FAILURE if finding.blames_node else err.exit_code
            if (code := refused_code(run, attempt, self.env)) is not None:
                return code
            end = _EndOfRanks(run, attempt)
            monitor = watch_ranks(
                run, attempt, self.config, world_size=self.job.start.world_size, end_ranks=self.job.end_ranks
            )
            for task in (NoticeKeeper(run, attempt, ask=self.job.notice), FindingsRelay(run, attempt), end):
                monitor.add(task)
            filled = (word.replace("{attempt}", str(attempt)) for word in self.command)
            words = [word.replace("{nodes}", str(len(nodes))) for word in filled]
            stage = self.config.cluster.stage_python if self.config.cluster is not None else None
            env = {
                **self.env,
                **(stage_python(stage, run.path.parent.parent, nodes, self.env) if stage else {}),
                "SLURM_TRAIN_ATTEMPT": str(attempt),
                "MASTER_ADDR": _address(nodes[0], self.job),
                "MASTER_PORT": str(probe_port(str(run.path), attempt=attempt, env=self.env)),
            }
            with monitor.running():
                return run_step(
                    words,
                    env=env,
                    log=log,
                    is_overdue=lambda: end.is_overdue,
                    beside=monitor.check,
                    # This process works elsewhere: its own imports must not come from code that nobody has looked at.
                    cwd=run.code if run.code.is_dir() else None,
                )

    def _task_logs(self) -> list[str]:
        """Returns the names of the logs that srun may write, from its --output."""
        output = next((word for word in self.command if word.startswith("--output=")), "rank_%t.log")
        num_components = max(1, len(het_job_ids(self.env)))
        # srun counts "%t" on by one with each component of a heterogeneous step (22.05).
        tasks = range(self.allocation.num_tasks + num_components - 1)
        return [Path(output).name.replace("%t", str(task)) for task in tasks]

    def _note_unfit(self, attempt: int, error: NodesError) -> Finding:
        """Writes down as a finding what kept the ranks from being started, and returns it."""
        nodes = self.allocation.nodes
        # Where few of many nodes are blind it is their fault; of two, or where most are, the path is not shared.
        blames = 2 * len(error.nodes) < len(nodes) and not isinstance(error, SilentNodesError)
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
        """Writes down what an attempt has found out about its nodes; the run goes on if the list cannot be written."""
        run, record, hours = self.run, read_preflight(self.run, attempt), self.config.preflight.exclude_bad_nodes_h
        findings = findings_of(record)
        found = bad_nodes_of(findings)
        with contextlib.suppress(OSError):
            add_bad_nodes(run, found, hours=hours, now_unix_s=time.time())
            if found and hours > 0:
                lists = list_file(run).with_name(BAD_NODES_PARTS)
                say(f"later submissions leave out {', '.join(found)} for {hours:g} h; see {lists}")
            if record and not errors_of(findings):
                for node in forgive_nodes(run, record.get("nodes", ()), now_unix_s=time.time()):
                    say(f"{node} was found well and is off the list of bad nodes")
