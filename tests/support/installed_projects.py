"""Small packages that are really installed in editable mode, by several build backends and in several layouts."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.command_line import write

_PACKAGE = 'from {name}._version import BUILT\nVERSION = "old"\n'
_PROJECT = '[project]\nname = "{name}"\nversion = "0.1"\n'
_SETUPTOOLS = '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
_HATCH = '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
_PDM = '[build-system]\nrequires = ["pdm-backend"]\nbuild-backend = "pdm.backend"\n'
_FLIT = '[build-system]\nrequires = ["flit-core"]\nbuild-backend = "flit_core.buildapi"\n'


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to lay out a project of one package."""

    name: str
    """Of the project and of its package."""
    build: str
    """What pyproject.toml says beside name and version."""
    folder: str
    """Where the package lies in the project."""
    more: dict[str, str] = field(default_factory=dict)
    """Further files of the project."""
    options: tuple[str, ...] = ()
    """For pip."""

    def write(self, parent: Path) -> Path:
        """Writes the project into a folder of its own, as a git repository that ignores what the build makes."""
        project = parent / self.name
        files = {
            f"{self.folder}/__init__.py": _PACKAGE.format(name=self.name),
            f"{self.folder}/_version.py": "BUILT = 1\n",
            ".gitignore": "_version.py\n*.egg-info/\nbuild/\n__pycache__/\n",
            "pyproject.toml": self.build + _PROJECT.format(name=self.name) + self.more.get("pyproject.toml", ""),
            **{name: text for name, text in self.more.items() if name != "pyproject.toml"},
        }
        write(project, files)
        subprocess.run(["git", "init", "-q", str(project)], check=True)
        return project

    def edit(self, project: Path) -> None:
        """Changes the package's source."""
        init = project / self.folder / "__init__.py"
        init.write_text(init.read_text().replace("old", "new"))


LAYOUTS = (
    Layout("st_src", _SETUPTOOLS, "src/st_src"),
    # Two packages side by side make setuptools write a finder instead of a .pth file.
    Layout(
        "st_flat",
        _SETUPTOOLS,
        "st_flat",
        {"pyproject.toml": '[tool.setuptools]\npackages = ["st_flat", "beside"]\n', "beside/__init__.py": ""},
    ),
    Layout(
        "st_renamed",
        _SETUPTOOLS,
        "lib",
        {"pyproject.toml": '[tool.setuptools]\npackages = ["st_renamed"]\npackage-dir = {st_renamed = "lib"}\n'},
    ),
    Layout("st_compat", _SETUPTOOLS, "src/st_compat", options=("--config-settings=editable_mode=compat",)),
    Layout(
        "hatch_src",
        _HATCH,
        "src/hatch_src",
        {"pyproject.toml": '[tool.hatch.build.targets.wheel]\npackages = ["src/hatch_src"]\n'},
    ),
    Layout("hatch_flat", _HATCH, "hatch_flat"),
    Layout("pdm_src", _PDM, "src/pdm_src"),
    Layout("flit_src", _FLIT, "src/flit_src", {"pyproject.toml": 'description = "x"\n'}),
)


def make_venv(folder: Path) -> Path:
    """Makes a virtual environment that sees the packages of this one and returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "outer.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return folder / "bin" / "python"


def install_editable(python: Path, projects: Sequence[Path], *options: str) -> None:
    """Installs projects in editable mode, without a network: their build backends are installed here."""
    command = [sys.executable, "-m", "pip", f"--python={python}", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-build-isolation", *options]
    command += [word for project in projects for word in ("--editable", str(project))]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
