"""What a follower does next: the oldest checkpoint of a run without a score, or waiting, or the end. No torch.

`Follower` is used by rank 0 of the built-in evaluation and by the process that calls a scorer of the user's own. All
that it knows is on disk (the scores, the checkpoints, the run's own files), so a follower that was killed at any moment
goes on where it was.

A checkpoint is pinned before it is looked at, and stays pinned until its line is durable. The run is over when its
files say so, or when nothing of it has been queued or running for a while; whether it is over is asked before the
checkpoints are listed, so the last one is not overlooked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_train.config.frozen import load_config
from slurm_train.errors import ClusterError
from slurm_train.rundir.attempts import check_fence
from slurm_train.rundir.events import read_saves
from slurm_train.rundir.jobs import has_stopped, read_job
from slurm_train.rundir.ledger import read_ledger
from slurm_train.rundir.paths import RunDirectory, find_save, list_checkpoints, name_of, save_path
from slurm_train.rundir.pins import list_pins, pin_save, read_leases, release_pin, renew_lease
from slurm_train.rundir.scores import REMOVED, Score, append_score, read_scores
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.status.activity import find_active

MOST_WAITING = 8
"""How many checkpoints that wait for their score stay beyond the run's own retention, if nothing else is asked."""
_RENEW_EVERY_S = 60.0
# A run that comes back by itself is not active for a moment; Slurm is not asked more often than a person would.
_ASK_EVERY_S = 30.0
_IDLE_S = 60.0
_SURE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A checkpoint that is to be scored; it is pinned."""

    save: Path
    """From `paths.save_path`: names the save whoever owns its directory by then."""
    step: int
    save_id: str
    attempt: int
    """The attempt that owns it."""

    def scored(self, values: Mapping[str, float | None], *, attempt: int, parent: str | None, start_s: float) -> Score:
        """Returns the line of its score.

        Args:
            values: numbers by name.
            attempt: that made the save.
            parent: see `Score`.
            start_s: when the scoring began, of `time.monotonic`.
        """
        return Score(
            save_id=self.save_id,
            step=self.step,
            attempt=attempt,
            parent=parent or "",
            values=dict(values),
            seconds=round(time.monotonic() - start_s, 3),
            time_unix_s=time.time(),
        )

    def not_scored(self, problem: str) -> Score:
        """Returns the line that says why it has no score."""
        return Score(
            save_id=self.save_id, step=self.step, attempt=self.attempt, problem=problem, time_unix_s=time.time()
        )


class Follower:
    """One evaluator at work, from the looks at a run to the lines of its scores; one process only.

    Args:
        evaluation: the evaluator's run directory, in `evaluations/` of the run that it follows.
        attempt: of the evaluator.
        commands: Slurm, to be asked whether the run goes on.
        clock: seconds that never run backwards.
    """

    def __init__(
        self,
        evaluation: RunDirectory,
        attempt: int,
        commands: SlurmCommands,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.evaluation = evaluation
        self.run = evaluation.evaluated
        self._attempt = attempt
        self._commands = commands
        self._clock = clock
        self._renewed_s = float("-inf")
        self._asked_s = float("-inf")
        self._idle_since_s: float | None = None
        # Steps of the saves that were there at some look, by save id.
        self._seen: dict[str, int] = {}
        self._gone_since_s: dict[tuple[int, int], float] = {}
        self._noted: set[tuple[int, int]] = set()
        # What only lies on a node's disk is no checkpoint of the run directory.
        self._saves_on_nodes = load_config(self.run.config).checkpoint.local_dir is not None

    def next(self) -> Waiting | None:
        """Returns the oldest checkpoint without a score, pinned; None where all have theirs.

        Those that have been gone for a while get a line that says so.

        Raises:
            RunError: a newer attempt of the evaluator has taken over.
            OSError: the file system refuses.
        """
        self._renew()
        self._note_removed(_SURE_S)
        scored = read_scores(self.evaluation)
        if not self._seen:
            self._release_done(scored)
        for path in reversed(list_checkpoints(self.run.checkpoints)):
            name = name_of(path)
            self._seen.setdefault(name.save_id, name.step)
            before = scored.get(name.save_id)
            if before is not None and before.problem != REMOVED:
                continue
            pin_save(self.run.checkpoints, name.save_id, self.evaluation)
            save = save_path(path)
            if find_save(save).is_dir():
                return Waiting(save=save, step=name.step, save_id=name.save_id, attempt=name.attempt)
            release_pin(self.run.checkpoints, name.save_id, self.evaluation)
        return None

    def record(self, score: Score) -> bool:
        """Writes the line of a save and lets go of its checkpoint; returns False where it has one already.

        Raises:
            RunError: a newer attempt of the evaluator has taken over; the line is its business.
            OSError: the file system refuses.
        """
        before = read_scores(self.evaluation).get(score.key)
        is_gone = score.problem and score.save_id not in self._present()
        if is_gone:
            # Where it stays away it gets the line of one that was removed.
            release_pin(self.run.checkpoints, score.save_id, self.evaluation)
            return False
        is_new = before is None or bool(score.values and not before.values)
        if is_new:
            check_fence(self.evaluation, self._attempt)
            append_score(self.evaluation, score)
        if score.save_id:
            release_pin(self.run.checkpoints, score.save_id, self.evaluation)
        return is_new

    def finish(self) -> list[Score]:
        """Writes what is still to be said about checkpoints that are gone; returns all that is recorded."""
        self._note_removed(0.0)
        return list(read_scores(self.evaluation).values())

    def is_over(self) -> bool:
        """Returns whether no checkpoint will come any more; to be asked before `next`.

        A run that has stopped without a result may be resumed by a person at any moment, so that is waited for a while.
        """
        if self.run.result.exists():
            return True
        now_s = self._clock()
        if now_s - self._asked_s >= (_ASK_EVERY_S if self._commands.is_available() else 1.0):
            self._asked_s = now_s
            if self._goes_on():
                self._idle_since_s = None
            elif self._idle_since_s is None:
                self._idle_since_s = now_s
        return self._idle_since_s is not None and now_s - self._idle_since_s >= _IDLE_S

    def _goes_on(self) -> bool:
        """Returns whether something of the run is queued or running; also where Slurm does not answer."""
        if has_stopped(read_ledger(self.run), read_job(self.run)):
            return False
        try:
            return self.run in find_active([self.run], self._commands)
        except ClusterError:
            return True

    def _renew(self) -> None:
        now_s = self._clock()
        if now_s - self._renewed_s < _RENEW_EVERY_S:
            return
        check_fence(self.evaluation, self._attempt)
        leases = {lease.follower_id: lease.most for lease in read_leases(self.run.checkpoints)}
        if self.run.checkpoints.is_dir():
            renew_lease(self.run.checkpoints, self.evaluation, most=leases.get(self.evaluation.run_id, MOST_WAITING))
            self._renewed_s = now_s

    def _present(self) -> set[str]:
        return {name_of(path).save_id for path in list_checkpoints(self.run.checkpoints)}

    def _release_done(self, scored: Mapping[str, Score]) -> None:
        """Lets go of what an attempt of the evaluator that was killed had pinned and recorded."""
        for pin in list_pins(self.run.checkpoints):
            if pin.evaluation.run_id == self.evaluation.run_id and pin.save_id in scored:
                release_pin(self.run.checkpoints, pin.save_id, self.evaluation)

    def _note_removed(self, sure_s: float) -> None:
        """Writes lines for saves that are gone without a score: those seen before, and those on the run's record.

        A checkpoint that is renamed while the folder is listed is in no list, and an NFS client may have an old list;
        so only what has been gone for a while is called gone.

        Args:
            sure_s: for how long.
        """
        saves = [] if self._saves_on_nodes else [line for line in read_saves(self.run) if not line.get("error")]
        names = [name_of(path) for path in list_checkpoints(self.run.checkpoints)]
        scored = read_scores(self.evaluation)
        present = {name.save_id for name in names}
        done = {(score.attempt, score.step) for score in scored.values()} | self._noted
        present_steps = {name.step for name in names}
        gone: dict[tuple[int, int], str] = {}
        for line in saves:
            save = (int(line.get("attempt", 0)), int(line["step"]))
            if save not in done and save[1] not in present_steps:
                gone[save] = ""
        for save_id, step in self._seen.items():
            if save_id not in present and save_id not in scored:
                attempts = [attempt for attempt, of_step in gone if of_step == step]
                gone[max(attempts, default=0), step] = save_id
        now_s = self._clock()
        self._gone_since_s = {save: self._gone_since_s.get(save, now_s) for save in gone}
        for (attempt, step), save_id in sorted(gone.items(), key=lambda item: item[0][::-1]):
            if now_s - self._gone_since_s[attempt, step] >= sure_s:
                check_fence(self.evaluation, self._attempt)
                score = Score(save_id=save_id, step=step, attempt=attempt, problem=REMOVED, time_unix_s=time.time())
                append_score(self.evaluation, score)
                self._noted.add((attempt, step))
