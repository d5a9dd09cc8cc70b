"""Checkpoints that this version or node cannot read, among whole and damaged ones, in attempts that save and prune.

Each trial makes checkpoints of several attempts, lets one or two of them be of another version or unreadable, and
damages others. An attempt either stops, where what is newest is not understood, and then nothing has changed; or it
goes on from what is newest, saves and prunes. At the end each that was not understood is there, with the bytes it had.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from slurm_train.checkpoint.commit import Place
from slurm_train.checkpoint.manifest import FORMAT_VERSION
from slurm_train.checkpoint.verify import verify
from slurm_train.errors import CheckpointError, UnknownCheckpointError
from slurm_train.rundir.paths import list_checkpoints, name_of
from tests.campaigns.record import Tally
from tests.support.small_checkpoints import make_checkpoint, make_header, stage
from tests.support.unknown_checkpoints import UNREADABLE, rewrite_manifest, unreadable, use_newer_torch

_REWRITTEN: dict[str, Callable[[Path], None]] = {
    "a newer format version": lambda path: rewrite_manifest(path, format_version=FORMAT_VERSION + 1),
    "a newer format version with a key": lambda path: rewrite_manifest(
        path, format_version=FORMAT_VERSION + 1, compression="zstd", written_by_version="9.0"
    ),
    "one key more": lambda path: rewrite_manifest(path, compression="none"),
    "records with one key more": lambda path: rewrite_manifest(
        path, format_version=FORMAT_VERSION + 7, files={"all.pack": {"bytes": 1, "xxh3_128": "0" * 32, "parts": 3}}
    ),
    "a class of a newer torch": use_newer_torch,
}


class _Trial:
    """Checkpoints of one run, some of which are not understood."""

    def __init__(self, root: Path, dice: random.Random) -> None:
        self.root = root
        self.dice = dice
        self.kinds: list[str] = []
        self.unknown: dict[str, dict[str, bytes]] = {}
        """Content of each that is not understood, by save id."""
        self.refusals = contextlib.ExitStack()

    def live(self) -> str:
        """Returns how it ended: "stopped" or "went on"."""
        paths = [make_checkpoint(self.root, step, attempt=step % 2) for step in range(1, self.dice.randint(3, 7))]
        self._make_unknown(paths)
        with self.refusals:
            place = Place(root=self.root, attempt=2, keep=self.dice.randint(1, 2))
            before = sorted(self.root.iterdir())
            try:
                search = place.claim()
            except UnknownCheckpointError:
                assert sorted(self.root.iterdir()) == before, "an attempt that stops has renamed something"
                return "stopped"
            newest = 0 if search.newest is None else search.newest[1].step
            for step in range(newest + 1, newest + 5):
                place.prune(place.commit(*stage(self.root, make_header(step, attempt=2), staging=place.begin(step))))
        return "went on"

    def _make_unknown(self, paths: list[Path]) -> None:
        for path in self.dice.sample(paths, self.dice.randint(1, 2)):
            kind = self.dice.choice([*_REWRITTEN, *map(str, UNREADABLE)])
            if kind == "a class of a newer torch" and path != paths[-1]:
                # Of an older one the description is not read, so it is pruned as any other.
                kind = "one key more"
            self.kinds.append(f"error {kind} when it is read" if kind.isdigit() else kind)
            if kind in _REWRITTEN:
                _REWRITTEN[kind](path)
            if path != paths[-1] and self.dice.random() < 0.2:
                path = path.rename(path.with_name(f"passed_over_{path.name}"))
            self.unknown[path.name[-8:]] = {file.name: file.read_bytes() for file in path.iterdir()}
            if kind not in _REWRITTEN:
                self.refusals.enter_context(unreadable(path, int(kind)))
        for path in paths:
            if path.exists() and path.name[-8:] not in self.unknown and self.dice.random() < 0.2:
                (path / "__1_0.distcp").write_bytes(b"short")

    def problems(self) -> list[str]:
        """Returns what has become of those that were not understood."""
        there = {path.name[-8:]: path for path in self.root.glob("*checkpoint_*") if not path.name.startswith(".")}
        problems = []
        for save_id, content in self.unknown.items():
            if save_id not in there:
                problems.append(f"{save_id} is gone")
            elif {file.name: file.read_bytes() for file in there[save_id].iterdir()} != content:
                problems.append(f"{save_id} has changed")
        return problems


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Makes so many directories of checkpoints and lets an attempt work in each."""
    dice = random.Random(seed)
    kinds: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    for number in range(trials):
        trial = _Trial(folder / f"trial_{number}", dice)
        with tally.trial(f"trial {number}") as problems:
            end = trial.live()
            ends[end] += 1
            kinds.update(trial.kinds)
            problems += trial.problems()
            problems += _unread(trial) if end == "stopped" else []
    return {
        "an attempt": ", ".join(f"{end} {count}" for end, count in ends.most_common()),
        "not understood": ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()),
    }


def _unread(trial: _Trial) -> list[str]:
    """Returns a problem where an attempt has stopped although something newer than all unknown ones verifies."""
    for path in list_checkpoints(trial.root):
        if name_of(path).save_id in trial.unknown:
            return []
        with contextlib.suppress(CheckpointError):
            verify(path)
            return [f"{path.name} verifies and is newer than what was not understood"]
    return ["nothing that is not understood has a checkpoint's name"]
