"""What a cluster has and allows: partitions, accounts, QOS and preemption. Pure text in.

The database keeps names in lower case; a site without accounting prints nothing, and nothing is guessed for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from slurm_train.errors import ClusterError
from slurm_train.slurm.records import split_rows

SINFO_FORMAT = "%R|%P|%a|%D|%s|%l|%L|%G|%c|%Z|%m|%t"
ASSOCIATION_FORMAT = (
    "DefaultAccount,Cluster,Account,Partition,QOS,DefaultQOS,"
    "MaxWall,MaxTRES,GrpTRES,MaxJobs,GrpJobs,MaxSubmit,GrpSubmit"
)
QOS_FORMAT = (
    "Name,Priority,GraceTime,Preempt,PreemptMode,MaxWall,Flags,MinTRES,MaxTRES,MaxTRESPU,MaxTRESPA,GrpTRES,"
    "MaxJobsPU,MaxJobsPA,GrpJobs,MaxSubmitPU,MaxSubmitPA,GrpSubmit"
)
LIMIT_FACTOR = "LimitFactor"
"""One more field of a QOS, which Slurm has since 21.08."""

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

Amounts = Mapping[str, int]
"""Numbers by the names of trackable resources, e.g. {"node": 2, "gres/gpu": 8, "mem": 1024}; memory in MB."""
Scope = Literal["job", "user", "account", "group"]
"""Whose use a limit counts: one job's, or that of all jobs of a user, of an account, or of a QOS or association."""


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
    min_nodes: int = 1
    """Nodes that one job must have."""
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
        _, starred, state, _, job_size, _, default_time, *_ = lines[0]
        fewest, _, most = job_size.rpartition("-")
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
                min_nodes=_count(fewest or most) or 1,
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


def asked_gpus(value: str) -> tuple[int, str]:
    """Returns number and type of the GPUs that --gpus and its like ask for: "a100:4" -> (4, "a100"), "8" -> (8, "").

    Of several types the numbers add up and the type is "", as for `parse_gpus`.
    """
    return parse_gpus(",".join(f"gpu:{entry}" for entry in value.split(",")))


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
    max_time_min: int | None = None
    """Longest time limit in minutes, also where an account above sets it; None if unlimited."""
    most: Mapping[Scope, Amounts] = field(default_factory=dict)
    """The most that jobs may have at once; "job" and "submit" count running jobs and those in the queue."""


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
    flags: tuple[str, ...] = ()
    """E.g. "OverPartQOS", "PartitionTimeLimit"."""
    least: Amounts = field(default_factory=dict)
    """The least that a job may ask for."""
    most: Mapping[Scope, Amounts] = field(default_factory=dict)
    """As for an association."""
    has_limit_factor: bool = False
    """Whether the resources that an association allows are multiplied by a factor for its jobs."""


def parse_associations(text: str) -> list[Association]:
    """Returns the rows of `sacctmgr -n -P show user where name=... withassoc format=ASSOCIATION_FORMAT`."""
    found = []
    for row in split_rows(text, ASSOCIATION_FORMAT.count(",") + 1):
        default, cluster, account, partition, qos, default_qos, max_wall, *limits = row
        tres, group_tres, jobs, group_jobs, submit, group_submit = limits
        if not account:
            continue
        association = Association(
            cluster=cluster,
            account=account,
            is_default=account == default,
            partition=partition,
            qos=_names(qos),
            default_qos=default_qos,
            max_time_min=time_limit_min(max_wall),
            most=_limits(job=(tres,), user=("", jobs, submit), group=(group_tres, group_jobs, group_submit)),
        )
        found.append(association)
    return found


def parse_qos(text: str) -> list[Qos]:
    """Returns the rows of `sacctmgr -n -P show qos format=QOS_FORMAT`, with or without LIMIT_FACTOR."""
    num_fields = QOS_FORMAT.count(",") + 1
    rows = [*split_rows(text, num_fields), *split_rows(text, num_fields + 1)]
    found = []
    for row in rows:
        name, priority, grace, preempts, mode, max_wall, flags, least, job, *more = row[:num_fields]
        user, account, group, user_jobs, account_jobs, group_jobs, user_submit, account_submit, group_submit = more
        if not name:
            continue
        qos = Qos(
            name=name,
            priority=int(priority) if priority.isdigit() else 0,
            grace_s=duration_s(grace) or 0.0,
            preempts=_names(preempts),
            preempt_mode=mode.lower(),
            max_time_min=time_limit_min(max_wall),
            flags=_names(flags),
            least=read_amounts(least),
            most=_limits(
                job=(job,),
                user=(user, user_jobs, user_submit),
                account=(account, account_jobs, account_submit),
                group=(group, group_jobs, group_submit),
            ),
            has_limit_factor=any(row[num_fields:]),
        )
        found.append(qos)
    return found


def _limits(**texts: tuple[str, ...]) -> dict[Scope, Amounts]:
    """Returns limits by whose use they count, from resources, running jobs and submitted jobs as sacctmgr has them."""
    limits: dict[Scope, Amounts] = {}
    for scope, (tres, *numbers) in texts.items():
        jobs = {name: int(text) for name, text in zip(("job", "submit"), numbers, strict=False) if text.isdigit()}
        amounts = {**read_amounts(tres), **jobs}
        if amounts:
            limits[cast("Scope", scope)] = amounts
    return limits


def read_amounts(tres: str) -> dict[str, int]:
    """Returns trackable resources as sacctmgr writes them: "node=2,mem=100G" -> {"node": 2, "mem": 102400}."""
    amounts = {}
    for entry in tres.split(","):
        name, _, text = entry.partition("=")
        match = _COUNT.fullmatch(text)
        if match is None:
            continue
        power = " KMGTP".index(match["unit"] or " ")
        # Memory is in MB where there is no unit.
        megabytes = 1024 ** (power - 2) if power else 1
        amounts[name] = int(float(match["number"]) * (megabytes if name == "mem" else 1024**power))
    return amounts


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


def returning_codes_in_words(settings: Mapping[str, str]) -> str:
    """Returns in one line which jobs this site starts again or holds by their exit codes; "" for none."""
    names = [name for name in ("RequeueExit", "RequeueExitHold") if returning_codes({name: settings.get(name, "")})]
    if not names:
        return ""
    codes = ", ".join(f"{name}={settings[name]}" for name in names)
    return f"{codes}: jobs that end with these codes start again or are held, so a run ends with another one"


def is_since(settings: Mapping[str, str], release: tuple[int, int]) -> bool:
    """Returns whether the controller is of a release or newer, e.g. (23, 2); false where its version is not known."""
    match = re.match(r"(\d+)\.(\d+)", settings.get("SLURM_VERSION", ""))
    return match is not None and (int(match[1]), int(match[2])) >= release


LINEAGE_SINCE = (23, 2)
"""Since then the accounts that a partition names stand for those below them as well."""
_EXPEDITING_SINCE = (25, 11)


def expedites_requeues(settings: Mapping[str, str]) -> bool:
    """Returns whether `sbatch --requeue=expedite` is taken here: by 25.11 and newer where the site has enabled it.

    Args:
        settings: `scontrol show config`.
    """
    is_new = is_since(settings, _EXPEDITING_SINCE)
    return is_new and "enable_expedited_requeue" in settings.get("SlurmctldParameters", "").split(",")
