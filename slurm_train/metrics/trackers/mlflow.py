"""MLflow: one run for all attempts, found again by its id, or by our key where the id was never heard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from slurm_train.config.schema import MlflowSection
from slurm_train.config.secrets import redact
from slurm_train.config.structure import flat
from slurm_train.metrics.trackers.catalogue import not_installed
from slurm_train.metrics.trackers.tracker import Line, Outcome, TrackedRun, numbers_of

# What one request may hold.
_MOST_METRICS, _MOST_PARAMS = 1000, 100
_LONGEST_VALUE = 500
_KEY_TAG = "slurm_train.key"
_STATUS: Mapping[Outcome, str] = {"finished": "FINISHED", "failed": "FAILED"}


class MlflowTracker:
    """Logs to a run of MLflow; each call is one or a few requests that are answered.

    Args:
        client: an MlflowClient.
        run_id: MLflow's id of the run.
        place: where a person finds it.
    """

    settle_s = 0.0

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
        while part := list(islice(metrics, _MOST_METRICS)):
            self._client.log_batch(self.tracker_id, metrics=part)

    def close(self, outcome: Outcome) -> None:
        """Says how the run stands; one that will be continued goes on running."""
        if outcome in _STATUS:
            self._client.set_terminated(self.tracker_id, _STATUS[outcome])


def open_mlflow(run: TrackedRun, settings: MlflowSection, *, env: Mapping[str, str]) -> MlflowTracker:
    """Starts or continues the run at MLflow.

    Raises:
        ConfigError: no mlflow package is installed.
    """
    try:
        from mlflow import MlflowClient
        from mlflow.entities import Param
    except ImportError:
        raise not_installed("mlflow") from None
    uri = settings.uri or env.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.root}/mlflow.db"
    client = MlflowClient(tracking_uri=uri)
    assert settings.experiment is not None
    run_id = run.tracker_id or _find(client, run, settings.experiment)
    if run_id is None:
        run_id = _create(client, run, settings.experiment)
    if run.tracker_id is None:
        # MLflow takes the same value twice, but no other one: an accepted change of a setting is not in here.
        params = (Param(key, str(value)[:_LONGEST_VALUE]) for key, value in flat(run.config).items())
        while part := list(islice(params, _MOST_PARAMS)):
            client.log_batch(run_id, params=part)
    client.update_run(run_id, status="RUNNING")
    return MlflowTracker(client, run_id, place=f"run {run_id} of experiment {settings.experiment} at {redact(uri)}")


def _find(client: Any, run: TrackedRun, experiment: str) -> str | None:
    """Returns the run that an earlier process made and died before it could note its id."""
    known = client.get_experiment_by_name(experiment)
    if known is None:
        return None
    found = client.search_runs([known.experiment_id], filter_string=f"tags.`{_KEY_TAG}` = '{run.key}'")
    return str(found[0].info.run_id) if found else None


def _create(client: Any, run: TrackedRun, experiment: str) -> str:
    known = client.get_experiment_by_name(experiment)
    experiment_id = client.create_experiment(experiment) if known is None else known.experiment_id
    tags = {_KEY_TAG: run.key, **{f"slurm_train.{name}": value for name, value in run.facts.items()}}
    if run.group is not None:
        tags["slurm_train.sweep"] = run.group
    return str(client.create_run(experiment_id, run_name=run.name, tags=tags).info.run_id)
