"""The same step saved again and again, with all that people leave in a save, in one attempt after the other.

Each trial is a run of two or three attempts, each of which saves the step of the last one up to a hundred times:
files, folders, empty folders, and sometimes a file that is still open, or a link. Every tenth trial saves by
`training`. A save is refused by name, or it is whole: what is newest verifies, has what was written last, and the next
attempt finds it.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import torch

from slurm_train.checkpoint.verify import newest_verified
from slurm_train.errors import CheckpointError
from slurm_train.rundir.heartbeat import Heartbeat
from slurm_train.rundir.paths import RunDirectory
from slurm_train.session.joined import JoinedSession
from slurm_train.session.random_streams import is_random_file
from tests.campaigns.record import Tally
from tests.support.sessions import join_alone

_MOST_SAVES = 100
_OWN_NAMES = ("COMPLETE", "manifest.json")


class _Program:
    """A program that saves by files; what its newest save must have, by path: text, or None for a folder."""

    def __init__(self, dice: random.Random, counts: Counter[str]) -> None:
        self.dice = dice
        self.counts = counts
        self.step = 1
        self.content: dict[str, str | None] = {}

    def live(self, session: JoinedSession, run: RunDirectory) -> None:
        """Makes the saves of one attempt; the first one finds what the attempt before has left."""
        newest = session.newest()
        assert (newest is None) == (not self.content), "the newest save is not found again"
        for _ in range(self.dice.randint(_MOST_SAVES // 4, _MOST_SAVES)):
            self.step += self.dice.random() < 0.02
            fault = self.dice.choice(("open", "link")) if self.dice.random() < 0.1 else ""
            try:
                with ExitStack() as open_files:
                    content = self._save(session, fault, open_files)
            except CheckpointError:
                assert fault, "a good save is refused"
                self.counts[f"refused, {fault}"] += 1
            else:
                assert not fault, f"a save with a file that is {fault} is not refused"
                self.content = content
                self.counts["saved"] += 1
        self._require_newest(run)

    def _save(self, session: JoinedSession, fault: str, open_files: ExitStack) -> dict[str, str | None]:
        content: dict[str, str | None] = {"weights": f"{self.dice.random()}"}
        with session.save(self.step) as folder:
            for number in range(self.dice.randint(0, 3)):
                is_empty = self.dice.random() < 0.5
                content[f"folder_{number}"] = None
                if not is_empty:
                    content[f"folder_{number}/part"] = f"{self.dice.random()}"
            for name, text in content.items():
                if text is None:
                    (folder / name).mkdir()
                else:
                    (folder / name).write_text(text)
            # A file that is read harms nothing.
            opened: IO[str] = open_files.enter_context((folder / "weights").open("a" if fault == "open" else "r"))
            if fault == "open":
                opened.write("late")
            elif fault == "link":
                (folder / "link").symlink_to("/etc/hostname")
        return content

    def _require_newest(self, run: RunDirectory) -> None:
        newest = newest_verified(run.checkpoints).newest
        assert newest is not None and newest[1].step == self.step, "the newest save does not verify"
        found = {
            str(path.relative_to(newest[0])): None if path.is_dir() else path.read_text()
            for path in newest[0].rglob("*")
            if path.name not in _OWN_NAMES and not is_random_file(path.name)
        }
        assert found == self.content, f"{newest[0].name} has {sorted(found)}, not {sorted(self.content)}"


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Makes so many runs."""
    dice = random.Random(seed)
    counts: Counter[str] = Counter()
    for number in range(trials):
        run_directory = RunDirectory(folder / f"trial_{number}" / "runs" / "mine" / "0123456789ab")
        run_directory.path.mkdir(parents=True)
        by_training = number % 10 == 9
        with tally.trial(f"trial {number}, {'training' if by_training else 'files'}"):
            program = _Program(dice, counts)
            for attempt in range(dice.randint(2, 3)):
                with ExitStack() as stack:
                    heartbeat = Heartbeat()
                    stack.callback(heartbeat.stop)
                    session = join_alone(run_directory, heartbeat=heartbeat)
                    stack.callback(session.close)
                    if by_training:
                        _train(session, run_directory, attempt, counts)
                    else:
                        program.live(session, run_directory)
    return {"saves": ", ".join(f"{end} {count}" for end, count in counts.most_common())}


def _train(session: JoinedSession, run_directory: RunDirectory, attempt: int, counts: Counter[str]) -> None:
    """Saves step 1 again and again, with another weight each time."""
    model = torch.nn.Linear(1, 1, bias=False)
    training = session.training(model, torch.optim.SGD(model.parameters()))
    step = training.resume()
    assert step == (1 if attempt else 0), "the newest save is not found again"
    assert not attempt or model.weight.item() == _MOST_SAVES - 1, "the newest save has an older weight"
    for number in range(_MOST_SAVES):
        with torch.no_grad():
            model.weight.fill_(number)
        training.save(1)
        counts["saved by training"] += 1
    newest = newest_verified(run_directory.checkpoints).newest
    assert newest is not None and newest[1].step == 1, "the newest save does not verify"
