from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_train.config.frozen import dump_config, load_config
from slurm_train.config.schema import ClusterSection, ContainerSection, OptimSection, RunConfig, RunSection
from slurm_train.config.structure import all_keys, to_mapping
from slurm_train.errors import ConfigError, RunError

FULL = RunConfig(
    seed=7,
    run=RunSection(name="007", root="/scratch/a b"),
    model={"_target_": "my.Model", "width": 64, "layers": [1, {"x": None}], "rate": 1e-8},
    data={"_target_": "my.Data", "path": "null", "on": True},
    optim=OptimSection(lr=3e-4, eps=1e-8, betas=[0.9, 0.999], grad_clip_norm=None),
    cluster=ClusterSection(
        nodes=2,
        gpus_per_node=[4, 2],
        nodelist="node[1-2]",
        env={"A": "1e5", "B": "yes", "C": "a: b # c", "D": "\u00e9\u4e2d"},
        setup=["module load x", "export Y='#'"],
        sbatch={"exclusive": True, "mem": "0"},
    ),
    container=ContainerSection(
        kind="apptainer",
        image="docker://pytorch/pytorch:2.13",
        mounts=["/data:/in side:ro"],
        command="singularity",
        flags=["--nv", "1e3"],
    ),
    task={"_target_": "my.main"},
    script=["train.py", "--flag", "0o7"],
)


def round_trip(config: RunConfig, path: Path) -> RunConfig:
    path.write_text(dump_config(config), encoding="utf-8")
    return load_config(path)


@pytest.mark.parametrize("config", [RunConfig(), FULL], ids=["defaults", "everything"])
def test_every_key_survives_the_disk(config: RunConfig, tmp_path: Path) -> None:
    assert round_trip(config, tmp_path / "config.yaml") == config


def test_every_key_is_spelled_out() -> None:
    def flat(mapping: dict[str, Any], prefix: str = "") -> set[str]:
        found = set()
        for key, value in mapping.items():
            found.add(f"{prefix}{key}")
            if isinstance(value, dict):
                found |= flat(value, f"{prefix}{key}.")
        return found

    assert set(all_keys(RunConfig)) <= flat(to_mapping(FULL))
    top_level = {line.split(":")[0] for line in dump_config(FULL).splitlines() if line[0].isalpha()}
    assert top_level == {key for key in all_keys(RunConfig) if "." not in key}


printable = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]))


@settings(deadline=None)
@given(env=st.dictionaries(printable, printable, max_size=3), name=printable)
def test_any_text_survives_the_disk(env: dict[str, str], name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "frozen_texts.yaml"
    config = RunConfig(run=RunSection(name=name), cluster=ClusterSection(env=dict(env)))
    assert round_trip(config, path) == config


@settings(deadline=None)
@given(st.floats(allow_nan=False))
def test_any_float_survives_the_disk_bit_for_bit(value: float) -> None:
    import yaml

    text = dump_config(RunConfig(optim=OptimSection(lr=value)))
    assert float(yaml.safe_load(text)["optim"]["lr"]).hex() == value.hex()


def test_a_missing_file_is_a_run_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="does not exist"):
        load_config(tmp_path / "config.yaml")


@pytest.mark.parametrize("text", ["", "- 1\n", "seed: [1\n", "just words\n"])
def test_a_damaged_file_is_a_run_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(RunError, match="cannot be read"):
        load_config(path)


def test_a_key_of_another_version_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("seeds: 1\n")
    with pytest.raises(ConfigError, match="there is no configuration key 'seeds'"):
        load_config(path)
