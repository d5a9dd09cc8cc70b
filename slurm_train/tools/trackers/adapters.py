"""What a tracker is, and the four there are: TensorBoard, Weights & Biases, MLflow, trackio.

A tracker may raise, hang or die at any moment: each runs in a process of its own (see `follow` and `sidecars`). To add
one, write its class and `_open_NAME` here, and name its switch in `catalogue`. Packages are imported when used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

from slurm_train.config.schema import TrackSection, WandbSection, flat
from slurm_train.config.secrets import redact
from slurm_train.rundir.paths import RunDirectory

Outcome = Literal["finished", "failed", "paused"]
"""State of a run when its tracker is closed; paused: it will be continued, by Slurm or by a person."""
Line = Mapping[str, Any]
"""A line of metrics.jsonl; it has a "step"."""
# Facts about a line rather than curves.
_NOT_CURVES = frozenset({"step", "attempt", "world_size", "time_unix_s", "samples_digest"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """A run as a tracker gets to know it."""

    run: RunDirectory
    key: str
    """Chosen once for this run directory and this tracker, e.g. "5d2030c7-8a1f04"; the same in every attempt."""
    tracker_id: str | None
    """The tracker's own id of the run, None at the first attempt."""
    config: Mapping[str, Any]
    """The frozen configuration."""
    facts: Mapping[str, str]
    """Where the run came from: directory, git commit, user."""
    group: str | None
    """Id of the sweep that the run belongs to."""

    @property
    def name(self) -> str:
        """E.g. "gpt-stdlib/5d2030c7"."""
        return f"{self.run.name}/{self.run.run_id}"

    @property
    def config_and_facts(self) -> dict[str, Any]:
        """The configuration with the facts under "slurm_train"."""
        return {**self.config, "slurm_train": dict(self.facts)}


class Tracker(Protocol):
    """One tracker that has a run open. Every method may raise and may take its time."""

    tracker_id: str
    """Its id of the run; stored before the first line is sent, and given back in the next attempt."""
    place: str
    """Where a person finds the run: a URL, or a command."""
    settle_s: float
    """Seconds after which a line that it took can no longer be lost with this process."""

    def log(self, lines: Sequence[Line]) -> None:
        """Takes lines in the order in which they were written; a step may come again after a resume."""

    def close(self, outcome: Outcome) -> None:
        """Sends what is left and sets the run's state; lines that were taken are safe when it returns."""


def open_tracker(name: str, run: TrackedRun, track: TrackSection, env: Mapping[str, str]) -> Tracker:
    """Starts or continues a run at a tracker.

    Args:
        name: one of `catalogue.NAMES`.
        run: the run.
        track: the settings of all trackers.
        env: the environment.
    """
    return _OPENERS[name](run, track, env)


def numbers_of(line: Line) -> dict[str, float]:
    """Returns the curves of a line by name."""
    return {
        key: float(value)
        for key, value in line.items()
        if key not in _NOT_CURVES and type(value) in (int, float) and math.isfinite(value)
    }


class TensorBoardTracker:
    """Writes the numbers of a line as scalars, one event file per attempt. Needs tensorboard, but not torch."""

    settle_s = 0.0

    def __init__(self, folder: str, writer: Any) -> None:
        self.tracker_id, self.place = folder, f"tensorboard --logdir {folder}"
        self._writer = writer
        self._step: int | None = None
        self._trained = -1

    def log(self, lines: Sequence[Line]) -> None:
        """Adds the lines; steps that are written anew take the place of the old ones."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        for line in lines:
            if self._is_rewind(line):
                self._add(line, session_log=SessionLog(status=SessionLog.START))
            values = [Summary.Value(tag=key, simple_value=value) for key, value in numbers_of(line).items()]
            self._add(line, summary=Summary(value=values))
        self._writer.flush()

    def close(self, outcome: Outcome) -> None:  # noqa: ARG002  # it has no state of a run
        """Closes the event file."""
        self._writer.close()

    def _is_rewind(self, line: Line) -> bool:
        """Returns whether the steps from this line's on are written anew: after a resume, or a rollback.

        An evaluation shares its step's number. The first line is one: an earlier file may have its step, too.
        """
        step, trains = line["step"], "loss" in line
        goes_back = self._step is None or step < self._step or (trains and step <= self._trained)
        self._step = step
        if trains:
            self._trained = step
        return goes_back

    def _add(self, line: Line, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(step=line["step"], wall_time=float(line.get("time_unix_s", 0.0)), **content))


def _open_tensorboard(run: TrackedRun, _track: TrackSection, _env: Mapping[str, str]) -> Tracker:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    folder = str(run.run.tensorboard)
    return TensorBoardTracker(folder, EventFileWriter(folder))


class WandbTracker:
    """Logs to an open run of W&B.

    W&B takes no step twice, but a run that comes back from a checkpoint repeats some. So nothing is logged under W&B's
    own counter: "step" is a metric, and the axis of all others.
    """

    # wandb hands lines over to a process of its own, which uploads them every few seconds.
    settle_s = 60.0

    def __init__(self, run: Any, *, place: str) -> None:
        self.tracker_id, self.place = str(run.id), place
        self._run = run

    def log(self, lines: Sequence[Line]) -> None:
        """Hands the lines over, each with the time at which it was written."""
        for line in lines:
            time = {"_timestamp": line["time_unix_s"]} if "time_unix_s" in line else {}
            self._run.log({"step": line["step"], "attempt": line.get("attempt", 0), **numbers_of(line), **time})

    def close(self, outcome: Outcome) -> None:
        """Waits for the upload; a run that will be continued is marked as preempted."""
        if outcome == "paused":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if outcome == "finished" else 1)


def _open_wandb(run: TrackedRun, track: TrackSection, env: Mapping[str, str]) -> Tracker:
    import wandb

    mode, folder = wandb_mode(track.wandb, env), run.run.trackers
    opened = wandb.init(
        project=track.wandb.project,
        entity=track.wandb.entity,
        id=run.tracker_id or run.key,
        name=run.name,
        group=run.group,
        tags=list(track.wandb.tags) or None,
        resume="allow",
        dir=str(folder),
        config=run.config_and_facts,
        allow_val_change=True,
        settings=wandb.Settings(
            console="off",
            disable_git=True,
            init_timeout=0.8 * track.timeout_s,
            mode=mode,
            save_code=False,
            silent=True,
        ),
    )
    opened.define_metric("step")
    opened.define_metric("*", step_metric="step")
    upload = f"offline; to upload: wandb sync {folder / 'wandb'}/offline-run-*-{opened.id}"
    return WandbTracker(opened, place=upload if mode == "offline" else str(opened.url))


def wandb_mode(settings: WandbSection, env: Mapping[str, str]) -> str:
    """Returns W&B's mode: what was asked for, else WANDB_MODE, else online where there is a key, else offline."""
    if settings.mode != "auto" or env.get("WANDB_MODE"):
        return settings.mode if settings.mode != "auto" else env["WANDB_MODE"]
    host = env.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("//")[2].partition("/")[0].partition(":")[0]
    return "online" if env.get("WANDB_API_KEY") or _has_netrc_entry(env, host) else "offline"


def _has_netrc_entry(env: Mapping[str, str], host: str) -> bool:
    path = Path(env.get("NETRC") or Path(env.get("HOME", "/"), ".netrc"))
    try:
        words = path.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return False
    return any(word == "machine" and name == host for word, name in pairwise(words))


class MlflowTracker:
    """Logs to a run of MLflow; each call is one or a few requests that are answered."""

    settle_s = 0.0
    _KEY_TAG = "slurm_train.key"
    # What one request may hold.
    _MOST_METRICS, _MOST_PARAMS, _LONGEST_VALUE = 1000, 100, 500

    def __init__(self, client: Any, run_id: str, *, place: str) -> None:
        self.tracker_id, self.place = run_id, place
        self._client = client

    def log(self, lines: Sequence[Line]) -> None:
        """Adds the lines; of a step that is written anew MLflow keeps both values, the newer one with a later time."""
        from mlflow.entities import Metric

        metrics = (
            Metric(key, value, round(1000 * float(line.get("time_unix_s", 0.0))), int(line["step"]))
            for line in lines
            for key, value in numbers_of(line).items()
        )
        while part := list(islice(metrics, self._MOST_METRICS)):
            self._client.log_batch(self.tracker_id, metrics=part)

    def close(self, outcome: Outcome) -> None:
        """Sets the run's status; one that will be continued goes on running."""
        if outcome != "paused":
            self._client.set_terminated(self.tracker_id, outcome.upper())

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Adds the parameters; MLflow takes the same value twice, but no other one later."""
        from mlflow.entities import Param

        params = (Param(key, str(value)[: self._LONGEST_VALUE]) for key, value in flat(config).items())
        while part := list(islice(params, self._MOST_PARAMS)):
            self._client.log_batch(self.tracker_id, params=part)

    @classmethod
    def find_or_create(cls, client: Any, run: TrackedRun, experiment: str) -> str:
        """Returns the id of a run; of the one that an earlier process created before it could store the id, if any."""
        known = client.get_experiment_by_name(experiment)
        experiment_id = client.create_experiment(experiment) if known is None else known.experiment_id
        found = client.search_runs([experiment_id], filter_string=f"tags.`{cls._KEY_TAG}` = '{run.key}'")
        if found:
            return str(found[0].info.run_id)
        facts = run.facts if run.group is None else {**run.facts, "sweep": run.group}
        tags = {cls._KEY_TAG: run.key, **{f"slurm_train.{name}": value for name, value in facts.items()}}
        return str(client.create_run(experiment_id, run_name=run.name, tags=tags).info.run_id)


def _open_mlflow(run: TrackedRun, track: TrackSection, env: Mapping[str, str]) -> Tracker:
    from mlflow import MlflowClient

    experiment = track.mlflow.experiment
    assert experiment is not None
    default = f"sqlite:///{run.run.path.parent.parent}/mlflow.db"
    uri = track.mlflow.uri or env.get("MLFLOW_TRACKING_URI") or default
    client = MlflowClient(tracking_uri=uri)
    run_id = run.tracker_id or MlflowTracker.find_or_create(client, run, experiment)
    tracker = MlflowTracker(client, run_id, place=f"run {run_id} of experiment {experiment} at {redact(uri)}")
    if run.tracker_id is None:
        tracker.log_config(run.config)
    client.update_run(run_id, status="RUNNING")
    return tracker


class TrackioTracker:
    """Logs to an open run of trackio, known by its name; its database is a file of the user's, or a Space."""

    # A thread of trackio's writes them.
    settle_s = 30.0

    def __init__(self, run: Any, name: str, *, place: str) -> None:
        self.tracker_id, self.place = name, place
        self._run = run

    def log(self, lines: Sequence[Line]) -> None:
        """Hands the lines over; of a step that is written anew trackio keeps both."""
        for line in lines:
            self._run.log(numbers_of(line), step=int(line["step"]))

    def close(self, outcome: Outcome) -> None:  # noqa: ARG002  # it has no state of a run
        """Waits until they are written."""
        self._run.finish()


def _open_trackio(run: TrackedRun, track: TrackSection, _env: Mapping[str, str]) -> Tracker:
    import trackio

    project, space_id = track.trackio.project, track.trackio.space_id
    assert project is not None
    name = run.tracker_id or f"{run.run.name}-{run.key}"
    opened = trackio.init(
        project=project,
        name=name,
        group=run.group,
        space_id=space_id,
        config=run.config_and_facts,
        resume="allow",
        embed=False,
    )
    return TrackioTracker(opened, name, place=space_id or f'trackio show --project "{project}"')


_OPENERS = {
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
    "mlflow": _open_mlflow,
    "trackio": _open_trackio,
}
