"""What of a run is queued or running: the one place that decides it, and the locks of those who act upon it.

A run may have several jobs at once: one that runs, another that was submitted by hand, one that takes over later. All
that are recorded are asked about, the holder of the run's lock, and this user's jobs whose script lies in the run
directory or in that of its array (typed by hand, or by a submitter that was killed or could not read sbatch's answer).
However many runs there are, squeue is called twice; where such an answer is left and no job has the script, once more
for the names of jobs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slurm_train.errors import ClusterError, RunError
from slurm_train.rundir.files import change_times, listed, make_private
from slurm_train.rundir.jobs import (
    Holder,
    JobRecord,
    has_stopped,
    jobs_elsewhere,
    left_jobs,
    named,
    number_of,
    process_lives,
    read_holder,
    read_job,
    release_lock,
    take_lock,
    this_process,
    unknown_elsewhere,
)
from slurm_train.rundir.ledger import read_ledger
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.pins import lease_path, list_pins, read_leases
from slurm_train.rundir.scores import follower_of
from slurm_train.rundir.sweep import ArrayDirectory, element_jobs, wait_for_sweeps
from slurm_train.slurm.commands import SlurmCommands, is_job_id
from slurm_train.slurm.job_request import JobRequest
from slurm_train.slurm.records import JobState

SUBMITTER_WAIT_S = 30.0
"""How long a command waits for another one that submits the same run, by itself or with a sweep."""
_FIRST_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Active:
    """What of a run is queued or running, or may be; false where nothing is."""

    jobs: tuple[str, ...] = ()
    """Ids of the jobs that are queued, running, ending or about to come back; oldest first."""
    process: Holder | None = None
    """A process without a job that holds the run; one on another machine counts as alive."""
    unknown_jobs: tuple[str, ...] = ()
    """Ids on record that may be queued or running: there is no Slurm on this machine that could be asked."""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Ids on record that may be queued or running on another cluster, each with its name."""

    def __bool__(self) -> bool:
        return self.is_known or bool(self.unknown_jobs) or bool(self.elsewhere)

    @property
    def is_known(self) -> bool:
        """Whether something is queued or running for certain."""
        return bool(self.jobs) or self.process is not None


def find_active(runs: Sequence[RunDirectory], commands: SlurmCommands) -> dict[RunDirectory, Active]:
    """Returns the runs of which something is queued or running, or may be because Slurm here cannot be asked.

    Whoever removes or ends something takes both alike; `Active.is_known` tells them apart.

    Raises:
        ClusterError: Slurm is here and does not answer.
    """
    has_slurm = commands.is_available()
    holders = {run: read_holder(run.lock) for run in runs}
    records = {run: read_job(run) for run in runs}
    elsewhere: dict[RunDirectory, Mapping[str, str]] = {}
    if has_slurm and any(names_cluster(records[run], holders[run]) for run in runs):
        for run in runs:
            elsewhere[run] = jobs_elsewhere(records[run], holders[run], cluster=commands.cluster)
    may_have_jobs = has_slurm and any(run.submit_script.exists() for run in runs)
    scripts = commands.own_scripts() if may_have_jobs else {}
    by_script = jobs_by_script(runs, scripts)
    ids: dict[RunDirectory, list[str]] = {}
    for run in runs:
        recorded = _job_ids(run, records[run], holders[run], by_script.get(run, ()), elsewhere.get(run, {}))
        ids[run] = [job_id for job_id in recorded if not is_of_another_run(scripts.get(job_id, ""), run)]
    all_ids = list(itertools.chain.from_iterable(ids.values()))
    states = commands.job_states(all_ids, ended=False) if all_ids and has_slurm else {}
    if may_have_jobs:
        idle = [run for run in runs if not any(_is_active(job_id, states) for job_id in ids[run])]
        copies = jobs_by_name(idle, commands, scripts)
        for run, job_ids in copies.items():
            ids[run] += job_ids
            states |= commands.job_states(job_ids, ended=False)
    active: dict[RunDirectory, Active] = {}
    for run, holder in holders.items():
        is_process = holder is not None and holder.job_id is None and process_lives(holder)
        activity = Active(
            jobs=tuple(job_id for job_id in ids[run] if _is_active(job_id, states)),
            process=holder if is_process else None,
            unknown_jobs=() if has_slurm or _needs_no_job(run) else tuple(ids[run]),
            elsewhere=unknown_elsewhere(run, records[run], elsewhere[run], read_ledger(run))
            if elsewhere.get(run)
            else {},
        )
        if activity:
            active[run] = activity
    return active


def _needs_no_job(run: RunDirectory) -> bool:
    """Returns whether the files of a run say that no job of it is left."""
    return run.result.exists() or has_stopped(read_ledger(run), read_job(run))


def is_of_another_run(script: str, run: RunDirectory) -> bool:
    """Returns whether a job's script lies in the directory of another run: Slurm gives out ids again.

    Args:
        script: "" where it is not known.
        run: the run that has the job's id on record.
    """
    for folder in Path(os.path.realpath(script)).parents if script else ():
        if RunDirectory(folder).config.is_file():
            return str(folder) != os.path.realpath(run.path)
    # A wrapper's copy, or the script of an array.
    return False


def _is_active(job_id: str, states: Mapping[str, JobState]) -> bool:
    return job_id in states and states[job_id].is_active


def names_cluster(record: JobRecord | None, holder: Holder | None) -> bool:
    """Returns whether the cluster of some job of a run is on record; only then Slurm is asked for its own name."""
    return bool(record is not None and record.clusters) or bool(holder is not None and holder.cluster)


def _job_ids(
    run: RunDirectory,
    record: JobRecord | None,
    holder: Holder | None,
    script_jobs: Sequence[str],
    elsewhere: Collection[str],
) -> list[str]:
    """Returns the jobs of a run that Slurm is to be asked about."""
    held = [holder.job_id] if holder is not None and holder.job_id is not None else []
    recorded = [
        job_id for job_id in (*(record.job_ids if record is not None else ()), *held) if job_id not in elsewhere
    ]
    job_ids = dict.fromkeys([*recorded, *script_jobs])
    if record is None or not record.packed:
        return list(job_ids)
    left = left_jobs(run, record.packed, read_ledger(run))
    return [job_id for job_id in job_ids if job_id not in left]


def jobs_by_script(runs: Sequence[RunDirectory], scripts: Mapping[str, str]) -> dict[RunDirectory, list[str]]:
    """Returns the jobs of runs whose scripts lie in the directory of the run, or in that of its job array.

    Args:
        runs: the runs.
        scripts: of this user's jobs, see `SlurmCommands.own_scripts`.
    """
    by_name: defaultdict[str, list[RunDirectory]] = defaultdict(list)
    for run in runs:
        by_name[run.path.name].append(run)
    jobs: dict[RunDirectory, list[str]] = {}
    for job_id, folder in _folders_with_jobs(scripts):
        for run in by_name.get(folder.name, ()):
            # A job may have been submitted by another spelling of the path, through a link.
            if os.path.realpath(run.path) == os.path.realpath(folder):
                jobs.setdefault(run, []).append(job_id)
    return jobs


def _folders_with_jobs(scripts: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """Yields jobs, each with a folder that would be its run's: all above its script, and the runs of its array."""
    arrays: dict[ArrayDirectory, str] = {}
    for job_id, script in scripts.items():
        for folder in Path(os.path.realpath(script)).parents:
            array = ArrayDirectory(folder)
            if folder.parent.name == "arrays" and array.runs.exists():
                # squeue has a row for the elements that wait, and one for each that has begun.
                arrays[array] = str(number_of(job_id))
            elif is_job_id(job_id):
                yield job_id, folder
    for array, job_id in arrays.items():
        for run, element in element_jobs(array, job_id).items():
            yield element, run.path


def jobs_by_name(
    runs: Sequence[RunDirectory], commands: SlurmCommands, scripts: Mapping[str, str]
) -> dict[RunDirectory, list[str]]:
    """Returns the jobs of runs whose submission had no answer that could be read, by the names of the jobs.

    A wrapper may have submitted a copy of the script, which lies somewhere else. Called for runs whose script no
    active job has; Slurm is asked only if there is such a submission.

    Args:
        runs: the runs.
        commands: Slurm.
        scripts: of this user's jobs. A script in a directory with a run's id is that of another copy of the run.

    Raises:
        ClusterError: Slurm does not answer.
    """
    submissions = {run: unread_submission(run) for run in runs}
    unread = {run: script for run, script in submissions.items() if script is not None}
    names = commands.own_names() if unread else {}
    jobs: dict[RunDirectory, list[str]] = {}
    for run in unread:
        wanted = JobRequest.read(run.submit_script).name
        for job_id, name in names.items():
            is_elsewhere = run.run_id in Path(scripts.get(job_id, "")).parts
            if name == wanted and is_job_id(job_id) and not is_elsewhere:
                jobs.setdefault(run, []).append(job_id)
    return jobs


def unread_submission(run: RunDirectory) -> Path | None:
    """Returns the script whose submission had no answer that could be read; None where a job was recorded since."""
    # What was submitted is a link to a file with its job's id, what was refused is removed.
    waiting = [path for path in listed(run.submitted) if path.name.startswith(".submission") and not path.is_symlink()]
    times = change_times(waiting)
    newest = max(times, key=lambda path: times[path], default=None)
    record = read_job(run) if newest is not None else None
    if newest is None or (record is not None and record.submit_time_unix_s >= times[newest]):
        return None
    return newest


def newest_job(commands: SlurmCommands) -> int | None:
    """Returns the highest number of this user's jobs that Slurm knows now; None where it does not answer."""
    try:
        return max(map(number_of, commands.own_scripts()), default=None)
    except ClusterError:
        return None


def holder_lives(holder: Holder, commands: SlurmCommands) -> bool:
    """Returns whether a holder lives; one that cannot be asked about (no Slurm here, another host or cluster) does.

    Raises:
        ClusterError: Slurm is here and does not answer.
    """
    if holder.job_id is None:
        return process_lives(holder)
    if not commands.is_available() or (holder.cluster and commands.cluster not in ("", holder.cluster)):
        return True
    state = commands.job_states([holder.job_id], ended=False).get(holder.job_id)
    return state is not None and state.is_active


def live_holder(run: RunDirectory, commands: SlurmCommands) -> Holder | None:
    """Returns the process or job that runs a run at this moment, None where there is none; one that waits has none."""
    holder = read_holder(run.lock)
    return holder if holder is not None and holder_lives(holder, commands) else None


def refuse_active(run: RunDirectory, commands: SlurmCommands, *, inside: str | None = None) -> None:
    """Refuses a run of which something is queued or running, on Slurm or on this machine.

    Args:
        run: the run.
        commands: Slurm.
        inside: the job whose allocation this is typed in; that the run was run there before is not refused.

    Raises:
        RunError: as said, with what to type.
    """
    active = find_active([run], commands).get(run, Active())
    jobs = [job_id for job_id in active.jobs if job_id != inside]
    if jobs:
        raise RunError(
            f"{run.name}/{run.run_id} is active already: Slurm job {', '.join(jobs)}, {run.path}",
            hint=f"`status {run.run_id}` and `logs -f {run.run_id}` watch it, `cancel {run.run_id}` ends it; "
            "run.name=NAME or seed=N starts another",
        )
    holder = read_holder(run.lock)
    if inside is not None and holder is not None and holder.job_id == inside and process_lives(holder):
        raise RunError(
            f"{run.path} is being run in this allocation by {holder.pid} on {holder.host}", hint="wait for it"
        )
    if active.process is not None:
        raise RunError(
            f"{run.path} is being run by {active.process}",
            hint=f"wait for it, or `cancel {run.run_id}`; if you know that it is gone, remove {run.lock}",
        )
    if active.elsewhere:
        files = [run.job, *(run.jobs / job_id for job_id in active.elsewhere)]
        files += [run.lock] if holder is not None and holder.job_id in active.elsewhere else []
        raise RunError(
            f"{run.name}/{run.run_id} may be queued or running as {named(active.elsewhere)}, and Slurm here does not "
            f"know that cluster's jobs, {run.path}",
            hint="`status`, `resume` and `cancel` can be typed on a login node there; if you know that it is over, "
            f"remove {' '.join(map(str, files))}",
        )


def clear_dead_pins(run: RunDirectory, commands: SlurmCommands) -> None:
    """Lets go of the checkpoints that were kept for evaluations which are finished, or of which no job can be left.

    Raises:
        ClusterError: Slurm is here and does not answer.
    """
    kept = [(pin.path, pin.evaluation) for pin in list_pins(run.checkpoints)]
    for lease in read_leases(run.checkpoints):
        kept.append((lease_path(run.checkpoints, lease.follower_id), follower_of(run.path, lease.follower_id)))
    active = find_active([evaluation for _, evaluation in kept], commands) if kept else {}
    for path, evaluation in kept:
        submitter = read_holder(evaluation.submission_lock)
        is_submitted_now = submitter is not None and holder_lives(submitter, commands)
        if evaluation.result.exists() or not (evaluation in active or is_submitted_now):
            path.unlink(missing_ok=True)


def wait_for_runs(
    runs: Sequence[RunDirectory],
    commands: SlurmCommands,
    *,
    say: Callable[[str], None],
    see: str = "",
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Waits until no run is active any more, and returns whether all are finished. Ctrl-C ends the waiting alone.

    Slurm is asked rarely, with one command for all runs: `result.json` says by itself that a run is finished.

    Args:
        runs: the runs.
        commands: Slurm.
        say: prints a line for the person.
        see: what `status` shows of them; "": the first run that has no result.
        sleep: waits so many seconds.
    """
    pause_s = _FIRST_PAUSE_S
    num_seen = -1
    while True:
        unfinished = [run for run in runs if not run.result.exists()]
        if not unfinished:
            say(f"all {len(runs)} runs are finished")
            return True
        try:
            if not find_active(unfinished, commands):
                status = f"`status {see or unfinished[0].run_id}` says why"
                say(f"{len(unfinished)} of {len(runs)} runs ended without a result; {status}")
                return False
        except ClusterError as err:
            say(f"Slurm does not answer, asking again later: {err.message}")
        if len(unfinished) != num_seen:
            say(f"{len(runs) - len(unfinished)} of {len(runs)} runs are finished; Ctrl-C leaves the others alone")
            # When one run has ended, others may end soon.
            pause_s = _FIRST_PAUSE_S
            num_seen = len(unfinished)
        sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)


@contextlib.contextmanager
def submitting(run: RunDirectory, commands: SlurmCommands, *, inside: str | None = None) -> Iterator[None]:
    """Holds a run for one submitter at a time; nothing of it is active when the body begins.

    The body is everything from that check until the new job is recorded. Makes the directory; where the body refuses
    the run, what was made is removed again if it is empty.

    Args:
        run: the run.
        commands: Slurm.
        inside: see `refuse_active`.

    Raises:
        RunError: another submitter holds it, or the run is active.
        ClusterError: Slurm does not answer.
    """
    with _locked(run.submission_lock, commands, wait_s=SUBMITTER_WAIT_S):
        # A sweep that begins now sees that this run is held.
        wait_for_sweeps(run, wait_s=SUBMITTER_WAIT_S)
        refuse_active(run, commands, inside=inside)
        yield


def are_being_submitted(runs: Sequence[RunDirectory], commands: SlurmCommands) -> set[RunDirectory]:
    """Returns the runs that another command is submitting by themselves at this moment.

    Raises:
        ClusterError: Slurm is here and does not answer.
    """
    holders = {run: read_holder(run.submission_lock) for run in runs}
    return {run for run, holder in holders.items() if holder is not None and holder_lives(holder, commands)}


@contextlib.contextmanager
def writing(run: RunDirectory, commands: SlurmCommands, *, inside: str | None = None) -> Iterator[None]:
    """Takes the run's training lock while files that its ranks read (configuration, plan, code) are rewritten.

    A job that starts meanwhile waits until this is over. `inside` as for `refuse_active`.

    Raises:
        RunError: it is being run.
    """
    with _locked(run.lock, commands, inside=inside):
        yield


@contextlib.contextmanager
def no_submitter(run: RunDirectory, commands: SlurmCommands) -> Iterator[None]:
    """Waits for a submitter to record its job and keeps others out; one that hangs is not waited for."""
    with contextlib.ExitStack() as held:
        # An administrator may cancel what they may not write to.
        with contextlib.suppress(RunError, OSError):
            held.enter_context(_locked(run.submission_lock, commands, wait_s=SUBMITTER_WAIT_S))
        yield


@contextlib.contextmanager
def _locked(lock: Path, commands: SlurmCommands, *, wait_s: float = 0.0, inside: str | None = None) -> Iterator[None]:
    """Holds one of a run's two locks; a process that holds it is waited for so long."""

    def is_alive(other: Holder) -> bool:
        return process_lives(other) if other.job_id == inside else holder_lives(other, commands)

    holder = this_process()
    run = lock.parent
    made = [folder for folder in (run, *run.parents) if not folder.exists()]
    for tries_left in reversed(range(10)):
        try:
            make_private(run)
            take_lock(lock, holder, is_alive=is_alive, wait_s=wait_s)
            break
        except OSError as err:
            if isinstance(err, FileNotFoundError) and tries_left:
                # Another one was refused and has removed the empty directory.
                continue
            hint = "name another place with run.root=DIR"
            raise RunError(f"{run} cannot be made: {err.strerror or err}", hint=hint) from err
    try:
        yield
    finally:
        release_lock(lock, holder)
        # Where the body was refused they are empty.
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()
