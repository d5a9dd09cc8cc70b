"""From words to a configuration: groups, spellings, refusals; the points of a sweep; words on top of a frozen one."""

from __future__ import annotations

import os
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
    unquoted,
)
from slurm_train.config.schema import ClusterSection, ContainerSection, OptimSection, build_config, to_mapping
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
    if plain["cluster"] is not None:
        plain["cluster"] = {**to_mapping(ClusterSection()), **plain["cluster"]}
    assert found.mapping == plain and found.choices == whole.hydra.runtime.choices


def test_a_target_of_ones_own_takes_the_keywords_that_are_typed_alone() -> None:
    config = composed("model._target_=my.Model", "model.hidden=3", "optim._target_=my.Lion", "optim.lr=1", "optim.d=2")
    assert config.config.model == {"_target_": "my.Model", "hidden": 3}
    own = config.config.optim
    assert (own._target_, own.weight_decay, own.keywords) == ("my.Lion", 0.0, {"d": 2})
    assert build_config(OptimSection, to_mapping(own)) == own
    function = ("optim.schedule._target_=my.falling", "optim.schedule.power=2")
    expected = {"_target_": "my.falling", "power": 2}
    assert composed(*function).config.optim.schedule == apply_words(CONFIG, function).optim.schedule == expected


@pytest.mark.parametrize(
    ("words", "lr"),
    [
        ([], 3e-3),
        (["model=gpt2-124m"], 6e-4),
        (["model=llama3-8b"], 3e-4),
        (["model=llama3-70b", "optim=muon"], 1.5e-4),
        (["model=llama3-8b", "optim.lr=1e-3"], 1e-3),
        (["model=llama3-8b", "optim=sgd"], 0.1),
        (["model._target_=my.Model", "model._lr_=0.02"], 0.02),
    ],
)
def test_the_peak_rate_is_the_models_where_none_is_given(words: list[str], lr: float) -> None:
    config = composed(*words).config
    assert config.optim.lr == lr
    assert config.model is not None and "_lr_" not in config.model


@pytest.mark.parametrize(
    ("words", "context"),
    [
        ([], 128),
        (["data=text", "data.path=x"], 256),
        (["model=gpt2-124m"], 1024),
        (["model=llama3-8b", "data=text", "data.path=x"], 8192),
        (["model=llama3-8b", "data.context=4096"], 4096),
    ],
)
def test_samples_are_as_long_as_a_published_model_takes_where_no_length_is_given(
    words: list[str], context: int
) -> None:
    config = composed(*words).config
    assert config.data is not None and config.data["context"] == context
    assert config.model is not None and "_context_" not in config.model


@pytest.mark.parametrize(
    ("words", "unused"),
    [
        (["script=[train.py]", "optim.lr=0.1", "seed=3", "checkpoint.keep=3"], ("optim.lr",)),
        (["script=[train.py,--lr,${optim.lr}]", "optim.lr=0.1"], ()),
        (["script=[train.py]", "model=gpt", "optim.lr=0.1"], ("model", "optim.lr")),
        (["script=[train.py]", "optim.lr=0.1", "run.name=x${optim.lr}"], ()),
        (["optim.lr=0.1"], ()),
    ],
)
def test_keys_that_a_script_does_not_get_are_known(words: list[str], unused: tuple[str, ...]) -> None:
    assert composed(*words).unused_keys == unused


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


REFUSALS = [
    ("++train.max_step=3", "there is no configuration key 'train.max_step'", "did you mean train.max_steps or"),
    ("model=gptt", "there is no configuration 'model/gptt'", "a class of your own: model._target_=gptt;"),
    ("cluster.env.A=1", "cluster.env was set, but the run asks for no cluster", "add +cluster=<nodes>x<GPUs"),
    ("data=text", "data.path has no value", "set data.path=..."),
    ("container.image=/a", "container.image was set, but the run asks for no container", "add container=apptainer"),
    (
        "+cluster=4",
        "+cluster=4 does not say what 4 counts",
        "write +cluster=4x8 for 4 nodes with 8 GPUs each, or +cluster=1x4 for 4 GPUs of one node",
    ),
    ("model=null", "model=null: a group is chosen by the name of an option", "there are: cnn,"),
    ("optim=5", "optim=5: a group is chosen by the name of an option", "there are: adamw,"),
    ("cluster=null", "cluster=null: a group is chosen by the name", "write +cluster=<nodes>x<GPUs per node>"),
    ("run.name=${oc.env:NOPE}", "${oc.env:NOPE}: there is no such variable", "set it, or give a default"),
    ("run.name=${nope:1}", "there is no resolver 'nope' for ${nope:...}", "register one of your own in a module"),
]


@pytest.mark.parametrize(("word", "message", "hint"), REFUSALS)
def test_a_refusal_says_what_was_asked_and_what_to_do(word: str, message: str, hint: str) -> None:
    error = refusal(ConfigError, composed, word)
    assert error.message.startswith(message) and error.hint.startswith(hint)


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
        ["seed=range(0,10,4)", "train.compile=true,false", "optim.lr=range(0.1,0.4,0.1)"],
        ["model=gpt,cnn", "seed=sort(3,1,2)", "optim.betas=[0.9,0.95],[0.9,0.99]"],
    ],
)
def test_the_points_are_those_of_hydras_own_sweeper_in_its_order(words: list[str]) -> None:
    (expected,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(words), None)
    assert [list(point.overrides) for point in points(*words)] == expected


ONE_VALUE = ["cluster.nodelist=node[1-2],node5", "script=[train.py,--lr=1e-3,--tag,a]", "~data.context"]
ONE_VALUE += ["script=[train.py,--lr=1e-3,'a, b']"]


@pytest.mark.parametrize("word", ONE_VALUE)
def test_what_is_one_value_without_multirun_is_one_value_with_it(word: str) -> None:
    assert [point.overrides for point in points(word, "seed=1,2")] == [(word, "seed=1"), (word, "seed=2")]


def test_the_texts_of_a_sweep_are_those_that_were_typed() -> None:
    assert [point.values for point in points("run.name=1e3,02, 1_0")] == [
        {"run.name": "1e3"},
        {"run.name": "02"},
        {"run.name": "1_0"},
    ]


SWEPT_SCRIPTS = {
    "script=[t.py,--tag,007],[t.py,--tag,1e3]": [["t.py", "--tag", "007"], ["t.py", "--tag", "1e3"]],
    "script=[t.py,--lr=1e-3],[t.py,optim.lr=3e-4, x ]": [["t.py", "--lr=1e-3"], ["t.py", "optim.lr=3e-4", "x"]],
    "script=choice([t.py,true],[t.py,1_000])": [["t.py", "true"], ["t.py", "1_000"]],
    "script=[t.py,'a,[b]'],[t.py]": [["t.py", "a,[b]"], ["t.py"]],
    "script=[t.py,'a,[b]',--x=1],[t.py,1e3]": [["t.py", "a,[b]", "--x=1"], ["t.py", "1e3"]],
    "script=[t.py,--seed=${seed},--n=${hydra:job.num}]": [["t.py", "--seed=8", "--n=0"]],
}


@pytest.mark.parametrize("word", SWEPT_SCRIPTS)
def test_the_arguments_of_swept_scripts_are_those_that_were_typed(word: str) -> None:
    """Hydra makes 1000.0 of 1e3, and cannot read --lr=1e-3 in a list."""
    swept = points(word, "seed=8")
    composer = Composer(Words())
    scripts = [composer.compose(point.overrides, number=number).config.script for number, point in enumerate(swept)]
    assert scripts == SWEPT_SCRIPTS[word]
    assert len(swept) == 1 or swept[0].values["script"].startswith("[t.py,")


def test_the_name_of_a_run_may_be_made_of_the_other_words() -> None:
    words = ("run.name=${hydra.job.override_dirname}", "seed=3", "hydra.job.config.override_dirname.kv_sep=-")
    assert composed(*words).config.run.name == "seed-3"


def test_a_value_has_no_quotes_that_it_does_not_need_however_long_it_is() -> None:
    assert unquoted("['t.py','--x=1','a, b','it\\'s']") == "[t.py,--x=1,'a, b','it\\'s']"
    no_list = "[" + "'a'," * 2000 + "b"
    assert unquoted(no_list) == no_list


def test_points_do_not_leak_into_each_other() -> None:
    sweep = [["optim.lr=0.5", "+model.extra=1"], [], ["~model.width"]]
    first, second, third = map(Composer(Words()).compose, sweep)
    assert first.config.optim.lr == 0.5 and first.mapping["model"]["extra"] == 1
    assert second.mapping == composed().mapping
    assert "width" not in third.mapping["model"] and "extra" not in third.mapping["model"]


NO_POINTS = [
    (["seed=range(0)"], "seed=range(0) gives no value: the sweep is empty"),
    (["seed=1,2", "seed=3,4"], "seed is swept by two words"),
    (["run.name=a,b(c"], "'run.name=a,b(c' cannot be read in a sweep"),
    (["seed=range(1000)", "optim.lr=range(1000)"], "1,000,000 runs in one sweep"),
]


@pytest.mark.parametrize(("words", "message"), NO_POINTS, ids=str)
def test_what_names_no_points_is_refused(words: list[str], message: str) -> None:
    assert refusal(ConfigError, points, *words).message.startswith(message)


# Words on top of a frozen configuration

CONFIG = composed("+cluster=4x8").config


def test_a_group_is_replaced_and_a_cluster_of_another_size_keeps_what_it_had() -> None:
    big: Any = apply_words(CONFIG, ["cluster.partition=big", "cluster=2x4", "data=text", "data.path=/corpus"])
    assert (big.cluster.partition, big.cluster.nodes, big.data["path"]) == ("big", 2, "/corpus")
    local = apply_words(big, ["cluster=null"])
    again: Any = apply_words(local, ["+cluster=1x2"]).cluster
    assert (again.nodes, again.gpus_per_node) == (1, 2)
    words = ["container=apptainer", "container.image=/a.sif", "container.mounts=[/datasets:/data:ro,/scratch]"]
    config = apply_words(apply_words(CONFIG, words), ["container.image=/b.sif"])
    assert apply_words(CONFIG, ["launch=local"]).cluster is None
    mounts = ["/datasets:/data:ro", "/scratch"]
    assert config.container == ContainerSection(kind="apptainer", image="/b.sif", mounts=mounts)
    changed: Any = apply_words(config, ["container=pyxis", "container.image=a"]).container
    assert (changed.kind, changed.command) == ("pyxis", None)
    for words, text in (
        (["cluster.partition=big"], "the run has no cluster"),
        (["launch=interactive"], "asks Slurm for an allocation"),
        (["model.widht=1"], "did you mean model.width"),
        (["optim.lr=1,2"], "optim.lr has several values"),
    ):
        assert text in str(refusal(ConfigError, apply_words, local, words))


def test_a_choice_that_is_proposed_has_no_comma_of_the_sentence() -> None:
    with pytest.raises(ConfigError) as err:
        compose(read_words(["optim.schedule=inv_sqrt"]))
    assert err.value.hint == 'for example "optim.schedule=inverse_sqrt"'


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take another user's rights for a moment")
def test_a_home_that_may_not_be_entered_has_no_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "home" / ".config" / "slurm_train", {"optim/mine.yaml": "lr: 1.0"})
    (tmp_path / "home").chmod(0o700)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    compose(read_words([]))  # what it imports lies where another user may not read
    os.seteuid(65534)
    try:
        sources = [source.path for source in Composer(read_words([])).hydra.config_loader.get_sources()]
        compose(read_words(["+cluster=1x1"]))
    finally:
        os.seteuid(0)
    assert not any("home" in str(path) for path in sources)
