"""Every form in which Slurm 20.11 to 26.05 prints states, counts, times, identifiers and lists, by its own source.

The names are those of job_state_string, node_state_string_compact, job_reason_string and the printing functions of
squeue, sinfo, sacct and scontrol in the releases 20.11.9, 22.05.11, 23.11.11 and 26.05.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.policy import duration_s, parse_gpus, parse_sinfo, time_limit_min, tres_gpus
from slurm_train.slurm.records import (
    JobState,
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
    "RUNNING+": Phase.RUNNING,
    "FAILED,LAUNCH_FAILED": Phase.FAILED,
    "BRAND_NEW": Phase.UNKNOWN,
    "?": Phase.UNKNOWN,
    "": Phase.UNKNOWN,
}


def test_states_of_jobs() -> None:
    assert {word: phase_of(word) for word in JOB_STATES} == JOB_STATES
    assert {word: phase_of(word.lower()) for word in JOB_STATES} == JOB_STATES
    active = {word for word in JOB_STATES if JobState(job_id="1", word=word, source="squeue").is_active}
    assert {JOB_STATES[word] for word in active} == {Phase.QUEUED, Phase.RUNNING, Phase.FINISHING}
    assert not {JOB_STATES[word] for word in JOB_STATES.keys() - active} & {Phase.QUEUED, Phase.RUNNING}


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
    *("fail", "fail*", "failg", "failg*", "maint", "maint*", "boot*"),
    *("inval", "canc_r", "resm", "ext", "unk", "unk*", "?"),
]


def test_states_of_nodes() -> None:
    words = [*USABLE_NODES, *OTHER_NODES]
    rows = [f"{number}|p|up|3|1-4|infinite|n/a|gpu:8|64|1|512000|{word}\n" for number, word in enumerate(words)]
    partitions = parse_sinfo("".join(rows))
    groups = [partition.groups[0] for partition in partitions]
    assert [group.state for group in groups] == words
    assert [bool(partition.num_usable_nodes) for partition in partitions] == [word in USABLE_NODES for word in words]
    capitals = [replace(group, state=group.state.upper()) for group in groups]
    assert [group.state.lower() for group in capitals if group.is_usable] == USABLE_NODES


# The words of sinfo for job size, CPUs and memory: sizes of 1,024 and more get a suffix.
COUNTS = [
    ("1-infinite", "64", "512000", (1, 64, 512000)),
    ("1-4", "64+", "512000+", (1, 64, 512000)),
    ("4", "1K", "4000000", (4, 1024, 4000000)),
    ("1K-2K", "128", "1", (1024, 128, 1)),
    ("1.50K", "1.50K", "1", (1536, 1536, 1)),
    ("2.00K-infinite", "1K+", "1", (2048, 1024, 1)),
    ("n/a", "0", "0", (1, 0, 0)),
]


@pytest.mark.parametrize(("size", "cpus", "memory", "values"), COUNTS)
def test_counts_of_sinfo(size: str, cpus: str, memory: str, values: tuple[int, int, int]) -> None:
    (partition,) = parse_sinfo(f"p|p|up|3|{size}|infinite|n/a|(null)|{cpus}|1|{memory}|idle\n")
    assert (partition.min_nodes, partition.cpus_per_node, partition.groups[0].memory_per_node_mb) == values


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


def test_durations() -> None:
    assert {text: duration_s(text) for text in DURATIONS} == DURATIONS
    minutes = {text: None if seconds is None else seconds // 60 for text, seconds in DURATIONS.items()}
    assert {text: time_limit_min(text) for text in DURATIONS} == minutes


def test_times_that_are_words() -> None:
    assert [unix_s(text) for text in ("N/A", "Unknown", "None", "NONE", "INVALID", "(null)", "")] == [None] * 7


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
    "gpu:a100:2(IDX:0,1),gpu:a100:1": (3, "a100"),
    "gpu:a100": (1, "a100"),
    "gpu:3090:4": (4, "3090"),
    "nic:2,gpu:h100:8(S:0,1)": (8, "h100"),
    "craynetwork:4,gpumem:80": (0, ""),
    "gpu:tesla:2(S:0),gpu:kepler:2(S:1)": (4, ""),
    "gpu:nvidia_a100_3g.39gb:2": (2, "nvidia_a100_3g.39gb"),
    "gpu:1g.5gb:7": (7, "1g.5gb"),
    "gpu:tesla:no_consume:2": (2, "tesla"),
    "gpu:a100:4(S:0-1),shard:a100:32(S:0-1)": (4, "a100"),
    "gpu:a100:4,mps:400,nic:2,craynetwork:4": (4, "a100"),
    "bandwidth:lustre:no_consume:4G": (0, ""),
}


def test_generic_resources() -> None:
    assert {text: parse_gpus(text) for text in GRES} == GRES


TRES = {
    "cpu=8,mem=64G,node=1,billing=8,gres/gpu=4": 4,
    "cpu=8,mem=62.50G,node=1,billing=8,gres/gpu:a100=4,gres/gpu=4": 4,
    "cpu=8,gres/gpu=4,gres/gpu:3090=4": 4,
    "cpu=8,gres/gpu:a100=2,gres/gpu:v100=1": 3,
    "cpu=8,mem=500M,energy=0,gres/gpumem=0,gres/gpuutil=0,gres/nic=2": None,
    "(null)": None,
    "": None,
}


def test_trackable_resources() -> None:
    assert {text: tres_gpus(text) for text in TRES} == TRES


ROWS = {
    "12": ["12"],
    "12_3": ["12_3"],
    "12_[1-4%2]": ["12_1", "12_2", "12_3", "12_4"],
    "12_[0,2-3%1]": ["12_0", "12_2", "12_3"],
    "12_[0-6:3]": ["12_0", "12_3", "12_6"],
    "38_[4,6,8%2]": ["38_4", "38_6", "38_8"],
    "12+0": ["12"],
    "12+1": [],
    "67108869": ["67108869"],
}


def test_ids_of_jobs() -> None:
    of_squeue = {text: list(parse_squeue(f"{text}|RUNNING|None|node1|N/A|N/A|a,b\n")) for text in ROWS}
    of_sacct = {text: list(parse_sacct(f"{text}|COMPLETED|None|node1|Unknown|Unknown|a|0:15\n")) for text in ROWS}
    assert of_squeue == of_sacct == ROWS
    plain = {text: ids for text, ids in ROWS.items() if "+" not in text}
    assert {text: expand_array_id(text) for text in plain} == plain


def test_exit_codes() -> None:
    codes = ["0:0", "1:0", "0:15", "0:9", "127:0", "0:53", "0:125"]
    text = "".join(f"{number}|FAILED|None|node1|Unknown|Unknown|a|{code}\n" for number, code in enumerate(codes))
    assert [job.exit_code for job in parse_sacct(text).values()] == codes


def test_ids_of_steps() -> None:
    steps = ["77.0", "77.batch", "77.extern", "77.interactive", "77_3.1", "77+1.0", "77.4294967291"]
    lines = "".join(f"{step}|name\n" for step in steps)
    commands = SlurmCommands({"PATH": "/bin"}, runner=Script(squeue=ok(f"CLUSTER: lab\n{lines}")))
    assert commands.steps("77") == dict.fromkeys(steps, "name")


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


def test_lists_of_nodes() -> None:
    assert {text: sorted(nodes_in({"NodeList": text}, "NodeList")) for text in NODE_LISTS} == NODE_LISTS


# All reasons of 20.11.9 and 26.05, without those of limits that follow a rule.
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

# As `strings libslurmfull.so` of 22.05 has them: all that begin with Assoc or QOS and name a limit.
LIMITS = """
AssocGrpBB AssocGrpBBMinutes AssocGrpBBRunMinutes AssocGrpBilling AssocGrpBillingMinutes AssocGrpBillingRunMinutes
AssocGrpCPUMinutesLimit AssocGrpCPURunMinutesLimit AssocGrpCpuLimit AssocGrpEnergy AssocGrpGRES AssocGrpGRESMinutes
AssocGrpGRESRunMinutes AssocGrpJobsLimit AssocGrpLicense AssocGrpMemLimit AssocGrpMemMinutes AssocGrpNodeLimit
AssocGrpSubmitJobsLimit AssocGrpUnknown AssocGrpWallLimit AssocMaxBBPerJob AssocMaxBillingPerNode
AssocMaxCpuMinutesPerJobLimit AssocMaxCpuPerJobLimit AssocMaxCpuPerNode AssocMaxGRESMinutesPerJob AssocMaxGRESPerJob
AssocMaxGRESPerNode AssocMaxJobsLimit AssocMaxMemPerJob AssocMaxNodePerJobLimit AssocMaxSubmitJobLimit
AssocMaxWallDurationPerJobLimit MaxCpuPerAccount MaxGRESPerAccount MaxJobsPerAccount MaxLicensePerAccount
MaxMemoryPerAccount MaxNodePerAccount MaxSubmitJobsPerAccount QOSGrpMemoryMinutes QOSGrpMemoryRunMinutes
QOSMaxCpuPerUserLimit QOSMaxMemoryPerUser QOSMaxNodePerUserLimit QOSMaxSubmitJobPerUserLimit QOSMinGRES QOSMinMemory
"""


def test_reasons_are_put_in_words() -> None:
    for reason in (REASONS + LIMITS).split():
        words = explain_reason(reason)
        assert words.endswith(f" ({reason})") and not words.startswith("Slurm says"), words
        assert explain_reason(f"({reason})").startswith(words.removesuffix(f" ({reason})")), reason
