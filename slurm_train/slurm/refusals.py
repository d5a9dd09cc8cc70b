"""Whether Slurm would take a script, and what to do where it would not. Pure text in.

Slurm's own messages are those of slurm_strerror and of sbatch, 20.11 to 26.05. Each is looked up as a whole: one word
of it says nothing about what to do. A message without a row has no hint, since a wrong one is worse. What a filter of
the site has said before (slurm.user_msg) comes first, since the filter chooses Slurm's message as it likes.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from slurm_train.formatting import plain
from slurm_train.slurm.answers import in_words, said, without_prefix
from slurm_train.slurm.records import explain_reason, limit_in


class Refusal(enum.Enum):
    """Why Slurm would not take a script; the value is the advice for it."""

    PARTITION = "see `sinfo` for the partitions you may use and set cluster.partition"
    PARTITION_STATE = "the partition takes no jobs now (`sinfo -R`): name another cluster.partition, or submit later"
    PARTITION_GROUP = "the partition is for other groups (AllowGroups): name another cluster.partition"
    PARTITION_ACCOUNT = "set cluster.account to one that the partition allows, or name another cluster.partition"
    PARTITION_QOS = "set cluster.qos to one that the partition allows, or name another cluster.partition"
    ONE_PARTITION = "name one partition alone in cluster.partition"
    ACCESS = (
        "the partition may be for other login nodes (AllocNodes) or for reservations alone (ReqResv), see `scontrol "
        "show partition`: submit from such a node, or set cluster.sbatch.reservation or another cluster.partition"
    )
    QOS = "see `sacctmgr show qos` for the names you may use and set cluster.qos"
    QOS_USAGE = "the account has used more than the QOS allows: set another cluster.qos or cluster.account"
    ACCOUNT = "see `sacctmgr show associations user=$USER` and set cluster.account"
    TIME_MISSING = "set cluster.time, e.g. cluster.time=4:00:00"
    TIME_LIMIT = "set cluster.time, or lower it where it is set (`sinfo -o '%P %l'` shows the longest)"
    TIME_MIN = "lower cluster.sbatch.time-min to cluster.time or less"
    MAINTENANCE = (
        "lower cluster.time so that it ends before the maintenance (`scontrol show reservation`), or wait for it"
    )
    POLICY = (
        "your account or QOS allows less: ask for less, or for another QOS; a limit on submitted jobs counts those "
        "that wait as well (`squeue --me`), and the same command submits later what it refuses now"
    )
    TOO_MANY_JOBS = "jobs that wait count as well (`squeue --me`): the same command submits later what it refuses now"
    AWAY = "`scontrol ping` says whether the controller is up; try again later"
    LATER = "submit it later: Slurm takes no more jobs now"
    RESOURCES = (
        "no set of nodes fits it: set cluster.nodes (MinNodes and MaxNodes of `scontrol show partition`), "
        "cluster.gpus_per_node, CPUs or memory to what there is (`sinfo -N -l`)"
    )
    NODES = "set cluster.nodes: the partition wants more or fewer (MinNodes and MaxNodes of `scontrol show partition`)"
    SIZE = "set cluster.nodes and cluster.gpus_per_node"
    CPUS = "lower cluster.cpus_per_gpu or cluster.nodes (`sinfo -o '%P %c'` shows the CPUs of a node)"
    MEMORY = "lower cluster.memory_gb_per_gpu (`sinfo -o '%P %m'` shows the MB of a node)"
    DISK = "lower cluster.sbatch.tmp"
    GPUS = "see `sinfo -o '%P %G'` for the GPUs and their types; set cluster.gpu_type and cluster.gpu_flag"
    GPU_FLAG = "set cluster.gpu_flag=gres"
    NODE_NAME = "see `sinfo -N` for the names and set cluster.nodelist or cluster.exclude"
    NODE_AWAY = "leave the node out of cluster.nodelist, or wait for it (`sinfo -R`)"
    TOPOLOGY = "set cluster.nodelist, cluster.sbatch.segment or cluster.sbatch.switches to what the network has"
    FEATURE = "see `sinfo -o '%N %f'` for the features and set cluster.constraint"
    RESERVATION = "see `scontrol show reservation` and set cluster.sbatch.reservation"
    DEPENDENCY = "set cluster.sbatch.dependency to jobs that exist (`squeue --me`)"
    LICENSES = "see `scontrol show licenses` and set cluster.sbatch.licenses"
    WCKEY = "see `sacctmgr show wckey user=$USER` and set cluster.sbatch.wckey"
    MCS_LABEL = "set cluster.sbatch.mcs-label"
    BURST_BUFFER = "set cluster.sbatch.bb"
    WHEN = "set cluster.sbatch.begin or cluster.sbatch.deadline to a time to come"
    DISTRIBUTION = "set cluster.sbatch.distribution"
    OPTION = "look up the option in `man sbatch` and set cluster.sbatch.<flag>"
    REQUEUE = "this site refuses --requeue: set requeue.enabled=false; such a run comes back by `resume` alone"
    SITE = "set what the site's own words ask for"
    SILENT = "run `sbatch --test-only` on the script by hand"
    OTHER = ""

    @property
    def is_about_resources(self) -> bool:
        """Whether another spelling of the request or a smaller one may help."""
        return self in _ABOUT_RESOURCES


_ABOUT_RESOURCES = frozenset(
    {
        *(Refusal.RESOURCES, Refusal.NODES, Refusal.SIZE, Refusal.CPUS, Refusal.MEMORY, Refusal.GPUS),
        *(Refusal.GPU_FLAG, Refusal.OPTION, Refusal.SITE, Refusal.SILENT, Refusal.OTHER),
    }
)
_OF_MESSAGE = {
    "Invalid partition name specified": Refusal.PARTITION,
    "No partition specified or system default partition": Refusal.PARTITION,
    "Requested nodes not in this partition": Refusal.NODE_NAME,
    "Required partition not available (inactive or drain)": Refusal.PARTITION_STATE,
    "Partition in DOWN state": Refusal.PARTITION_STATE,
    "User's group not permitted to use this partition": Refusal.PARTITION_GROUP,
    "Multiple partition job request not supported when a partition is set in the association": Refusal.ONE_PARTITION,
    "Access/permission denied": Refusal.ACCESS,
    "Invalid qos specification": Refusal.QOS,
    "Requested account has breached requested QOS usage threshold": Refusal.QOS_USAGE,
    "Invalid account or account/partition combination specified": Refusal.ACCOUNT,
    "Invalid or unknown association": Refusal.ACCOUNT,
    "Time limit specification required, but not provided": Refusal.TIME_MISSING,
    "Requested time limit is invalid (missing or exceeds some limit)": Refusal.TIME_LIMIT,
    "Invalid time-min specification (exceeds job's time or other limits)": Refusal.TIME_MIN,
    "Job can not start due to maintenance reservation.": Refusal.MAINTENANCE,
    "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)": Refusal.POLICY,
    "Unable to contact slurm controller (connect failure)": Refusal.AWAY,
    "MaxJobCount limit reached": Refusal.LATER,
    "Rate limit exceeded, please retry momentarily": Refusal.LATER,
    "Rate limit exceeded, please retry later": Refusal.LATER,
    "System submissions disabled": Refusal.LATER,
    "Slurm temporarily unable to accept job, sleeping and retrying": Refusal.LATER,
    "Unable to create job record, try again": Refusal.LATER,
    "Requested node configuration is not available": Refusal.RESOURCES,
    "Requested partition configuration not available now": Refusal.RESOURCES,
    "Node count specification invalid": Refusal.NODES,
    "Job size specification needs to be provided": Refusal.SIZE,
    "Task count specification invalid": Refusal.SIZE,
    "More processors requested than permitted": Refusal.CPUS,
    "CPU count specification invalid": Refusal.CPUS,
    "Memory required by task is not available": Refusal.MEMORY,
    # Before the message that no nodes fit.
    "CPU count per node can not be satisfied": Refusal.CPUS,
    "Memory specification can not be satisfied": Refusal.MEMORY,
    "Temporary disk specification can not be satisfied": Refusal.DISK,
    "Socket, core and/or thread specification can not be satisfied": Refusal.RESOURCES,
    "Invalid generic resource (gres) specification": Refusal.GPUS,
    "Duplicate generic resource (gres) specification": Refusal.GPUS,
    "Invalid GRES specification (with and without type identification)": Refusal.GPUS,
    "Invalid Trackable RESource (TRES) specification": Refusal.GPUS,
    "Requested GRES option unsupported by configured SelectType plugin": Refusal.GPU_FLAG,
    "Invalid node name specified": Refusal.NODE_NAME,
    "Required node not available (down, drained or reserved)": Refusal.NODE_AWAY,
    "Requested nodes are busy": Refusal.NODE_AWAY,
    "Requested topology configuration is not available": Refusal.TOPOLOGY,
    "Invalid feature specification": Refusal.FEATURE,
    "Invalid preferred feature specification": Refusal.FEATURE,
    "Job --batch option is invalid or not a subset of --constraint": Refusal.FEATURE,
    "Job --batch option is invalid or not a subset of --constraints": Refusal.FEATURE,
    "Requested reservation is invalid": Refusal.RESERVATION,
    "Access denied to requested reservation": Refusal.RESERVATION,
    "Requested reservation is in use": Refusal.RESERVATION,
    "Requested reservation not usable now": Refusal.RESERVATION,
    "Job dependency problem": Refusal.DEPENDENCY,
    "Circular job dependency": Refusal.DEPENDENCY,
    "Invalid license specification": Refusal.LICENSES,
    "Licenses currently unavailable": Refusal.LICENSES,
    "Invalid wckey specification": Refusal.WCKEY,
    "Invalid mcs_label specified": Refusal.MCS_LABEL,
    "Burst Buffer request invalid": Refusal.BURST_BUFFER,
    "Burst Buffer permission denied": Refusal.BURST_BUFFER,
    "Burst Buffer resource limit exceeded": Refusal.BURST_BUFFER,
    "Invalid time specified": Refusal.WHEN,
    "Task distribution specification invalid": Refusal.DISTRIBUTION,
    # Without a hint: they are Slurm's own, and say nothing that a key could mend.
    "Unspecified error": Refusal.OTHER,
}
"""Slurm's messages, as a whole."""
_OF_PATTERN = {
    # slurmctld and sbatch add a name to these.
    r"invalid partition specified: .*": Refusal.PARTITION,
    r"Job's account not (permitted to use|known, so it can't use) this partition \(.*\)": Refusal.PARTITION_ACCOUNT,
    r"Job's account not permitted to use this partition": Refusal.PARTITION_ACCOUNT,
    r"Job's QOS not (permitted to use|known, so it can't use) this partition( \(.*\))?": Refusal.PARTITION_QOS,
    r"Invalid QOS specification, relative QOS .*": Refusal.QOS,
    r"Invalid directive found in batch script: .*": Refusal.OPTION,
    r".*: line \d+: (Unmatched|Unexpected) .*": Refusal.OPTION,
    r"(unrecognized|invalid|ambiguous) option .*|option .* (requires|doesn't allow|is ambiguous).*": Refusal.OPTION,
}
_OF_OPTION = re.compile(r"(?i)invalid --(?P<flag>[a-z-]+)(?:=\S+)? (?:specification|argument|value|option)\b.*")
# What a limit in Slurm's word for a reason is about, and its keys.
_OF_LIMIT = {
    "cpu": "cluster.cpus_per_gpu or cluster.nodes",
    "gres": "cluster.gpus_per_node or cluster.nodes",
    "node": "cluster.nodes",
    "mem": "cluster.memory_gb_per_gpu or cluster.nodes",
    "memory": "cluster.memory_gb_per_gpu or cluster.nodes",
    "wall": "cluster.time_limit_min",
    "wallduration": "cluster.time_limit_min",
}
_PARTITION = "the partition (cluster.partition)"
# What a site's own words are about, and the setting for it.
_SUBJECTS = {
    r"\b(?:accounts?|allocations?|projects?|budgets?|balance|repos?)\b": "the account (cluster.account)",
    r"\bpartitions?\b|\bqueues?\b": _PARTITION,
    r"\bqos\b|\bquality of service\b": "the QOS (cluster.qos)",
    r"\btime.?limits?\b|\bwall.?(?:clock|time)\b|\brun.?time\b": "the time limit (cluster.time_limit_min)",
    # "GPU jobs" and "GPU nodes" are about what is beside.
    r"\bgres\b|\bgeneric resources?\b|\bgpus?\b(?! (?:jobs?|nodes?|partitions?)\b)": (
        "the GPUs (cluster.gpus_per_node, cluster.gpu_type, cluster.gpu_flag)"
    ),
    r"\bmemory\b": "the memory (cluster.memory_gb_per_gpu)",
    r"\bcpus?\b|\bcores?\b": "the CPUs (cluster.cpus_per_gpu)",
    r"\b(?:number of|too many|too few|(?:at least|at most|more than|requests|needs) \d+) (?:\w+ )?nodes?\b": (
        "the number of nodes (cluster.nodes)"
    ),
    r"\bconstraints?\b|\bfeatures?\b|\barchitectures?\b": "the constraint (cluster.constraint)",
    r"\breservations?\b": "the reservation (cluster.sbatch.reservation)",
    r"\blicen[sc]es?\b": "the licenses (cluster.sbatch.licenses)",
    r"\bwckeys?\b": "the WCKey (cluster.sbatch.wckey)",
    r"(?<!mutually )\bexclusive\b": "whole nodes (cluster.sbatch.exclusive)",
    r"\bexported variables\b": "the variables that travel (cluster.export)",
    r"\bcomments?\b": "the comment (cluster.sbatch.comment)",
    r"\bnumber of tasks\b": "the ranks (cluster.nodes, cluster.gpus_per_node)",
    r"\bjob.?names?\b": "the job's name (run.name)",
    r"\brequeue": "--requeue (requeue.enabled=false)",
}
# An option that the words name, as a word of the table above; any other is set as it is.
_OF_FLAG = {
    **{name: name for name in ("account", "partition", "qos", "constraint", "requeue", "gres")},
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"), "gpus"),
    "time": "time limit",
    "mem": "memory",
    "cpus-per-task": "cpus",
    "export": "exported variables",
    "nodes": "number of nodes",
    **dict.fromkeys(("ntasks", "ntasks-per-node", "n"), "number of tasks"),
    "job-name": "job name",
    "wckey": "wckey",
    "exclusive": "exclusive",
    "A": "account",
    "p": "partition",
    "t": "time limit",
    "q": "qos",
    "C": "constraint",
    "G": "gpus",
    "N": "number of nodes",
    "c": "cpus",
}
_SHORT_FLAG = re.compile(r"(?<![\w-])-(?P<name>[AptqCGNcn])(?=[ =<\[]|$)", re.MULTILINE)
_LONG_FLAG = re.compile(r"(?<![\w-])--(?P<name>[a-z][a-z0-9]+(?:-[a-z0-9]+)*)")
_TOO_MANY_JOBS = re.compile(r"(?i)too many (?:\w+ )?jobs|\bmax\w* (?:job limit|number of (?:\w+ )?jobs)")
_ESTIMATE = re.compile(
    # A heterogeneous job's line has neither "nodes" nor the partition; that of 26.05 has a word more: "to start at T a
    # using 2 processors on nodes node[3-4] in partition main".
    r"to start at (?P<start>\S+) (?:\S+ )?using .* on (?:nodes )?(?P<nodes>\S+)(?: in partition (?P<partition>\S+))?"
)
_PREEMPTS = re.compile(r"(?m)^(?:sbatch: )?\s*Preempts: ")

_BY_SBATCH = re.compile(r"s(?:batch|alloc): (?:error|fatal): ")
_REFUSED = re.compile(r"(?m)^(?:sbatch: error: )?(?:allocation failure: |Batch job submission failed: )")


@dataclass(frozen=True, slots=True, kw_only=True)
class TestVerdict:
    """Whether Slurm would take a script now, and when it would start it."""

    __test__ = False

    is_accepted: bool
    start: str = ""
    """Estimated start, e.g. "2026-01-31T09:41:24"; "" if refused or not known."""
    nodelist: str = ""
    """Nodes that it would use, in compact form."""
    partition: str = ""
    preempts: bool = False
    """Whether it would take the nodes of other jobs for it."""
    refusal: Refusal | None = None
    """None if accepted."""
    message: str = ""
    """All that Slurm and the site have said about the refusal."""
    advice: str = ""
    """What to do about it."""


def read_verdict(return_code: int, stderr: str, stdout: str = "") -> TestVerdict:
    """Returns what exit code and output of `sbatch --test-only` mean, or those of an sbatch that was refused."""
    # A wrapper may put both streams into one, and may lose the exit code.
    text = plain(f"{stderr}\n{stdout}")
    if return_code == 0 and _REFUSED.search(text) is None:
        match = _ESTIMATE.search(text)
        if match is None:
            return TestVerdict(is_accepted=True)
        partition = match["partition"] or ""
        return TestVerdict(
            is_accepted=True,
            start=match["start"],
            nodelist=match["nodes"],
            partition=partition,
            preempts=_PREEMPTS.search(text) is not None,
        )
    lines = said(stdout, stderr)
    printed = text.splitlines()
    refusal, advice = _advise(
        lines,
        by_sbatch=[without_prefix(line) for line in printed if _BY_SBATCH.match(line)],
        last=[without_prefix(line) for line in printed if _REFUSED.match(line)],
    )
    message = in_words(lines) or "sbatch gave no reason"
    return TestVerdict(is_accepted=False, refusal=refusal, message=message, advice=advice)


def _advise(lines: list[str], *, by_sbatch: list[str], last: list[str]) -> tuple[Refusal, str]:
    """Returns why a script was refused, and the advice.

    Args:
        lines: all that was printed, also by wrappers and banners.
        by_sbatch: those that sbatch has printed as errors: its own, Slurm's, and those of the site's filter.
        last: those in which Slurm gives its reason; they are never the site's.
    """
    if not lines:
        return Refusal.SILENT, Refusal.SILENT.value
    limits = [line for line in lines if limit_in(line)]
    if limits:
        return Refusal.POLICY, _advice_on_limit(limits[0])
    by_slurm = {line: _of_slurm(line) for line in lines}
    verdicts = [verdict for verdict in by_slurm.values() if verdict is not None and verdict[1]]
    # Where Slurm has said what is wrong, a banner that names an account is not about it.
    may_be_of_site = by_sbatch if verdicts else lines
    of_site = [line for line in may_be_of_site if by_slurm.get(line) is None and line not in last]
    if _TOO_MANY_JOBS.search("\n".join(of_site)):
        return Refusal.TOO_MANY_JOBS, Refusal.TOO_MANY_JOBS.value
    subjects = _subjects_of(of_site)
    if any("requeue.enabled" in subject for subject in subjects):
        return Refusal.REQUEUE, Refusal.REQUEUE.value
    if subjects:
        return Refusal.SITE, f"its words are about {', '.join(subjects)}: set what it asks for"
    return verdicts[0] if verdicts else (Refusal.OTHER, Refusal.OTHER.value)


def _of_slurm(line: str) -> tuple[Refusal, str] | None:
    """Returns why Slurm refuses a script with a message, and the advice; None where it is no message of Slurm's."""
    line = line.strip()
    refusal = _OF_MESSAGE.get(line)
    if refusal is None:
        matching = (refusal for pattern, refusal in _OF_PATTERN.items() if re.fullmatch(pattern, line))
        refusal = next(matching, None)
    if refusal is not None:
        return refusal, refusal.value
    option = _OF_OPTION.fullmatch(line)
    if option is None:
        return None
    subjects = _subjects_of([f"--{option['flag']}"])
    return Refusal.OPTION, f"look up --{option['flag']} in `man sbatch` and set {', '.join(subjects)}"


def _advice_on_limit(reason: str) -> str:
    """Returns what to do about a limit in Slurm's word for it, e.g. "QOSMaxWallDurationPerJobLimit"."""
    limit = limit_in(reason)
    assert limit is not None
    if limit.resource in ("job", "submitjob"):
        return f"{explain_reason(reason)}: {Refusal.TOO_MANY_JOBS.value}"
    key = _OF_LIMIT.get(limit.resource, "what the job asks for")
    verb = "raise" if limit.is_least else "lower"
    return f"{explain_reason(reason)}: {verb} {key}, or set another cluster.qos"


def _subjects_of(lines: list[str]) -> list[str]:
    """Returns what the words of a site are about, each with its setting; options that it names say it best."""
    text = "\n".join(lines)
    flags = list(dict.fromkeys(match["name"] for match in _LONG_FLAG.finditer(text)))
    flags += [match["name"] for match in _SHORT_FLAG.finditer(text)]
    flag_words = [_OF_FLAG[flag] for flag in flags if flag in _OF_FLAG]
    words = "\n".join(flag_words) if flags else text
    subjects = [subject for pattern, subject in _SUBJECTS.items() if re.search(pattern, words, re.IGNORECASE)]
    # "... in this partition" says where a rule holds.
    if len(subjects) > 1 and not flags:
        subjects = [subject for subject in subjects if subject != _PARTITION]
    return subjects + [f"--{flag} (cluster.sbatch.{flag})" for flag in flags if flag not in _OF_FLAG]
