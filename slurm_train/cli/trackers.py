"""The trackers of a run, seen from its supervisor, and the process that each of them has beside the ranks."""

from __future__ import annotations

import os
import select
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import yaml

from slurm_train.config.frozen import load_config
from slurm_train.config.schema import RunConfig, TrackSection
from slurm_train.config.secrets import redact
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, SlurmTrainError
from slurm_train.metrics.trackers.adapters import TrackedRun, Tracker, open_tracker
from slurm_train.metrics.trackers.beside import Trackers
from slurm_train.metrics.trackers.catalogue import asked_trackers, require_installed
from slurm_train.metrics.trackers.follow import TrackerState, follow, load_or_create_state, write_state
from slurm_train.rundir.files import read_json
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.sweep import sweep_of
from slurm_train.supervise.monitor import say

# Below the ranks, whose cores these processes share.
_NICE = 5
_LONGEST_PROBLEM = 500


def tracking_run(run: RunDirectory, track: TrackSection, env: Mapping[str, str]) -> Trackers:
    """Returns what keeps a run's trackers going while the body supervises its ranks."""
    return Trackers(
        run,
        asked_trackers(track),
        command=partial(follower_command, run),
        env=env,
        timeout_s=track.timeout_s,
        close_timeout_s=track.close_timeout_s,
        say=say,
    )


def follower_command(run: RunDirectory, name: str, *, settings: Sequence[str] = ()) -> list[str]:
    """Returns the command line of the process that follows a run for one tracker, until its stdin ends.

    Args:
        run: the run.
        name: of the tracker.
        settings: words that change the run's own settings, e.g. "track.wandb.mode=online".
    """
    return [sys.executable, "-m", "slurm_train", "track", str(run.path), "--only", name, "--beside", *settings]


def configured(run: RunDirectory, settings: Sequence[str]) -> RunConfig:
    """Returns a run's configuration, changed by words."""
    config = load_config(run.config)
    if not settings:
        return config
    from slurm_train.config.compose import apply_words

    return apply_words(config, list(settings))


def follow_run(run: RunDirectory, name: str, settings: Sequence[str], env: Mapping[str, str]) -> int:
    """Follows a run for one tracker until stdin ends; a problem is left in the tracker's state, for the parent."""
    os.nice(_NICE)
    os.umask(0o077)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        # Slurm signals every process of a job; this one ends when it has sent what there is.
        signal.signal(number, signal.SIG_IGN)
    try:
        track = configured(run, settings).track
        require_installed(track, only=name)
        opening = partial(_open, run, name, track, env)
        follow(run, name, opening, timeout_s=track.timeout_s, is_over=_has_stdin_ended)
    except Exception as err:
        # Whatever a tracker raises, it ends this process alone.
        print(redact(traceback.format_exc()), file=sys.stderr, end="", flush=True)
        problem = err.message if isinstance(err, SlurmTrainError) else f"{type(err).__name__}: {err}"
        problem = redact(" ".join(problem.split()))[:_LONGEST_PROBLEM]
        write_state(run, name, replace(load_or_create_state(run, name), problem=problem))
        sys.stdout.flush()
        # Not by the way of exit handlers, in which a package may wait for a helper or a network that is gone.
        os._exit(err.exit_code if isinstance(err, SlurmTrainError) else EXIT_FAILURE)
    return EXIT_DONE


def _has_stdin_ended(within_s: float) -> bool:
    # Nothing is ever written to it; /dev/null is at its end.
    return bool(select.select([0], [], [], within_s)[0])


def _open(run: RunDirectory, name: str, track: TrackSection, env: Mapping[str, str], state: TrackerState) -> Tracker:
    provenance = read_json(run.provenance) or {}
    sweep = sweep_of(run)
    facts = {"run": str(run.path), "commit": provenance.get("git_commit"), "user": provenance.get("user")}
    tracked = TrackedRun(
        run=run,
        key=state.key,
        tracker_id=state.tracker_id,
        config=yaml.safe_load(run.config.read_text(encoding="utf-8")),
        facts={name: str(value) for name, value in facts.items() if value},
        group=None if sweep is None else sweep.sweep_id,
    )
    return open_tracker(name, tracked, track, env)
