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
from omegaconf import OmegaConf

from slurm_train.config.compose import Composer, compose, compose_points, read_points
from slurm_train.config.hydra import AskedRun, HydraSettings, Output, read_outputs, read_settings
from slurm_train.config.schema import RunConfig
from slurm_train.config.words import read_words
from slurm_train.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
habit = pytest.mark.habit


@pytest.fixture(autouse=True)
def _hydras_log_handlers_go() -> Iterator[None]:
    """`--info` speaks through the root logger, to a stdout that is gone after the test."""
    before, level = list(logging.root.handlers), logging.root.level
    yield
    logging.root.handlers[:] = before
    logging.root.setLevel(level)


def config_of(*words: str) -> RunConfig:
    return compose(read_words(words)).config


def settings_of(*words: str) -> HydraSettings:
    flags = read_words(words)
    return read_settings(flags)


def refusal(*words: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        flags = read_words(words)
        settings = read_settings(flags)
        for _ in settings.compose_points([flags.overrides] if flags.multirun else []):
            pass
        if not flags.multirun:
            settings.compose()
    assert caught.value.hint and caught.value.exit_code == 2
    return caught.value


def write(folder: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return str(folder)


def rows() -> list[str]:
    """Returns the first cell of every row of the tables."""
    text = (REPOSITORY / "docs" / "hydra.md").read_text(encoding="utf-8")
    cells = [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if line.startswith("| ")]
    return [cell for cell in cells if cell != "habit"]


def test_every_row_of_the_tables_is_tested() -> None:
    modules = [*(REPOSITORY / "tests").glob("*/test_hydra_habits.py"), Path(__file__).with_name("test_target.py")]
    claimed = [row for path in modules for row in re.findall(r'habit\(\s*"([^"]+)"', path.read_text(encoding="utf-8"))]
    # Quotes end a claim, so a row with quotes in it is claimed with apostrophes.
    wanted = {row.replace('"', "'") for row in rows()}
    assert len(wanted) > 45
    assert (wanted - set(claimed), set(claimed) - wanted) == (set(), set())


# Flags


@habit("`--cfg job`, `--cfg hydra`, `--cfg all`")
@pytest.mark.parametrize(
    ("words", "shown", "hidden"),
    [
        (["--cfg", "job"], "lr: 0.003", "hydra:"),
        (["--cfg=hydra"], "output_subdir: null", "optim:"),
        (["-c", "all", "optim.lr=0.5"], "lr: 0.5", "nothing"),
        (["--cfg", "job", "--package", "optim", "optim.lr=0.5"], "# @package optim\nlr: 0.5", "max_steps"),
        (["--cfg", "job", "-p", "model"], "context: ${data.context}", "nothing"),
        (["--cfg", "job", "-p", "model", "--resolve"], "context: 128", "${"),
        (["--cfg", "job", "+cluster=3x5", "-p", "cluster"], "nodes: 3", "nothing"),
    ],
    ids=lambda value: " ".join(value) if type(value) is list else "",
)
def test_cfg_prints_the_configuration(
    words: list[str], shown: str, hidden: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Composer(read_words(words)).show()
    out = capsys.readouterr().out
    assert shown in out and hidden not in out


@habit("`--cfg job`, `--cfg hydra`, `--cfg all`")
def test_a_part_that_there_is_not_is_named() -> None:
    with pytest.raises(ConfigError, match="--package optm names no part") as caught:
        Composer(read_words(["--cfg", "job", "-p", "optm"])).show()
    assert "optim" in caught.value.hint


@habit("`--info`, with `config`, `defaults`, `defaults-tree`, `plugins`, `searchpath`")
@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--info"], "Config search path"),
        (["--info", "config", "optim.lr=0.5"], "lr: 0.5"),
        (["-i", "defaults"], "| model/gpt "),
        (["--info=defaults-tree"], "model: gpt"),
        (["--info", "plugins"], "BasicSweeper"),
        (["--info", "searchpath"], "/conf"),
    ],
    ids=lambda value: " ".join(value) if type(value) is list else "",
)
def test_info_prints_facts(words: list[str], shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    Composer(read_words(words)).show()
    assert shown in capsys.readouterr().out


@habit("two of `--run`, `--multirun`, `--cfg`, `--info`")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-m", "--cfg", "job"], "--multirun and --cfg do not go together"),
        (["--run", "--multirun"], "--run and --multirun do not go together"),
        (["--cfg", "job", "--info"], "--cfg and --info do not go together"),
        (["--resolve"], "--resolve is about what --cfg prints"),
        (["--package", "optim"], "--package is about what --cfg prints"),
    ],
    ids=lambda value: " ".join(value) if type(value) is list else "",
)
def test_flags_that_do_not_go_together_are_refused(words: list[str], message: str) -> None:
    assert refusal(*words).message == message


@habit("`--shell-completion`, `-sc`")
@habit("`--experimental-rerun`")
@pytest.mark.parametrize(
    ("flag", "hint"),
    [("--shell-completion", "completion bash"), ("-sc", "completion bash"), ("--experimental-rerun=x", "resume RUN")],
)
def test_flags_of_hydras_that_would_be_misunderstood_are_refused(flag: str, hint: str) -> None:
    error = refusal(flag)
    assert error.message.startswith("Hydra's flag --" if flag != "-sc" else "Hydra's flag -sc") and hint in error.hint


@habit("`-cd DIR`, `--config-dir DIR`")
@habit("`-cp DIR`, `--config-path DIR`")
@pytest.mark.parametrize("flag", ["--config-dir", "-cd", "--config-path", "-cp"])
def test_files_of_ones_own_shadow_the_shipped_ones(flag: str, tmp_path: Path) -> None:
    site = write(tmp_path, {"cluster/base.yaml": "nodes: 1\nqos: mine\n", "cluster/2x2.yaml": "qos: exact\n"})
    cluster, exact = config_of(flag, site, "+cluster=2x4").cluster, config_of(flag, site, "+cluster=2x2").cluster
    assert cluster is not None and (cluster.nodes, cluster.gpus_per_node, cluster.qos) == (2, 4, "mine")
    assert exact is not None and exact.qos == "exact"


@habit("`-cp DIR`, `--config-path DIR`")
def test_a_config_path_comes_before_a_config_dir_and_may_be_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write(tmp_path / "first", {"cluster/base.yaml": "nodes: 1\nqos: first\n", "__init__.py": ""})
    second = write(tmp_path / "second", {"cluster/base.yaml": "nodes: 1\nqos: second\n"})
    monkeypatch.syspath_prepend(str(tmp_path))
    for path in (first, "pkg://first"):
        cluster = config_of("--config-path", path, "--config-dir", second, "+cluster=2x4").cluster
        assert cluster is not None and cluster.qos == "first"
    assert (
        refusal("-cp", "pkg://nowhere_to_be_found").message
        == "--config-path 'pkg://nowhere_to_be_found' is not a package"
    )
    assert refusal("-cp", str(tmp_path / "third")).message.endswith("is not a directory")


@habit("`-cn NAME`, `--config-name NAME`")
@pytest.mark.parametrize("name", ["mine", "mine.yaml"])
def test_another_primary_file_is_chosen(name: str, tmp_path: Path) -> None:
    site = write(tmp_path, {"mine.yaml": "defaults: [config, _self_]\nseed: 9\n"})
    assert config_of("-cd", site, "-cn", name).seed == 9
    assert "mine2" in refusal("-cd", site, "-cn", "mine2").message


# Words


@habit("`key=value`, `++key=value`, `+key=value`, `~key`")
def test_signs_mean_what_they_mean_to_hydra() -> None:
    assert config_of("seed=3").seed == config_of("++seed=3").seed == 3
    assert (config_of("+model.extra=1").model or {})["extra"] == 1
    assert "dropout" not in (config_of("~model.dropout").model or {})
    assert refusal("+seed=3").message == "seed is there already, and + adds a key"
    assert refusal("+optim.lrr=3").message == "there is no configuration key 'optim.lrr'"
    assert refusal("~model.nope").message == "there is no configuration key 'model.nope'"


@habit("`model=NAME`, `~cluster`")
def test_groups_are_chosen_and_left_out(tmp_path: Path) -> None:
    assert (config_of("model=cnn").model or {})["_target_"].endswith("CNN")
    site = write(tmp_path, {"mine.yaml": "defaults: [config, cluster: base, _self_]\n"})
    assert config_of("-cd", site, "-cn", "mine").cluster is not None
    assert config_of("-cd", site, "-cn", "mine", "~cluster").cluster is None
    assert refusal("cluster=null").hint == "write ~GROUP to leave a group out, e.g. ~cluster"


@habit("`+experiment=NAME`")
def test_an_experiment_is_a_file_of_settings(tmp_path: Path) -> None:
    site = write(tmp_path, {"experiment/mine.yaml": "# @package _global_\nseed: 5\n"})
    for words in (["+experiment=mine"], ["experiment=mine"]):
        assert config_of("-cd", site, *words).seed == 5
    assert config_of("+experiment=digits").batch.default_global_size == 64


@habit("`'key=[a,b]'`, `'key={a: 1}'`, `key='a b'`")
def test_lists_mappings_and_quotes() -> None:
    assert config_of("optim.betas=[0.5,0.6]").optim.betas == [0.5, 0.6]
    assert (config_of("model={width: 32, num_heads: 2}").model or {})["width"] == 32
    assert config_of("run.name='a b'").run.name == config_of('run.name="a b"').run.name == "a b"


@habit("`int(3.0)`, `float(1)`, `str(1)`, `bool(1)`")
def test_casts() -> None:
    config = config_of("train.max_steps=int(3.0)", "optim.lr=float(1)", "train.compile=bool(1)")
    assert (config.train.max_steps, config.optim.lr, config.train.compile) == (3, 1.0, True)
    assert (config_of("+model.label=str(1)").model or {})["label"] == "1"


@habit("`${optim.lr}`, `${oc.env:HOME}`")
def test_references_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHO", "ann")
    config = config_of("optim.weight_decay=${optim.lr}", "run.name=${oc.env:WHO}-${oc.env:NOBODY,x}")
    assert (config.optim.weight_decay, config.run.name) == (config.optim.lr, "ann-x")


@habit("`${now:%Y-%m-%d}`, `${hydra:runtime.cwd}`, `${hydra.job.num}`")
def test_hydras_own_references_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert re.fullmatch(r"\d{4}-\d\d", config_of("run.name='${now:%Y-%m}'").run.name or "")
    for reference in ("${hydra:runtime.cwd}", "${hydra.runtime.cwd}"):
        assert config_of(f"run.root={reference}/runs").run.root == f"{tmp_path}/runs"
    for reference in ("hydra:runtime.output_dir", "hydra.runtime.output_dir", "hydra.job.id"):
        assert refusal(f"run.name=${{{reference}}}").message == (
            f"${{{reference}}} is not known when the configuration is composed"
        )


@habit("`${now:%Y-%m-%d}`, `${hydra:runtime.cwd}`, `${hydra.job.num}`")
@pytest.mark.parametrize("reference", ["${hydra:job.num}", "${hydra.job.num}"])
def test_a_run_of_a_sweep_knows_its_number(reference: str) -> None:
    flags = read_words(["-m", "seed=5,6", f"run.name=run_{reference}"])
    points = [point.overrides for point in read_points(flags)]
    assert [one.config.run.name for one in compose_points(flags, points)] == ["run_0", "run_1"]


SWEEPS = [
    ("seed=1,2", ["1", "2"]),
    ("seed=choice(1,2)", ["1", "2"]),
    ("seed=range(3)", ["0", "1", "2"]),
    ("optim.lr=range(0,1,0.5)", ["0.0", "0.5"]),
    ("model=glob(c*)", ["cnn", "custom"]),
    ("model=glob(*,exclude=[c*,hf,*-*])", ["gpt"]),
    ("seed=sort(3,1,2)", ["1", "2", "3"]),
    ("seed=sort(3,1,2,reverse=true)", ["3", "2", "1"]),
    ("train.compile=bool(0),true", ["False", "true"]),
    ("optim.betas=[0.9,0.95],[0.8,0.9]", ["[0.9,0.95]", "[0.8,0.9]"]),
]


@habit("`key=1,2`, `choice(1,2)`, `range(8)`, `glob(*)`, `sort(...)`, `shuffle(...)`")
@pytest.mark.parametrize(("word", "values"), SWEEPS, ids=[word for word, _ in SWEEPS])
def test_several_values_make_several_runs(word: str, values: list[str]) -> None:
    key = word.partition("=")[0]
    found = [point.values[key].lower() for point in read_points(read_words(["-m", word]))]
    assert found == [value.lower() for value in values]


@habit("`key=1,2`, `choice(1,2)`, `range(8)`, `glob(*)`, `sort(...)`, `shuffle(...)`")
def test_shuffled_values_are_the_same_values() -> None:
    points = read_points(read_words(["-m", "seed=shuffle(range(20))"]))
    assert sorted(int(point.values["seed"]) for point in points) == list(range(20))


@habit("`interval(0,1)`")
def test_an_interval_needs_a_sweeper_that_chooses() -> None:
    with pytest.raises(ConfigError, match="an interval names no points"):
        read_points(read_words(["-m", "optim.lr=interval(0,1)"]))


def test_a_word_that_hydras_grammar_does_not_take_is_answered_with_quotes() -> None:
    error = refusal("optim.lr=a=b")
    assert error.message.startswith("'optim.lr=a=b' cannot be read: ") and "once more" in error.hint


@habit("several values without `-m`")
@pytest.mark.parametrize("word", ["seed=1,2", "seed=range(3)", "model=gpt,cnn", "seed=choice(1,2)"])
def test_several_values_are_no_value(word: str) -> None:
    error = refusal(word)
    assert error.message.startswith(f"{word} has several values") and error.hint.startswith("add -m")


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty package hydra_plugins, found by Hydra as if it was installed."""
    folder = tmp_path / "hydra_plugins"
    folder.mkdir()
    before = Plugins.instance()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("hydra_plugins")]:
        monkeypatch.delitem(sys.modules, name)
    yield folder
    monkeypatch.undo()
    from hydra.core.singleton import Singleton

    Singleton._instances[Plugins] = before
    for name in [name for name in sys.modules if name.startswith("hydra_plugins")]:
        del sys.modules[name]


def load_plugins() -> None:
    from hydra.core.singleton import Singleton

    Singleton._instances.pop(Plugins)


@habit("resolvers of your own")
@pytest.mark.parametrize("is_sweep", [False, True])
def test_a_resolver_of_ones_own_is_found(is_sweep: bool, plugins: Path) -> None:
    module = (
        "from omegaconf import OmegaConf\nOmegaConf.register_new_resolver('twice', lambda x: 2 * x, replace=True)\n"
    )
    (plugins / "arithmetic.py").write_text(module)
    load_plugins()
    words = ["seed=4", "train.max_steps='${twice:${seed}}'"]
    try:
        if is_sweep:
            flags = read_words(["-m", *words])
            (composed,) = compose_points(flags, [tuple(words)])
            assert composed.config.train.max_steps == 8
        else:
            assert config_of(*words).train.max_steps == 8
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
    load_plugins()
    assert config_of("+experiment=theirs").seed == 77


# Settings to Hydra


@habit("`hydra.mode=MULTIRUN`")
def test_the_mode_makes_a_sweep(tmp_path: Path) -> None:
    settings = settings_of("hydra.mode=MULTIRUN", "seed=1,2")
    assert settings.words.multirun and "seed=1,2" in settings.words.overrides
    site = write(tmp_path, {"mine.yaml": "defaults: [config, _self_]\nhydra: {mode: MULTIRUN}\n"})
    assert settings_of("-cd", site, "-cn", "mine", "seed=1,2").words.multirun
    assert not settings_of("hydra.mode=RUN").words.multirun
    assert settings_of("hydra.mode=RUN", "-m").words.multirun, "the flag wins, as under Hydra"
    assert refusal("hydra.mode=RUN", "seed=1,2").message.startswith("seed=1,2 has several values")


def outputs_of(*words: str, seeds: tuple[int, ...] = ()) -> list[Output]:
    settings = settings_of(*words)
    typed = settings.words.overrides
    numbers: list[int | None] = list(range(len(seeds))) if seeds else [None]
    asked = [
        AskedRun(
            number=number,
            words=[word for word in typed if not seeds or not word.startswith("seed=")]
            + ([f"seed={seeds[number]}"] if number is not None else []),
            mapping={"seed": 0 if number is None else seeds[number], "optim": {"lr": 0.1}},
        )
        for number in numbers
    ]
    return read_outputs(settings, asked)


@habit("`hydra.run.dir=PATH`")
@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("out/a", "out/a"),
        ("out/${hydra.job.override_dirname}", "out/optim.lr=0.1,seed=3"),
        ("out/${hydra.job.name}/lr=${optim.lr}", "out/slurm_train/lr=0.1"),
        ("${hydra:job.name}", "slurm_train"),
        ("out/${now:%Y}", r"out/\d{4}"),
    ],
)
def test_the_path_of_a_run_is_told(value: str, path: str) -> None:
    (output,) = outputs_of(f"hydra.run.dir={value}", "seed=3", "optim.lr=0.1")
    assert output.folder is None and re.fullmatch(path, output.path or "")


@habit("`hydra.run.dir=PATH`")
def test_a_path_that_needs_what_comes_later_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"hydra\.run\.dir is not known before the run is there"):
        outputs_of("hydra.run.dir=out/${hydra.job.id}")


@habit("`hydra.run.dir=PATH`")
def test_a_path_in_a_file_of_ones_own_counts_and_a_default_does_not(tmp_path: Path) -> None:
    files = {
        "asks.yaml": "defaults: [config, _self_]\nhydra: {run: {dir: out/x}}\n",
        "alone.yaml": "seed: 1\n",
        "mute.yaml": "defaults: [config, _self_]\n# hydra\n",
    }
    site = write(tmp_path, files)
    assert [one.path for one in outputs_of("-cd", site, "-cn", "asks")] == ["out/x"]
    for name in ("alone", "mute", "config"):
        assert outputs_of("-cd", site, "-cn", name) == [], name


@habit("`hydra.sweep.dir=PATH`, `hydra.sweep.subdir=NAME`")
@pytest.mark.parametrize(
    ("words", "paths"),
    [
        (["hydra.sweep.dir=out"], ["out/0", "out/1"]),
        (["hydra.sweep.dir=out", "hydra.sweep.subdir=s_${seed}"], ["out/s_5", "out/s_6"]),
        (["hydra.sweep.dir=out", "hydra.sweep.subdir=${hydra.job.override_dirname}"], ["out/seed=5", "out/seed=6"]),
    ],
)
def test_the_paths_of_a_sweeps_runs_are_told(words: list[str], paths: list[str]) -> None:
    outputs = outputs_of("-m", *words, "seed=5,6", seeds=(5, 6))
    assert [one.path for one in outputs] == paths


@habit("`hydra.sweep.dir=PATH`, `hydra.sweep.subdir=NAME`")
def test_all_runs_of_a_sweep_share_one_moment() -> None:
    outputs = outputs_of("-m", "hydra.sweep.dir=out/${now:%f}", "seed=5,6", seeds=(5, 6))
    first, second = (str(one.path).rpartition("/")[0] for one in outputs)
    assert first == second


@habit("`hydra.run.dir` with `-m`, `hydra.sweep.dir` without it")
def test_a_path_that_would_not_be_used_is_refused() -> None:
    assert refusal("-m", "hydra.run.dir=x", "seed=1,2").message == "hydra.run.dir is about one run"
    for key in ("dir", "subdir"):
        assert refusal(f"hydra.sweep.{key}=x").message == f"hydra.sweep.{key} is about a sweep"


@habit("`hydra.output_subdir=.hydra`")
def test_hydras_three_files_are_written_where_they_are_asked_for() -> None:
    (output,) = outputs_of("hydra.output_subdir=.hydra", "seed=3", "hydra.job.name=ann")
    assert (output.path, output.folder) == (None, ".hydra")
    files = {name: OmegaConf.to_container(OmegaConf.create(text)) for name, text in output.files.items()}
    assert files["overrides.yaml"] == ["seed=3", "run.name=ann"]
    assert files["config.yaml"] == {"seed": 0, "optim": {"lr": 0.1}}
    hydra: Any = files["hydra.yaml"]
    assert hydra["hydra"]["output_subdir"] == ".hydra" and hydra["hydra"]["job"]["name"] == "ann"
    for name in ("code", "../x", ".."):
        with pytest.raises(ConfigError, match="the run directory has names of its own"):
            outputs_of(f"hydra.output_subdir={name}")


@habit("`hydra.job.name=NAME`")
def test_a_job_name_names_the_run() -> None:
    assert compose(settings_of("hydra.job.name=ann").words).config.run.name == "ann"
    assert compose(settings_of("hydra.job.name=ann", "run.name=bob").words).config.run.name == "bob"


@habit("`hydra.job.config.override_dirname.*`")
def test_the_name_of_the_words_is_shaped() -> None:
    prefix = "hydra.job.config.override_dirname"
    words = [f"{prefix}.kv_sep=-", f"{prefix}.item_sep=_", f"{prefix}.exclude_keys=[optim.lr]"]
    (output,) = outputs_of(
        *words, "hydra.run.dir=${hydra.job.override_dirname}", "seed=3", "optim.lr=0.1", "+model.a=1"
    )
    assert output.path == "+model.a-1_seed-3"


@habit("`hydra.job.chdir=false`")
def test_what_happens_anyway_is_taken() -> None:
    settings = settings_of("hydra.job.chdir=false", "hydra.verbose=false", "hydra/job_logging=disabled", "seed=2")
    assert settings.notes == () and settings.compose().config.seed == 2


@habit("`hydra.searchpath=[file://DIR,pkg://PACKAGE]`")
def test_more_places_are_searched(tmp_path: Path) -> None:
    one = write(
        tmp_path / "one", {"experiment/a.yaml": "# @package _global_\nseed: 1\n", "cluster/3x3.yaml": "qos: own\n"}
    )
    two = write(tmp_path / "two", {"experiment/b.yaml": "# @package _global_\ntrain: {max_steps: 2}\n"})
    config = config_of(f"hydra.searchpath=[file://{one},{two}]", "+experiment=[a,b]", "+cluster=3x3")
    assert (config.seed, config.train.max_steps, config.cluster and config.cluster.qos) == (1, 2, "own")
    flags = read_words([f"hydra.searchpath=[{one},{two}]", "-m", "experiment=glob(*)"])
    assert [point.values["experiment"] for point in read_points(flags)] == ["a", "b", "digits"]
    assert (
        refusal(f"hydra.searchpath=[{tmp_path}/three]").message
        == f"hydra.searchpath '{tmp_path}/three' is not a directory"
    )
    assert refusal("hydra.searchpath=conf").message == "'hydra.searchpath=conf' names no list of places"


@habit("`hydra.searchpath=[file://DIR,pkg://PACKAGE]`")
def test_more_places_may_stand_in_a_primary_file(tmp_path: Path) -> None:
    more = write(tmp_path / "more", {"experiment/a.yaml": "# @package _global_\nseed: 31\n"})
    text = f"defaults: [config, _self_]\nhydra: {{searchpath: ['file://{more}']}}\n"
    site = write(tmp_path / "site", {"mine.yaml": text})
    assert config_of("-cd", site, "-cn", "mine", "+experiment=a").seed == 31


LAUNCHERS = [
    (["hydra/launcher=submitit_slurm"], "submitit_slurm", "write +cluster=1x1 instead"),
    (
        [
            "hydra/launcher=submitit_slurm",
            "hydra.launcher.nodes=2",
            "hydra.launcher.gpus_per_node=8",
            "hydra.launcher.tasks_per_node=8",
            "hydra.launcher.timeout_min=60",
            "hydra.launcher.partition=gpu",
            "hydra.launcher.array_parallelism=4",
            "+hydra.launcher.additional_parameters.mail_type=END",
            "hydra.launcher.submitit_folder=x",
        ],
        "submitit_slurm",
        "write +cluster=2x8 cluster.time_limit_min=60 cluster.partition=gpu sweep.max_parallel=4 "
        "cluster.sbatch.mail-type=END instead",
    ),
    (
        ["hydra/launcher=submitit_slurm", "hydra.launcher.gres=gpu:a100:4"],
        "submitit_slurm",
        "write +cluster=1x4 instead",
    ),
    (["hydra/launcher=submitit_local"], "submitit_local", "drop it: without +cluster the runs are trained here"),
    (["hydra/launcher=joblib", "hydra.launcher.n_jobs=6"], "joblib", "sweep.max_parallel=6 trains several at a time"),
    (["hydra/launcher=ray"], "ray", "+cluster=<nodes>x<GPUs per node> goes through Slurm"),
]


@habit("`hydra/launcher=submitit_slurm`")
@habit("`hydra/launcher=submitit_local`, `joblib`, any other")
@pytest.mark.parametrize(("words", "name", "hint"), LAUNCHERS, ids=[words[-1] for words, _, _ in LAUNCHERS])
def test_a_launcher_is_refused_with_its_settings_translated(words: list[str], name: str, hint: str) -> None:
    error = refusal("-m", *words, "seed=1,2")
    assert error.message == f"hydra/launcher={name}: the runs are launched by this program, not by a plugin"
    assert hint in error.hint


@habit("`hydra/launcher=submitit_slurm`")
def test_a_launcher_that_a_file_chooses_is_refused_too(tmp_path: Path) -> None:
    text = "defaults: [config, {override hydra/launcher: submitit_slurm}, _self_]\n"
    site = write(tmp_path, {"mine.yaml": text})
    error = refusal("-cd", site, "-cn", "mine")
    assert error.message.startswith("hydra/launcher=submitit_slurm:") and "+cluster=" in error.hint


@habit("`hydra.launcher.*`")
def test_a_setting_of_no_launcher_is_refused() -> None:
    error = refusal("hydra.launcher.timeout_min=60")
    assert (error.message, error.hint) == (
        "hydra.launcher.timeout_min: no launcher of Hydra's is used",
        "write cluster.time_limit_min=60",
    )


REFUSED = [
    ("hydra.verbose=true", "hydra.verbose=true sets loggers of Hydra's process", "logging.basicConfig"),
    ("hydra.verbose=[a,b]", "hydra.verbose=['a', 'b'] sets loggers", "`logs RUN`"),
    ("hydra.job_logging.root.level=DEBUG", "hydra.job_logging sets loggers", "`logs RUN`"),
    ("hydra/job_logging=stdout", "hydra.job_logging sets loggers", "hydra/job_logging=disabled is what happens"),
    ("hydra/hydra_logging=hydra_debug", "hydra.hydra_logging sets loggers", "hydra/hydra_logging=disabled"),
    ("+hydra.callbacks.mine._target_=my.Callback", "hydra.callbacks.mine would be called around the job", "--wait"),
    ("hydra.callbacks.mine._target_=my.Callback", "hydra.callbacks.mine would be called around the job", "--wait"),
    ("hydra.job.chdir=true", "hydra.job.chdir=true: the ranks start in the directory", "context.run.path"),
    ("+hydra.job.env_set.A=1", "hydra.job.env_set.A sets a variable of Hydra's process", "cluster.env.A=VALUE"),
    ("hydra.job.env_set={A: 1}", "hydra.job.env_set", "cluster.env."),
    ("hydra.job.env_copy=[A,B]", "hydra.job.env_copy writes variables with their values", "cluster.export=[A,B]"),
    ("hydra.runtime.cwd=/x", "hydra.runtime.cwd is filled in, not set", "${hydra.runtime.cwd} refers to it"),
    ("hydra.job.num=3", "hydra.job.num is filled in, not set", "refers to it"),
    ("hydra.job.id=3", "hydra.job.id is filled in, not set", "refers to it"),
    ("hydra.overrides.task=[a]", "hydra.overrides.task is filled in, not set", "refers to it"),
    ("hydra.nothing=1", "there is no configuration key 'hydra.nothing'", "`--hydra-help` lists"),
    ("hydra.run.nothing=1", "there is no configuration key 'hydra.run.nothing'", "`--hydra-help` lists"),
]


@habit("`hydra.verbose`, `hydra.job_logging`, `hydra.hydra_logging`")
@habit("`hydra.callbacks`")
@habit("`hydra.job.chdir=true`")
@habit("`hydra.job.env_set`")
@habit("`hydra.job.env_copy`")
@habit("`hydra.runtime.*`, `hydra.job.num`, `hydra.job.id`, `hydra.overrides.*`")
@pytest.mark.parametrize(("word", "message", "hint"), REFUSED, ids=[word for word, _, _ in REFUSED])
def test_what_cannot_do_here_what_it_does_there_is_refused(word: str, message: str, hint: str) -> None:
    error = refusal(word)
    assert error.message.startswith(message) and hint in error.hint


FILES = [
    ("verbose: true", "hydra.verbose=true"),
    ("job_logging: {root: {level: DEBUG}}", "hydra.job_logging sets"),
    ("callbacks: {mine: {_target_: my.Callback}}", "hydra.callbacks.mine would"),
    ("job: {chdir: true}", "hydra.job.chdir=true"),
    ("job: {env_set: {A: b}}", "hydra.job.env_set.A sets"),
    ("job: {env_copy: [HOME]}", "hydra.job.env_copy writes"),
    ("job: {env_copy: [NOT_SET_ANYWHERE]}", "hydra.job.env_copy names 'NOT_SET_ANYWHERE', which is not set"),
    ("sweeper: {max_batch_size: 3}", "hydra.sweeper.max_batch_size=3"),
]


@habit("`hydra.callbacks`")
@pytest.mark.parametrize(("text", "message"), FILES, ids=[text for text, _ in FILES])
def test_a_file_of_ones_own_is_refused_for_the_same_reasons(text: str, message: str, tmp_path: Path) -> None:
    site = write(tmp_path, {"mine.yaml": f"defaults: [config, _self_]\nhydra: {{{text}}}\n"})
    assert refusal("-cd", site, "-cn", "mine").message.startswith(message)


@habit("`hydra.callbacks`")
def test_a_callback_of_a_file_can_be_left_out(tmp_path: Path) -> None:
    text = "defaults: [config, _self_]\nhydra: {callbacks: {mine: {_target_: my.Callback}}}\n"
    site = write(tmp_path, {"mine.yaml": text})
    assert settings_of("-cd", site, "-cn", "mine", "~hydra.callbacks.mine").given == {}


@habit("`hydra.sweeper.max_batch_size=N`")
def test_batches_are_refused() -> None:
    error = refusal("-m", "hydra.sweeper.max_batch_size=3", "seed=1,2")
    assert error.hint.startswith("write sweep.max_parallel=3")


@habit("`hydra.help`, `hydra.hydra_help`")
def test_what_is_left_out_is_said() -> None:
    assert settings_of("hydra.help.app_name=x").notes == ("hydra.help is not used: --help is this program's own",)
    assert len(settings_of("hydra.help.app_name=x", "hydra.hydra_help.template=y").notes) == 2
