"""Our lines in /etc/hosts: each carries a mark and the state directory, so they are found and taken away again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slurm_train.rundir.files import write_atomic

HOSTS = Path("/etc/hosts")
_MARK = "# slurm-train-devcluster"


def with_hosts(text: str, *, names: Mapping[str, str], state_dir: Path) -> str:
    """Returns the text of a hosts file with our lines at its end, old ones of ours replaced.

    Args:
        text: the file as it is.
        names: host name -> address.
        state_dir: the cluster that the lines belong to.
    """
    kept = without_hosts(text)
    if kept and not kept.endswith("\n"):
        kept += "\n"
    return kept + "".join(f"{address}\t{name} {_MARK} {state_dir}\n" for name, address in names.items())


def without_hosts(text: str) -> str:
    """Returns the text of a hosts file without our lines."""
    return "".join(line for line in text.splitlines(keepends=True) if _MARK not in line)


def marked_hosts(text: str) -> dict[str, Path]:
    """Returns host name -> state directory of our lines."""
    found = {}
    for line in text.splitlines():
        words, mark, state_dir = line.partition(_MARK)
        if mark and len(words.split()) == 2:
            found[words.split()[1]] = Path(state_dir.strip())
    return found


def foreign_names(text: str, *, names: Mapping[str, str]) -> list[str]:
    """Returns the names that a hosts file gives to somebody else."""
    taken = {word for line in without_hosts(text).splitlines() for word in line.partition("#")[0].split()[1:]}
    return sorted(taken & set(names))


def read_hosts() -> str:
    """Returns the text of /etc/hosts, "" where there is none."""
    return HOSTS.read_text(encoding="utf-8") if HOSTS.exists() else ""


def write_hosts(text: str) -> None:
    """Replaces the content of /etc/hosts where it differs."""
    if text == read_hosts():
        return
    # In a container the file is a mount point, which cannot be renamed over.
    if HOSTS.is_mount():
        HOSTS.write_text(text, encoding="utf-8")
    else:
        write_atomic(HOSTS, text, mode=0o644)
