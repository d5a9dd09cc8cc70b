"""Who runs and submits a run: its jobs, the STOP file that keeps jobs from beginning, and two locks.

Every job has an entry of its own, `jobs/<job id>`. Submitters and jobs on several machines add theirs at the same time,
and none of them can overwrite another's. `job.json` is the same as one list, for people and for programs; what it lacks
because two have written it at once is in the entries.

A lock is a file created exclusively, naming a Slurm job or a local process. A holder that is gone is overtaken; who
can tell is the caller's business (a process by its start time, a job by asking Slurm), passed in as a function.
`lock.json`: who runs the run, or writes its configuration and code. `submission.json`: who submits or cancels it; jobs
do not look at that one, so a submitter that was killed holds no job up.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from slurm_train.errors import ClusterError, RunError
from slurm_train.processes import start_ticks
from slurm_train.rundir.files import (
    NO_SUCH_CALL,
    change_times,
    is_there,
    link,
    make_folder,
    read_json,
    read_record,
    rename,
    write_atomic,
    write_durable,
    write_record,
)
from slurm_train.rundir.ledger import Action, Attempt, Reason, read_ledger
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.job_request import JobRequest, record_of


def write_request(script: Path, request: JobRequest, *, durable: bool = True) -> None:
    """Writes a batch script, and what it asks for beside it."""
    write_atomic(record_of(script), request.to_json(), durable=durable)
    write_atomic(script, request.text(), durable=durable, mode=0o700)


def read_script_of(run: RunDirectory) -> JobRequest:
    """Returns what a run's script on disk asks for.

    Raises:
        ClusterError: there is no script.
    """
    if not run.submit_script.is_file():
        raise ClusterError(f"{run.submit_script} is missing", hint="type the run's first command again")
    return JobRequest.read(run.submit_script)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """The jobs of a run, as `job.json` has them."""

    job_ids: tuple[str, ...] = ()
    """All of them, e.g. ("12", "13_4"), in the order in which they were recorded."""
    submit_time_unix_s: float = 0.0
    """When the newest was submitted."""
    continues: dict[str, str] = field(default_factory=dict)
    """By job: the one that it takes over from when that one has ended."""
    packed: tuple[str, ...] = ()
    """Those that other runs share (`sweep.pack`): they may go on when this run has ended."""
    clusters: dict[str, str] = field(default_factory=dict)
    """By job: the cluster that has it; of jobs that earlier versions recorded it is not known."""

    @property
    def job_id(self) -> str:
        """The newest."""
        return self.job_ids[-1]


def read_job(run: RunDirectory) -> JobRecord | None:
    """Returns the jobs of a run, or None for one that never was submitted."""
    record = read_record(run.job, JobRecord) or JobRecord()
    for entry in _unlisted(run, record.job_ids):
        record = _extended(record, entry)
    return record if record.job_ids else None


def _extended(record: JobRecord, entry: JobRecord) -> JobRecord:
    """Returns a record with one more job, that of an entry of `jobs/`."""
    (job_id,) = entry.job_ids
    return JobRecord(
        job_ids=(*(other for other in record.job_ids if other != job_id), job_id),
        submit_time_unix_s=entry.submit_time_unix_s,
        continues={other: before for other, before in record.continues.items() if other != job_id} | entry.continues,
        packed=(*(other for other in record.packed if other != job_id), *entry.packed),
        clusters=record.clusters | entry.clusters,
    )


def _unlisted(run: RunDirectory, listed: Iterable[str]) -> list[JobRecord]:
    """Returns the entries that are not in `job.json`, oldest first."""
    try:
        names = {name for name in os.listdir(run.jobs) if name[0].isdigit()} - set(listed)  # noqa: PTH208  # 10x
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    records = [read_record(run.jobs / name, JobRecord) for name in names]
    entries = [record for record in records if record is not None]
    return sorted(entries, key=lambda entry: entry.submit_time_unix_s)


def record_job(
    run: RunDirectory,
    job_id: str,
    *,
    cluster: str = "",
    continues: str | None = None,
    durable: bool = True,
    is_packed: bool = False,
) -> None:
    """Adds a job to those of a run; one that is recorded already stays as it is.

    Args:
        run: the run.
        job_id: the job.
        cluster: the cluster that has it; "" where it is not known. Two clusters may use the same id: then the one
            that is recorded last is meant, since the other was over when it was submitted.
        continues: the job that it takes over from; such a job does not start if that one was cancelled.
        durable: fsync it; False where the id is kept elsewhere as well.
        is_packed: other runs share the job.
    """
    before = read_job(run) or JobRecord()
    known = before.clusters.get(job_id, "")
    if job_id in before.job_ids and not (known and cluster and known != cluster):
        return
    make_folder(run.jobs, within=run.path)
    entry = JobRecord(
        job_ids=(job_id,),
        submit_time_unix_s=time.time(),
        continues={job_id: continues} if continues else {},
        packed=(job_id,) if is_packed else (),
        clusters={job_id: cluster} if cluster else {},
    )
    write_record(run.jobs / job_id, entry, durable=durable)
    write_record(run.job, _extended(read_job(run) or before, entry), durable=durable)


def left_jobs(run: RunDirectory, job_ids: Iterable[str], ledger: Sequence[Attempt]) -> frozenset[str]:
    """Returns those of some jobs in which a run does nothing more, as its files say, whatever becomes of the jobs.

    Args:
        run: the run.
        job_ids: jobs that Slurm's answer says nothing about: those that other runs share, those of another cluster.
        ledger: its attempts.
    """
    left = set[str]()
    for job_id in job_ids:
        last = next((attempt for attempt in reversed(ledger) if attempt.start.job_id == job_id), None)
        if last is not None and last.action in (Action.STOP, Action.FINISH):
            left.add(job_id)
        # The next start of the job obeys the file.
        elif last is None or last.end is not None:
            request = read_json(run.stop_file) or {}
            left.update({job_id} & set(request.get("jobs", ())))
    return frozenset(left)


def jobs_elsewhere(record: JobRecord | None, holder: Holder | None, *, cluster: str) -> dict[str, str]:
    """Returns the jobs of a run that another cluster has, each with the name of that cluster; the holder's is last.

    Slurm of this cluster knows nothing of them, and another job may have the same id here.

    Args:
        record: its recorded jobs.
        holder: who holds its lock.
        cluster: the cluster of this machine; "" where it is not known, and no job counts as elsewhere.
    """
    clusters = {job_id: record.clusters.get(job_id, "") for job_id in record.job_ids} if record is not None else {}
    if holder is not None and holder.job_id is not None:
        clusters.pop(holder.job_id, None)
        clusters[holder.job_id] = holder.cluster
    return {job_id: name for job_id, name in clusters.items() if cluster and name not in ("", cluster)}


def unknown_elsewhere(
    run: RunDirectory, record: JobRecord | None, elsewhere: Mapping[str, str], ledger: Sequence[Attempt]
) -> dict[str, str]:
    """Returns those jobs of another cluster that may be queued or running, as far as the files of the run say.

    When a job was submitted here, those before it were over, or this was refused.

    Args:
        run: the run.
        record: its recorded jobs.
        elsewhere: see `jobs_elsewhere`.
        ledger: its attempts.
    """
    if not elsewhere or is_there(run.result) or has_stopped(ledger, record):
        return {}
    recorded = list(record.job_ids) if record is not None else []
    num_over = max((place for place, job_id in enumerate(recorded, 1) if job_id not in elsewhere), default=0)
    over = {*recorded[:num_over], *left_jobs(run, elsewhere, ledger)}
    return {job_id: name for job_id, name in elsewhere.items() if job_id not in over}


def named(jobs: Mapping[str, str]) -> str:
    """Returns jobs and their clusters as text, e.g. "job 12 of cluster b"."""
    return ", ".join(f"job {job_id} of cluster {cluster}" for job_id, cluster in jobs.items())


def ask_to_stop(
    run: RunDirectory, job_ids: Iterable[str], *, newest_job: int | None, cancels: bool = True, durable: bool = True
) -> None:
    """Writes STOP for jobs that are about to be cancelled, or that go on for other runs.

    Args:
        run: the run.
        job_ids: these jobs.
        newest_job: a number that every job has at most which Slurm knows by now; None: that of the newest of these.
        cancels: whether the jobs are cancelled next; a run that ends before Slurm shows it was cancelled all the same.
        durable: fsync it.
    """
    write_atomic(run.stop_file, _stop_text(job_ids, newest_job, cancels=cancels), durable=durable)


def _stop_text(job_ids: Iterable[str], newest_job: int | None, *, cancels: bool) -> str:
    ids = sorted(job_ids)
    newest = max([newest_job or 0, *map(number_of, ids)])
    return json.dumps({"jobs": ids, "newest_job": newest, "cancels": cancels}) + "\n"


def stop_asked(run: RunDirectory) -> Reason | None:
    """Returns what the STOP file asks for: CANCELLED by `cancel`, STOPPED by hand or in a pack; None without a file."""
    if not is_there(run.stop_file):
        return None
    request = read_json(run.stop_file) or {}
    return Reason.CANCELLED if request.get("cancels") else Reason.STOPPED


def number_of(job_id: str) -> int:
    """Returns the number by which Slurm counts submissions: 12 for "12", "12_3" and "12_[0-3]"; 0 for none."""
    digits = re.match(r"[0-9]+", job_id)
    return int(digits[0]) if digits is not None else 0


def obey_stop(
    run: RunDirectory, job_id: str | None, *, continues: str | None, newest_job: Callable[[], int | None]
) -> str:
    """Returns why a job may not begin, "" where it may. Called with the run's lock held.

    Slurm numbers jobs in the order of submission, so no clocks are compared: a job that was submitted before the stop
    has at most the number in the file. One with a higher number was submitted by a person afterwards; it removes the
    file. A job that takes over from another one counts as that one.

    Args:
        run: the run.
        job_id: this job; None without Slurm.
        continues: the job that it takes over from.
        newest_job: see `complete_stop`.
    """
    if not is_there(run.stop_file):
        return ""
    request = read_json(run.stop_file)
    if request is not None and job_id is not None:
        newest_stopped = int(request.get("newest_job", 0))
        if number_of(continues or job_id) > newest_stopped:
            run.stop_file.unlink(missing_ok=True)
            return ""
    if job_id is not None:
        complete_stop(run, job_id, newest_job=newest_job)
    return f"{run.stop_file} is there, so nothing is started; `resume {run.run_id}` continues the run"


def complete_stop(run: RunDirectory, job_id: str, *, newest_job: Callable[[], int | None]) -> None:
    """Adds to a STOP that a person made with `touch` which jobs it is about: those that Slurm knows by now.

    A job that the person submits later may begin then. The file is written through a descriptor of the one that is
    there: where somebody removes it meanwhile it stays removed.

    Args:
        run: the run.
        job_id: the job that has obeyed the file.
        newest_job: asks Slurm for the highest number of this user's jobs; None where it does not answer.
    """
    # Where the file cannot be written, later jobs do not begin until somebody removes it: nothing is lost by that.
    with contextlib.suppress(OSError):
        if not run.stop_file.exists() or read_json(run.stop_file) is not None:
            return
        text = _stop_text([job_id], newest_job(), cancels=False)
        descriptor = os.open(run.stop_file, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


_GUARD_WAIT_S = 10.0
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds a run directory: a Slurm job, or a process on a host."""

    job_id: str | None
    host: str
    pid: int
    started: str
    """The process's start in kernel ticks: a recycled pid has another one."""
    cluster: str = ""
    """The cluster that has the job; "" where it is not known."""
    machine: str = ""
    """Tells the host from another machine of the same name (`login1` of two clusters); "" where it is not known."""

    def __str__(self) -> str:
        if self.job_id is None:
            return f"process {self.pid} on {self.host}"
        return f"Slurm job {self.job_id}" + (f" of cluster {self.cluster}" if self.cluster else "")

    def is_same_job(self, other: Holder) -> bool:
        """Returns whether both are the same Slurm job, maybe at different starts."""
        is_same_cluster = self.cluster == other.cluster or not (self.cluster and other.cluster)
        return self.job_id is not None and self.job_id == other.job_id and is_same_cluster


def this_process(*, job_id: str | None = None, cluster: str = "") -> Holder:
    """Returns the calling process as a holder, for a job where one is named."""
    pid = os.getpid()
    return Holder(
        job_id=job_id,
        host=socket.gethostname(),
        pid=pid,
        started=start_ticks(pid),
        cluster=cluster,
        machine=_machine(),
    )


def is_here(holder: Holder) -> bool:
    """Returns whether a holder is a process of this machine, not one of another machine, of the same name even."""
    is_named_alike = holder.host == socket.gethostname()
    return is_named_alike and (holder.machine == _machine() or not (holder.machine and _machine()))


def process_lives(holder: Holder) -> bool:
    """Returns whether a holder on this host still runs; on another host it counts as alive."""
    return not is_here(holder) or start_ticks(holder.pid) == holder.started != ""


@functools.cache
def _machine() -> str:
    """Returns the beginning of a hash of this machine's id, which itself is not for others; "" where it has none."""
    try:
        machine_id = Path("/etc/machine-id").read_bytes().strip()
    except OSError:
        return ""
    return hashlib.sha256(b"slurm_train " + machine_id).hexdigest()[:12] if machine_id else ""


def take_lock(path: Path, holder: Holder, *, is_alive: Callable[[Holder], bool], wait_s: float = 0.0) -> None:
    """Takes a lock for `holder`; a holder that no longer lives, or the same job's earlier attempt, is overtaken.

    Args:
        path: `lock` of a run, or `submission_lock`.
        holder: who takes it.
        is_alive: whether another holder still lives.
        wait_s: seconds to wait for a process, which may be writing for a moment only; a job is not waited for.

    Raises:
        RunError: another living process or job holds it.
    """
    deadline_s = time.monotonic() + wait_s
    tries = 0
    while tries < 10:
        if _create(path, holder):
            return
        current = read_holder(path)
        if current is not None and not current.is_same_job(holder) and is_alive(current):
            if current.job_id is None and time.monotonic() < deadline_s:
                time.sleep(_LOOK_S)
                continue
            doing = "submitted" if path == RunDirectory(path.parent).submission_lock else "run"
            raise RunError(
                f"{path.parent} is being {doing} by {current}",
                hint="watch it with `python -m slurm_train status`, or end it with `cancel` first; "
                f"if you know that it is gone, remove {path}",
            )
        _remove_if(path, current)
        tries += 1
    raise RunError(f"{path} could not be taken: another starter is quicker each time", hint="try again")


def release_lock(path: Path, holder: Holder) -> None:
    """Gives a lock back, if `holder` still has it."""
    # Not by an unlink after a look: a process that was stopped between the two would remove its successor's.
    if read_holder(path) == holder:
        _take_away(path, holder)


def clear_dead(path: Path, *, is_alive: Callable[[Holder], bool]) -> None:
    """Removes the lock of a holder that no longer lives; called before a job starts, where it can be found out."""
    current = read_holder(path)
    if current is not None and not is_alive(current):
        _remove_if(path, current)


def read_holder(path: Path) -> Holder | None:
    """Returns who holds a lock; None if it is free or its file is damaged."""
    return read_record(path, Holder)


def _create(path: Path, holder: Holder) -> bool:
    # link() is atomic where O_EXCL over old NFS is not, and the file appears with its content in it.
    temporary = path.with_name(f".{path.name}.{holder.host}.{holder.pid}")
    temporary.unlink(missing_ok=True)
    write_durable(temporary, json.dumps(asdict(holder)) + "\n")
    try:
        return link(temporary, path)
    except OSError as err:
        if err.errno not in (*NO_SUCH_CALL, errno.EPERM):
            raise
        raise RunError(
            f"{path} cannot be made: its file system makes no hard links, and a lock is one: {err.strerror}",
            hint="name a place on another file system with run.root=DIR",
        ) from err
    finally:
        temporary.unlink(missing_ok=True)


def _remove_if(path: Path, stale: Holder | None) -> None:
    # Only one starter at a time may remove, so what it has read is still what it removes.
    with _removing(path):
        # One that is not there is not to be removed either: a newcomer may be making his at this moment.
        if path.exists() and read_holder(path) == stale:
            _take_away(path, stale)


def _take_away(path: Path, expected: Holder | None) -> None:
    """Removes a lock; one that is another's by now is put back."""
    aside = path.with_name(f".{path.stem}.stale.{socket.gethostname()}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        rename(path, aside)
        if read_holder(aside) != expected:
            link(aside, path)
        aside.unlink()


@contextlib.contextmanager
def _removing(path: Path) -> Iterator[None]:
    descriptor = os.open(path.with_name(f".{path.stem}.guard"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        # A process that was stopped in here is not waited for without end; nor is a file system without locks.
        deadline_s = time.monotonic() + _GUARD_WAIT_S
        while time.monotonic() < deadline_s:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_LOOK_S)
            except OSError:
                break
        yield
    finally:
        os.close(descriptor)


# A supervisor that was killed closes nothing; then this is long enough for rank 0's last lines.
_LAST_WORDS_S = 60.0


def has_stopped(ledger: Sequence[Attempt], record: JobRecord | None) -> bool:
    """Returns whether the last attempt has stopped for good, and no job that was recorded later will open another.

    The order of the jobs decides: the clock of a node may be ahead of that of the machine that has submitted.

    Args:
        ledger: of the run.
        record: its jobs.
    """
    if not ledger or not ledger[-1].waits_for_person:
        return False
    last_job = ledger[-1].start.job_id
    job_ids = record.job_ids if record is not None else ()
    if last_job is None or last_job not in job_ids:
        # On this machine, or in an allocation.
        return record is None or record.submit_time_unix_s < ledger[-1].last_unix_s
    newest = {attempt.start.job_id: attempt for attempt in ledger}
    later = job_ids[job_ids.index(last_job) + 1 :]
    return all(job_id in newest and newest[job_id].waits_for_person for job_id in later)


def has_ended(run: RunDirectory) -> bool:
    """Returns whether nothing more will be written, the last lines of logs included."""
    ledger = read_ledger(run)
    written = change_times([run.result])
    if written:
        # Rank 0 prints its last lines after the result; the supervisor closes the attempt after those.
        is_closed = bool(ledger) and ledger[-1].end is not None
        return is_closed or time.time() - written[run.result] > _LAST_WORDS_S
    return has_stopped(ledger, read_job(run))
