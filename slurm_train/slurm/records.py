"""What squeue, sacct, scontrol and srun print about jobs, as values. Pure text in, values out; nothing is run here.

Only explicit column formats are read, never `--json`, whose schema changes with every release. Where rows of many jobs
are read, no column holds text that a user chose: a job's name may have a line break (22.05 prints it as it is), and its
rest would pass for another job's row. Unknown states and reasons are passed on: a new Slurm must not break `status`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import NamedTuple, TypeVar

from slurm_train.errors import ClusterError
from slurm_train.slurm.allocation import parse_nodelist

T = TypeVar("T")

SQUEUE_FORMAT = "%i|%T|%r|%N|%S|%e|%P"
QUEUE_FORMAT = f"%Q|{SQUEUE_FORMAT}"
SACCT_FORMAT = "JobID,State,Reason,NodeList,Start,End,Partition,ExitCode"

_ARRAY = re.compile(r"([0-9]+)_\[([0-9,:-]+)(?:%[0-9]+)?\]")
_INDEX_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+)(?::([1-9][0-9]*))?)?")
# MaxArraySize cannot be set higher (slurm.conf).
_MAX_INDEX = 4000001
_KEY = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z/:]*)=")
# "SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=node[1-2]" or "BlockName=b0 BlockIndex=0 Nodes=node[1-2] BlockSize=2"; a
# switch without nodes has "Nodes=(null)".
_LEAF = re.compile(r"^(?:SwitchName=(\S+) Level=0|BlockName=(\S+)) .*?\bNodes=([^\s(]+)", re.MULTILINE)
_RECORD_START = re.compile(r"[A-Z][A-Za-z]+=")
# The rest of the line is the value, whatever it holds.
_FREE_TEXT = frozenset(
    {"JobName", "Comment", "AdminComment", "SystemComment", "Command", "WorkDir", "StdErr", "StdIn", "StdOut"}
)
_NOTHING = frozenset({"", "None", "(null)", "N/A", "n/a", "Unknown", "None assigned", "NONE"})


class Phase(enum.Enum):
    """State of a job in eleven words, for the thirty of squeue, sacct and scontrol; the value is shown to people."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHING = "finishing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    NODE_FAIL = "node failure"
    PREEMPTED = "preempted"
    OUT_OF_MEMORY = "out of memory"
    UNKNOWN = "unknown"

    @property
    def is_active(self) -> bool:
        """Whether the job holds, waits for or still gives back nodes."""
        return self in (Phase.QUEUED, Phase.RUNNING, Phase.FINISHING)


_STATES = {
    Phase.QUEUED: (
        "CONFIGURING EXPEDITING PENDING POWER_UP_NODE REQUEUED REQUEUED_CRON REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD "
        "SPECIAL_EXIT"
    ),
    Phase.RUNNING: "RESIZING RUNNING SIGNALING STOPPED SUSPENDED",
    Phase.FINISHING: "COMPLETING STAGE_OUT UPDATE_DB",
    Phase.COMPLETED: "COMPLETED",
    Phase.FAILED: "FAILED LAUNCH_FAILED RECONFIG_FAIL",
    Phase.CANCELLED: "CANCELLED REVOKED",
    Phase.TIMEOUT: "DEADLINE TIMEOUT",
    Phase.NODE_FAIL: "BOOT_FAIL NODE_FAIL",
    Phase.PREEMPTED: "PREEMPTED",
    Phase.OUT_OF_MEMORY: "OUT_OF_MEMORY",
}
_PHASES = {state: phase for phase, states in _STATES.items() for state in states.split()}


# Where a state has flags ("RUNNING,COMPLETING"), squeue and sacct show the first of these instead of the state itself.
_FLAGS_FIRST = (
    *("COMPLETING", "STAGE_OUT", "CONFIGURING", "EXPEDITING", "RESIZING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD"),
    *("SPECIAL_EXIT", "STOPPED", "REVOKED", "RESV_DEL_HOLD", "SIGNALING"),
)


def phase_of(state: str) -> Phase:
    """Returns the phase of a state as any Slurm command writes it, e.g. "CANCELLED by 1001" or "RUNNING+"."""
    first = state.split(maxsplit=1)[0] if state.strip() else ""
    words = first.rstrip("+").upper().split(",")
    word = next((flag for flag in _FLAGS_FIRST if flag in words), words[0])
    return _PHASES.get(word, Phase.UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """One job, or one element of an array, in its newest state."""

    job_id: str
    """ "123", or "123_4" for an array element."""
    word: str
    """Slurm's own word, e.g. "CANCELLED by 1001"."""
    source: str
    """The command that printed it: "squeue" or "sacct"."""
    reason: str = ""
    """Why it waits or ended, in Slurm's words, e.g. "Resources"."""
    nodelist: str = ""
    """Nodes in compact form, e.g. "node[1-4]"."""
    start: str = ""
    """Start, or the expected start of a waiting job, for `unix_s`, e.g. "1769852484"; "" if not known."""
    end: str = ""
    """End, or the time limit of a running job."""
    partition: str = ""
    exit_code: str = ""
    """ "code:signal" of the batch script; only sacct knows it."""

    @property
    def phase(self) -> Phase:
        """The state in this package's words."""
        return phase_of(self.word)

    @property
    def is_active(self) -> bool:
        """Whether the job holds or waits for nodes.

        A job that Slurm requeues after a preemption or a lost node goes from COMPLETING to PENDING. Where squeue says
        PREEMPTED or NODE_FAIL it has ended, and only MinJobAge keeps it there (22.05).
        """
        return self.phase.is_active


def parse_squeue(text: str) -> dict[str, JobState]:
    """Returns the jobs in the output of `squeue -h -r -o SQUEUE_FORMAT`, by id."""
    return _parse_jobs(text, source="squeue", num_fields=SQUEUE_FORMAT.count("|") + 1)


def parse_sacct(text: str) -> dict[str, JobState]:
    """Returns the jobs in the output of `sacct -n -P -X -o SACCT_FORMAT`, by id; the last row of an id wins."""
    return _parse_jobs(text, source="sacct", num_fields=SACCT_FORMAT.count(",") + 1)


def _parse_jobs(text: str, *, source: str, num_fields: int) -> dict[str, JobState]:
    jobs: dict[str, JobState] = {}
    for row in split_rows(text, num_fields):
        word = row[1]
        reason, nodelist, start, end, partition, *exit_code = map(_known, row[2:])
        # "12+0" leads a heterogeneous job, whose id is 12; "12+1" and on are its other components.
        job_ids, _, component = row[0].partition("+")
        if component not in ("", "0"):
            if job_ids in jobs:
                nodes = filter(None, (jobs[job_ids].nodelist, nodelist))
                jobs[job_ids] = replace(jobs[job_ids], nodelist=",".join(nodes))
            continue
        # Of an ended job sacct keeps why it once waited, which explains nothing.
        if source == "sacct" and phase_of(word) is not Phase.QUEUED:
            reason = ""
        for job_id in expand_array_id(job_ids):
            jobs[job_id] = JobState(
                job_id=job_id,
                word=word,
                source=source,
                reason=reason,
                nodelist=nodelist,
                start=start,
                end=end,
                partition=partition,
                exit_code="".join(exit_code),
            )
    return jobs


def unreadable_line(text: str, job_ids: Sequence[str], *, num_fields: int) -> str:
    """Returns a line about one of these jobs that is not of the form that was asked for; "" where there is none.

    A wrapper may print columns of its own. Such a job is not gone: nothing is known of it.
    """
    numbers = {_array_number(job_id) for job_id in job_ids}
    for line in text.splitlines():
        first = line.split(maxsplit=1)[0] if line.strip() else ""
        if line.count("|") != num_fields - 1 and _array_number(first.partition("|")[0]) in numbers:
            return line
    return ""


def parse_queue(text: str, job_ids: Sequence[str]) -> tuple[dict[str, JobState], dict[str, int]]:
    """Returns jobs, and of those that wait for nodes how many jobs of their partitions are in line before them.

    Smaller numbers win among equal priorities, which is the order of submission; each element of an array is a job.
    Where a site hides the jobs of others, they are not counted.

    Args:
        text: output of `squeue -h -t all -o QUEUE_FORMAT`: the whole queue, arrays in brackets.
        job_ids: ids of the jobs; an array's id means all of its elements.
    """
    rows = split_rows(text, QUEUE_FORMAT.count("|") + 1)
    numbers = {_array_number(job_id) for job_id in job_ids}
    lines = ("|".join(row) for _, *row in rows if _array_number(row[0]) in numbers)
    jobs = select_jobs(job_ids, parse_squeue("\n".join(lines)))
    line: list[tuple[tuple[int, int], set[str], str, int]] = []  # place, partitions, job or array, number of jobs
    for priority, element_ids, word, reason, *_, partitions in rows:
        number = _array_number(element_ids)
        if f"{priority}{number}".isdigit() and phase_of(word) is Phase.QUEUED and waits_for_nodes(reason):
            place = (-int(priority), int(number))
            line.append((place, set(partitions.split(",")), number, _num_elements(element_ids)))
    num_ahead: dict[str, int] = {}
    for place, wanted, number, _ in line:
        if number not in numbers:
            continue
        num_ahead[number] = 0
        for other_place, other_partitions, _, num_jobs in line:
            if other_place < place and other_partitions & wanted:
                num_ahead[number] += num_jobs
    ahead: dict[str, int] = {}
    for job_id, job in jobs.items():
        number = _array_number(job_id)
        if number in num_ahead and job.phase is Phase.QUEUED and waits_for_nodes(job.reason):
            ahead[job_id] = num_ahead[number]
    return jobs, ahead


def _array_number(job_id: str) -> str:
    """Returns the job or array number of an id: "12_[0-3]" -> "12", "12+1" -> "12"."""
    return re.split(r"[_+]", job_id, maxsplit=1)[0]


def _num_elements(job_ids: str) -> int:
    try:
        return len(expand_array_id(job_ids))
    except ClusterError:
        return 1


def select_jobs(job_ids: Sequence[str], jobs: Mapping[str, T]) -> dict[str, T]:
    """Returns those of the jobs that were asked for, also by the id of their array."""
    wanted = set(job_ids)
    return {key: job for key, job in jobs.items() if key in wanted or key.partition("_")[0] in wanted}


def expand_array_id(text: str) -> list[str]:
    """Returns one id per array element: "12_[4-6,9%2]" -> ["12_4", "12_5", "12_6", "12_9"]; other ids as they are.

    Raises:
        ClusterError: the brackets hold something else, e.g. a list that Slurm cut off with "...".
    """
    if "[" not in text:
        return [text]
    refusal = ClusterError(
        f"{text!r} is not a job array as Slurm writes it",
        hint='expected the form "12_[0-3,7%2]"; set SLURM_BITSTR_LEN=0 where Slurm cuts it off',
    )
    array = _ARRAY.fullmatch(text)
    if array is None:
        raise refusal
    ids = []
    for part in array[2].split(","):
        indices = _INDEX_RANGE.fullmatch(part)
        if indices is None:
            raise refusal
        first = int(indices[1])
        last = int(indices[2] or first)
        if max(first, last) > _MAX_INDEX:
            raise refusal
        ids += [f"{array[1]}_{index}" for index in range(first, last + 1, int(indices[3] or 1))]
    return ids


def parse_record(text: str) -> dict[str, str]:
    """Returns the fields of the first record in the output of `scontrol show`, e.g. {"JobState": "RUNNING", ...}.

    The many-line form is read, not `-o`: there a job named "x JobState=FAILED" cannot be told from a failed one.
    """
    return next(iter(parse_records(text)), {})


# squeue's fields by the names that scontrol gives them.
_RECORD_FIELDS = {
    "JobId": "JobID",
    "JobState": "State",
    "Reason": "Reason",
    "Restarts": "RestartCnt",
    "PreemptTime": "PreemptTime",
    "Requeue": "Requeue",
    "EligibleTime": "EligibleTime",
    "StartTime": "StartTime",
    "EndTime": "EndTime",
    "TimeLimit": "TimeLimit",
    "Partition": "Partition",
    "QOS": "QOS",
    "ReqNodeList": "ReqNodes",
}
RECORD_FORMAT = ",".join(f"{field}:|" for field in _RECORD_FIELDS.values())


def parse_queue_record(text: str) -> dict[str, str]:
    """Returns a job's fields from `squeue -h -O RECORD_FORMAT`, by scontrol's names; "N/A" and "" are left out.

    Raises:
        ClusterError: there is no such line, e.g. since Slurm does not know the job any more.
    """
    values = [value.strip() for value in text.partition("\n")[0].split("|")[:-1]]
    if len(values) != len(_RECORD_FIELDS):
        raise ClusterError(f"squeue has no record of the job: {text[:80]!r}", hint="see `squeue -t all` by hand")
    return {name: value for name, value in zip(_RECORD_FIELDS, values, strict=True) if value not in ("", "N/A")}


def parse_records(text: str) -> list[dict[str, str]]:
    """Returns the fields of each record in the output of `scontrol show job` or `show partition`."""
    records = []
    for block in text.strip().split("\n\n"):
        fields: dict[str, str] = {}
        lines = block.splitlines()
        # Before its first line a site may have printed lines of its own.
        start = next((number for number, line in enumerate(lines) if _RECORD_START.match(line)), len(lines))
        for line in lines[start:]:
            matches = list(_KEY.finditer(line))
            for match, following in zip(matches, [*matches[1:], None], strict=False):
                is_free = match[1] in _FREE_TEXT
                end = None if is_free or following is None else following.start()
                value = line[match.end() : end].rstrip()
                fields.setdefault(match[1], value if is_free else value.strip())
                if is_free:
                    break
        if fields:
            records.append(fields)
    return records


def parse_config(text: str) -> dict[str, str]:
    """Returns the settings in the output of `scontrol show config`, e.g. {"MaxArraySize": "1001", ...}."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def parse_topology(text: str) -> dict[str, str]:
    """Returns what each node hangs on, from the output of `scontrol show topology`: "switch leaf1" or "block b0".

    Of topology/tree the switches of level 0 count, of topology/block (24.05) the blocks that are not aggregated. A node
    below two switches counts as a node of the first.
    """
    leaves: dict[str, str] = {}
    for switch, block, nodes in _LEAF.findall(text):
        leaf = f"switch {switch}" if switch else f"block {block}"
        for node in parse_nodelist(nodes):
            leaves.setdefault(node, leaf)
    return leaves


def restarts_of(job: Mapping[str, str]) -> int:
    """Returns how often Slurm has restarted a job, from its record.

    Raises:
        ClusterError: it is not in the record.
    """
    text = job.get("Restarts", "")
    if not text.isdigit():
        raise ClusterError(
            f"scontrol's record of the job has no number of restarts: Restarts={text!r}",
            hint="`scontrol show job JOBID` must have a line with Restarts=; Slurm 21.08 and later have it",
        )
    return int(text)


def nodes_in(job: Mapping[str, str], key: str) -> list[str]:
    """Returns the nodes that a field of a job's record names, e.g. "node[1-3]" in ExcNodeList; [] for "(null)".

    Raises:
        NodeListError: it is no node list.
    """
    return parse_nodelist(_known(job.get(key, "")))


def unix_s(text: str) -> float | None:
    """Returns a time that Slurm has written in seconds since 1970, None for "Unknown", "N/A" and other words.

    Slurm is asked for seconds (SLURM_TIME_FORMAT=%s): in the hour that the end of summer time repeats, local time is
    ambiguous. A local time, as Slurm writes it otherwise, is read as well.
    """
    try:
        return float(text) if text.isdigit() else datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def queue_seconds(job: Mapping[str, str]) -> float | None:
    """Returns how long a started job had waited since it could have started, None where its record does not say."""
    start_unix_s = unix_s(job.get("StartTime", ""))
    eligible_unix_s = unix_s(job.get("EligibleTime", ""))
    if start_unix_s is None or eligible_unix_s is None:
        return None
    return max(0.0, start_unix_s - eligible_unix_s)


def end_and_limit(job: Mapping[str, str]) -> tuple[float | None, float | None]:
    """Returns when a running job's limit ends it (seconds since 1970) and how long it is; None where it has none.

    Args:
        job: the fields of `scontrol show job`.
    """
    start_unix_s = unix_s(job.get("StartTime", ""))
    end_unix_s = unix_s(job.get("EndTime", ""))
    if start_unix_s is None or end_unix_s is None:
        return None, None
    return end_unix_s, end_unix_s - start_unix_s


def split_rows(text: str, num_fields: int) -> list[list[str]]:
    """Returns the lines split at "|"; lines with another number of fields are left out."""
    rows = (line.split("|") for line in text.splitlines())
    return [row for row in rows if len(row) == num_fields]


def _known(text: str) -> str:
    return "" if text in _NOTHING else text


_TASK_ERROR = re.compile(r"^srun: error: (?P<node>[^\s:]+): tasks? (?P<tasks>[\d,-]+): (?P<what>.+)$", re.MULTILINE)
NO_STEP = "Unable to create step"
# What ends a step whatever else is said of it.
_STEP_ERRORS = (
    r"(?m)^srun: error: (Node failure on (\S+))",
    r"(?m)^srun: error: (srun itself was killed by signal \d+)$",
    r"(?m)\b(srun: fatal: [^;\n]+)",
    # The step was made, and its tasks could not be started.
    r"(?m)^srun: error: (Task launch for \S+ failed on node .+)$",
    # Also in the supervisor's own line, where the nodes could not be asked.
    rf"(?m)\bsrun: error: ({NO_STEP} for job [^;\n]+)",
)
_STARTED_NOTHING = re.compile(
    rf"{NO_STEP}|srun: fatal: |srun: error: (?:Unable to (?:allocate|confirm|create)|Invalid |Unable to initialize)"
)
# An error of srun, or what its reader of options says, e.g. "unrecognized option '--cpu-bnd=none'".
_OWN_WORDS = re.compile(r"^srun: (?:(?:error|fatal): +(.+)|((?:unrecognized |invalid )?option .+))$", re.MULTILINE)
_LONGEST_WORDS = 300
_EXITED = "Exited with exit code "
# What the peers of the culprit show.
_OF_PEERS = (_EXITED, "Terminated")


@dataclass(frozen=True, slots=True)
class TaskEnd:
    """How tasks of a step ended on one node, in srun's words; it does not name tasks that ended with 0."""

    tasks: tuple[int, ...]
    """() where the whole step ended."""
    node: str
    """"" where that is none in particular."""
    words: str
    """E.g. "Exited with exit code 1", "Killed"."""

    @property
    def is_violent(self) -> bool:
        """Whether a signal ended it that its peers do not get."""
        return not self.words.startswith(_OF_PEERS)

    @property
    def exit_code(self) -> int | None:
        """The code with which the tasks ended by themselves, None where a signal has ended them."""
        return int(self.words.removeprefix(_EXITED)) if self.words.startswith(_EXITED) else None


def task_ends(text: str) -> list[TaskEnd]:
    """Returns how the tasks ended that srun names, in the order in which it was told."""
    return [TaskEnd(_numbers(match["tasks"]), match["node"], match["what"]) for match in _TASK_ERROR.finditer(text)]


def _numbers(text: str) -> tuple[int, ...]:
    """Returns e.g. (0, 2, 3) for "0,2-3"."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


_CANCELLED_JOB = re.compile(r"\*\*\* JOB \S+ ON \S+ CANCELLED AT (\S+) DUE TO ([A-Z ]+?) \*\*\*")
_STATE_OF_CAUSE = {
    "PREEMPTION": "PREEMPTED",
    "JOB REQUEUE": "REQUEUED",
    "NODE FAILURE": "NODE_FAIL",
    "TIME LIMIT": "TIMEOUT",
}


def state_in_batch_log(text: str, *, since_unix_s: float) -> str:
    """Returns the state in which a start of a job ended, by slurmstepd's line in its batch log, e.g. "PREEMPTED".

    "" where there is no such line: the node was lost, or only the batch script was killed.

    Args:
        text: the end of the log.
        since_unix_s: when that start began; the log has those before it, too.
    """
    states = [
        _STATE_OF_CAUSE.get(cause, "")
        for time_text, cause in _CANCELLED_JOB.findall(text)
        if (unix_s(time_text) or 0.0) >= since_unix_s
    ]
    return states[-1] if states else ""


def violent_end(text: str) -> TaskEnd | None:
    """Returns the first end by a signal, else how the whole step ended, e.g. "node failure on node2"; None for neither.

    Args:
        text: what srun and the supervisor have written about a step.
    """
    for pattern in _STEP_ERRORS:
        error = re.search(pattern, text)
        if error:
            node = (error.groups()[1:] or ("",))[0]
            return TaskEnd((), "" if "[" in node else node, error[1].replace("Node failure", "node failure"))
    end = next((end for end in task_ends(text) if end.is_violent), None)
    # Where srun calls it Killed, slurmstepd has named the cause in a line of its own.
    if end is not None and end.words == "Killed" and re.search(r"oom[-_ ]kill", text):
        return TaskEnd(end.tasks, end.node, "Out Of Memory")
    return end


def has_started_nothing(text: str) -> bool:
    """Returns whether srun says that it has started nothing on any node."""
    return _STARTED_NOTHING.search(text) is not None


def own_words(text: str) -> str:
    """Returns why srun has ended of itself: its first error and its last one; "" where it tells the end of a task.

    The first says what failed (no such library), the last what came of it (no such type of MPI).

    Args:
        text: what srun has written.
    """
    if _TASK_ERROR.search(text):
        return ""
    lines = [(error or option)[:_LONGEST_WORDS].rstrip() for error, option in _OWN_WORDS.findall(text)]
    return f"srun: {'; '.join(dict.fromkeys([lines[0], lines[-1]]))}" if lines else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """How a step ended, as far as what started its tasks has told it."""

    violent: TaskEnd | None = None
    """The first task that a signal ended, or why the whole step did; None for neither."""
    tasks: tuple[TaskEnd, ...] = ()
    """Those that did not end with 0, in the order in which it was told."""
    are_ranks: bool = True
    """Whether each task is the rank of its number, which a launcher of torchrun is not."""
    own_words: str = ""
    """Why srun has ended of itself; "" where that is not so, or nothing is known."""


def step_end(text: str, *, are_ranks: bool) -> StepEnd:
    """Returns how a step ended by what srun and the supervisor have written about it."""
    return StepEnd(
        violent=violent_end(text), tasks=tuple(task_ends(text)), are_ranks=are_ranks, own_words=own_words(text)
    )


# --- why a job waits or has ended ---

# Slurm has some two hundred one-word codes. Those of limits are put together from a few words (QOSMaxGRESPerUser), and
# so are their phrases.
_PHRASES = {
    "None": "the scheduler has not looked at it yet",
    "Priority": "other jobs come first",
    "Resources": "waits for free nodes",
    "Dependency": "another job must end first",
    "DependencyNeverSatisfied": "the job that it depends on ended otherwise, so it will never start",
    "BeginTime": "its earliest start has not come yet; after a requeue Slurm waits, by default for two minutes",
    "Cleaning": "what is left of its last start is being cleaned up",
    "Prolog": "the nodes are being prepared",
    "JobHeldUser": "held by its user; `scontrol release` lets it go",
    "JobHeldAdmin": "held by an administrator, or by Slurm after a failed start",
    "JobHoldMaxRequeue": "requeued so often that Slurm holds it; `scontrol release` lets it go",
    "JobArrayTaskLimit": "as many runs of its array are active as may be at once (sweep.max_parallel)",
    "ReqNodeNotAvail": "a node that it needs is down, drained or reserved",
    "NodeDown": "a node that it needs is down",
    "BadConstraints": "no node has what it asks for",
    "Licenses": "waits for a license",
    "Reservation": "waits for its reservation",
    "ReservationDeleted": "its reservation is gone",
    "ReservationInvalid": "there is no such reservation",
    "SchedDefer": "the scheduler looks at it in its next round",
    "Constraints": "waits for nodes that have what it asks for",
    "MaxPoweredUpNodes": "as many nodes are powered up as the site allows",
    "MpiPortsBusy": "waits for ports of MPI on its nodes",
    "NvidiaImexChannels": "waits for a channel between its GPUs (IMEX)",
    "PowerNotAvail": "there is not enough power for its nodes",
    "PowerReserved": "the power for its nodes is reserved",
    "BlockMaxError": "its block of nodes has failed too often",
    "BlockFreeAction": "its block of nodes is being freed",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition starts no jobs now",
    "PartitionNodeLimit": "asks for more or fewer nodes than the partition allows",
    "PartitionTimeLimit": "asks for more time than the partition allows",
    "PartitionConfig": "asks for more than the partition has",
    "AccountNotAllowed": "the account may not use the partition",
    "AccountingPolicy": "a limit of the accounting is reached",
    "InvalidAccount": "there is no such account for this user",
    "InvalidQOS": "there is no such QOS for this account",
    "QOSNotAllowed": "the QOS may not be used here",
    "QOSUsageThreshold": "the usage is above the threshold of the QOS",
    "QOSJobLimit": "the QOS's limit on running jobs is reached",
    "QOSResourceLimit": "the QOS's limit on resources is reached",
    "QOSTimeLimit": "asks for more time than the QOS allows",
    "AssociationJobLimit": "your account's limit on running jobs is reached",
    "AssociationResourceLimit": "your account's limit on resources is reached",
    "AssociationTimeLimit": "your account's limit on time is reached",
    "MaxMemPerLimit": "asks for more memory per CPU or node than is allowed",
    "DeadLine": "cannot end before its deadline",
    "FedJobLock": "waits for another cluster of the federation",
    "InactiveLimit": "was idle for longer than the site allows",
    "NonZeroExitCode": "the batch script ended with an error",
    "TimeLimit": "ran into its time limit",
    "OutOfMemory": "ran out of memory",
    "JobLaunchFailure": "could not be started on its nodes",
    "SystemFailure": "Slurm or a node failed",
    "job requeued in held state": "requeued and held; `scontrol release` lets it go",
    "user env retrieval failed requeued held": (
        "the environment of its user could not be read on its node, so it is held; `scontrol release` tries again"
    ),
    "launch failed requeued held": "could not be started on its nodes, so it is held; `scontrol release` tries again",
}
_ON_ONE_SWITCH = "waits for enough free nodes on one switch or in one block"
_BEGINNINGS = {
    "Nodes required for job are": "nodes that it could have are down, drained or kept for other partitions",
    # Of topology plug-ins (25.11 and newer).
    "No suitable topology unit found": _ON_ONE_SWITCH,
    "Insufficient resources in topology unit": _ON_ONE_SWITCH,
    "Weight-based selection could not satisfy request": _ON_ONE_SWITCH,
    "No available nodes in topology": _ON_ONE_SWITCH,
    "Exceeded maximum node limit during topology": _ON_ONE_SWITCH,
    "Required nodes do not fit topology": "nodes that it names are not on one switch or in one block",
    "Required nodes lack available resources": "nodes that it names have not enough free",
    "RaisedSignal": "was ended by a signal",
    "BurstBuffer": "waits for the burst buffer",
    "FrontEnd": "waits for a front-end node",
}
# These wait for nodes; all others wait for something else and delay no other job.
_WAITS_FOR_NODES = ("", "None", "Priority", "Resources", "ReqNodeNotAvail", "NodeDown")
_WAITS_FOR_NODES_BEGINNINGS = (
    *("Nodes required for job are", "Required nodes lack available resources"),
    *(beginning for beginning, phrase in _BEGINNINGS.items() if phrase == _ON_ONE_SWITCH),
)

_LIMIT = re.compile(
    r"(?P<owner>Assoc|QOS|)(?P<kind>Grp|Max|Min)"
    r"(?P<what>CPU|Cpu|GRES|Node|Memory|Mem|Jobs?|SubmitJobs?|WallDuration|Wall|Billing|BB|Energy|Licenses?|License|Unknown)"
    r"(?P<time>RunMinutes|RunMins|Minutes|)(?P<scope>PerJob|PerNode|PerUser|PerAccount|)(?:Limit|NotSatisfied|)"
)
_OWNERS = {"Assoc": "your account", "QOS": "the QOS", "": "the account"}
_WHAT = {
    "CPU": "CPU cores",
    "GRES": "GPUs",
    "NODE": "nodes",
    "MEM": "memory",
    "MEMORY": "memory",
    "JOB": "running jobs",
    "SUBMITJOB": "submitted jobs",
    "WALL": "run time",
    "WALLDURATION": "run time",
    "BILLING": "billing units",
    "BB": "burst buffer",
    "ENERGY": "energy",
    "LICENSE": "licenses",
    "UNKNOWN": "a resource",
}
_SCOPES = {"PerUser": " per user", "PerAccount": " per account", "PerNode": " on one node", "PerJob": "", "": ""}


def explain_reason(reason: str) -> str:
    """Returns a reason in a phrase with Slurm's own word after it, e.g. "waits for free nodes (Resources)".

    Args:
        reason: as squeue's %r has it, e.g. "ReqNodeNotAvail, UnavailableNodes:node1"; "" gives "".
    """
    if not reason:
        return ""
    code = _code_of(reason)
    by_beginning = (phrase for beginning, phrase in _BEGINNINGS.items() if code.startswith(beginning))
    phrase = _PHRASES.get(code) or next(by_beginning, "") or _explain_limit(code)
    if not phrase:
        return f"Slurm says {reason}"
    # A reason of several words adds nothing to the phrase.
    return phrase if " " in code else f"{phrase} ({reason})"


def waits_for_nodes(reason: str) -> bool:
    """Returns whether a job that waits for this reason would start if it had nodes."""
    code = _code_of(reason)
    return code in _WAITS_FOR_NODES or code.startswith(_WAITS_FOR_NODES_BEGINNINGS)


def _code_of(reason: str) -> str:
    """Returns the code without what Slurm adds to it: "ReqNodeNotAvail, UnavailableNodes:n1" -> "ReqNodeNotAvail"."""
    text = reason.strip().strip("()").replace("_", " ")
    first = text.split(",")[0].strip()
    return text if " " in first else first


class ReasonedLimit(NamedTuple):
    """What a reason says about a limit."""

    resource: str
    """E.g. "wallduration", "gres", "submitjob"."""
    is_least: bool


def limit_in(reason: str) -> ReasonedLimit | None:
    """Returns the limit that a reason is about, e.g. of "QOSMaxWallDurationPerJobLimit"; None for another reason."""
    match = _LIMIT.fullmatch(reason.strip())
    if match is None:
        return None
    word = match["what"].upper()
    resource = word if word in _WHAT else word.removesuffix("S")
    return ReasonedLimit(resource.lower(), match["kind"] == "Min")


_OF_PARTITION = ("PartitionNodeLimit", "PartitionTimeLimit", "PartitionConfig", "AccountNotAllowed", "QOSNotAllowed")
# In a sentence with the names of both.
_NOT_PERMITTED = ("Job's account not ", "Job's QOS not ")


def waits_for_limit(reason: str) -> bool:
    """Returns whether a job waits because of a limit: for a person to change something, or for other jobs to end."""
    code = _code_of(reason)
    return limit_in(code) is not None or code in _OF_PARTITION or reason.startswith(_NOT_PERMITTED)


def _explain_limit(code: str) -> str:
    match = _LIMIT.fullmatch(code)
    if match is None:
        return ""
    owner = _OWNERS[match["owner"]]
    word = match["what"].upper()
    resource = _WHAT.get(word) or _WHAT[word.removesuffix("S")]
    if match["time"]:
        resource = f"minutes of {resource}"
    if match["kind"] == "Min":
        return f"asks for less than the {resource} that {owner} wants"
    if match["scope"] in ("PerJob", "PerNode") or match["what"] == "WallDuration":
        place = _SCOPES["PerNode"] if match["scope"] == "PerNode" else " for one job"
        return f"asks for more {resource} than {owner} allows{place}, so it will not start as it is"
    scope = " of all jobs together" if match["kind"] == "Grp" else _SCOPES[match["scope"]]
    return f"{owner}'s limit on {resource}{scope} is reached"
