"""A scorer of the user's own, called once for each checkpoint of a run as it appears. Imports no torch.

The scorer gets the checkpoint's directory in SLURM_TRAIN_CHECKPOINT and its step in SLURM_TRAIN_STEP. It returns
numbers as a JSON object: in the file that SLURM_TRAIN_SCORES names, or as the last line that it prints. Its output goes
to `score_<step>_<save id>.log` of the attempt's logs.

If the scorer fails, the evaluator ends with a message, so that the scorer is corrected before it is called for further
checkpoints; the same command then continues with the checkpoint that failed. If the scorer failed because the run has
renamed the checkpoint meanwhile, it is called again.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from slurm_train.checkpoint.collect import discard_kept
from slurm_train.checkpoint.verify import verify
from slurm_train.config.schema import RunConfig
from slurm_train.distributed.place import RankPlace
from slurm_train.errors import EXIT_DONE, EXIT_REQUEUE, CheckpointError, ConfigError, RunError, UnknownCheckpointError
from slurm_train.evaluation.follower import Follower, Waiting
from slurm_train.formatting import as_float
from slurm_train.rundir.files import create_empty, read_json, read_tail
from slurm_train.rundir.paths import RunDirectory, find_save
from slurm_train.rundir.pins import release_pins
from slurm_train.rundir.scores import Score, named
from slurm_train.rundir.timing import ProgramProgress
from slurm_train.session.signals import StopFlag
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.status.following import summary_of
from slurm_train.worker.script import script_command, script_env

CHECKPOINT = "SLURM_TRAIN_CHECKPOINT"
STEP = "SLURM_TRAIN_STEP"
SCORES = "SLURM_TRAIN_SCORES"
_LOOK_S = 1.0
_POLL_S = 0.1
# After its first signal Slurm waits for KillWait, often 30 s; in that time this process has to end as well.
_END_S = 10.0
_TAIL_BYTES = 1 << 16


def follow_with_script(
    config: RunConfig,
    *,
    place: RankPlace,
    env: Mapping[str, str],
    code_dir: Path,
    run: RunDirectory,
    attempt: int,
    stop: StopFlag,
) -> int:
    """Calls the scorer for each checkpoint of the followed run, oldest first, until that run is over.

    Args:
        config: of the evaluator; `script` is the scorer, `train.follow` the name of its scores.
        place: this rank; there is one.
        env: its environment.
        code_dir: where the scorer is searched first.
        run: the evaluator's directory.
        attempt: of the evaluator.
        stop: set when this process is to stop.

    Returns:
        EXIT_DONE when the run has ended and all checkpoints are scored, EXIT_REQUEUE after a stop.

    Raises:
        ConfigError: there are several ranks, or no such scorer.
        RunError: the scorer failed, or returned no numbers.
        UnknownCheckpointError: it cannot be read here; it may have a score another time.
    """
    if place.world_size != 1:
        raise ConfigError(
            f"a scorer is called once per checkpoint, and this evaluator has {place.world_size} ranks",
            hint="+cluster=1x1; the scorer may start processes itself",
        )
    command = script_command(config.script or [], code_dir=code_dir, run=run)
    name = config.train.follow or ""
    scorer_env = script_env(place, env, code_dir=code_dir, run=run)
    create_empty(run.scores)
    follower = Follower(run, attempt, SlurmCommands(env))
    while True:
        stop.check_file(run.stop_file)
        if stop.requested:
            return EXIT_REQUEUE
        is_over = follower.is_over()
        waiting = follower.next()
        if waiting is None and is_over:
            break
        if waiting is None:
            _wait(stop, _LOOK_S)
            continue
        score = _score(waiting, command, scorer_env, run=run, attempt=attempt, stop=stop, name=name)
        if score is not None:
            follower.record(score)
            print(f"step {score.step}: {score.problem or json.dumps(score.values)}", file=sys.stderr, flush=True)
    follower.finish()
    release_pins(run)
    discard_kept(follower.run, SlurmCommands(env))
    # A stop signal that comes from now on changes nothing.
    ProgramProgress(has_told_end=True).write(run.program(attempt))
    print(f"the run is over: {summary_of(run).words}", file=sys.stderr, flush=True)
    return EXIT_DONE


def _wait(stop: StopFlag, seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s and not stop.requested:
        time.sleep(_POLL_S)


def _score(
    waiting: Waiting,
    command: list[str],
    env: Mapping[str, str],
    *,
    run: RunDirectory,
    attempt: int,
    stop: StopFlag,
    name: str,
) -> Score | None:
    """Returns the score of a checkpoint; None if this process was asked to stop, or the checkpoint was renamed.

    Raises:
        RunError: the scorer failed, or returned no numbers.
        UnknownCheckpointError: it cannot be read here; it may have a score another time.
    """
    start_s = time.monotonic()
    path = find_save(waiting.save)
    try:
        manifest = verify(path)
    except UnknownCheckpointError:
        raise
    except CheckpointError as err:
        if find_save(waiting.save) != path:
            return None
        return waiting.not_scored(err.message)
    log = run.attempt_logs(attempt) / f"score_{waiting.step}_{waiting.save_id}.log"
    scores = log.with_suffix(".json")
    scores.unlink(missing_ok=True)
    variables = {CHECKPOINT: str(path), STEP: str(waiting.step), SCORES: str(scores)}
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, env={**env, **variables}, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    is_over = False
    while not is_over:
        # Looked at before the last look for a stop: a scorer that got the same signal may end first, with what it had.
        is_over = process.poll() is not None
        time.sleep(_POLL_S)
        stop.check_file(run.stop_file)
        if stop.requested:
            _end(process)
            return None
    if process.returncode == 0:
        values = numbers_of(_answer(scores, log), log=log)
        return waiting.scored(named(values, name), attempt=manifest.attempt, parent=manifest.parent, start_s=start_s)
    if find_save(waiting.save) != path:
        return None
    raise RunError(
        f"the scorer ended with exit code {process.returncode} for {path.name}",
        hint=f"see {log}; the same `evaluate --follow` goes on with this checkpoint",
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _answer(scores: Path, log: Path) -> object:
    if scores.exists():
        return read_json(scores)
    lines = [line for line in read_tail(log, _TAIL_BYTES).splitlines() if line.strip()]
    try:
        return json.loads(lines[-1]) if lines else None
    except ValueError:
        return None


def numbers_of(answer: object, *, log: Path) -> dict[str, float]:
    """Returns the numbers of a scorer by name.

    Args:
        answer: the JSON value.
        log: named in the message.

    Raises:
        RunError: it is no object of numbers, or is empty.
    """
    hint = f'write one to the file that {SCORES} names, or print it last, e.g. {{"accuracy": 0.5}}; see {log}'
    if not isinstance(answer, dict) or not answer:
        raise RunError("the scorer has handed back no JSON object of numbers", hint=hint)
    wrong = [key for key, value in answer.items() if not isinstance(value, float) and as_float(value) is None]
    if wrong:
        names = ", ".join(wrong)
        raise RunError(f"the scorer has handed back {names}, which is no number, or too large for a float", hint=hint)
    # JSON of Python has NaN and Infinity as well.
    return {str(key): math.nan if (number := as_float(value)) is None else number for key, value in answer.items()}
