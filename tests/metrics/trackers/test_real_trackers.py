"""The real packages, offline: two attempts of a run are one run of each tracker, and every step is in it.

They run in processes of their own, by `track`, as they do beside a job; what they keep is read from their files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slurm_train.config.schema import MlflowSection, TrackioSection, TrackSection, WandbSection
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.sweep import Element, SweepDirectory, write_table
from tests.support.command_line import Person
from tests.support.tracked_runs import (
    add_lines,
    make_run,
    mlflow_points,
    query,
    step_line,
    steps,
    trackio_points,
    wandb_points,
    wandb_records,
)

pytestmark = pytest.mark.slow

FIRST = [*steps(1, 6), {"step": 6, "eval_loss": 2.5, "attempt": 0, "time_unix_s": 1006.5}]
SECOND = steps(5, 8, attempt=1)
KEPT = [(line["step"], line["loss"]) for line in (*FIRST, *SECOND) if "loss" in line]
"""All that was ever logged: steps 5 and 6 twice, since the second attempt began behind step 4."""


@pytest.fixture
def person(tmp_path: Path) -> Person:
    return Person(tmp_path)


def made(tmp_path: Path, track: TrackSection) -> RunDirectory:
    run = make_run(tmp_path, track)
    run.provenance.write_text(json.dumps({"git_commit": "0a1b2c", "user": "ada"}))
    sweep = SweepDirectory(run.path.parents[1] / "sweeps" / "9b1c44e0")
    sweep.path.mkdir(parents=True)
    write_table(sweep, [Element(index=0, run=run)])
    return run


def track(person: Person, run: RunDirectory, lines: list[dict[str, Any]], *words: str, **env: str) -> str:
    """Adds the lines of an attempt, sends them, and returns what was said."""
    add_lines(run, lines)
    done = person.types("track", run.run_id, *words, env={"HOME": str(person.folder), **env}, timeout_s=240)
    assert done.code == 0, done.err
    return done.err


def two_attempts(person: Person, run: RunDirectory, **env: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sends both attempts, the second one to its end, and returns what was known of the tracker after each."""
    track(person, run, FIRST, **env)
    (path,) = run.trackers.glob("*.json")
    first = json.loads(path.read_text())
    run.result.write_text("{}")
    track(person, run, SECOND, **env)
    second = json.loads(path.read_text())
    assert (first["key"], first["tracker_id"]) == (second["key"], second["tracker_id"])
    assert second["sure_bytes"] == run.metrics.stat().st_size
    return first, second


def test_wandb_offline(person: Person, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run = made(tmp_path, TrackSection(wandb=WandbSection(project="gpt", mode="offline", tags=["x"])))
    _, state = two_attempts(person, run)
    assert wandb_points(run.trackers) == KEPT
    assert wandb_points(run.trackers, "eval_loss") == [(6, 2.5)]
    records = wandb_records(run.trackers)
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert {(one.run_id, one.project, one.display_name, one.run_group) for one in runs} == {
        (state["tracker_id"], "gpt", "gpt/3f9a1c07", "9b1c44e0")
    }
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["optim"]["lr"] == 0.001
    assert config["slurm_train"] == {"run": str(run.path), "commit": "0a1b2c", "user": "ada"}
    metrics = [record.metric for record in records if record.WhichOneof("record_type") == "metric"]
    assert {(one.name or one.glob_name, one.step_metric) for one in metrics} == {("step", ""), ("*", "step")}
    ends = [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"]
    assert ends == [1, 0], "paused, then finished"
    assert sum(record.WhichOneof("record_type") == "preempting" for record in records) == 1
    times = [
        json.loads(item.value_json)
        for record in records
        if record.WhichOneof("record_type") == "history"
        for item in record.history.item
        if (item.key or item.nested_key[0]) == "_timestamp"
    ]
    assert times[:2] == [1001.0, 1002.0], "when it was logged, not when it was sent"


def test_mlflow_in_a_database(person: Person, tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    run = made(tmp_path, TrackSection(mlflow=MlflowSection(experiment="gpt")))
    _, state = two_attempts(person, run)
    database = tmp_path / "runs" / "mlflow.db"
    assert mlflow_points(database) == KEPT
    assert query(database, "SELECT run_uuid, name, status FROM runs") == [
        (state["tracker_id"], "gpt/3f9a1c07", "FINISHED")
    ]
    tags = dict(query(database, "SELECT key, value FROM tags"))
    assert tags["slurm_train.sweep"] == "9b1c44e0" and tags["slurm_train.commit"] == "0a1b2c"
    assert dict(query(database, "SELECT key, value FROM params"))["optim.lr"] == "0.001"


def test_mlflow_finds_a_run_whose_id_was_never_noted(person: Person, tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    run = made(tmp_path, TrackSection(mlflow=MlflowSection(experiment="gpt")))
    track(person, run, FIRST)
    path = run.trackers / "mlflow.json"
    before = json.loads(path.read_text())
    path.write_text(json.dumps({"key": before["key"], "sure_bytes": before["sure_bytes"]}))
    track(person, run, SECOND)
    assert json.loads(path.read_text())["tracker_id"] == before["tracker_id"]
    assert query(tmp_path / "runs" / "mlflow.db", "SELECT status FROM runs") == [("RUNNING",)]


def test_mlflow_in_files(person: Person, tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    run = made(tmp_path, TrackSection(mlflow=MlflowSection(experiment="gpt", uri=f"file:{tmp_path}/mlruns")))
    # MLflow itself asks for this variable since it prefers databases.
    _, state = two_attempts(person, run, MLFLOW_ALLOW_FILE_STORE="true")
    (path,) = (tmp_path / "mlruns").glob(f"*/{state['tracker_id']}/metrics/loss")
    points = [line.split() for line in path.read_text().splitlines()]
    assert [(int(step), float(value)) for _, value, step in points] == KEPT


def test_trackio_locally(person: Person, tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    run = made(tmp_path, TrackSection(trackio=TrackioSection(project="gpt")))
    _, state = two_attempts(person, run, TRACKIO_DIR=str(tmp_path / "trackio"))
    database = tmp_path / "trackio" / "gpt.db"
    assert trackio_points(database) == KEPT
    assert query(database, "SELECT DISTINCT run_name FROM metrics") == [(state["tracker_id"],)]
    assert state["tracker_id"] == f"gpt-{state['key']}"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_hides_what_was_superseded(person: Person, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = made(tmp_path, TrackSection(tensorboard=True))
    two_attempts(person, run)
    events = EventAccumulator(str(run.tensorboard))
    events.Reload()
    assert [(event.step, pytest.approx(event.value, abs=1e-6)) for event in events.Scalars("loss")] == [
        *KEPT[:4],
        *((line["step"], line["loss"]) for line in SECOND),
    ]
    assert len(list(run.tensorboard.iterdir())) == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_hides_what_a_rollback_took_back(person: Person, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = made(tmp_path, TrackSection(tensorboard=True))
    track(person, run, [*steps(1, 6), step_line(4, loss=-4.0), step_line(5, loss=-5.0)])
    events = EventAccumulator(str(run.tensorboard))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (1, 1.0), (2, 2.0), (3, 3.0), (4, -4.0), (5, -5.0)
    ]  # fmt: skip


def test_wandb_without_a_key_is_offline_and_with_one_never_blocks(person: Person, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run = made(tmp_path, TrackSection(wandb=WandbSection(project="gpt"), timeout_s=8.0))
    assert "offline; to upload: wandb sync" in track(person, run, FIRST)
    add_lines(run, SECOND)
    # Nobody listens on this port, so the start fails or takes longer than it may.
    env = {"HOME": str(tmp_path), "WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    done = person.types("track", run.run_id, env=env, timeout_s=100)
    assert done.code == 1 and done.err.startswith("wandb: "), done.err
    assert json.loads((run.trackers / "wandb.json").read_text())["sure_bytes"] < run.metrics.stat().st_size
    assert track(person, run, []).startswith("wandb: 4 lines sent; offline")


def test_one_that_is_not_installed_is_refused_before_anything_happens(person: Person, tmp_path: Path) -> None:
    run = made(tmp_path, TrackSection(wandb=WandbSection(project="gpt")))
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['wandb'] = None\n")
    done = person.types("track", run.run_id, env={"PYTHONPATH": f"{tmp_path}:{person.environment()['PYTHONPATH']}"})
    assert done.code == 2 and "pip install 'slurm-train[wandb]'" in done.err, done.err


def test_a_tracker_can_be_added_afterwards(person: Person, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = made(tmp_path, TrackSection())
    add_lines(run, FIRST)
    assert person.types("track", run.run_id).code == 2
    said = track(person, run, [], "track.tensorboard=true")
    assert said.startswith("tensorboard: 7 lines sent; tensorboard --logdir"), said
    assert run.tensorboard.is_dir()


def test_a_run_that_is_active_sends_its_metrics_itself(person: Person, tmp_path: Path) -> None:
    from slurm_train.rundir.lock import take_lock, this_process

    run = made(tmp_path, TrackSection(tensorboard=True))
    take_lock(run, this_process(), is_alive=lambda _holder: True)
    done = person.types("track", run.run_id)
    assert done.code == 2 and "which sends its metrics itself" in done.err
