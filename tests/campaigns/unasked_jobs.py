"""Jobs that nobody can ask about: no Slurm commands on this machine, or a Slurm that does not answer.

Each trial makes a run and an evaluation of it, whose jobs wait, train, come back, have stopped or are finished. Then
`checkpoint gc`, a follower, a wait, `status -w` and `cancel` look at them. What the files do not call over counts as
alive: it keeps its checkpoints, and no command says that it has ended.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from slurm_train.checkpoint.collect import collect_checkpoints
from slurm_train.config.frozen import dump_config
from slurm_train.config.schema import RunConfig
from slurm_train.errors import ClusterError, RunError, SlurmTrainError
from slurm_train.evaluation.follower import Follower
from slurm_train.rundir.attempts import open_attempt
from slurm_train.rundir.jobs import process_lives, record_job, take_lock, this_process
from slurm_train.rundir.ledger import Start
from slurm_train.rundir.paths import RunDirectory, list_checkpoints, name_of
from slurm_train.rundir.pins import list_pins, pin_save, read_leases, renew_lease
from slurm_train.rundir.sweep import Element
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.queue_view import QueueView
from slurm_train.start.cancel import cancel_run
from slurm_train.status.activity import wait_for_runs
from slurm_train.status.run_status import Surveyor, until_over
from tests.campaigns.record import Tally
from tests.support.ledgers import close_attempt
from tests.support.small_checkpoints import make_checkpoint

_JOB = "123"
_EVALUATION_JOB = "124"
_LOOKS = 30
_COMMANDS = ("squeue", "scontrol", "sacct", "sinfo", "sacctmgr", "sbatch", "scancel")
_ANSWERS = {
    "no commands": "",
    "no controller": "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1",
    "a time-out": "echo 'slurm_load_jobs error: Socket timed out on send/recv operation' >&2; exit 1",
    "no words": "exit 1",
    "killed": "kill -9 $$",
    "no munge": "echo 'error: Munge encode failed: Failed to connect to /run/munge' >&2; exit 1",
}
ALIVE = ("waits", "trains", "comes back")
STATES = (*ALIVE, "stopped", "finished")


class _Enough(Exception):
    """Ends a wait that would go on."""


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Makes so many runs and lets every command look at each."""
    dice = random.Random(seed)
    answers: Counter[str] = Counter()
    states: Counter[str] = Counter()
    for number in range(trials):
        answer = dice.choice(list(_ANSWERS))
        state = dice.choice(STATES)
        evaluation_state = dice.choice(STATES)
        place = folder / f"trial_{number}"
        with tally.trial(f"trial {number}, {answer}: run {state}, evaluation {evaluation_state}") as problems:
            commands = _commands(place, answer)
            subject = _make_run(place, state)
            _make_evaluation(subject, evaluation_state)
            problems += _looks(subject, state, commands)
            problems += _removals(subject, state, evaluation_state, commands)
            problems += ["a job was cancelled"] * (place / "cancelled").exists()
        answers[answer] += 1
        states[state] += 1
    return {
        "Slurm's answer": ", ".join(f"{answer} {count}" for answer, count in answers.most_common()),
        "runs": ", ".join(f"{state} {count}" for state, count in states.most_common()),
    }


def _commands(place: Path, answer: str) -> SlurmCommands:
    programs = place / "bin"
    programs.mkdir(parents=True)
    for name in _COMMANDS if _ANSWERS[answer] else ():
        note = f"touch {place}/cancelled\n" if name == "scancel" else ""
        (programs / name).write_text(f"#!/bin/sh\n{note}{_ANSWERS[answer]}\n")
        (programs / name).chmod(0o755)
    return SlurmCommands({"PATH": str(programs)})


def _make_run(place: Path, state: str) -> RunDirectory:
    subject = RunDirectory(place / "runs" / "mine" / "0123456789ab")
    _make_files(subject, _JOB, state)
    for step in (10, 20, 30, 40):
        make_checkpoint(subject.checkpoints, step, attempt=0)
    return subject


def _make_evaluation(subject: RunDirectory, state: str) -> None:
    evaluation = RunDirectory(subject.path / "evaluations" / "7d434a1ed8a2")
    _make_files(evaluation, _EVALUATION_JOB, state)
    oldest = min(subject.checkpoints.glob("checkpoint_*"))
    pin_save(subject.checkpoints, name_of(oldest).save_id, evaluation)
    renew_lease(subject.checkpoints, evaluation, most=2)


def _make_files(run: RunDirectory, job_id: str, state: str) -> None:
    run.path.mkdir(parents=True)
    run.config.write_text(dump_config(RunConfig()))
    run.submit_script.write_text("#!/bin/bash\n")
    record_job(run, job_id)
    if state == "waits":
        return
    attempt = open_attempt(run, Start(job_id=job_id, restart_count=0, nodes=("n1",), world_size=1))
    if state == "trains":
        take_lock(run.lock, this_process(job_id=job_id), is_alive=process_lives)
    elif state == "comes back":
        close_attempt(run, attempt, {"reason": "preempted", "action": "requeue"})
    elif state == "stopped":
        close_attempt(run, attempt, {"reason": "failed", "action": "stop"})
    else:
        run.result.write_text("{}")


def _looks(subject: RunDirectory, state: str, commands: SlurmCommands) -> list[str]:
    """Returns what is wrong with those that look at a run until it is over."""
    if state not in ALIVE:
        return []
    ends: dict[str, Callable[[], bool]] = {
        "a follower": lambda: _follower_ends(subject, commands),
        "a wait": lambda: _wait_ends(subject, commands),
        "status -w": lambda: _watch_ends(subject, commands),
    }
    return [f"{name} has ended" for name, has_ended in ends.items() if has_ended()]


def _follower_ends(subject: RunDirectory, commands: SlurmCommands) -> bool:
    evaluation = RunDirectory(subject.path / "evaluations" / "a2a2a2a2a2a2")
    evaluation.path.mkdir()
    attempt = open_attempt(evaluation, Start(job_id=None, restart_count=0, nodes=("n1",), world_size=1))
    times = iter(range(0, 100 * (_LOOKS + 2), 100))
    follower = Follower(evaluation, attempt, commands, clock=lambda: float(next(times)))
    return any(follower.is_over() for _ in range(_LOOKS))


def _wait_ends(subject: RunDirectory, commands: SlurmCommands) -> bool:
    with contextlib.suppress(_Enough):
        wait_for_runs([subject], commands, say=lambda _: None, sleep=_sleep_at_most())
        return True
    return False


def _watch_ends(subject: RunDirectory, commands: SlurmCommands) -> bool:
    surveyor = Surveyor(QueueView(commands))
    subjects = [Element(run=subject)]
    with contextlib.suppress(_Enough):
        for _ in until_over(lambda: surveyor.look(subjects), every_s=0.0, sleep=_sleep_at_most()):
            pass
        return True
    return False


def _sleep_at_most() -> Callable[[float], None]:
    left = iter(range(_LOOKS))

    def sleep(_: float) -> None:
        if next(left, None) is None:
            raise _Enough

    return sleep


def _removals(subject: RunDirectory, state: str, evaluation_state: str, commands: SlurmCommands) -> Iterator[str]:
    """Yields what is wrong with what ends or removes something."""
    before = _files(subject)
    kept = (list_pins(subject.checkpoints), read_leases(subject.checkpoints))
    try:
        cancel_run(subject, commands)
        yield "cancel says that it has ended the run"
    except ClusterError:
        pass
    except RunError as err:
        if state in ALIVE:
            yield f"cancel: {err.message}"
    if _files(subject) != before:
        yield "cancel has changed files"
    with contextlib.suppress(SlurmTrainError):
        collect_checkpoints(subject, commands, keep=1)
    if state == "trains" and _files(subject) != before:
        yield "gc has changed the files of a run that trains"
    if evaluation_state in ALIVE:
        if not any(name_of(path).save_id == kept[0][0].save_id for path in list_checkpoints(subject.checkpoints)):
            yield "gc has removed what an evaluation needs"
        if (list_pins(subject.checkpoints), read_leases(subject.checkpoints)) != kept:
            yield "gc has removed a pin or a lease"


def _files(subject: RunDirectory) -> set[Path]:
    return set(subject.path.rglob("*"))
