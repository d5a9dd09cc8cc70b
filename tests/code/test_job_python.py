"""Environments of Python and what becomes of them in a job: what is found there, and what is refused before."""

from __future__ import annotations

import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path
from typing import Any

import pytest

import slurm_train
from slurm_train.code.job_python import (
    Mounts,
    gone_python,
    is_in_container,
    python_notes,
    require_lasting_python,
    with_absolute_python_path,
)
from slurm_train.config.schema import RunConfig, build_config
from slurm_train.errors import ConfigError
from slurm_train.slurm.job_variables import exported
from tests.support.refusals import refusal

OVERLAY = "/home/ada/.cache/uv/builds-v0/.tmpk6HTqn/bin/python"
PREFIX = "/home/ada/project/.venv"


def config_of(**cluster: Any) -> RunConfig:
    return build_config(RunConfig, {"cluster": {"nodes": 1, "gpus_per_node": 1, **cluster}})


def test_an_environment_that_ends_with_the_command_is_refused() -> None:
    message = refusal(ConfigError, require_lasting_python, config_of(), python=OVERLAY).message
    assert message == f"{OVERLAY} is gone when `uv run` ends, before a job starts"
    require_lasting_python(config_of(python="/apps/python3"), python=OVERLAY)
    require_lasting_python(RunConfig(), python=OVERLAY)
    # Environments of uv that stay: of a project, of a script, of a tool.
    for place in ("project/.venv", ".cache/uv/environments-v2/s-0b1d24c2", ".cache/uv/archive-v0/1ttDFuA4IncPp"):
        require_lasting_python(config_of(), python=f"/home/ada/{place}/bin/python")


def test_a_package_that_only_the_folder_finds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without the import hooks of editable installs, and of pytest.
    monkeypatch.setattr(sys, "meta_path", [BuiltinImporter, FrozenImporter, PathFinder, object()])
    clone = Path(slurm_train.__file__).parents[1]
    error = refusal(ConfigError, require_lasting_python, config_of(), paths=["/usr/lib/python3.11"])
    assert error.message.startswith(f"slurm_train is imported from the folder that this is typed in ({clone})")
    assert f"`export PYTHONPATH={clone}`" in error.hint
    require_lasting_python(config_of(), paths=[str(clone)])
    require_lasting_python(config_of(python="/apps/python3"), paths=[])


ACTIVATIONS = {
    "source other/bin/activate": "/home/ada/project/other/bin/python",
    "module load gcc && . /apps/venv/bin/activate": "/apps/venv/bin/python",
    "source '/apps/venv/bin/activate'": "/apps/venv/bin/python",
    'eval "$(conda shell.bash hook)"; conda activate torch': "PATH_OF_ITS_ENVIRONMENT/bin/python",
    "conda activate /envs/torch": "/envs/torch/bin/python",
    "source activate torch": "PATH_OF_ITS_ENVIRONMENT/bin/python",
    "micromamba activate torch": "PATH_OF_ITS_ENVIRONMENT/bin/python",
    # The one that submits, and what only the job knows.
    "source .venv/bin/activate": "",
    f"source {PREFIX}/bin/activate": "",
    "conda activate .venv": "",
    "conda activate base": "",
    "source $PLACE/bin/activate": "",
    "echo activate it": "",
    "module load cuda": "",
}


@pytest.mark.parametrize("line", ACTIVATIONS)
def test_another_environment_than_that_of_the_ranks_is_named(line: str) -> None:
    notes = python_notes(config_of(setup=[line]), Path("/home/ada/project"), env={}, prefix=PREFIX)
    assert [note.rpartition("cluster.python=")[2] for note in notes] == [ACTIVATIONS[line]] * bool(ACTIVATIONS[line])
    assert python_notes(config_of(setup=[line], python="python3"), Path("/"), env={}, prefix=PREFIX) == []


def test_a_python_that_the_nodes_may_not_have_is_named() -> None:
    (note,) = python_notes(config_of(), Path("/home/ada"), env={}, prefix="/dev/shm/venv")
    assert note.startswith("the ranks run /dev/shm/venv/bin/python, and /dev/shm/ is mostly a machine's own")
    assert python_notes(config_of(), Path("/home/ada"), env={}, prefix=PREFIX) == []


OF_MACHINE = "22 1 254:0 / / rw - ext4 /dev/vda rw\n40 22 0:35 / /home rw - nfs4 server:/home rw\n"
# What is mounted in a container, besides what the machine has.
OWN = {
    "the machine": "",
    "an image": "90 1 0:77 / / rw - overlay overlay rw\n40 90 0:35 / /home rw - nfs4 server:/home rw\n",
    "an environment in an image file": "91 22 0:78 / /home/ada/env ro - squashfs /dev/loop0 ro\n",
    "a home that is bound": "92 22 0:35 /ada /home/ada rw - nfs4 server:/home rw\n",
    "a folder of its own for temporary files": "93 22 0:90 / /tmp rw - tmpfs tmpfs rw\n",
}


@pytest.mark.parametrize(
    ("own", "python", "is_inside"),
    [
        ("the machine", "/usr/bin/python3", False),
        ("an image", "/usr/bin/python3", True),
        ("an image", "/home/ada/conda/bin/python", False),
        ("an environment in an image file", "/home/ada/env/bin/python", True),
        ("an environment in an image file", "/home/ada/other/bin/python", False),
        ("a home that is bound", "/home/ada/env/bin/python", False),
        ("a folder of its own for temporary files", "/usr/bin/python3", False),
    ],
)
def test_a_python_of_a_container_is_told_from_one_that_a_job_finds(own: str, python: str, is_inside: bool) -> None:
    mounts = Mounts(own=OF_MACHINE + OWN[own], of_machine=OF_MACHINE)
    variables = {"APPTAINER_CONTAINER": "/image.sif"}
    assert is_in_container(variables, python=python, mounts=mounts) == is_inside
    # A path in a container that nothing can be compared with is believed to be its own.
    assert is_in_container(variables, python=python, mounts=Mounts(own="", of_machine=""))
    assert not is_in_container({}, python=python, mounts=Mounts(own="", of_machine=""))


def test_the_program_that_enters_a_container_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = tmp_path / "python"
    wrapper.write_text("#!/bin/sh\nexec enter python\n")
    inside = f"91 1 0:78 / {Path(sys.executable).parent} ro - squashfs none ro\n"
    monkeypatch.setattr(Mounts, "read", lambda: Mounts(own=OF_MACHINE + inside, of_machine=OF_MACHINE))

    def notes(path: Path, **cluster: Any) -> list[str]:
        env = {"PATH": f"{Path(sys.executable).parent}:{path}"}
        return [note for note in python_notes(config_of(**cluster), Path("/"), env=env) if "container" in note]

    assert [note.rpartition("=")[2] for note in notes(tmp_path)] == [str(wrapper)]
    assert [note.rpartition("=")[2] for note in notes(tmp_path / "none")] == ["PATH_OF_THE_WRAPPER"]
    assert notes(tmp_path, python=str(wrapper)) == []


def test_the_python_of_a_job_that_is_not_there_any_more(tmp_path: Path) -> None:
    python = f"{tmp_path}/my env/bin/python"
    assert gone_python(config_of(), python) == python
    assert gone_python(config_of(python=python), python) == "", "the nodes may have it"
    (tmp_path / "my env" / "bin").mkdir(parents=True)
    (tmp_path / "my env" / "bin" / "python").touch()
    assert gone_python(config_of(), python) == gone_python(config_of(), "") == ""


def test_what_environments_and_modules_set_travels() -> None:
    names = ("VIRTUAL_ENV", "CONDA_PREFIX", "UV_CACHE_DIR", "PIXI_PROJECT_ROOT", "LOADEDMODULES", "__MODULES_LMTAG")
    names += ("GUIX_PYTHONPATH", "NIX_PYTHONPATH", "ROCM_PATH")
    env = dict.fromkeys((*names, "BASH_FUNC_module%%", "LD_LIBRARY_PATH", "MODULEPATH"), "/x")
    assert exported({**env, "UV_PUBLISH_TOKEN": "x", "EDITOR": "vi"}) == {*env}


def test_a_relative_python_path_means_the_same_in_a_job() -> None:
    env = with_absolute_python_path({"PYTHONPATH": "src:../lib::/abs", "A": "1"}, Path("/home/ada"))
    assert env == {"PYTHONPATH": "/home/ada/src:/home/ada/../lib:/abs", "A": "1"}
    assert with_absolute_python_path({"A": "1"}, Path("/")) == {"A": "1"}


def test_a_chosen_python_is_tried_before_the_queue(tmp_path: Path) -> None:
    def notes(python: str, **variables: str) -> list[str]:
        env = {"PATH": "/usr/bin:/bin", **variables}
        return python_notes(config_of(python=python), Path("/"), env=env, prefix=PREFIX)

    for package in ("slurm_train", "torch"):
        (tmp_path / "packages" / package).mkdir(parents=True)
        (tmp_path / "packages" / package / "__init__.py").touch()
    assert notes(sys.executable, PYTHONPATH=str(tmp_path / "packages")) == []
    # Found by the PATH of the nodes, after `cluster.setup`.
    assert notes("python3.99") == []
    (absent,) = notes(str(tmp_path / "python"))
    assert "is not on this machine" in absent
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'libpython3.12.so.1.0: cannot open' >&2\nexit 127\n")
    broken.chmod(0o755)
    (does_not_work,) = notes(str(broken))
    assert does_not_work.endswith("does not work on this machine: libpython3.12.so.1.0: cannot open")
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    (lacks,) = notes(str(bare))
    assert "has no slurm_train and torch on this machine" in lacks
