"""Runs on Slurm that are struck again and again: the campaigns kills, exactness, lost-work, controller and goodput.

They differ in what strikes, when, and how many runs at a time. All runs that end are judged by their whole history.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import defaultdict
from contextlib import ExitStack, suppress
from pathlib import Path

from slurm_train.rundir.timing import goodput as goodput_of
from tests.campaigns.checker import History, read_history, watching
from tests.campaigns.record import Tally, first_line
from tests.campaigns.victims import (
    FAULTS,
    MOMENTS,
    PATIENCE_S,
    UNSHARED,
    Fleet,
    Victim,
    figures_of,
    golden_run,
    lost_steps,
    wait_for_moment,
)
from tests.support.cluster_faults import (
    controller_away,
    daemons_stopped,
    kill_wait,
    preempted_by_urgent,
    start_urgent_job,
    take_nodes,
)
from tests.support.command_line import Person
from tests.support.ledgers import ledger_lines
from tests.support.process_faults import kill, rank_pid, wait_until_gone
from tests.support.slurm_runs import at_work
from tests.support.waiting import wait_for

# kills: any rank at any moment

_KILLS_STEPS, _KILLS_PER_RUN, _EXITS_PER_RUN = 80, 13, 2
_KILLS = (
    UNSHARED,
    f"train.max_steps={_KILLS_STEPS}",
    "checkpoint.every_steps=8",
    # Kills at the start end without a new step, as often in a row as the dice say; that budget is another campaign's.
    "requeue.max_failures_without_progress=1000",
)
_SIZES = {2: ("+cluster=1x2", "cluster.nodelist=node1"), 4: ("+cluster=2x2", "cluster.nodelist=node[1-2]")}


def kills(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Kills ranks of one run after the other until `trials` were killed, each at a moment drawn anew."""
    dice, histories = random.Random(seed), list[History]()
    with at_work(folder) as person:
        golden = {ranks: golden_run(person, f"golden-{ranks}", *_KILLS, *words) for ranks, words in _SIZES.items()}
        while tally.trials < trials and len(histories) <= trials:
            ranks = 4 if len(histories) % 4 == 3 else 2
            words = (*_KILLS, *_SIZES[ranks], "model.step_s=0.02")
            victim = Victim.submit(person, dice, f"kills-{len(histories)}", *words)
            before = tally.trials
            _kill_ranks(victim, tally, ranks=ranks, at_most=min(_KILLS_PER_RUN, trials - tally.trials))
            tally.spoil(victim.problems(golden[ranks]), trials=tally.trials - before)
            histories.append(victim.history())
    return figures_of(histories)


def _kill_ranks(victim: Victim, tally: Tally, *, ranks: int, at_most: int) -> None:
    """Kills a rank of each attempt until the run is finished or enough were killed."""
    attempt, exits = -1, 0
    while len(victim.faults) < at_most and exits < _EXITS_PER_RUN:
        victim.wait_for_attempt(after=attempt)
        if victim.is_finished:
            return
        attempt, rank, share = victim.attempt, victim.dice.randrange(ranks), victim.dice.random()
        # Once the last step is on record, every further attempt has nothing left to do but to end.
        is_at_the_end = read_history(victim.run).seen[-1].newest > _KILLS_STEPS - 16
        moment = "exit" if is_at_the_end else victim.dice.choice(MOMENTS)
        with suppress(AssertionError, ProcessLookupError):
            pid = _wait_for_rank(victim, rank, attempt)
            if wait_for_moment(victim, moment, share=share, pid=pid, last_step=_KILLS_STEPS):
                victim.note(f"kill at {moment}")
                kill(pid)
                exits += moment == "exit"
                tally.add(f"{victim.run.name}: rank {rank} of {ranks} killed at {moment} in attempt {attempt}")


def _wait_for_rank(victim: Victim, rank: int, attempt: int) -> int:
    """Returns the process of a rank as soon as there is one."""

    def find() -> int:
        assert not victim.is_finished and victim.attempt == attempt, "the attempt is over"
        with suppress(AssertionError):
            return rank_pid(victim.run, rank, attempt=attempt)
        return 0

    return wait_for(find, within_s=_BACK_WITHIN_S, what=f"rank {rank} of {victim.run.path}", poll_s=0.02)


# exactness: every kind of interruption, one after the other


def exactness(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Interrupts one run on 2 x 2 ranks so many times, in every way there is, between some steps."""
    dice, steps = random.Random(seed), 40 + 30 * trials
    words = (UNSHARED, "+cluster=2x2", f"train.max_steps={steps}")
    words += ("checkpoint.every_steps=5", "train.eval_every_steps=50")
    chosen: list[str] = []
    while len(chosen) < trials:
        # Each kind once before any comes again.
        chosen += dice.sample(list(FAULTS), min(len(FAULTS), trials - len(chosen)))
    dice.shuffle(chosen)
    with at_work(folder) as person:
        golden = golden_run(person, "golden", *words)
        victim = Victim.submit(person, dice, "interrupted", *words, "model.step_s=0.25")
        with watching(victim.run, victim.seen):
            for what in chosen:
                with tally.trial(what):
                    victim.wait_for_steps(dice.randint(2, 12))
                    assert not victim.is_finished, "the run is finished, there is nothing left to interrupt"
                    before = victim.attempt
                    victim.note(what)
                    FAULTS[what](victim)
                    victim.wait_for_steps(1, after=before)
            history = victim.history()
        # What is wrong in the end cannot be laid on one of the interruptions.
        tally.spoil(victim.problems(golden), trials=trials)
    return {**figures_of([history]), "lines of steps compared": f"{len(history.lines)} of {steps} steps"}


# lost-work: steps that have to be done again

_INTERVAL_STEPS = 25
_LOST_WORK = (
    "+cluster=1x1",
    "train.max_steps=1000000",
    "model.step_s=0.1",
    f"checkpoint.every_steps={_INTERVAL_STEPS}",
)
_NO_GRACE = "campaign_no_grace"
_ROUNDS = (("preempted", 4), ("rank killed", 4), ("preempted", 4), ("slurmd killed", 2), ("preempted", 4))
"""What is done to how many runs at a time, round after round."""


def lost_work(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Strikes some runs at a time until there were `trials` trials, and counts the steps done again.

    Every other preemption is with a grace, and must lose nothing. Without a grace Slurm still sends TERM, KillWait
    before KILL.
    """
    dice = random.Random(seed)
    lost: dict[str, list[int]] = defaultdict(list)
    with preempted_by_urgent({_NO_GRACE: "gracetime=0 preemptmode=requeue"}):
        number = 0
        while tally.trials < trials:
            kind, num_runs = _ROUNDS[number % len(_ROUNDS)]
            with at_work(folder / f"round-{number}") as person:
                _lose_work(person, dice, tally, kind, min(num_runs, trials - tally.trials), lost)
            number += 1
    return {
        f"steps lost, {what}": f"{sum(steps) / len(steps):.1f}, at most {max(steps)} ({len(steps)} trials)"
        for what, steps in sorted(lost.items())
    }


def _lose_work(
    person: Person, dice: random.Random, tally: Tally, kind: str, num_runs: int, lost: dict[str, list[int]]
) -> None:
    """Submits some runs, strikes them while they train, and judges what each lost."""
    graces = ("preempted, grace", "preempted, no grace")
    names = [graces[number % 2] if kind == "preempted" else kind for number in range(num_runs)]
    # Where a node's daemon is killed, Slurm is to start the run on another one.
    free = ("cluster.sbatch.exclusive=true",)
    places = [
        free
        if kind == "slurmd killed"
        else (f"cluster.nodelist=node{number + 1}", *((f"cluster.qos={_NO_GRACE}",) * (name != graces[0])))
        for number, name in enumerate(names)
    ]
    victims = Fleet(person=person, dice=dice, words=_LOST_WORK, places=places).fill()
    try:
        for victim in victims:
            victim.wait_for_steps(1)
        time.sleep(dice.uniform(0.0, 0.2 * _INTERVAL_STEPS))
        struck = [victim.attempt for victim in victims]
        with ExitStack() as undo:
            pids = [victim.pid(0) for victim in victims]
            if kind == "preempted":
                take_nodes([victim.nodes[0] for victim in victims])
            elif kind == "rank killed":
                for pid in pids:
                    kill(pid)
            else:
                undo.enter_context(daemons_stopped([victim.nodes[0] for victim in victims]))
            for victim, attempt in zip(victims, struck, strict=True):
                victim.wait_for_steps(1, after=attempt)
            for pid in pids:
                # Ranks of a node without its daemon live on until others have taken over.
                wait_until_gone(pid, within_s=15.0)
    except AssertionError as err:
        tally.add(kind, [first_line(err)], trials=num_runs)
        return
    for name, victim, attempt in zip(names, victims, struck, strict=True):
        steps = lost_steps(read_history(victim.run), attempt)
        assert steps is not None, f"nothing followed attempt {attempt}"
        lost[name].append(steps)
        tally.add(f"{name}: {steps} steps lost", too_much_lost(name, steps))


def too_much_lost(name: str, steps: int) -> list[str]:
    """Returns what is wrong with so many steps done again."""
    promised = 0 if name == "preempted, grace" else _INTERVAL_STEPS
    return [f"at most {promised} were promised"] if steps > promised else []


# controller: slurmctld is killed in the middle of something

_CONTROLLER = ("+cluster=1x1", "train.max_steps=400", "checkpoint.every_steps=5")
_BEGUN = ("training", "save", "preemption", "requeue", "failure")
# A job that slurmctld took on less than five seconds before it was killed is not in its files yet, and is gone.
_KNOWN_AFTER_S = 6.0
# Slurm's default. A requeue is forgotten likewise, and the supervisor asks for it again as long as it lives.
_KILL_WAIT_S = 30


def controller(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Kills slurmctld `trials` times while three runs train and one of them is about to save or come back."""
    dice, places = random.Random(seed), [(f"cluster.nodelist=node{node}",) for node in (1, 2, 3)]
    with kill_wait(_KILL_WAIT_S), at_work(folder) as person:
        golden = golden_run(person, "golden", *_CONTROLLER)
        fleet = Fleet(person=person, dice=dice, words=(*_CONTROLLER, "model.step_s=0.1"), places=places)
        while tally.trials < trials:
            what = dice.choice(_BEGUN)
            with tally.trial(f"slurmctld killed during {what}") as problems:
                _kill_controller(fleet.fill(), what, dice)
            if problems:
                # What became of them is looked at again at the end; the next trials have runs of their own.
                fleet.current.clear()
        for victim in fleet.all:
            tally.spoil(victim.problems(golden), trials=1)
        return figures_of([victim.history() for victim in fleet.all])


def _kill_controller(victims: list[Victim], what: str, dice: random.Random) -> None:
    for victim in victims:
        _wait_until_it_goes_on(victim)
    young = any(time.time() - victim.ledger[0]["time_unix_s"] < _KNOWN_AFTER_S for victim in victims)
    time.sleep(_KNOWN_AFTER_S if young else 0.0)
    begun = dice.choice([victim for victim in victims if not victim.is_finished] or victims)
    begun.note(f"slurmctld killed during {what}")
    with suppress(ProcessLookupError):
        if what == "save":
            wait_for(
                lambda: begun.is_finished or any(begun.run.checkpoints.glob("*.tmp")),
                within_s=PATIENCE_S,
                what=f"a save of {begun.run.path}",
                poll_s=0.001,
            )
        elif what == "preemption":
            start_urgent_job(begun.nodes)
        elif what != "training" and not begun.is_finished:
            # A warning makes the supervisor requeue the job, a failure makes it ask how the job stands.
            os.kill(begun.pid(0), signal.SIGUSR2 if what == "requeue" else signal.SIGKILL)
    time.sleep(0.0 if what == "save" else dice.uniform(0.0, 3.0))
    with controller_away():
        time.sleep(dice.uniform(1.0, 5.0))
    for victim in victims:
        _wait_until_it_goes_on(victim)


def _wait_until_it_goes_on(victim: Victim) -> None:
    step, attempt = victim.step, victim.attempt
    wait_for(
        lambda: victim.is_finished or (victim.step > 0 and (victim.step, victim.attempt) != (step, attempt)),
        within_s=PATIENCE_S,
        what=f"steps of {victim.run.path}",
    )


# goodput: a failure a minute

_GOODPUT = (
    "+cluster=1x2",
    "cluster.nodelist=node1",
    "train.max_steps=1000000",
    "model.step_s=0.05",
    "checkpoint.every_steps=20",
    "requeue.warm_ranks=true",
)
_PROMISED_SHARE = 0.95
_BACK_WITHIN_S = 45.0


def goodput(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Kills one of two ranks a minute for `trials` minutes; the figure is the ledger's own, as `status` shows it."""
    dice = random.Random(seed)
    with at_work(folder) as person:
        victim = Victim.submit(person, dice, "goodput", *_GOODPUT)
        victim.wait_for_steps(1)
        for _ in range(trials):
            end, rank = time.monotonic() + 60.0, dice.randrange(2)
            with tally.trial(f"rank {rank} killed"):
                time.sleep(dice.uniform(0.0, 60.0))
                attempt = victim.attempt
                kill(_wait_for_rank(victim, rank, attempt))
                struck = time.monotonic()
                victim.wait_for_steps(1, after=attempt)
                assert time.monotonic() - struck < _BACK_WITHIN_S, f"back after {time.monotonic() - struck:.0f} s"
            time.sleep(max(0.0, end - time.monotonic()))
        victim.run.stop_file.touch()
        wait_for(lambda: "action" in victim.ledger[-1], within_s=60, what="the end of the run")
    ledger = ledger_lines(victim.run)
    measured = goodput_of(ledger)
    problems = [f"goodput {measured.share:.3f}"] if measured.share < _PROMISED_SHARE else []
    if (failures := sum(entry["reason"] == "failed" for entry in ledger)) != trials:
        problems.append(f"{trials} kills, but {failures} failures in the ledger")
    tally.spoil(problems, trials=trials)
    no_cause = {"step_s", "queue_s", "time_unix_s", "end_time_unix_s"}
    causes = sorted({name for entry in ledger for name in entry if name.endswith("_s")} - no_cause)
    each = {name: sum(float(entry.get(name, 0.0)) for entry in ledger) for name in causes}
    steps_s = sum(float(entry.get("step_s", 0.0)) for entry in ledger)
    each["end_and_detection_s"] = measured.allocated_s - steps_s - sum(each.values()) + each.get("lost_work_s", 0.0)
    words = [f"{name.removesuffix('_s').replace('_', ' ')} {total / trials:.2f}" for name, total in each.items()]
    return {
        "goodput": f"{measured.share:.3f} of {measured.allocated_s:.0f} s",
        "seconds per failure": ", ".join(words),
    }
