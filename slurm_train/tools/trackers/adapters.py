"""What a tracker is, and the four there are: TensorBoard, Weights & Biases, MLflow, trackio.

A tracker may raise, hang or die at any moment: each runs in a process of its own (see `follow`), and its
package is imported there alone. To add one:

1. here a class, named in `TRACKERS` after its package;
2. its section in `TrackSection` of `config/schema.py`;
3. in `tools/trackers/__init__.py` the key that switches it on, and the variables that hold its keys;
4. its package as an extra in `pyproject.toml`, and a row in `docs/trackers.md`.
"""

from __future__ import annotations

import contextlib
import netrc
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal
from urllib.parse import urlsplit

from slurm_train.config.schema import TrackSection, WandbSection, flat
from slurm_train.config.secrets import redact
from slurm_train.formatting import as_float
from slurm_train.rundir.paths import RunDirectory

Outcome = Literal["finished", "failed", "paused"]
"""State of a run when its tracker is closed; paused: it will be continued, by Slurm or by a person."""
Line = Mapping[str, Any]
"""A line of metrics.jsonl; it has a "step"."""
_LONGEST_MLFLOW_NAME = 250
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


class Tracker:
    """A run that is open at a tracker. Making one starts or continues the run there.

    Every method may raise and may take its time.

    Args:
        run: the run.
        track: the settings of all trackers.
        env: the environment.
    """

    tracker_id: str
    """Its id of the run; stored before the first line is sent, and given back in the next attempt."""
    place: str
    """Where a person finds the run: a URL, or a command."""
    settle_s = 0.0
    """Seconds after which a line that it took can no longer be lost with this process."""

    def __init__(self, run: TrackedRun, track: TrackSection, env: Mapping[str, str]) -> None:
        raise NotImplementedError

    def log(self, lines: Sequence[Line]) -> None:
        """Sends lines in the order in which they were written; a step may come again after a resume."""
        raise NotImplementedError

    def close(self, outcome: Outcome) -> None:
        """Sends what is left and sets the run's state; lines that were taken are safe when it returns."""
        raise NotImplementedError


def numbers_of(line: Line) -> dict[str, float]:
    """Returns the curves of a line by name."""
    numbers = {key: as_float(value) for key, value in line.items() if key not in _NOT_CURVES}
    return {key: number for key, number in numbers.items() if number is not None}


class TensorBoardTracker(Tracker):
    """Writes the numbers of a line as scalars, one event file per attempt. Needs tensorboard, but not torch."""

    def __init__(self, run: TrackedRun, _track: TrackSection, _env: Mapping[str, str]) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.tracker_id = str(run.run.tensorboard)
        self.place = f"tensorboard --logdir {self.tracker_id}"
        self._writer = EventFileWriter(self.tracker_id)
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
        step = line["step"]
        trains = "loss" in line
        goes_back = self._step is None or step < self._step or (trains and step <= self._trained)
        self._step = step
        if trains:
            self._trained = step
        return goes_back

    def _add(self, line: Line, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(step=line["step"], wall_time=float(line.get("time_unix_s", 0.0)), **content))


class WandbTracker(Tracker):
    """Logs to a run of W&B.

    W&B takes no step twice, but a run that comes back from a checkpoint repeats some. So nothing is logged under W&B's
    own counter: "step" is a metric, and the axis of all others.
    """

    # wandb hands lines over to a process of its own, which uploads them every few seconds.
    settle_s = 60.0

    def __init__(self, run: TrackedRun, track: TrackSection, env: Mapping[str, str]) -> None:
        import wandb

        mode = wandb_mode(track.wandb, env)
        folder = run.run.trackers
        self._run = wandb.init(
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
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.tracker_id = str(self._run.id)
        upload = f"offline; to upload: wandb sync {folder / 'wandb'}/offline-run-*-{self.tracker_id}"
        self.place = upload if mode == "offline" else str(self._run.url)

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


def wandb_mode(settings: WandbSection, env: Mapping[str, str]) -> str:
    """Returns W&B's mode: what was asked for, else WANDB_MODE, else online where there is a key, else offline."""
    if settings.mode != "auto" or env.get("WANDB_MODE"):
        return settings.mode if settings.mode != "auto" else env["WANDB_MODE"]
    host = urlsplit(env.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = env.get("NETRC") or f"{env.get('HOME', '')}/.netrc"
    has_key = bool(env.get("WANDB_API_KEY"))
    with contextlib.suppress(OSError, ValueError, netrc.NetrcParseError):
        has_key = has_key or netrc.netrc(path).authenticators(host) is not None
    return "online" if has_key else "offline"


class MlflowTracker(Tracker):
    """Logs to a run of MLflow; each call is one or a few requests that are answered."""

    _KEY_TAG = "slurm_train.key"
    # What one request may hold.
    _MOST_METRICS = 1000
    _MOST_PARAMS = 100
    _LONGEST_VALUE = 500

    def __init__(self, run: TrackedRun, track: TrackSection, env: Mapping[str, str]) -> None:
        from mlflow import MlflowClient

        experiment = track.mlflow.experiment or ""
        default = f"sqlite:///{run.run.place}/mlflow.db"
        uri = track.mlflow.uri or env.get("MLFLOW_TRACKING_URI") or default
        self._client = MlflowClient(tracking_uri=uri)
        self.tracker_id = run.tracker_id or self._find_or_create(run, experiment)
        self.place = f"run {self.tracker_id} of experiment {experiment} at {redact(uri)}"
        if run.tracker_id is None:
            self._log_config(run.config)
        self._client.update_run(self.tracker_id, status="RUNNING")

    def log(self, lines: Sequence[Line]) -> None:
        """Adds the lines; of a step that is written anew MLflow keeps both values, the newer one with a later time."""
        from mlflow.entities import Metric

        metrics = (
            Metric(mlflow_name(key), value, round(1000 * float(line.get("time_unix_s", 0.0))), int(line["step"]))
            for line in lines
            for key, value in numbers_of(line).items()
        )
        self._send("metrics", metrics, self._MOST_METRICS)

    def close(self, outcome: Outcome) -> None:
        """Sets the run's status; one that will be continued goes on running."""
        if outcome != "paused":
            self._client.set_terminated(self.tracker_id, outcome.upper())

    def _log_config(self, config: Mapping[str, Any]) -> None:
        """Adds the parameters; MLflow takes the same value twice, but no other one later."""
        from mlflow.entities import Param

        params = (Param(mlflow_name(key), str(value)[: self._LONGEST_VALUE]) for key, value in flat(config).items())
        self._send("params", params, self._MOST_PARAMS)

    def _send(self, kind: str, items: Iterator[Any], most: int) -> None:
        while part := list(islice(items, most)):
            self._client.log_batch(self.tracker_id, **{kind: part})

    def _find_or_create(self, run: TrackedRun, experiment: str) -> str:
        """Returns the id of a run; of the one that an earlier process created before it could store the id, if any."""
        stored_experiment = self._client.get_experiment_by_name(experiment)
        experiment_id = (
            self._client.create_experiment(experiment) if stored_experiment is None else stored_experiment.experiment_id
        )
        matches = self._client.search_runs([experiment_id], filter_string=f"tags.`{self._KEY_TAG}` = '{run.key}'")
        if matches:
            return str(matches[0].info.run_id)
        facts = run.facts if run.group is None else {**run.facts, "sweep": run.group}
        tags = {self._KEY_TAG: run.key, **{f"slurm_train.{name}": value for name, value in facts.items()}}
        return str(self._client.create_run(experiment_id, run_name=run.name, tags=tags).info.run_id)


def mlflow_name(name: str) -> str:
    """Returns a name that MLflow takes for a metric or a parameter, e.g. "val/AR_100" for "val/AR@100".

    MLflow refuses all of a request with one bad name, so one such metric would keep all others out. A name that is no
    plain relative path, such as "/loss" or "a//b", is refused as well.
    """
    plain = re.sub(r"[^\w/. -]", "_", name)[:_LONGEST_MLFLOW_NAME]
    is_path = posixpath.normpath(plain) == plain and plain != "." and not plain.startswith(("/", ".."))
    return plain if is_path else re.sub(r"[/.]", "_", plain) or "_"


class TrackioTracker(Tracker):
    """Logs to a run of trackio, known by its name; its database is a file of the user's, or a Space."""

    # A thread of trackio's writes them.
    settle_s = 30.0

    def __init__(self, run: TrackedRun, track: TrackSection, _env: Mapping[str, str]) -> None:
        import trackio

        project = track.trackio.project
        space_id = track.trackio.space_id
        self.tracker_id = run.tracker_id or f"{run.run.name}-{run.key}"
        self.place = space_id or f'trackio show --project "{project}"'
        self._run = trackio.init(
            project=project or "",
            name=self.tracker_id,
            group=run.group,
            space_id=space_id,
            config=run.config_and_facts,
            resume="allow",
            embed=False,
        )

    def log(self, lines: Sequence[Line]) -> None:
        """Hands the lines over; of a step that is written anew trackio keeps both."""
        for line in lines:
            self._run.log(numbers_of(line), step=int(line["step"]))

    def close(self, outcome: Outcome) -> None:  # noqa: ARG002  # it has no state of a run
        """Waits until they are written."""
        self._run.finish()


TRACKERS: Mapping[str, type[Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
}
