"""Types command lines as a person would, in a folder, and reads what they print."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from slurm_train.rundir.paths import RunDirectory

REPOSITORY = Path(__file__).resolve().parents[2]

# A model and data that take a second, for tests of everything around them.
TINY = (
    "model._target_=tiny.Tiny",
    "data._target_=tiny.Numbers",
    "train.max_steps=12",
    "train.log_every_steps=1",
    "train.eval_every_steps=null",
    "checkpoint.every_steps=4",
    "batch.global_size=16",
    "train.sample_tokens=0",
)

TINY_MODULE = """
import os, time
import torch
from torch import nn
from torch.utils.data import Dataset

class Numbers(Dataset):
    def __init__(self, size: int = 256, split: str = "train", root: str | None = None):
        generator = torch.Generator().manual_seed(7 if split == "train" else 8)
        self.x = torch.randn(size, 8, generator=generator)
        self.y = self.x @ torch.arange(8.0).unsqueeze(1)
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        return self.x[index], self.y[index]

class Tiny(nn.Module):
    def __init__(self, step_s: float = 0.0):
        super().__init__()
        self.step_s = step_s
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    def forward(self, x):
        time.sleep(self.step_s)
        return self.layers(x)
"""

# Its width is a word of the command line, so that a save takes time.
WIDE_MODULE = f"""{TINY_MODULE}
class Tiny(nn.Module):
    def __init__(self, step_s: float = 0.0, width: int = 16):
        super().__init__()
        self.step_s = step_s
        self.layers = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, width), nn.Linear(width, 1))
    def forward(self, x):
        time.sleep(self.step_s)
        return self.layers(x)
"""


@dataclass(frozen=True, slots=True)
class Done:
    """A command line that has ended."""

    code: int
    out: str
    err: str

    @property
    def job_and_run(self) -> tuple[str, RunDirectory]:
        """What a submission prints on stdout: `<job id> <run directory>`."""
        assert self.code == 0, f"exit code {self.code}\n{self.out}\n{self.err}"
        job, path = self.out.split()
        return job, RunDirectory(Path(path))


@dataclass(frozen=True, slots=True)
class Person:
    """Somebody who types command lines in a folder.

    Args:
        folder: where they are.
        user: who they are; None: whoever runs the tests.
        python: the interpreter they type.
        path: where that interpreter finds the packages of the tests' own, if it is another one.
    """

    folder: Path
    user: str | None = None
    python: str = sys.executable
    path: str = ""

    def types(self, *words: str, timeout_s: float = 120.0, env: dict[str, str] | None = None) -> Done:
        """Runs `python -m slurm_train WORDS` to its end."""
        return self.runs(self.python, "-m", "slurm_train", *words, timeout_s=timeout_s, env=env)

    def runs(self, *argv: str, timeout_s: float = 120.0, env: dict[str, str] | None = None) -> Done:
        """Runs any command to its end."""
        command = list(argv) if self.user is None else ["runuser", "-u", self.user, "--", *argv]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment() | (env or {}),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def prepares(self, *words: str) -> RunDirectory:
        """Makes the directory of a run from inside any allocation; its job is held and cancelled."""
        plain = {name: value for name, value in self.environment().items() if not name.startswith("SLURM_")}
        command = [self.python, "-m", "slurm_train", *words, "cluster.sbatch.hold=true"]
        done = subprocess.run(command, cwd=self.folder, env=plain, capture_output=True, text=True, check=True)
        job, path = done.stdout.split()
        subprocess.run(["scancel", job], check=True)
        return RunDirectory(Path(path))

    def environment(self) -> dict[str, str]:
        """The caller's environment, with the package under test importable from anywhere."""
        # Without bytecode every process compiles the package again, which no installed one does.
        left_out = ("PYTEST", "PYTHONDONTWRITEBYTECODE")
        own = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        return own | {"PYTHONPATH": f"{REPOSITORY}:{self.path}".rstrip(":"), "NO_COLOR": "1"}


def somebody_else(folder: Path) -> Person | str:
    """Returns an unprivileged person in a folder of theirs, or why there can be none.

    The tests' own interpreter may lie where only root gets to; then the system's takes its place, with the same
    packages, if it is of the same version. The checkout must be open to others.
    """
    project = new_project(folder)
    for path in (project, *project.iterdir()):
        shutil.chown(path, "nobody")
    for python, path in ((sys.executable, ""), ("/usr/bin/python3", sysconfig.get_path("purelib"))):
        person = Person(project, user="nobody", python=python, path=path)
        done = person.runs(python, "-c", "import sys, torch, slurm_train; print(sys.version_info[:2])")
        if done.code == 0 and done.out.strip() == str(sys.version_info[:2]):
            return person
    return f"no Python with torch that nobody may run, or {REPOSITORY} is closed to others"


def write(folder: Path, files: dict[str, str]) -> str:
    """Writes files by their paths in a folder, and returns the folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return str(folder)


def new_project(folder: Path) -> Path:
    """Makes a folder with the tiny model and data in it and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.py").write_text(TINY_MODULE)
    return folder
