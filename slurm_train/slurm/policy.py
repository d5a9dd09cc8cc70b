"""What a cluster has and allows: partitions, accounts, QOS, preemption, and what sbatch would refuse. Pure text in.

The database keeps names in lower case; a site without accounting prints nothing, and nothing is guessed for it.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from slurm_train.errors import ClusterError
from slurm_train.formatting import plain
from slurm_train.slurm.answers import in_words, said
from slurm_train.slurm.records import split_rows

SINFO_FORMAT = "%R|%P|%a|%D|%s|%l|%L|%G|%c|%Z|%m|%t"
ASSOCIATION_FORMAT = "DefaultAccount,Cluster,Account,Partition,QOS,DefaultQOS"
QOS_FORMAT = "Name,Priority,GraceTime,Preempt,PreemptMode,MaxWall"

# Of sinfo's short words for a node: it runs jobs, will again when a job or a boot has ended, or is woken by a job. The
# words for power alone are those of nodes of a cloud.
_USABLE = frozenset(
    {
        *("idle", "mix", "alloc", "comp", "resv", "plnd", "block", "npc", "boot", "cloud"),
        *("pow_dn", "pow_up", "powering_up", "powered_dn", "powring_dn", "powrng_dn"),
    }
)
# Behind the word: powered down (~), to be (!), going down (%) or up (#), a reboot that waits (@) or runs (^), planned
# (-), another job ends (+). Those that do not answer (*) or are in maintenance ($) run nothing.
_USABLE_FLAGS = "~!%#@^-+"
_DAYS = re.compile(r"(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+)(?::(?P<seconds>\d+))?)?")
_DURATION = re.compile(r"(?:(?:(?P<hours>\d+):)?(?P<minutes>\d+):)?(?P<seconds>\d+)(?P<unit> sec| min)?")
_COUNT = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[KMGTP]?)\+?")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes of one partition that have the same parts and are in the same state."""

    num_nodes: int
    gpus_per_node: int
    gpu_type: str
    """Type as --gres wants it, e.g. "a100"; "" where the site names none."""
    cpus_per_node: int
    threads_per_core: int
    memory_per_node_mb: int
    state: str
    """Slurm's short word, e.g. "idle", "mix", "drain"; a trailing "*" means that the node does not answer."""

    @property
    def is_usable(self) -> bool:
        """Whether such nodes run jobs or could, also after a boot: neither down, silent, in maintenance nor drained."""
        state = self.state.lower()
        word = state[:-1] if state.endswith(tuple(_USABLE_FLAGS)) else state
        return word in _USABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A partition that this user can see."""

    name: str
    is_default: bool
    state: str
    """ "up", "down", "drain" or "inact": only "up" starts jobs."""
    max_nodes: int | None
    """Nodes that one job may have; None if unlimited."""
    max_time_min: int | None
    """Longest time limit in minutes; None if unlimited."""
    default_time_min: int | None
    """Time limit of a job that asks for none; None if the longest."""
    groups: tuple[NodeGroup, ...]

    @property
    def num_nodes(self) -> int:
        """Nodes of any kind and state."""
        return sum(group.num_nodes for group in self.groups)

    @property
    def num_usable_nodes(self) -> int:
        """Nodes that run jobs or could: neither down nor being drained."""
        return sum(group.num_nodes for group in self.groups if group.is_usable)

    @property
    def gpus_per_node(self) -> int:
        """GPUs on the best-equipped nodes."""
        return max((group.gpus_per_node for group in self.groups), default=0)

    @property
    def cpus_per_node(self) -> int:
        """CPUs on the best-equipped nodes."""
        return max((group.cpus_per_node for group in self.groups), default=0)


def parse_sinfo(text: str) -> list[Partition]:
    """Returns the partitions in the output of `sinfo -h -e -o SINFO_FORMAT`, in Slurm's order.

    Lines of another form are a site's own and are left out.

    Raises:
        ClusterError: there are lines, and none is of that format.
    """
    rows: dict[str, list[list[str]]] = {}
    for fields in split_rows(text, SINFO_FORMAT.count("|") + 1):
        rows.setdefault(fields[0], []).append(fields)
    if text.strip() and not rows:
        raise ClusterError(
            f"sinfo printed no partition, but {text.strip()[:200]!r}",
            hint=f"run sinfo -h -e -o '{SINFO_FORMAT}' by hand and report what it prints",
        )
    partitions = []
    for name, lines in rows.items():
        _, starred, state, _, job_size, max_time, default_time, *_ = lines[0]
        most = job_size.rpartition("-")[2]
        groups = list[NodeGroup]()
        for _, _, _, num_nodes, *_, gres, cpus, threads, memory, node_state in lines:
            gpus_per_node, gpu_type = parse_gpus(gres)
            group = NodeGroup(
                num_nodes=_count(num_nodes) or 0,
                gpus_per_node=gpus_per_node,
                gpu_type=gpu_type,
                # "64+" where nodes of one line differ: the smallest of them.
                cpus_per_node=_count(cpus) or 0,
                threads_per_core=_count(threads) or 1,
                memory_per_node_mb=_count(memory) or 0,
                state=node_state,
            )
            groups += [group] if group.num_nodes else []
        partitions.append(
            Partition(
                name=name,
                is_default=starred == f"{name}*",
                state=state,
                max_nodes=_count(most),
                max_time_min=time_limit_min(max_time),
                default_time_min=time_limit_min(default_time),
                groups=tuple(groups),
            )
        )
    return partitions


def chosen_partitions(partition: str, partitions: Sequence[Partition]) -> list[Partition]:
    """Returns the partitions that a job may start in.

    Args:
        partition: what it asks for, as Slurm takes it: "gpu", "gpu,long"; "" for the default.
        partitions: those of the cluster.
    """
    names = {name.strip() for name in partition.split(",")} - {""}
    return [part for part in partitions if (part.name in names if names else part.is_default)]


def _count(text: str) -> int | None:
    """Returns a number as sinfo prints it: "64" -> 64, "64+" -> 64, "1K" -> 1024; None for "infinite" and "n/a"."""
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        return None
    return int(float(match["number"]) * 1024 ** " KMGTP".index(match["unit"] or " "))


def time_limit_min(text: str) -> int | None:
    """Returns a limit in whole minutes: "1-00:00:00" -> 1440, "30:00" -> 30; None for "infinite" and other words."""
    limit_s = duration_s(text)
    return None if limit_s is None else int(limit_s // 60)


def duration_s(text: str) -> float | None:
    """Returns seconds for what Slurm writes as "00:00:15", "1-02:00:00", "1-02", "30 sec", "5 min" or "15".

    None for words: "UNLIMITED", "infinite", "n/a", "INVALID", "NOT_SET", "Partition_Limit".
    """
    match = _DAYS.fullmatch(text.strip()) or _DURATION.fullmatch(text.strip())
    if match is None:
        return None
    parts = match.groupdict()
    factor = 60 if parts.get("unit") == " min" else 1
    hours = 24 * int(parts.get("days") or 0) + int(parts["hours"] or 0)
    return float(3600 * hours + 60 * int(parts["minutes"] or 0) + factor * int(parts["seconds"] or 0))


def parse_gpus(gres: str) -> tuple[int, str]:
    """Returns number and type of the GPUs in a node's generic resources: "gpu:a100:4(S:0-1),nic:2" -> (4, "a100").

    Of several types on one node the numbers add up and the type is "" (no single one would be right).
    """
    count = 0
    types = set()
    for entry in re.sub(r"\([^)]*\)", "", gres).split(","):
        name, *words = (word for word in entry.split(":") if word != "no_consume")
        if name != "gpu":
            continue
        # "gpu:4" is a number, "gpu:a100" a type, and of "gpu:3090:4" the last is the number, whatever the type is.
        number = words.pop() if words and words[-1].isdigit() else "1"
        count += int(number)
        types.add(words[0] if words else "")
    return count, types.pop() if len(types) == 1 else ""


def tres_gpus(tres: str) -> int | None:
    """Returns the GPUs in a job's trackable resources: "cpu=8,gres/gpu=4,gres/gpu:3090=4" -> 4; None if there are none.

    A site accounts for all of them, for each type, or for both; then the types are parts of the whole.
    """
    pairs = [entry.partition("=")[::2] for entry in tres.split(",")]
    counts = {name: int(count) for name, count in pairs if count.isdigit()}
    typed = [count for name, count in counts.items() if name.startswith("gres/gpu:")]
    return counts.get("gres/gpu", sum(typed) if typed else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Association:
    """An account that a user may charge, on a cluster."""

    cluster: str
    account: str
    is_default: bool
    """Whether Slurm takes it where a job names none."""
    partition: str = ""
    """The one partition that it is for; "" for all."""
    qos: tuple[str, ...] = ()
    """Names that a job may ask for; empty where the site lists none."""
    default_qos: str = ""
    """What a job gets that asks for none; "" where the site names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Qos:
    """A quality of service."""

    name: str
    priority: int = 0
    grace_s: float = 0.0
    """From the first TERM of a preemption to the last."""
    preempts: tuple[str, ...] = ()
    """The QOS whose jobs it may preempt."""
    preempt_mode: str = ""
    """What becomes of its jobs when they are preempted, e.g. "requeue"; "cluster": the cluster's PreemptMode."""
    max_time_min: int | None = None
    """Longest time limit in minutes; None if unlimited."""


def parse_associations(text: str) -> list[Association]:
    """Returns the rows of `sacctmgr -n -P show user where name=... withassoc format=ASSOCIATION_FORMAT`."""
    return [
        Association(
            cluster=cluster,
            account=account,
            is_default=account == default,
            partition=partition,
            qos=_names(qos),
            default_qos=default_qos,
        )
        for default, cluster, account, partition, qos, default_qos in split_rows(text, 6)
        if account
    ]


def parse_qos(text: str) -> list[Qos]:
    """Returns the rows of `sacctmgr -n -P show qos format=QOS_FORMAT`."""
    return [
        Qos(
            name=name,
            priority=int(priority) if priority.isdigit() else 0,
            grace_s=duration_s(grace) or 0.0,
            preempts=_names(preempts),
            preempt_mode=mode.lower(),
            max_time_min=time_limit_min(max_wall),
        )
        for name, priority, grace, preempts, mode, max_wall in split_rows(text, 6)
        if name
    ]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """What becomes of a job of one QOS and partition when Slurm wants its nodes for another one."""

    by: Literal["nobody", "qos", "partition"]
    """What decides whose job is preempted."""
    mode: str
    """Slurm's word, e.g. "REQUEUE", "CANCEL", "GANG,SUSPEND"; "OFF" if there is no preemption."""
    grace_s: float | None
    """From the first TERM to the last; None if not known."""
    kill_wait_s: float | None
    """From the last TERM to KILL; None if not known."""

    @property
    def outcome(self) -> Literal["never", "requeued", "cancelled", "suspended"]:
        """What a preemption does to the job."""
        if self.by == "nobody" or self.mode == "OFF":
            return "never"
        if "CANCEL" in self.mode:
            return "cancelled"
        return "suspended" if "SUSPEND" in self.mode and "REQUEUE" not in self.mode else "requeued"

    @property
    def notice_s(self) -> float | None:
        """From the first TERM to KILL; None where no signal is sent, or the grace is not known."""
        if self.grace_s is None or self.outcome not in ("requeued", "cancelled"):
            return None
        return self.grace_s + (self.kill_wait_s or 0.0)

    @property
    def in_words(self) -> str:
        """How a run comes back from it, e.g. "preemption requeues here: 15 s grace, then 5 s to end in"."""
        wait = "" if self.kill_wait_s is None else f"{self.kill_wait_s:g} s to end in"
        if self.outcome == "never":
            return "nobody preempts here" + (f"; {wait}" if wait else "")
        if self.outcome == "suspended":
            return "preemption suspends here: the run waits in memory and goes on in the same attempt"
        grace = "grace not known" if self.grace_s is None else f"{self.grace_s:g} s grace"
        grace += f", then {wait}" if wait else ""
        if self.outcome == "cancelled":
            return f"preemption cancels here ({grace}): requeued within that time, else another job takes over"
        return f"preemption requeues here: {grace}"


EXPEDITED = "after a lost node at once, before all other jobs (expedited requeue)"


def return_in_words(preemption: Preemption | None, *, is_expedited: bool = False) -> str:
    """Returns in one line how a run comes back from the time limit, a lost node and a preemption.

    Args:
        preemption: None if not known.
        is_expedited: whether the site brings its job back at once after a lost node.
    """
    # JobRequeue=0 is a default only: every script says --requeue.
    at_preemption = "what happens on preemption is not known" if preemption is None else preemption.in_words
    at_loss = f", {EXPEDITED}" if is_expedited else ""
    return f"requeue, same job id{at_loss}; {at_preemption}"


def read_preemption(settings: Mapping[str, str], *, qos: Qos | None, partition: Mapping[str, str]) -> Preemption:
    """Returns how jobs of a QOS and a partition are preempted.

    Args:
        settings: `scontrol show config`.
        qos: the job's QOS; None if not known.
        partition: the job's partition by scontrol's names, e.g. {"GraceTime": "0", "PreemptMode": "REQUEUE"}.
    """
    by: Literal["nobody", "qos", "partition"] = "nobody"
    own_mode = ""
    grace_s = None
    if settings.get("PreemptType") == "preempt/qos":
        by = "qos"
        if qos is not None:
            own_mode = qos.preempt_mode.upper()
            grace_s = qos.grace_s
    elif settings.get("PreemptType") == "preempt/partition_prio":
        by = "partition"
        own_mode = partition.get("PreemptMode", "").upper()
        grace_s = duration_s(partition.get("GraceTime", ""))
    mode = own_mode if own_mode not in ("", "CLUSTER") else settings.get("PreemptMode", "").upper()
    return Preemption(
        by=by,
        mode=mode if by != "nobody" and mode else "OFF",
        grace_s=0.0 if by == "nobody" or own_mode in ("OFF", "SUSPEND") else grace_s,
        kill_wait_s=duration_s(settings.get("KillWait", "")),
    )


_DEFAULT_REQUEUE_DELAY_S = 120.0
_REQUEUE_DELAYS = (
    ("SchedulerParameters", re.compile(r"requeue_delay=(\d+)")),
    ("AuthInfo", re.compile(r"cred_expire=(\d+)")),
)
"""By setting, the newest first: 25.11 has one of its own."""


def requeue_delay_s(settings: Mapping[str, str]) -> float:
    """Returns how long a requeued job waits at least, by default until the credential of its earlier start expires."""
    matches = (pattern.search(settings.get(name, "")) for name, pattern in _REQUEUE_DELAYS)
    match = next(filter(None, matches), None)
    return _DEFAULT_REQUEUE_DELAY_S if match is None else float(match[1])


def returning_codes(settings: Mapping[str, str]) -> frozenset[int]:
    """Returns the exit codes of jobs that this site starts again or holds by itself.

    Args:
        settings: `scontrol show config`, with e.g. "RequeueExit": "1,3-5".
    """
    codes = set[int]()
    for name in ("RequeueExit", "RequeueExitHold"):
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", settings.get(name, "")):
            codes.update(range(int(first), int(last or first) + 1))
    return frozenset(codes)


_EXPEDITING_SINCE = (25, 11)


def expedites_requeues(settings: Mapping[str, str]) -> bool:
    """Returns whether `sbatch --requeue=expedite` is taken here: by 25.11 and newer where the site has enabled it.

    Args:
        settings: `scontrol show config`.
    """
    match = re.match(r"(\d+)\.(\d+)", settings.get("SLURM_VERSION", ""))
    is_new = match is not None and (int(match[1]), int(match[2])) >= _EXPEDITING_SINCE
    return is_new and "enable_expedited_requeue" in settings.get("SlurmctldParameters", "").split(",")


class Refusal(enum.Enum):
    """Why Slurm would not take a script; the value is the advice for it."""

    PARTITION = "see `sinfo` for the partitions you may use and set cluster.partition"
    QOS = "see `sacctmgr show qos` for the names you may use and set cluster.qos"
    ACCOUNT = "see `sacctmgr show associations user=$USER` and set cluster.account"
    RESOURCES = (
        "no set of nodes has that much: lower cluster.nodes, cluster.gpus_per_node, CPUs or memory (see `sinfo -N -l`)"
    )
    REQUEUE = "this site refuses --requeue: set requeue.enabled=false; such a run comes back by `resume` alone"
    TIME_LIMIT = "lower cluster.time_limit_min (`sinfo -o '%P %l'` shows the longest)"
    POLICY = (
        "your account or QOS allows less: ask for less, or for another QOS; a limit on submitted jobs counts those "
        "that wait as well (`squeue --me`), and the same command submits later what it refuses now"
    )
    NODE_NAME = "see `sinfo -N` for the names and set cluster.nodelist or cluster.exclude"
    FEATURE = "see `sinfo -o '%N %f'` for the features and set cluster.constraint"
    RESERVATION = "see `scontrol show reservation` and set cluster.sbatch.reservation"
    OPTION = "look up the option in `man sbatch` and set cluster.sbatch.<flag>"
    OTHER = "run `sbatch --test-only` on the script by hand"


# Searched in order, in text of any case: the first that occurs decides.
_PATTERNS = {
    # First: its explanation mentions time limits too.
    Refusal.POLICY: r"accounting/qos policy|too many (\w+ )?jobs|max\w* (job limit|number of (\w+ )?jobs)",
    Refusal.REQUEUE: "requeue",
    Refusal.PARTITION: "partition name|invalid partition|not permitted to use this partition",
    Refusal.QOS: "invalid qos",
    Refusal.ACCOUNT: "invalid account",
    Refusal.TIME_LIMIT: "time limit|--time specification",
    Refusal.NODE_NAME: "invalid node name",
    Refusal.FEATURE: "feature specification",
    Refusal.RESERVATION: "reservation",
    Refusal.RESOURCES: "(node|partition) configuration (is )?not available|node count|more processors|generic resource"
    "|gres|memory specification",
    Refusal.OPTION: "option|specification|directive|unmatched",
}
# What a site's own words are about, and the setting for it.
_SUBJECTS = {
    r"\baccounts?\b|\ballocations?\b|\bprojects?\b|\bbudgets?\b|\bbalance\b": "the account (cluster.account)",
    r"\bpartitions?\b|\bqueues?\b": "the partition (cluster.partition)",
    r"\bqos\b|\bquality of service\b": "the QOS (cluster.qos)",
    r"\btime.?limits?\b|\bwall.?(?:clock|time)\b|\brun.?time\b": "the time limit (cluster.time_limit_min)",
    r"\bgres\b|\bgeneric resources?\b|\bgpus?\b": (
        "the GPUs (cluster.gpus_per_node, cluster.gpu_type, cluster.gpu_flag)"
    ),
    r"\bmemory\b": "the memory (cluster.memory_gb_per_gpu)",
    r"\bcpus?\b|\bcores?\b": "the CPUs (cluster.cpus_per_gpu)",
    r"\b(?:number of|too many|too few|at least \d+|at most \d+|more than \d+) (?:\w+ )?nodes?\b": (
        "the number of nodes (cluster.nodes)"
    ),
    r"\bconstraints?\b|\bfeatures?\b": "the constraint (cluster.constraint)",
    r"\breservations?\b": "the reservation (cluster.sbatch.reservation)",
    r"\blicen[sc]es?\b": "the licenses (cluster.sbatch.licenses)",
    r"\bwckeys?\b": "the WCKey (cluster.sbatch.wckey)",
    r"(?<!mutually )\bexclusive\b": "whole nodes (cluster.sbatch.exclusive)",
    r"\bcomments?\b": "the comment (cluster.sbatch.comment)",
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
    "nodes": "number of nodes",
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
_SHORT_FLAG = re.compile(r"(?<![\w-])-(?P<name>[AptqCGNc])(?=[ =<\[]|$)", re.MULTILINE)
_LONG_FLAG = re.compile(r"(?<![\w-])--(?P<name>[a-z][a-z0-9]+(?:-[a-z0-9]+)*)")
_ESTIMATE = re.compile(
    # A heterogeneous job's line has neither "nodes" nor the partition; that of 26.05 has a word more: "to start at T a
    # using 2 processors on nodes node[3-4] in partition main".
    r"to start at (?P<start>\S+) (?:\S+ )?using .* on (?:nodes )?(?P<nodes>\S+)(?: in partition (?P<partition>\S+))?"
)
_PREEMPTS = re.compile(r"(?m)^(?:sbatch: )?\s*Preempts: ")

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
    # Slurm's own words come last on stderr; those of the site before them are about anything.
    own_words = "; ".join((said("", stderr) or lines)[-2:])
    matching = (refusal for refusal, pattern in _PATTERNS.items() if re.search(pattern, own_words, re.IGNORECASE))
    refusal = next(matching, Refusal.OTHER)
    advice = refusal.value
    subjects = _subjects_of(lines)
    if refusal is Refusal.OTHER and subjects:
        advice = f"its words are about {', '.join(subjects)}: set what it asks for"
    message = in_words(lines) or "sbatch gave no reason"
    return TestVerdict(is_accepted=False, refusal=refusal, message=message, advice=advice)


def _subjects_of(lines: list[str]) -> list[str]:
    """Returns what the words of a site are about, each with its setting."""
    text = "\n".join(lines)
    flags = list(dict.fromkeys(match["name"] for match in _LONG_FLAG.finditer(text)))
    flags += [match["name"] for match in _SHORT_FLAG.finditer(text)]
    flag_words = [_OF_FLAG[flag] for flag in flags if flag in _OF_FLAG]
    words = "\n".join([_LONG_FLAG.sub("", text), *flag_words])
    subjects = [subject for pattern, subject in _SUBJECTS.items() if re.search(pattern, words, re.IGNORECASE)]
    return subjects + [f"--{flag} (cluster.sbatch.{flag})" for flag in flags if flag not in _OF_FLAG]
