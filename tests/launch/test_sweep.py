from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_train.config.compose import Composed, Point
from slurm_train.errors import BatchError, ConfigError
from slurm_train.launch.sweep import SweepPlan, plan_sweep
from slurm_train.rundir import lookup
from tests.support.plans import composed

CWD = Path("/home/user/project")


def plan(*sections: dict[str, Any]) -> SweepPlan:
    points = [Point((), {"n": str(index)}) for index in range(len(sections))]

    def configs() -> Iterator[Composed]:
        for one in sections:
            yield composed(**one)

    return plan_sweep(points, configs(), cwd=CWD, env={})


def test_the_runs_lie_where_they_would_lie_alone_and_the_sweep_beside_them() -> None:
    sweep = plan({"seed": 1}, {"seed": 2})
    assert [element.run for element in sweep.elements] == [one.run for one in sweep.plans]
    assert {one.run.path.parent for one in sweep.plans} == {CWD / "runs" / "gpt-stdlib"}
    assert sweep.sweep.path.parent == CWD / "runs" / "sweeps"
    assert (sweep.uses_cluster, sweep.keys, sweep.max_parallel) == (False, ["n"], None)


def test_the_same_runs_are_the_same_sweep_in_any_order() -> None:
    one, other = plan({"seed": 1}, {"seed": 2}), plan({"seed": 2}, {"seed": 1})
    assert one.sweep == other.sweep
    assert one.sweep != plan({"seed": 1}, {"seed": 3}).sweep
    assert one.sweep != plan({"seed": 1, "run": {"name": "x"}}, {"seed": 2, "run": {"name": "x"}}).sweep


REFUSED: list[tuple[list[dict[str, Any]], str]] = [
    (
        [{"seed": 1}, {"seed": 2}, {"seed": 1, "cluster": None, "checkpoint": {"keep": 5}}],
        "runs 0 and 2 of the sweep train the same: n=0, and n=2",
    ),
    ([{"seed": 1}, {"seed": 2, "cluster": {"nodes": 1}}], "some runs of the sweep ask for a cluster and some do not"),
    ([{"run": {"root": "a"}}, {"run": {"root": "b"}}], "the runs of one sweep have several roots: a, b"),
    ([{"sweep": {"max_parallel": 1}}, {"seed": 2}], "sweep.max_parallel differs"),
    ([{}, {"script": []}], "run 1 (n=1): script=[] names no file"),
]


@pytest.mark.parametrize(("sections", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_one_sweep_is_refused(sections: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(*sections)
    assert caught.value.message.startswith(message) and caught.value.hint


def test_an_impossible_run_keeps_the_kind_of_its_error() -> None:
    with pytest.raises(BatchError, match=r"run 1 \(n=1\)"):
        plan({}, {"cluster": {"nodes": 1, "gpus_per_node": 8}, "batch": {"global_size": 33}})


def test_two_trainings_with_one_id_are_not_called_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "ID_DIGITS", 1)
    with pytest.raises(ConfigError, match=r"of the sweep have the same id by chance, [0-9a-f]: n=\d+, and n=\d+\n"):
        plan(*({"seed": seed} for seed in range(17)))
