"""The trackers of a run, seen from its supervisor, and the process that each of them has beside the ranks."""

from __future__ import annotations

import os
import select
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import yaml

from slurm_train.config.frozen import load_config
from slurm_train.config.schema import RunConfig, TrackSection
from slurm_train.config.secrets import redact
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, SlurmTrainError
from slurm_train.metrics.trackers.beside import Surroundings, Trackers, tracking
from slurm_train.metrics.trackers.catalogue import asked_trackers, opener
from slurm_train.metrics.trackers.follow import Following, follow
from slurm_train.metrics.trackers.state import TrackerState, first_state, write_state
from slurm_train.metrics.trackers.tracker import TrackedRun
from slurm_train.requeue.best_effort import say
from slurm_train.rundir.files import read_json
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.sweep import sweep_of

# Below the ranks, whose cores these processes share.
_NICE = 5
_LONGEST_PROBLEM = 500


def tracking_run(run: RunDirectory, track: TrackSection, env: Mapping[str, str]) -> AbstractContextManager[Trackers]:
    """Returns what keeps a run's trackers going while the body supervises its ranks."""
    around = Surroundings(
        run=run,
        names=asked_trackers(track),
        command=partial(follower_command, run),
        env=env,
        timeout_s=track.timeout_s,
        say=say,
    )
    return tracking(around, close_timeout_s=track.close_timeout_s)


def follower_command(run: RunDirectory, name: str, descriptor: int, *, settings: Sequence[str] = ()) -> list[str]:
    """Returns the command line of the process that follows a run for one tracker.

    Args:
        run: the run.
        name: of the tracker.
        descriptor: reading end of a pipe; when it is closed, no line will be added any more.
        settings: words that change the run's own settings, e.g. "track.wandb.mode=online".
    """
    words = ["track", str(run.path), "--only", name, "--beside", str(descriptor), *settings]
    return [sys.executable, "-m", "slurm_train", *words]


def configured(run: RunDirectory, settings: Sequence[str]) -> RunConfig:
    """Returns a run's configuration, changed by words."""
    config = load_config(run.config)
    if not settings:
        return config
    from slurm_train.config.overrides import apply_words

    return apply_words(config, list(settings))


def run_beside(run: RunDirectory, name: str, descriptor: int, settings: Sequence[str], env: Mapping[str, str]) -> int:
    """Follows a run for one tracker; what goes wrong is left in the tracker's state, for whoever started this."""
    os.nice(_NICE)
    os.umask(0o077)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        # Slurm signals every process of a job; this one ends when it has sent what there is.
        signal.signal(number, signal.SIG_IGN)
    try:
        track = configured(run, settings).track
        following = Following(
            run=run,
            name=name,
            describe=partial(_describe, run),
            open=opener(name, track, env),
            timeout_s=track.timeout_s,
            is_over=partial(_is_closed, descriptor),
        )
        follow(following)
    except Exception as err:
        # Whatever a tracker raises, it ends this process alone.
        print(redact(traceback.format_exc()), file=sys.stderr, end="", flush=True)
        problem = err.message if isinstance(err, SlurmTrainError) else f"{type(err).__name__}: {err}"
        problem = redact(" ".join(problem.split()))[:_LONGEST_PROBLEM]
        write_state(run, name, replace(first_state(run, name), problem=problem))
        return err.exit_code if isinstance(err, SlurmTrainError) else EXIT_FAILURE
    return EXIT_DONE


def _is_closed(descriptor: int, within_s: float) -> bool:
    return bool(select.select([descriptor], [], [], within_s)[0])


def _describe(run: RunDirectory, state: TrackerState) -> TrackedRun:
    config: dict[str, Any] = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    provenance = read_json(run.provenance) or {}
    sweep = sweep_of(run)
    facts = {"run": str(run.path), "commit": provenance.get("git_commit"), "user": provenance.get("user")}
    return TrackedRun(
        name=f"{run.name}/{run.run_id}",
        key=state.key,
        tracker_id=state.tracker_id,
        path=run.path,
        folder=run.trackers,
        config=config,
        facts={name: str(value) for name, value in facts.items() if value},
        group=None if sweep is None else sweep.sweep_id,
    )
