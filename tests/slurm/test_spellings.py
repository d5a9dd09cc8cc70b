"""Every form in which Slurm 20.11 to 26.05 prints states, counts, times, identifiers and lists, by its own source.

The names are those of job_state_string, node_state_string_compact, job_reason_string and the printing functions of
squeue, sinfo, sacct and scontrol in the releases 20.11.9, 22.05.11, 23.11.11 and 26.05.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_train.slurm.allocation import parse_nodelist
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.policy import duration_s, parse_gpus, parse_sinfo, tres_gpus
from slurm_train.slurm.records import (
    Phase,
    expand_array_id,
    explain_reason,
    nodes_in,
    parse_sacct,
    parse_squeue,
    phase_of,
    unix_s,
)
from tests.slurm.test_slurm_commands import Script, ok

JOB_STATES = {
    "PENDING": Phase.QUEUED,
    "CONFIGURING": Phase.QUEUED,
    "EXPEDITING": Phase.QUEUED,
    "POWER_UP_NODE": Phase.QUEUED,
    "REQUEUED": Phase.QUEUED,
    "REQUEUED_CRON": Phase.QUEUED,
    "REQUEUE_FED": Phase.QUEUED,
    "REQUEUE_HOLD": Phase.QUEUED,
    "RESV_DEL_HOLD": Phase.QUEUED,
    "SPECIAL_EXIT": Phase.QUEUED,
    "RUNNING": Phase.RUNNING,
    "RESIZING": Phase.RUNNING,
    "SIGNALING": Phase.RUNNING,
    "STOPPED": Phase.RUNNING,
    "SUSPENDED": Phase.RUNNING,
    "COMPLETING": Phase.FINISHING,
    "STAGE_OUT": Phase.FINISHING,
    "UPDATE_DB": Phase.FINISHING,
    "COMPLETED": Phase.COMPLETED,
    "FAILED": Phase.FAILED,
    "LAUNCH_FAILED": Phase.FAILED,
    "RECONFIG_FAIL": Phase.FAILED,
    "CANCELLED": Phase.CANCELLED,
    "CANCELLED by 1001": Phase.CANCELLED,
    "CANCELLED+": Phase.CANCELLED,
    "REVOKED": Phase.CANCELLED,
    "TIMEOUT": Phase.TIMEOUT,
    "DEADLINE": Phase.TIMEOUT,
    "NODE_FAIL": Phase.NODE_FAIL,
    "BOOT_FAIL": Phase.NODE_FAIL,
    "PREEMPTED": Phase.PREEMPTED,
    "OUT_OF_MEMORY": Phase.OUT_OF_MEMORY,
    # With flags behind the state.
    "RUNNING,COMPLETING": Phase.FINISHING,
    "CANCELLED,COMPLETING": Phase.FINISHING,
    "PENDING,LAUNCH_FAILED": Phase.QUEUED,
    "PENDING,REQUEUE_HOLD": Phase.QUEUED,
    "RUNNING,CONFIGURING,POWER_UP_NODE": Phase.QUEUED,
    "RUNNING,STOPPED": Phase.RUNNING,
    "FAILED,LAUNCH_FAILED": Phase.FAILED,
    "?": Phase.UNKNOWN,
    "": Phase.UNKNOWN,
}


@pytest.mark.parametrize(("word", "phase"), JOB_STATES.items())
def test_states_of_jobs(word: str, phase: Phase) -> None:
    assert phase_of(word) is phase
    assert phase_of(word.lower()) is phase


_BASES = ("idle", "mix", "alloc", "comp")
USABLE_NODES = [
    *(f"{base}{flag}" for base in _BASES for flag in ("", *"~!%#@^")),
    *("alloc+", "mix-", "idle-", "resv", "plnd", "block", "npc", "boot", "boot^"),
    # A cloud's nodes, and those that save power.
    *("cloud", "pow_dn", "pow_up", "powering_up", "powered_dn", "powring_dn", "powrng_dn"),
]
OTHER_NODES = [
    *(f"{base}{flag}" for base in _BASES for flag in "*$"),
    *(f"{base}{flag}" for base in ("down", "drain", "drng", "futr") for flag in ("", *"*$@^#%~!")),
    *(
        "fail",
        "fail*",
        "failg",
        "failg*",
        "maint",
        "maint*",
        "boot*",
        "inval",
        "canc_r",
        "resm",
        "ext",
        "unk",
        "unk*",
        "?",
    ),
]


@pytest.mark.parametrize(
    ("state", "is_usable"), [*((word, True) for word in USABLE_NODES), *((word, False) for word in OTHER_NODES)]
)
def test_states_of_nodes(state: str, is_usable: bool) -> None:
    (partition,) = parse_sinfo(f"p|p*|up|3|1-infinite|infinite|n/a|gpu:8|64|1|512000|{state}\n")
    assert partition.num_usable_nodes == (3 if is_usable else 0)
    assert replace(partition.groups[0], state=state.upper()).is_usable is is_usable


# The words of sinfo for job size, CPUs and memory: sizes of 1,024 and more get a suffix.
COUNTS = [
    ("1-infinite", "64", "512000", (None, 64, 512000)),
    ("1-4", "64+", "512000+", (4, 64, 512000)),
    ("4", "1K", "4000000", (4, 1024, 4000000)),
    ("1-1K", "128", "1", (1024, 128, 1)),
    ("1-1.50K", "1.50K", "1", (1536, 1536, 1)),
    ("2-2.00K", "1K+", "1", (2048, 1024, 1)),
    ("n/a", "0", "0", (None, 0, 0)),
]


@pytest.mark.parametrize(("size", "cpus", "memory", "values"), COUNTS)
def test_counts_of_sinfo(size: str, cpus: str, memory: str, values: tuple[int | None, int, int]) -> None:
    (partition,) = parse_sinfo(f"p|p|up|3|{size}|infinite|n/a|(null)|{cpus}|1|{memory}|idle\n")
    assert (partition.max_nodes, partition.cpus_per_node, partition.groups[0].memory_per_node_mb) == values


DURATIONS = {
    "15": 15.0,
    "00:15": 15.0,
    "30:00": 1800.0,
    "1:00:00": 3600.0,
    "01:00:00": 3600.0,
    "1-00:00:00": 86400.0,
    "365-00:00:00": 365 * 86400.0,
    "2-12": 216000.0,
    "2-12:30": 217800.0,
    "30 sec": 30.0,
    "5 min": 300.0,
    "UNLIMITED": None,
    "infinite": None,
    "INFINITE": None,
    "n/a": None,
    "N/A": None,
    "NONE": None,
    "NOT_SET": None,
    "INVALID": None,
    "Partition_Limit": None,
    "": None,
}


@pytest.mark.parametrize(("text", "seconds"), DURATIONS.items())
def test_durations(text: str, seconds: float | None) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["N/A", "Unknown", "None", "NONE", "INVALID", "(null)", ""])
def test_times_that_are_words(text: str) -> None:
    assert unix_s(text) is None


GRES = {
    "(null)": (0, ""),
    "": (0, ""),
    "gpu": (1, ""),
    "gpu:8": (8, ""),
    "gpu:8(S:0-1)": (8, ""),
    "gpu:8(S:0,1)": (8, ""),
    "gpu:a100:4": (4, "a100"),
    "gpu:a100:4(S:0-1)": (4, "a100"),
    "gpu:a100:4(IDX:0-3)": (4, "a100"),
    "gpu:a100:2(IDX:0,3)": (2, "a100"),
    "gpu:a100:0(IDX:N/A)": (0, "a100"),
    "gpu:a100:2(S:0),gpu:a100:2(S:1)": (4, "a100"),
    "gpu:tesla:2(S:0),gpu:kepler:2(S:1)": (4, ""),
    "gpu:nvidia_a100_3g.39gb:2": (2, "nvidia_a100_3g.39gb"),
    "gpu:1g.5gb:7": (7, "1g.5gb"),
    "gpu:tesla:no_consume:2": (2, "tesla"),
    "gpu:a100:4(S:0-1),shard:a100:32(S:0-1)": (4, "a100"),
    "gpu:a100:4,mps:400,nic:2,craynetwork:4": (4, "a100"),
    "bandwidth:lustre:no_consume:4G": (0, ""),
}


@pytest.mark.parametrize(("text", "gpus"), GRES.items())
def test_generic_resources(text: str, gpus: tuple[int, str]) -> None:
    assert parse_gpus(text) == gpus


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("cpu=8,mem=64G,node=1,billing=8,gres/gpu=4", 4),
        ("cpu=8,mem=62.50G,node=1,billing=8,gres/gpu:a100=4,gres/gpu=4", 4),
        ("cpu=8,gres/gpu:a100=2,gres/gpu:v100=2", 4),
        ("cpu=8,mem=500M,energy=0,gres/gpumem=0,gres/gpuutil=0", None),
        ("(null)", None),
    ],
)
def test_trackable_resources(text: str, gpus: int | None) -> None:
    assert tres_gpus(text) == gpus


ROWS = {
    "12": ["12"],
    "12_3": ["12_3"],
    "12_[1-4%2]": ["12_1", "12_2", "12_3", "12_4"],
    "12_[0,2-3%1]": ["12_0", "12_2", "12_3"],
    "12_[0-6:3]": ["12_0", "12_3", "12_6"],
    "12+0": ["12"],
    "12+1": [],
    "67108869": ["67108869"],
}


@pytest.mark.parametrize(("text", "ids"), ROWS.items())
def test_ids_of_jobs(text: str, ids: list[str]) -> None:
    assert list(parse_squeue(f"{text}|RUNNING|None|node1|N/A|N/A|a,b\n")) == ids
    assert list(parse_sacct(f"{text}|COMPLETED|None|node1|Unknown|Unknown|a|0:15\n")) == ids
    assert [job for job in expand_array_id(text) if "+" not in job] == [job for job in ids if "+" not in text]


@pytest.mark.parametrize("exit_code", ["0:0", "1:0", "0:15", "0:9", "127:0", "0:53", "0:125"])
def test_exit_codes(exit_code: str) -> None:
    (job,) = parse_sacct(f"12|FAILED|None|node1|Unknown|Unknown|a|{exit_code}\n").values()
    assert job.exit_code == exit_code


@pytest.mark.parametrize(
    "step", ["77.0", "77.batch", "77.extern", "77.interactive", "77_3.1", "77+1.0", "77.4294967291"]
)
def test_ids_of_steps(step: str) -> None:
    commands = SlurmCommands({"PATH": "/bin"}, runner=Script(squeue=ok(f"CLUSTER: lab\n{step}|name\n")))
    assert commands.steps("77") == {step: "name"}


NODE_LISTS = {
    "": [],
    "(null)": [],
    "None assigned": [],
    "None": [],
    "Unknown": [],
    "node1": ["node1"],
    "node[1-2]": ["node1", "node2"],
    "node[01-02,04]": ["node01", "node02", "node04"],
    "a[1],b[2-3]": ["a1", "b2", "b3"],
    "r[1-2]n[1-2]": ["r1n1", "r1n2", "r2n1", "r2n2"],
    "n[1-2]-ib0": ["n1-ib0", "n2-ib0"],
    "gpu1.cluster.example": ["gpu1.cluster.example"],
}


@pytest.mark.parametrize(("text", "nodes"), NODE_LISTS.items())
def test_lists_of_nodes(text: str, nodes: list[str]) -> None:
    assert sorted(nodes_in({"NodeList": text}, "NodeList")) == nodes
    if text == ",".join(nodes):
        assert parse_nodelist(text) == nodes


# All reasons of 20.11.9 and 26.05, without those of limits that follow a rule, see test_reasons.py.
REASONS = """
None Prolog Priority Dependency Resources PartitionNodeLimit PartitionTimeLimit PartitionDown PartitionInactive
JobHeldAdmin JobHeldUser NvidiaImexChannels BeginTime Licenses AssociationJobLimit AssociationResourceLimit
AssociationTimeLimit Reservation ReqNodeNotAvail SchedDefer FrontEndDown NodeDown BadConstraints SystemFailure
JobLaunchFailure NonZeroExitCode RaisedSignal TimeLimit InactiveLimit InvalidAccount InvalidQOS QOSUsageThreshold
QOSJobLimit QOSResourceLimit QOSTimeLimit Cleaning QOSNotAllowed AccountNotAllowed DependencyNeverSatisfied
JobHoldMaxRequeue JobArrayTaskLimit BurstBufferResources BurstBufferStageIn BurstBufferOperation DeadLine
PartitionConfig AccountingPolicy FedJobLock OutOfMemory MaxMemPerLimit ReservationDeleted ReservationInvalid Constraints
MaxPoweredUpNodes MpiPortsBusy PowerNotAvail PowerReserved BlockMaxError BlockFreeAction MaxBBRunMinsPerAccount
MaxBillingRunMinsPerAccount MaxCpuRunMinsPerAccount MaxEnergyRunMinsPerAccount MaxGRESRunMinsPerAccount
MaxNodeRunMinsPerAccount MaxLicenseRunMinsPerAccount MaxMemoryRunMinsPerAccount MaxUnknownRunMinsPerAccount
MaxBBRunMinsPerUser MaxBillingRunMinsPerUser MaxCpuRunMinsPerUser MaxEnergyRunMinsPerUser MaxGRESRunMinsPerUser
MaxNodeRunMinsPerUser MaxLicenseRunMinsPerUser MaxMemoryRunMinsPerUser MaxUnknownRunMinsPerUser
MaxBBPerAccount MaxCpuPerAccount MaxEnergyPerAccount MaxGRESPerAccount MaxNodePerAccount MaxLicensePerAccount
MaxMemoryPerAccount MaxUnknownPerAccount MaxJobsPerAccount MaxSubmitJobsPerAccount MaxBillingPerAccount
QOSGrpJobsLimit AssocGrpJobsLimit
"""


@pytest.mark.parametrize("reason", REASONS.split())
def test_reasons_are_put_in_words(reason: str) -> None:
    assert explain_reason(reason).endswith(f" ({reason})") and not explain_reason(reason).startswith("Slurm says")
    assert explain_reason(f"({reason})").startswith(explain_reason(reason).removesuffix(f" ({reason})"))
