"""Daemons that outlive the command that starts them, and their certain end.

A daemon gets its own session, no descriptor of the caller, and a log file. Before it becomes the daemon, the process
writes its own id and start time, so a starter that is killed at any moment leaves a record; the pair names a process
for good, where an id alone is reused. A variable in its environment is the second way to find it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slurm_train.errors import ClusterError
from slurm_train.tools.devcluster.commands import AFRESH_HINT, run_command, wait_until

MARK = "SLURM_TRAIN_DEVCLUSTER"
# $1 record, $2 log, then the daemon. The process id and the start time both survive the exec.
_RECORD_THEN_EXEC = (
    'cd /; umask 022; record=$1; exec </dev/null >>"$2" 2>&1; shift 2; '
    'echo "$$ $(cut -d" " -f22 /proc/$$/stat)" >"$record.new" && mv "$record.new" "$record" && exec "$@"'
)


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """A process, named so that no later process can be taken for it."""

    pid: int
    start_ticks: int
    """Clock ticks from boot to its start, field 22 of /proc/PID/stat."""

    def is_alive(self) -> bool:
        """Tells whether this very process runs; a zombie does not."""
        return _start_ticks(self.pid) == self.start_ticks


def spawn_daemon(
    words: Sequence[str], *, record: Path, log: Path, extra: Mapping[str, str], timeout_s: float = 5.0
) -> ProcessRecord:
    """Starts a daemon that survives the caller, and returns it once it has written its record.

    Args:
        words: the daemon and its arguments, in the foreground form.
        record: file that names the process; an old one is replaced.
        log: file that gets stdout and stderr, appended.
        extra: environment beside the base, with `MARK` in it.
        timeout_s: seconds for the record to appear.

    Raises:
        ClusterError: the record did not appear, e.g. because the directory is not writable.
    """
    record.unlink(missing_ok=True)
    # --fork leaves no child behind: the daemon belongs to init, also where the caller is a long test session.
    starter = ["setsid", "--fork", "sh", "-c", _RECORD_THEN_EXEC, "sh", str(record), str(log), *words]
    run_command(starter, extra=extra)
    if not wait_until(record.exists, timeout_s=timeout_s, poll_s=0.01):
        raise ClusterError(
            f"{record.stem} did not start: no record at {record} after {timeout_s:.0f} s",
            hint=f"is {record.parent} writable, and the machine not too busy? {AFRESH_HINT}",
        )
    found = read_record(record)
    if found is None:
        raise ClusterError(f"{record.stem} did not start: {record} is not a process record", hint=AFRESH_HINT)
    return found


def read_record(path: Path) -> ProcessRecord | None:
    """Returns the process that a record names, or None where there is no whole record."""
    try:
        pid, start_ticks = path.read_text(encoding="ascii").split()
        return ProcessRecord(int(pid), int(start_ticks))
    except (FileNotFoundError, ValueError):
        return None


def read_process(pid: int) -> ProcessRecord | None:
    """Returns the process that has an id now, or None where none is alive."""
    ticks = _start_ticks(pid)
    return None if ticks is None else ProcessRecord(pid, ticks)


def find_marked(state_dir: Path) -> list[ProcessRecord]:
    """Returns the processes that were started with the mark of a cluster in their environment."""
    wanted = f"{MARK}={state_dir}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdecimal() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(read_process(int(entry.name)))
    return [process for process in found if process is not None]


def end_processes(find: Callable[[], Iterable[ProcessRecord]], *, timeout_s: float = 10.0) -> None:
    """Kills what `find` returns, again and again until it returns nothing.

    The repetition catches a process that was forked between the look and the kill. The caller and its parents are
    spared, so `down` may be typed inside a node.

    Raises:
        ClusterError: processes are left after `timeout_s` seconds; names them.
    """
    spared = set(_ancestry())

    def kill_round() -> bool:
        victims = [process for process in find() if process.pid not in spared and process.is_alive()]
        for process in victims:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        return not victims

    if not wait_until(kill_round, timeout_s=timeout_s):
        left = sorted(process.pid for process in find() if process.pid not in spared)
        raise ClusterError(
            f"processes {left} did not end within {timeout_s:.0f} s", hint="look at them, type down again"
        )


def last_lines(log: Path, *, count: int = 6) -> str:
    """Returns the last lines of a log, indented; a note where there is none."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]
    except FileNotFoundError:
        lines = []
    return "\n".join(f"    {line}" for line in lines) if lines else f"    ({log} is empty)"


def mark_environment(state_dir: Path) -> dict[str, str]:
    """Returns the variable by which every process of a cluster is found, and every command that builds it."""
    return {MARK: str(state_dir)}


def _stat_fields(pid: int | str) -> list[str] | None:
    """Returns the fields of /proc/PID/stat from the state on (field 3), or None where there is no process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def _start_ticks(pid: int) -> int | None:
    fields = _stat_fields(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def _ancestry() -> Iterable[int]:
    pid = os.getpid()
    while pid > 1:
        yield pid
        fields = _stat_fields(pid)
        pid = 0 if fields is None else int(fields[1])
