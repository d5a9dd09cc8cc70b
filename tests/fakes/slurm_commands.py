"""Slurm as a table: a small real object with the methods of `SlurmCommands`, answering from dicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from slurm_train.errors import ClusterError
from slurm_train.slurm.policy import Association, NodeGroup, Partition, Qos
from slurm_train.slurm.records import JobState
from slurm_train.slurm.refusals import TestVerdict


def job_state(job_id: str, word: str = "RUNNING", *, source: str = "squeue", **fields: str) -> JobState:
    """Returns a job in the given state, e.g. job_state("7", "PENDING", reason="Resources")."""
    return JobState(job_id=job_id, word=word, source=source, **fields)


_DAY_MIN = 1440


def four_by_eight() -> Partition:
    """Returns the default partition of a cluster of 4 nodes with 8 GPUs and 64 CPUs each."""
    nodes = NodeGroup(
        num_nodes=4,
        gpus_per_node=8,
        gpu_type="",
        cpus_per_node=64,
        threads_per_core=1,
        memory_per_node_mb=512000,
        state="idle",
    )
    return Partition(
        name="main",
        is_default=True,
        state="up",
        default_time_min=60,
        groups=(nodes,),
    )


class FakeSlurmCommands:
    """Answers from what it is given and notes what it is told to do.

    Change `jobs`, `fields`, `verdict` and so on at any time; set `error` to make every command fail with it.
    """

    def __init__(
        self,
        jobs: Iterable[JobState] = (),
        *,
        fields: dict[str, dict[str, str]] | None = None,
        is_available: bool = True,
    ) -> None:
        self.jobs = {job.job_id: job for job in jobs}
        self.fields = fields or {}
        self.listed_partitions = [four_by_eight()]
        self.limits_min: dict[str, int | None] = {}
        """The longest time limit in a partition; without an entry a day, None: no limit."""
        self.config = {"MaxArraySize": "1001", "JobRequeue": "1"}
        self.verdict = TestVerdict(is_accepted=True)
        self.words_of_srun = ""
        """Why srun refuses the flags that were typed for it."""
        self.qos: dict[str, Qos] = {}
        self.reservations: list[dict[str, str]] = []
        self.accounts: dict[str, list[str]] = {}
        self.error: ClusterError | None = None
        self.cancelled: list[str] = []
        self.asked: list[str] = []
        self.requeued: list[str] = []
        self.delays_s: dict[str, int] = {}
        self.tested: list[Path] = []
        self.test_flags: tuple[str, ...] = ()
        self.running_steps: dict[str, str] = {}
        self.stuck_steps: set[str] = set()
        self.past: dict[str, list[str]] = {}
        self.ahead: dict[str, int] = {}
        self.scripts: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.leaves: dict[str, str] = {}
        self.records: dict[str, dict[str, str]] = {}
        self._is_available = is_available

    def is_available(self) -> bool:
        return self._is_available

    def version(self) -> str | None:
        return "22.05.8"

    def job_states(self, job_ids: Iterable[str], *, ended: bool = True) -> dict[str, JobState]:
        self._fail_if_told()
        asked = set(job_ids)
        return {key: job for key, job in self.jobs.items() if key in asked or key.split("_")[0] in asked}

    def queue(self, job_ids: Iterable[str], *, whole: bool = False) -> tuple[dict[str, JobState], dict[str, int]]:
        return self.job_states(job_ids), dict(self.ahead) if whole else {}

    def accounted(self, job_ids: Iterable[str]) -> dict[str, JobState]:
        return self.job_states(job_ids)

    def own_scripts(self) -> dict[str, str]:
        self._fail_if_told()
        return dict(self.scripts)

    def topology(self) -> dict[str, str]:
        return dict(self.leaves)

    def own_names(self) -> dict[str, str]:
        self._fail_if_told()
        return dict(self.names)

    def show_job(self, job_id: str) -> dict[str, str]:
        self._fail_if_told()
        if job_id not in self.fields:
            raise ClusterError(f"`scontrol show job {job_id}` ended with exit code 1: Invalid job id specified")
        return dict(self.fields[job_id])

    def node_names(self) -> list[tuple[str, str, str]]:
        return []

    def federation(self) -> str:
        return ""

    def node_address(self, name: str) -> str:
        self._fail_if_told()
        return ""

    def show_partition(self, name: str) -> dict[str, str]:
        self._fail_if_told()
        fields = {"PartitionName": name, "GraceTime": "0", "PreemptMode": "REQUEUE"}
        for partition in self.listed_partitions:
            if partition.name == name:
                limit_min = self.limits_min.get(name, _DAY_MIN)
                fields |= {"State": partition.state.upper(), "MaxTime": f"{limit_min or 'UNLIMITED'}:00"}
        return {**fields, **self.records.get(name, {})}

    def show_qos(self, name: str) -> Qos | None:
        return self.qos.get(name)

    def show_reservations(self) -> list[dict[str, str]]:
        return list(self.reservations)

    def show_partitions(self) -> list[dict[str, str]]:
        return [self.show_partition(partition.name) for partition in self.listed_partitions]

    def associations(self, user: str) -> list[Association]:
        self._fail_if_told()
        return [
            Association(cluster="fake", account=account, is_default=True) for account in self.accounts.get(user, [])
        ]

    def account_parents(self, cluster: str) -> dict[str, str]:
        return {}

    def all_qos(self, *where: str) -> list[Qos]:
        self._fail_if_told()
        return list(self.qos.values())

    @property
    def cluster(self) -> str:
        return self.show_config().get("ClusterName", "")

    @property
    def settings(self) -> dict[str, str]:
        return self.show_config()

    def show_config(self) -> dict[str, str]:
        self._fail_if_told()
        return dict(self.config)

    def cancel(self, job_ids: Iterable[str], *, cluster: str = "") -> None:
        assert not cluster
        self._fail_if_told()
        for job_id in job_ids:
            self.cancelled.append(job_id)
            self.jobs[job_id] = job_state(job_id, "CANCELLED")

    def restarts(self, job_id: str) -> int:
        return int(self.show_job(job_id)["Restarts"])

    def requeue(self, job_id: str, *, is_over: bool = False) -> None:
        """Like Slurm: a running job comes back, one over its limit with the plain form; its Restarts goes up by one."""
        fields = self.show_job(job_id)
        if fields.get("Requeue") == "0":
            raise ClusterError("Requested operation is presently disabled")
        if fields["JobState"] not in ("RUNNING", "SUSPENDED") and not is_over:
            return
        self.requeued.append(job_id)
        self.fields[job_id] |= {"JobState": "COMPLETING", "Restarts": str(int(fields["Restarts"]) + 1)}

    def hand_dependents(self, job_id: str, successor: str) -> None:
        self._fail_if_told()

    def allow_requeue(self, job_id: str) -> None:
        self.show_job(job_id)
        self.fields[job_id]["Requeue"] = "1"

    def forbid_requeue(self, job_id: str) -> None:
        self.show_job(job_id)
        self.fields[job_id]["Requeue"] = "0"

    def exclude_nodes(self, job_id: str, nodes: str) -> None:
        self.show_job(job_id)
        self.fields[job_id]["ExcNodeList"] = nodes

    def put_off(self, job_id: str, seconds: int) -> None:
        self._fail_if_told()
        self.delays_s[job_id] = seconds

    def steps(self, job_id: str) -> dict[str, str]:
        self._fail_if_told()
        return {step: name for step, name in self.running_steps.items() if step.partition(".")[0] == job_id}

    def cancel_step(self, step_id: str, *, kill: bool = False) -> None:
        self._fail_if_told()
        self.cancelled.append(step_id)
        if step_id not in self.stuck_steps:
            self.running_steps.pop(step_id, None)

    def ask_step(self, step_id: str, *, name: Literal["TERM", "USR2"] = "TERM") -> None:
        self._fail_if_told()
        self.asked.append(step_id if name == "TERM" else f"{name} {step_id}")

    def waiting_jobs(self) -> list[JobState]:
        self._fail_if_told()
        return [job for job in self.jobs.values() if job.word == "PENDING"]

    def partitions_of(self, nodes: Sequence[str]) -> set[str]:
        self._fail_if_told()
        return {partition.name for partition in self.listed_partitions} if nodes else set()

    def ended_states(self, job_id: str) -> list[str]:
        self._fail_if_told()
        return list(self.past.get(job_id, []))

    def partitions(self) -> list[Partition]:
        self._fail_if_told()
        return list(self.listed_partitions)

    def test_only(self, script: Path, *flags: str) -> TestVerdict:
        self._fail_if_told()
        self.tested.append(script)
        self.test_flags = flags
        return self.verdict

    def refused_flags(self, flags: Sequence[str]) -> str:
        return self.words_of_srun if flags else ""

    def options_of_srun(self) -> list[str]:
        return ["container", "cpu-bind", "gpu-bind", "mpi"]

    def _fail_if_told(self) -> None:
        if self.error is not None:
            raise self.error
