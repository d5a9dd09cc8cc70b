"""`evaluate --follow` beside a training on this machine: the built-in evaluation, and a scorer of one's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_train.rundir.paths import RunDirectory, list_checkpoints, name_of
from slurm_train.rundir.scores import best_first, read_scores
from tests.support.command_line import TINY, new_project
from tests.support.waiting import wait_for
from tests.support.warm_commands import WarmPerson
from tests.support.warm_ranks import WarmRank

pytestmark = pytest.mark.distributed
PATIENCE_S = 300.0
WORDS = (*TINY, "run.name=a", "run.processes=1", "checkpoint.keep=1", "train.threads=1")
OWN = "slurm_train.train.callbacks"
# Better up to step 8, worse from then on.
SCORER = """
import json, os, sys
step = int(os.environ["SLURM_TRAIN_STEP"])
names = os.listdir(os.environ["SLURM_TRAIN_CHECKPOINT"])
assert "COMPLETE" in names, names
if os.path.exists("broken"):
    sys.exit("no such benchmark")
print("a line for people")
print(json.dumps({"quality": -abs(step - 8)}))
"""


@pytest.fixture
def person(tmp_path: Path) -> WarmPerson:
    return WarmPerson(new_project(tmp_path / "project"))


@pytest.fixture
def background() -> Iterator[list[WarmRank]]:
    """Processes that are ended with the test."""
    processes: list[WarmRank] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def run_of(person: WarmPerson) -> RunDirectory:
    wait_for(lambda: bool(list(person.folder.glob("runs/a/*/plan.json"))), within_s=PATIENCE_S, what="the run")
    (path,) = (person.folder / "runs" / "a").iterdir()
    return RunDirectory(path)


def follower_of(run: RunDirectory) -> RunDirectory:
    wait_for(lambda: bool(list(run.path.glob("evaluations/*/scores.jsonl"))), within_s=PATIENCE_S, what="a follower")
    (path,) = (run.path / "evaluations").iterdir()
    return RunDirectory(path)


def test_a_scorer_of_ones_own_decides_on_the_best_and_on_the_end(
    person: WarmPerson, background: list[WarmRank]
) -> None:
    (person.folder / "score.py").write_text(SCORER)
    (person.folder / "broken").touch()
    rules = "monitor:eval_own_quality,mode:max,follower:true"
    ends, keeps = (f"_target_:{OWN}.{name},{rules}" for name in ("EarlyStopping", "BestCheckpoint"))
    callbacks = f"callbacks=[{{{ends},patience:3}},{{{keeps}}}]"
    words = (*WORDS, callbacks, "train.max_steps=4000", "model.step_s=0.1")
    trains = person.begins(*words, log=person.folder / "typed.log")
    background.append(trains)
    run = run_of(person)
    follow = ("evaluate", "a", "--follow", "--name", "own", "--with", "script=[score.py]")
    wait_for(lambda: bool(list_checkpoints(run.checkpoints)), within_s=PATIENCE_S, what="a checkpoint")
    failed = person.types(*follow)
    assert failed.code != 0 and "the scorer ended with exit code 1" in failed.err, failed.err
    assert trains.poll() is None, "the training goes on"
    (person.folder / "broken").unlink()
    done = person.types(*follow, timeout_s=PATIENCE_S)
    assert done.code == 0, done.err
    assert trains.wait(PATIENCE_S) == 0
    result = json.loads(run.result.read_text())
    assert result["ended_early"].startswith("eval_own_quality has not improved in "), result
    own = follower_of(run)
    best = best_first(run, measure="eval_own_quality", mode="max")[0]
    assert len(read_scores(own)) >= 4
    assert f"best eval_own_quality {best.value:.4f}" in person.types("checkpoint", "ls", "a").out
    assert best.step in {name_of(path).step for path in list_checkpoints(run.checkpoints)}
    exported = person.types("checkpoint", "export", "a@best", "best.safetensors")
    assert exported.code == 0, exported.err
