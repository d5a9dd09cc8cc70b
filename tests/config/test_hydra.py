"""What a person types who knows Hydra: every row of the tables in docs/hydra.md, as far as composing goes.

What such words do to runs is tested in tests/cli/test_hydra_habits.py; between the two no row is left out.
"""

from __future__ import annotations

import logging
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from omegaconf import OmegaConf

from slurm_train.config.compose import Composer, read_points
from slurm_train.config.hydra import HydraSettings, read_settings
from slurm_train.config.schema import flat, to_mapping
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


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with primary files that say something to Hydra."""
    files = {
        "placed": "hydra: {run: {dir: out/x}}",
        "verbose": "hydra: {verbose: true}",
        "calling": "hydra: {callbacks: {mine: {_target_: my.Callback}}}",
        "copying": "hydra: {job: {env_copy: [NOT_SET_ANYWHERE]}}",
        "launched": "",
        "mine": "seed: 9",
    }
    for name, text in files.items():
        defaults = (
            "config, {override hydra/launcher: submitit_slurm}, _self_" if name == "launched" else "config, _self_"
        )
        write(tmp_path / "site", {f"{name}.yaml": f"defaults: [{defaults}]\n{text}\n"})
    write(tmp_path / "site", {"experiment/mine.yaml": "# @package _global_\nseed: 5\n"})
    monkeypatch.chdir(tmp_path)


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
    ("words", "shown"),
    [
        ("--cfg job", "lr: ${oc.select:model._lr_,0.003}"),
        ("--cfg job --resolve", "lr: 0.003"),
        ("--cfg=hydra", "output_subdir: null"),
        ("--cfg job --package optim optim.lr=0.5", "# @package optim\n_target_: torch.optim.AdamW\nlr: 0.5"),
        ("--cfg job -p model --resolve", "context: 128"),
        ("--info", "Config search path"),
        ("-i defaults", "| model/gpt "),
        ("--info searchpath", "/conf"),
    ],
)
def test_the_configuration_and_facts_about_it_are_printed(
    words: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Composer(read_words(words.split())).show()
    out = capsys.readouterr().out
    assert shown in out
    assert ("max_steps" in out) is (words in ("--cfg job", "--cfg job --resolve", "--info"))


def test_a_part_that_there_is_not_is_named() -> None:
    with pytest.raises(ConfigError, match="--package optm is no part"):
        Composer(read_words(["--cfg", "job", "-p", "optm"])).show()


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


# Words


@habit("`key=value`, `++key=value`, `+key=value`, `~key`")
@habit("`model=NAME`, `~cluster`")
@habit("`'key=[a,b]'`, `'key={a: 1}'`, `key='a b'`")
@habit("`-cn NAME`, `--config-name NAME`")
@habit("`+experiment=NAME`")
@habit("`int(3.0)`, `float(1)`, `str(1)`, `bool(1)`")
@habit("`${optim.lr}`, `${oc.env:HOME}`")
@habit("`hydra.job.name=NAME`")
@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("-cd site -cn mine.yaml", "seed", 9),
        ("-cd site +experiment=mine", "seed", 5),
        ("+model.extra=1", "model.extra", 1),
        ("~model.dropout", "model.dropout", None),
        ("'model={width: 32, num_heads: 2}'", "model.width", 32),
        ("'run.name=\"a b\"'", "run.name", "a b"),
        ("train.max_steps=int(3.0)", "train.max_steps", 3),
        ("+model.label=str(1)", "model.label", "1"),
        ("run.name=${oc.env:WHO}-${oc.env:NOBODY,x}", "run.name", "ann-x"),
        ("hydra.job.name=ann", "run.name", "ann"),
        ("hydra.job.name=ann run.name=bob", "run.name", "bob"),
    ],
)
def test_words_mean_what_they_mean_to_hydra(
    words: str, key: str, value: object, site: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHO", "ann")
    assert values_of(*shlex.split(words)).get(key) == value


@habit("`${now:%Y-%m-%d}`, `${hydra:runtime.cwd}`, `${hydra.job.num}`")
def test_hydras_own_references_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert re.fullmatch(r"\d{4}-\d\d", values_of("run.name='${now:%Y-%m}'")["run.name"])
    assert values_of("run.root=${hydra.runtime.cwd}/runs")["run.root"] == f"{tmp_path}/runs"
    settings = settings_of("-m", "seed=5,6", "run.name=run_${hydra.job.num}")
    points = [point.overrides for point in read_points(settings.sweep_words)]
    assert [one.config.run.name for one in settings.compose_points(points)] == ["run_0", "run_1"]
    settings = settings_of("-m", "seed=5,6,7", "run.name=at-${now:%f}")
    points = [point.overrides for point in read_points(settings.sweep_words)]
    assert len({one.config.run.name for one in settings.compose_points(points)}) == 1, "the time of the command"
    message = "${hydra:runtime.output_dir} is not known when the configuration is composed"
    assert refusal("run.name=${hydra:runtime.output_dir}").message == message


@habit("`key=1,2`, `choice(1,2)`, `range(8)`, `glob(*)`, `sort(...)`, `shuffle(...)`")
@habit("`interval(0,1)`")
def test_several_values_make_several_runs() -> None:
    points = read_points(read_words(["-m", "model=glob(*,exclude=[c*,hf,*-*])", "seed=sort(3,1,reverse=true)"]))
    assert [dict(point.values) for point in points] == [{"model": "gpt", "seed": "3"}, {"model": "gpt", "seed": "1"}]
    assert len(read_points(read_words(["-m", "seed=shuffle(range(20))"]))) == 20
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


RESOLVER = """
from omegaconf import OmegaConf
OmegaConf.register_new_resolver("twice", lambda x: 2 * x, replace=True)
"""
SEARCH_PATH_PLUGIN = """
from hydra.plugins.search_path_plugin import SearchPathPlugin
class Ours(SearchPathPlugin):
    def manipulate_search_path(self, search_path):
        search_path.append(provider="ours", path="file://{folder}")
"""


@habit("your own resolvers")
@habit("search path plugins")
def test_resolvers_and_search_path_plugins_of_ones_own_are_found(plugins: Path, tmp_path: Path) -> None:
    site = write(tmp_path / "site", {"experiment/theirs.yaml": "# @package _global_\nseed: 77\n"})
    (plugins / "places.py").write_text(SEARCH_PATH_PLUGIN.format(folder=site))
    (plugins / "arithmetic.py").write_text(RESOLVER)
    words = ["+experiment=theirs", "train.max_steps='${twice:${seed}}'"]
    try:
        assert values_of(*words)["train.max_steps"] == 154
    finally:
        OmegaConf.clear_resolver("twice")
    assert refusal(*words).message == "there is no resolver 'twice' for ${twice:...}"


# Settings to Hydra


def test_the_parts_of_a_sweeper_are_chosen_as_groups_too() -> None:
    """As in hydra/sweeper/sampler=grid; the sweeper here has none."""
    message = refusal("-m", "hydra/sweeper/sampler=grid").message
    assert "has no meaning here" not in message and "hydra/sweeper/sampler" in message


IN_EXPERIMENTS = {
    "{sweeper: {params: {seed: '1,2'}}}": "hydra.sweeper.params.seed is set in a file that the sweep chooses",
    "{job: {name: x}}": "hydra.job.name is set in a file that the sweep chooses",
    "{job: {chdir: true}}": "hydra.job.chdir=true",
    "{launcher: {timeout_min: 60}}": "hydra.launcher.timeout_min: this program launches the runs",
    "{mode: MULTIRUN, help: {app_name: x}}": "",
    "{}": "",
}


@habit("Hydra's settings in a file that the sweep itself chooses (`+experiment=a,b`)")
@pytest.mark.parametrize("text", IN_EXPERIMENTS)
def test_what_a_swept_file_sets_of_hydra_is_not_lost(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        f"experiment/{name}.yaml": f"# @package _global_\nhydra: {text}\nseed: {len(name)}\n" for name in ("a", "bb")
    }
    write(tmp_path / "own", files)
    monkeypatch.chdir(tmp_path)
    settings = settings_of("-m", "--config-dir", "own", "+experiment=a,bb")
    points = [point.overrides for point in read_points(settings.sweep_words)]
    said = ""
    try:
        seeds = [composed.config.seed for composed in settings.compose_points(points)]
    except ConfigError as err:
        said = err.message
    assert said.startswith(IN_EXPERIMENTS[text]) and bool(said) == bool(IN_EXPERIMENTS[text])
    assert said or seeds == [1, 2]


@habit("`hydra.mode=MULTIRUN`")
def test_the_mode_makes_a_sweep() -> None:
    assert settings_of("hydra.mode=MULTIRUN", "seed=1,2").words.multirun
    assert settings_of("hydra.mode=RUN", "-m").words.multirun, "the flag wins, as under Hydra"
    assert refusal("hydra.mode=RUN", "seed=1,2").message.startswith("seed=1,2 has several values")


DIRNAME = "hydra.job.config.override_dirname"


@habit("`hydra.job.config.override_dirname.*`")
def test_the_words_of_a_run_are_written_in_the_format_that_is_asked_for() -> None:
    words = ["optim.lr=0.1", "seed=5", "+model.label='${hydra.job.override_dirname}'"]
    separators = [f"{DIRNAME}.kv_sep=-", f"{DIRNAME}.item_sep=_", f"{DIRNAME}.exclude_keys=[model.label,optim.lr]"]
    assert values_of(*words, f"{DIRNAME}.exclude_keys=[model.label]")["model.label"] == "optim.lr=0.1,seed=5"
    assert values_of(*words, "train.max_steps=3", *separators)["model.label"] == "seed-5_train.max_steps-3"


@habit("`hydra.job.chdir=false`")
@habit("`hydra.help`, `hydra.hydra_help`")
@habit("`hydra/launcher=basic`")
def test_what_happens_anyway_is_taken_and_what_is_unused_is_noted(site: None) -> None:
    anyway = ["hydra.job.chdir=false", "hydra.verbose=false", "hydra/job_logging=disabled", "hydra.run.dir=."]
    settings = settings_of(*anyway, "hydra.output_subdir=null", "seed=2")
    assert settings.notes == () and settings.compose().config.seed == 2
    assert settings_of("hydra.help.app_name=x").notes == ("hydra.help is not used: --help is this program's own",)
    (launcher,) = settings_of("-cd", "site", "-cn", "launched", "hydra/launcher=basic").notes
    assert launcher.startswith("hydra.launcher is not used") and "+cluster=NxG" in launcher
    assert settings_of("-cd", "site", "-cn", "calling", "~hydra.callbacks.mine").notes == ()
    assert settings_of("-cd", "site", "-cn", "placed", "hydra.run.dir=.").notes == ()


@habit("`hydra.searchpath=[file://DIR,pkg://PACKAGE]`")
def test_more_places_are_searched(tmp_path: Path) -> None:
    files = {"experiment/a.yaml": "# @package _global_\nseed: 1\n", "cluster/3x3.yaml": "qos: own\n"}
    one = write(tmp_path / "one", files)
    two = write(tmp_path / "two", {"experiment/b.yaml": "# @package _global_\ntrain: {max_steps: 2}\n"})
    words = f"hydra.searchpath=[file://{one},{two}]"
    values = values_of(words, "+experiment=[a,b]", "+cluster=3x3")
    assert (values["seed"], values["train.max_steps"], values["cluster.qos"]) == (1, 2, "own")
    absent = refusal(f"hydra.searchpath=[{tmp_path}/three]").message
    assert absent == f"hydra.searchpath '{tmp_path}/three' is not there"


# Refusals

REFUSED = [
    ("-m --cfg job", "--multirun and --cfg exclude each other", ""),
    ("--resolve", "--resolve is about what --cfg prints", ""),
    ("--shell-completion", "Hydra's flag --shell-completion is not one", "completion bash"),
    ("--experimental-rerun=x", "Hydra's flag --experimental-rerun is not one", "resume RUN"),
    ("+seed=3", "seed is there already, and + adds a key", ""),
    ("~model.nope", "there is no configuration key 'model.nope'", ""),
    ("optim.lr=a=b", "'optim.lr=a=b' cannot be read: ", "once more"),
    ("seed=1,2", "seed=1,2 has several values", "add -m"),
    (
        "-m hydra/launcher=submitit_slurm hydra.launcher.nodes=2 +hydra.launcher.additional_parameters.mail_type=END",
        "hydra/launcher=submitit_slurm: this program launches the runs",
        "+cluster=NODESxGPUS",
    ),
    ("hydra/launcher=joblib hydra.launcher.n_jobs=6", "hydra/launcher=joblib: ", "sweep.max_parallel=N"),
    ("-cd site -cn launched", "hydra/launcher=submitit_slurm:", "+cluster="),
    ("hydra.launcher.timeout_min=60", "hydra.launcher.timeout_min=60: this program", "cluster.* are its settings"),
    ("hydra.run.dir=out/${now:%H}", "hydra.run.dir: the path of a run follows from", "run.root=DIR"),
    ("-cd site -cn placed", "hydra.run.dir: ", "run.name=NAME"),
    (
        "-m hydra.sweep.dir=out hydra.sweep.subdir=s_${seed} seed=1,2",
        "hydra.sweep.dir: the path of a run",
        "run.root=DIR",
    ),
    ("hydra.output_subdir=.hydra", "hydra.output_subdir: the run directory has config.yaml", "drop it"),
    ("hydra.verbose=true", "hydra.verbose configures loggers of Hydra's process", "logging.basicConfig"),
    ("-cd site -cn verbose", "hydra.verbose configures", ""),
    ("hydra/hydra_logging=hydra_debug", "hydra/hydra_logging configures loggers", "`logs RUN`"),
    ("hydra.callbacks.mine._target_=my.Callback", "hydra.callbacks.mine._target_ would be called", "--wait"),
    ("-cd site -cn calling", "hydra.callbacks.mine._target_ would", ""),
    ("hydra.job.chdir=true", "hydra.job.chdir=true: the ranks start in the directory", "context.run.path"),
    ("+hydra.job.env_set.A=1", "hydra.job.env_set.A sets a variable of Hydra's process", "cluster.env.NAME=VALUE"),
    ("hydra.job.env_copy=[A,B]", "hydra.job.env_copy writes variables with their values", "cluster.export=[NAME,...]"),
    ("-cd site -cn copying", "hydra.job.env_copy names 'NOT_SET_ANYWHERE', which is not set", ""),
    ("hydra.runtime.cwd=/x", "hydra.runtime.cwd is filled in by Hydra", "${hydra.runtime.cwd} refers to"),
    ("hydra.nothing=1", "hydra.nothing has no meaning here", "`--hydra-help`"),
    ("hydra.job.nothing=1", "hydra.job.nothing has no meaning here", "`--hydra-help`"),
    ("hydra.searchpath=conf", "'hydra.searchpath=conf' is not a list of places", ""),
    ("-m hydra.sweeper.max_batch_size=3 seed=1,2", "hydra.sweeper.max_batch_size=3 makes", "sweep.max_parallel=3"),
]


@habit("two of `--run`, `--multirun`, `--cfg`, `--info`")
@habit("`--shell-completion`, `-sc`")
@habit("`--experimental-rerun`")
@habit("several values without `-m`")
@habit("`hydra/launcher=NAME`, `hydra.launcher.*`")
@habit("`hydra.run.dir`, `hydra.sweep.dir`, `hydra.sweep.subdir`")
@habit("`hydra.output_subdir`")
@habit("`hydra.verbose`, `hydra.job_logging`, `hydra.hydra_logging`")
@habit("`hydra.callbacks`")
@habit("`hydra.job.chdir=true`")
@habit("`hydra.job.env_set`")
@habit("`hydra.job.env_copy`")
@habit("`hydra.runtime.*`, `hydra.job.num`, `hydra.job.id`, `hydra.overrides.*`")
@habit("`hydra.sweeper.max_batch_size=N`")
@pytest.mark.parametrize(("words", "message", "hint"), REFUSED)
def test_what_cannot_do_here_what_it_does_there_is_refused(words: str, message: str, hint: str, site: None) -> None:
    error = refusal(*words.split())
    assert error.message.startswith(message) and hint in error.hint
