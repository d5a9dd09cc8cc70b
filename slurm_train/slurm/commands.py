"""The one place that runs squeue, sacct, scontrol, scancel, sinfo, sacctmgr and, with --test-only, sbatch and srun.

Commands get argument lists, a scrubbed environment and a time limit. A command that is missing, too slow or fails is a
ClusterError that quotes it. Nothing is retried and nothing is cached: how often to ask is the caller's business.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from slurm_train.errors import ClusterError
from slurm_train.formatting import plain
from slurm_train.slurm import policy, records, refusals
from slurm_train.slurm.allocation import cluster_of
from slurm_train.slurm.answers import in_words, said
from slurm_train.slurm.job_variables import command_environment
from slurm_train.slurm.policy import Association, Partition, Qos
from slurm_train.slurm.records import JobState
from slurm_train.slurm.refusals import TestVerdict

# sbatch gives up on an absent controller after 18 s (22.05); a busy one may take longer to answer.
DEFAULT_TIMEOUT_S = 60.0
# The database answers in a fraction of a second; where slurmdbd hangs, sacctmgr itself waits for 55 s (22.05).
_ACCOUNTING_TIMEOUT_S = 15.0
_KILLED_WITHIN_S = 1.0
# What the commands print when the controller does not answer; an answer that was lost may have been acted upon.
_UNREACHABLE = (
    "unable to contact slurm controller",
    "unexpected message received",
    "socket timed out",
    "connection refused",
    "zero bytes were transmitted",
    "communication connection failure",
    "backup controller in standby",
)
_JOB_ID = re.compile(r"[0-9]+(_[0-9]+)?")
_STEP_ID = re.compile(r"[0-9]+(_[0-9]+)?\.[0-9]+")
# As squeue writes them: "12", "12_3", "12_[0-3%2]", "12+1"; of steps "12.0", "12.batch", "12_3.0", "12+1.0".
_QUEUED_ID = re.compile(r"[0-9]+(?:_[0-9]+|_\[[^\]]*\]?|\+[0-9]+)?")
_LISTED_STEP = re.compile(r"[0-9]+(?:_[0-9]+|\+[0-9]+)?\.(?:[0-9]+(?:\+[0-9]+)?|[a-z]+)")
_VERSION = re.compile(r"^slurm(?:-wlm)? (\S+)", re.MULTILINE)
_FEDERATION = re.compile(r"^Federation:[ \t]*(\S+)", re.MULTILINE)


class ControllerAway(ClusterError):
    """Slurm's controller does not answer; asking again later may help."""


class MissingCommand(ClusterError):
    """A command of Slurm is not on this machine, or this user may not run it."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A process that has ended."""

    return_code: int
    stdout: str
    stderr: str

    @property
    def last_line(self) -> str:
        """The last line of stderr with something on it, else of stdout."""
        lines = [line.strip() for text in (self.stdout, self.stderr) for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else "no output"


def run_program(
    argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float, cwd: str | None = None, text: str = ""
) -> Finished:
    """Runs a program without a shell, with `text` as its input, and returns how it ended.

    One that is too slow is killed with all that it has started. A program that even KILL does not end, as nvidia-smi
    in a hanging driver, is left behind.

    Raises:
        OSError: it cannot be started.
        subprocess.TimeoutExpired: it did not end in time.
    """
    process = subprocess.Popen(
        list(argv),
        env=dict(env),
        cwd=cwd,
        stdin=subprocess.PIPE if text else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(text or None, timeout=timeout_s)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILLED_WITHIN_S)
        for file in filter(None, (process.stdin, process.stdout, process.stderr)):
            with contextlib.suppress(OSError):
                file.close()
        raise
    return Finished(process.returncode, stdout, stderr)


def run_process(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> Finished:
    """Runs a command of Slurm and returns how it ended.

    Raises:
        MissingCommand: no such command on this machine.
        ControllerAway: it could not be started, or did not end in time.
    """
    try:
        return run_program(argv, env=env, timeout_s=timeout_s)
    except (FileNotFoundError, PermissionError) as err:
        raise MissingCommand(
            f"there is no {argv[0]} on this machine",
            hint="run this where Slurm's commands are (a login node), or without +cluster to train on this machine",
        ) from err
    except OSError as err:
        # No memory, no descriptors, a file server that is away: that may pass.
        raise ControllerAway(
            f"`{shlex.join(argv)}` could not be started: {err}", hint="see `ulimit -a` and `free` on this machine"
        ) from err
    except subprocess.TimeoutExpired as err:
        raise ControllerAway(
            f"`{shlex.join(argv)}` did not answer in {timeout_s:g} s",
            hint="the Slurm controller may be busy: try later",
        ) from err


def is_away(stderr: str) -> bool:
    """Returns whether a command failed because it did not reach the controller."""
    return any(text in stderr.lower() for text in _UNREACHABLE)


def is_job_id(text: str) -> bool:
    """Returns whether the text is one job or one array element: "123" or "123_4"."""
    return _JOB_ID.fullmatch(text) is not None


class SlurmCommands:
    """Slurm as seen through its commands.

    Every method raises ClusterError if Slurm refuses or does not answer (ControllerAway), or an id is malformed.

    Args:
        env: environment to take PATH and SLURM_CONF from; job and rank variables in it are left out.
        timeout_s: seconds after which a command counts as failed.
        runner: what runs a command, called as `run_process` is.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        runner: Callable[..., Finished] = run_process,
    ) -> None:
        self._env = command_environment(env)
        self._cluster_of_job = cluster_of(env)
        self._timeout_s = timeout_s
        self._runner = runner

    def is_available(self) -> bool:
        """Returns whether sbatch and squeue are on the PATH, whatever the controller does."""
        path = self._env.get("PATH", "")
        return all(shutil.which(name, path=path) for name in ("sbatch", "squeue"))

    def version(self) -> str | None:
        """Returns the version of Slurm's commands here, e.g. "22.05.8"; None where it is not known."""
        try:
            match = _VERSION.search(self._run(["scontrol", "--version"]))
        except ClusterError:
            return None
        return None if match is None else match[1]

    def job_states(self, job_ids: Iterable[str], *, ended: bool = True) -> dict[str, JobState]:
        """Returns what Slurm knows about jobs, by id; an array's id gives one entry per element.

        One squeue call; what it does not know (ended longer ago than MinJobAge) is asked of sacct, where there is
        accounting. Ids that neither knows are absent. Many elements of one array are asked for by the array's id.

        Args:
            job_ids: the jobs.
            ended: ask sacct about those that squeue does not know; whether a job is active, squeue alone can tell.
        """
        checked_ids = _checked_ids(job_ids)
        try:
            queued, _ = self.queue(checked_ids)
        except ClusterError as unanswered:
            try:
                return self.accounted(checked_ids)
            except ClusterError:
                raise unanswered from None
        missing = [job_id for job_id in checked_ids if job_id not in queued] if ended else []
        with contextlib.suppress(ClusterError):  # many sites keep no accounts
            queued = {**self.accounted(missing), **queued}
        return queued

    def queue(self, job_ids: Iterable[str], *, whole: bool = False) -> tuple[dict[str, JobState], dict[str, int]]:
        """Returns what squeue alone knows about jobs; of waiting ones also how many jobs start before them.

        Args:
            job_ids: as for `job_states`.
            whole: read the whole queue, which the numbers need; without it they are empty. squeue gets all jobs from
                the controller as soon as it is asked for more than one, so this costs the controller no more.
        """
        checked_ids = _checked_ids(job_ids)
        if not checked_ids:
            return {}, {}
        # All states: a job stays visible for MinJobAge after its end, which spares a look at accounting.
        argv = ["squeue", "-h", "-t", "all"]
        if whole:
            return records.parse_queue(self._run([*argv, "-a", "-o", records.QUEUE_FORMAT]), checked_ids)
        text = self._run([*argv, "-r", "-o", records.SQUEUE_FORMAT, "-j", _by_array(checked_ids)], gone_is_empty=True)
        _require_readable("squeue", text, checked_ids, num_fields=records.SQUEUE_FORMAT.count("|") + 1)
        return records.select_jobs(checked_ids, records.parse_squeue(text)), {}

    def accounted(self, job_ids: Iterable[str]) -> dict[str, JobState]:
        """Returns what accounting knows about jobs, by id; many sites keep none, and sacct fails there."""
        checked_ids = _checked_ids(job_ids)
        if not checked_ids:
            return {}
        text = self._run(["sacct", "-n", "-P", "-X", "-o", records.SACCT_FORMAT, "-j", _by_array(checked_ids)])
        _require_readable("sacct", text, checked_ids, num_fields=records.SACCT_FORMAT.count(",") + 1)
        return records.select_jobs(checked_ids, records.parse_sacct(text))

    def waiting_jobs(self) -> list[JobState]:
        """Returns all jobs that wait for something, those of other users included as far as this one may see them."""
        argv = ["squeue", "-h", "-a", "-t", "PENDING", "-o", records.SQUEUE_FORMAT]
        return list(records.parse_squeue(self._run(argv)).values())

    def partitions_of(self, nodes: Sequence[str]) -> set[str]:
        """Returns the partitions that have at least one of these nodes."""
        return set(self._run(["sinfo", "-h", "-a", "-N", "-n", ",".join(nodes), "-o", "%R"]).split())

    def own_scripts(self) -> dict[str, str]:
        """Returns the batch scripts of all jobs of this user that the controller knows, by id: {"12": "/a/submit.sh"}.

        Array ids are as squeue writes them, e.g. "12_[0-3]".
        """
        lines = self._run(["squeue", "-h", "--me", "-t", "all", "-o", "%i|%o"]).splitlines()
        rows = (line.strip().partition("|")[::2] for line in lines)
        return {job_id.partition("+")[0]: script for job_id, script in rows if _QUEUED_ID.fullmatch(job_id)}

    def own_names(self) -> dict[str, str]:
        """Returns the names of all jobs of this user that the controller knows, by id as `own_scripts` has it."""
        lines = self._run(["squeue", "-h", "--me", "-t", "all", "-o", "%i|%j"]).splitlines()
        rows = (line.strip().partition("|")[::2] for line in lines)
        return {job_id.partition("+")[0]: name for job_id, name in rows if _QUEUED_ID.fullmatch(job_id)}

    def ended_states(self, job_id: str) -> list[str]:
        """Returns how the earlier starts of a job ended, oldest first, e.g. ["NODE_FAIL", "PREEMPTED"].

        Empty where there is no accounting.
        """
        done = self._call(["sacct", "-n", "-P", "-X", "-D", "-o", "JobID,State", "-j", *_checked_ids([job_id])])
        if done.return_code:
            return []
        rows = (line.strip().partition("|") for line in plain(done.stdout).splitlines())
        words = [state.split()[0].rstrip("+") for row, _, state in rows if _QUEUED_ID.fullmatch(row) and state.strip()]
        return [word for word in words if word not in ("PENDING", "RUNNING")]

    def steps(self, job_id: str) -> dict[str, str]:
        """Returns the running steps of a job as id -> name, e.g. {"77.1": "attempt_0", "77.batch": "batch"}."""
        argv = ["squeue", "-h", "-s", "-o", "%i|%j", "-j", *_checked_ids([job_id])]
        rows = (line.strip().partition("|") for line in self._run(argv, gone_is_empty=True).splitlines())
        return {step: name for step, _, name in rows if _LISTED_STEP.fullmatch(step)}

    def show_job(self, job_id: str) -> dict[str, str]:
        """Returns the fields of `scontrol show job`, e.g. {"JobState": "RUNNING", "Restarts": "0", ...}.

        Where a node has no scontrol, those that squeue knows. It fails where the controller does not know the job any
        more.
        """
        checked_ids = _checked_ids([job_id])
        try:
            return records.parse_record(self._run(["scontrol", "show", "job", *checked_ids]))
        except MissingCommand:
            argv = ["squeue", "-h", "-t", "all", "-O", records.RECORD_FORMAT, "-j", *checked_ids]
            return records.parse_queue_record(self._run(argv))

    def restarts(self, job_id: str) -> int:
        """Returns how often Slurm has restarted a job."""
        return records.restarts_of(self.show_job(job_id))

    def show_config(self) -> dict[str, str]:
        """Returns the controller's settings, e.g. {"MaxArraySize": "1001", "KillWait": "30 sec", ...}."""
        return records.parse_config(self._run(["scontrol", "show", "config"]))

    @cached_property
    def settings(self) -> dict[str, str]:
        """The controller's settings, asked for once: for commands of a person, which are over soon."""
        return self.show_config()

    @cached_property
    def cluster(self) -> str:
        """The name of the cluster that these commands ask, as `cluster_of` a job; "" where it is not told.

        Asked for once. ControllerAway where Slurm does not answer.
        """
        try:
            return self.settings.get("ClusterName", "").lower()
        except ControllerAway:
            raise
        except ClusterError:
            # Some nodes have no scontrol.
            return self._cluster_of_job

    def federation(self) -> str:
        """Returns the name of the federation that this cluster is one of, "" if it is in none or there is no answer."""
        with contextlib.suppress(ClusterError):
            match = _FEDERATION.search(self._run(["scontrol", "show", "federation"]))
            return "" if match is None else match[1]
        return ""

    def topology(self) -> dict[str, str]:
        """Returns what each node hangs on, e.g. {"node1": "switch leaf1"}; empty where Slurm knows no topology."""
        with contextlib.suppress(ClusterError):
            return records.parse_topology(self._run(["scontrol", "show", "topology"]))
        return {}

    def node_address(self, name: str) -> str:
        """Returns how Slurm reaches a node, its NodeAddr: a name or an address; "" where it does not know the node."""
        rows = records.split_rows(self._run(["sinfo", "-h", "-N", "-n", name, "-o", "%N|%o"]), 2)
        return next((address for node, address in rows if node == name), "")

    def node_names(self) -> list[tuple[str, str, str]]:
        """Returns NodeName, NodeAddr and host name of every node that this user can see."""
        rows = records.split_rows(self._run(["sinfo", "-h", "-N", "-o", "%N|%o|%n"]), 3)
        return [(name, address, host) for name, address, host in dict.fromkeys(map(tuple, rows))]

    def show_partition(self, name: str) -> dict[str, str]:
        """Returns the fields of `scontrol show partition`, e.g. {"GraceTime": "0", "PreemptMode": "REQUEUE", ...}."""
        return records.parse_record(self._run(["scontrol", "--all", "show", "partition", name]))

    def show_partitions(self) -> list[dict[str, str]]:
        """Returns the fields of every partition, hidden ones included, see `show_partition`."""
        partitions = records.parse_records(self._run(["scontrol", "--all", "show", "partition"]))
        return [fields for fields in partitions if fields.get("PartitionName")]

    def show_reservations(self) -> list[dict[str, str]]:
        """Returns the fields of every reservation that this user can see; none where that is not shown."""
        with contextlib.suppress(ClusterError):
            reservations = records.parse_records(self._run(["scontrol", "show", "reservation"]))
            return [fields for fields in reservations if fields.get("ReservationName")]
        return []

    def show_qos(self, name: str) -> Qos | None:
        """Returns a QOS; None where accounting does not know it, or there is none."""
        try:
            return next(iter(self.all_qos("where", f"name={name}")), None)
        except ClusterError:
            return None

    def all_qos(self, *where: str) -> list[Qos]:
        """Returns every QOS, or those that fit the words of a condition; it fails where there is no accounting."""
        query = ["sacctmgr", "-n", "-P", "show", "qos", *where]
        try:
            text = self._run([*query, f"format={policy.QOS_FORMAT},{policy.LIMIT_FACTOR}"])
        except ClusterError as err:
            if "unknown field" not in err.message.lower():
                raise
            text = self._run([*query, f"format={policy.QOS_FORMAT}"])
        return policy.parse_qos(text)

    def associations(self, user: str) -> list[Association]:
        """Returns the accounts that a user may charge; it fails where there is no accounting."""
        query = ["where", f"name={user}", "withassoc", f"format={policy.ASSOCIATION_FORMAT}"]
        return policy.parse_associations(self._run(["sacctmgr", "-n", "-P", "show", "user", *query]))

    def account_parents(self, cluster: str) -> dict[str, str]:
        """Returns the account above each account of a cluster that this user may see; fails without accounting."""
        query = ["where", f"cluster={cluster}", "user=", "format=Account,ParentName"]
        rows = records.split_rows(self._run(["sacctmgr", "-n", "-P", "show", "associations", *query]), 2)
        return {account: parent for account, parent in rows if account and parent}

    def partitions(self) -> list[Partition]:
        """Returns the partitions that this user can see, from one sinfo call."""
        return policy.parse_sinfo(self._run(["sinfo", "-h", "-e", "-o", policy.SINFO_FORMAT]))

    def test_only(self, script: Path, *flags: str) -> TestVerdict:
        """Returns whether Slurm would take a batch script and when it would start it; nothing is submitted.

        Slurm does not look at a partition that is down, nor, without EnforcePartLimits, at its time limit. It fails
        where the controller does not answer, which is no verdict on the script.

        Args:
            script: the script.
            flags: of sbatch, which come before those in the script.
        """
        argv = ["sbatch", "--test-only", *flags, str(script)]
        done = self._call(argv)
        if done.return_code and is_away(done.stderr):
            raise _failed_command(argv, done)
        return refusals.read_verdict(done.return_code, done.stderr, done.stdout)

    def refused_flags(self, flags: Sequence[str]) -> str:
        """Returns in srun's own words why it does not take these flags; "" where it does, or where that is not known.

        srun reads its flags and looks for its type of MPI before it asks the controller, and nothing is run
        (--test-only). What the controller says of a job of its own is no verdict on a step of another job.
        """
        words = self._refusal_of_srun(flags)
        # A site's wrapper, or a machine where srun may not be used, refuses whatever is typed.
        return words if words and not self._refusal_of_srun(()) else ""

    def _refusal_of_srun(self, flags: Sequence[str]) -> str:
        try:
            done = self._call(["srun", *flags, "--test-only", "true"])
        except ClusterError:
            return ""
        said = plain(done.stderr)
        is_of_controller = is_away(said) or "allocat" in said.lower()
        return records.own_words(said) if done.return_code and not is_of_controller else ""

    def options_of_srun(self) -> list[str]:
        """Returns the long names of srun's options by `srun --help`, those of plug-ins included; [] without srun."""
        try:
            names = re.findall(r"(?<![\w-])--([a-z][a-z0-9-]+)", self._run(["srun", "--help"]))
        except ClusterError:
            return []
        # Listed only where a plug-in binds tasks (22.05).
        return sorted({*names, "cpu-bind", "mem-bind"})

    def requeue(self, job_id: str, *, is_over: bool = False) -> None:
        """Asks Slurm to requeue a job unless it was cancelled; read `restarts` back to see whether that happened.

        The `incomplete` form returns success when it did nothing, and the plain form would bring back a job that its
        user cancelled. From inside the job, the call may end the caller. It fails e.g. for a job with --no-requeue.

        Args:
            job_id: array-safe id.
            is_over: the job has run into its time limit, where only the plain form works; such a job cannot be
                cancelled any more.
        """
        form = [] if is_over else ["incomplete"]
        self._run(["scontrol", "requeue", *form, *_checked_ids([job_id])])

    def allow_requeue(self, job_id: str) -> None:
        """Lets a job be requeued that was submitted with --no-requeue, or where that is the site's default."""
        self._update(job_id, "Requeue=1")

    def forbid_requeue(self, job_id: str) -> None:
        """Lets a job fail for good: one with --requeue=expedite is held instead (REQUEUE_HOLD, 26.05)."""
        self._update(job_id, "Requeue=0")

    def exclude_nodes(self, job_id: str, nodes: str) -> None:
        """Keeps a waiting job off nodes; Slurm refuses it for a running one."""
        self._update(job_id, f"ExcNodeList={nodes}")

    def hand_dependents(self, job_id: str, successor: str) -> None:
        """Makes this user's waiting jobs that wait for the success of one job wait for that of another instead."""
        lines = self._run(["squeue", "-h", "--me", "-t", "PENDING", "-o", "%i|%E"]).splitlines()
        rows = (line.strip().partition("|") for line in lines)
        for waiting, _, dependency in (row for row in rows if _QUEUED_ID.fullmatch(row[0])):
            # As squeue writes it: "afterok:12(unfulfilled),afterany:13(unfulfilled)".
            before = re.sub(r"\([^)]*\)", "", dependency)
            after = re.sub(rf"\bafterok:{job_id}(?![\d_])", f"afterok:{successor}", before)
            if after != before:
                self._update(waiting.partition("_[")[0], f"Dependency={after}")

    def put_off(self, job_id: str, seconds: int) -> None:
        """Lets a waiting job start no earlier than in so many seconds."""
        self._update(job_id, f"StartTime=now+{seconds}")

    def cancel(self, job_ids: Iterable[str], *, cluster: str = "") -> None:
        """Cancels jobs; those that have ended already are no error.

        Args:
            job_ids: the jobs.
            cluster: where they are, if not on this machine's cluster.
        """
        checked = _checked_ids(job_ids)
        if checked:
            self._scancel(*([f"--clusters={cluster}"] if cluster else []), *checked)

    def cancel_step(self, step_id: str, *, kill: bool = False) -> None:
        """Ends one step of a job ("123.0"); the job goes on. One that has ended already is no error.

        Args:
            step_id: the step.
            kill: by a signal to all its tasks that also ends stopped ones.
        """
        if _STEP_ID.fullmatch(step_id) is None:
            raise ClusterError(f"{step_id!r} is not the id of a step", hint='write "123.0"')
        self._scancel(*(["--signal=KILL"] if kill else []), step_id)

    def ask_step(self, step_id: str, *, name: Literal["TERM", "USR2"] = "TERM") -> None:
        """Asks the tasks of one step of a job to save and stop. One that has ended already is no error.

        Args:
            step_id: the step.
            name: signal; after TERM, which may be a preemption, a save that takes longer than KillWait is left out.
        """
        if _STEP_ID.fullmatch(step_id) is None:
            raise ClusterError(f"{step_id!r} is not the id of a step", hint='write "123.0"')
        self._scancel(f"--signal={name}", step_id)

    def _scancel(self, *words: str) -> None:
        argv = ["scancel", *words]
        done = self._call(argv)
        lines = [line.lower() for line in done.stderr.splitlines() if line.strip()]
        has_ended = all("invalid job id" in line or "already completing or completed" in line for line in lines)
        if done.return_code and not has_ended:
            raise _failed_command(argv, done)

    def _update(self, job_id: str, setting: str) -> None:
        self._run(["scontrol", "update", f"JobId={_checked_ids([job_id])[0]}", setting])

    def _run(self, argv: list[str], *, gone_is_empty: bool = False) -> str:
        """Returns what a command prints, as plain text; "" for jobs that are gone, of which squeue complains."""
        done = self._call(argv)
        if done.return_code and gone_is_empty and "invalid job id" in done.stderr.lower():
            return ""
        if done.return_code:
            raise _failed_command(argv, done)
        return plain(done.stdout)

    def _call(self, argv: list[str]) -> Finished:
        # Seconds since 1970, see `records.unix_s`; the verdict of `sbatch --test-only` is shown to people.
        env = self._env if argv[0] == "sbatch" else {**self._env, "SLURM_TIME_FORMAT": "%s"}
        timeout_s = min(self._timeout_s, _ACCOUNTING_TIMEOUT_S) if argv[0] == "sacctmgr" else self._timeout_s
        return self._runner(argv, env=env, timeout_s=timeout_s)


def _checked_ids(job_ids: Iterable[str]) -> list[str]:
    """Returns ids without repetitions."""
    checked = list(dict.fromkeys(job_ids))
    for job_id in checked:
        if not is_job_id(job_id):
            raise ClusterError(f"{job_id!r} is not a job id", hint='write "123", or "123_4" for an array element')
    return checked


def _require_readable(command: str, text: str, job_ids: Sequence[str], *, num_fields: int) -> None:
    """Refuses an answer that names a job in columns of a site's own, which would make the job look gone."""
    line = records.unreadable_line(text, job_ids, num_fields=num_fields)
    if line:
        raise ClusterError(
            f"{command} prints other columns than it was asked for: {line.strip()[:200]!r}",
            hint=f"`which {command}` says whether it is a script of the site; put Slurm's own one first on the PATH",
        )


def _by_array(job_ids: Sequence[str]) -> str:
    """Returns the ids to ask for: that of an array where several of its elements are meant, else each itself."""
    num_asked = Counter(job_id.partition("_")[0] for job_id in job_ids if "_" in job_id)
    short = (job_id.partition("_")[0] if num_asked[job_id.partition("_")[0]] > 1 else job_id for job_id in job_ids)
    return ",".join(dict.fromkeys(short))


def _failed_command(argv: Sequence[str], done: Finished) -> ClusterError:
    """Returns the error for a command that ended badly, which quotes it."""
    # A job that ends takes the commands that its script runs along (22.05 with linuxproc signals every descendant).
    kind = ControllerAway if done.return_code < 0 or is_away(done.stderr) else ClusterError
    return kind(
        f"`{shlex.join(argv)}` ended with exit code {done.return_code}: "
        f"{in_words(said(done.stdout, done.stderr)) or 'no output'}",
        hint="run the command by hand; `scontrol ping` says whether the controller answers",
    )
