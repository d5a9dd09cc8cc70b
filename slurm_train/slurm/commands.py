"""The one place that runs squeue, sacct, scontrol, scancel, sinfo, sacctmgr and `sbatch --test-only`.

Commands get argument lists, a scrubbed environment and a time limit. What they print is parsed by the pure modules
beside this one, each imported by the method that needs it: a submission pays for one of them. A command that is
missing, too slow or fails is a ClusterError that quotes it. Nothing is retried and nothing is cached: how often to ask
is the caller's business.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_train.errors import ClusterError
from slurm_train.slurm.environment import command_environment
from slurm_train.slurm.job_id import by_array, checked_ids, is_step_id, only_asked
from slurm_train.slurm.runner import Finished, Runner, failed_command, is_away, run_process

if TYPE_CHECKING:
    from slurm_train.slurm.accounting import Association, Qos
    from slurm_train.slurm.partitions import Partition
    from slurm_train.slurm.records import JobState
    from slurm_train.slurm.verdicts import TestVerdict
    from slurm_train.slurm.waiting_line import Queue

# sbatch gives up on an absent controller after 18 s (22.05); a busy one may take longer to answer.
DEFAULT_TIMEOUT_S = 60.0


class SlurmCommands:
    """Slurm as seen through its commands.

    Args:
        env: environment to take PATH and SLURM_CONF from; job and rank variables in it are left out.
        timeout_s: seconds after which a command counts as failed.
        runner: what runs a command.
    """

    def __init__(
        self, env: Mapping[str, str], *, timeout_s: float = DEFAULT_TIMEOUT_S, runner: Runner = run_process
    ) -> None:
        self._env = command_environment(env)
        self._timeout_s = timeout_s
        self._runner = runner

    def is_available(self) -> bool:
        """Returns whether sbatch and squeue are on the PATH; says nothing about the controller."""
        path = self._env.get("PATH", "")
        return all(shutil.which(name, path=path) for name in ("sbatch", "squeue"))

    def job_states(self, job_ids: Iterable[str], *, ended: bool = True) -> dict[str, JobState]:
        """Returns what Slurm knows about jobs, by id; an array's id gives one entry per element.

        One squeue call; what it does not know (ended longer ago than MinJobAge) is asked of sacct, where there is
        accounting. Ids that neither knows are absent. Many elements of one array are asked for by the array's id.

        Args:
            job_ids: the jobs.
            ended: ask sacct about those that squeue does not know; whether a job is active, squeue alone can tell.

        Raises:
            ClusterError: neither command gives an answer.
        """
        from slurm_train.slurm.records import parse_squeue

        asked = checked_ids(job_ids)
        if not asked:
            return {}
        try:
            queued = only_asked(asked, parse_squeue(self._squeue(asked)))
        except ClusterError as unanswered:
            return self._sacct(asked, or_else=unanswered)
        missing = [job_id for job_id in asked if job_id not in queued] if ended else []
        return {**self._sacct(missing), **queued} if missing else queued

    def queue(self, job_ids: Iterable[str], *, whole: bool = False) -> Queue:
        """Returns what squeue alone knows about jobs, from one call.

        Args:
            job_ids: as for `job_states`.
            whole: read the whole queue and tell the places of those that wait in it.

        Raises:
            ClusterError: no answer.
        """
        from slurm_train.slurm.records import parse_squeue
        from slurm_train.slurm.waiting_line import QUEUE_FORMAT, Queue, parse_queue

        asked = checked_ids(job_ids)
        if not asked:
            return Queue({})
        if whole:
            return parse_queue(self._run(["squeue", "-h", "-a", "-t", "all", "-o", QUEUE_FORMAT]), asked=asked)
        return Queue(only_asked(asked, parse_squeue(self._squeue(asked))))

    def accounted(self, job_ids: Iterable[str]) -> dict[str, JobState]:
        """Returns what accounting knows about jobs, by id.

        Raises:
            ClusterError: no answer; many sites keep no accounts.
        """
        asked = checked_ids(job_ids)
        no_answer = ClusterError("sacct gives no answer", hint="many sites keep no accounts of jobs")
        return self._sacct(asked, or_else=no_answer) if asked else {}

    def named_jobs(self, names: Iterable[str]) -> dict[tuple[str, str], str]:
        """Returns this user's jobs with these names that the controller still knows: (name, script's path) -> id.

        Raises:
            ClusterError: no answer.
        """
        from slurm_train.slurm.records import NAMED_FORMAT, parse_named

        argv = ["squeue", "-h", "--me", "-t", "all", "-o", NAMED_FORMAT, "-n", ",".join(names)]
        return parse_named(self._run(argv))

    def own_scripts(self) -> dict[str, str]:
        """Returns the batch scripts of all jobs of this user that the controller knows, by id: {"12": "/a/submit.sh"}.

        Array ids are as squeue writes them, e.g. "12_[0-3]".

        Raises:
            ClusterError: no answer.
        """
        lines = self._run(["squeue", "-h", "--me", "-t", "all", "-o", "%i|%o"]).splitlines()
        rows = (line.partition("|")[::2] for line in lines)
        return {job_id.partition("+")[0]: script for job_id, script in rows if job_id[:1].isdigit()}

    def show_job(self, job_id: str) -> dict[str, str]:
        """Returns the fields of `scontrol show job`, e.g. {"JobState": "RUNNING", "Restarts": "0", ...}.

        Raises:
            ClusterError: the controller does not know the job (any more) or does not answer.
        """
        from slurm_train.slurm.records import parse_job

        return parse_job(self._run(["scontrol", "show", "job", *checked_ids([job_id])]))

    def version(self) -> str | None:
        """Returns the version of Slurm's commands here, e.g. "22.05.8"; None where that cannot be told."""
        try:
            done = self._call(["scontrol", "--version"])
        except ClusterError:
            return None
        name, _, version = done.stdout.strip().partition(" ")
        return version if name == "slurm" and done.return_code == 0 else None

    def show_config(self) -> dict[str, str]:
        """Returns the controller's settings, e.g. {"MaxArraySize": "1001", "KillWait": "30 sec", ...}."""
        from slurm_train.slurm.records import parse_config

        return parse_config(self._run(["scontrol", "show", "config"]))

    def show_partition(self, name: str) -> dict[str, str]:
        """Returns the fields of `scontrol show partition`, e.g. {"GraceTime": "0", "PreemptMode": "REQUEUE", ...}.

        Raises:
            ClusterError: there is none of that name, or no answer.
        """
        from slurm_train.slurm.records import parse_job

        return parse_job(self._run(["scontrol", "show", "partition", name]))

    def show_qos(self, name: str) -> dict[str, str]:
        """Returns {"GraceTime": "00:00:15", "PreemptMode": "requeue"} of a QOS; empty where there is no accounting."""
        columns = ("GraceTime", "PreemptMode")
        try:
            done = self._call(
                ["sacctmgr", "-n", "-P", "show", "qos", "where", f"name={name}", f"format={','.join(columns)}"]
            )
        except ClusterError:
            return {}
        lines = done.stdout.splitlines()
        return dict(zip(columns, lines[0].split("|"), strict=False)) if lines and not done.return_code else {}

    def show_partitions(self) -> list[dict[str, str]]:
        """Returns the fields of every partition that this user can see, see `show_partition`."""
        from slurm_train.slurm.records import parse_partitions

        return parse_partitions(self._run(["scontrol", "show", "partition"]))

    def associations(self, user: str) -> list[Association]:
        """Returns the accounts that a user may charge; empty where the database knows none.

        Raises:
            ClusterError: there is no accounting, or it refuses or does not answer.
        """
        from slurm_train.slurm.accounting import ASSOCIATION_FORMAT, parse_associations

        asked = ["where", f"name={user}", "withassoc", f"format={ASSOCIATION_FORMAT}"]
        return parse_associations(self._run(["sacctmgr", "-n", "-P", "show", "user", *asked]))

    def all_qos(self) -> list[Qos]:
        """Returns every QOS.

        Raises:
            ClusterError: there is no accounting, or it refuses or does not answer.
        """
        from slurm_train.slurm.accounting import QOS_FORMAT, parse_qos

        return parse_qos(self._run(["sacctmgr", "-n", "-P", "show", "qos", f"format={QOS_FORMAT}"]))

    def cancel(self, job_ids: Iterable[str], *, cluster: str = "") -> None:
        """Cancels jobs; those that have ended already are no error.

        Args:
            job_ids: the jobs.
            cluster: where they are, if not on this machine's cluster.

        Raises:
            ClusterError: Slurm refused, e.g. somebody else's job.
        """
        checked = checked_ids(job_ids)
        if not checked:
            return
        argv = ["scancel", *([f"--clusters={cluster}"] if cluster else []), *checked]
        done = self._call(argv)
        if done.return_code and not _has_ended(done.stderr):
            raise failed_command(argv, done)

    def kill_step(self, step_id: str) -> None:
        """Kills all tasks of a step ("123.0") with a signal that also ends stopped ones; an ended step is no error.

        Raises:
            ClusterError: it is no step id, or Slurm refused or does not answer.
        """
        if not is_step_id(step_id):
            raise ClusterError(f"{step_id!r} is not the id of a step", hint='write "123.0"')
        argv = ["scancel", "--signal=KILL", step_id]
        done = self._call(argv)
        if done.return_code and not _has_ended(done.stderr):
            raise failed_command(argv, done)

    def restarts(self, job_id: str) -> int:
        """Returns how often Slurm has restarted a job.

        Raises:
            ClusterError: it does not say.
        """
        return restarts_of(self.show_job(job_id))

    def requeue(self, job_id: str, *, is_over: bool = False) -> None:
        """Asks Slurm to requeue a job unless it was cancelled; read `restarts` back to see whether that happened.

        The `incomplete` form returns success when it did nothing, and the plain form would bring back a job that its
        user cancelled. From inside the job, the call may end the caller.

        Args:
            job_id: array-safe id.
            is_over: the job has run into its time limit, where only the plain form works; such a job cannot be
                cancelled any more.

        Raises:
            ClusterError: Slurm refused (e.g. a job with --no-requeue) or does not answer.
        """
        form = [] if is_over else ["incomplete"]
        self._run(["scontrol", "requeue", *form, *checked_ids([job_id])])

    def allow_requeue(self, job_id: str) -> None:
        """Lets a job be requeued that was submitted with --no-requeue, or where that is the site's default.

        Raises:
            ClusterError: Slurm refused or does not answer.
        """
        self._run(["scontrol", "update", f"JobId={checked_ids([job_id])[0]}", "Requeue=1"])

    def exclude_nodes(self, job_id: str, nodes: str) -> None:
        """Keeps a waiting job off nodes; Slurm refuses it for a running one.

        Raises:
            ClusterError: Slurm refused or does not answer.
        """
        self._run(["scontrol", "update", f"JobId={checked_ids([job_id])[0]}", f"ExcNodeList={nodes}"])

    def put_off(self, job_id: str, seconds: int) -> None:
        """Lets a waiting job start no earlier than in so many seconds.

        Raises:
            ClusterError: Slurm refused or does not answer.
        """
        self._run(["scontrol", "update", f"JobId={checked_ids([job_id])[0]}", f"StartTime=now+{seconds}"])

    def steps(self, job_id: str) -> dict[str, str]:
        """Returns the running steps of a job as id -> name, e.g. {"77.1": "attempt_0", "77.batch": "batch"}.

        Raises:
            ClusterError: no answer.
        """
        argv = ["squeue", "-h", "-s", "-o", "%i|%j", "-j", *checked_ids([job_id])]
        done = self._call(argv)
        if done.return_code and "invalid job id" not in done.stderr.lower():
            raise failed_command(argv, done)
        rows = (line.strip().partition("|") for line in done.stdout.splitlines())
        return {step: name for step, bar, name in rows if bar}

    def cancel_step(self, step_id: str) -> None:
        """Ends one step of a job; the job goes on. One that has ended already is no error.

        Raises:
            ClusterError: Slurm refused or does not answer.
        """
        job, dot, step = step_id.partition(".")
        if not dot or not step.isdigit():
            raise ClusterError(f"{step_id!r} is not a step id", hint='write "123.0"')
        argv = ["scancel", f"{checked_ids([job])[0]}.{step}"]
        done = self._call(argv)
        if done.return_code and not _has_ended(done.stderr):
            raise failed_command(argv, done)

    def ended_states(self, job_id: str) -> list[str]:
        """Returns how the earlier starts of a job ended, oldest first, e.g. ["NODE_FAIL", "PREEMPTED"].

        Empty where there is no accounting.
        """
        argv = ["sacct", "-n", "-P", "-X", "-D", "-o", "State", "-j", *checked_ids([job_id])]
        done = self._call(argv)
        words = [line.split()[0].rstrip("+") for line in done.stdout.splitlines() if line.strip()]
        return [] if done.return_code else [word for word in words if word not in ("PENDING", "RUNNING")]

    def partitions(self) -> list[Partition]:
        """Returns the partitions that this user can see, from one sinfo call.

        Raises:
            ClusterError: sinfo failed or cannot be read.
        """
        from slurm_train.slurm.partitions import SINFO_FORMAT, parse_sinfo

        return parse_sinfo(self._run(["sinfo", "-h", "-e", "-o", SINFO_FORMAT]))

    def test_only(self, script: Path) -> TestVerdict:
        """Returns whether Slurm would take a batch script and when it would start it; nothing is submitted.

        Slurm does not look at a partition that is down, nor, without EnforcePartLimits, at its time limit.

        Raises:
            ClusterError: no answer from the controller; that is no verdict on the script.
        """
        from slurm_train.slurm.verdicts import read_verdict

        argv = ["sbatch", "--test-only", str(script)]
        done = self._call(argv)
        if done.return_code and is_away(done.stderr):
            raise failed_command(argv, done)
        return read_verdict(done.return_code, done.stderr)

    def _squeue(self, job_ids: list[str]) -> str:
        from slurm_train.slurm.records import SQUEUE_FORMAT

        # All states: a job stays visible for MinJobAge after its end, which spares a look at accounting.
        argv = ["squeue", "-h", "-r", "-t", "all", "-o", SQUEUE_FORMAT, "-j", ",".join(by_array(job_ids))]
        done = self._call(argv)
        if done.return_code and "invalid job id" in done.stderr.lower():
            # Said only when a single job was asked for and it is gone.
            return ""
        if done.return_code:
            raise failed_command(argv, done)
        return done.stdout

    def _sacct(self, job_ids: list[str], or_else: ClusterError | None = None) -> dict[str, JobState]:
        """Returns sacct's answer; without one raises `or_else`, or returns nothing (many sites keep no accounts)."""
        from slurm_train.slurm.records import SACCT_FORMAT, parse_sacct

        argv = ["sacct", "-n", "-P", "-X", "-o", SACCT_FORMAT, "-j", ",".join(by_array(job_ids))]
        try:
            return only_asked(job_ids, parse_sacct(self._run(argv)))
        except ClusterError:
            if or_else is not None:
                raise or_else from None
            return {}

    def _run(self, argv: list[str]) -> str:
        done = self._call(argv)
        if done.return_code:
            raise failed_command(argv, done)
        return done.stdout

    def _call(self, argv: list[str]) -> Finished:
        # Seconds since 1970, see `records.unix_s`; the verdict of `sbatch --test-only` is shown to people.
        env = self._env if argv[0] == "sbatch" else {**self._env, "SLURM_TIME_FORMAT": "%s"}
        return self._runner(argv, env=env, timeout_s=self._timeout_s)


def _has_ended(stderr: str) -> bool:
    lines = [line.lower() for line in stderr.splitlines() if line.strip()]
    return all("invalid job id" in line or "already completing or completed" in line for line in lines)


def restarts_of(job: Mapping[str, str]) -> int:
    """Returns how often Slurm has restarted a job, from its record.

    Raises:
        ClusterError: it does not say.
    """
    text = job.get("Restarts", "")
    if not text.isdigit():
        raise ClusterError(
            f"scontrol does not say how often the job was restarted: Restarts={text!r}",
            hint="`scontrol show job JOBID` must have a line with Restarts=; Slurm 21.08 and later have it",
        )
    return int(text)
