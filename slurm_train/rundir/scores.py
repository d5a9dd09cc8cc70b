"""Scores: what a following evaluator has measured of the checkpoints of a run, one line per save.

A follower is a run of its own in `evaluations/` of the run that it follows. Its `scores.jsonl` is the ledger of what is
done: a line is appended when a checkpoint has its score, and is durable then, so a follower that is killed repeats one
computation at most. Only the follower writes it, never the training; the first line about a save counts. A checkpoint
that cannot be scored any more (removed, damaged) has a line as well, which says why.

A save is known by its id, whoever owns its directory by now. Attempt and parent say where its training came from: the
score of a past that the run has left (`lineage`) counts no longer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from slurm_train.rundir.files import append_line, listed, read_lines, to_records
from slurm_train.rundir.lineage import is_on_line, read_line
from slurm_train.rundir.paths import RunDirectory

EVALUATIONS = "evaluations"
"""Folder of a run's directory with its evaluations, each a run of its own."""
REMOVED = "removed before it was scored"
"""Problem of a save whose checkpoint was gone before its follower had measured it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one follower says about one save."""

    save_id: str
    """8 hexadecimal digits, see `paths.CheckpointName`; "" of a save that was gone before anybody saw its name."""
    step: int
    attempt: int
    """The attempt that made the save."""
    parent: str = ""
    """Save id of the checkpoint that its training was loaded from; "" where it began anew."""
    values: dict[str, float | None] = field(default_factory=dict)
    """Numbers by name, e.g. {"eval_loss": 1.2}; None for one that is not finite."""
    problem: str = ""
    """Why it has no score, e.g. "removed before it was scored"."""
    seconds: float = 0.0
    """What the score took."""
    time_unix_s: float = 0.0

    @property
    def key(self) -> str:
        """What tells this save from all others of the run."""
        return self.save_id or f"{self.attempt}/{self.step}"


def list_followers(run: RunDirectory) -> list[RunDirectory]:
    """Returns the evaluators that have followed a run or follow it now, in the order of their ids."""
    folders = sorted(listed(run.path / EVALUATIONS))
    return [RunDirectory(folder) for folder in folders if RunDirectory(folder).scores.exists()]


def read_scores(follower: RunDirectory) -> dict[str, Score]:
    """Returns what a follower has recorded, by `Score.key`, in the order in which it did."""
    scores: dict[str, Score] = {}
    for score in to_records(Score, read_lines(follower.scores)):
        before = scores.get(score.key)
        if before is None or (score.values and not before.values):
            scores[score.key] = score
    return scores


def append_score(follower: RunDirectory, score: Score) -> None:
    """Adds a line; durable when this returns.

    Raises:
        OSError: the file system refuses.
    """
    values = {name: _finite(value) for name, value in score.values.items()}
    append_line(follower.scores, {**asdict(score), "values": values}, durable=True)


def num_recorded(follower: RunDirectory) -> int:
    """Returns how many checkpoints a follower is done with: its progress, as steps are that of a training."""
    return len(read_scores(follower))


def scores_that_count(run: RunDirectory) -> list[Score]:
    """Returns the scores of a run from all its followers, by step, without those of a past that the run has left."""
    scores = list[Score]()
    for follower in list_followers(run):
        scores += [score for score in read_scores(follower).values() if score.values]
    if not scores:
        return []
    line = read_line(run)
    kept = [
        score
        for score in scores
        if not line or is_on_line(line, attempt=score.attempt, parent=score.parent, step=score.step)
    ]
    return sorted(kept, key=lambda score: score.step)


class Scored(NamedTuple):
    """One value of a measure.

    Args:
        save_id: of the checkpoint.
        step: of the checkpoint.
        value: finite.
    """

    save_id: str
    step: int
    value: float


def values_of(run: RunDirectory, measure: str) -> list[Scored]:
    """Returns the finite values of a measure by step, of scores that count."""
    values = []
    for score in scores_that_count(run):
        value = score.values.get(measure)
        if value is not None:
            values.append(Scored(score.save_id, score.step, value))
    return values


def best_first(run: RunDirectory, *, measure: str, mode: str) -> list[Scored]:
    """Returns the values of a measure, the best first and the older of two equal ones.

    Args:
        run: the run that is followed.
        measure: e.g. "eval_loss".
        mode: "min" if less is better, else "max".
    """
    sign = 1.0 if mode == "min" else -1.0
    return sorted(values_of(run, measure), key=lambda scored: (sign * scored.value, scored.step))


def named(values: Mapping[str, float], name: str) -> dict[str, float | None]:
    """Returns measures as they are recorded: all begin with "eval_", and with the name of the scores where it has one.

    Args:
        values: e.g. {"eval_loss": 1.2}, or what a scorer of the user's own gives: {"accuracy": 0.5}.
        name: "" for none.
    """
    prefix = f"eval_{name}_" if name else "eval_"
    return {prefix + key.removeprefix("eval_"): value for key, value in values.items()}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def follower_of(run_path: Path, follower_id: str) -> RunDirectory:
    """Returns the directory of a follower by its run id."""
    return RunDirectory(run_path / EVALUATIONS / follower_id)
