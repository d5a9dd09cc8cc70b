"""The verb `scaling`: which words each run gets, what is refused, and a whole study on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm_train.config.words import read_words
from slurm_train.errors import ConfigError
from slurm_train.tools.scaling.model import Size
from slurm_train.tools.scaling.series import StudyPlan, read_series
from tests.support.command_line import TINY, Person, new_project


def series_of(tmp_path: Path, *words: str, steps: int = 64) -> StudyPlan:
    return read_series(read_words(words), steps=steps, env={}, cwd=tmp_path)


def test_each_run_gets_its_size_batch_and_way_of_exchanging(tmp_path: Path) -> None:
    words = ("+cluster=4x2", "optim.lr=0.01", "batch.global_size=64", "ddp.comm=none,bf16")
    series = series_of(tmp_path, *words)
    assert (str(series.size), series.plan.batch.local_size, series.comms) == ("4x2", 8, ("none", "bf16"))
    whole = next(point for point in series.points if point.size == Size(4, 2) and point.comm == "bf16")
    typed = series.words(whole, after="17").overrides
    expected = {"+cluster=4x2", "optim.lr=0.01", "batch.local_size=8", "ddp.comm=bf16", "train.evaluate=false"}
    assert expected | {"cluster.sbatch.dependency=afterany:17"} <= set(typed)
    assert not any(word.startswith("batch.global_size") for word in typed)


@pytest.mark.parametrize(
    ("words", "steps", "message"),
    [
        (("+cluster=1x1",), 64, "scaling needs two ranks or more"),
        (("+cluster=2x2",), 8, "--steps=8 is too short to measure"),
        (("+cluster=2x2", "parallel.dp_shard=4"), 64, "scaling times whole replicas"),
        (("+cluster=2x2", "task._target_=my.main"), 64, "a function or script of your own measures nothing"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path: Path, words: tuple[str, ...], steps: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        series_of(tmp_path, *words, steps=steps)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.campaign
def test_a_study_on_this_machine_ends_with_a_report_and_is_not_made_twice(tmp_path: Path) -> None:
    person = Person(new_project(tmp_path / "project"))
    words = ("scaling", "run.processes=2", *TINY, "model.step_s=0.02", "ddp.comm=bf16", "--steps", "32")
    done = person.types(*words, timeout_s=250)
    assert done.code == 0, done.err
    assert "fixed local batch" in done.out and "fixed global batch" in done.out
    rows = [line.split()[:3] for line in done.out.splitlines() if line.startswith(("1x1 ", "1x2 "))]
    assert ["1x2", "2", "16"] in rows and ["1x1", "1", "8"] in rows, done.out
    assert "a step takes" in done.out
    (page,) = person.folder.glob("runs/*-scaling/scaling_1x2.html")
    assert "a step takes" in page.read_text()
    facts = json.loads(page.with_suffix(".json").read_text())
    assert {one["point"]["comm"] for one in facts} == {"bf16"}
    # Weights and biases of the tiny model: 8 x 16 + 16 + 16 + 1 numbers, halved by bfloat16.
    assert {one["sent_bytes"] for one in facts} == {2 * 161}
    again = person.types(*words)
    assert again.code == 0 and again.out == done.out
    assert again.err.count("finished") == 3 and "attempt" not in again.err
