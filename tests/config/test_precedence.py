"""Whose value of a cluster's key counts: that of the words, of an experiment, of a cluster file, of the site.

Not the order of the words decides, nor that a value is a default somewhere.
"""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import yaml

from slurm_train.config.compose import Composer
from slurm_train.config.schema import ClusterSection, flat, to_mapping
from slurm_train.config.site_schema import SIZE
from slurm_train.config.words import Words, read_words
from slurm_train.slurm.flags import OPTIONS
from tests.support.command_line import write

DEFAULTS = to_mapping(ClusterSection())
# Values of every key: two that differ from each other, and the default, which must win as well where it is written.
VALUES: dict[str, tuple[Any, Any]] = {
    **dict.fromkeys(OPTIONS, ("a", "b")),
    "spare_nodes": (1, 2),
    "launcher": ("torchrun", "torchrun"),
    "max_restarts": (1, 2),
    "cpus_per_gpu": (4, 8),
    "memory_gb_per_node": (10, 20),
    "memory_gb_per_gpu": (1, 2),
    **dict.fromkeys(("gpu_type", "network_interface"), ("a", "b")),
    "time_limit_min": (10, 20),
    "gpu_flag": ("gres", "none"),
    "export": (["A"], ["B"]),
    "rendezvous_address": ("ib0", "%Ni"),
    "rendezvous_ports": ("40000-40010", "50000-50010"),
    "setup": (["x"], ["y"]),
    "python": ("/a", "/b"),
    "stage_python": ("/tmp", "/scratch"),
    "job_name_prefix": ("p:", "q:"),
    "srun_wrapper": (["w"], ["v"]),
    **{key: ({"A": "1"}, {"A": "2"}) for key in ("env", "sbatch", "srun")},
}
KEYS = [key for key in DEFAULTS if key not in SIZE]
# "memory_gb_per_node" decides with "memory_gb_per_gpu".
PARTS = [[key for key in KEYS if key != "memory_gb_per_gpu"], ["memory_gb_per_gpu"]]
MAPPINGS = ("env", "sbatch", "srun")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def clusters(folder: str, lines: list[list[str]]) -> list[dict[str, Any]]:
    """Returns the cluster that each line of words gives, composed with the files of a folder."""
    composer = Composer(Words(config_dir=folder))
    found = []
    for words in lines:
        cluster: Any = to_mapping(composer.compose(words).config)["cluster"]
        found.append({key: value for key, value in cluster.items() if key not in SIZE})
    return found


def files(keys: list[str], *, site: int | None, experiment: int | None, cluster: int | None) -> dict[str, str]:
    """Returns files that set the keys to their first or second value, or with -1 to the default; None: to nothing."""

    def values(index: int | None) -> dict[str, Any]:
        if index is None:
            return {}
        return {key: DEFAULTS[key] if index < 0 else VALUES[key][index] for key in keys}

    return {
        "site/s.yaml": yaml.safe_dump({"cluster": values(site)}),
        "cluster/big.yaml": yaml.safe_dump({"defaults": ["base", "_self_"], "nodes": 2, **values(cluster)}),
        "experiment/e.yaml": "# @package _global_\n" + yaml.safe_dump({"cluster": values(experiment)}),
    }


@pytest.mark.parametrize("keys", PARTS, ids=["all", "memory"])
@pytest.mark.parametrize("size", ["+cluster=4x8", "+cluster=big"])
def test_an_experiment_wins_over_site_and_cluster_in_any_order_of_words(
    tmp_path: Path, keys: list[str], size: str
) -> None:
    folder = write(tmp_path / "conf", files(keys, site=0, experiment=1, cluster=0))
    lines = [list(words) for words in permutations([size, "site=s", "+experiment=e"])]
    for found in clusters(folder, lines):
        assert {key: found[key] for key in keys} == {key: VALUES[key][1] for key in keys}


@pytest.mark.parametrize("keys", PARTS, ids=["all", "memory"])
def test_a_default_that_an_experiment_or_a_cluster_file_writes_wins_over_the_site(
    tmp_path: Path, keys: list[str]
) -> None:
    keys = [key for key in keys if key not in MAPPINGS]
    for which in ("experiment", "cluster"):
        levels: dict[str, int | None] = {"site": 0, "experiment": None, "cluster": None, which: -1}
        folder = write(tmp_path / which, files(keys, **levels))
        for found in clusters(folder, [["+cluster=big", "site=s", "+experiment=e"]]):
            assert {key: found[key] for key in keys} == {key: DEFAULTS[key] for key in keys}, which


def test_a_site_fills_every_key_that_nothing_else_sets(tmp_path: Path) -> None:
    for keys in PARTS:
        folder = write(tmp_path / keys[0], files(keys, site=0, experiment=None, cluster=None))
        lines = [["+cluster=4x8", "site=s"], ["site=s", "+experiment=e", "+cluster=big"]]
        for found in clusters(folder, lines):
            assert {key: found[key] for key in keys} == {key: VALUES[key][0] for key in keys}


def test_what_is_typed_wins_wherever_it_stands(tmp_path: Path) -> None:
    keys = [key for key in KEYS if key not in (*MAPPINGS, "memory_gb_per_gpu")]
    folder = write(tmp_path / "conf", files(keys, site=0, experiment=0, cluster=0))
    typed = []
    for key in keys:
        value = VALUES[key][1]
        typed.append(f"cluster.{key}=[{','.join(value)}]" if isinstance(value, list) else f"cluster.{key}={value}")
    groups = ["+cluster=4x8", "site=s", "+experiment=e"]
    lines = [[*typed, *groups], [*groups, *typed], [groups[0], *typed, *groups[1:]], [groups[2], *typed, *groups[:2]]]
    for found in clusters(folder, lines):
        assert {key: found[key] for key in keys} == {key: VALUES[key][1] for key in keys}


def test_a_section_that_is_typed_as_one_word_wins_as_well(tmp_path: Path) -> None:
    folder = write(tmp_path / "conf", files(["partition", "account"], site=0, experiment=0, cluster=None))
    section = "cluster={nodes: 2, gpus_per_node: 1, partition: typed}"
    for words in ([section, "site=s"], ["site=s", "+cluster=4x8", section], [section, "+cluster=4x8", "site=s"]):
        (found,) = clusters(folder, [words])
        assert (found["partition"], found["account"]) == ("typed", "a"), words


def test_the_primary_file_is_not_replaced_by_the_defaults_of_a_size(tmp_path: Path) -> None:
    keys = [key for key in KEYS if key != "memory_gb_per_gpu"]
    section = {"cluster": {key: VALUES[key][0] for key in keys}}
    text = yaml.safe_dump({"defaults": ["config", "_self_"]}) + yaml.safe_dump(section)
    folder = write(tmp_path / "conf", {"main.yaml": text})
    words = read_words(["--config-dir", folder, "--config-name", "main", "+cluster=4x8"])
    found: Any = to_mapping(Composer(words).compose(words.overrides).config)["cluster"]
    assert {key: found[key] for key in keys} == {key: VALUES[key][0] for key in keys}
    assert (found["nodes"], found["gpus_per_node"]) == (4, 8)


def test_a_copy_of_our_base_file_leaves_open_what_it_does_not_change(tmp_path: Path) -> None:
    base = yaml.safe_dump({**DEFAULTS, "account": "mine"})
    content = files(["partition", "account"], site=0, experiment=None, cluster=None)
    folder = write(tmp_path / "conf", {**content, "cluster/base.yaml": base})
    (found,) = clusters(folder, [["+cluster=4x8", "site=s"]])
    assert (found["partition"], found["account"]) == ("a", "mine")


def test_mappings_of_site_partition_and_experiment_are_merged_entry_by_entry(tmp_path: Path) -> None:
    content = {
        "site/s.yaml": "cluster: {partition: p, env: {S: 1, X: s}}\npartitions: {p: {cluster: {env: {P: 2, X: p}}}}\n",
        "experiment/e.yaml": "# @package _global_\ncluster: {env: {E: 3, X: e}}\n",
    }
    folder = write(tmp_path / "conf", content)
    (found,) = clusters(folder, [["+experiment=e", "site=s", "+cluster=1x1", "cluster.env.T=4"]])
    assert flat(found["env"]) == {"S": "1", "P": "2", "E": "3", "T": "4", "X": "e"}


def test_one_amount_of_memory_replaces_the_other_kind(tmp_path: Path) -> None:
    content = {
        "site/node.yaml": "cluster: {memory_gb_per_node: 100}\n",
        "site/both.yaml": "cluster: {memory_gb_per_node: 9, partition: p}\n"
        "partitions: {p: {cluster: {memory_gb_per_gpu: 5}}}\n",
    }
    folder = write(tmp_path / "conf", content)
    typed, both = clusters(
        folder, [["+cluster=1x1", "site=node", "cluster.memory_gb_per_gpu=3"], ["+cluster=1x1", "site=both"]]
    )
    assert (typed["memory_gb_per_node"], typed["memory_gb_per_gpu"]) == (None, 3)
    assert (both["memory_gb_per_node"], both["memory_gb_per_gpu"]) == (None, 5)
