"""What a run keeps beyond its retention is discarded when nothing needs it, and never beside a run at work."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.checkpoint import collect
from slurm_train.checkpoint.collect import collect_checkpoints, discard_kept
from slurm_train.config.frozen import dump_config
from slurm_train.config.schema import CheckpointSection, RunConfig
from slurm_train.errors import CheckpointError, ClusterError, RunError
from slurm_train.rundir.attempts import open_attempt
from slurm_train.rundir.jobs import process_lives, record_job, release_lock, take_lock, this_process
from slurm_train.rundir.ledger import Start
from slurm_train.rundir.paths import RunDirectory, list_checkpoints, name_of
from slurm_train.rundir.pins import pin_save, release_pin
from slurm_train.slurm.commands import SlurmCommands
from tests.fakes.slurm_commands import FakeSlurmCommands, job_state
from tests.support.ledgers import close_attempt
from tests.support.small_checkpoints import make_checkpoint, steps_in

NO_SLURM = SlurmCommands({"PATH": "/nonexistent"})


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A finished run that keeps one checkpoint and has three."""
    run = RunDirectory(tmp_path / "gpt" / "3f9a1c07")
    run.path.mkdir(parents=True)
    run.config.write_text(dump_config(RunConfig(checkpoint=CheckpointSection(keep=1))))
    attempt = open_attempt(run, Start(job_id=None, restart_count=0, nodes=("n1",), world_size=1))
    for step in (10, 20, 30):
        make_checkpoint(run.checkpoints, step, attempt=attempt)
    run.result.write_text("{}")
    return run


def test_a_finished_run_keeps_what_it_would_have_kept_alone(run: RunDirectory) -> None:
    discard_kept(run, NO_SLURM)
    assert steps_in(run.checkpoints) == [30] and not run.lock.exists()


def test_what_another_evaluation_needs_stays(run: RunDirectory) -> None:
    # A job of another cluster's: nobody can tell here whether it is over.
    own = RunDirectory(run.path / "evaluations" / "7d434a1ed8a2")
    own.path.mkdir(parents=True)
    take_lock(own.lock, this_process(), is_alive=process_lives)
    save_id = name_of(list_checkpoints(run.checkpoints)[-1]).save_id
    pin_save(run.checkpoints, save_id, own)
    discard_kept(run, NO_SLURM)
    assert steps_in(run.checkpoints) == [30, 10]
    release_pin(run.checkpoints, save_id, own)
    release_lock(own.lock, this_process())
    discard_kept(run, NO_SLURM)
    assert steps_in(run.checkpoints) == [30]


@pytest.mark.parametrize("slurm", ["absent", "silent", "has it", "has it not"])
@pytest.mark.parametrize("state", ["waits", "comes back", "stopped", "finished"])
def test_what_an_evaluation_of_a_job_needs_goes_only_when_the_job_is_known_to_be_over(
    run: RunDirectory, slurm: str, state: str
) -> None:
    own = RunDirectory(run.path / "evaluations" / "7d434a1ed8a2")
    own.path.mkdir(parents=True)
    own.submit_script.write_text("#!/bin/bash\n")
    record_job(own, "123")
    if state in ("comes back", "stopped"):
        attempt = open_attempt(own, Start(job_id="123", restart_count=0, nodes=("n1",), world_size=1))
        action = "stop" if state == "stopped" else "requeue"
        close_attempt(own, attempt, {"reason": "preempted", "action": action})
    if state == "finished":
        own.result.write_text("{}")
    pin_save(run.checkpoints, name_of(list_checkpoints(run.checkpoints)[-1]).save_id, own)
    commands = FakeSlurmCommands([job_state("123")] if slurm == "has it" else [], is_available=slurm != "absent")
    commands.error = ClusterError("no answer", hint="") if slurm == "silent" else None
    collect_checkpoints(run, commands, keep=1)  # type: ignore[arg-type]  # the fake
    is_over = {"absent": state in ("stopped", "finished"), "silent": False, "has it": state == "finished"}
    assert steps_in(run.checkpoints) == ([30] if is_over.get(slurm, True) else [30, 10])


def test_a_run_that_goes_on_is_left_alone(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "_ENDS_WITHIN_S", 0.0)
    take_lock(run.lock, this_process(), is_alive=process_lives)
    discard_kept(run, NO_SLURM)
    with pytest.raises(RunError):
        collect_checkpoints(run, NO_SLURM, keep=1)
    release_lock(run.lock, this_process())
    run.result.unlink()
    discard_kept(run, NO_SLURM)
    assert steps_in(run.checkpoints) == [30, 20, 10]


def test_nothing_is_discarded_where_nothing_verifies(run: RunDirectory) -> None:
    for path in list_checkpoints(run.checkpoints):
        (path / "rank_00000.pt").write_bytes(b"damaged")
    with pytest.raises(CheckpointError):
        collect_checkpoints(run, NO_SLURM, keep=1)
    discard_kept(run, NO_SLURM)
    assert len(list_checkpoints(run.checkpoints)) == 3 and not run.lock.exists()
