"""What the followers of a run have done so far, for `status` and reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.pins import read_leases
from slurm_train.rundir.scores import REMOVED, Score, follower_of, list_followers, read_scores

_MOST_NUMBERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a follower has done so far."""

    follower: RunDirectory
    num_scored: int
    num_missed: int
    """Checkpoints that were removed before they could be scored."""
    problems: tuple[str, ...]
    """Of others that could not be scored, e.g. "step 40: ..."."""
    newest: Score | None
    """The newest step with a score."""

    @property
    def words(self) -> str:
        """All of it for people, e.g. "4 scored, newest step 400: eval_loss 1.2345; 1 missed"."""
        text = f"{self.num_scored} scored"
        if self.newest is not None:
            numbers = [f"{name} {value:.4f}" for name, value in self.newest.values.items() if value is not None]
            text += f", newest step {self.newest.step}: {', '.join(numbers[:_MOST_NUMBERS])}"
        if self.num_missed:
            text += f"; {self.num_missed} missed ({REMOVED})"
        return "; ".join([text, *self.problems])

    def as_json(self) -> dict[str, Any]:
        """Returns a JSON object, always with all keys."""
        return {
            "run": self.follower.run_id,
            "path": str(self.follower.path),
            "scored": self.num_scored,
            "missed": self.num_missed,
            "problems": list(self.problems),
            "newest_step": None if self.newest is None else self.newest.step,
            "values": {} if self.newest is None else dict(self.newest.values),
        }


def summary_of(follower: RunDirectory) -> Summary:
    """Returns what a follower has done so far, from its scores."""
    scores = list(read_scores(follower).values())
    with_numbers = [score for score in scores if score.values]
    return Summary(
        follower=follower,
        num_scored=len(with_numbers),
        num_missed=sum(score.problem == REMOVED and not score.values for score in scores),
        problems=tuple(f"step {score.step}: {score.problem}" for score in scores if score.problem not in ("", REMOVED)),
        newest=max(with_numbers, key=lambda score: score.step, default=None),
    )


def summaries_of(run: RunDirectory) -> list[Summary]:
    """Returns what each follower of a run has done, those that wait for their first job included."""
    followers = {follower.run_id: follower for follower in list_followers(run)}
    for lease in read_leases(run.checkpoints):
        followers.setdefault(lease.follower_id, follower_of(run.path, lease.follower_id))
    return [summary_of(followers[follower_id]) for follower_id in sorted(followers)]
