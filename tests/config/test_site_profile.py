from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurm_train.config.compose import Composed, apply_words, compose
from slurm_train.config.schema import ClusterSection
from slurm_train.config.site_profile import read_site
from slurm_train.config.words import read_words
from slurm_train.errors import ConfigError
from tests.support.command_line import write
from tests.support.refusals import refusal

SITE = """
slurm_version: 23.02.7
cluster:
  partition: a100
  account: ml
  gpu_flag: gres
  env: {NCCL_DEBUG: WARN, OMP_NUM_THREADS: 4}
  setup: [module load cuda]
partitions:
  a100: {num_nodes: 20, cluster: {cpus_per_gpu: 16, memory_gb_per_gpu: 120, time_limit_min: 1440}}
  debug: {cluster: {time_limit_min: 30, gpu_type: a100, gpu_flag: gpus-per-node}}
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A person's home with one site file in it."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / ".config" / "slurm_train" / "site"
    folder.mkdir(parents=True)
    (folder / "big.yaml").write_text(SITE)
    return tmp_path / "home"


def composed(*words: str) -> Composed:
    return compose(read_words(words))


def cluster_of(*words: str) -> ClusterSection:
    return composed("+cluster=4x8", *words).config.cluster


def test_a_site_fills_what_was_left_open() -> None:
    cluster = cluster_of("+site=big")
    assert (cluster.partition, cluster.account, cluster.gpu_flag) == ("a100", "ml", "gres")
    assert (cluster.cpus_per_gpu, cluster.memory_gb_per_gpu, cluster.time_limit_min) == (16, 120, 1440)


def test_the_only_site_of_a_person_is_used_unless_another_or_none_is_typed(home: Path) -> None:
    assert (composed("+cluster=4x8").config.site, cluster_of().account) == ("big", "ml")
    assert cluster_of("site=none").account is None
    assert composed().config.site is None, "it trains here"
    other = home / ".config" / "slurm_train" / "site" / "other.yaml"
    other.write_text("cluster: {account: other}\n")
    assert composed("+cluster=4x8").config.site is None, "one of several is named"
    other.with_name("default.yaml").symlink_to("other.yaml")
    assert (composed("+cluster=4x8").config.site, cluster_of().account) == ("other", "other")
    assert cluster_of("site=big").account == "ml"


def test_the_command_line_wins_also_with_a_default() -> None:
    cluster = cluster_of("site=big", "cluster.account=mine", "cluster.cpus_per_gpu=4", "cluster.env.NCCL_DEBUG=INFO")
    assert (cluster.account, cluster.cpus_per_gpu, cluster.time_limit_min) == ("mine", 4, 1440)
    assert cluster.env == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4"}


def test_a_typed_partition_brings_its_own_values() -> None:
    cluster = cluster_of("site=big", "cluster.partition=debug")
    assert (cluster.partition, cluster.gpu_type, cluster.time_limit_min) == ("debug", "a100", 30)
    assert (cluster.cpus_per_gpu, cluster.gpu_flag, cluster.account) == ("auto", "gpus-per-node", "ml")
    assert cluster_of("site=big", "cluster.partition=other").time_limit_min is None


def test_several_partitions_bring_what_suits_all_of_them() -> None:
    cluster = cluster_of("site=big", "cluster.partition=a100,debug")
    assert (cluster.partition, cluster.time_limit_min, cluster.cpus_per_gpu) == ("a100,debug", 30, "auto")
    # The site's own, since the two differ in it.
    assert cluster.gpu_flag == "gres"


def test_a_site_that_refuses_requeue_has_runs_that_wait_for_resume(home: Path) -> None:
    (home / ".config/slurm_train/site/strict.yaml").write_text("refuses_requeue: true\n")
    words = ("+cluster=1x8", "site=strict")
    assert not composed(*words).config.requeue.enabled
    assert composed(*words, "requeue.enabled=true").config.requeue.enabled


def test_files_that_are_nearer_to_the_run_win_over_the_site(tmp_path: Path) -> None:
    experiment = "# @package _global_\ncluster: {time_limit_min: 5}\n"
    folder = write(tmp_path / "own", {"experiment/quick.yaml": experiment})
    cluster = cluster_of("--config-dir", folder, "site=big", "+experiment=quick")
    assert (cluster.time_limit_min, cluster.account) == (5, "ml")


def test_an_absent_site_is_an_error_with_those_that_there_are() -> None:
    error = refusal(ConfigError, composed, "+cluster=1x1", "site=huge")
    assert "there is no configuration 'site/huge'" in error.message
    assert "there are: big" in error.hint and "init huge" in error.hint


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"clusters": {}}, "there is no configuration key 'site x: clusters'"),
        ({"cluster": {"nodes": 4}}, "site x: cluster gives a size"),
        ({"partitions": {"p": {"cluster": {"gpu_flag": "g"}}}}, "site x: partitions.p.cluster.gpu_flag must be"),
        ({"partitions": ["p"]}, "site x: partitions must be a mapping"),
        ({"qos": {"q": {"grace": 3}}}, "there is no configuration key 'site x: qos.q.grace'"),
    ],
)
def test_a_mistake_in_a_site_file_is_named_with_its_place(mapping: dict[str, Any], message: str) -> None:
    assert message in refusal(ConfigError, read_site, mapping, name="x").message


def test_a_secret_in_a_site_file_is_refused(home: Path) -> None:
    path = home / ".config" / "slurm_train" / "site" / "leaky.yaml"
    path.write_text("cluster: {env: {WANDB_API_KEY: 0123456789abcdef}}\n")
    with pytest.raises(ConfigError, match="what looks like a secret"):
        composed("+cluster=1x1", "site=leaky")


def test_a_run_that_exists_moves_to_another_site() -> None:
    config = composed("+cluster=4x8", "cluster.account=old", "cluster.env.A=1").config
    moved = apply_words(config, ["site=big"])
    assert moved.site == "big" and moved.cluster == cluster_of("site=big")
    moved = apply_words(config, ["site=big", "cluster=2x4", "cluster.partition=debug"])
    assert (moved.cluster.nodes, moved.cluster.gpus_per_node, moved.cluster.time_limit_min) == (2, 4, 30)
    assert apply_words(moved, ["site=null"]).cluster == moved.cluster
