"""Variables of the shell that a job will not have are named before it is submitted, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurm_train.config.schema import RunConfig, build_config
from slurm_train.errors import ConfigError
from slurm_train.plan.shell_variables import (
    refuse_unexpanded,
    unexpanded_notes,
    unexported_notes,
    unexported_variables,
)
from tests.support.refusals import refusal

SHELL = {
    "MY_LR": "3e-4",
    "VSC_SCRATCH": "/scratch",
    "OPENAI_API_KEY": "k",
    "PATH": "/bin",
    "WANDB_MODE": "offline",
    "DISPLAY": ":0",
    "EDITOR": "vi",
    "HOSTNAME": "login1",
    "CUDA_VISIBLE_DEVICES": "",
    "SLURM_TMPDIR": "/tmp/7",
    "RANK": "0",
}


def config_of(script: list[str] | None, **sections: Any) -> RunConfig:
    return build_config(RunConfig, {"cluster": {}, "script": script, **sections})


def read_in(folder: Path, script: list[str] | None, **sections: Any) -> dict[str, str]:
    return unexported_variables(config_of(script, **sections), cwd=folder, env=SHELL, paths=[])


READS = [
    'os.environ["MY_LR"]',
    'float(os.environ.get("MY_LR", "1e-3"))',
    'os.getenv("MY_LR")',
    'lr = 3 if "MY_LR" in os.environ else 1',
    'environ["MY_LR"]',
    'os.environ.pop("MY_LR", None)',
    'os.environ.setdefault("MY_LR", "1e-3")',
    'KEY = "MY_LR"\nos.environ[KEY]',
    'env = os.environ.copy()\nenv["MY_LR"]',
    'env = dict(os.environ)\nenv.get("MY_LR")',
    'parser.add_argument("--lr", default=os.environ.get("MY_LR"))',
    '@click.option("--lr", envvar="MY_LR")\ndef main(lr): ...',
    '@click.option("--lr", envvar=["LR", "MY_LR"])\ndef main(lr): ...',
    'from environs import Env\nenv = Env()\nenv.float("MY_LR")',
    'from decouple import config\nconfig("MY_LR", cast=float)',
    'os.path.expandvars("$MY_LR/x")',
    'def main():\n    if "MY_LR" not in os.environ:\n        os.environ["MY_LR"] = "1e-3"',
]


@pytest.mark.parametrize("source", READS)
def test_what_a_program_reads_from_its_environment_is_found(source: str, tmp_path: Path) -> None:
    (tmp_path / "lr.py").write_text(f"import os\nfrom os import environ\n{source}\n")
    assert read_in(tmp_path, ["lr.py"]) == {"MY_LR": "lr.py"}


HEALTHY = [
    # It travels, or the job has one of its own.
    'os.environ["PATH"], os.environ.get("WANDB_MODE"), os.environ["RANK"], os.getenv("SLURM_TMPDIR")',
    # Of this terminal and this machine alone.
    'os.environ.get("DISPLAY"), os.environ.get("EDITOR"), os.environ["HOSTNAME"]',
    # Slurm names a job's GPUs.
    'os.environ["CUDA_VISIBLE_DEVICES"]',
    # This shell has none: the program's default is meant here, too.
    'os.environ.get("NOT_SET", "1e-3")',
    # It sets it itself.
    'os.environ["MY_LR"] = "1e-3"\nprint(os.environ["MY_LR"])',
    # No environment at all.
    'settings = {"MY_LR": 1}\nprint(settings["MY_LR"], settings.get("MY_LR"), "MY_LR" in settings)',
    'print("MY_LR")',
    "def f(:",
]


@pytest.mark.parametrize("source", HEALTHY)
def test_nothing_is_said_of_a_program_that_has_all_it_reads(source: str, tmp_path: Path) -> None:
    (tmp_path / "lr.py").write_text(f"import os\n{source}\n")
    assert read_in(tmp_path, ["lr.py"]) == {}


def test_the_files_that_a_program_starts_imports_and_configures_itself_by_are_read(tmp_path: Path) -> None:
    files = {
        "run.sh": '#!/bin/bash\n# $EDITOR\nexport OUT=$VSC_SCRATCH\nexec python pkg/train.py "$@"\n',
        "pkg/__init__.py": "",
        "pkg/train.py": 'import os\nfrom pkg import paths\nimport hydra\nhydra.main(config_path="../conf")\n',
        "pkg/paths.py": 'import os\nfrom .deep import x\nROOT = os.environ["MY_LR"]\n',
        "pkg/deep/x.py": "",
        "conf/trainer/a.yaml": "key: ${oc.env:OPENAI_API_KEY}\n",
        "other.py": 'import os\nos.environ["VSC_SCRATCH"]\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    by_shell = {"VSC_SCRATCH": "run.sh"}
    by_python = {"MY_LR": "pkg/paths.py", "OPENAI_API_KEY": "conf/trainer/a.yaml"}
    assert read_in(tmp_path, ["run.sh"]) == by_shell | by_python
    assert read_in(tmp_path, ["bash", "run.sh", "--flag"]) == by_shell | by_python
    assert read_in(tmp_path, ["pkg/train.py"]) == by_python
    assert read_in(tmp_path, ["-m", "pkg.train"]) == by_python
    assert read_in(tmp_path, ["uv", "run", "pkg/train.py"]) == by_python
    assert read_in(tmp_path, ["bash", "-c", "python pkg/train.py --lr $MY_LR"])["MY_LR"] == "bash"
    assert read_in(tmp_path, None, task={"_target_": "pkg.paths.run"}) == {"MY_LR": "pkg/paths.py"}
    assert read_in(tmp_path, None, data={"_target_": "slurm_train.data.stdlib.build"}) == {}


@pytest.mark.parametrize(
    "text",
    ["MY_LR=1\necho $MY_LR\n", "for MY_LR in 1 2; do echo $MY_LR; done\n", "read MY_LR\necho $MY_LR\n", "# $MY_LR\n"],
)
def test_a_shell_that_sets_a_variable_first_does_not_read_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(text)
    assert read_in(tmp_path, ["run.sh"]) == {}
    (tmp_path / "run.sh").write_text("MY_LR=${MY_LR:-1e-3}\n")
    assert read_in(tmp_path, ["run.sh"]) == {"MY_LR": "run.sh"}


@pytest.mark.parametrize(
    "sections",
    [
        {"cluster": {"export": ["MY_*"]}},
        {"cluster": {"env": {"MY_LR": "1"}}},
        {"cluster": {"setup": ["export MY_LR=1"]}},
        # What a login shell sets on the node is not known here.
        {"cluster": {"setup": ["source /etc/profile"]}},
        {"cluster": {"sbatch": {"get-user-env": True}}},
        # salloc and srun hand on all of this shell.
        {"launch": "interactive"},
        # Here the program has all of it.
        {"cluster": None},
    ],
)
def test_a_variable_that_the_job_has_is_not_named(sections: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "lr.py").write_text('import os\nos.environ["MY_LR"]\n')
    assert read_in(tmp_path, ["lr.py"], **sections) == {}


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["MY_LRR"], "did you mean MY_LR?"),
        (["my_lr"], "did you mean MY_LR?"),
        (["ELSEWHERE", "NOWHERE"], "this shell has no ELSEWHERE, NOWHERE"),
        (["SLURM_TMPDIR"], "each job has its own SLURM_TMPDIR"),
        (["MY_LR", "NO_*", "*"], ""),
    ],
)
def test_a_name_in_export_that_exports_nothing_is_answered(names: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "lr.py").touch()
    config = config_of(["lr.py"], cluster={"export": names})
    notes = unexported_notes(config, cwd=tmp_path, env=SHELL)
    assert [words in note for note in notes] == ([True] if words else [])


def test_the_note_has_the_words_that_export(tmp_path: Path) -> None:
    (tmp_path / "lr.py").write_text('import os\nos.environ["MY_LR"], os.environ["OPENAI_API_KEY"]\n')
    config = config_of(["lr.py"], cluster={"export": ["VSC_SCRATCH", "MY_LRR"]})
    note = unexported_notes(config, cwd=tmp_path, env=SHELL)[-1]
    assert note.endswith("cluster.export=[VSC_SCRATCH,MY_LR,OPENAI_API_KEY]")
    followed = config_of(["lr.py"], cluster={"export": ["VSC_SCRATCH", "MY_LR", "OPENAI_API_KEY"]})
    assert unexported_notes(followed, cwd=tmp_path, env=SHELL) == []


# --- $NAME in words ---


def notes_of(folder: Path, script: list[str] | None, **sections: Any) -> list[str]:
    return unexpanded_notes(config_of(script, **sections), cwd=folder)


@pytest.mark.parametrize(
    ("script", "sections", "says"),
    [
        (["a.py", "--data", "$SLURM_TMPDIR/x"], {}, 'os.environ["SLURM_TMPDIR"]'),
        (["a.py", "--data=${SLURM_TMPDIR}/x"], {}, 'os.environ["SLURM_TMPDIR"]'),
        (["a.py", "--out", "$SCRATCH"], {}, 'os.environ["SCRATCH"]'),
        (["a.py", "--data", "~/x"], {}, "$HOME"),
        (["bash", "run.sh", "$TMPDIR/x"], {}, 'os.environ["TMPDIR"]'),
        (None, {"task": {"_target_": "a.run", "folder": "$LOCAL/x"}}, 'os.environ["LOCAL"]'),
        (None, {"data": {"_target_": "a.Data", "files": [{"path": "$LOCAL/x"}]}}, 'os.environ["LOCAL"]'),
        (["a.py"], {"cluster": {"env": {"DATA": "$SLURM_TMPDIR/x"}}}, '"export DATA=$SLURM_TMPDIR/x"'),
        (["a.py"], {"cluster": {"env": {"LIBS": "/opt/lib:$LIBS"}}}, "cluster.setup"),
        (["a.py"], {"cluster": {"sbatch": {"bb": "$SCRATCH/x"}}}, "double"),
    ],
)
def test_a_variable_that_arrives_as_characters_is_named(
    script: list[str] | None, sections: dict[str, Any], says: str, tmp_path: Path
) -> None:
    (tmp_path / "a.py").write_text("import os\n")
    (note,) = notes_of(tmp_path, script, **sections)
    assert says in note


@pytest.mark.parametrize(
    ("script", "source"),
    [
        (["a.py", "--data", "$TMPDIR/x"], "import os\nos.path.expandvars(x)"),
        (["a.py", "--data", "~/x"], "Path(x).expanduser()"),
        (["bash", "-c", "python a.py --data $TMPDIR/x"], ""),
        # Patterns, prices and templates.
        (["a.py", "--grep", "end$", "--price", "$5", "--text", "$name", "--cost", "a$B"], ""),
        (["a.py", "--near", "x~/y", "--version", "~=1.2"], ""),
    ],
)
def test_words_that_are_expanded_or_hold_no_path_are_not_named(script: list[str], source: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(source)
    assert notes_of(tmp_path, script) == []


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("run.root", "$SCRATCH/runs", "this shell has no SCRATCH"),
        ("run.root", "$VSC_SCRATCH/runs", '("run.root=$VSC_SCRATCH/..." in double quotes)'),
        ("train.init_from", "${VSC_SCRATCH}/w", "double quotes"),
        ("data.path", "$SLURM_NODE_DISK/books", "#data-on-the-nodes-own-disks"),
        ("model.path", "$scratch/llama", "this shell has no scratch"),
    ],
)
def test_a_path_that_is_read_here_is_refused_with_what_to_do(key: str, value: str, hint: str) -> None:
    section, name = key.split(".")
    target = {"data": "slurm_train.data.text.build", "model": "slurm_train.models.causal_lm.causal_lm"}.get(section)
    config = build_config(RunConfig, {section: {name: value, **({"_target_": target} if target else {})}})
    error = refusal(ConfigError, refuse_unexpanded, config, SHELL)
    assert error.message == f"{key}={value} begins with a variable that was not expanded"
    assert hint in error.hint
