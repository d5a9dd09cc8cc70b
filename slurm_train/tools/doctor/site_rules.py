"""What is to be known of a site before a run is submitted there: rules about what Slurm's commands say. Pure.

Also the site as a table, and what happens to a run there in a few sentences: when it is preempted, how it comes back,
what can be lost.

To add a rule, write a function that takes the view and yields findings; add it to `_RULES`, what to do about its code
to `HINTS`, and a section for the code to docs/troubleshooting.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from slurm_train.formatting import duration, shorten
from slurm_train.mounts import Mount
from slurm_train.rundir.events import Finding
from slurm_train.slurm.job_limits import limits_of, owner_partition
from slurm_train.slurm.policy import (
    EXPEDITED,
    Partition,
    Preemption,
    duration_s,
    expedites_requeues,
    requeue_delay_s,
    returning_codes_in_words,
)
from slurm_train.slurm.site import SiteFacts, default_qos, preempting_qos, preemption_in
from slurm_train.tools.doctor.facts import error, merge, note, warning

_OLDEST = (20, 11)
_SHORT_S = 60.0
_CACHED_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteView:
    """What was asked on a login node, and what came back."""

    has_slurm: bool = True
    away: str = ""
    """Why nothing is known: how Slurm's controller failed to answer."""
    facts: SiteFacts = field(default_factory=SiteFacts)
    runtimes: Sequence[str] = ()
    """Container runtimes on the PATH."""
    nodes: Sequence[tuple[str, str, str]] = ()
    """NodeName, NodeAddr and host name of each node."""
    federation: str = ""
    """The federation that the cluster is one of."""
    filtered: str = ""
    """With which words a submit filter refuses a plain job that asks for --requeue, "" where it does not."""
    mount: Mount | None = None
    """The file system of the folder that runs are submitted from."""
    lacks: str = ""
    """Which call that file system lacks that a run needs, in a sentence; "" for none, or where it is not known."""

    @property
    def settings(self) -> Mapping[str, str]:
        """`scontrol show config`."""
        return self.facts.settings

    @property
    def usual(self) -> Partition | None:
        """The partition of a job that names none."""
        parts = self.facts.partitions
        return next((part for part in parts if part.is_default), parts[0] if parts else None)

    @property
    def qos(self) -> str:
        """What a job of this user gets that asks for nothing; "" where it is not known."""
        return "" if self.usual is None else default_qos(self.facts, self.usual.name)

    def preemption(self, partition: Partition | None) -> Preemption | None:
        """Returns how a job in a partition that names no QOS is preempted, None where Slurm does not say."""
        if not self.settings or partition is None:
            return None
        return preemption_in(self.facts, default_qos(self.facts, partition.name), partition.name)


HINTS = {
    "NO_SLURM": "type this on a login node; to try Slurm on one machine: `python -m slurm_train devcluster up`",
    "CONTROLLER_AWAY": "`scontrol ping` tells whether it is up; try again later",
    "OLD_SLURM": "try a small run first: flags and output may differ",
    "NO_GRACE": "save often: checkpoint.every_steps=auto, and checkpoint.local_dir=/tmp where the nodes have disks",
    "SHORT_GRACE": "save often: checkpoint.every_steps=auto, and checkpoint.local_dir=/tmp where the nodes have disks",
    "SUSPENDS": "nothing: suspended time is on no clock of a run; raise checkpoint.save_timeout_s for long ones",
    "GPU_FLAG": "`init` writes a site file with cluster.gpu_flag=gres, or none for runs on CPUs",
    "PARTITION_DOWN": "`sinfo -R` says why; name another one with cluster.partition",
    "PARTITION_BARRED": "set cluster.qos or cluster.account for runs there; `init` writes those that it takes",
    "REQUEUE_EXIT": "nothing for runs; jobs of your own that fail with such a code need `scancel`",
    "LONE_JOB": "name another cluster.qos for long runs; `resume` continues a run that nothing took over",
    "TIME_LIMITS": "nothing: a run saves before its limit and is requeued; cluster.time_limit_min sets one",
    "USER_SIGNAL": "nothing: both mean that the ranks save now",
    "SUBMIT_FILTER": "`plan` shows what it refuses; where it takes --requeue away, another job continues a run",
    "FILTER_REFUSES": "`init` tries what it takes: how GPUs are asked for, and requeue.enabled=false",
    "FEDERATION": "use a cluster that is in none: status, cancel and requeues ask one cluster alone",
    "HIDDEN_ACCOUNTING": "nothing: a save is not left out for want of time, and a lost attempt may be called `lost`",
    "MIN_JOB_AGE": "nothing: `status` reads the run's own files, and asks accounting where there is one",
    "INTERACTIVE_STEP": "nothing: what is typed there is the same as on a login node",
    "CPU_BINDING": "cluster.cpus_per_gpu says how many CPUs each rank and its data workers get",
    "NODE_NAMES": "nothing: ranks meet at the address that Slurm itself uses where a name does not resolve",
    "NO_REQUEUE": "nothing: submit.sh says --requeue; scripts of your own have to say it, too",
    "LOG_TRUNCATED": "nothing: submit.sh says --open-mode=append; scripts of your own have to say it, too",
    "JOB_ENDS": "a wrapper around your program has to end with `exec`",
    "REQUEUE_DELAY": "nothing; failed ranks are started again without leaving the job",
    "NO_ACCOUNTING": "nothing: `status` reads the run's own files; how a job was preempted may stay unknown",
    "ARRAY_SIZE": "nothing: larger sweeps are several arrays, and without arrays runs are submitted one by one",
    "NFS_SOFT": "ask for `hard`, or name another file system with run.root=DIR",
    "FS_CALLS": "name a place on another file system with run.root=DIR, as long as you submit from there",
    "NFS_NOCTO": "ask for a mount without `nocto`, or name another file system with run.root=DIR",
    "NFS_NOLOCK": "start a run from one machine at a time, where several people or nodes may do so at once",
    "NFS_CACHE": "ask for acregmax and acdirmax of 60 at most",
    "NFS_OLD": "ask for vers=4.1 or newer",
    "CONTAINERS": "the batch script has to run outside the container, where scontrol is: wrap the ranks, not submit.sh",
}
"""Each code, and what to do about it; docs/troubleshooting.md has a section for each."""
# Settings that are worth a note: name, part of the value, code and text.
_SETTINGS = (
    (
        *("PreemptParameters", "send_user_signal", "USER_SIGNAL"),
        "PreemptParameters=send_user_signal: a preempted job gets its warning signal instead of TERM",
    ),
    (
        *("JobSubmitPlugins", "lua", "SUBMIT_FILTER"),
        "JobSubmitPlugins=lua: a script of the site may change or refuse what a job asks for",
    ),
    (
        *("LaunchParameters", "use_interactive_step", "INTERACTIVE_STEP"),
        "LaunchParameters=use_interactive_step: salloc gives a shell on the first node",
    ),
    ("TaskPlugin", "affinity", "CPU_BINDING", "task/affinity: each rank is bound to the CPUs that it asks for"),
    ("JobRequeue", "0", "NO_REQUEUE", "JobRequeue=0: jobs are not requeued unless they ask for it"),
    ("JobFileAppend", "0", "LOG_TRUNCATED", "JobFileAppend=0: a requeue empties the log of a job"),
    (
        *("ProctrackType", "cgroup", "JOB_ENDS"),
        "proctrack/cgroup: only the processes that slurmstepd itself has started get the signals",
    ),
)


def find_site_facts(view: SiteView) -> tuple[Finding, ...]:
    """Returns what is to be known of a site, the worst first."""
    return merge((finding for rule in _RULES for finding in rule(view)), hints=HINTS)


def _no_answers(view: SiteView) -> Iterator[Finding]:
    if not view.has_slurm:
        yield error("NO_SLURM", "", "there is no sbatch or squeue on the PATH")
    elif view.away:
        yield error("CONTROLLER_AWAY", "", view.away)


def _time_to_save(view: SiteView) -> Iterator[Finding]:
    """A preempted job has no or little time to save, or is stopped and stays in memory."""
    for part in view.facts.partitions:
        preemption = view.preemption(part)
        where = f"partition {part.name}"
        if preemption is None or preemption.outcome == "never":
            continue
        grace_s = preemption.grace_s
        notice_s = preemption.notice_s
        if preemption.outcome == "suspended":
            yield note("SUSPENDS", f"{where} suspends preempted jobs: they keep their memory and go on later")
        elif grace_s is None or notice_s is None:
            yield note("SHORT_GRACE", f"{where}: how much grace a preempted job has is not known")
        elif not grace_s:
            seen = f"{where}: a preempted job has no grace, and {notice_s:g} s from TERM to KILL"
            yield warning("NO_GRACE", "", seen)
        elif notice_s < _SHORT_S:
            wait_s = notice_s - grace_s
            seen = f"{where}: a preempted job has {grace_s:g} s of grace and {wait_s:g} s of KillWait to save in"
            yield note("SHORT_GRACE", seen)


def _partitions(view: SiteView) -> Iterator[Finding]:
    """Partitions that start no jobs, how GPUs are asked for, and time limits."""
    limits = []
    for part in view.facts.partitions:
        barred = limits_of(view.facts, part.name).barred
        if barred:
            yield note("PARTITION_BARRED", barred)
        if part.state != "up":
            yield warning("PARTITION_DOWN", "", f"partition {part.name} is {part.state}: it starts no jobs")
        if part.groups and not part.num_usable_nodes:
            seen = f"no node of partition {part.name} works: {shorten([group.state for group in part.groups])}"
            yield warning("PARTITION_DOWN", "", seen)
        longest = limits_of(view.facts, part.name).time_min
        limit = "unlimited" if longest is None else f"{duration(60 * longest.value)} at most"
        if longest is not None and longest.owner != owner_partition(part.name):
            limit += f" ({longest.owner})"
        usual = "" if part.default_time_min is None else f", {duration(60 * part.default_time_min)} if a job names none"
        limits.append(f"{part.name} {limit}{usual}")
    if limits:
        yield note("TIME_LIMITS", f"time limits: {shorten(limits, most=8)}")
    has_gpus = any(part.gpus_per_node for part in view.facts.partitions)
    select = view.settings.get("SelectType", "")
    if has_gpus and select and not select.endswith(("cons_tres", "cray_aries")):
        yield warning("GPU_FLAG", "", f"SelectType={select} does not know --gpus-per-node")
    elif limits and not has_gpus:
        yield note("GPU_FLAG", "sinfo shows no GPUs on any node that you can see")


def _settings(view: SiteView) -> Iterator[Finding]:
    """Slurm's release and settings that change what happens to a job."""
    release = view.settings.get("SLURM_VERSION", "")
    match = re.match(r"(\d+)\.(\d+)", release)
    if match is not None and (int(match[1]), int(match[2])) < _OLDEST:
        yield warning("OLD_SLURM", "", f"Slurm {release}; this toolkit was tried on 20.11 and later")
    for name, value, code, seen in _SETTINGS:
        if value in view.settings.get(name, ""):
            yield note(code, seen)
    if view.settings:
        delay = f"{requeue_delay_s(view.settings):g} s at the earliest (cred_expire of AuthInfo)"
        yield note("REQUEUE_DELAY", f"a requeued job may start again after {delay}")
    host = view.settings.get("AccountingStorageHost", "")
    # Slurm 23.11 and later write "(null)" for none.
    if view.settings.get("AccountingStorageType", "").endswith(("/none", "(null)")):
        seen = f"no accounting: {view.settings.get('MinJobAge', '5 min')} after its end Slurm has forgotten a job"
        yield warning("NO_ACCOUNTING", "", seen)
    elif not view.facts.unanswered.keys().isdisjoint(("accounts", "QOS")):
        yield warning("NO_ACCOUNTING", "", f"accounting does not answer: {view.facts.problems[0]}")
    elif host in ("localhost", "127.0.0.1", "::1"):
        seen = f"AccountingStorageHost={host}: nodes cannot ask accounting for the grace of a preemption or a job's end"
        yield note("HIDDEN_ACCOUNTING", seen)
    age_s = duration_s(view.settings.get("MinJobAge", ""))
    if age_s is not None and age_s < _SHORT_S:
        yield note("MIN_JOB_AGE", f"MinJobAge={age_s:g} s: so soon after its end slurmctld has forgotten a job")
    if view.filtered:
        yield warning("FILTER_REFUSES", "", f"a plain job that asks for --requeue is refused: {view.filtered}")
    size = view.settings.get("MaxArraySize", "")
    if size.isdigit() and int(size) < 2:
        yield warning("ARRAY_SIZE", "", f"MaxArraySize={size}: there are no job arrays")
    elif size.isdigit():
        yield note("ARRAY_SIZE", f"MaxArraySize={size}: a sweep has {size} runs in an array")
    if view.runtimes:
        yield note("CONTAINERS", f"container runtimes here: {shorten(view.runtimes)}")


def _returns(view: SiteView) -> Iterator[Finding]:
    """What keeps a run from coming back, or brings back one that has ended."""
    codes = returning_codes_in_words(view.settings)
    if codes:
        yield note("REQUEUE_EXIT", codes)
    if view.usual is None:
        return
    names = dict.fromkeys(name for association in view.facts.associations for name in association.qos)
    for name in names or [view.qos]:
        lone = limits_of(view.facts, view.usual.name, qos=name).lone_job
        if lone:
            yield note("LONE_JOB", lone)


def _names(view: SiteView) -> Iterator[Finding]:
    """Nodes that are known by several names, or by an address alone, and clusters that send jobs elsewhere."""
    if view.federation:
        yield error("FEDERATION", "", f"this cluster is one of the federation {view.federation}: runs are refused here")
    for name, address, host in view.nodes:
        called = [f"calls itself {host}"] if host != name else []
        called += [f"is reached at {address}"] if address not in (name, host) else []
        if called:
            yield note("NODE_NAMES", f"what Slurm calls {name} {' and '.join(called)}")
            return


def _file_system(view: SiteView) -> Iterator[Finding]:
    """Calls that a run needs, and options of an NFS mount that take away what the files of a run rely on."""
    if view.lacks:
        yield warning("FS_CALLS", "", view.lacks)
    mount = view.mount
    if mount is None or mount.kind not in ("nfs", "nfs4"):
        return
    where = f"{mount.folder} ({mount.kind})"
    if mount.option("soft") is not None or mount.option("softerr") is not None:
        yield warning("NFS_SOFT", "", f"{where} is mounted `soft`: while the server is away, reads and writes fail")
    if mount.option("nocto") is not None:
        seen = f"{where} is mounted `nocto`: a node may see old files for as long as it likes, and start from them"
        yield warning("NFS_NOCTO", "", seen)
    if mount.option("nolock") is not None or mount.option("local_lock") not in (None, "none"):
        yield note("NFS_NOLOCK", f"{where} has locks within one node only")
    times_s = {name: float(mount.option(name) or 0) for name in ("acregmax", "acdirmax")}
    long = [f"{name}={time_s:g}" for name, time_s in times_s.items() if time_s > _CACHED_S]
    if long:
        times = ", ".join(long)
        yield warning("NFS_CACHE", "", f"{where} has {times} (s): nodes see each other's files so much later")
    version = mount.option("vers") or mount.option("nfsvers") or ""
    if re.match(r"[23]|4(\.0)?$", version):
        seen = f"{where} has vers={version}, which repeats requests whose reply is lost; that is recognised"
        yield note("NFS_OLD", seen)


_RULES = (_no_answers, _time_to_save, _partitions, _settings, _returns, _names, _file_system)


def site_table(view: SiteView) -> dict[str, str]:
    """Returns the rows of a table about a site."""

    def setting(name: str) -> str:
        return view.settings.get(name, "not known")

    nodes = [f"{part.name} {part.num_usable_nodes} of {part.num_nodes}" for part in view.facts.partitions]
    gpus = dict.fromkeys(
        f"{part.name} {group.gpus_per_node} x {group.gpu_type or 'any type'}"
        for part in view.facts.partitions
        for group in part.groups
        if group.gpus_per_node
    )
    usual = view.usual
    return {
        "Slurm": f"{setting('SLURM_VERSION')}, cluster {setting('ClusterName')}",
        "a job goes to": "not known" if usual is None else f"partition {usual.name}, QOS {view.qos or 'none'}",
        "working nodes": shorten(nodes, most=8) or "none",
        "GPUs of a node": shorten(list(gpus), most=8) or "none",
        "preemption": f"{setting('PreemptType')}, mode {setting('PreemptMode')}",
        **{name: setting(name) for name in ("SlurmUser", "KillWait", "JobRequeue", "JobFileAppend", "MaxArraySize")},
        "accounting": setting("AccountingStorageType"),
        "containers": shorten(view.runtimes) or "none on the PATH",
    }


def in_words(view: SiteView) -> list[str]:
    """Returns what happens to a run here, a sentence or two each; empty where Slurm says nothing."""
    preemption = view.preemption(view.usual)
    usual = view.usual
    if preemption is None or usual is None:
        return []
    grace_s = preemption.grace_s
    since = "the steps since the newest checkpoint (checkpoint.every_steps says how many, auto chooses)"
    at_limit = "Nothing at a time limit: the ranks are asked to save before it."

    where = f"A run of partition {usual.name}" + (f" and QOS {view.qos}" if view.qos else "")
    by = preempting_qos(view.facts, view.qos) if preemption.by == "qos" else []
    preemptors = f"jobs of QOS {shorten(by)}" if by else "jobs of partitions with a higher priority tier"
    lost = f"Nothing is lost by preemption. {at_limit} A lost node costs {since}."
    if preemption.outcome == "never":
        begins = f"{where} is not preempted: no other job may take its nodes."
    elif preemption.outcome == "suspended":
        begins = f"{where} can be stopped by {preemptors}, and goes on in the same attempt when they have ended."
    else:
        kill = "" if preemption.kill_wait_s is None else f", and KILL {preemption.kill_wait_s:g} s later"
        after = "a grace that is not known" if grace_s is None else f"{grace_s:g} s"
        signals = f"TERM{kill}" if grace_s == 0.0 else f"TERM, TERM again after {after}{kill}"
        begins = (
            f"{where} can be preempted by {preemptors}. Its ranks get {signals}; they save at the next step boundary."
        )
        left_s = (grace_s or 0.0) + (preemption.kill_wait_s or 0.0)
        within = "that" if grace_s is None else duration(left_s)
        lost = (
            f"Nothing by preemption where the step under way, one more and a save take less than "
            f"{within}; else {since}. {at_limit} A lost node costs as much."
        )
        if grace_s == 0.0:
            lost = (
                f"A preemption leaves {left_s:g} s from TERM to KILL: where a step and a save take longer, it costs "
                f"{since}. {at_limit} A lost node costs as much."
            )

    delay = f"it keeps its id and may start again after {requeue_delay_s(view.settings):g} s"
    returns = f"The supervisor of the run calls `scontrol requeue incomplete`, before a time limit as well: {delay}."
    if preemption.outcome == "cancelled":
        returns = (
            "Slurm cancels what it preempts here, so the supervisor calls `scontrol requeue incomplete` within the "
            f"grace; then {delay}. Where Slurm refuses, it submits the script again, to start when this job has ended."
        )
    if expedites_requeues(view.settings):
        returns += f" Slurm itself brings a job that names no range of nodes and no spare ones back {EXPEDITED}."
    return [begins, returns, lost]
