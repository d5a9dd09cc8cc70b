"""`track RUN`: sends to a run's trackers what its job could not send, from a machine that reaches them.

Each tracker is sent what metrics.jsonl has beyond what it took already. While a run is active, its own job does that.
Settings after RUN add a tracker, or change one: track.wandb.project=NAME.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm_train.cli.selection import find_root
from slurm_train.cli.terminal import note
from slurm_train.config.schema import TrackSection
from slurm_train.config.words import read_names
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, ConfigError, RunError
from slurm_train.rundir.lookup import find_run
from slurm_train.rundir.paths import RunDirectory, require_private
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.status.activity import live_holder
from slurm_train.tools.trackers import require_installed
from slurm_train.tools.trackers.follow import (
    configured,
    count_unsent,
    explain_exit,
    follow_run,
    follower_command,
    read_state,
)
from slurm_train.verbs import parse


def main(words: Sequence[str]) -> int:
    """Sends what is missing and returns 0, 1 where a tracker could not be reached."""
    arguments = parse("track", words)
    for word in arguments.settings:
        if not word.startswith("track."):
            raise ConfigError(f"{word.partition('=')[0]} is not a setting of a tracker", hint="they begin with track.")
    if arguments.beside:
        return follow_run(RunDirectory(Path(arguments.run)), arguments.only, arguments.settings, os.environ)
    find_root(arguments)
    run = find_run(arguments.root, arguments.run)
    require_private(run)
    holder = live_holder(run, SlurmCommands(os.environ))
    if holder is not None:
        raise RunError(
            f"{run.name}/{run.run_id} is being run by {holder}, which sends its metrics itself",
            hint="wait until it has ended",
        )
    track = configured(run, arguments.settings).track
    require_installed(track)
    available = track.tracker_names
    names = available if arguments.only is None else read_names(arguments.only)
    if not names or not set(names) <= set(available):
        raise ConfigError(
            f"{run.name}/{run.run_id} has no tracker {arguments.only or 'at all'}",
            hint=f"it has: {', '.join(available) or 'none'}; add one: track {run.run_id} track.wandb.project=NAME",
        )
    # Every tracker is tried, also after one that cannot be reached.
    are_complete = [_send(run, name, track, arguments.settings, os.environ) for name in names]
    return EXIT_DONE if all(are_complete) else EXIT_FAILURE


def _send(run: RunDirectory, name: str, track: TrackSection, settings: Sequence[str], env: Mapping[str, str]) -> bool:
    """Sends what one tracker lacks, in a process that its time limit can end; returns whether it has everything now."""
    num_unsent = count_unsent(run, name)
    command = follower_command(run, name, settings=settings)
    code = subprocess.run(command, env=dict(env), stdin=subprocess.DEVNULL, check=False).returncode
    state = read_state(run, name)
    if code == 0 and state is not None:
        note(f"{name}: {num_unsent} lines sent; {state.place}")
        return True
    note(f"{name}: {explain_exit(run, name, code, timeout_s=track.timeout_s)}")
    return False
