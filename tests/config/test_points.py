from __future__ import annotations

import itertools
from typing import Any

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from slurm_train.config.compose import Point, compose, compose_points, read_points
from slurm_train.config.words import Words, read_words
from slurm_train.errors import ConfigError


def points(*words: str) -> list[Point]:
    return read_points(read_words(words))


def values(key: str, *words: str) -> list[str]:
    return [point.values[key] for point in points(*words)]


@pytest.mark.parametrize(
    "words",
    [
        ["optim.lr=1e-3,3e-4", "seed=range(3)"],
        ["+cluster=1x8,2x8", "seed=7", "optim.lr=choice(1,2)"],
        ["seed=range(0,10,4)", "train.compile=true,false", "optim.lr=range(0.1,0.4,0.1)"],
        ["model=gpt,cnn", "seed=sort(3,1,2)", "optim.betas=[0.9,0.95],[0.9,0.99]"],
        ["seed=3"],
    ],
)
def test_the_points_are_those_of_hydras_own_sweeper_in_its_order(words: list[str]) -> None:
    (expected,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(words), None)
    assert [list(point.overrides) for point in points(*words)] == expected


def test_a_point_knows_what_the_sweep_gave_to_it() -> None:
    first, *_, last = points("+cluster=1x8,2x8", "run.name=study", "optim.lr=1e-3,3e-4")
    assert first.values == {"cluster": "1x8", "optim.lr": "0.001"}
    assert last == Point(("+cluster=2x8", "run.name=study", "optim.lr=0.0003"), last.values)


def test_a_glob_gives_the_options_of_a_group() -> None:
    assert values("model", "model=glob(*,exclude=[custom,hf,*-*])") == ["cnn", "gpt"]


ONE_VALUE = [
    "cluster.nodelist=node[1-2],node5",
    "cluster.exclude=node1,node2",
    "cluster.sbatch.mail_type=END,FAIL",
    "cluster.env.HCA=mlx5_0,mlx5_1",
    "script=[train.py,--lr=1e-3,--tag,a]",
    "run.name=nodes-${cluster.nodes}",
    "run.root=/some where/(else)",
    "~data.context",
]


@pytest.mark.parametrize("word", ONE_VALUE)
def test_what_is_one_value_without_multirun_is_one_value_with_it(word: str) -> None:
    assert [point.overrides for point in points(word, "seed=1,2")] == [(word, "seed=1"), (word, "seed=2")]


TEXTS: list[tuple[str, list[Any]]] = [
    ("run.name=a,'b,c',d e", ["a", "b,c", "d e"]),
    ("run.name=choice(a,'b\\'c')", ["a", "b'c"]),
    ("cluster.exclude=choice(node1,'node1,node2')", ["node1", "node1,node2"]),
]


@pytest.mark.parametrize(("word", "expected"), TEXTS)
def test_texts_arrive_as_they_were_meant(word: str, expected: list[str]) -> None:
    words = Words(overrides=["+cluster=1x1", word])
    section, _, key = word.partition("=")[0].partition(".")
    found = compose_points(words, [point.overrides for point in read_points(words)])
    assert [getattr(getattr(one.config, section), key) for one in found] == expected


def test_composing_many_gives_what_composing_one_by_one_gives() -> None:
    words = read_words(["+cluster=1x8,2x4", "data=stdlib,digits", "model=gpt", "seed=1,2", "++data.context=64,128"])
    sweep = [point.overrides for point in read_points(words)]
    together = list(compose_points(words, sweep))
    alone = [compose(Words(overrides=list(overrides))) for overrides in sweep]
    assert len(together) == 16
    for one, other in zip(together, alone, strict=True):
        assert (one.config, one.mapping, one.choices) == (other.config, other.mapping, other.choices)


def test_points_do_not_leak_into_each_other() -> None:
    words = Words(overrides=[])
    sweep = [["optim.lr=0.5", "+model.extra=1"], [], ["~model.width"]]
    first, second, third = compose_points(words, sweep)
    assert first.config.optim.lr == 0.5 and first.mapping["model"]["extra"] == 1
    assert second.mapping == compose(words).mapping
    assert "width" not in third.mapping["model"] and "extra" not in third.mapping["model"]


REFUSED = [
    (["seed=range(0)"], "seed=range(0) gives no value: the sweep is empty"),
    (["optim.lr=interval(0,1)"], "optim.lr=interval(0,1): an interval names no points"),
    (["seed=1,2", "seed=3,4"], "seed is swept by two words"),
    (["run.name=a,b(c"], "'run.name=a,b(c' cannot be read in a sweep"),
    (["seed=range(1000)", "optim.lr=range(1000)"], "1000 x 1000 = 1,000,000 runs in one sweep"),
    (["foo"], "'foo' is neither a verb nor a setting"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=lambda value: str(value))
def test_what_names_no_points_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        points(*words)
    assert caught.value.message.startswith(message) and caught.value.hint


def test_the_order_is_that_of_nested_loops() -> None:
    found = [tuple(point.values.values()) for point in points("seed=1,2", "optim.lr=3,4", "train.max_steps=5,6")]
    assert found == list(itertools.product("12", "34", "56"))
