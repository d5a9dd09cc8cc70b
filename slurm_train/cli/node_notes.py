"""What an attempt has found out about its nodes: in its record, and on the list that later submissions read."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from slurm_train.config.schema import RunConfig
from slurm_train.errors import EXIT_FAILURE, NodesError, SilentNodesError
from slurm_train.rundir.events import (
    BAD_NODES_PARTS,
    Finding,
    add_bad_nodes,
    bad_nodes_of,
    fatal_line,
    forgive_nodes,
    list_file,
    read_preflight,
    write_preflight,
)
from slurm_train.rundir.layout import RunDirectory
from slurm_train.supervise.monitor import say


def note_unfit(run: RunDirectory, attempt: int, error: NodesError, *, nodes: Sequence[str]) -> int:
    """Writes down as a finding what kept the ranks from being started, and returns the attempt's exit code."""
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
    write_preflight(run, attempt, {"findings": [finding.as_json()], "table": [], "nodes": list(nodes)})
    return EXIT_FAILURE if blames else error.exit_code


def note_nodes(run: RunDirectory, attempt: int, config: RunConfig) -> None:
    """Writes down what an attempt has found out about its nodes; a list that cannot be written costs nobody a run."""
    record = read_preflight(run, attempt)
    found, hours = bad_nodes_of(record), config.preflight.exclude_bad_nodes_h
    with contextlib.suppress(OSError):
        add_bad_nodes(run, found, hours=hours, now_unix_s=time.time())
        if found and hours > 0:
            lists = list_file(run).with_name(BAD_NODES_PARTS)
            say(f"later submissions leave out {', '.join(found)} for {hours:g} h; see {lists}")
        if record and not fatal_line(record):
            for node in forgive_nodes(run, record.get("nodes", ()), now_unix_s=time.time()):
                say(f"{node} was found well and is off the list of bad nodes")
