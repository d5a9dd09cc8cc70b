"""Asks every node of an allocation whether it sees the run directory, before a rank starts there.

Without the question, a node that lacks the path ends the step with a line about a log file that could not be opened,
or the ranks of the other nodes wait for it until a time-out. While Slurm's controller is away nobody answers, and they
are asked again.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence

from slurm_train.errors import RunError, SilentNodesError
from slurm_train.rundir.layout import RunDirectory
from slurm_train.slurm.runner import is_away

_TIMEOUT_S = 25.0
_PATIENCE_S = 120.0
"""For a controller that is away; as long as other questions to it are repeated by default."""
_QUESTION = """
if [ ! -r "$1/config.yaml" ]; then echo "blind $SLURMD_NODENAME"
elif ! (: > "$1/logs/.seen_by_$SLURMD_NODENAME") 2>/dev/null; then echo "readonly $SLURMD_NODENAME"
else rm -f "$1/logs/.seen_by_$SLURMD_NODENAME"; echo "fine $SLURMD_NODENAME"; fi
"""


def require_seen_by_all(run: RunDirectory, nodes: Sequence[str], env: Mapping[str, str]) -> None:
    """Does nothing where every node can read and write the run directory. Called inside an allocation, once.

    Raises:
        RunError: some nodes cannot, by name.
        SilentNodesError: a node does not answer in time.
    """
    if len(nodes) == 1 and env.get("SLURMD_NODENAME") == nodes[0]:
        # The one node is the one that runs this process, which has read the configuration already. Under salloc this
        # is a login node.
        return
    answers, complaint = _ask_with_patience(run, len(nodes), env)
    blind = sorted(name for word, name in answers if word == "blind")
    readonly = sorted(name for word, name in answers if word == "readonly")
    if blind:
        raise RunError(
            f"{_names(blind)} not see the run directory {run.path}",
            hint="put the run on a path that every node shares: run.root=/shared/path",
        )
    if readonly:
        raise RunError(
            f"{_names(readonly)} not write to the run directory {run.path}",
            hint="check the mount and the permissions there, or name another place with run.root=DIR",
        )
    silent = sorted(set(nodes) - {name for _, name in answers})
    if silent:
        raise SilentNodesError(
            f"no answer from {', '.join(silent)} within {_TIMEOUT_S:.0f} s, when asked for {run.path}{complaint}",
            hint=f"look at the node, or leave it out with cluster.exclude={','.join(silent)}",
        )


def _names(nodes: Sequence[str]) -> str:
    return f"node {nodes[0]} does" if len(nodes) == 1 else f"nodes {', '.join(nodes)} do"


def _ask_with_patience(run: RunDirectory, num_nodes: int, env: Mapping[str, str]) -> tuple[list[tuple[str, str]], str]:
    """Asks again while nobody at all answers because no step can be made; see `_ask`."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        answers, complaint, may_be_away = _ask(run, num_nodes, env)
        if answers or not may_be_away or time.monotonic() > deadline:
            return answers, complaint
        time.sleep(1.0)


def _ask(run: RunDirectory, num_nodes: int, env: Mapping[str, str]) -> tuple[list[tuple[str, str]], str, bool]:
    """Returns the nodes' answers as (word, node), srun's last line as "; it said: ...", whether it got no answer."""
    # The working directory may be what is missing, so the step starts at the root.
    command = ["srun", f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1", "--chdir=/"]
    command += ["/bin/sh", "-c", _QUESTION, "sh", str(run.path)]
    try:
        done = subprocess.run(
            command, env=dict(env), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, cwd="/"
        )
        output, errors, may_be_away = done.stdout, done.stderr, is_away(done.stderr)
    except subprocess.TimeoutExpired as err:
        output, errors = (_text(part) for part in (err.stdout, err.stderr))
        may_be_away = True
    lines = (line.split() for line in output.splitlines())
    answers = [(words[0], words[1]) for words in lines if len(words) == 2 and words[0] in ("fine", "blind", "readonly")]
    said = errors.strip().splitlines()
    return answers, f"; it said: {said[-1]}" if said else "", may_be_away


def _text(part: str | bytes | None) -> str:
    return part.decode(errors="replace") if isinstance(part, bytes) else part or ""
