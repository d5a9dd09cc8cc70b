"""What an attempt goes on from: on record once a step was taken from there, and not before."""

from __future__ import annotations

from pathlib import Path

from slurm_train.checkpoint.choice import Choice
from slurm_train.checkpoint.manifest import Manifest
from slurm_train.checkpoint.resumption import Resumption, run_place
from slurm_train.checkpoint.verify import PassedOver
from slurm_train.rundir.attempts import open_attempt
from slurm_train.rundir.ledger import Start
from slurm_train.rundir.lineage import Origin, read_origins
from slurm_train.rundir.paths import PASSED_OVER_PREFIX, RunDirectory
from tests.support.small_checkpoints import make_header


def new_run(folder: Path) -> RunDirectory:
    run = RunDirectory(folder / "runs" / "mine" / "0123456789ab")
    run.path.mkdir(parents=True)
    open_attempt(run, Start(job_id=None, restart_count=0, nodes=("here",), world_size=1))
    return run


def choice_beside(damaged: Path) -> Choice:
    damaged.mkdir(parents=True)
    path = damaged.with_name("checkpoint_0000004_attempt_0000_aaaaaaaa")
    return Choice(path, Manifest.of(make_header(4, attempt=0), {}), (PassedOver(damaged, "damaged"),))


def test_the_past_is_left_with_the_first_step_and_on_record_once(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    damaged = run.checkpoints / "checkpoint_0000008_attempt_0000_bbbbbbbb"
    resumption = Resumption(run, run_place(run, 0, keep=1, is_leader=True))
    resumption.begin_from(choice_beside(damaged))
    assert damaged.exists() and read_origins(run) == []
    resumption.move_on()
    resumption.move_on()
    assert not damaged.exists()
    assert [path.name for path in run.checkpoints.iterdir()] == [f"{PASSED_OVER_PREFIX}{damaged.name}"]
    origin = Origin(step=4, save_id="aaaaaaaa", saved_in=0, parent="")
    assert read_origins(run) == [(0, origin)]
    # A rollback takes the run back once more.
    resumption.begin_from(None)
    resumption.move_on()
    assert read_origins(run) == [(0, origin), (0, Origin())]


def test_only_the_leader_leaves_a_record(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    resumption = Resumption(run, run_place(run, 0, keep=1, is_leader=False))
    damaged = run.checkpoints / "checkpoint_0000008_attempt_0000_bbbbbbbb"
    resumption.begin_from(choice_beside(damaged))
    resumption.move_on()
    assert resumption.origin.step == 4 and damaged.exists() and read_origins(run) == []


def test_what_the_file_system_refuses_is_tried_again(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    resumption = Resumption(run, run_place(run, 0, keep=1, is_leader=True))
    hidden = run.path.rename(tmp_path / "away")
    resumption.move_on()
    hidden.rename(run.path)
    assert read_origins(run) == []
    resumption.move_on()
    assert len(read_origins(run)) == 1
