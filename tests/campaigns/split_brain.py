"""Campaign `split-brain`: the nodes of runs are lost to Slurm while their processes live on, and Slurm starts the runs
elsewhere. Nothing that the old ranks still do may be seen, and they must leave.

The slurmd of a node is killed and the node is declared down, so nobody waits for a time-out. Some of the old processes
are stopped before that, at a random line or a chosen one, and go on beside the new attempt.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from slurm_train.errors import ClusterError
from slurm_train.metrics.writer import read_metrics
from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.files import read_lines
from slurm_train.rundir.layout import RunDirectory, existing_attempts
from slurm_train.tools.devcluster.cluster import start_node, stop_node
from slurm_train.tools.devcluster.plan import DEFAULT_STATE_DIR
from tests.campaigns.commit_watch import CommitWatch
from tests.campaigns.result import Result
from tests.campaigns.split_brain_trials import (
    GONE_WITHIN_S,
    MODES,
    STEPS,
    ZOMBIE_MODULE,
    History,
    Trial,
    plan_trials,
    what_is_wrong,
)
from tests.support.command_line import TINY, TINY_MODULE, Person, new_project
from tests.support.process_faults import rank_pid, supervisor_pid, wait_until_gone
from tests.support.slurm_runs import wait_until_finished, wait_until_step
from tests.support.waiting import wait_for

_AT_ONCE = 9
_PATIENCE_S = 240.0


@dataclass(slots=True)
class Going:
    """A run under way."""

    trial: Trial
    job: str
    run: RunDirectory
    pids: list[int]
    """Of its first ranks."""
    supervisor: int


def run(*, seed: int, trials: int, folder: Path) -> Result:
    """Runs the trials in rounds, one loss of nodes for each, and returns how often nothing was seen."""
    person = Person(new_project(folder / "project"))
    (person.folder / "tiny.py").write_text(TINY_MODULE + ZOMBIE_MODULE)
    golden = _golden_digests(person)
    planned, problems, moments, gone = plan_trials(seed=seed, trials=trials), list[str](), 0, list[float]()
    for start in range(0, len(planned), _AT_ONCE):
        for trial, found in _try_round(person, planned[start : start + _AT_ONCE], golden):
            problem = found if isinstance(found, str) else what_is_wrong(found)
            if isinstance(found, History):
                gone.append(found.gone_s)
                moments += sum(one.attempt == 0 and one.time_unix_s > found.begin_unix_s for one in found.commits)
            print(f"{trial}: {problem or f'nothing seen, gone after {gone[-1]:.1f} s'}", flush=True)
            problems += [f"{trial}: {problem}"] if problem else []
    figures = {
        "old ranks gone after": f"{max(gone, default=0.0):.1f} s at most",
        "commits of theirs that the new attempt claimed": str(moments),
    }
    return Result(trials=trials, held=trials - len(problems), figures=figures, problems=tuple(problems))


def _golden_digests(person: Person) -> dict[int, str]:
    """Returns the weights of undisturbed runs, by number of ranks."""
    digests = {}
    for ranks, (_, run) in [(ranks, _submit(person, f"golden-{ranks}", ranks, "model.place=none")) for ranks in (1, 2)]:
        digests[ranks] = str(wait_until_finished(run, within_s=_PATIENCE_S)["weights_digest"])
    return digests


def _submit(person: Person, name: str, ranks: int, *words: str) -> tuple[str, RunDirectory]:
    own = ("model._target_=tiny.Zombie", "checkpoint.every_steps=2", f"train.max_steps={STEPS}")
    names = {word.partition("=")[0] for word in own}
    kept = [word for word in TINY if word.partition("=")[0] not in names]
    size = (f"+cluster=1x{ranks}", f"run.name={person.folder.parent.name}-{name}")
    return person.types(*size, *kept, *own, *words).job_and_run


def _try_round(person: Person, trials: list[Trial], golden: dict[int, str]) -> list[tuple[Trial, History | str]]:
    with ThreadPoolExecutor(_AT_ONCE) as pool, CommitWatch() as watch:
        started = list(pool.map(lambda trial: _start(person, trial, watch), trials))
        going = [one for one in started if isinstance(one, Going)]
        try:
            with _lost({node for one in going for node in read_ledger(one.run)[0]["nodes"]}):
                found = list(pool.map(lambda one: _follow(one, golden, watch), going))
        finally:
            for one in going:
                _release(one)
                person.runs("scancel", "--quiet", one.job)
    stories = {one.trial.number: story for one, story in zip(going, found, strict=True)}
    return [(trial, stories.get(trial.number, str(one))) for trial, one in zip(trials, started, strict=True)]


def _start(person: Person, trial: Trial, watch: CommitWatch) -> Going | str:
    """Returns the run where its trial wants it to be, stopped if so; or why it did not get there."""
    folder = person.folder / f"hold-{trial.number}"
    folder.mkdir()
    place = MODES[trial.mode]
    words = (f"model.place={place or repr(place)}", f"model.folder={folder}", f"model.last={STEPS}")
    try:
        job, run = _submit(person, str(trial.number), trial.num_ranks, *words)
        watch.add(run)
        _wait_until_there(run, trial, folder)
        going = Going(trial, job, run, [rank_pid(run, rank) for rank in range(trial.num_ranks)], supervisor_pid(run))
        if trial.is_stopped:
            for pid in going.pids:
                os.kill(pid, signal.SIGSTOP)
        return going
    except (AssertionError, OSError, subprocess.TimeoutExpired) as err:
        return f"no trial: {str(err).partition(chr(10))[0]}"


def _wait_until_there(run: RunDirectory, trial: Trial, folder: Path) -> None:
    if MODES[trial.mode]:
        wait_for(lambda: (folder / "held").exists(), within_s=_PATIENCE_S, what=f"{trial.mode} of {run.path}")
        return
    wait_until_step(run, 5, within_s=_PATIENCE_S)
    if trial.mode == "saving":
        wait_for(lambda: _is_saving(run), within_s=60, what=f"a save of {run.path}", poll_s=0.001)


def _is_saving(run: RunDirectory) -> bool:
    return any(name.endswith(".tmp") for name in os.listdir(run.checkpoints))  # noqa: PTH208  # as quick as can be


@contextmanager
def _lost(nodes: set[str]) -> Iterator[None]:
    """Makes Slurm believe that nodes are gone; what runs there runs on."""
    names = ",".join(sorted(nodes))
    for node in nodes:
        stop_node(DEFAULT_STATE_DIR, node=node)
    _scontrol("update", f"NodeName={names}", "State=DOWN", "Reason=campaign")
    try:
        yield
    finally:
        _scontrol("update", f"NodeName={names}", "State=RESUME")
        for node in nodes:
            start_node(DEFAULT_STATE_DIR, node=node)


def _follow(one: Going, golden: dict[int, str], watch: CommitWatch) -> History | str:
    """Lets the old ranks go on beside the new attempt and returns what was seen when the run is over."""
    run, trial = one.run, one.trial
    try:
        wait_for(
            lambda: existing_attempts(run)[1:],
            within_s=_PATIENCE_S,
            what=f"a second attempt of {run.path}",
            poll_s=0.02,
        )
        begin_unix_s = (run.epochs / "attempt_1").stat().st_mtime
        time.sleep(max(0.0, begin_unix_s + trial.go_on_s - time.time()))  # the moment is the trial
        _release(one)
        since = time.monotonic() if trial.is_stopped else time.monotonic() - (time.time() - begin_unix_s)
        for pid in one.pids:
            wait_until_gone(pid, within_s=2 * GONE_WITHIN_S)
        gone_s = time.monotonic() - since
        result = wait_until_finished(run, within_s=_PATIENCE_S)
        wait_until_gone(one.supervisor, within_s=90)
    except (AssertionError, ClusterError, OSError) as err:
        return f"no trial: {str(err).partition(chr(10))[0]}"
    lines = [line for line in read_metrics(run.metrics) if "loss" in line]
    return History(
        begin_unix_s=begin_unix_s,
        commits=watch.commits(run),
        metrics=[(line["attempt"], line["step"], line["time_unix_s"]) for line in lines],
        ledger=[(line["event"], line["attempt"]) for line in read_lines(run.attempts)],
        result_attempt=json.loads(run.result.read_text())["attempt"],
        gone_s=gone_s,
        digest=str(result["weights_digest"]),
        golden=golden[trial.num_ranks],
    )


def _release(one: Going) -> None:
    for folder in one.run.path.parents[2].glob(f"hold-{one.trial.number}"):
        (folder / "go").touch()
    for pid in one.pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _scontrol(*words: str) -> None:
    done = subprocess.run(["scontrol", *words], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{words}: {done.stderr}"
