"""Asks every node of an allocation whether it sees the run directory, before a rank starts there.

Without the question, a node that lacks the path ends the step with a line about a log file that could not be opened,
or the ranks of the other nodes wait for it until a time-out. While Slurm's controller is away no node answers, and they
are asked again.
"""

from __future__ import annotations

import itertools
import subprocess
import time
from collections.abc import Mapping, Sequence

from slurm_train.errors import NodesError, SilentNodesError
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.allocation import het_node_counts
from slurm_train.slurm.commands import is_away, run_program

_TIMEOUT_S = 25.0
_PATIENCE_S = 120.0
"""For a controller that is away; as long as other questions to it are repeated by default."""
_LATE_S = 12
"""How long a node may take to see the file of an attempt, which is there before the question is asked."""
_QUESTION = """
if [ ! -r "$1/config.yaml" ]; then echo "blind $SLURMD_NODENAME"; exit; fi
if ! (: > "$1/logs/.seen_by_$SLURMD_NODENAME") 2>/dev/null; then echo "readonly $SLURMD_NODENAME"; exit; fi
rm -f "$1/logs/.seen_by_$SLURMD_NODENAME"
waited=0
while [ ! -e "$1/$2" ]; do
  [ "$waited" -lt "$3" ] || { echo "stale $SLURMD_NODENAME"; exit; }
  waited=$((waited + 1)); sleep 1
done
echo "fine $SLURMD_NODENAME"
"""
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
    answers, complaint = _ask(run, len(nodes), env, newest=str(newest.relative_to(run.path)))
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
    if silent := sorted(set(nodes) - set(answers)):
        raise SilentNodesError(
            f"no answer from {', '.join(silent)} within {_TIMEOUT_S:.0f} s, when asked for {run.path}{complaint}",
            code="NODE_MISSING",
            nodes=silent,
            hint=f"look at the node, or leave it out with cluster.exclude={','.join(silent)}",
        )


def _names(nodes: Sequence[str]) -> str:
    return f"node {nodes[0]} does" if len(nodes) == 1 else f"nodes {', '.join(nodes)} do"


def _ask(run: RunDirectory, num_nodes: int, env: Mapping[str, str], *, newest: str) -> tuple[dict[str, str], str]:
    """Returns the answer of each node, and srun's last line as "; it said: ...".

    Asks again while no node at all answers because Slurm's controller is away and no step can be made.
    """
    # The working directory may be what is missing, so the step starts at the root.
    question = ["/bin/sh", "-c", _QUESTION, "sh", str(run.path), newest, str(_LATE_S)]

    def step(count: int) -> list[str]:
        return [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--chdir=/", *question]

    # Each component of a heterogeneous job has a number of nodes of its own, and so a command of its own.
    components = [[f"--het-group={number}", *step(count)] for number, count in enumerate(het_node_counts(env))]
    words = itertools.chain.from_iterable((*part, ":") for part in components)
    command = ["srun", *words][:-1] if components else ["srun", *step(num_nodes)]
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            done = run_program(command, env=env, timeout_s=_TIMEOUT_S, cwd="/")
            output, errors, may_be_away = done.stdout, done.stderr, is_away(done.stderr)
        except subprocess.TimeoutExpired as err:
            output, errors = (_text(part) for part in (err.stdout, err.stderr))
            may_be_away = True
        lines = (line.split() for line in output.splitlines())
        known = (*_PROBLEMS, "fine", "stale")
        answers = {words[1]: words[0] for words in lines if len(words) == 2 and words[0] in known}
        if answers or not may_be_away or time.monotonic() > deadline:
            said = errors.strip().splitlines()
            return answers, f"; it said: {said[-1]}" if said else ""
        time.sleep(1.0)


def _text(part: str | bytes | None) -> str:
    return part.decode(errors="replace") if isinstance(part, bytes) else part or ""
