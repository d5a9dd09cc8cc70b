"""From words to a configuration: groups, spellings, refusals; the points of a sweep; words on top of a frozen one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import OmegaConf

from slurm_train.config.compose import (
    Composed,
    Composer,
    Point,
    apply_words,
    compose,
    read_points,
)
from slurm_train.config.schema import ContainerSection, OptimSection, RunConfig, build_config, to_mapping
from slurm_train.config.words import Words, prepare_overrides, read_words
from slurm_train.errors import ConfigError
from tests.support.command_line import write
from tests.support.refusals import refusal


def composed(*words: str) -> Composed:
    return compose(read_words(words))


def cluster_of(*words: str) -> Any:
    return composed(*words).config.cluster


@pytest.mark.parametrize(
    "words",
    [
        ["+cluster=4x8", "optim.lr=3e-4"],
        ["+experiment=digits", "seed=3", "run.name=${hydra.job.name}"],
        ["cluster=2x4", "cluster.env.NCCL_DEBUG=INFO", "data=stdlib", "data.context=64", "~model.dropout"],
        ["model._target_=my.Net", "model.hidden=64"],
    ],
)
def test_values_merged_into_a_composition_give_what_hydra_composes(words: list[str]) -> None:
    composer, prepared = Composer(Words()), prepare_overrides(words)
    found = composer.compose(words)
    with composer.explaining():
        whole = composer.hydra.compose_config("config", prepared, run_mode=RunMode.RUN, with_log_configuration=False)
        plain = {str(key): whole[key] for key in whole if key != "hydra"}
        for key, part in plain.items():
            plain[key] = OmegaConf.to_container(part, resolve=True) if OmegaConf.is_config(part) else part
    assert found.mapping == plain and found.choices == whole.hydra.runtime.choices


def test_cluster_settings_apply_on_top_of_the_size() -> None:
    words = ["+cluster=4x8", "cluster.nodes=2", "cluster.nodelist=node[1-2],node5", "cluster.time_limit_min=30"]
    words += ["cluster.env.NCCL_IB_HCA=mlx5_0,mlx5_1", "cluster.sbatch.exclusive=true", "cluster.srun.mpi=pmix"]
    cluster = cluster_of(*words, "cluster.setup=[module load cuda/12.4,ulimit -n 4096]")
    assert (cluster.nodes, cluster.gpus_per_node, cluster.time_limit_min) == (2, 8, 30)
    assert (cluster.nodelist, cluster.env) == ("node[1-2],node5", {"NCCL_IB_HCA": "mlx5_0,mlx5_1"})
    assert (cluster.sbatch, cluster.srun) == ({"exclusive": True}, {"mpi": "pmix"})
    assert cluster.setup == ["module load cuda/12.4", "ulimit -n 4096"]
    assert cluster_of("+cluster=2x4", "cluster.env={A: 1, B: x}").env == {"A": 1, "B": "x"}


def test_an_own_model_does_not_inherit_the_arguments_of_the_old_one() -> None:
    result = composed("model._target_=my.Model", "model.hidden=3", "data._target_=my.Data")
    assert result.config.model == {"_target_": "my.Model", "hidden": 3}
    assert result.config.data == {"_target_": "my.Data"}


def test_an_own_optimizer_takes_the_keywords_that_are_typed() -> None:
    own = composed("optim._target_=my.Lion", "optim.lr=1e-4", "optim.d=2").config.optim
    assert (own._target_, own.lr, own.weight_decay, own.keywords) == ("my.Lion", 1e-4, 0.0, {"d": 2})
    sgd = composed("optim=sgd", "optim.momentum=0.8", "+optim.dampening=0.1").config.optim
    assert sgd.keywords == {"momentum": 0.8, "nesterov": True, "dampening": 0.1}
    assert to_mapping(sgd)["momentum"] == 0.8 and build_config(OptimSection, to_mapping(sgd)) == sgd


def test_a_schedule_is_a_name_or_a_function_of_ones_own() -> None:
    words = ("optim.schedule._target_=my.falling", "optim.schedule.power=2")
    function = {"_target_": "my.falling", "power": 2}
    config = composed().config
    assert composed("optim.schedule=wsd").config.optim.schedule == "wsd"
    assert composed(*words).config.optim.schedule == apply_words(config, words).optim.schedule == function


def test_a_sweep_chooses_among_optimizers() -> None:
    points = read_points(read_words(["optim=adamw,sgd,muon", "optim.schedule=wsd,linear"]))
    found = [compose(Words(overrides=list(point.overrides))).config.optim for point in points]
    names = [(one._target_.rpartition(".")[2], one.schedule) for one in found]
    assert names == [(name, shape) for name in ("AdamW", "SGD", "Muon") for shape in ("wsd", "linear")]


@pytest.mark.parametrize("word", ["optim=sgd", "+optim=sgd"])
def test_an_optimizer_is_chosen_where_the_users_primary_file_has_a_section(tmp_path: Path, word: str) -> None:
    files = {"mine.yaml": "defaults: [_self_, {model: gpt}, {data: stdlib}]\noptim: {warmup_samples: 7}\n"}
    words = ["--config-dir", write(tmp_path, files), "--config-name", "mine"]
    optim = composed(*words, word).config.optim
    assert (optim._target_, optim.keywords["momentum"]) == ("torch.optim.SGD", 0.9)
    assert composed(*words).config.optim == OptimSection(warmup_samples=7)
    both = composed(*words, word, "+model=cnn", "data=digits")
    assert (both.config.optim._target_, both.choices["model"], both.choices["data"]) == (
        optim._target_,
        "cnn",
        "digits",
    )


def test_a_users_files_shadow_ours(tmp_path: Path) -> None:
    files = {
        "cluster/base.yaml": "partition: gpu\naccount: lab\nnodes: 1\n",
        "cluster/4x8.yaml": "defaults: [base, _self_]\nnodes: 4\ngpus_per_node: 8\nqos: big\n",
        "cluster/jupiter.yaml": "defaults: [base, _self_]\nnodes: 8\ngpu_flag: gres\n",
    }
    words = ("--config-dir", write(tmp_path, files))
    other, exact, named = (cluster_of(*words, f"+cluster={name}") for name in ("3x4", "4x8", "jupiter"))
    assert (other.partition, other.account, other.nodes, other.gpus_per_node, other.qos) == ("gpu", "lab", 3, 4, None)
    assert (exact.qos, exact.nodes, exact.account) == ("big", 4, "lab")
    assert (named.nodes, named.gpu_flag) == (8, "gres")


def test_a_cluster_that_the_users_primary_file_chooses_can_be_replaced(tmp_path: Path) -> None:
    files = {"mine.yaml": "defaults:\n  - config\n  - cluster: big\n", "cluster/big.yaml": "nodes: 9\n"}
    words = ["--config-dir", write(tmp_path, files), "--config-name", "mine"]
    assert cluster_of(*words).nodes == 9
    assert (cluster_of(*words, "+cluster=2x4").nodes, cluster_of(*words, "+cluster=2x4").gpus_per_node) == (2, 4)


REFUSALS = [
    ("++train.max_step=3", "there is no configuration key 'train.max_step'", "did you mean train.max_steps or"),
    ("model.widht=3", "there is no configuration key 'model.widht'", "did you mean model.width or"),
    (
        "model=gptt",
        "there is no configuration 'model/gptt'",
        "a class of your own: model._target_=gptt; there are: cnn ",
    ),
    ("model=mine.Net", "there is no configuration 'model/mine.Net'", "a class of your own: model._target_=mine.Net;"),
    ("cluster.env.A=1", "cluster.env was set, but the run asks for no cluster", "add +cluster=<nodes>x<GPUs"),
    ("data=text", "data.path has no value", "set data.path=..."),
    ("container=apptainer", "container.image has no value", "set container.image=..."),
    ("container.image=/a", "container.image was set, but the run asks for no container", "add container=apptainer"),
    (
        "+cluster=4",
        "+cluster=4 does not say what 4 counts",
        "write +cluster=4x8 for 4 nodes with 8 GPUs each, or +cluster=1x4 for 4 GPUs of one node",
    ),
    ("model=null", "a group is chosen by the name of an option", "write +cluster=<nodes>x<GPUs per node>"),
    ("run.name=${oc.env:NOPE}", "${oc.env:NOPE}: there is no such variable", "set it, or give a default"),
    ("run.name=${nope:1}", "there is no resolver 'nope' for ${nope:...}", "register one of your own in a module"),
    ("run.name=${nope}", "${nope} refers to no key", "`--cfg job` prints every key"),
]


@pytest.mark.parametrize(("word", "message", "hint"), REFUSALS)
def test_a_refusal_says_what_was_asked_and_what_to_do(word: str, message: str, hint: str) -> None:
    error = refusal(ConfigError, composed, word)
    assert error.message.startswith(message) and error.hint.startswith(hint)
    assert error.exit_code == 2


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "my_secret"])
@pytest.mark.parametrize(
    "form", ["${{oc.env:{}}}", "${{ oc.env : {} }}", "a${{oc.env:{},b}}", "${{oc.env:${{oc.env:W}}}}"]
)
def test_a_reference_to_a_secret_is_refused_before_it_is_resolved(
    name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "canary")
    monkeypatch.setenv("W", name)
    error = refusal(ConfigError, composed, "+cluster=1x1", f"cluster.env.X={form.format(name)}")
    assert error.message.startswith(f"${{oc.env:{name}}} refers to a secret")
    assert "canary" not in str(error)


def test_broken_yaml_of_a_user_is_an_error_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line"):
        composed("--config-dir", write(tmp_path, {"cluster/base.yaml": "nodes: [1\n"}), "+cluster=2x2")


# The points of a sweep


def points(*words: str) -> list[Point]:
    return read_points(read_words(words))


@pytest.mark.parametrize(
    "words",
    [
        ["optim.lr=1e-3,3e-4", "seed=range(3)"],
        ["+cluster=1x8,2x8", "seed=7", "optim.lr=choice(1,2)"],
        ["seed=range(0,10,4)", "train.compile=true,false", "optim.lr=range(0.1,0.4,0.1)"],
        ["model=gpt,cnn", "seed=sort(3,1,2)", "optim.betas=[0.9,0.95],[0.9,0.99]"],
    ],
)
def test_the_points_are_those_of_hydras_own_sweeper_in_its_order(words: list[str]) -> None:
    (expected,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(words), None)
    assert [list(point.overrides) for point in points(*words)] == expected


def test_a_point_knows_what_the_sweep_gave_to_it() -> None:
    first, *_, last = points("+cluster=1x8,2x8", "run.name=study", "optim.lr=1e-3,3e-4")
    assert first.values == {"cluster": "1x8", "optim.lr": "0.001"}
    assert last == Point(("+cluster=2x8", "run.name=study", "optim.lr=0.0003"), last.values)


ONE_VALUE = [
    "cluster.nodelist=node[1-2],node5",
    "script=[train.py,--lr=1e-3,--tag,a]",
    "run.name=nodes-${cluster.nodes}",
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
    found = map(Composer(words).compose, [point.overrides for point in read_points(words)])
    assert [getattr(getattr(one.config, section), key) for one in found] == expected


def test_composing_many_gives_what_composing_one_by_one_gives() -> None:
    words = read_words(["+cluster=1x8,2x4", "data=stdlib,digits", "model=gpt", "seed=1,2", "++data.context=64,128"])
    sweep = [point.overrides for point in read_points(words)]
    together = list(map(Composer(words).compose, sweep))
    assert len(together) == 16
    for one, overrides in zip(together, sweep, strict=True):
        assert one == compose(Words(overrides=list(overrides)))


def test_points_do_not_leak_into_each_other() -> None:
    sweep = [["optim.lr=0.5", "+model.extra=1"], [], ["~model.width"]]
    first, second, third = map(Composer(Words()).compose, sweep)
    assert first.config.optim.lr == 0.5 and first.mapping["model"]["extra"] == 1
    assert second.mapping == composed().mapping
    assert "width" not in third.mapping["model"] and "extra" not in third.mapping["model"]


NO_POINTS = [
    (["seed=range(0)"], "seed=range(0) gives no value: the sweep is empty"),
    (["optim.lr=interval(0,1)"], "optim.lr=interval(0,1): an interval names no points"),
    (["seed=1,2", "seed=3,4"], "seed is swept by two words"),
    (["run.name=a,b(c"], "'run.name=a,b(c' cannot be read in a sweep"),
    (["seed=range(1000)", "optim.lr=range(1000)"], "1,000,000 runs in one sweep"),
]


@pytest.mark.parametrize(("words", "message"), NO_POINTS, ids=str)
def test_what_names_no_points_is_refused(words: list[str], message: str) -> None:
    assert refusal(ConfigError, points, *words).message.startswith(message)


# Words on top of a frozen configuration

CONFIG = composed("+cluster=4x8").config


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("model.widht=1", "did you mean model.width"),
        ("optim.lr=1,2", "optim.lr has several values"),
        ("optim.lr=fast", "optim.lr must be a number"),
    ],
)
def test_words_that_make_no_sense_for_a_run_that_exists_are_refused(word: str, text: str) -> None:
    assert text in str(refusal(ConfigError, apply_words, CONFIG, [word]))


def test_a_cluster_keeps_what_it_had_at_another_size() -> None:
    big: Any = apply_words(CONFIG, ["cluster.partition=big", "cluster=2x4"])
    assert (big.cluster.partition, big.cluster.nodes, big.cluster.gpus_per_node) == ("big", 2, 4)
    local = apply_words(big, ["cluster=null"])
    with pytest.raises(ConfigError, match="the run has no cluster"):
        apply_words(local, ["cluster.partition=big"])
    again: Any = apply_words(local, ["+cluster=1x2"]).cluster
    assert (again.nodes, again.gpus_per_node) == (1, 2)


def test_a_group_is_replaced_together_with_its_settings() -> None:
    data = apply_words(CONFIG, ["data=text", "data.path=/corpus"]).data
    assert data["path"] == "/corpus" and "text" in data["_target_"]


def test_a_run_is_started_in_another_way() -> None:
    assert composed("+cluster=4x8", "launch=local").config.cluster is None
    config = composed("+cluster=1x2", "launch=interactive").config
    assert config.launch == "interactive" and apply_words(config, ["launch=slurm"]).launch == "slurm"
    assert apply_words(config, ["launch=local"]).cluster is None
    with pytest.raises(ConfigError, match="asks Slurm for an allocation"):
        apply_words(config, ["cluster=null"])


def test_a_container_is_chosen_with_its_image_and_exchanged() -> None:
    words = ("container.mounts=[/datasets:/data:ro,/scratch]", "container.flags=[--writable-tmpfs]")
    config: RunConfig = composed("+cluster=1x2", "container=apptainer", "container.image=/images/a.sif", *words).config
    assert config.container == ContainerSection(
        kind="apptainer",
        image="/images/a.sif",
        mounts=["/datasets:/data:ro", "/scratch"],
        command="apptainer",
        flags=["--writable-tmpfs"],
    )
    changed: Any = apply_words(config, ["container.image=/images/b.sif"]).container
    assert changed.image == "/images/b.sif" and changed.mounts == ["/datasets:/data:ro", "/scratch"]
    changed = apply_words(config, ["container=pyxis", "container.image=a"]).container
    assert (changed.kind, changed.command) == ("pyxis", None)
    assert apply_words(config, ["container=null"]).container is None
