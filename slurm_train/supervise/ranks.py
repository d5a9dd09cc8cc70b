"""Runs the ranks of an attempt: as a step of srun in an allocation, or as processes of this machine.

Before a step every node is asked whether it sees the run directory. Without that, a node that lacks the path ends the
step with a line about a log file that could not be opened, or the ranks of the other nodes wait for it until a
time-out. While Slurm's controller is away no node answers, and they are asked again.

srun gets each task's end from the node's slurmstepd. Where that one was killed, srun waits for ranks that are long
gone; where srun itself is killed, the ranks train on without it. Both are ended here.

On this machine each rank is one process with one log. Rank 0 keeps the terminal, and the first rank that fails ends the
rest.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from slurm_train.assets import read_template
from slurm_train.errors import EXIT_DONE, EXIT_REQUEUE, ClusterError, NodesError, SilentNodesError
from slurm_train.rundir.files import open_file
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.allocation import compact_nodelist, het_job_ids, parse_nodelist
from slurm_train.slurm.answers import plain
from slurm_train.slurm.commands import Finished, SlurmCommands, is_away, run_program
from slurm_train.slurm.job_variables import helper_environment
from slurm_train.slurm.records import NO_STEP

# --- does every node see the run ---

_TIMEOUT_S = 25.0
_ASKED_DIRECTLY_S = 5.0
_FEW = 10
_RETRY_S = 120.0
"""For a controller that is away; as long as other questions to it are repeated by default."""
_REFUSED_S = 30.0
"""For one that makes no step: after its restart it may not have freed the cores and memory of the one before."""
_LATE_S = 12
"""How long a node may take to see the file of an attempt, which is there before the question is asked."""
# srun has started nothing anywhere: nothing is known of the nodes.
_NOT_CREATED = re.compile(
    rf"{NO_STEP}|srun: fatal: |srun: error: (?:Unable to (?:allocate|confirm|create)|Invalid |Unable to initialize)"
)
# Answer of a node -> what it does not do, code of the finding, what to do.
_PROBLEMS = {
    "blind": (
        "not see the run directory",
        "FS_MISSING",
        "put the run on a shared path: run.root=/shared/path",
    ),
    "readonly": (
        "not write to the run directory",
        "FS_READONLY",
        "check the mount and the permissions there, or name another place with run.root=DIR",
    ),
}


def require_seen_by_all(
    run: RunDirectory, nodes: Sequence[str], env: Mapping[str, str], *, attempt: int | None = None
) -> None:
    """Refuses nodes that cannot read and write the run directory. Called inside an allocation, once.

    Args:
        run: the run.
        nodes: all nodes of the allocation.
        env: the job's environment.
        attempt: number of the attempt that was opened right before: the nodes must see it, too.

    Raises:
        NodesError: some nodes cannot, by name.
        SilentNodesError: a node does not answer in time, or does not see the attempt.
    """
    if len(nodes) == 1 and env.get("SLURMD_NODENAME") == nodes[0]:
        # The one node is the one that runs this process, which has read the configuration already. Under salloc this
        # is a login node.
        return
    newest = run.config if attempt is None else run.epochs / f"attempt_{attempt}"
    answers, complaint = _ask(
        run, nodes, env, newest=str(newest.relative_to(run.path)), timeout_s=_TIMEOUT_S, retry_s=_RETRY_S
    )
    for word, (problem, code, hint) in _PROBLEMS.items():
        if named := sorted(node for node, answer in answers.items() if answer == word):
            raise NodesError(f"{_names(named)} {problem} {run.path}", code=code, nodes=named, hint=hint)
    if stale := sorted(node for node, answer in answers.items() if answer == "stale"):
        raise SilentNodesError(
            f"{_names(stale)} not see {newest} {_LATE_S} s after it was written",
            code="FS_STALE",
            nodes=stale,
            hint="the path is not shared, or its cache is late: compare `findmnt -T` of it on the nodes",
        )
    if not answers and _NOT_CREATED.search(complaint):
        # srun's own fatal errors are about its words, which are the same next time.
        kind = NodesError if "srun: fatal:" in complaint else SilentNodesError
        raise kind(
            f"srun could not create a step that asks the nodes for {run.path}{complaint}",
            code="STEP_REFUSED",
            nodes=(),
            hint="the nodes were not asked: look at what the job requests (`scontrol show job`) and at cluster.sbatch",
        )
    if silent := sorted(set(nodes) - set(answers)):
        within = f" within {_TIMEOUT_S:.0f} s"
        raise SilentNodesError(
            f"no answer from {', '.join(silent)}{within}, when asked for {run.path}{complaint}",
            code="NODE_MISSING",
            nodes=silent,
            hint=f"look at the node, or leave it out with cluster.exclude={','.join(silent)}",
        )


def silent_nodes(run: RunDirectory, nodes: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Returns which nodes do not answer while ranks run, asked twice; none where no node answers.

    Then Slurm's controller or the network of this node is at fault, and nothing is known of the others.
    """
    silent = list(nodes)
    for _ in range(2):
        # srun asks a few nodes itself; it has many asked by others, and one that is lost delays those behind it.
        timeout_s = _ASKED_DIRECTLY_S if len(silent) <= _FEW else _TIMEOUT_S
        answers, complaint = _ask(run, silent, env, newest=run.config.name, timeout_s=timeout_s, retry_s=0.0)
        was_not_asked = _NOT_CREATED.search(complaint) is not None
        if not answers and (was_not_asked or len(silent) == len(nodes)):
            return []
        silent = [node for node in silent if node not in answers]
        if not silent:
            break
    return silent


def _names(nodes: Sequence[str]) -> str:
    return f"node {nodes[0]} does" if len(nodes) == 1 else f"nodes {', '.join(nodes)} do"


def _ask(
    run: RunDirectory, nodes: Sequence[str], env: Mapping[str, str], *, newest: str, timeout_s: float, retry_s: float
) -> tuple[dict[str, str], str]:
    """Returns the answer of each node that gave one, and what srun complained about, if anything.

    Asks again while there are no answers at all because Slurm's controller is away or makes no step.
    """
    question = ["/bin/sh", "-c", read_template("see_run.sh"), "sh", str(run.path), newest, str(_LATE_S)]
    began_s = time.monotonic()
    while True:
        try:
            done = run_on_each_node(question, nodes, env, timeout_s=timeout_s)
            output = done.stdout
            errors = done.stderr
            if is_away(errors):
                again_for_s = retry_s
            else:
                again_for_s = min(retry_s, _REFUSED_S) if NO_STEP in errors else 0.0
        except subprocess.TimeoutExpired as err:
            output = _text(err.stdout)
            errors = _text(err.stderr)
            again_for_s = retry_s
        answers: dict[str, str] = {}
        for line in output.splitlines():
            words = line.split()
            if len(words) == 2 and words[0] in (*_PROBLEMS, "fine", "stale"):
                answer, node = words
                answers[node] = answer
        if answers or time.monotonic() >= began_s + again_for_s:
            return answers, _complaint(errors)
        time.sleep(1.0)


def _complaint(errors: str) -> str:
    """Returns what srun has said, for the end of a message: why it made no step, else its last line."""
    lines = plain(_without_noise(errors)).strip().splitlines()
    reasons = [line for line in lines if _NOT_CREATED.search(line)]
    return f"; it said: {(reasons or lines)[-1].strip()}" if lines else ""


def run_on_each_node(
    words: Sequence[str], nodes: Sequence[str], env: Mapping[str, str], *, timeout_s: float
) -> Finished:
    """Runs a command once on each of these nodes and returns how the step ended, with what all of them have said.

    Where the components of a heterogeneous job have several ranks per node, it runs once for each of them.

    Raises:
        OSError: srun cannot be started.
        subprocess.TimeoutExpired: it did not end in time.
    """
    command, env = _helper_step(words, nodes, env)
    done = run_program(command, env=env, timeout_s=timeout_s, cwd="/")
    return Finished(done.return_code, done.stdout, _without_noise(done.stderr))


def _without_noise(errors: str) -> str:
    """Returns srun's stderr without what it says of --cpu-bind=none where nothing is bound anyway."""
    lines = errors.splitlines(keepends=True)
    return "".join(line for line in lines if "lacks support for cpu binding" not in line)


# A helper takes nothing from the ranks: no GPUs, no memory that is theirs (0: what the job has), no CPUs of its own. A
# step that names no GPUs would ask for the job's again, and may not get them ("Insufficient GRES", 22.05).
_ASKS_FOR_NOTHING = ("--gres=none", "--mem=0", "--cpu-bind=none", "--mpi=none")


def _helper_step(
    words: Sequence[str], nodes: Sequence[str], env: Mapping[str, str], *flags: str
) -> tuple[list[str], dict[str, str]]:
    """Returns the command that runs a helper once on each of these nodes of a job, and its environment."""
    sizes = [f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1", "--cpus-per-task=1"]
    # An allocation may have more nodes, and their cores may be the ranks' by now.
    sizes += [f"--nodelist={compact_nodelist(nodes)}", "--overlap"]
    if components := het_job_ids(env):
        # Each has a number of nodes of its own. 20.11 refuses a command for each, so one for all ranks asks.
        sizes = [f"--het-group={','.join(map(str, range(len(components))))}"]
    # The working directory may be missing there, so the step starts at the root.
    command = ["srun", *sizes, *_ASKS_FOR_NOTHING, *flags, "--chdir=/", *words]
    return command, helper_environment(env, num_nodes=_num_nodes(env, nodes))


def _num_nodes(env: Mapping[str, str], nodes: Sequence[str]) -> int:
    listed = env.get("SLURM_JOB_NODELIST", "")
    return len(parse_nodelist(listed)) if listed else len(nodes)


def _text(part: str | bytes | None) -> str:
    return part.decode(errors="replace") if isinstance(part, bytes) else part or ""


# --- the step of srun ---

ORPHAN_LINGER_S = 10.0
"""srun that still waits this long after a rank has reported the death of its slurmstepd will wait for ever."""
LINGER_S = 150.0
"""Longer than --wait and any usual KillWait: ranks of which one failed must be gone by then."""
_GONE_WITHIN_S = 60.0
_WAITING_GONE_S = 5.0


def start_step(
    argv: Sequence[str], *, env: Mapping[str, str], log: BinaryIO, cwd: Path | None = None, waits: bool = False
) -> subprocess.Popen[bytes]:
    """Starts srun.

    Args:
        argv: srun and its arguments.
        env: its environment.
        log: where it says what it says.
        cwd: where srun and its tasks work; None: where this process does.
        waits: its tasks wait for a line on their stdin, which srun hands to all of them.
    """
    return subprocess.Popen(
        list(argv),
        env=dict(env) | ({} if cwd is None else {"PWD": str(cwd)}),
        stdin=subprocess.PIPE if waits else subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd=cwd,
    )


def run_step(
    process: subprocess.Popen[bytes],
    *,
    log: BinaryIO,
    is_overdue: Callable[[], bool],
    beside: Callable[[], None] = lambda: None,
) -> int:
    """Waits for srun to end and returns its exit code, 128 + signal if it was killed.

    Args:
        process: srun.
        log: where it says what it says.
        is_overdue: whether the ranks are known to have ended so long ago that srun must have missed it.
        beside: called once a second; like `is_overdue` it neither waits nor raises.
    """
    given_up = False
    while True:
        try:
            code = process.wait(timeout=1.0)
            break
        except subprocess.TimeoutExpired:
            beside()
            if not given_up and is_overdue():
                given_up = True
                process.kill()
    if code < 0 and not given_up:
        # The ranks have ended: a full disk costs the line, not what follows.
        with contextlib.suppress(OSError):
            log.write(f"srun: error: srun itself was killed by signal {-code}\n".encode())
            log.flush()
    return 128 - code if code < 0 else code


def end_step(
    job_id: str,
    name: str,
    commands: SlurmCommands,
    *,
    within_s: float = _GONE_WITHIN_S,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Ends what is left of a job's step and returns whether its nodes are free for another one.

    Args:
        job_id: the job.
        name: the step's name; other steps of the allocation are not ours.
        commands: Slurm.
        within_s: seconds that it may take.
        sleep: waits so many seconds.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            left = [step for step, its_name in commands.steps(job_id).items() if its_name == name]
            if not left:
                return True
            for step in left:
                commands.cancel_step(step)
        except ClusterError:
            # Without an answer nothing is known; a new step could not be made now either.
            pass
        if time.monotonic() > deadline:
            return False
        sleep(1.0)


# --- the guard of a job that a lost node does not end ---

_GUARD_EVERY_S = 20


def start_guard(run: RunDirectory, node: str, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts a step that requeues the job when the node of this process is taken from it; returns its srun.

    With --no-kill Slurm (seen with 22.05) leaves a job running whose batch script was lost with its node: it would
    only end at its time limit.

    Args:
        run: the run; its batch log gets the reason.
        node: where the guard is, another node than this one.
        env: of the batch script.
    """
    arguments = [env["SLURM_JOB_ID"], env["SLURMD_NODENAME"], str(_GUARD_EVERY_S), str(run.logs / "batch.log")]
    words = ["/bin/sh", "-c", read_template("guard.sh"), "sh", *arguments]
    command, env = _helper_step(words, [node], env, "--job-name=guard")
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(command, env=env, stdin=nowhere, stdout=nowhere, stderr=nowhere, cwd="/")


# --- ranks in waiting ---

WAITS = "SLURM_TRAIN_WAITS"
"""Variable of a rank that imports torch and then waits for a line on its stdin."""


@dataclass(slots=True)
class RanksInWaiting:
    """The step of the attempt that would follow a failure: its ranks have imported torch, and wait for a line."""

    process: subprocess.Popen[bytes] | None = None
    attempt: int = -1
    nodes: tuple[str, ...] = ()
    log: Path | None = None
    """What srun has said so far."""

    def take(self, attempt: int, nodes: tuple[str, ...], log: Path) -> subprocess.Popen[bytes] | None:
        """Has the ranks begin, if they are those of this attempt and there still; returns their srun.

        Args:
            attempt: the attempt that begins.
            nodes: where it runs.
            log: the attempt's log, which gets what srun has said and says from now on.
        """
        process = self.process
        self.process = None
        if process is None or self.log is None:
            return None
        fits = (attempt, nodes) == (self.attempt, self.nodes) and process.poll() is None
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            if fits:
                self.log.replace(log)
                process.stdin.write(b"begin\n")
                process.stdin.close()
                return process
        self._end(process)
        return None

    def dismiss(self) -> None:
        """Ends the ranks; without a line they go by themselves."""
        process = self.process
        self.process = None
        if process is not None:
            self._end(process)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_WAITING_GONE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with contextlib.suppress(OSError):
            assert self.log is not None
            self.log.unlink(missing_ok=True)


# --- processes of this machine ---

_KILL_AFTER_S = 30.0


@dataclass(slots=True)
class LocalRanks:
    """Running local ranks; `interrupt` passes a stop request on, `wait` returns the exit code of the whole."""

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    kill_after_s: float = _KILL_AFTER_S
    """How long the others may take to end by themselves once a rank has failed."""

    def interrupt(self) -> None:
        """Asks every rank to save and stop, as Slurm does before a time limit."""
        self._signal(signal.SIGUSR2)

    def kill(self) -> None:
        """Ends every rank at once, also one that is stopped."""
        self._signal(signal.SIGKILL)

    def wait(self, beside: Callable[[], None] = lambda: None) -> int:
        """Waits for all ranks; after a failure the others get a moment to end by themselves.

        Args:
            beside: called now and then, at least once a second; it neither waits nor raises.

        Returns:
            The first failing rank's exit code (128 + signal for a killed one), or what all agreed on.
        """
        first_bad: int | None = None
        deadline = float("inf")
        while any(process.poll() is None for process in self.processes):
            bad = [
                code for process in self.processes if (code := process.poll()) not in (None, EXIT_DONE, EXIT_REQUEUE)
            ]
            if bad and first_bad is None:
                first_bad = bad[0]
                deadline = time.monotonic() + self.kill_after_s
                self._signal(signal.SIGTERM)
            if time.monotonic() > deadline:
                self._signal(signal.SIGKILL)
            beside()
            self._wait_briefly()
        ended = [process.returncode for process in self.processes]
        if first_bad is None:
            # All ended between two looks; a failure counts for more than a wish to be run again.
            first_bad = next((code for code in ended if code not in (EXIT_DONE, EXIT_REQUEUE)), max(ended))
        return 128 - first_bad if first_bad < 0 else first_bad

    def _wait_briefly(self) -> None:
        running = next((process for process in self.processes if process.poll() is None), None)
        if running is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(timeout=0.1)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)


def start_local(
    command: Sequence[str], *, run: RunDirectory, attempt: int, num_ranks: int, env: Mapping[str, str]
) -> LocalRanks:
    """Starts the ranks in the code snapshot, where there is one, and returns at once.

    Args:
        command: the worker's command line.
        run: the run; logs go to its attempt's folder.
        attempt: number of the attempt.
        num_ranks: world size; all ranks are on this machine.
        env: environment of the ranks, MASTER_ADDR and MASTER_PORT included.
    """
    ranks = LocalRanks()
    for rank in range(num_ranks):
        rank_env = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
        rank_env |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
        log = open_file(run.rank_log(attempt, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        # A session of its own keeps Ctrl-C on the terminal from reaching the ranks: the parent asks them to stop.
        ranks.processes.append(
            subprocess.Popen(
                command,
                cwd=run.code if run.code.is_dir() else None,
                env=rank_env,
                stdin=subprocess.DEVNULL,
                stdout=None if rank == 0 else log,
                stderr=None if rank == 0 else log,
                start_new_session=True,
            )
        )
        os.close(log)
    return ranks
