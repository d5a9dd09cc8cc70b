"""What squeue, sacct and scontrol print about jobs, as values. Pure text in, values out; nothing is run here.

Only explicit column formats are read, never `--json`, whose schema changes with every release. Where rows of many jobs
are read, no column holds text that a user chose: a job's name may have a line break (22.05 prints it as it is), and its
rest would pass for another job's row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from slurm_train.slurm.nodelist import parse_nodelist
from slurm_train.slurm.states import Phase, expand_array_id, phase_of

SQUEUE_FORMAT = "%i|%T|%r|%N|%S|%e|%P"
SACCT_FORMAT = "JobID,State,Reason,NodeList,Start,End,Partition,ExitCode"

NAMED_FORMAT = "%F|%j|%o"

_KEY = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z/:]*)=")
# The rest of the line is the value, whatever it holds.
_FREE_TEXT = frozenset(
    {"JobName", "Comment", "AdminComment", "SystemComment", "Command", "WorkDir", "StdErr", "StdIn", "StdOut"}
)
_NOTHING = frozenset({"", "None", "(null)", "N/A", "n/a", "Unknown", "None assigned", "NONE"})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """One job, or one element of an array, as Slurm sees it now."""

    job_id: str
    """ "123", or "123_4" for an array element."""
    word: str
    """Slurm's own word, e.g. "CANCELLED by 1001"."""
    source: str
    """Who said so: "squeue" or "sacct"."""
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
    found: dict[str, JobState] = {}
    for fields in _rows(text, SQUEUE_FORMAT.count("|") + 1):
        job_ids, word, reason, nodelist, start, end, partition = fields
        if (leader := _leader(job_ids)) in found:
            found[leader] = _with_nodes(found[leader], _known(nodelist))
        for job_id in _ids(job_ids):
            found[job_id] = JobState(
                job_id=job_id,
                word=word,
                source="squeue",
                reason=_known(reason),
                nodelist=_known(nodelist),
                start=_known(start),
                end=_known(end),
                partition=partition,
            )
    return found


def parse_sacct(text: str) -> dict[str, JobState]:
    """Returns the jobs in the output of `sacct -n -P -X -o SACCT_FORMAT`, by id; the last row of an id wins."""
    found: dict[str, JobState] = {}
    for fields in _rows(text, SACCT_FORMAT.count(",") + 1):
        job_ids, word, reason, nodelist, start, end, partition, exit_code = fields
        if (leader := _leader(job_ids)) in found:
            found[leader] = _with_nodes(found[leader], _known(nodelist))
        for job_id in _ids(job_ids):
            found[job_id] = JobState(
                job_id=job_id,
                word=word,
                source="sacct",
                # Of an ended job sacct keeps why it once waited, which explains nothing.
                reason=_known(reason) if phase_of(word) is Phase.QUEUED else "",
                nodelist=_known(nodelist),
                start=_known(start),
                end=_known(end),
                partition=partition,
                exit_code=exit_code,
            )
    return found


def parse_named(text: str) -> dict[tuple[str, str], str]:
    """Returns the jobs in the output of `squeue -h --me -n NAMES -o NAMED_FORMAT`: (name, script) -> job or array id.

    Only jobs of this user with exactly these names are asked for, so nobody else's text is in it. The script comes
    last, since "|" may be part of its path.
    """
    rows = (line.split("|", 2) for line in text.splitlines())
    return {(row[1], row[2]): row[0] for row in rows if len(row) == 3 and row[0].isdigit()}


def parse_job(text: str) -> dict[str, str]:
    """Returns the fields of the first job in the output of `scontrol show job`, e.g. {"JobState": "RUNNING", ...}.

    The many-line form is read, not `-o`: there a job named "x JobState=FAILED" cannot be told from a failed one.
    """
    fields: dict[str, str] = {}
    for line in text.strip().split("\n\n")[0].splitlines():
        for key, value in _pairs(line):
            fields.setdefault(key, value)
    return fields


def parse_partitions(text: str) -> list[dict[str, str]]:
    """Returns the fields of each partition in the output of `scontrol show partition`."""
    return [fields for block in text.strip().split("\n\n") if (fields := parse_job(block)).get("PartitionName")]


def parse_config(text: str) -> dict[str, str]:
    """Returns the settings in the output of `scontrol show config`, e.g. {"MaxArraySize": "1001", ...}."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, value in pairs}


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
    start, eligible = (unix_s(job.get(key, "")) for key in ("StartTime", "EligibleTime"))
    return None if start is None or eligible is None else max(0.0, start - eligible)


def _rows(text: str, num_fields: int) -> list[list[str]]:
    """Splits lines into fields; lines with another number of them are left out."""
    rows = (line.split("|") for line in text.splitlines())
    return [row for row in rows if len(row) == num_fields]


def _ids(text: str) -> list[str]:
    # "12+0" leads a heterogeneous job and stands for it; "12+1" and on are its other components.
    job_id, plus, component = text.partition("+")
    return [] if plus and component != "0" else expand_array_id(job_id)


def _leader(text: str) -> str:
    """Returns the id by which a heterogeneous job is known for the row of a further component, "" for other rows."""
    job_id, _, component = text.partition("+")
    return job_id if component not in ("", "0") else ""


def _with_nodes(job: JobState, nodelist: str) -> JobState:
    """Returns a heterogeneous job with the nodes of another of its components."""
    return replace(job, nodelist=",".join(filter(None, (job.nodelist, nodelist))))


def _known(text: str) -> str:
    return "" if text in _NOTHING else text


def _pairs(line: str) -> list[tuple[str, str]]:
    matches = list(_KEY.finditer(line))
    pairs: list[tuple[str, str]] = []
    for index, match in enumerate(matches):
        if match[1] in _FREE_TEXT:
            return [*pairs, (match[1], line[match.end() :].rstrip())]
        end = matches[index + 1].start() if index + 1 < len(matches) else len(line)
        pairs.append((match[1], line[match.end() : end].strip()))
    return pairs
