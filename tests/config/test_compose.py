from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.config.compose import Composed, Composer, compose
from slurm_train.config.words import read_words
from slurm_train.errors import ConfigError


def composed(*words: str) -> Composed:
    return compose(read_words(words))


def refusal(*words: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        composed(*words)
    assert caught.value.exit_code == 2
    return caught.value


def test_nothing_typed_gives_the_shipped_defaults() -> None:
    result = composed()
    assert (result.choices["model"], result.choices["data"]) == ("gpt", "stdlib")
    assert result.config.cluster is None
    assert result.config.batch.default_global_size == 32
    assert result.config.model is not None and result.config.model["context"] == 128, "references are resolved"
    assert "hydra" not in result.mapping


@pytest.mark.parametrize(
    ("word", "nodes", "gpus"), [("+cluster=4x8", 4, 8), ("+cluster=3x5", 3, 5), ("cluster=1x1", 1, 1)]
)
def test_every_cluster_size_exists(word: str, nodes: int, gpus: int) -> None:
    cluster = composed(word).config.cluster
    assert cluster is not None
    assert (cluster.nodes, cluster.gpus_per_node, cluster.gpu_flag) == (nodes, gpus, "gpus-per-node")


def test_cluster_settings_apply_on_top_of_the_size() -> None:
    words = ["+cluster=4x8", "cluster.nodes=2", "cluster.nodelist=node[1-2],node5", "cluster.time_limit_min=30"]
    words += ["cluster.env.NCCL_IB_HCA=mlx5_0,mlx5_1", "cluster.sbatch.exclusive=true", "cluster.srun.mpi=pmix"]
    cluster = composed(*words, "cluster.setup=[module load cuda/12.4,ulimit -n 4096]").config.cluster
    assert cluster is not None
    assert (cluster.nodes, cluster.gpus_per_node, cluster.time_limit_min) == (2, 8, 30)
    assert cluster.nodelist == "node[1-2],node5"
    assert cluster.env == {"NCCL_IB_HCA": "mlx5_0,mlx5_1"}
    assert (cluster.sbatch, cluster.srun) == ({"exclusive": True}, {"mpi": "pmix"})
    assert cluster.setup == ["module load cuda/12.4", "ulimit -n 4096"]


@pytest.mark.parametrize("sign", ["+", ""])
def test_an_experiment_replaces_model_and_data(sign: str) -> None:
    result = composed(f"{sign}experiment=digits", "optim.lr=1e-4")
    assert (result.choices["model"], result.choices["data"]) == ("cnn", "digits")
    assert result.config.optim.lr == 1e-4, "the command line wins over the experiment"


def test_an_own_model_does_not_inherit_the_arguments_of_the_old_one() -> None:
    result = composed("model._target_=my.Model", "model.hidden=3", "data._target_=my.Data")
    assert result.config.model == {"_target_": "my.Model", "hidden": 3}
    assert result.config.data == {"_target_": "my.Data"}


def test_script_words_arrive_as_they_were_typed() -> None:
    result = composed("script=[train.py,--lr,1e-3,--tag,007,--verbose,true]")
    assert result.config.script == ["train.py", "--lr", "1e-3", "--tag", "007", "--verbose", "true"]


def write_site(folder: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


def test_a_users_base_file_shadows_ours_for_every_size(tmp_path: Path) -> None:
    site = write_site(tmp_path, {"cluster/base.yaml": "partition: gpu\naccount: lab\nnodes: 1\n"})
    cluster = composed("--config-dir", site, "+cluster=3x4").config.cluster
    assert cluster is not None
    assert (cluster.partition, cluster.account, cluster.nodes, cluster.gpus_per_node) == ("gpu", "lab", 3, 4)


def test_a_users_file_of_a_size_shadows_the_computed_one(tmp_path: Path) -> None:
    site = write_site(
        tmp_path, {"cluster/4x8.yaml": "defaults: [base, _self_]\nnodes: 4\ngpus_per_node: 8\nqos: big\n"}
    )
    cluster = composed("--config-dir", site, "+cluster=4x8").config.cluster
    assert cluster is not None and (cluster.qos, cluster.nodes, cluster.gpu_flag) == ("big", 4, "gpus-per-node")
    other = composed("--config-dir", site, "+cluster=2x8").config.cluster
    assert other is not None and (other.qos, other.nodes) == (None, 2)


def test_a_users_own_cluster_file_is_chosen_by_its_name(tmp_path: Path) -> None:
    site = write_site(tmp_path, {"cluster/jupiter.yaml": "defaults: [base, _self_]\nnodes: 8\ngpu_flag: gres\n"})
    cluster = composed("--config-dir", site, "+cluster=jupiter").config.cluster
    assert cluster is not None and (cluster.nodes, cluster.gpu_flag) == (8, "gres")


def test_a_cluster_that_the_users_primary_file_chooses_can_be_replaced(tmp_path: Path) -> None:
    files = {
        "mine.yaml": "defaults:\n  - config\n  - cluster: big\n",
        "cluster/big.yaml": "defaults: [base]\nnodes: 9\n",
    }
    words = ["--config-dir", write_site(tmp_path, files), "--config-name", "mine"]
    chosen, replaced = composed(*words).config.cluster, composed(*words, "+cluster=2x4").config.cluster
    assert chosen is not None and chosen.nodes == 9
    assert replaced is not None and (replaced.nodes, replaced.gpus_per_node) == (2, 4)


SEVERAL = "has several values, and makes a run of each only with -m (--multirun)"
REFUSALS = [
    ("optim.lrr=3", "there is no configuration key 'optim.lrr'", "did you mean optim.lr or"),
    ("++optim.lrr=3", "there is no configuration key 'optim.lrr'", "did you mean optim.lr or"),
    ("model.widht=3", "there is no configuration key 'model.widht'", "did you mean model.width or"),
    ("optim.lr=abc", "optim.lr asks for a number, found 'abc' (str)", "set optim.lr=..., written like 0.5 or 1e-3"),
    ("script=a.py -n 3", "script asks for a list, found 'a.py -n 3' (str)", 'write "script=[a.py,-n,3]"'),
    ("optim.lr=", "optim.lr asks for a number, found '' (str)", "set optim.lr=..."),
    ("train.max_steps=1.5", "train.max_steps asks for a whole number, found 1.5 (float)", "set train.max_steps=..."),
    ("train.compile=1", "train.compile asks for true or false, found 1 (int)", "set train.compile=..."),
    ("train=3", "train asks for a mapping, found 3 (int)", "set train=..."),
    ("optim.lr_retune=cubic", "optim.lr_retune='cubic' is not one of its values", "use one of none, linear, sqrt"),
    ("model=gptt", "there is no configuration 'model/gptt'", "there are: cnn custom gpt"),
    (
        "model=mine.Net",
        "there is no configuration 'model/mine.Net'",
        "a class of your own: model._target_=mine.Net; there",
    ),
    ("+cluster=0x8", "there is no configuration 'cluster/0x8'", "write +cluster=<nodes>x<GPUs per node>"),
    ("cluster.nodes=3", "cluster.nodes was set, but the run asks for no cluster", "add +cluster=<nodes>x<GPUs"),
    ("cluster.env.A=1", "cluster.env was set, but the run asks for no cluster", "add +cluster=<nodes>x<GPUs"),
    ("data=text", "data.path has no value", "set data.path=..."),
    ("--config-dir=/nowhere", "--config-dir '/nowhere' is not a directory", "name a folder with your YAML files"),
    ("foo", "'foo' is neither a verb nor a setting", "settings are written key=value"),
    ("model=null", "null is no option of a group", "write ~GROUP to leave a group out"),
    ("+seed=1", "seed is there already, and + adds a key", "write seed=VALUE, without the +"),
    (
        "seed=1,2",
        "seed=1,2 has several values, and makes a run of each only with -m (--multirun)",
        "add -m; for one list",
    ),
    (
        "seed=range(3)",
        "seed=range(3) has several values, and makes a run of each only with -m (--multirun)",
        "add -m; for",
    ),
    ("run.name=${oc.env:NOPE}", "${oc.env:NOPE}: there is no such variable", "set it, or write ${oc.env:NOPE,default}"),
    ("run.name=${nope:1}", "there is no resolver 'nope' for ${nope:...}", "register one of your own in a module"),
    ("run.name=${nope}", "${nope} refers to a key that there is not", "`--cfg job` prints every key"),
]


@pytest.mark.parametrize(("word", "message", "hint"), REFUSALS, ids=[word for word, _, _ in REFUSALS])
def test_a_refusal_says_what_was_asked_and_what_to_do(word: str, message: str, hint: str) -> None:
    error = refusal(word)
    assert error.message == message
    assert error.hint.startswith(hint)


def test_an_uneven_size_that_is_neither_number_nor_list_names_both() -> None:
    error = refusal("+cluster=2x2", "cluster.gpus_per_node=x")
    assert error.message == "cluster.gpus_per_node asks for a whole number or a list, found 'x' (str)"


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "HF_TOKEN", "my_secret", "DB_PASSWORD"])
@pytest.mark.parametrize(
    "form", ["${{oc.env:{}}}", "${{ oc.env : {} }}", "a${{oc.env:{},b}}", "${{oc.env:${{oc.env:W}}}}"]
)
def test_a_reference_to_a_secret_is_refused_before_it_is_resolved(
    name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "canary")
    monkeypatch.setenv("W", name)
    error = refusal("+cluster=1x1", f"cluster.env.X={form.format(name)}")
    assert error.message.startswith(f"${{oc.env:{name}}} refers to a secret")
    assert "canary" not in str(error)


def test_broken_yaml_of_a_user_is_an_error_with_its_place(tmp_path: Path) -> None:
    site = write_site(tmp_path, {"cluster/base.yaml": "nodes: [1\n"})
    assert "line" in refusal("--config-dir", site, "+cluster=2x2").message


def test_show_prints_the_composed_configuration_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Composer(read_words(["--cfg", "job", "--package", "optim", "optim.lr=0.5"])).show()
    assert "lr: 0.5" in capsys.readouterr().out


def test_an_open_mapping_may_be_given_as_a_whole() -> None:
    cluster = compose(read_words(["+cluster=2x4", "cluster.env={A: 1, B: x}"])).config.cluster
    assert cluster is not None and cluster.env == {"A": 1, "B": "x"} and cluster.nodes == 2
    with pytest.raises(ConfigError, match="no cluster"):
        compose(read_words(["cluster.env={A: 1}"]))
