"""What lies where, by the mounts that a process sees. Pure: the text of /proc/PID/mountinfo is given."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath

_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """The file system that a folder lies on, as a process sees it."""

    folder: str
    """Where it is mounted."""
    kind: str
    """Its type, e.g. "nfs4"."""
    options: tuple[str, ...] = ()
    """Of the mount and of the file system, e.g. ("rw", "vers=4.1", "soft")."""
    device: str = ""
    """Its number, e.g. "254:0": the same for all mounts of one file system."""
    root: str = "/"
    """The folder of the file system that is mounted; another than "/" for a bind mount."""

    def option(self, name: str) -> str | None:
        """Returns the value of an option, "" for one without, None where it is not set."""
        values = [option.partition("=")[2] for option in self.options if option.partition("=")[0] == name]
        return values[-1] if values else None


def mount_of(path: PurePath, mountinfo: str) -> Mount | None:
    """Returns the mount that a path lies on; None where that is not to be seen.

    Args:
        path: absolute, without links.
        mountinfo: /proc/self/mountinfo, or that of another process.
    """
    mount = None
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        words = before.split()
        kind = after.split()
        if len(words) < 6 or len(kind) < 3:
            continue
        root, folder = (_OCTAL.sub(lambda match: chr(int(match[1], 8)), word) for word in words[3:5])
        # Of two mounts on one folder the later one is seen.
        if path.is_relative_to(folder) and (mount is None or len(folder) >= len(mount.folder)):
            options = (*words[5].split(","), *kind[2].split(","))
            mount = Mount(folder=folder, kind=kind[0], options=options, device=words[2], root=root)
    return mount


def file_at(path: PurePath, mountinfo: str) -> tuple[str, PurePath] | None:
    """Returns which file a path is: its file system's number, and its path in there; None where it is not to be seen.

    Two processes with other mounts see the same file at a path where both get the same.

    Args:
        path: absolute, without links.
        mountinfo: of the process.
    """
    mount = mount_of(path, mountinfo)
    return None if mount is None else (mount.device, PurePath(mount.root) / path.relative_to(mount.folder))
