import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_train.checkpoint.verify import LAST_FINITE, find_kept
from slurm_train.cli.checkpoint import find_checkpoint
from slurm_train.errors import CheckpointError
from slurm_train.metrics import Display
from slurm_train.rundir.events import read_events
from slurm_train.rundir.heartbeat import Heartbeat
from slurm_train.rundir.paths import RunDirectory, list_checkpoints, name_of
from slurm_train.session.joined import JoinedSession
from slurm_train.session.losses import LossWatch
from slurm_train.status.run_status import read_files
from tests.support.ranks import make_rank
from tests.support.sessions import join_alone

NAN = math.nan


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "runs" / "mine" / "0123456789ab")
    run.path.mkdir(parents=True)
    run.config.write_text("{}")
    return run


@pytest.fixture
def hearts() -> Iterator[list[Heartbeat]]:
    hearts: list[Heartbeat] = []
    yield hearts
    for heart in hearts:
        heart.stop()


def join(run: RunDirectory, hearts: list[Heartbeat]) -> JoinedSession:
    hearts.append(Heartbeat())
    return join_alone(run, heartbeat=hearts[-1])


def train(session: JoinedSession, steps: range, *, bad: range, save_every: int = 2) -> None:
    for step in steps:
        session.report(step, loss=NAN if step in bad else 1.0 / step)
        if step % save_every == 0:
            with session.save(step) as folder:
                (folder / "model").write_text(str(step))


def steps_on_disk(run: RunDirectory) -> list[int]:
    return [name_of(path).step for path in list_checkpoints(run.checkpoints)]


@pytest.mark.parametrize(
    ("losses", "saves", "kept"),
    [
        ([1.0, 1.0, 1.0], [1], None),
        ([1.0, 1.0, NAN], [1], 1),
        ([1.0, NAN, NAN], [1], None),  # no loss was computed by the weights after step 1
        ([1.0, 1.0, 1.0, NAN], [1, 2], 2),
        ([1.0, 1.0, 1.0, NAN], [1, 3], 1),
        ([1.0, 1.0, NAN, 1.0], [1], None),
        ([1.0, 1.0, NAN, 1.0, math.inf], [1, 3], 3),  # what was saved meanwhile was sound
        ([NAN], [], None),
    ],
)
def test_the_newest_checkpoint_that_has_computed_a_finite_loss_is_kept(
    run: RunDirectory, losses: list[float], saves: list[int], kept: int | None
) -> None:
    watch = LossWatch(make_rank(run.path))
    for step, loss in enumerate(losses, start=1):
        watch.add(step, loss)
        if step in saves:
            watch.add_save(step)
    rules = watch.kept()
    assert [rule["steps"][0][0] for rule in rules] == ([] if kept is None else [kept])


def test_a_loss_that_is_not_finite_is_said_once_and_written_down(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = LossWatch(make_rank(run.path, attempt=3, display=Display()))
    for step, loss in enumerate([1.0, NAN, NAN, 2.0, math.inf], start=1):
        watch.add(step, loss)
    events = [(event["event"], event["step"], event["value"], event["attempt"]) for event in read_events(run)]
    assert events == [("non_finite", 2, "nan", 3), ("finite", 4, 2.0, 3), ("non_finite", 5, "inf", 3)]
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_saves_do_not_replace_the_checkpoint_from_before(run: RunDirectory, hearts: list[Heartbeat]) -> None:
    first = join(run, hearts)
    train(first, range(1, 17), bad=range(7, 99))
    first.close()
    # keep=2, and that of step 4: the weights after it have computed the loss of step 5; step 6 was saved, too.
    assert steps_on_disk(run) == [16, 14, 4]
    assert read_files(run).loss_problem == "the loss is nan since step 7"
    assert [entry.rule for entry in find_kept(run.checkpoints)] == [LAST_FINITE]
    with pytest.raises(CheckpointError):
        find_checkpoint(f"{run.run_id}@best", root=run.path.parent.parent)
    # The next attempt goes on from the newest, keeps the sound one, too, and drops it once the loss is finite.
    second = join(run, hearts)
    assert second.newest() is not None
    train(second, range(17, 21), bad=range(7, 99))
    second.close()
    assert steps_on_disk(run) == [20, 18, 4]
    third = join(run, hearts)
    third.newest()
    train(third, range(21, 27), bad=range(0))
    third.close()
    assert steps_on_disk(run) == [26, 24]
    assert read_files(run).loss_problem == ""


def test_steps_without_a_reported_loss_are_no_problem(run: RunDirectory, hearts: list[Heartbeat]) -> None:
    session = join(run, hearts)
    session.report(1, loss=0.5)
    session.report(2, loss=NAN)
    session.report(3, loss=0.4)
    session.report(4, lr=0.1)
    session.close()
    assert read_files(run).loss_problem == ""
