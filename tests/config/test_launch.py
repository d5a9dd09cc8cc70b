from __future__ import annotations

from typing import Any

import pytest

from slurm_train.config.compose import apply_words, compose
from slurm_train.config.schema import ContainerSection, RunConfig
from slurm_train.config.words import read_words
from slurm_train.errors import ConfigError

IMAGE = ("container=apptainer", "container.image=/images/a.sif")


def composed(*words: str) -> RunConfig:
    return compose(read_words(words)).config


def test_local_takes_the_cluster_away() -> None:
    config = composed("+cluster=4x8", "cluster.partition=gpu", "launch=local")
    assert (config.launch, config.cluster) == ("local", None)


def test_interactive_needs_a_cluster() -> None:
    assert composed("+cluster=1x2", "launch=interactive").launch == "interactive"
    with pytest.raises(ConfigError) as caught:
        composed("launch=interactive")
    assert "the run asks for no cluster" in caught.value.message and "+cluster=1x2" in caught.value.hint


def test_a_run_that_exists_is_started_in_another_way() -> None:
    config = composed("+cluster=1x2", "launch=interactive")
    assert apply_words(config, ["launch=slurm"]).launch == "slurm"
    assert apply_words(config, ["launch=local"]).cluster is None
    with pytest.raises(ConfigError, match="asks Slurm for an allocation"):
        apply_words(config, ["cluster=null"])


def test_a_container_is_chosen_with_its_image() -> None:
    words = ("container.mounts=[/datasets:/data:ro,/scratch]", "container.flags=[--writable-tmpfs]")
    assert composed(*IMAGE, *words).container == ContainerSection(
        kind="apptainer",
        image="/images/a.sif",
        mounts=["/datasets:/data:ro", "/scratch"],
        command="apptainer",
        flags=["--writable-tmpfs"],
    )
    assert composed("container=pyxis", "container.image=nvcr.io#nvidia/pytorch:24.12-py3").container == (
        ContainerSection(kind="pyxis", image="nvcr.io#nvidia/pytorch:24.12-py3")
    )


def test_a_container_without_an_image_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"container\.image has no value"):
        composed("container=apptainer")
    with pytest.raises(ConfigError, match="the run asks for no container"):
        composed("container.image=/a.sif")


def test_a_run_that_exists_gets_another_image_or_none() -> None:
    config = composed("+cluster=1x2", *IMAGE)
    changed = apply_words(config, ["container.image=/images/b.sif"]).container
    assert changed is not None and changed.image == "/images/b.sif"
    changed = apply_words(config, ["container=pyxis", "container.image=a"]).container
    assert changed is not None and (changed.kind, changed.command) == ("pyxis", None)
    assert apply_words(config, ["container=null"]).container is None


CONFIG = composed("+cluster=4x8")
WRONG: list[tuple[str, str]] = [
    ("optim.lrr=1", "did you mean optim.lr"),
    ("model.widht=1", "did you mean model.width"),
    ("optim.lr=1,2", "optim.lr has several values"),
    ("optim.lr=fast", "optim.lr"),
    ("nonsense", "neither a verb nor a setting"),
]


@pytest.mark.parametrize(("word", "text"), WRONG)
def test_words_that_make_no_sense_are_named(word: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_words(CONFIG, [word])
    assert text in str(caught.value)


def test_a_cluster_keeps_what_it_had_at_another_size() -> None:
    big = apply_words(CONFIG, ["cluster.partition=big", "cluster=2x4"])
    assert big.cluster is not None
    assert (big.cluster.partition, big.cluster.nodes, big.cluster.gpus_per_node) == ("big", 2, 4)
    local = apply_words(big, ["cluster=null"])
    with pytest.raises(ConfigError, match="the run has no cluster"):
        apply_words(local, ["cluster.partition=big"])
    again: Any = apply_words(local, ["+cluster=1x2"]).cluster
    assert (again.nodes, again.gpus_per_node) == (1, 2)
