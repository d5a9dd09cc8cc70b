"""What a YAML file gives to a text, a time or a variable: its spelling, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurm_train.config.compose import Composed, compose
from slurm_train.config.frozen import dump_config, load_config
from slurm_train.config.schema import RunConfig, all_keys, build_config, flat, nested, to_mapping
from slurm_train.config.site_profile import read_site
from slurm_train.config.site_schema import SiteFile, SitePartition, SiteQos
from slurm_train.config.words import read_words
from slurm_train.config.yaml_files import read_yaml
from slurm_train.errors import ConfigError
from slurm_train.tools.site import render_site
from tests.support.command_line import write
from tests.support.refusals import refusal

# Plain words that YAML 1.1 takes for numbers, dates, true, false or null.
SPELLINGS = [
    *("12:00:00", "1:30", "0123", "0755", "00", "08", "1e3", "12e3", "1E5", "1_000", "0x1F", "0b11", "1.10", "1.0"),
    *("22.05", "+5", "-0", ".5", "1.", "yes", "No", "on", "OFF", "True", "false", ".inf", ".nan", "2026-01-05"),
    *("2026-01-05T10:00:00", "190:20:30.15", "=", "0o17", "4"),
]
TEXTS = sorted(key for key, hint in all_keys(RunConfig).items() if hint in (str, str | None))
LISTS = sorted(key for key, hint in all_keys(RunConfig).items() if hint in (list[str], list[str] | None))
VARIABLES = ["cluster.env.A", "cluster.env.OUT"]
# A flag is a text, but for true and false.
FLAGS = ["cluster.sbatch.comment", "cluster.sbatch.wckey", "cluster.sbatch.begin", "cluster.srun.mpi"]
FLAG_SPELLINGS = [one for one in SPELLINGS if one.lower() not in ("yes", "no", "on", "off", "true", "false")]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def composed(*words: str) -> Composed:
    return compose(read_words(words))


def lines_of(values: dict[str, str], *, indent: str = "") -> str:
    """Returns nested keys as YAML text with the values as they are, unquoted."""
    text = ""
    for key, value in values.items():
        text += f"{indent}{key}:\n{lines_of(value, indent=indent + '  ')}" if isinstance(value, dict) else ""
        text += "" if isinstance(value, dict) else f"{indent}{key}: {value}\n"
    return text


def read(folder: Path, name: str, text: str) -> Any:
    """Returns what a file of a configuration folder holds."""
    write(folder, {name: text})
    return read_yaml(folder / name)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_text_and_variable_of_the_schema_arrives_as_written(tmp_path: Path, spelling: str) -> None:
    flags = FLAGS if spelling in FLAG_SPELLINGS else []
    values = dict.fromkeys((*TEXTS, *VARIABLES, *flags), spelling)
    text = lines_of(nested({**values, **dict.fromkeys(LISTS, f"[{spelling}, x]"), "container.kind": "pyxis"}))
    config = build_config(RunConfig, read(tmp_path, "experiment/odd.yaml", f"# @package _global_\n{text}"))
    arrived = flat(to_mapping(config))
    assert {key: arrived[key] for key in values} == values
    assert {key: arrived[key] for key in LISTS} == {key: [spelling, "x"] for key in LISTS}
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml") == config


def site_text(spelling: str) -> tuple[str, dict[str, str]]:
    """Returns a site file with a spelling as the value of every text, and what a run shall get of it."""
    keys = [key for key in (*TEXTS, *VARIABLES) if key.startswith("cluster.")]
    own = nested({f"partitions.{spelling}.{key}": spelling for key in keys if key != "cluster.partition"})
    return f"slurm_version: {spelling}\ncluster: {{partition: {spelling}}}\n{lines_of(own)}", dict.fromkeys(
        keys, spelling
    )


@pytest.mark.parametrize("spelling", [one for one in SPELLINGS if "." not in one])
def test_a_site_file_gives_every_text_as_written(tmp_path: Path, spelling: str) -> None:
    text, expected = site_text(spelling)
    site = read_site(read(tmp_path, "site/a.yaml", text), name="a")
    assert (site.slurm_version, list(site.partitions)) == (spelling, [spelling])
    arrived = flat({"cluster": {**site.cluster, **site.partitions[spelling].cluster}})
    assert arrived == expected


def test_files_reach_the_run_through_hydra_as_written(tmp_path: Path, home: Path) -> None:
    files = {
        "experiment/a.yaml": "# @package _global_\nrun: {name: 1e3}\ncluster: {env: {A: 0755}}\n",
        "cluster/mine.yaml": "defaults: [base]\nconstraint: 1_000\nsbatch: {begin: 16:00}\nsetup: [on]\n",
        "main.yaml": "defaults: [config, _self_]\ntrack: {wandb: {project: 22.10, tags: [no, 1.10]}}\n",
    }
    folder = write(tmp_path / "conf", files)
    text, expected = site_text("12:00:00")
    write(home / ".config/slurm_train", {"site/only.yaml": text})
    words = ["--config-dir", folder, "--config-name", "main", "+cluster=mine", "+experiment=a"]
    arrived = flat(to_mapping(composed(*words).config))
    own = {"cluster.env.A": "0755", "cluster.constraint": "1_000"}
    assert {key: arrived[key] for key in expected} == {**expected, **own}
    assert (arrived["run.name"], arrived["cluster.sbatch.begin"], arrived["cluster.setup"]) == ("1e3", "16:00", ["on"])
    assert (arrived["track.wandb.project"], arrived["track.wandb.tags"]) == ("22.10", ["no", "1.10"])


@pytest.mark.parametrize("spelling", [*SPELLINGS, "~", "null", "a: b", "# c"])
def test_what_init_writes_is_read_back_as_it_was(tmp_path: Path, spelling: str) -> None:
    cluster = {"partition": spelling, "account": spelling, "network_interface": spelling, "setup": [spelling]}
    partition = SitePartition(num_nodes=4, cluster={"qos": spelling, "gpu_type": spelling, "time_limit_min": 720})
    qos = SiteQos(preempted_by=[spelling], max_time_min=90)
    site = SiteFile(
        slurm_version=spelling, cluster=cluster, partitions={spelling: partition}, qos={spelling: qos}, kill_wait_s=30.0
    )
    write(tmp_path, {"site/x.yaml": render_site(site, name="x", problems=[])})
    assert read_site(read_yaml(tmp_path / "site/x.yaml"), name="x") == site


TIMES = [("12:00:00", 720), ("30:00", 30), ("1-12", 2160), ("0755", 755), ("90", 90), ("'4:00:00'", 240)]


@pytest.mark.parametrize(("spelling", "minutes"), TIMES)
def test_a_time_in_a_file_is_what_it_is_on_the_command_line(tmp_path: Path, spelling: str, minutes: int) -> None:
    section = f"cluster: {{time: {spelling}}}"
    for name, text in (
        ("experiment/a.yaml", section),
        ("site/a.yaml", section),
        ("site/b.yaml", f"partitions: {{p: {{{section}}}}}"),
        ("cluster/mine.yaml", f"time: {spelling}"),
        ("other/mine.yaml", f"# @package cluster\ntime: {spelling}"),
    ):
        values = flat(read(tmp_path, name, text))
        assert [value for key, value in values.items() if key.endswith("time_limit_min")] == [minutes], name


def test_a_typed_time_wins_over_that_of_a_file(tmp_path: Path) -> None:
    files = {
        "experiment/a.yaml": "# @package _global_\ncluster: {time: 12:00:00}\n",
        "site/a.yaml": "cluster: {time: 6:00:00}\n",
    }
    folder = write(tmp_path / "conf", files)
    for words, minutes in (
        (["site=a"], 360),
        (["site=a", "+experiment=a"], 720),
        (["site=a", "+experiment=a", "cluster.time=5:00"], 5),
    ):
        config = composed("--config-dir", folder, "+cluster=1x1", *words).config
        assert config.cluster is not None and config.cluster.time_limit_min == minutes, words


REFUSED = [
    ("cluster: {constraint: [a100, ib]}", "cluster.constraint must be a text", "cluster.constraint=a100,ib"),
    ("cluster: {time_limit_min: 12:00:00}", "cluster.time_limit_min=12:00:00", "time: 12:00:00"),
    ("cluster: {time_limit_min: 0100}", "cluster.time_limit_min=0100", "time: 0100"),
    ("cluster: {time: soon}", "cluster.time=soon", "HH:MM:SS"),
    ("cluster: {time: '${seed}'}", "refers to another key", "time_limit_min"),
    ("cluster: {env: {A: ~}}", "cluster.env.A: ~", "in quotes"),
    ("script: [train.py, ~]", "script.1: ~", "in quotes"),
    ("cluster: {sbatch: {exclusive: yes}}", "cluster.sbatch.exclusive: yes", "quotes"),
    ("cluster: {srun: {overlap: off}}", "cluster.srun.overlap: off", "quotes"),
    ("train: {max_steps: 0100}", "train.max_steps must be a whole number, at least 1, got '0100'", ""),
    ("train: {start_timeout_s: 10:00}", "train.start_timeout_s must be a number", ""),
]


@pytest.mark.parametrize(("text", "message", "hint"), REFUSED)
def test_a_word_that_could_mean_two_things_is_refused(tmp_path: Path, text: str, message: str, hint: str) -> None:
    folder = write(tmp_path / "conf", {"experiment/odd.yaml": f"# @package _global_\n{text}\n"})
    error = refusal(ConfigError, composed, "--config-dir", folder, "+cluster=1x1", "+experiment=odd")
    assert message in error.message and hint in error.hint
    assert "720" not in str(error) and "43200" not in str(error)


LISTS_OF_SLURM = [
    ("partition: [main, 3090]", "cluster.partition", "main,3090"),
    ("partition: 3090", "cluster.partition", "3090"),
    ("nodelist: [node1, 'node[3-4]']", "cluster.nodelist", "node1,node[3-4]"),
    ("exclude: [node1]", "cluster.exclude", "node1"),
    ("sbatch: {licenses: [matlab:1, ansys:2], mail-type: [END, FAIL]}", "cluster.sbatch.licenses", "matlab:1,ansys:2"),
    ("srun: {mpi: [a, 1e3]}", "cluster.srun.mpi", "a,1e3"),
]


@pytest.mark.parametrize(("text", "key", "value"), LISTS_OF_SLURM)
def test_a_list_is_given_to_slurm_as_it_writes_lists(tmp_path: Path, text: str, key: str, value: str) -> None:
    for name, lines in (
        ("experiment/a.yaml", f"# @package _global_\ncluster: {{{text}}}\n"),
        ("site/a.yaml", f"cluster: {{{text}}}\n"),
        ("cluster/a.yaml", f"{text}\n"),
    ):
        values = flat(read(tmp_path, name, lines))
        assert values[key if name[:7] != "cluster" else key.removeprefix("cluster.")] == value, name


def test_text_that_is_no_yaml_is_to_be_put_in_quotes(tmp_path: Path) -> None:
    text = "# @package _global_\ncluster: {exclude: node[1,3-4]}\n"
    folder = write(tmp_path / "conf", {"experiment/odd.yaml": text})
    error = refusal(ConfigError, composed, "--config-dir", folder, "+cluster=1x1", "+experiment=odd")
    assert "odd.yaml" in error.message and "in quotes" in error.hint


def test_two_time_limits_in_one_section_are_refused(tmp_path: Path) -> None:
    text = "# @package _global_\ncluster: {time: 1:00:00, time_limit_min: 30}\n"
    folder = write(tmp_path / "conf", {"experiment/odd.yaml": text})
    error = refusal(ConfigError, composed, "--config-dir", folder, "+cluster=1x1", "+experiment=odd")
    assert "both give the time limit" in error.message


def test_flags_variables_and_numbers_keep_their_meaning(tmp_path: Path) -> None:
    text = """# @package _global_
seed: &seed 1_000
defaults_of_env: &env {ON: 1, NO: yes, EMPTY: "", NONE: null, SAME: *seed}
cluster:
  env: {<<: *env, Q: '0755', M: "${seed}"}
  sbatch: {exclusive: true, oversubscribe: FALSE, gres-flags: null}
optim: {lr: 1e-3}
train: {max_steps: 0x10}
model: {_target_: my.Net, ratio: 1e3, wide: on, start: 1:30, mode: 0644, exclude: [a, b], path: 1e3}
"""
    text = text.replace("defaults_of_env: &env", "task:\n  env: &env")
    folder = write(tmp_path / "conf", {"experiment/odd.yaml": text})
    config = composed("--config-dir", folder, "+cluster=1x1", "+experiment=odd").config
    cluster: Any = config.cluster
    assert cluster.env == {
        "ON": "1",
        "NO": "yes",
        "EMPTY": "",
        "NONE": None,
        "SAME": "1_000",
        "Q": "0755",
        "M": 1000,
    }
    assert cluster.sbatch == {"exclusive": True, "oversubscribe": False, "gres-flags": None}
    assert (config.seed, config.optim.lr, config.train.max_steps) == (1000, 1e-3, 16)
    model: Any = config.model
    assert model["path"] == "1e3"
    assert model["exclude"] == ["a", "b"]
    assert (model["ratio"], model["wide"], model["start"], model["mode"]) == (1000.0, True, "1:30", "0644")
