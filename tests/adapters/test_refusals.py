"""What the callbacks of other libraries refuse, since it would go wrong without a word."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_train.config.schema import RunConfig
from slurm_train.distributed.place import RankPlace
from slurm_train.errors import ConfigError
from slurm_train.rundir.attempts import AttemptStart, open_attempt
from slurm_train.rundir.heartbeat import Heartbeat
from slurm_train.rundir.paths import RunDirectory
from slurm_train.session import client
from slurm_train.session.signals import StopFlag
from tests.support.extras import NEEDS_TRANSFORMERS

NEEDS_LIGHTNING = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="lightning is not installed: pip install lightning"
)
# What the libraries themselves warn of when they are imported is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[client.JoinedSession]:
    monkeypatch.setattr(client, "_joined", [])
    run = RunDirectory(tmp_path / "runs" / "mine" / "0123456789ab")
    run.path.mkdir(parents=True)
    attempt = open_attempt(run, AttemptStart(job_id=None, restart_count=0, nodes=("here",), world_size=1))
    place = RankPlace(rank=0, local_rank=0, node_rank=0, world_size=1, local_world_size=1, host="here")
    heart = Heartbeat()
    yield client.enter(run, RunConfig(), place, {}, attempt=attempt, stop=StopFlag(), heartbeat=heart)
    # Else it writes beside the tests that follow in this process, some of which count such calls.
    heart.stop()


@NEEDS_TRANSFORMERS
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"load_best_model_at_end": True, "save_strategy": "steps"}, "load_best_model_at_end=True needs checkpoints"),
        ({"load_best_model_at_end": False, "save_strategy": "best"}, "save_strategy='best' needs checkpoints"),
        ({"load_best_model_at_end": False, "save_strategy": "steps"}, ""),
    ],
)
def test_a_trainer_that_looks_for_its_best_checkpoint(
    settings: dict[str, Any], words: str, in_a_run: client.JoinedSession
) -> None:
    from slurm_train.adapters.transformers import SessionCallback

    callback = SessionCallback()
    assert callback.session is in_a_run
    arguments: Any = SimpleNamespace(**settings)
    state: Any = SimpleNamespace(global_step=0)
    if words:
        with pytest.raises(ConfigError, match=words):
            callback.on_train_begin(arguments, state, None)
    else:
        callback.on_train_begin(arguments, state, None)
    in_a_run.close()


@NEEDS_LIGHTNING
def test_lightning_with_other_ranks_than_the_run(in_a_run: client.JoinedSession) -> None:
    from slurm_train.adapters.lightning import SessionCallback

    callback = SessionCallback()
    trainer: Any = SimpleNamespace(global_rank=0, world_size=4)
    with pytest.raises(ConfigError, match="calls this rank 0 of 4; it is 0 of 1 in the run"):
        callback.setup(trainer, None, "fit")
    in_a_run.close()
