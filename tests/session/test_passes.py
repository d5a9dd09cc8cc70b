"""A loader that begins its pass again after a resume is named; one that goes on behind what was used is not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from slurm_train.rundir.heartbeat import Heartbeat
from slurm_train.rundir.paths import RunDirectory
from slurm_train.session.joined import JoinedSession
from tests.support.sessions import join_alone

_hearts: list[Heartbeat] = []


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    give = _BaseDataLoaderIter.__next__
    yield
    _BaseDataLoaderIter.__next__ = give  # type: ignore[method-assign]
    while _hearts:
        _hearts.pop().stop()


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "runs" / "mine" / "0123456789ab")
    run.path.mkdir(parents=True)
    return run


class Place:
    """Says how many steps are done, as engines do; the loader does not follow it."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def train(run: RunDirectory, *, last: int, skips: bool = False, files: bool = False) -> None:
    """Trains up to a step, in epochs of eight batches, and saves there."""
    _hearts.append(Heartbeat())
    session: JoinedSession = join_alone(run, heartbeat=_hearts[-1])
    model = torch.nn.Linear(1, 1)
    place = Place()
    training = None if files else session.training(model, torch.optim.SGD(model.parameters()), place=place)
    if training is None:
        newest = session.newest()
        done = 0 if newest is None else newest.step
    else:
        done = training.resume()
    step = done
    loader = DataLoader(torch.arange(16.0), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(1))  # type: ignore[arg-type]
    while step < last:
        for batch in itertools.islice(loader, done % 8 if skips and step == done else 0, None):
            model(batch[:, None]).sum().backward()
            step += 1
            place.step = step
            session.report(step, loss=1.0)
            if step == last:
                if training is not None:
                    training.save(step)
                else:
                    with session.save(step) as folder:
                        (folder / "step").write_text(str(step))
                break
    session.close()


@pytest.mark.parametrize("files", [False, True])
def test_a_first_epoch_that_begins_again_is_named(
    files: bool, run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    train(run, last=3, files=files)
    train(run, last=6, files=files)
    said = capsys.readouterr().err
    assert (
        said.count("a loader gave batch 1 of the epoch again, of which 3 batches were used when step 3 was saved") == 1
    )


def test_what_skips_the_used_batches_or_begins_the_next_epoch_is_not_named(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    train(run, last=3)
    train(run, last=8, skips=True)
    train(run, last=10)
    assert "batch 1 of the epoch again" not in capsys.readouterr().err
