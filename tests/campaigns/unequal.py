"""What makes a resumed training unequal: states that ranks shard by hand, and loaders that do not go on in their place.

Each trial draws an optimizer, a loader, and the steps at which the training is stopped, and runs the program whole and
in parts, on two ranks. Its losses must be equal bit for bit; or a start is refused by name; or the log names it.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

from slurm_train.config.frozen import dump_config
from slurm_train.config.schema import RunConfig
from slurm_train.metrics import read_metrics
from slurm_train.rundir.attempts import open_attempt
from slurm_train.rundir.ledger import Start
from slurm_train.rundir.paths import RunDirectory
from tests.campaigns.record import Tally
from tests.support.ports import rank_environments
from tests.support.warm_ranks import start_rank

PROGRAM = Path(__file__).with_name("unequal_rank.py")
OPTIMIZERS = ("whole", "zero", "signs", "owners", "idle owners")
LOADERS = (
    *("batches", "again", "new order", "skips", "flips", "sampler", "generator", "exact generator"),
    *("skipped flips", "skipped flips of a worker", "skipped exact flips"),
)
_LAST = 10
_RANKS = 2
_NAMES = ("since the resume", "does not say which samples")
"""Parts of the lines that name an inexact resume."""
_REFUSAL = "the ranks hold different states, which no checkpoint can keep: optimizer.state."


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Runs so many programs, each optimizer and each loader in turn."""
    dice = random.Random(seed)
    verdicts: Counter[str] = Counter()
    for number in range(trials):
        optimizer = OPTIMIZERS[number % len(OPTIMIZERS)]
        loader = LOADERS[number % len(LOADERS)]
        stops = sorted(dice.sample(range(2, _LAST), dice.randint(1, 2)))
        with tally.trial(f"trial {number}, {optimizer}, {loader}, stopped after {stops}") as problems:
            verdict = verdict_of(folder / f"trial_{number}", optimizer, loader, stops)
            verdicts[verdict] += 1
            problems += ["losses differ, and nothing names it"] * (verdict == "unequal")
    return {"verdicts": ", ".join(f"{verdict} {count}" for verdict, count in verdicts.most_common())}


def verdict_of(folder: Path, optimizer: str, loader: str, stops: list[int]) -> str:
    """Returns "equal", "refused", "named" or "unequal"."""
    whole = _new_run(folder / "whole")
    code, text = _train(whole, optimizer, loader, _LAST)
    if code != 0:
        assert _REFUSAL in text, text[-2000:]
        return "refused"
    parts = _new_run(folder / "parts")
    texts = ""
    for last in (*stops, _LAST):
        code, text = _train(parts, optimizer, loader, last)
        assert code == 0, text[-2000:]
        texts += text
    if _losses(parts) == _losses(whole):
        return "equal"
    return "named" if any(name in texts for name in _NAMES) else "unequal"


def _new_run(path: Path) -> RunDirectory:
    directory = RunDirectory(path / "0123456789ab")
    directory.path.mkdir(parents=True)
    directory.config.write_text(dump_config(RunConfig()))
    return directory


def _train(directory: RunDirectory, optimizer: str, loader: str, last: int) -> tuple[int, str]:
    """Runs one attempt; returns the first exit code that is not 0, and what all ranks have said."""
    attempt = open_attempt(directory, Start(job_id=None, restart_count=0, nodes=("here",), world_size=_RANKS))
    base = {**os.environ, "SLURM_TRAIN_RUN_DIR": str(directory.path), "SLURM_TRAIN_ATTEMPT": str(attempt)}
    words = (optimizer, loader, str(last))
    ranks = [start_rank(PROGRAM, *words, env=env) for env in rank_environments(_RANKS, base)]
    texts = [rank.communicate(timeout=240.0)[1] for rank in ranks]
    codes = [rank.returncode or 0 for rank in ranks]
    return next((code for code in codes if code), 0), "\n".join(texts)


def _losses(directory: RunDirectory) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_metrics(directory.metrics)}
