"""What happens in a run besides its attempts: lines of JSON that rank 0, the supervisor and commands add.

`events@<host>.jsonl` has what went wrong or was asked for, and what was done about it. Its writers may be on different
nodes, so each node has a file of its own; every line is durable when the writer goes on, since a rollback counts on it.
`changes.jsonl` has what a person changed in the middle of a run; a line is durable before anything else is written, so
no checkpoint can come from a change that is not on record. `logs/attempt_<k>/failures@<host>.jsonl` has how ranks
failed: srun keeps one exit code for all ranks, that of the last one to be killed; the first line names the cause.
`preflight.json` of an attempt has findings about its nodes; nodes that were found bad are in `bad_nodes@<host>.jsonl`
of the root, which later submissions of all its runs read. `saves.jsonl` is for people: it is not made durable, and a
disk that refuses a line costs no run.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from slurm_train.config.secrets import redact
from slurm_train.formatting import plain
from slurm_train.rundir.cause import Cause, is_lasting, tells_of_loss
from slurm_train.rundir.files import (
    append_line,
    append_shared,
    read_json,
    read_lines,
    read_shared,
    to_records,
    write_atomic,
)
from slurm_train.rundir.paths import RunDirectory
from slurm_train.trust import trusted_owners

# A DataLoader and torch.multiprocessing.spawn put the traceback of their process into the message.
_IN_PROCESS = "Traceback (most recent call last):"
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_WORKER_GONE = "exited unexpectedly"
_LAST_ERROR = "Last error:"
_GENERALITIES = ". This is typically caused by"
"""How gloo goes on after the end of a connection."""
CALM_EVENTS = ("finite", "stop", "signal", "shares", "exchange", "resume", "growth")
"""Kinds that report nothing wrong."""


def append_event(run: RunDirectory, event: str, *, attempt: int, **facts: Any) -> None:
    """Adds a line; numbers that JSON does not have are written as text ("nan", "inf").

    Args:
        run: the run.
        event: its kind, e.g. "non_finite", "spike", "rollback", "hang".
        attempt: number of the attempt.
        facts: what is known of it.
    """
    line = {"event": event, "attempt": attempt, "time_unix_s": time.time()}
    append_shared(run.events, line | {name: _plain(value) for name, value in facts.items()}, durable=True)


def note_signal(run: RunDirectory, attempt: int, name: str) -> None:
    """Records that a program was asked to stop and has ended without an agreed stop; a full disk costs no run.

    Args:
        run: the run.
        attempt: number of the attempt.
        name: how it was asked, e.g. "TERM".
    """
    with contextlib.suppress(OSError):
        append_event(run, "signal", attempt=attempt, asked_by=name)


def read_events(run: RunDirectory, event: str | None = None, *, attempt: int | None = None) -> list[dict[str, Any]]:
    """Returns the lines of all nodes by time.

    Args:
        run: the run.
        event: only lines of this kind; None: of all kinds.
        attempt: only lines of this attempt; None: of all attempts.
    """
    lines = read_shared(run.events)
    if event is not None:
        lines = [line for line in lines if line.get("event") == event]
    if attempt is not None:
        lines = [line for line in lines if line.get("attempt") == attempt]
    return lines


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedChange:
    """One change that a person accepted."""

    number: int
    """Counts the changes of the run, from 1."""
    step: int
    """Step of the newest checkpoint at that time; what comes after it is trained with the change."""
    config: dict[str, list[Any]] = field(default_factory=dict)
    """Old and new value by dotted key; only keys that change the training."""
    code: dict[str, Any] | None = None
    """Old and new digest of the snapshot, and the lines added and removed per file."""
    data: dict[str, str] | None = None
    """Old fingerprint of the data set, and the new one, "" where only the ranks know it."""
    time_unix_s: float = 0.0

    @property
    def names(self) -> list[str]:
        """What was changed: keys, "code", "data"."""
        names = list(self.config)
        if self.code:
            names.append("code")
        if self.data:
            names.append("data")
        return names


def read_changes(run: RunDirectory) -> list[AcceptedChange]:
    """Returns the accepted changes of a run, oldest first."""
    return to_records(AcceptedChange, read_lines(run.changes))


def record_change(run: RunDirectory, change: AcceptedChange) -> None:
    """Adds a change; durable when this returns."""
    append_line(run.changes, {**asdict(change), "time_unix_s": time.time()}, durable=True)


def covers_config(changes: Sequence[AcceptedChange], key: str, value: Any) -> bool:
    """Returns whether the newest accepted change of a key has brought this value."""
    brought = [change.config[key][1] for change in changes if key in change.config]
    return brought[-1:] == [value]


def covers_code(changes: Sequence[AcceptedChange], digest: str) -> bool:
    """Returns whether the newest accepted change of the code has brought the snapshot with this digest."""
    brought = [change.code["new"] for change in changes if change.code]
    return brought[-1:] == [digest]


def covers_data(changes: Sequence[AcceptedChange], *, old: str, new: str) -> bool:
    """Returns whether going from one fingerprint of the data set to another was accepted."""
    for change in changes:
        if change.data and is_same_data(change.data["old"], old):
            accepted = change.data["new"]
            if not accepted or is_same_data(accepted, new):
                return True
    return False


ITEMS = "+items:"
"""In a fingerprint, between what is known of the whole data set and a digest of some of its items."""


def with_items(fingerprint: str, items: str) -> str:
    """Returns the fingerprint of a data set together with a digest of some of its items, "" where there is none."""
    return f"{fingerprint}{ITEMS}{items}" if items else fingerprint


def is_same_data(first: str, second: str) -> bool:
    """Returns whether two fingerprints are of the same data, as far as both know it.

    Those from before items were part of them have none, and so have data sets whose items could not be read.
    """
    first_whole, _, first_items = first.partition(ITEMS)
    second_whole, _, second_items = second.partition(ITEMS)
    if first_items and second_items:
        return first == second
    return first_whole == second_whole


class SaveLog:
    """What became of an attempt's saves.

    Args:
        run: the run.
        attempt: number of the attempt.
        now: the time of day.
    """

    def __init__(self, run: RunDirectory, attempt: int, *, now: Callable[[], float] = time.time) -> None:
        self._run = run
        self._attempt = attempt
        self._now = now
        self._stalls: dict[int, float] = {}

    def stalled(self, step: int, seconds: float) -> None:
        """Takes note of how long the save of a step has kept the training waiting."""
        self._stalls[step] = self._stalls.get(step, 0.0) + seconds

    def ended(self, step: int, *, num_bytes: int, save_s: float, error: str = "") -> None:
        """Writes the line of a save; a step that had been saved before (no bytes, no error) has its line already.

        Args:
            step: which one.
            num_bytes: size of all its files.
            save_s: from its start until it was durable, or failed.
            error: why it failed.
        """
        stall_s = self._stalls.pop(step, 0.0)
        if not num_bytes and not error:
            return
        line: dict[str, Any] = {
            "attempt": self._attempt,
            "step": step,
            "bytes": num_bytes,
            "stall_s": round(stall_s, 6),
            "save_s": round(save_s, 6),
            "time_unix_s": self._now(),
        }
        with contextlib.suppress(OSError):
            append_line(self._run.saves, line | ({"error": error} if error else {}))


def read_saves(run: RunDirectory) -> list[dict[str, Any]]:
    """Returns the lines in the order in which the saves ended."""
    return [line for line in read_lines(run.saves) if isinstance(line.get("step"), int)]


Level = Literal["error", "warning", "note"]
"""error: the ranks are not started; warning: they are, and somebody should know; note: how things are here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem of nodes or of a site: the same in logs, ledger, `status` and `doctor --json`."""

    code: str
    """Stable name, e.g. "DISK_FULL"; docs/troubleshooting.md has a section for each."""
    level: Level
    seen: str
    """What was asked and found, with values; one line."""
    todo: str
    """What to do about it; one line."""
    node: str = ""
    """The node or nodes, "node3" or "node2, node3"; "" where it is everywhere or nowhere in particular."""
    blames_node: bool = False
    """Whether leaving these nodes out would help."""

    @property
    def line(self) -> str:
        """All of it in one line, e.g. "DISK_FULL node3: ...; free some (docs/troubleshooting.md#disk_full)"."""
        return f"{self.short}; {self.hint}"

    @property
    def short(self) -> str:
        """Code, node and what was seen."""
        return f"{self.code}{' ' + self.node if self.node else ''}: {self.seen}"

    @property
    def cause(self) -> Cause:
        """What it says of the end of an attempt whose ranks it has kept from starting."""
        lasting = not self.blames_node and is_lasting(self.code, default=False)
        # With several nodes none of them is the one.
        node = "" if ", " in self.node else self.node
        return Cause(kind=self.code, node=node, words=self.line, lasting=lasting, blames_node=node != "")

    @property
    def hint(self) -> str:
        """What to do, and where to read more."""
        return f"{self.todo} (docs/troubleshooting.md#{self.code.lower()})"

    def as_json(self) -> dict[str, Any]:
        """Returns it for a file or `--json`, the line for people included."""
        return {**asdict(self), "line": self.line}


def write_preflight(run: RunDirectory, attempt: int, record: Mapping[str, Any]) -> None:
    """Puts the record of an attempt in the place of an earlier one of the same attempt."""
    write_atomic(run.preflight(attempt), json.dumps(record) + "\n", durable=False)


def read_preflight(run: RunDirectory, attempt: int) -> dict[str, Any]:
    """Returns the record of an attempt, {} where there is none."""
    return read_json(run.preflight(attempt)) or {}


def findings_of(record: Mapping[str, Any]) -> list[Finding]:
    """Returns the findings of a record, the worst first."""
    return to_records(Finding, record.get("findings", ()))


def codes_of(findings: Sequence[Finding]) -> str:
    """Returns codes and nodes of findings in short, e.g. "CLOCK_SKEW node3; LIMITS"; "" for none."""
    return "; ".join(f"{finding.code} {finding.node}".strip() for finding in findings)


def errors_of(findings: Sequence[Finding]) -> list[Finding]:
    """Returns what keeps the ranks from starting."""
    return [finding for finding in findings if finding.level == "error"]


def bad_nodes_of(findings: Sequence[Finding]) -> dict[str, str]:
    """Returns the nodes without which it might have gone well, each with its code and what was seen."""
    reasons: dict[str, str] = {}
    for finding in errors_of(findings):
        if finding.blames_node:
            for node in finding.node.split(", "):
                reasons.setdefault(node, f"{finding.code}: {finding.seen}")
    return reasons


BAD_NODES_FILE = "bad_nodes.jsonl"
BAD_NODES_PARTS = "bad_nodes@*.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class BadNode:
    """One node that is to be left out."""

    node: str
    why: str = ""
    """Code and what was seen."""
    until_unix_s: float
    cluster: str = ""
    """Whose node it is; "" where that is not known."""

    def __str__(self) -> str:
        until = time.strftime("%d %b %H:%M", time.localtime(self.until_unix_s))
        return f"{self.node} (until {until}; {self.why})"


def list_file(run: RunDirectory) -> Path:
    """Returns the list that a run shares with the others below its root; each node has a part of it."""
    return run.place / BAD_NODES_FILE


def add_bad_nodes(
    run: RunDirectory, reasons: Mapping[str, str], *, hours: float, now_unix_s: float, cluster: str = ""
) -> None:
    """Lists nodes.

    Args:
        run: the run that has found them.
        reasons: node -> why.
        hours: for how long; 0: not at all.
        now_unix_s: seconds since 1970.
        cluster: whose nodes they are; "" where that is not known.
    """
    for node, why in reasons.items() if hours > 0 else ():
        bad = BadNode(node=node, why=why, until_unix_s=now_unix_s + 3600 * hours, cluster=cluster)
        _list_node(run, bad, now_unix_s)


def forgive_nodes(run: RunDirectory, nodes: Iterable[str], *, now_unix_s: float, cluster: str = "") -> list[str]:
    """Takes nodes of a cluster off the list that were found well; returns those that were on it."""
    listed = {bad.node for bad in read_bad_nodes(run, now_unix_s=now_unix_s, cluster=cluster)}
    forgiven = [node for node in nodes if node in listed]
    for node in forgiven:
        _list_node(run, BadNode(node=node, why="found well", until_unix_s=0.0, cluster=cluster), now_unix_s)
    return forgiven


def _list_node(run: RunDirectory, bad: BadNode, now_unix_s: float) -> None:
    append_shared(list_file(run), {**asdict(bad), "run": str(run.path), "time_unix_s": now_unix_s})


def read_bad_nodes(run: RunDirectory, *, now_unix_s: float, cluster: str = "") -> list[BadNode]:
    """Returns the nodes of a cluster that are on the list now, the last line about each counting.

    Clusters that share a file system may have nodes of one name; without a cluster the nodes of all are returned.
    """
    by_node: dict[str, BadNode] = {}
    with contextlib.suppress(OSError):
        # Several users may keep their runs below one root; what others write there keeps nobody off a node.
        lines = read_shared(list_file(run), writers=trusted_owners())
        for bad in to_records(BadNode, lines):
            if not (cluster and bad.cluster) or bad.cluster == cluster:
                by_node[bad.node] = bad
    return [bad for bad in by_node.values() if bad.until_unix_s > now_unix_s]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureMark:
    """How one rank ended."""

    rank: int
    host: str
    exit_code: int
    message: str
    """The exception's last line, e.g. "ValueError: no such layer"."""
    place: str = ""
    """Where it was raised, e.g. "model.py:41 in forward"."""
    lasting: bool = True
    """Whether the same would be raised again; files, networks and devices may recover."""
    left_out: str = ""
    """The file or folder that it did not find in the run's copy of the code, and that is beside the user's."""
    time_unix_s: float = field(default=0.0, compare=False)
    """When it was left."""

    @property
    def cause(self) -> Cause:
        """What it says of the end of its attempt."""
        # An assertion often has no words.
        where = f" at {self.place}" if self.place and ": " not in self.message else ""
        words = f"{self.message}{where}"
        return Cause.of(words, ranks=(self.rank,), node=self.host, place=self.place, lasting=self.lasting)

    @property
    def tells_of_loss(self) -> bool:
        """Whether it says only that another rank is gone or late, which is the consequence of something else."""
        return tells_of_loss(self.message)


def leave_mark(run: RunDirectory, attempt: int, mark: FailureMark) -> None:
    """Adds a rank's mark to its attempt; a run directory that is gone is no second failure."""
    # Libraries colour their messages, and a note is one line of a table.
    message = plain(redact(mark.message)).replace("\n", " ")
    line = {**asdict(mark), "message": message[:300], "time_unix_s": time.time()}
    if run.attempt_logs(attempt).is_dir():
        append_shared(run.attempt_logs(attempt) / "failures.jsonl", line)


def read_marks(run: RunDirectory, attempt: int) -> list[FailureMark]:
    """Returns the marks of an attempt, the earliest first."""
    lines = read_shared(run.attempt_logs(attempt) / "failures.jsonl")
    return sorted(to_records(FailureMark, lines), key=lambda mark: mark.time_unix_s)


def first_mark(run: RunDirectory, attempt: int) -> FailureMark | None:
    """Returns the earliest mark of an attempt that is no mere loss of another rank, else the earliest; None for none.

    A rank that closes its process group before it ends (`finally:`) leaves its mark later than those that lose it.
    """
    return first_of(read_marks(run, attempt))


def first_of(marks: Sequence[FailureMark]) -> FailureMark | None:
    """Returns the mark of `first_mark` from all marks of an attempt, the earliest first."""
    return next((mark for mark in marks if not mark.tells_of_loss), next(iter(marks), None))


# What a mark says of an exception.


def message_of(err: BaseException) -> str:
    """Returns an exception in one line; for one of a loader's or spawned process the line that it raised there."""
    words = _words_of(err)
    if err.__cause__ is not None and _WORKER_GONE in words:
        # Its cause has the signal, if torch has seen it.
        cause_words = _words_of(err.__cause__)
        words = cause_words if "killed by signal" in cause_words else words
    _, headline, inner = words.rpartition(_IN_PROCESS)
    if headline:
        # After the frames, which are indented.
        raised = next((line for line in inner.splitlines() if line and not line.startswith(" ")), "")
        if raised:
            return raised
    name = type(err).__name__
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    if not lines:
        return name
    # "Error(s) in loading state_dict for Net:", and what they are in the next line.
    text = (" ".join(lines[:2]) if lines[0].endswith(":") else lines[0]).partition(_GENERALITIES)[0]
    # The first line of NCCL's errors names a line of torch's code, the last one what failed.
    if _LAST_ERROR in lines[:-1]:
        text += f": {lines[lines.index(_LAST_ERROR) + 1]}"
    return f"{name}: {text}"


def _words_of(err: BaseException) -> str:
    try:
        return str(err)
    except Exception as again:  # an exception of a program's own may fail to say what it is
        return f"its message cannot be read ({type(again).__name__})"


def would_last(err: BaseException) -> bool:
    """Returns whether an exception is to be expected again; files, networks and devices may recover."""
    return is_lasting(f"{type(err).__name__}: {_words_of(err)}", default=not isinstance(err, OSError))


def place_of(err: BaseException) -> str:
    """Returns where an exception was raised, e.g. "model.py:41 in forward"."""
    words = _words_of(err)
    inner_frames = _FRAME.findall(words) if _IN_PROCESS in words else []
    if inner_frames:
        file, line, name = inner_frames[-1]
        return f"{Path(file).name}:{line} in {name}"
    innermost = traceback.extract_tb(err.__traceback__)[-1]
    return f"{Path(innermost.filename).name}:{innermost.lineno} in {innermost.name}"
