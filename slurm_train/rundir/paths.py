"""The run directory: the names of everything a run leaves on disk, and who may have written there.

The submitting half and the training half share no memory; they meet in these files. Whoever writes or reads one of
them takes its path from here. Code, script and configuration in it run later in its user's name, so a folder or file
that another user owns or may write is refused, not repaired: it could have been changed already.
"""

from __future__ import annotations

import contextlib
import grp
import itertools
import os
import pwd
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from slurm_train.errors import RunError
from slurm_train.rundir.files import listed
from slurm_train.rundir.plan_record import PlanRecord
from slurm_train.trust import enter_folder, is_own_folder, refusal, trusted_owners

_LONGEST_NAME = 255
_LONGEST_PATH = os.pathconf("/", "PC_PATH_MAX") - 256
"""Bytes of a run directory's path; the names of what lies in it need the rest."""
_CHECKPOINT = re.compile(r"checkpoint_(\d{7,})_attempt_(\d{4,})_([0-9a-f]{8})")
_SAVE = re.compile(r"checkpoint_(\d{7,})_([0-9a-f]{8})")
PASSED_OVER_PREFIX = "passed_over_"
"""Of the name of a checkpoint that a run has passed over, which no reader trusts."""


_MOST_PROBED = 20
SETUP_FAILED = "cluster.setup: exit code "
"""Begin of the line that a batch script writes into its log where a command of `cluster.setup` has failed."""
ID_DIGITS = 12
"""Length of a run id. 48 bits: of 10,000 runs two have the same id with a probability of 2e-7."""
USER_PREFIX = "@"
"""Of the name of a user's folder in a root that several users share; no name of a run begins so."""


def typed_root(root: Path) -> Path:
    """Returns a root of runs as it was spelled where they were started, else without links.

    A link may lead to another place on the nodes, so a run goes on under the path that it was started with, from
    whichever folder and by whichever link somebody looks at it. Runs keep their path in `plan.json`; only plans of
    this user's runs count.
    """
    real = root.resolve()
    for plan in itertools.islice(_own_plans(real), _MOST_PROBED):
        with contextlib.suppress(OSError):
            spelled = RunDirectory(Path(PlanRecord.read(plan, writers=trusted_owners()).path)).place
            if spelled != real and spelled.is_absolute() and spelled.samefile(real):
                return spelled
    return real


def as_typed(folder: Path) -> Path:
    """Returns the folder of a run or sweep with its root as that was spelled, see `typed_root`."""
    placed = Placed(folder)
    return typed_root(placed.place) / folder.relative_to(placed.place)


def _own_plans(root: Path) -> Iterator[Path]:
    """Yields where the plans of this user's runs are: a link in the path of another's could lead anywhere."""
    for folder in listed(root):
        if not folder.name.startswith(".") and is_own_folder(folder):
            for run in filter(is_own_folder, listed(folder)):
                yield run / "plan.json"


class Below:
    """An attribute that is a path below its owner's `path`; reading it does not look at the disk."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, _: object = None) -> Path:
        path: Path = owner.path / self._name
        return path


@dataclass(frozen=True, slots=True)
class Placed:
    """A folder `<root>/<name>/<id>`, of a run or a sweep; in a root that users share it is `<root>/@<user>/...`."""

    path: Path

    @property
    def place(self) -> Path:
        """The folder with the names: the root, or the user's own folder in one that users share."""
        return self.path.parent.parent

    @property
    def root(self) -> Path:
        """The root that it lies in."""
        return self.place.parent if self.place.name.startswith(USER_PREFIX) else self.place


@dataclass(frozen=True, slots=True)
class RunDirectory(Placed):
    """Paths below `runs/<name>/<run_id>/`; the disk is not looked at."""

    @classmethod
    def of_checkpoint(cls, checkpoint: Path) -> RunDirectory:
        """Returns the run that has a checkpoint."""
        return cls(checkpoint.parent.parent)

    @property
    def evaluated(self) -> RunDirectory:
        """Of an evaluation: the run that it lies in, below `evaluations`."""
        return RunDirectory(self.path.parent.parent)

    @property
    def name(self) -> str:
        """The run's name, e.g. "gpt-stdlib"."""
        return self.path.parent.name

    @property
    def run_id(self) -> str:
        """Short hash of what is trained, e.g. "3f9a1c07e2d4"."""
        return self.path.name

    config = Below("config.yaml")
    """Frozen, resolved configuration; what every attempt reads."""
    plan = Below("plan.json")
    """Batch arithmetic, world, resources."""
    submit_script = Below("submit.sh")
    """The sbatch script as submitted; works by hand."""
    request = Below("request.json")
    """What the script asks for; see `slurm.job_request`."""
    code = Below("code")
    """Snapshot of the submitting directory's source."""
    code_index = Below("code.json")
    """Size and hash of every file of the snapshot; checked before each attempt."""
    changes = Below("changes.jsonl")
    """What was changed on purpose in the middle of the run: one line per accepted change."""

    def before_change(self, number: int) -> Path:
        """Folder with the configuration, plan and code as they were before an accepted change."""
        return self.path / "before" / f"change_{number}"

    provenance = Below("provenance.json")
    """Git state and versions at submission."""
    job = Below("job.json")
    """All job ids and the newest submit time."""
    jobs = Below("jobs")
    """One file per job, so that recorders on several machines do not overwrite each other."""
    attempts = Below("attempts.jsonl")
    """Ledger: one start line and one end line per attempt."""
    epochs = Below("epochs")
    """One file per attempt, created exclusively: the fence between an attempt and its zombies."""
    logs = Below("logs")
    """Log files, one folder per attempt."""

    @property
    def submitted(self) -> Path:
        """Scripts as sbatch got them, each named by its job; a hidden one had no answer that could be read."""
        return self.logs / "submitted"

    metrics = Below("metrics.jsonl")
    """One JSON object per logged step."""
    checkpoints = Below("checkpoints")
    """Checkpoint directories."""
    result = Below("result.json")
    """Final metrics; exists only when the run is finished."""

    def prepared_result(self, attempt: int) -> Path:
        """What one attempt renames to `result`; a later attempt removes it first."""
        return self.path / f".result.attempt_{attempt}.json"

    stop_file = Below("STOP")
    """`touch` it to ask the run to save and stop."""
    lock = Below("lock.json")
    """Who runs this directory now."""
    submission_lock = Below("submission.json")
    """Who submits or cancels the run now."""
    events = Below("events.jsonl")
    """What happened on the way, one JSON object per non-finite step, spike, rollback, hang, stop; per node."""
    saves = Below("saves.jsonl")
    """What each checkpoint took: one JSON object per save."""
    report = Below("report.html")
    """The page that `report` writes."""
    scores = Below("scores.jsonl")
    """Of an evaluation that follows a run: what it has measured of each checkpoint."""
    stragglers = Below("stragglers.jsonl")
    """What the ranks spent their steps on: one JSON object per window of some seconds."""
    tensorboard = Below("tensorboard")
    """TensorBoard events."""
    profiles = Below("profiles")
    """Traces of torch.profiler, which a callback writes."""
    samples = Below("samples.jsonl")
    """What a language model wrote on the way, for a callback: one JSON object per prompt."""
    trackers = Below("trackers")
    """What is known of each tracker, their logs, and what they keep here themselves."""

    compile_cache = Below("compiled")
    """What torch has compiled; ranks load it as code."""

    def compiled(self, stage: int, local_rank: int) -> Path:
        """What torch has compiled for a stage of a pipeline on one GPU of a node."""
        return self.compile_cache / f"stage_{stage}_gpu_{local_rank}"

    def kernels(self, host: str) -> Path:
        """Where the ranks of a node compile if its folder of temporary files is no place for code."""
        return self.compile_cache / "nodes" / host

    def notified(self, message: str) -> Path:
        """Is there once a message was sent to the person, or is being sent."""
        return self.path / "notified" / message

    def attempt_logs(self, attempt: int) -> Path:
        """Folder of one attempt's logs: batch.log, rank_<r>.log."""
        return self.logs / f"attempt_{attempt}"

    def rank_log(self, attempt: int, rank: int) -> Path:
        """Log of one rank in one attempt."""
        return self.attempt_logs(attempt) / f"rank_{rank}.log"

    def environment(self, attempt: int) -> Path:
        """Python, packages, driver and GPUs of one attempt, on the node of its batch script."""
        return self.attempt_logs(attempt) / "environment.json"

    def heartbeats(self, attempt: int, first_rank: int) -> Path:
        """What the ranks of the node whose first one is `first_rank` are doing right now."""
        return self.attempt_logs(attempt) / f"heartbeats_{first_rank}"

    def oldest_heartbeat(self, attempt: int) -> Path:
        """The oldest of these, as the supervisor of many nodes saw it some seconds ago."""
        return self.attempt_logs(attempt) / "oldest_heartbeat.json"

    def signs(self, attempt: int, first_rank: int) -> Path:
        """Signs of life of a script's or function's ranks on the node whose first one is `first_rank`."""
        return self.attempt_logs(attempt) / f"signs_{first_rank}"

    def remarks(self, attempt: int) -> Path:
        """What the supervisor has to say about one attempt of a script or function while it runs."""
        return self.attempt_logs(attempt) / "remarks.json"

    def group(self, attempt: int) -> Path:
        """What rank 0 of a script has of torch.distributed in one attempt."""
        return self.attempt_logs(attempt) / "group.json"

    def account(self, attempt: int) -> Path:
        """What rank 0 has spent the time of one attempt on so far."""
        return self.attempt_logs(attempt) / "timing.json"

    def program(self, attempt: int) -> Path:
        """How far a user's own program has come in one attempt, as it has told its session."""
        return self.attempt_logs(attempt) / "program.json"

    def own_resume(self, attempt: int) -> Path:
        """From which checkpoint a script was to resume by its own words in one attempt."""
        return self.attempt_logs(attempt) / "own_resume.json"

    def own_resume_taken(self, attempt: int) -> Path:
        """Is there once the script has opened a checkpoint of its own in that attempt."""
        return self.attempt_logs(attempt) / "own_resume_taken"

    def notice(self, attempt: int) -> Path:
        """When Slurm will end one attempt."""
        return self.attempt_logs(attempt) / "notice.json"

    def step_times(self, attempt: int, rank: int) -> Path:
        """How long one rank's steps took in one attempt."""
        return self.attempt_logs(attempt) / f"step_times_{rank}.json"

    def preflight(self, attempt: int) -> Path:
        """What the look at nodes and network before an attempt has found."""
        return self.attempt_logs(attempt) / "preflight.json"

    def preflight_folder(self, attempt: int) -> Path:
        """What nodes write for each other during the preflight."""
        return self.attempt_logs(attempt) / "preflight"

    def stacks(self, attempt: int, rank: int) -> Path:
        """Where one rank's threads stood when it had made no progress for long."""
        return self.attempt_logs(attempt) / f"stacks_{rank}.txt"

    def flight(self, attempt: int, rank: int) -> Path:
        """Which collectives one rank had begun when it had made no progress for long."""
        return self.attempt_logs(attempt) / f"flight_{rank}.json"


def require_room(run: RunDirectory) -> None:
    """Checks the length of a run directory's path.

    Raises:
        RunError: the names of what lies in it would not fit.
    """
    hint = "name another place with run.root=DIR, or a shorter run.name"
    length = len(os.fsencode(run.path))
    if length > _LONGEST_PATH:
        raise RunError(f"the path of the run has {length} bytes, at most {_LONGEST_PATH} can be used", hint=hint)
    longest = max(len(os.fsencode(part)) for part in run.path.parts)
    if longest > _LONGEST_NAME:
        raise RunError(f"a name in the run's path has {longest} bytes, at most {_LONGEST_NAME} can be used", hint=hint)


def existing_attempts(run: RunDirectory) -> list[int]:
    """Returns the numbers of all attempts that were ever opened, ascending; `has_successor` asks for less."""
    numbers = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(run.epochs):  # noqa: PTH208  # names alone
            match = re.fullmatch(r"attempt_(\d+)", name)
            if match:
                numbers.append(int(match[1]))
    return sorted(numbers)


class CheckpointName(NamedTuple):
    """The parts of a checkpoint's directory name, e.g. "checkpoint_0001000_attempt_0002_3f9a1c07".

    The largest value is the newest checkpoint: highest step, then highest attempt.
    """

    step: int
    attempt: int
    """The attempt that owns the directory: it wrote it, or it has claimed it from an earlier attempt."""
    save_id: str
    """8 random hexadecimal digits of this save, kept through claims: no name is ever used for a second save."""

    def __str__(self) -> str:
        return f"checkpoint_{self.step:07d}_attempt_{self.attempt:04d}_{self.save_id}"


def parse_name(name: str) -> CheckpointName | None:
    """Reads a checkpoint's directory name; None for any other name."""
    match = _CHECKPOINT.fullmatch(name)
    checkpoint = CheckpointName(int(match[1]), int(match[2]), match[3]) if match else None
    return checkpoint if str(checkpoint) == name else None


def name_of(path: Path) -> CheckpointName:
    """Returns the parts of the name of a directory from `list_checkpoints`."""
    name = parse_name(path.name)
    assert name is not None, f"{path} has no checkpoint's name"
    return name


def save_path(checkpoint: Path) -> Path:
    """Returns what names a save whoever owns it, e.g. ".../checkpoint_0001000_3f9a1c07"; see `find_save`.

    A directory without a checkpoint's name is returned as it is.
    """
    name = parse_name(checkpoint.name)
    return checkpoint if name is None else checkpoint.with_name(f"checkpoint_{name.step:07d}_{name.save_id}")


def find_save(path: Path) -> Path:
    """Returns the directory that a save has now; the path itself where it is a directory or the save is gone.

    A checkpoint that the run has passed over, or gone back behind, is found as well: it is asked for by name.

    Args:
        path: a path from `save_path`.
    """
    match = _SAVE.fullmatch(path.name)
    if match is None or path.is_dir():
        return path
    owned = []
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(path.parent):  # noqa: PTH208  # names alone
            parsed = parse_name(name.removeprefix(PASSED_OVER_PREFIX))
            if parsed is not None and (parsed.step, parsed.save_id) == (int(match[1]), match[2]):
                owned.append((parsed, name))
    return path.with_name(max(owned)[1]) if owned else path


def list_checkpoints(root: Path) -> list[Path]:
    """Lists the directories with a checkpoint's name, newest first, trusted or not."""
    return [root / str(name) for name, is_directory in _named_entries(root) if is_directory]


def list_displaced(root: Path) -> list[Path]:
    """Lists what has a checkpoint's name and is no directory, such as a link that was left where one was moved away."""
    return [root / str(name) for name, is_directory in _named_entries(root) if not is_directory]


def _named_entries(root: Path) -> list[tuple[CheckpointName, bool]]:
    """Returns the checkpoints' names in a directory, newest first, each with whether it is that of a directory."""
    named: dict[CheckpointName, bool] = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(root) as entries:
        for entry in entries:
            name = parse_name(entry.name)
            if name is not None:
                named[name] = entry.is_dir(follow_symlinks=False)
    return sorted(named.items(), reverse=True)


def require_private(run: RunDirectory) -> None:
    """Checks that only this user can have changed what the run will execute.

    Looked at are the run's own folder, what is run or obeyed in it, and the way to it as far as it exists (see
    `trust.enter_folder`). Root and name may be writable for others where they are sticky, or for the user's own group
    of one.

    Raises:
        RunError: naming the place, its owner and its mode.
    """
    folders = [*_code(run), run.compile_cache, run.epochs, run.logs, run.checkpoints]
    entries = [run.path, *folders, run.config, run.plan, run.submit_script, run.request]
    for path in filter(os.path.lexists, entries):
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode) or status.st_uid not in trusted_owners() or others_may_write(status):
            raise refusal(path, status, "another user could have written what would run in your name")
    for path in filter(os.path.lexists, {run.path.parent, run.place, run.root}):
        status = path.stat()
        if _others_may_replace(status):
            raise refusal(path, status, "another user could replace your files")
    path = Path(os.path.abspath(run.path))  # noqa: PTH100  # links stay: they are looked at
    os.close(enter_folder(next(folder for folder in (path, *path.parents) if os.path.isdir(folder))))  # noqa: PTH112


def _code(run: RunDirectory) -> list[Path]:
    """Returns the snapshot; where the runs of a sweep share one by a link, that one and the folders above it.

    Folders in it count where others can enter it at all.
    """
    root = run.place.resolve()
    if not run.code.is_symlink() or run.code.lstat().st_uid not in trusted_owners():
        return _reachable(run.code)
    shared = run.code.resolve()
    if not shared.is_relative_to(root):
        return [run.code]
    above = (folder for folder in shared.parents if folder.is_relative_to(root) and folder != root)
    return [*_reachable(shared), *above]


def _reachable(code: Path) -> list[Path]:
    if not code.is_dir() or not code.stat().st_mode & 0o011:
        return [code]
    return [Path(folder) for folder, _, _ in os.walk(code)]


def _others_may_replace(status: os.stat_result) -> bool:
    is_foreign = status.st_uid not in trusted_owners()
    return (is_foreign or others_may_write(status)) and not status.st_mode & stat.S_ISVTX


def others_may_write(status: os.stat_result) -> bool:
    """Returns whether other users may write to what has this status; links are always 0777 and mean nothing."""
    if status.st_mode & stat.S_IWOTH or not status.st_mode & stat.S_IWGRP:
        return bool(status.st_mode & stat.S_IWOTH)
    # Many systems make a group for each user, which is the user's alone.
    try:
        user = pwd.getpwuid(os.geteuid())
        group = grp.getgrgid(status.st_gid)
    except KeyError:
        return True
    return group.gr_name != user.pw_name or not set(group.gr_mem) <= {user.pw_name}
