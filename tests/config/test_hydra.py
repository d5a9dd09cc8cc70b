"""What a person types who knows Hydra: every row of the tables in docs/hydra.md, as far as composing goes.

What such words do to runs is tested in tests/cli/test_hydra_habits.py; between the two no row is left out.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from omegaconf import OmegaConf

from slurm_train.config.compose import Composer, read_points
from slurm_train.config.hydra import HydraSettings, Output, read_output, read_settings
from slurm_train.config.schema import OptimSection, RunConfig, flat, to_mapping
from slurm_train.config.words import read_words
from slurm_train.errors import ConfigError
from tests.support.command_line import write

REPOSITORY = Path(__file__).resolve().parents[2]
habit = pytest.mark.habit


@pytest.fixture(autouse=True)
def _hydras_log_handlers_go() -> Iterator[None]:
    """`--info` speaks through the root logger, to a stdout that is gone after the test."""
    before, level = list(logging.root.handlers), logging.root.level
    yield
    logging.root.handlers[:] = before
    logging.root.setLevel(level)


def settings_of(*words: str) -> HydraSettings:
    return read_settings(read_words(words))


def values_of(*words: str) -> dict[str, Any]:
    return flat(to_mapping(settings_of(*words).compose().config))


def refusal(*words: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        settings = settings_of(*words)
        if not settings.words.multirun:
            settings.compose()
    assert caught.value.hint and caught.value.exit_code == 2
    return caught.value


def own_file(folder: Path, hydra: str, *, defaults: str = "config, _self_") -> list[str]:
    """Writes a primary file that says something to Hydra; returns the flags that choose it."""
    text = f"defaults: [{defaults}]\n" + (f"hydra: {{{hydra}}}\n" if hydra else "")
    return ["-cd", write(folder, {"mine.yaml": text}), "-cn", "mine"]


def test_every_row_of_the_tables_is_tested() -> None:
    text = (REPOSITORY / "docs" / "hydra.md").read_text(encoding="utf-8")
    cells = [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if line.startswith("| ")]
    # Quotes end a claim, so a row with quotes in it is claimed with apostrophes.
    wanted = {cell.replace('"', "'") for cell in cells if cell != "habit"}
    modules = [
        REPOSITORY / "tests/cli/test_hydra_habits.py",
        Path(__file__),
        Path(__file__).with_name("test_target.py"),
    ]
    claimed = {row for path in modules for row in re.findall(r'habit\(\s*"([^"]+)"', path.read_text(encoding="utf-8"))}
    assert len(wanted) > 45
    assert (wanted - claimed, claimed - wanted) == (set(), set())


# Flags


@habit("`--cfg job`, `--cfg hydra`, `--cfg all`")
@habit("`--info`, with `config`, `defaults`, `defaults-tree`, `plugins`, `searchpath`")
@pytest.mark.parametrize(
    ("words", "shown", "hidden"),
    [
        ("--cfg job", "lr: 0.003", "hydra:"),
        ("--cfg=hydra", "output_subdir: null", "batch:"),
        ("-c all optim.lr=0.5", "lr: 0.5", "nothing"),
        (
            "--cfg job --package optim optim.lr=0.5",
            "# @package optim\n_target_: torch.optim.AdamW\nlr: 0.5",
            "max_steps",
        ),
        ("--cfg job -p model", "context: ${data.context}", "nothing"),
        ("--cfg job -p model --resolve", "context: 128", "${"),
        ("--info", "Config search path", "nothing"),
        ("-i defaults", "| model/gpt ", "nothing"),
        ("--info=defaults-tree", "model: gpt", "nothing"),
        ("--info plugins", "BasicSweeper", "nothing"),
        ("--info searchpath", "/conf", "nothing"),
    ],
)
def test_the_configuration_and_facts_about_it_are_printed(
    words: str, shown: str, hidden: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Composer(read_words(words.split())).show()
    out = capsys.readouterr().out
    assert shown in out and hidden not in out


@habit("`--cfg job`, `--cfg hydra`, `--cfg all`")
def test_a_part_that_there_is_not_is_named() -> None:
    with pytest.raises(ConfigError, match="--package optm is no part") as caught:
        Composer(read_words(["--cfg", "job", "-p", "optm"])).show()
    assert "optim" in caught.value.hint


@habit("two of `--run`, `--multirun`, `--cfg`, `--info`")
@habit("`--shell-completion`, `-sc`")
@habit("`--experimental-rerun`")
@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("-m --cfg job", "--multirun and --cfg exclude each other", ""),
        ("--cfg job --info", "--cfg and --info exclude each other", ""),
        ("--resolve", "--resolve is about what --cfg prints", ""),
        ("--package optim", "--package is about what --cfg prints", ""),
        ("--shell-completion", "Hydra's flag --shell-completion is not one", "completion bash"),
        ("--experimental-rerun=x", "Hydra's flag --experimental-rerun is not one", "resume RUN"),
    ],
)
def test_flags_that_would_be_misunderstood_are_refused(words: str, message: str, hint: str) -> None:
    error = refusal(*words.split())
    assert error.message.startswith(message) and hint in error.hint


@habit("`-cd DIR`, `--config-dir DIR`")
@habit("`-cp DIR`, `--config-path DIR`")
def test_a_config_path_comes_before_a_config_dir_and_both_before_the_shipped_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write(tmp_path / "first", {"cluster/base.yaml": "nodes: 1\nqos: first\n", "__init__.py": ""})
    second = write(tmp_path / "second", {"cluster/base.yaml": "nodes: 1\nqos: second\n"})
    monkeypatch.syspath_prepend(str(tmp_path))
    for flags in (["-cd", first], ["--config-path", first, "--config-dir", second], ["-cp", "pkg://first"]):
        assert values_of(*flags, "+cluster=2x4")["cluster.qos"] == "first"
    assert refusal("-cp", "pkg://nowhere_at_all").message == "--config-path 'nowhere_at_all' is not there"
    assert refusal("-cp", str(tmp_path / "third")).message.endswith("third' is not there")


@habit("`-cn NAME`, `--config-name NAME`")
@pytest.mark.parametrize("name", ["mine", "mine.yaml"])
def test_another_primary_file_is_chosen(name: str, tmp_path: Path) -> None:
    site = write(tmp_path, {"mine.yaml": "defaults: [config, _self_]\nseed: 9\n"})
    assert values_of("-cd", site, "-cn", name)["seed"] == 9
    assert "mine2" in refusal("-cd", site, "-cn", "mine2").message


# Words


@habit("`key=value`, `++key=value`, `+key=value`, `~key`")
@habit("`model=NAME`, `~cluster`")
@habit("`'key=[a,b]'`, `'key={a: 1}'`, `key='a b'`")
@habit("`int(3.0)`, `float(1)`, `str(1)`, `bool(1)`")
@habit("`${optim.lr}`, `${oc.env:HOME}`")
@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("seed=3", "seed", 3),
        ("+model.extra=1", "model.extra", 1),
        ("~model.dropout", "model.dropout", None),
        ("model=cnn", "model._target_", "slurm_train.models.cnn.CNN"),
        ("optim.betas=[0.5,0.6]", "optim.betas", [0.5, 0.6]),
        ("model={width: 32, num_heads: 2}", "model.width", 32),
        ("run.name='a b'", "run.name", "a b"),
        ('run.name="a b"', "run.name", "a b"),
        ("train.max_steps=int(3.0)", "train.max_steps", 3),
        ("optim.lr=float(1)", "optim.lr", 1.0),
        ("train.compile=bool(1)", "train.compile", True),
        ("+model.label=str(1)", "model.label", "1"),
        ("optim.weight_decay=${optim.lr}", "optim.weight_decay", 0.003),
        ("run.name=${oc.env:WHO}-${oc.env:NOBODY,x}", "run.name", "ann-x"),
    ],
)
def test_words_mean_what_they_mean_to_hydra(
    word: str, key: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHO", "ann")
    assert values_of(word).get(key) == value


@habit("`key=value`, `++key=value`, `+key=value`, `~key`")
@habit("several values without `-m`")
@pytest.mark.parametrize(
    ("word", "message", "hint"),
    [
        ("+seed=3", "seed is there already, and + adds a key", ""),
        ("+train.lrr=3", "there is no configuration key 'train.lrr'", ""),
        ("~model.nope", "there is no configuration key 'model.nope'", ""),
        ("optim.lr=a=b", "'optim.lr=a=b' cannot be read: ", "once more"),
        ("seed=1,2", "seed=1,2 has several values", "add -m"),
        ("model=gpt,cnn", "model=gpt,cnn has several values", "add -m"),
    ],
)
def test_words_that_hydra_refuses_are_refused_with_what_to_type(word: str, message: str, hint: str) -> None:
    error = refusal(word)
    assert error.message.startswith(message) and hint in error.hint


@habit("`model=NAME`, `~cluster`")
def test_a_group_is_left_out(tmp_path: Path) -> None:
    flags = own_file(tmp_path, "", defaults="config, cluster: base, _self_")
    assert values_of(*flags)["cluster.nodes"] == 1 and values_of(*flags, "~cluster")["cluster"] is None


@habit("`+experiment=NAME`")
@pytest.mark.parametrize("word", ["+experiment=mine", "experiment=mine"])
def test_an_experiment_is_a_file_of_settings(word: str, tmp_path: Path) -> None:
    site = write(tmp_path, {"experiment/mine.yaml": "# @package _global_\nseed: 5\n"})
    assert values_of("-cd", site, word)["seed"] == 5


@habit("`${now:%Y-%m-%d}`, `${hydra:runtime.cwd}`, `${hydra.job.num}`")
def test_hydras_own_references_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert re.fullmatch(r"\d{4}-\d\d", values_of("run.name='${now:%Y-%m}'")["run.name"])
    for reference in ("${hydra:runtime.cwd}", "${hydra.runtime.cwd}"):
        assert values_of(f"run.root={reference}/runs")["run.root"] == f"{tmp_path}/runs"
    for reference in ("hydra:runtime.output_dir", "hydra.runtime.output_dir", "hydra.job.id"):
        message = f"${{{reference}}} is not known when the configuration is composed"
        assert refusal(f"run.name=${{{reference}}}").message == message


@habit("`${now:%Y-%m-%d}`, `${hydra:runtime.cwd}`, `${hydra.job.num}`")
@pytest.mark.parametrize("reference", ["${hydra:job.num}", "${hydra.job.num}"])
def test_a_run_of_a_sweep_knows_its_number(reference: str) -> None:
    settings = settings_of("-m", "seed=5,6", f"run.name=run_{reference}")
    points = [point.overrides for point in read_points(settings.sweep_words)]
    assert [one.config.run.name for one in settings.compose_points(points)] == ["run_0", "run_1"]


SWEEPS = [
    ("seed=1,2", ["1", "2"]),
    ("seed=choice(1,2)", ["1", "2"]),
    ("model=glob(c*)", ["cnn", "custom"]),
    ("model=glob(*,exclude=[c*,hf,*-*])", ["gpt"]),
    ("seed=sort(3,1,2,reverse=true)", ["3", "2", "1"]),
    ("optim.betas=[0.9,0.95],[0.8,0.9]", ["[0.9,0.95]", "[0.8,0.9]"]),
]


@habit("`key=1,2`, `choice(1,2)`, `range(8)`, `glob(*)`, `sort(...)`, `shuffle(...)`")
@habit("`interval(0,1)`")
@pytest.mark.parametrize(("word", "values"), SWEEPS)
def test_several_values_make_several_runs(word: str, values: list[str]) -> None:
    key = word.partition("=")[0]
    assert [point.values[key] for point in read_points(read_words(["-m", word]))] == values
    shuffled = read_points(read_words(["-m", "seed=shuffle(range(20))"]))
    assert sorted(int(point.values["seed"]) for point in shuffled) == list(range(20))
    with pytest.raises(ConfigError, match="an interval names no points"):
        read_points(read_words(["-m", "optim.lr=interval(0,1)"]))


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty package hydra_plugins, found by Hydra as if it was installed."""

    def forget() -> None:
        for name in [name for name in sys.modules if name.startswith("hydra_plugins")]:
            del sys.modules[name]

    folder = tmp_path / "hydra_plugins"
    folder.mkdir()
    before = Plugins.instance()
    monkeypatch.syspath_prepend(str(tmp_path))
    forget()
    Singleton._instances.pop(Plugins)
    yield folder
    monkeypatch.undo()
    Singleton._instances[Plugins] = before
    forget()


@habit("your own resolvers")
def test_a_resolver_of_ones_own_is_found(plugins: Path) -> None:
    text = "from omegaconf import OmegaConf\nOmegaConf.register_new_resolver('twice', lambda x: 2 * x, replace=True)\n"
    (plugins / "arithmetic.py").write_text(text)
    words = ["seed=4", "train.max_steps='${twice:${seed}}'"]
    try:
        assert values_of(*words)["train.max_steps"] == 8
    finally:
        OmegaConf.clear_resolver("twice")
    assert refusal(*words).message == "there is no resolver 'twice' for ${twice:...}"


SEARCH_PATH_PLUGIN = """
from hydra.plugins.search_path_plugin import SearchPathPlugin
class Ours(SearchPathPlugin):
    def manipulate_search_path(self, search_path):
        search_path.append(provider="ours", path="file://{folder}")
"""


@habit("search path plugins")
def test_a_search_path_plugin_is_asked(plugins: Path, tmp_path: Path) -> None:
    site = write(tmp_path / "site", {"experiment/theirs.yaml": "# @package _global_\nseed: 77\n"})
    (plugins / "places.py").write_text(SEARCH_PATH_PLUGIN.format(folder=site))
    assert values_of("+experiment=theirs")["seed"] == 77


# Settings to Hydra


@habit("`hydra.mode=MULTIRUN`")
def test_the_mode_makes_a_sweep(tmp_path: Path) -> None:
    assert settings_of("hydra.mode=MULTIRUN", "seed=1,2").words.multirun
    assert settings_of(*own_file(tmp_path, "mode: MULTIRUN"), "seed=1,2").words.multirun
    assert not settings_of("hydra.mode=RUN").words.multirun
    assert settings_of("hydra.mode=RUN", "-m").words.multirun, "the flag wins, as under Hydra"
    assert refusal("hydra.mode=RUN", "seed=1,2").message.startswith("seed=1,2 has several values")


def outputs_of(*words: str, seeds: tuple[int, ...] = ()) -> list[Output]:
    settings = settings_of(*words)
    typed = [word for word in settings.words.overrides if not seeds or not word.startswith("seed=")]
    runs = [(number, seed, [*typed, f"seed={seed}"]) for number, seed in enumerate(seeds)] or [(None, 0, typed)]
    found = (
        read_output(settings, RunConfig(seed=seed, optim=OptimSection(lr=0.1)), own, number=number)
        for number, seed, own in runs
    )
    return [output for output in found if output is not None]


DIRNAME = "hydra.job.config.override_dirname"


@habit("`hydra.run.dir=PATH`")
@habit("`hydra.job.config.override_dirname.*`")
@pytest.mark.parametrize(
    ("value", "words", "path"),
    [
        ("out/a", [], "out/a"),
        ("out/${hydra.job.override_dirname}", [], "out/optim.lr=0.1,seed=3"),
        ("out/${hydra.job.name}/lr=${optim.lr}", [], "out/slurm_train/lr=0.1"),
        ("${hydra:job.name}", [], "slurm_train"),
        ("out/${now:%Y}", [], r"out/\d{4}"),
        (
            "${hydra.job.override_dirname}",
            [f"{DIRNAME}.kv_sep=-", f"{DIRNAME}.item_sep=_", f"{DIRNAME}.exclude_keys=[optim.lr]", "+model.a=1"],
            r"\+model.a-1_seed-3",
        ),
    ],
)
def test_the_path_of_a_run_is_known(value: str, words: list[str], path: str) -> None:
    (output,) = outputs_of(f"hydra.run.dir={value}", *words, "seed=3", "optim.lr=0.1")
    assert output.folder is None and re.fullmatch(path, output.path or "")


@habit("`hydra.run.dir=PATH`")
def test_a_path_that_needs_what_comes_later_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"hydra\.run\.dir is not known before the run is there"):
        outputs_of("hydra.run.dir=out/${hydra.job.id}")


@habit("`hydra.run.dir=PATH`")
def test_a_path_in_a_file_of_ones_own_counts_and_a_default_does_not(tmp_path: Path) -> None:
    assert [one.path for one in outputs_of(*own_file(tmp_path, "run: {dir: out/x}"))] == ["out/x"]
    assert outputs_of(*own_file(tmp_path, "")) == []
    assert outputs_of("-cd", write(tmp_path, {"alone.yaml": "seed: 1\n"}), "-cn", "alone") == []


@habit("`hydra.sweep.dir=PATH`, `hydra.sweep.subdir=NAME`")
@pytest.mark.parametrize(
    ("words", "paths"),
    [
        (["hydra.sweep.dir=out"], ["out/0", "out/1"]),
        (["hydra.sweep.dir=out", "hydra.sweep.subdir=s_${seed}"], ["out/s_5", "out/s_6"]),
        (["hydra.sweep.dir=out", "hydra.sweep.subdir=${hydra.job.override_dirname}"], ["out/seed=5", "out/seed=6"]),
    ],
)
def test_the_paths_of_a_sweeps_runs_are_known(words: list[str], paths: list[str]) -> None:
    assert [one.path for one in outputs_of("-m", *words, "seed=5,6", seeds=(5, 6))] == paths
    moments = outputs_of("-m", "hydra.sweep.dir=out/${now:%f}", "seed=5,6", seeds=(5, 6))
    assert len({str(one.path).rpartition("/")[0] for one in moments}) == 1, "all runs share one moment"


@habit("`hydra.output_subdir=.hydra`")
@habit("`hydra.job.name=NAME`")
def test_hydras_three_files_are_written_where_they_are_asked_for() -> None:
    (output,) = outputs_of("hydra.output_subdir=.hydra", "seed=3", "hydra.job.name=ann")
    assert (output.path, output.folder) == (None, ".hydra")
    files: Any = {name: OmegaConf.to_container(OmegaConf.create(text)) for name, text in output.files.items()}
    assert files["overrides.yaml"] == ["seed=3", "run.name=ann"]
    assert files["config.yaml"]["optim"]["lr"] == 0.1
    assert files["hydra.yaml"]["hydra"]["output_subdir"] == ".hydra"
    assert files["hydra.yaml"]["hydra"]["job"]["name"] == "ann"
    for name in ("code", "../x", ".."):
        with pytest.raises(ConfigError, match="the run directory has names of its own"):
            outputs_of(f"hydra.output_subdir={name}")
    assert values_of("hydra.job.name=ann", "run.name=bob")["run.name"] == "bob"


@habit("`hydra.job.chdir=false`")
@habit("`hydra.help`, `hydra.hydra_help`")
def test_what_happens_anyway_is_taken_and_what_is_unused_is_noted() -> None:
    settings = settings_of("hydra.job.chdir=false", "hydra.verbose=false", "hydra/job_logging=disabled", "seed=2")
    assert settings.notes == () and settings.compose().config.seed == 2
    assert settings_of("hydra.help.app_name=x").notes == ("hydra.help is not used: --help is this program's own",)
    assert len(settings_of("hydra.help.app_name=x", "hydra.hydra_help.template=y").notes) == 2


@habit("`hydra.searchpath=[file://DIR,pkg://PACKAGE]`")
def test_more_places_are_searched(tmp_path: Path) -> None:
    files = {"experiment/a.yaml": "# @package _global_\nseed: 1\n", "cluster/3x3.yaml": "qos: own\n"}
    one = write(tmp_path / "one", files)
    two = write(tmp_path / "two", {"experiment/b.yaml": "# @package _global_\ntrain: {max_steps: 2}\n"})
    words = f"hydra.searchpath=[file://{one},{two}]"
    values = values_of(words, "+experiment=[a,b]", "+cluster=3x3")
    assert (values["seed"], values["train.max_steps"], values["cluster.qos"]) == (1, 2, "own")
    points = read_points(read_words([words, "-m", "experiment=glob(*)"]))
    assert [point.values["experiment"] for point in points] == ["a", "b", "digits"]
    assert values_of(*own_file(tmp_path / "mine", f"searchpath: ['file://{one}']"), "+experiment=a")["seed"] == 1
    absent = refusal(f"hydra.searchpath=[{tmp_path}/three]").message
    assert absent == f"hydra.searchpath '{tmp_path}/three' is not there"
    assert refusal("hydra.searchpath=conf").message == "'hydra.searchpath=conf' is not a list of places"


LAUNCHERS = [
    (
        "submitit_slurm",
        "hydra.launcher.nodes=2 hydra.launcher.gpus_per_node=8 hydra.launcher.tasks_per_node=8 "
        "hydra.launcher.timeout_min=60 hydra.launcher.partition=gpu hydra.launcher.array_parallelism=4 "
        "+hydra.launcher.additional_parameters.mail_type=END hydra.launcher.submitit_folder=x",
        "write +cluster=2x8 cluster.time_limit_min=60 cluster.partition=gpu sweep.max_parallel=4 "
        "cluster.sbatch.mail-type=END instead",
    ),
    ("submitit_local", "", "drop it; +cluster=NODESxGPUS goes through Slurm, without it the runs are trained here"),
    ("joblib", "hydra.launcher.n_jobs=6", "write sweep.max_parallel=6 instead"),
]


@habit("`hydra/launcher=submitit_slurm`")
@habit("`hydra/launcher=submitit_local`, `joblib`, any other")
@pytest.mark.parametrize(("name", "words", "hint"), LAUNCHERS)
def test_a_launcher_is_refused_with_its_settings_translated(name: str, words: str, hint: str) -> None:
    error = refusal("-m", f"hydra/launcher={name}", *words.split(), "seed=1,2")
    assert error.message == f"hydra/launcher={name}: the runs are launched by this program, not by a plugin"
    assert hint in error.hint


REFUSED = [
    ("hydra.verbose=true", "hydra.verbose sets loggers of Hydra's process", "logging.basicConfig"),
    ("hydra.job_logging.root.level=DEBUG", "hydra.job_logging.root.level sets loggers", "`logs RUN`"),
    ("hydra/hydra_logging=hydra_debug", "hydra.hydra_logging.", "hydra/hydra_logging=disabled are what"),
    ("hydra.callbacks.mine._target_=my.Callback", "hydra.callbacks.mine._target_ would be called", "--wait"),
    ("hydra.job.chdir=true", "hydra.job.chdir=true: the ranks start in the directory", "context.run.path"),
    ("+hydra.job.env_set.A=1", "hydra.job.env_set.A sets a variable of Hydra's process", "cluster.env.NAME=VALUE"),
    ("hydra.job.env_copy=[A,B]", "hydra.job.env_copy writes variables with their values", "cluster.export=[NAME,...]"),
    ("hydra.runtime.cwd=/x", "hydra.runtime.cwd is filled in, not set", "${hydra.runtime.cwd} refers to it"),
    ("hydra.job.num=3", "hydra.job.num is filled in, not set", "refers to it"),
    ("hydra.overrides.task=[a]", "hydra.overrides.task is filled in, not set", "refers to it"),
    ("hydra.launcher.timeout_min=60", "hydra/launcher=basic: the runs", "write cluster.time_limit_min=60"),
    ("hydra.run.nothing=1", "there is no configuration key 'hydra.run.nothing'", "`--hydra-help`"),
    ("-m hydra.run.dir=x seed=1,2", "hydra.run.dir is about one run", "hydra.sweep.dir=DIR"),
    ("hydra.sweep.dir=x", "hydra.sweep.dir is about a sweep", "with -m"),
    ("-m hydra.sweeper.max_batch_size=3 seed=1,2", "hydra.sweeper.max_batch_size=3 makes", "sweep.max_parallel=3"),
]


@habit("`hydra.verbose`, `hydra.job_logging`, `hydra.hydra_logging`")
@habit("`hydra.callbacks`")
@habit("`hydra.job.chdir=true`")
@habit("`hydra.job.env_set`")
@habit("`hydra.job.env_copy`")
@habit("`hydra.launcher.*`")
@habit("`hydra.runtime.*`, `hydra.job.num`, `hydra.job.id`, `hydra.overrides.*`")
@habit("`hydra.run.dir` with `-m`, `hydra.sweep.dir` without it")
@habit("`hydra.sweeper.max_batch_size=N`")
@pytest.mark.parametrize(("words", "message", "hint"), REFUSED)
def test_what_cannot_do_here_what_it_does_there_is_refused(words: str, message: str, hint: str) -> None:
    error = refusal(*(words.split() if words.startswith("-m") else [words]))
    assert error.message.startswith(message) and hint in error.hint


FILES = [
    ("verbose: true", "hydra.verbose sets"),
    ("job_logging: {root: {level: DEBUG}}", "hydra.job_logging."),
    ("callbacks: {mine: {_target_: my.Callback}}", "hydra.callbacks.mine._target_ would"),
    ("job: {env_set: {A: b}}", "hydra.job.env_set.A sets"),
    ("job: {env_copy: [HOME]}", "hydra.job.env_copy writes"),
    ("job: {env_copy: [NOT_SET_ANYWHERE]}", "hydra.job.env_copy names 'NOT_SET_ANYWHERE', which is not set"),
]


@habit("`hydra.callbacks`")
@habit("`hydra/launcher=submitit_slurm`")
@pytest.mark.parametrize(("text", "message"), FILES)
def test_a_file_of_ones_own_is_refused_for_the_same_reasons(text: str, message: str, tmp_path: Path) -> None:
    assert refusal(*own_file(tmp_path, text)).message.startswith(message)


@habit("`hydra.callbacks`")
@habit("`hydra/launcher=submitit_slurm`")
def test_what_a_file_chooses_is_refused_or_left_out(tmp_path: Path) -> None:
    flags = own_file(tmp_path, "callbacks: {mine: {_target_: my.Callback}}")
    assert settings_of(*flags, "~hydra.callbacks.mine").given == {}
    flags = own_file(tmp_path, "", defaults="config, {override hydra/launcher: submitit_slurm}, _self_")
    error = refusal(*flags)
    assert error.message.startswith("hydra/launcher=submitit_slurm:") and "+cluster=" in error.hint
