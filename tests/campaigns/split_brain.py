"""Campaign `split-brain`: the nodes of runs are lost to Slurm while their processes live on, and Slurm starts the runs
elsewhere. Nothing that the old ranks still do may be seen, and they must leave.

The slurmd of a node is killed and the node is declared down, so nobody waits for a time-out. Some of the old processes
are stopped before that, at a random line or a chosen one, and go on beside the new attempt.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from slurm_train.checkpoint.verify import read_manifest
from slurm_train.errors import CheckpointError, ClusterError
from slurm_train.rundir.files import read_lines
from slurm_train.rundir.paths import RunDirectory, existing_attempts, list_checkpoints, name_of
from tests.campaigns.record import Tally, first_line, only_true
from tests.support.cluster_faults import daemons_stopped
from tests.support.command_line import TINY, TINY_MODULE, Person
from tests.support.ledgers import ledger_lines
from tests.support.process_faults import rank_pid, supervisor_pid, wait_until_gone
from tests.support.slurm_runs import at_work, command, step_lines, wait_until_finished, wait_until_step
from tests.support.waiting import repeating, wait_for

_AT_ONCE = 9
_PATIENCE_S = 240.0
STEPS = 60
GONE_WITHIN_S = 10.0
VISIBLE_FOR_S = 1.0
"""A commit that is taken back at once, before anybody chose it, counts as not visible."""

MODES: dict[str, str] = {
    "alive": "",
    "training": "",
    "saving": "",
    "before the rename": "rename",
    "after the rename": "renamed",
    "at the last step": "last",
}
"""Where the old ranks are when their node is lost, and where the model's module holds them for that."""

# In attempt 0 steps are slow, and the process can be held at a line of the commit or in its last step.
ZOMBIE_MODULE = """
ATTEMPT = os.environ.get("SLURM_TRAIN_ATTEMPT", "0")

class Hold:
    def __init__(self, place, folder):
        self.is_on, self.folder = ATTEMPT == "0" and place != "none", folder
        self.place = place if self.is_on else ""
        if self.place in ("rename", "renamed"):
            import slurm_train.checkpoint.commit as module
            original, commits = module.rename, []
            def held(source, target):
                if source.name == target.name + ".tmp":
                    commits.append(target)
                is_third = source.name == target.name + ".tmp" and len(commits) == 3
                if is_third and self.place == "rename":
                    self.wait()
                original(source, target)
                if is_third and self.place == "renamed":
                    self.wait()
            module.rename = held
    def wait(self):
        open(os.path.join(self.folder, "held"), "w").close()
        while not os.path.exists(os.path.join(self.folder, "go")):
            time.sleep(0.002)

class Zombie(nn.Module):
    def __init__(self, place: str = "", folder: str = "", last: int = 0, width: int = 256):
        super().__init__()
        self.hold, self.last, self.num_calls = Hold(place, folder), last, 0
        self.layers = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, width), nn.Linear(width, 1))
    def forward(self, x):
        self.num_calls += 1
        if self.hold.is_on and self.training:
            time.sleep(0.01 if self.hold.place == "last" else 0.4)
            if self.num_calls >= self.last and self.hold.place in ("", "last"):
                self.hold.wait()
        return self.layers(x)
"""


class Trial(NamedTuple):
    """One run whose ranks outlive their node.

    Args:
        is_stopped: the old processes are stopped before their node is lost, and go on when the new attempt has begun.
        go_on_s: after the begin of the new attempt, until they go on (or are let out of where they are held).
    """

    number: int
    mode: str
    num_ranks: int
    is_stopped: bool
    go_on_s: float

    def __str__(self) -> str:
        stopped = ", stopped" if self.is_stopped else ""
        return f"trial {self.number} ({self.mode}{stopped}, {self.num_ranks} ranks, goes on after {self.go_on_s:.1f} s)"


def plan_trials(*, seed: int, trials: int) -> list[Trial]:
    """Returns the trials: the modes in turn, sizes and moments at random."""
    chance = random.Random(seed)
    planned = []
    for number in range(trials):
        mode = list(MODES)[number % len(MODES)]
        is_stopped = {"alive": False, "training": True, "saving": True}.get(mode, chance.random() < 0.7)
        # One that is not stopped finds out by itself within some seconds.
        go_on_s = chance.uniform(0.0, 12.0 if is_stopped else 3.0)
        ranks = chance.choice((1, 1, 2))
        planned.append(Trial(number, mode, ranks, is_stopped, go_on_s))
    return planned


class Commit(NamedTuple):
    """A checkpoint that was seen under an attempt's name."""

    name: str
    attempt: int
    time_unix_s: float
    seen_for_s: float


def what_is_wrong(
    *,
    commits: Sequence[Commit],
    metrics: Sequence[tuple[int, int, float]],
    ledger: Sequence[tuple[str, int]],
    result_attempt: int,
    gone_s: float,
    digest: str,
    golden: str,
) -> list[str]:
    """Returns what of the old attempt, 0, became visible beside the new one, 1, when the run is over.

    Args:
        commits: every checkpoint that was seen.
        metrics: (attempt, step, time) of the lines that count.
        ledger: (event, attempt) of its lines, in the order of the file.
        result_attempt: whose result it is.
        gone_s: from the begin of attempt 1, or from when they went on, to the end of the last old rank.
        digest: of the weights.
        golden: of those of an undisturbed run.
    """
    first = min((time_s for attempt, _, time_s in metrics if attempt == 1), default=float("inf"))
    named = {
        # One that got its name before attempt 1 had claimed what it goes on from was claimed with the others.
        f"{one.name} got its name {one.time_unix_s - first:.2f} s after attempt 1's first step": one.time_unix_s > first
        and one.seen_for_s > VISIBLE_FOR_S
        for one in commits
        if one.attempt == 0
    }
    late = [step for attempt, step, time_s in metrics if attempt == 0 and time_s > first]
    begin = ledger.index(("start", 1)) if ("start", 1) in ledger else len(ledger)
    steps = [step for _, step, _ in metrics]
    return only_true(
        {
            **named,
            f"attempt 0's lines of steps {late} count, written after attempt 1's first": late,
            "attempt 0 wrote to the ledger after attempt 1 had begun": ("end", 0) in ledger[begin:],
            f"the result is attempt {result_attempt}'s": result_attempt != 1,
            f"the old ranks were there for {gone_s:.1f} s": gone_s > GONE_WITHIN_S,
            f"its steps are {steps}": steps != list(range(1, STEPS + 1)),
            f"weights {digest}, undisturbed {golden}": digest != golden,
        }
    )


class CommitWatch:
    """Looks at the checkpoints of runs as any reader could: which were there, by which attempt, for how long."""

    def __init__(self) -> None:
        self.runs: list[RunDirectory] = []
        self._seen: dict[Path, Commit] = {}
        self._first_s: dict[Path, float] = {}

    def commits(self, run: RunDirectory) -> list[Commit]:
        """Returns what was seen of a run, oldest first."""
        seen = [commit for path, commit in list(self._seen.items()) if path.parent == run.checkpoints]
        return sorted(seen, key=lambda commit: commit.time_unix_s)

    def look(self) -> None:
        """Looks once."""
        for path in [path for run in list(self.runs) for path in list_checkpoints(run.checkpoints)]:
            with suppress(OSError, CheckpointError):
                # A rename changes it: when the directory got its name.
                named_unix_s = path.stat().st_ctime
                read_manifest(path)
                commit = self._seen.get(path) or Commit(path.name, name_of(path).attempt, named_unix_s, 0.0)
                now = time.monotonic()
                self._seen[path] = commit._replace(seen_for_s=now - self._first_s.setdefault(path, now))


class Going(NamedTuple):
    """A run under way."""

    trial: Trial
    job: str
    run: RunDirectory
    pids: list[int]
    """Of its first ranks."""
    supervisor: int


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Runs the trials in rounds, one loss of nodes for each, and returns how often nothing was seen."""
    planned, claimed, gone = plan_trials(seed=seed, trials=trials), list[Commit](), list[float]()
    with at_work(folder) as person:
        (person.folder / "tiny.py").write_text(TINY_MODULE + ZOMBIE_MODULE)
        golden = _golden_digests(person)
        for start in range(0, len(planned), _AT_ONCE):
            for trial, problems in _try_round(person, planned[start : start + _AT_ONCE], golden, claimed, gone):
                tally.add(str(trial), problems)
    return {
        "old ranks gone after": f"{max(gone, default=0.0):.1f} s at most",
        "commits of theirs that the new attempt claimed": str(len(claimed)),
    }


def _golden_digests(person: Person) -> dict[int, str]:
    """Returns the weights of undisturbed runs, by number of ranks."""
    runs = {ranks: _submit(person, f"golden-{ranks}", ranks, "model.place=none")[1] for ranks in (1, 2)}
    return {ranks: str(wait_until_finished(run, within_s=_PATIENCE_S)["weights_digest"]) for ranks, run in runs.items()}


def _submit(person: Person, name: str, ranks: int, *words: str) -> tuple[str, RunDirectory]:
    own = ("model._target_=tiny.Zombie", "checkpoint.every_steps=2", f"train.max_steps={STEPS}")
    names = {word.partition("=")[0] for word in own}
    kept = [word for word in TINY if word.partition("=")[0] not in names]
    size = (f"+cluster=1x{ranks}", f"run.name={person.folder.parent.name}-{name}")
    return person.types(*size, *kept, *own, *words).job_and_run


def _try_round(
    person: Person, trials: list[Trial], golden: dict[int, str], claimed: list[Commit], gone: list[float]
) -> list[tuple[Trial, list[str]]]:
    """Returns what is wrong with each of some trials that lose their nodes together."""
    watch = CommitWatch()
    with ThreadPoolExecutor(_AT_ONCE) as pool, repeating(watch.look, every_s=0.05):
        started = list(pool.map(lambda trial: _start(person, trial, watch), trials))
        going = [one for one in started if isinstance(one, Going)]
        try:
            with _lost({node for one in going for node in ledger_lines(one.run)[0]["nodes"]}):
                found = list(pool.map(lambda one: _follow(one, golden, watch, claimed, gone), going))
        finally:
            for one in going:
                _release(one)
                person.runs("scancel", "--quiet", one.job)
    problems = {one.trial.number: its for one, its in zip(going, found, strict=True)}
    return [(trial, problems.get(trial.number, [str(one)])) for trial, one in zip(trials, started, strict=True)]


def _start(person: Person, trial: Trial, watch: CommitWatch) -> Going | str:
    """Returns the run where its trial wants it to be, stopped if so; or why it did not get there."""
    folder = person.folder / f"hold-{trial.number}"
    folder.mkdir()
    place = MODES[trial.mode]
    words = (f"model.place={place or repr(place)}", f"model.folder={folder}", f"model.last={STEPS}")
    try:
        job, run = _submit(person, str(trial.number), trial.num_ranks, *words)
        watch.runs.append(run)
        _wait_until_there(run, trial, folder)
        going = Going(trial, job, run, [rank_pid(run, rank) for rank in range(trial.num_ranks)], supervisor_pid(run))
        if trial.is_stopped:
            for pid in going.pids:
                os.kill(pid, signal.SIGSTOP)
        return going
    except (AssertionError, OSError, subprocess.TimeoutExpired) as err:
        return f"no trial: {first_line(err)}"


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
    names = f"NodeName={','.join(sorted(nodes))}"
    with daemons_stopped(sorted(nodes)):
        command("scontrol", "update", names, "State=DOWN", "Reason=campaign")
        try:
            yield
        finally:
            command("scontrol", "update", names, "State=RESUME")


def _follow(
    one: Going, golden: dict[int, str], watch: CommitWatch, claimed: list[Commit], gone: list[float]
) -> list[str]:
    """Lets the old ranks go on beside the new attempt and returns what is wrong when the run is over."""
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
        return [f"no trial: {first_line(err)}"]
    commits = watch.commits(run)
    gone.append(gone_s)
    claimed += [commit for commit in commits if commit.attempt == 0 and commit.time_unix_s > begin_unix_s]
    return what_is_wrong(
        commits=commits,
        metrics=[(line["attempt"], line["step"], line["time_unix_s"]) for line in step_lines(run)],
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
