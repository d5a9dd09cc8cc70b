from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from slurm_train.config.compose import Composed, Composer, apply_words, compose
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


@pytest.mark.parametrize("word", ["site=big", "+site=big"])
def test_a_site_fills_what_was_left_open(word: str) -> None:
    cluster = cluster_of(word)
    assert (cluster.nodes, cluster.gpus_per_node) == (4, 8)
    assert (cluster.partition, cluster.account, cluster.gpu_flag) == ("a100", "ml", "gres")
    assert (cluster.cpus_per_gpu, cluster.memory_gb_per_gpu, cluster.time_limit_min) == (16, 120, 1440)
    assert cluster.setup == ["module load cuda"]
    assert composed("+cluster=4x8", word).config.site == "big"


def test_the_only_site_of_a_person_is_used_unless_another_or_none_is_typed(home: Path, tmp_path: Path) -> None:
    assert (composed("+cluster=4x8").config.site, cluster_of().account) == ("big", "ml")
    assert (composed("+cluster=4x8", "site=none").config.site, cluster_of("site=none").account) == ("none", None)
    folder = write(tmp_path / "own", {"experiment/there.yaml": "# @package _global_\ncluster: {account: nearer}\n"})
    assert cluster_of("--config-dir", folder, "+experiment=there").account == "nearer"
    assert composed().config.site is None, "it trains here"
    other = home / ".config" / "slurm_train" / "site" / "other.yaml"
    other.write_text("cluster: {account: other}\n")
    assert composed("+cluster=4x8").config.site is None, "one of several is named"
    other.with_name("default.yaml").symlink_to("other.yaml")
    assert (composed("+cluster=4x8").config.site, cluster_of().account) == ("other", "other")
    assert cluster_of("site=big").account == "ml"
    other.write_text("cluster: [\n")
    with pytest.raises(ConfigError):
        composed("+cluster=4x8")


def test_the_command_line_wins_also_with_a_default() -> None:
    cluster = cluster_of("site=big", "cluster.account=mine", "cluster.cpus_per_gpu=4", "cluster.env.NCCL_DEBUG=INFO")
    assert (cluster.account, cluster.cpus_per_gpu, cluster.time_limit_min) == ("mine", 4, 1440)
    assert cluster.env == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": 4}
    cluster = cluster_of(
        "site=big", "cluster.time_limit_min=null", "cluster.gpu_flag=gpus-per-node", "cluster.setup=[]"
    )
    assert (cluster.time_limit_min, cluster.gpu_flag, cluster.setup) == (None, "gpus-per-node", [])


def test_a_typed_partition_brings_its_own_values() -> None:
    cluster = cluster_of("site=big", "cluster.partition=debug")
    assert (cluster.partition, cluster.gpu_type, cluster.time_limit_min) == ("debug", "a100", 30)
    assert (cluster.cpus_per_gpu, cluster.gpu_flag, cluster.account) == (None, "gpus-per-node", "ml")
    assert cluster_of("site=big", "cluster.partition=other").time_limit_min is None
    assert cluster_of("site=big", "cluster.partition=null").partition is None


def test_memory_per_node_replaces_memory_per_gpu() -> None:
    assert cluster_of("site=big", "cluster.memory_gb_per_node=0").memory_gb_per_gpu is None


@pytest.mark.parametrize(("words", "comes_back"), [((), False), (("requeue.enabled=true",), True)])
def test_a_site_that_refuses_requeue_has_runs_that_wait_for_resume(
    words: tuple[str, ...], comes_back: bool, home: Path
) -> None:
    (home / ".config/slurm_train/site/strict.yaml").write_text("refuses_requeue: true\n")
    settings = composed("+cluster=1x8", "site=strict", *words)
    assert settings.config.requeue.enabled is comes_back


def test_each_point_of_a_sweep_gets_the_values_of_its_partition() -> None:
    words = read_words(["-m", "+cluster=1x8", "site=big"])
    points = [[*words.overrides, f"cluster.partition={name}"] for name in ("a100", "debug")]
    found = map(Composer(words).compose, points)
    limits = [one.config.cluster.time_limit_min for one in found if one.config.cluster]
    assert limits == [1440, 30]


def test_without_a_cluster_a_site_has_nothing_to_say() -> None:
    config = composed("site=big").config
    assert (config.cluster, config.site) == (None, "big")


def test_a_file_in_config_dir_comes_before_the_users_own(tmp_path: Path) -> None:
    folder = write(tmp_path / "own", {"site/big.yaml": "cluster: {account: nearer}\n"})
    assert cluster_of("--config-dir", folder, "site=big").account == "nearer"


def test_files_that_are_nearer_to_the_run_win_over_the_site(tmp_path: Path) -> None:
    experiment = "# @package _global_\ncluster: {time_limit_min: 5}\n"
    folder = write(tmp_path / "own", {"experiment/quick.yaml": experiment})
    cluster = cluster_of("--config-dir", folder, "site=big", "+experiment=quick")
    assert (cluster.time_limit_min, cluster.account) == (5, "ml")


def test_a_primary_file_of_ones_own_may_choose_a_site(tmp_path: Path) -> None:
    text = "defaults: [{model: gpt}, {data: stdlib}, {cluster: 1x2}, {site: big}, _self_]\nsite: null\n"
    folder = write(tmp_path / "own", {"mine.yaml": text.replace("site: null\n", "")})
    words = ["--config-dir", folder, "--config-name", "mine", "cluster=1x2"]
    cluster = composed(*words).config.cluster
    assert cluster.account == "ml"


def test_the_users_folder_shadows_nothing(home: Path) -> None:
    write(home / ".config" / "slurm_train", {"cluster/base.yaml": "account: hidden\n", "model/gpt.yaml": "a: 1\n"})
    config = composed("+cluster=1x1", "site=none").config
    assert config.cluster.account is None
    assert config.model is not None and "a" not in config.model


def test_show_prints_the_values_that_a_run_would_have(capsys: pytest.CaptureFixture[str]) -> None:
    Composer(read_words(["--cfg", "job", "+cluster=4x8", "site=big"])).show()
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["cluster"]["account"], printed["site"]) == ("ml", "big")
    assert printed["model"]["context"] == "${data.context}", "references stay as they were written"


def test_an_absent_site_is_an_error_with_those_that_there_are() -> None:
    error = refusal(ConfigError, composed, "+cluster=1x1", "site=huge")
    assert "there is no configuration 'site/huge'" in error.message
    assert "there are: big" in error.hint and "init huge" in error.hint


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"clusters": {}}, "there is no configuration key 'site x: clusters'"),
        ({"cluster": {"acount": "a"}}, "there is no configuration key 'site x: cluster.acount'"),
        ({"cluster": {"nodes": 4}}, "site x: cluster gives a size"),
        ({"cluster": {"time_limit_min": "long"}}, "site x: cluster.time_limit_min must be a whole number"),
        ({"partitions": {"p": {"cpus": 3}}}, "there is no configuration key 'site x: partitions.p.cpus'"),
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
    open_size = composed("+cluster=base", "cluster.nodes=2-4", "cluster.launcher=torchrun").config
    moved = apply_words(open_size, ["site=big"])
    assert (moved.cluster.nodes, moved.cluster.launcher) == ("2-4", "torchrun")
