"""Asks the nodes of a job by a step of its own beside the ranks, or before them.

Before the ranks start, every node is asked whether it sees the run directory. Without this check, a node that lacks the
path would end their step with a line about a log file that could not be opened, or the ranks of the other nodes would
wait for it until a time-out. While Slurm's controller is away no node answers, and the nodes are asked again.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from slurm_train.assets import read_template
from slurm_train.errors import NodesError, SilentNodesError
from slurm_train.formatting import plain
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.allocation import compact_nodelist, het_job_ids, parse_nodelist
from slurm_train.slurm.commands import Finished, is_away, run_program
from slurm_train.slurm.job_variables import helper_environment
from slurm_train.slurm.records import NO_STEP, has_started_nothing

_TIMEOUT_S = 25.0
_ASKED_DIRECTLY_S = 5.0
_FEW = 10
_RETRY_S = 120.0
"""While the controller is away; as long as other questions to it are repeated by default."""
_REFUSED_S = 30.0
"""While it makes no step: after its restart it may not have freed the cores and memory of the step before."""
_LATE_S = 12
"""How long a node may take to see the file of an attempt, which exists before the node is asked."""
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
        attempt: number of the attempt that was opened just before: the nodes must see it, too.

    Raises:
        NodesError: some nodes cannot, by name.
        SilentNodesError: a node does not answer in time, or does not see the attempt.
    """
    if len(nodes) == 1 and env.get("SLURMD_NODENAME") == nodes[0]:
        # This process runs on the only node, and has read the configuration there already. Under salloc this process
        # runs on a login node.
        return
    newest = run.config if attempt is None else run.epochs / f"attempt_{attempt}"
    answers, complaint = _ask(
        run, nodes, env, newest=str(newest.relative_to(run.path)), timeout_s=_TIMEOUT_S, retry_s=_RETRY_S
    )
    for word, (problem, code, hint) in _PROBLEMS.items():
        named = sorted(node for node, answer in answers.items() if answer == word)
        if named:
            raise NodesError(f"{_names(named)} {problem} {run.path}", code=code, nodes=named, hint=hint)
    stale = sorted(node for node, answer in answers.items() if answer == "stale")
    if stale:
        raise SilentNodesError(
            f"{_names(stale)} not see {newest} {_LATE_S} s after it was written",
            code="FS_STALE",
            nodes=stale,
            hint="the path is not shared, or its cache is late: compare `findmnt -T` of it on the nodes",
        )
    if not answers and has_started_nothing(complaint):
        # A fatal error of srun is about its arguments, which are the same next time.
        kind = NodesError if "srun: fatal:" in complaint else SilentNodesError
        raise kind(
            f"srun could not create a step that asks the nodes for {run.path}{complaint}",
            code="STEP_REFUSED",
            nodes=(),
            hint="the nodes were not asked: look at what the job requests (`scontrol show job`) and at cluster.sbatch",
        )
    silent = sorted(set(nodes) - set(answers))
    if silent:
        within = f" within {_TIMEOUT_S:.0f} s"
        raise SilentNodesError(
            f"no answer from {', '.join(silent)}{within}, when asked for {run.path}{complaint}",
            code="NODE_MISSING",
            nodes=silent,
            hint=f"look at the node, or leave it out with cluster.exclude={','.join(silent)}",
        )


def silent_nodes(run: RunDirectory, nodes: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Returns which nodes do not answer while ranks run, although asked twice; none where no node at all answers.

    In that case Slurm's controller or the network of this node is at fault, and nothing is known of the other nodes.
    """
    silent = list(nodes)
    for _ in range(2):
        # srun asks a few nodes directly, and many through a tree of nodes, where a lost node delays those behind it.
        timeout_s = _ASKED_DIRECTLY_S if len(silent) <= _FEW else _TIMEOUT_S
        answers, complaint = _ask(run, silent, env, newest=run.config.name, timeout_s=timeout_s, retry_s=0.0)
        # Nothing is known of nodes that were not asked.
        if not answers and (has_started_nothing(complaint) or len(silent) == len(nodes)):
            return []
        silent = [node for node in silent if node not in answers]
        if not silent:
            break
    return silent


def _names(nodes: Sequence[str]) -> str:
    return f"node {nodes[0]} does" if len(nodes) == 1 else f"nodes {', '.join(nodes)} do"


def _ask(
    run: RunDirectory, nodes: Sequence[str], env: Mapping[str, str], *, newest: str, timeout_s: float, retry_s: float
) -> tuple[Mapping[str, str], str]:
    """Returns the answer of each node that answered, and the error message of srun, "" for none.

    Asks again while there are no answers at all because Slurm's controller is away or makes no step.
    """
    question = [str(run.path), newest, str(_LATE_S)]
    words = (*_PROBLEMS, "fine", "stale")
    began_s = time.monotonic()
    while True:
        answers = ask_nodes("see_run.sh", question, nodes, env, words=words, timeout_s=timeout_s)
        again_for_s = 0.0
        if answers.is_late or is_away(answers.errors):
            again_for_s = retry_s
        elif NO_STEP in answers.errors:
            again_for_s = min(retry_s, _REFUSED_S)
        if answers.by_node or time.monotonic() >= began_s + again_for_s:
            return answers.by_node, _complaint(answers.errors)
        time.sleep(1.0)


def _complaint(errors: str) -> str:
    """Returns the error of srun for the end of a message: why it made no step, else its last line."""
    lines = plain(errors).strip().splitlines()
    reasons = [line for line in lines if has_started_nothing(line)]
    return f"; it said: {(reasons or lines)[-1].strip()}" if lines else ""


# --- questions ---


@dataclass(frozen=True, slots=True)
class Answers:
    """What nodes have answered to a question."""

    by_node: Mapping[str, str]
    """A word for each node that has answered."""
    errors: str
    """What srun and the nodes have said besides."""
    is_late: bool
    """Whether not all had ended in time."""


def ask_nodes(
    program: str,
    arguments: Sequence[str],
    nodes: Sequence[str],
    env: Mapping[str, str],
    *,
    words: Collection[str],
    timeout_s: float,
) -> Answers:
    """Asks nodes of a job, each of which answers with a word and its name.

    Args:
        program: a template of the shell.
        arguments: its arguments.
        nodes: who is asked.
        env: the job's environment.
        words: what counts as an answer.
        timeout_s: seconds for all.

    Raises:
        OSError: srun cannot be started.
    """
    is_late = False
    try:
        question = ["/bin/sh", "-c", read_template(program), "sh", *arguments]
        finished = run_on_each_node(question, nodes, env, timeout_s=timeout_s)
        output, errors = finished.stdout, finished.stderr
    except subprocess.TimeoutExpired as err:
        output, errors, is_late = _text(err.stdout), _without_noise(_text(err.stderr)), True
    lines = [line.split() for line in output.splitlines()]
    by_node = {parts[1]: parts[0] for parts in lines if len(parts) == 2 and parts[0] in words}
    return Answers(by_node, errors, is_late)


def run_on_each_node(
    words: Sequence[str], nodes: Sequence[str], env: Mapping[str, str], *, timeout_s: float
) -> Finished:
    """Runs a command once on each of these nodes and returns how the step ended, with the output of all nodes.

    Where the components of a heterogeneous job have several ranks per node, it runs once for each of them.

    Raises:
        OSError: srun cannot be started.
        subprocess.TimeoutExpired: it did not end in time.
    """
    command, env = _helper_step(words, nodes, env)
    finished = run_program(command, env=env, timeout_s=timeout_s, cwd="/")
    return Finished(finished.return_code, finished.stdout, _without_noise(finished.stderr))


def _without_noise(errors: str) -> str:
    """Returns srun's stderr without its warning about --cpu-bind=none on nodes that bind nothing anyway."""
    lines = errors.splitlines(keepends=True)
    return "".join(line for line in lines if "lacks support for cpu binding" not in line)


# A helper takes nothing from the ranks: no GPUs, no memory of theirs (0: what the job has), no CPUs of its own. Without
# --gres=none a step would ask for the GPUs of the job again, and may not get them ("Insufficient GRES", 22.05).
_ASKS_FOR_NOTHING = ("--gres=none", "--mem=0", "--cpu-bind=none", "--mpi=none")


def _helper_step(
    words: Sequence[str], nodes: Sequence[str], env: Mapping[str, str], *flags: str
) -> tuple[list[str], dict[str, str]]:
    """Returns the command that runs a helper once on each of these nodes of a job, and its environment."""
    sizes = [f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1", "--cpus-per-task=1"]
    # An allocation may have more nodes than these, and ranks may use their cores by now.
    sizes += [f"--nodelist={compact_nodelist(nodes)}", "--overlap"]
    components = het_job_ids(env)
    if components:
        # Components differ in their number of nodes. 20.11 refuses a command for each component, so one command runs
        # for all ranks.
        sizes = [f"--het-group={','.join(map(str, range(len(components))))}"]
    # The working directory may be missing on a node, so the step starts at the root.
    command = ["srun", *sizes, *_ASKS_FOR_NOTHING, *flags, "--chdir=/", *words]
    return command, helper_environment(env, num_nodes=_num_nodes(env, nodes))


def _num_nodes(env: Mapping[str, str], nodes: Sequence[str]) -> int:
    listed = env.get("SLURM_JOB_NODELIST", "")
    return len(parse_nodelist(listed)) if listed else len(nodes)


def _text(part: str | bytes | None) -> str:
    return part.decode(errors="replace") if isinstance(part, bytes) else part or ""


# --- the guard of a job that a lost node does not end ---

_GUARD_EVERY_S = 20


def start_guard(run: RunDirectory, node: str, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts a step that requeues the job when the node of this process is taken from it; returns its srun.

    With --no-kill a job whose batch script was lost with its node goes on (seen with 22.05): it would end only at its
    time limit.

    Args:
        run: the run; its batch log gets the reason.
        node: the node that the guard runs on, another one than this.
        env: of the batch script.
    """
    arguments = [env["SLURM_JOB_ID"], env["SLURMD_NODENAME"], str(_GUARD_EVERY_S), str(run.logs / "batch.log")]
    words = ["/bin/sh", "-c", read_template("guard.sh"), "sh", *arguments]
    command, env = _helper_step(words, [node], env, "--job-name=guard")
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(command, env=env, stdin=nowhere, stdout=nowhere, stderr=nowhere, cwd="/")
