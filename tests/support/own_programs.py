"""The examples that are part of their run by the session, and what each needs."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import pytest


@dataclass(frozen=True, slots=True)
class Program:
    """One of `examples/`.

    Args:
        name: of the file, without ".py".
        package: what it needs beside torch, "" for nothing.
        steps: how many it takes.
        save_every: steps between its saves.
    """

    name: str
    package: str = ""
    steps: int = 60
    save_every: int = 20

    def require(self) -> None:
        """Skips the test where the package is missing."""
        if self.package and importlib.util.find_spec(self.package) is None:
            pytest.skip(f"{self.package} is not installed (pip install {self.package})")

    def words(self, *, step_s: float) -> str:
        """Returns the word of the command line."""
        pace = f"--steps,{self.steps},--save-every,{self.save_every},--step-s,{step_s}"
        return f"script=[{self.name}.py,{pace}]"


PROGRAMS = [
    Program("session_ddp"),
    Program("session_transformers", "transformers"),
    Program("session_lightning", "lightning"),
    Program("session_accelerate", "accelerate"),
    Program("session_fsdp2"),
]
