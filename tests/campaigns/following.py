"""Kills a run and the evaluator that follows it, either one at any moment, on this machine.

Both sides are the product's own ranks under its own supervisor, forked as for `kills_local`. A rank is killed at a
random time or at a moment of a phase; of the evaluator also the supervisor alone, so that its ranks live on beside the
next attempt until they see that they were overtaken. The run keeps one checkpoint by itself, so whatever waits for its
score is there for the evaluator's sake.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass, field, replace
from pathlib import Path

from slurm_train.config.frozen import dump_config, load_config
from slurm_train.rundir.attempts import withdraw_result
from slurm_train.rundir.files import read_lines
from slurm_train.rundir.paths import RunDirectory, existing_attempts, list_checkpoints, name_of
from slurm_train.rundir.pins import renew_lease
from slurm_train.start.evaluation import plan_following
from slurm_train.start.start import Starter
from slurm_train.supervise.job import Job
from slurm_train.supervise.supervisor import Supervisor
from tests.campaigns.checker import History
from tests.campaigns.kills_local import LONGEST_LIFE_S, NOBODY, Aim, Attempt, Life, choose_aim, copy_of, train_golden
from tests.campaigns.moments import FOLLOWING, Moment
from tests.campaigns.record import Tally
from tests.campaigns.victims import COUNTED_MODULE
from tests.support.steps import FunctionStep
from tests.support.waiting import repeating, wait_for

STEPS = 120
KILLS_PER_RUN = 20
_MOST_WAITING = 1000
_PATIENCE_S = 120.0


@dataclass(slots=True, kw_only=True)
class EvaluatorLife(Life):
    """An evaluator that is killed again and again; the run is the evaluator's own."""

    def choose(self, dice: random.Random) -> Aim:
        """Returns its next kill."""
        if dice.random() < 0.4:
            return Aim(rank=None, after_s=dice.uniform(0.0, LONGEST_LIFE_S))
        phase = dice.choice(list(FOLLOWING))
        moment = Moment(phase, 1 + min(int(dice.expovariate(0.3)), 8), dice.uniform(0.0, FOLLOWING[phase].lasts_s))
        rank = 0 if FOLLOWING[phase].only_first else dice.randrange(self.world_size)
        return Aim(rank=rank, moment=moment)

    def lose_supervisor(self, after_s: float) -> bool:
        """Starts an attempt and loses its supervisor after a time; its ranks live on. Returns whether it was lost."""
        lost = threading.Event()

        def launch(number: int) -> int:
            codes: list[int] = []
            attempt = Attempt(self, number, NOBODY)
            ranks = threading.Thread(target=lambda: codes.append(attempt.run()), daemon=True)
            ranks.start()
            ranks.join(after_s)
            if ranks.is_alive():
                # A process that was killed does nothing more, and its lock is that of a dead one.
                self.run.lock.unlink(missing_ok=True)
                lost.set()
                threading.Event().wait()
            return codes[0]

        step = FunctionStep(launch, world_size=self.world_size)
        supervisor = Supervisor(self.run, Job(os.environ), step, load_config(self.run.config).requeue)
        thread = threading.Thread(target=supervisor.supervise, daemon=True)
        thread.start()
        wait_for(lambda: lost.is_set() or not thread.is_alive(), within_s=_PATIENCE_S, what="the end of the supervisor")
        if lost.is_set():
            self.faults.append(f"supervisor after {after_s:.2f} s")
            self.phases["supervisor"] += 1
            self.tally.add(f"{self.run.path.parent.parent.parent.name}: the evaluator's supervisor, ranks live on")
        return lost.is_set()


@dataclass(slots=True, kw_only=True)
class Pair:
    """A run and its evaluator."""

    trainer: Life
    evaluator: EvaluatorLife
    saves: dict[str, int] = field(default_factory=dict)
    """Step of every checkpoint that was ever there, by save id."""
    num_restarted: int = 0
    """How often the evaluator had ended with the run, which went on then."""

    def live(self, dice: random.Random, *, kills: int) -> None:
        """Lets both live until both are finished, and kills so often while they do, half of it on either side."""
        rolls = [random.Random(dice.random()) for _ in range(2)]
        left = [threading.Semaphore(kills // 2), threading.Semaphore(kills - kills // 2)]
        with repeating(self._look, every_s=0.01):
            threads = [
                threading.Thread(target=self._train, args=(rolls[0], left[0])),
                threading.Thread(target=self._evaluate, args=(rolls[1], left[1])),
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _look(self) -> None:
        for path in list_checkpoints(self.trainer.run.checkpoints):
            self.saves[name_of(path).save_id] = name_of(path).step

    def _train(self, dice: random.Random, left: threading.Semaphore) -> None:
        while not self.trainer.run.result.exists():
            if dice.random() < 0.3:
                # Saves that nobody looks at meanwhile.
                time.sleep(dice.uniform(0.0, 0.5))
            takes = left.acquire(blocking=False)
            aim = choose_aim(dice, world_size=self.trainer.world_size, at_the_end=False) if takes else NOBODY
            if takes and not self.trainer.attempt(aim):
                left.release()
            elif not takes:
                self.trainer.attempt(NOBODY)

    def _evaluate(self, dice: random.Random, left: threading.Semaphore) -> None:
        own = self.evaluator.run
        while not (own.result.exists() and self.trainer.run.result.exists() and not self._left()):
            if own.result.exists():
                # What `evaluate RUN --follow`, typed again, does.
                self.num_restarted += 1
                withdraw_result(own, own.path / f"result_{len(existing_attempts(own))}.json")
                renew_lease(self.trainer.run.checkpoints, own, most=_MOST_WAITING)
            takes = left.acquire(blocking=False)
            if not takes:
                self.evaluator.attempt(NOBODY)
            elif dice.random() < 0.25:
                if not self.evaluator.lose_supervisor(dice.uniform(0.3, 2.0)):
                    left.release()
            elif not self.evaluator.attempt(self.evaluator.choose(dice)):
                left.release()

    def _left(self) -> set[str]:
        """Returns the saves that are there and have no line."""
        self._look()
        present = {name_of(path).save_id for path in list_checkpoints(self.trainer.run.checkpoints)}
        return present - {str(line.get("save_id")) for line in read_lines(self.evaluator.run.scores)}

    def problems(self) -> Iterator[str]:
        """Yields what is wrong with the scores."""
        lines = list(read_lines(self.evaluator.run.scores))
        counts = Counter(str(line["save_id"]) for line in lines if line["values"])
        yield from wrong_scores(self.saves, counts, [line for line in lines if line["problem"]])


def wrong_scores(saves: dict[str, int], counts: Counter[str], others: list[dict[str, object]]) -> Iterator[str]:
    """Yields what is wrong with the scores of a run.

    Args:
        saves: step of every checkpoint that was ever there, by save id.
        counts: lines with numbers by save id.
        others: lines without numbers.
    """
    for save_id, step in saves.items():
        if counts[save_id] != 1:
            yield f"the checkpoint of step {step} ({save_id}) was scored {counts[save_id]} times"
    for save_id in counts.keys() - saves.keys():
        yield f"{save_id} was scored, and nobody has seen it"
    for line in others:
        yield f"step {line['step']}: {line['problem']}"


def run(tally: Tally, *, seed: int, trials: int, folder: Path, steps: int = STEPS) -> dict[str, str]:
    """Kills so many times, in pairs of a run and its evaluator."""
    own = folder / "modules"
    own.mkdir(parents=True, exist_ok=True)
    (own / COUNTED_MODULE.name).write_bytes(COUNTED_MODULE.read_bytes())
    pairs: list[Pair] = []
    with (folder / "supervisors.log").open("a") as log, redirect_stderr(log):
        golden = train_golden(folder, 2, steps=steps)
        began_s = time.monotonic()
        dice, num_kills = random.Random(seed), 0
        while num_kills < trials:
            kills = min(KILLS_PER_RUN, trials - num_kills)
            pair = build_pair(golden[0], folder / f"pair_{len(pairs)}", modules=own, tally=tally, dice=dice)
            pairs.append(pair)
            pair.live(dice, kills=kills)
            num_kills += kills
            judge(pair, golden[1])
        wall_s = time.monotonic() - began_s
    killed = [sum((side.phases for side in sides), Counter[str]()) for sides in _sides(pairs)]
    words = [", ".join(f"{phase} {count}" for phase, count in of_side.most_common()) for of_side in killed]
    return {
        "runs": f"{len(pairs)}",
        "checkpoints, each scored once": f"{sum(len(pair.saves) for pair in pairs)}",
        "run killed in": words[0],
        "evaluator killed in": words[1],
        "evaluator ended with a run that went on, and was started again": f"{sum(p.num_restarted for p in pairs)}",
        "wall time per kill": f"{wall_s / max(tally.trials, 1):.2f} s",
    }


def _sides(pairs: list[Pair]) -> tuple[list[Life], list[Life]]:
    return [pair.trainer for pair in pairs], [pair.evaluator for pair in pairs]


def build_pair(golden: RunDirectory, folder: Path, *, modules: Path, tally: Tally, dice: random.Random) -> Pair:
    """Returns a run that has not begun, which keeps one checkpoint, and its evaluator."""
    run = copy_of(golden, folder)
    config = load_config(run.config)
    run.config.write_text(dump_config(replace(config, checkpoint=replace(config.checkpoint, keep=1))))
    run.checkpoints.mkdir(mode=0o700)
    plan = plan_following(run, env=os.environ, settings=[f"run.processes={dice.choice((1, 2))}"])
    with Starter(words=["evaluate"], env=dict(os.environ), say=print).fresh(plan, None) as batch:
        batch.write_provenance()
    renew_lease(run.checkpoints, plan.run, most=_MOST_WAITING)
    trainer = Life(run=run, world_size=2, modules=modules, tally=tally)
    evaluator = EvaluatorLife(run=plan.run, world_size=plan.world.num_ranks, modules=modules, tally=tally)
    return Pair(trainer=trainer, evaluator=evaluator)


def judge(pair: Pair, golden: History) -> None:
    """Checks the scores, and compares the run with the one that nobody followed."""
    scores = [f"{pair.trainer.run.path}: {problem}" for problem in pair.problems()]
    pair.trainer.tally.spoil(scores[:5], trials=max(1, len(pair.evaluator.faults)))
    if not scores:
        pair.trainer.judge(golden)
