"""`track RUN`: sends to a run's trackers what its job could not send, from a machine that reaches them.

Each tracker is sent what metrics.jsonl has beyond what it took already. While a run is active, its own job does that.
Settings after RUN add a tracker, or change one: track.wandb.project=NAME.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm_train.cli.terminal import note
from slurm_train.config.schema import TrackSection
from slurm_train.config.words import read_names
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, ConfigError, RunError
from slurm_train.rundir.lookup import find_run
from slurm_train.rundir.paths import RunDirectory, require_private
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.status.activity import live_holder
from slurm_train.tools.trackers.catalogue import asked_trackers, require_installed
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
    run = find_run(Path(arguments.root), arguments.run)
    require_private(run)
    _refuse_active(run, os.environ)
    track = configured(run, arguments.settings).track
    require_installed(track)
    ended = [_send(run, name, track, arguments.settings, os.environ) for name in _names(run, track, arguments.only)]
    return EXIT_DONE if all(ended) else EXIT_FAILURE


def _refuse_active(run: RunDirectory, env: Mapping[str, str]) -> None:
    if (holder := live_holder(run, SlurmCommands(env))) is not None:
        raise RunError(
            f"{run.name}/{run.run_id} is being run by {holder}, which sends its metrics itself",
            hint="wait until it has ended",
        )


def _names(run: RunDirectory, track: TrackSection, only: str | None) -> list[str]:
    asked = asked_trackers(track)
    if not asked:
        hint = f"name one: track {run.run_id} track.wandb.project=NAME"
        raise ConfigError(f"{run.name}/{run.run_id} has no trackers", hint=hint)
    names = asked if only is None else read_names(only)
    unknown = [name for name in names if name not in asked]
    if unknown:
        raise ConfigError(f"--only {unknown[0]}: the run has no such tracker", hint=f"it has: {', '.join(asked)}")
    return names


def _send(run: RunDirectory, name: str, track: TrackSection, settings: Sequence[str], env: Mapping[str, str]) -> bool:
    """Sends what one tracker lacks, in a process that its time limit can end; returns whether it has all then."""
    num = count_unsent(run, name)
    command = follower_command(run, name, settings=settings)
    code = subprocess.run(command, env=dict(env), stdin=subprocess.DEVNULL, check=False).returncode
    state = read_state(run, name)
    if code == 0 and state is not None:
        note(f"{name}: {num} lines sent; {state.place}")
        return True
    note(f"{name}: {explain_exit(run, name, code, timeout_s=track.timeout_s)}")
    return False
