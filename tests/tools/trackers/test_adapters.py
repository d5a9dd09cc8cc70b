"""The real packages, offline: two attempts of a run are one run of each tracker, and every step is in it.

They run in processes of their own, by `track`, as they do beside a job; what they keep is read from their files.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from slurm_train.config.schema import MlflowSection, TrackSection, WandbSection
from slurm_train.rundir.jobs import take_lock, this_process
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.sweep import Element, SweepDirectory, write_table
from slurm_train.tools.trackers.adapters import mlflow_name, numbers_of, wandb_mode
from tests.support.command_line import Person
from tests.support.tracked_runs import (
    add_lines,
    make_run,
    mlflow_points,
    query,
    step_line,
    steps,
    tensorboard_points,
    wandb_points,
    wandb_records,
)

FIRST = [*steps(1, 6), {"step": 6, "eval_loss": 2.5, "attempt": 0, "time_unix_s": 1006.5}]
SECOND = steps(5, 8, attempt=1)
KEPT = [(line["step"], line["loss"]) for line in (*FIRST, *SECOND) if "loss" in line]
"""All that was ever logged: steps 5 and 6 twice, since the second attempt began behind step 4."""
WANDB = TrackSection(wandb=WandbSection(project="gpt", mode="offline", tags=["x"]))
MLFLOW = TrackSection(mlflow=MlflowSection(experiment="gpt"))


@pytest.fixture
def person(tmp_path: Path) -> Person:
    return Person(tmp_path)


def make_swept_run(tmp_path: Path, track: TrackSection) -> RunDirectory:
    run = make_run(tmp_path, track)
    run.provenance.write_text(json.dumps({"git_commit": "0a1b2c", "user": "ada"}))
    sweep = SweepDirectory(run.path.parents[1] / "sweeps" / "9b1c44e0")
    sweep.path.mkdir(parents=True)
    write_table(sweep, [Element(index=0, run=run)])
    return run


def track(person: Person, run: RunDirectory, lines: list[dict[str, Any]], *words: str, **env: str) -> str:
    """Adds the lines of an attempt, sends them, and returns what was printed."""
    add_lines(run, lines)
    done = person.types("track", run.run_id, *words, env={"HOME": str(person.folder), **env}, timeout_s=240)
    assert done.code == 0, done.err
    return done.err


def two_attempts(person: Person, run: RunDirectory, **env: str) -> str:
    """Sends both attempts, the second one to its end, and returns the tracker's id of the run."""
    track(person, run, FIRST, **env)
    (path,) = run.trackers.glob("*.json")
    first = json.loads(path.read_text())
    run.result.write_text("{}")
    track(person, run, SECOND, **env)
    second = json.loads(path.read_text())
    assert (first["key"], first["tracker_id"]) == (second["key"], second["tracker_id"])
    assert second["sure_bytes"] == run.metrics.stat().st_size
    return str(second["tracker_id"])


@pytest.mark.full
@pytest.mark.slow
def test_wandb_offline(person: Person, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run = make_swept_run(tmp_path, WANDB)
    tracker_id = two_attempts(person, run)
    assert wandb_points(run.trackers) == KEPT
    assert wandb_points(run.trackers, "eval_loss") == [(6, 2.5)]
    times = [time for _, time in wandb_points(run.trackers, "_timestamp")]
    assert times[:2] == [1001.0, 1002.0], "when it was logged, not when it was sent"
    records = [(record.WhichOneof("record_type"), record) for record in wandb_records(run.trackers)]
    runs = [record.run for kind, record in records if kind == "run"]
    assert {(one.run_id, one.project, one.display_name, one.run_group, *one.tags) for one in runs} == {
        (tracker_id, "gpt", "gpt/3f9a1c07", "9b1c44e0", "x")
    }
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["optim"]["lr"] == 0.003
    assert config["slurm_train"] == {"run": str(run.path), "commit": "0a1b2c", "user": "ada"}
    ends = [record.exit.exit_code for kind, record in records if kind == "exit"]
    assert ends == [1, 0] and [kind for kind, _ in records].count("preempting") == 1, "paused, then finished"


@pytest.mark.slow
@pytest.mark.campaign
def test_mlflow_in_a_database(person: Person, tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    run = make_swept_run(tmp_path, MLFLOW)
    database = tmp_path / "runs" / "mlflow.db"
    track(person, run, FIRST)
    assert query(database, "SELECT status FROM runs") == [("RUNNING",)]
    # Killed before it could store the id: it is found again by the key.
    path = run.trackers / "mlflow.json"
    before = json.loads(path.read_text())
    path.write_text(json.dumps({"key": before["key"], "sure_bytes": before["sure_bytes"]}))
    run.result.write_text("{}")
    track(person, run, SECOND)
    assert json.loads(path.read_text())["tracker_id"] == before["tracker_id"]
    assert mlflow_points(database) == KEPT
    ended = [(before["tracker_id"], "gpt/3f9a1c07", "FINISHED")]
    assert query(database, "SELECT run_uuid, name, status FROM runs") == ended
    tags = dict(query(database, "SELECT key, value FROM tags"))
    assert tags["slurm_train.sweep"] == "9b1c44e0" and tags["slurm_train.commit"] == "0a1b2c"
    assert dict(query(database, "SELECT key, value FROM params"))["optim.lr"] == "0.003"


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_hides_what_was_superseded(person: Person, tmp_path: Path) -> None:
    """By a resume; and by a rollback within an attempt. An evaluation again, or of its step, hides nothing."""
    pytest.importorskip("tensorboard")
    run = make_swept_run(tmp_path, TrackSection(tensorboard=True))
    two_attempts(person, run)
    resumed = [*KEPT[:4], *((line["step"], line["loss"]) for line in SECOND)]
    assert tensorboard_points(run.tensorboard) == [(step, pytest.approx(loss, abs=1e-6)) for step, loss in resumed]
    assert len(list(run.tensorboard.iterdir())) == 2

    other = make_run(tmp_path, TrackSection(tensorboard=True), run_id="44aa1c07")
    evaluation = {"step": 6, "eval_loss": 2.5, "attempt": 0}
    again = [step_line(7, loss=-7.0), step_line(8, loss=-8.0), step_line(8, loss=-9.0)]
    track(person, other, [*steps(1, 6), evaluation, evaluation, *steps(7, 8), *again])
    assert tensorboard_points(other.tensorboard) == [*((step, step) for step in range(1, 7)), (7, -7.0), (8, -9.0)]
    assert tensorboard_points(other.tensorboard, "eval_loss") == [(6, 2.5), (6, 2.5)]


@pytest.mark.full
@pytest.mark.slow
def test_wandb_without_a_key_is_offline_and_with_one_never_blocks(person: Person, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run = make_run(tmp_path, TrackSection(wandb=WandbSection(project="gpt")))
    assert "offline; to upload: wandb sync" in track(person, run, FIRST)
    add_lines(run, SECOND)
    # Nothing listens on this port, so the start fails or takes longer than it may.
    env = {"HOME": str(tmp_path), "WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    done = person.types("track", run.run_id, "track.timeout_s=8", env=env, timeout_s=100)
    assert done.code == 1 and done.err.startswith("wandb: "), done.err
    assert json.loads((run.trackers / "wandb.json").read_text())["sure_bytes"] < run.metrics.stat().st_size
    assert track(person, run, []).startswith("wandb: 4 lines sent; offline")


def test_a_run_that_is_active_sends_its_metrics_itself(person: Person, tmp_path: Path) -> None:
    run = make_run(tmp_path, TrackSection(tensorboard=True))
    take_lock(run.lock, this_process(), is_alive=lambda _holder: True)
    done = person.types("track", run.run_id)
    assert done.code == 2 and "which sends its metrics itself" in done.err


def test_numbers_are_curves_and_facts_are_not() -> None:
    line = step_line(3, eval_loss=2, note="x", done=True, bad=math.nan, samples_digest=77)
    assert numbers_of(line) == {"loss": 3.0, "eval_loss": 2.0}


def test_wandb_is_online_where_there_is_a_key(tmp_path: Path) -> None:
    def mode(**env: str) -> str:
        return wandb_mode(WandbSection(project="p"), {"HOME": str(tmp_path), **env})

    key = {"WANDB_API_KEY": "x"}
    assert (mode(), mode(**key), mode(**key, WANDB_MODE="dryrun")) == ("offline", "online", "dryrun")
    assert wandb_mode(WANDB.wandb, key | {"WANDB_MODE": "online"}) == "offline"
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password x\n")
    (tmp_path / "other").touch()
    assert (mode(), mode(WANDB_BASE_URL="https://wandb.example.org:80/x")) == ("online", "offline")
    assert mode(NETRC=str(tmp_path / "other")) == "offline"


MLFLOW_NAMES = {
    "train/loss": "train/loss",
    "val/AR@100": "val/AR_100",
    "timing(s)/gen": "timing_s_/gen",
    "gpu_id: 0/memory.used (MB)": "gpu_id_ 0/memory.used _MB_",
    "/loss": "_loss",
    "a//b": "a__b",
    "../x": "___x",
    ".": "_",
    "": "_",
    "x" * 300: "x" * 250,
}


@pytest.mark.full
@pytest.mark.parametrize("name", MLFLOW_NAMES)
def test_mlflow_takes_every_name(name: str) -> None:
    validation = pytest.importorskip("mlflow.utils.validation")
    assert mlflow_name(name) == MLFLOW_NAMES[name]
    validation._validate_metric_name(mlflow_name(name))
