"""A person at a command line, in the same process: fast enough for tables."""

from __future__ import annotations

import functools
import gc
import os
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slurm_train.cli import preview
from slurm_train.code.job_python import python_notes
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.sweep import SweepDirectory
from slurm_train.verbs import run as run_words
from tests.fakes.slurm_programs import SlurmPrograms
from tests.support.command_line import Done
from tests.support.run_facts import RunFacts
from tests.support.shipped_files import compose_once


@dataclass(slots=True)
class Shell:
    """Types command lines in a folder and reads what they print."""

    folder: Path
    slurm: SlurmPrograms
    capture: pytest.CaptureFixture[str]
    patch: pytest.MonkeyPatch

    def types(self, *words: str) -> Done:
        """Runs a command line to its end in this process: its words, or all of it as one text."""
        self.capture.readouterr()
        try:
            code = run_words(shlex.split(words[0]) if len(words) == 1 else words)
        except SystemExit as err:
            code = err.code if isinstance(err.code, int) else 1
        captured = self.capture.readouterr()
        return Done(code, captured.out, captured.err)

    def refuses(self, text: str, *words: str) -> str:
        """Returns stderr of a command line that is wrong use, says why with this text, and prints no data."""
        done = self.types(*words)
        assert (done.code, done.out) == (2, "") and text in done.err, done
        return done.err

    def submits(self, *words: str) -> RunDirectory:
        """Returns the run that a command line submits."""
        return self.types(*words).job_and_run[1]

    def submits_sweep(self, *words: str) -> SweepDirectory:
        """Returns the sweep that a command line submits."""
        return SweepDirectory(self.submits(*words).path)

    def leaves_slurm(self) -> None:
        """Takes Slurm's commands off the PATH; git stays."""
        bare = self.slurm.folder.with_name("bare")
        bare.mkdir()
        for name in ("git", "sh", "env"):
            (bare / name).symlink_to(str(shutil.which(name)))
        self.patch.setenv("PATH", str(bare))

    def left(self) -> list[str]:
        """Returns everything that lies in the folder now."""
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))

    def has_run(self, name: str = "gpt-stdlib", run_id: str = "3f9a1c07", **facts: Any) -> RunDirectory:
        """Puts a run on disk, see `RunFacts`."""
        return RunFacts(**facts).write(RunDirectory(self.folder / "runs" / name / run_id))


@pytest.fixture(autouse=True)
def _garbage_is_still_collected() -> Iterator[None]:
    """Short-lived commands switch the collector off; the tests live on."""
    yield
    gc.enable()


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """A person in an empty folder, with Slurm's commands at hand."""
    folder = tmp_path / "project"
    folder.mkdir()
    slurm = SlurmPrograms(tmp_path / "slurm" / "bin")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", slurm.path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    compose_once(monkeypatch)
    # Of a Python below /tmp it would say that other nodes do not have it.
    monkeypatch.setattr(preview, "python_notes", functools.partial(python_notes, prefix="/home/me/.venv"))
    for name in [name for name in os.environ if name.startswith("CUDA_")]:
        monkeypatch.delenv(name)
    return Shell(folder, slurm, capsys, monkeypatch)
