"""The wheel that `make dist` builds is enough: installed in an empty environment it plans, trains and reports.

With dependencies from the registry that takes minutes, so it is tried by `make test-returns`; planning is tried always.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[1]
SETTINGS = ("run.processes=1", "train.max_steps=2", "train.compile=false", "model.width=16", "model.num_layers=1")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built by the command of the Makefile."""
    folder = tmp_path_factory.mktemp("dist")
    recipe = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    assert "$(PIP) wheel --no-deps --wheel-dir dist ." in recipe
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(REPOSITORY))
    (path,) = folder.glob("*.whl")
    return path


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def empty_environment(folder: Path) -> Path:
    """Returns the Python of a new virtual environment that has no packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin" / "python"


def lend_dependencies(python: Path) -> None:
    """Lets an environment import what this one has installed; the checkout, which a .pth file brings, stays out."""
    site_packages = next((python.parents[1] / "lib").glob("python*/site-packages"))
    (site_packages / "lent.pth").write_text(f"{sysconfig.get_path('purelib')}\n")


def lend_requirements(python: Path) -> None:
    """Links what the wheel in an environment requires, directly or through others, from this one into it."""
    site_packages = next((python.parents[1] / "lib").glob("python*/site-packages"))
    (installed,) = metadata.distributions(name="slurm-train", path=[str(site_packages)])
    lent = {"slurm-train"}
    pending = [installed]
    while pending:
        for text in pending.pop().requires or ():
            requirement = Requirement(text)
            is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if not is_needed or requirement.name in lent:
                continue
            lent.add(requirement.name)
            distribution = metadata.distribution(requirement.name)
            pending.append(distribution)
            for file in distribution.files or ():
                target = site_packages / file
                if ".." not in file.parts and not target.exists():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.symlink_to(str(distribution.locate_file(file)))


def run_in(folder: Path, python: Path, *words: str) -> str:
    """Runs a program of an environment in a folder without a checkout, and returns what it prints to stdout."""
    environment = {"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def plan_there(python: Path, folder: Path) -> None:
    """Plans a run with the package of the environment, which needs its configurations and templates."""
    place = run_in(folder, python, "python", "-c", "import slurm_train; print(slurm_train.__file__)")
    assert Path(place.strip()).is_relative_to(python.parents[1])
    plan = json.loads(run_in(folder, python, "slurm-train", "plan", "--json", "+cluster=2x4"))
    assert plan["world"]["size"] == 8
    assert "#SBATCH --nodes=2" in plan["script"]


def train_there(python: Path, folder: Path) -> None:
    """Trains two steps and writes a report, which needs its page."""
    run_in(folder, python, "slurm-train", *SETTINGS)
    (result,) = folder.glob("runs/*/*/result.json")
    assert json.loads(result.read_text())["step"] == 2
    run_in(folder, python, "slurm-train", "report")
    assert (result.parent / "report.html").stat().st_size > 10_000


def test_the_wheel_plans_where_only_its_dependencies_are_installed(wheel: Path, tmp_path: Path) -> None:
    python = empty_environment(tmp_path / "environment")
    lend_dependencies(python)
    _pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    plan_there(python, tmp_path)


@pytest.mark.campaign
def test_the_wheel_trains_with_nothing_but_what_it_requires(wheel: Path, tmp_path: Path) -> None:
    """The tests reach no network, so what pip would install is taken from this environment."""
    python = empty_environment(tmp_path / "environment")
    _pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    lend_requirements(python)
    plan_there(python, tmp_path)
    train_there(python, tmp_path)
