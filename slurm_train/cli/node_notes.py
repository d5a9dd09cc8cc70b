"""After an attempt: nodes that the preflight found bad go on the shared list, those that it found well come off it."""

from __future__ import annotations

import contextlib
import time

from slurm_train.config.schema import RunConfig
from slurm_train.requeue.supervise import say
from slurm_train.rundir.bad_nodes import add_bad_nodes, forgive_nodes, list_file
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.preflight import bad_nodes, fatal_line, read_record


def note_nodes(run: RunDirectory, attempt: int, config: RunConfig) -> None:
    """Writes down what an attempt has found out about its nodes; a list that cannot be written costs nobody a run."""
    record = read_record(run, attempt)
    found, hours = bad_nodes(record), config.preflight.exclude_bad_nodes_h
    with contextlib.suppress(OSError):
        add_bad_nodes(run, found, hours=hours, now_unix_s=time.time())
        if found and hours > 0:
            say(f"later submissions leave out {', '.join(found)} for {hours:g} h; see {list_file(run)}")
        if record and not fatal_line(record):
            for node in forgive_nodes(run, record.get("nodes", ()), now_unix_s=time.time()):
                say(f"{node} was found well and is off the list of bad nodes")
