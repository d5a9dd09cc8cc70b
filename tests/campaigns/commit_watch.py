"""Watches the checkpoints of runs as any reader could: which were seen under which attempt's name, for how long."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import replace
from types import TracebackType

from slurm_train.checkpoint.directory import read_manifest
from slurm_train.errors import CheckpointError
from slurm_train.rundir.layout import RunDirectory, list_checkpoints, name_of
from tests.campaigns.split_brain_trials import Commit

_EVERY_S = 0.05


class CommitWatch:
    """Looks many times a second, until it is left."""

    def __init__(self) -> None:
        self._runs: list[RunDirectory] = []
        self._seen: dict[str, tuple[Commit, float]] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def add(self, run: RunDirectory) -> None:
        """Watches this run, too."""
        self._runs.append(run)

    def commits(self, run: RunDirectory) -> list[Commit]:
        """Returns what was seen of a run, oldest first."""
        seen = [commit for path, (commit, _) in list(self._seen.items()) if path.startswith(f"{run.checkpoints}/")]
        return sorted(seen, key=lambda commit: commit.time_unix_s)

    def look(self) -> None:
        """Looks once."""
        for run in list(self._runs):
            for path in list_checkpoints(run.checkpoints):
                with suppress(OSError, CheckpointError):
                    # A rename changes it: when the directory got its name.
                    named_unix_s = path.stat().st_ctime
                    read_manifest(path)
                    key, now = str(path), time.monotonic()
                    if key not in self._seen:
                        attempt = name_of(path).attempt
                        commit = Commit(name=path.name, attempt=attempt, time_unix_s=named_unix_s, seen_for_s=0.0)
                        self._seen[key] = (commit, now)
                    commit, first = self._seen[key]
                    self._seen[key] = (replace(commit, seen_for_s=now - first), first)

    def _watch(self) -> None:
        while not self._done.wait(_EVERY_S):
            self.look()

    def __enter__(self) -> CommitWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
