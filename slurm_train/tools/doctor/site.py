"""What is to be known of a site before a run is submitted there: findings from what Slurm's commands say. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from slurm_train.slurm.policy import Partition, Preemption
from slurm_train.slurm.site import SiteFacts, preemption_in
from slurm_train.tools.doctor.finding import Finding, Level, merge
from slurm_train.tools.doctor.majority import listed

_OLDEST = (21, 8)
_SHORT_S = 60.0
_DEFAULT_DELAY_S = 120.0
_CRED_EXPIRE = re.compile(r"(?:^|,)cred_expire=(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteView:
    """What was asked on a login node, and what came back."""

    has_slurm: bool = True
    away: str = ""
    """Why nothing is known: the controller's silence in words."""
    facts: SiteFacts = field(default_factory=SiteFacts)
    qos: str = ""
    """What a job of this user gets that asks for none; "" where nobody says."""
    runtimes: Sequence[str] = ()
    """Container runtimes on the PATH."""

    @property
    def settings(self) -> Mapping[str, str]:
        """`scontrol show config`."""
        return self.facts.settings

    @property
    def usual(self) -> Partition | None:
        """The partition of a job that names none."""
        parts = self.facts.partitions
        return next((one for one in parts if one.is_default), parts[0] if parts else None)


def examine(view: SiteView) -> tuple[Finding, ...]:
    """Returns what somebody who submits here should know, worst first."""
    if not view.has_slurm:
        todo = "type this on a login node; to try Slurm on one machine: `python -m slurm_train devcluster up`"
        return (_finding("NO_SLURM", "error", "there is no sbatch or squeue on the PATH", todo),)
    if view.away:
        todo = "`scontrol ping` tells whether it is up; try again later"
        return (_finding("CONTROLLER_AWAY", "error", view.away, todo),)
    found = [
        *_version(view),
        *_preemption(view),
        *_returning(view),
        *_keeping(view),
        *_asking(view),
        *_partitions(view),
    ]
    return merge(found, nodes=())


def _finding(code: str, level: Level, seen: str, todo: str) -> Finding:
    return Finding(code=code, level=level, seen=seen, todo=todo)


def _version(view: SiteView) -> Iterator[Finding]:
    text = view.settings.get("SLURM_VERSION", "")
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is not None and (int(match[1]), int(match[2])) < _OLDEST:
        seen = f"Slurm {text}; this toolkit was written for 21.08 and later"
        yield _finding("OLD_SLURM", "warning", seen, "try a small run first: flags and words may differ")


def usual_preemption(view: SiteView) -> Preemption | None:
    """Returns how a job that names neither partition nor QOS is preempted, None where Slurm does not say."""
    if not view.settings or view.usual is None:
        return None
    return preemption_in(view.facts, view.qos, view.usual.name)


def _preemption(view: SiteView) -> Iterator[Finding]:
    for part in view.facts.partitions:
        preemption = preemption_in(view.facts, view.qos, part.name) if view.settings else None
        if preemption is None or preemption.outcome == "never":
            continue
        if preemption.outcome == "suspended":
            seen = f"partition {part.name} suspends preempted jobs: they keep their memory and go on later"
            todo = "nothing: suspended time is on no clock of a run; raise checkpoint.save_timeout_s for long ones"
            yield _finding("SUSPENDS", "note", seen, todo)
            continue
        yield from _time_to_save(part.name, preemption)
    if "send_user_signal" in view.settings.get("PreemptParameters", ""):
        seen = "PreemptParameters=send_user_signal: a preempted job gets its warning signal instead of TERM"
        yield _finding("USER_SIGNAL", "note", seen, "nothing: both mean that the ranks save now")


def _time_to_save(partition: str, preemption: Preemption) -> Iterator[Finding]:
    wait_s = preemption.kill_wait_s or 0.0
    in_all = f"{preemption.grace_s:g} s of grace and {wait_s:g} s of KillWait"
    todo = "save often: checkpoint.every_steps=auto, and checkpoint.local_dir=/tmp where the nodes have disks"
    if not preemption.grace_s:
        seen = f"partition {partition}: a preempted job has no grace, and {wait_s:g} s from TERM to KILL"
        yield _finding("NO_GRACE", "warning", seen, todo)
    elif preemption.grace_s + wait_s < _SHORT_S:
        seen = f"partition {partition}: a preempted job has {in_all} for the step under way and a save"
        yield _finding("SHORT_GRACE", "note", seen, todo)


def requeue_delay_s(settings: Mapping[str, str]) -> float:
    """Returns how long a requeued job waits at least: until its old credential has expired."""
    match = _CRED_EXPIRE.search(settings.get("AuthInfo", ""))
    return float(match[1]) if match else _DEFAULT_DELAY_S


def _returning(view: SiteView) -> Iterator[Finding]:
    settings = view.settings
    if settings.get("JobRequeue") == "0":
        todo = "nothing: submit.sh says --requeue; scripts of your own have to say it, too"
        yield _finding("NO_REQUEUE", "note", "JobRequeue=0: jobs are not requeued unless they ask for it", todo)
    delay_s = requeue_delay_s(settings)
    if settings:
        seen = f"a requeued job may start again after {delay_s:g} s at the earliest (cred_expire of AuthInfo)"
        yield _finding("REQUEUE_DELAY", "note", seen, "nothing; failed ranks are started again without leaving the job")
    if settings.get("JobFileAppend") == "0":
        todo = "nothing: submit.sh says --open-mode=append; scripts of your own have to say it, too"
        yield _finding("LOG_TRUNCATED", "note", "JobFileAppend=0: a requeue empties the log of a job", todo)
    if settings.get("ProctrackType", "").endswith("cgroup"):
        seen = "proctrack/cgroup: only the processes that slurmstepd itself has started get the signals"
        yield _finding("JOB_ENDS", "note", seen, "a wrapper around your program has to end with `exec`")


def _keeping(view: SiteView) -> Iterator[Finding]:
    if view.settings.get("AccountingStorageType", "").endswith("/none"):
        seen = f"no accounting: {view.settings.get('MinJobAge', '5 min')} after its end Slurm has forgotten a job"
        todo = "nothing: `status` reads the run's own files then; how a job was preempted may stay unknown"
        yield _finding("NO_ACCOUNTING", "warning", seen, todo)
    elif any(problem.startswith(("accounts", "QOS")) for problem in view.facts.problems):
        seen = f"accounting does not answer: {view.facts.problems[0]}"
        yield _finding("NO_ACCOUNTING", "warning", seen, "what becomes of a preempted job is not known for certain")
    size = view.settings.get("MaxArraySize", "")
    if size.isdigit():
        few = int(size) < 2
        seen = f"MaxArraySize={size}: " + ("there are no job arrays" if few else f"a sweep has {size} runs in an array")
        todo = "sweeps need arrays: submit the runs one by one" if few else "nothing: larger sweeps are several arrays"
        yield _finding("ARRAY_SIZE", "warning" if few else "note", seen, todo)


def _asking(view: SiteView) -> Iterator[Finding]:
    select = view.settings.get("SelectType", "")
    has_gpus = any(part.gpus_per_node for part in view.facts.partitions)
    if has_gpus and select and not select.endswith(("cons_tres", "cray_aries")):
        seen = f"SelectType={select} does not know --gpus-per-node"
        yield _finding("GPU_FLAG", "warning", seen, "set cluster.gpu_flag=gres; `init` writes that into a site file")
    elif view.facts.partitions and not has_gpus:
        seen = "sinfo shows no GPUs on any node that you can see"
        yield _finding("GPU_FLAG", "note", seen, "for runs on CPUs set cluster.gpu_flag=none")
    if view.runtimes:
        seen = f"container runtimes here: {listed(list(view.runtimes))}"
        todo = "the batch script has to run outside the container, where scontrol is: wrap the ranks, not submit.sh"
        yield _finding("CONTAINERS", "note", seen, todo)


def _partitions(view: SiteView) -> Iterator[Finding]:
    for part in view.facts.partitions:
        if part.state != "up":
            seen = f"partition {part.name} is {part.state}: it starts no jobs"
            yield _finding("PARTITION_DOWN", "warning", seen, "name another one with cluster.partition")
        if part.groups and not part.num_usable_nodes:
            seen = f"no node of partition {part.name} works: {listed([group.state for group in part.groups])}"
            yield _finding("PARTITION_DOWN", "warning", seen, "`sinfo -R` says why; name another one")
    limits = [f"{part.name} {_limit(part)}" for part in view.facts.partitions]
    if limits:
        todo = "nothing: a run that reaches its limit saves before and is requeued; cluster.time_limit_min sets one"
        yield _finding("TIME_LIMITS", "note", f"time limits: {listed(limits, most=8)}", todo)


def _limit(part: Partition) -> str:
    longest = "unlimited" if part.max_time_min is None else f"{duration_text(60 * part.max_time_min)} at most"
    if part.default_time_min is None or part.default_time_min == part.max_time_min:
        return longest
    return f"{longest}, {duration_text(60 * part.default_time_min)} if a job says nothing"


def duration_text(seconds: float) -> str:
    """Returns a time for people, e.g. "45 s", "30 min", "12 h", "3 days"."""
    for size, word in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size or (seconds >= size and seconds % size == 0):
            number = seconds / size
            return (
                f"{number:.0f} {'day' if word == 'days' and number == 1 else word}"
                if number % 1 == 0
                else (f"{number:.1f} {word}")
            )
    return f"{seconds:g} s"
