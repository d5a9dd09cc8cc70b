"""The verb `scaling`: which words each run gets, what is refused, and a whole study on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm_train.cli.scaling import LOG_EVERY, Series, plan_of, read_series
from slurm_train.config.words import read_words
from slurm_train.errors import ConfigError
from slurm_train.tools.scaling import Size
from tests.support.command_line import TINY, Person, new_project


def series_of(tmp_path: Path, *words: str, steps: int = 64) -> Series:
    return read_series(read_words(words), steps=steps, env={}, cwd=tmp_path)


def test_each_run_gets_its_size_batch_and_way_of_exchanging(tmp_path: Path) -> None:
    words = ("+cluster=4x2", "optim.lr=0.01", "batch.global_size=64", "ddp.comm=none,bf16", "cluster.partition=a")
    series = series_of(tmp_path, *words)
    assert (str(series.size), series.plan.batch.local_size, series.comms) == ("4x2", 8, ("none", "bf16"))
    assert series.uses_cluster and series.name == "gpt-stdlib-scaling"
    whole = next(point for point in series.points if point.size == Size(4, 2) and point.comm == "bf16")
    typed = series.words(whole, after="17").overrides
    assert typed[:3] == ["+cluster=4x2", "optim.lr=0.01", "cluster.partition=a"]
    assert {"run.name=gpt-stdlib-scaling-4x2", "batch.local_size=8", "batch.accumulation=1", "ddp.comm=bf16"} <= set(
        typed
    )
    assert "cluster.sbatch.dependency=afterany:17" in typed and "train.evaluate=false" in typed
    assert not any(word.startswith("batch.global_size") for word in typed)


def test_a_cluster_from_a_file_is_one_and_its_settings_count(tmp_path: Path) -> None:
    (tmp_path / "conf" / "cluster").mkdir(parents=True)
    (tmp_path / "conf" / "cluster" / "mine.yaml").write_text(
        "defaults: [base, _self_]\nnodes: 4\ngpus_per_node: 2\npartition: big\n"
    )
    series = series_of(tmp_path, "--config-dir", str(tmp_path / "conf"), "+cluster=mine", "cluster.nodes=2")
    assert (str(series.size), series.uses_cluster) == ("2x2", True)
    for point in series.points:
        plan = plan_of(series.words(point), env={}, cwd=tmp_path)
        assert plan.config.cluster.partition == "big"
        assert plan.world.ranks_per_node == (point.size.per_node,) * point.size.nodes


def test_the_number_of_steps_is_whole_lines_of_metrics(tmp_path: Path) -> None:
    assert series_of(tmp_path, "+cluster=2x1", steps=33).steps == 5 * LOG_EVERY


@pytest.mark.parametrize(
    ("words", "steps", "message"),
    [
        (("+cluster=1x1",), 64, "scaling needs two ranks or more"),
        (("+cluster=2x2",), 8, "--steps=8 is too short to measure"),
        (("+cluster=2x2", "parallel.dp_shard=4"), 64, "scaling times whole replicas"),
        (("+cluster=2x4", "cluster.gpus_per_node=[4,2]"), 64, r"the words ask for 2 nodes of 4 \+ 2"),
        (("+cluster=2x4", "batch.shares=[2,1]"), 64, "scaling gives all ranks equal shares"),
        (("+cluster=2x2", "task._target_=my.main"), 64, "a function or script of your own measures nothing"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path: Path, words: tuple[str, ...], steps: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        series_of(tmp_path, *words, steps=steps)


@pytest.mark.distributed
@pytest.mark.slow
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
