"""Mounts of a file system that behaves as NFS does (`nfs_client.c`): one folder is the server, each mount a client.

Every client caches on its own, so what one sees late, another one has written; its faults are set while it runs.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.waiting import wait_for

SOURCE = Path(__file__).with_name("nfs_client.c")
NEEDED = (("gcc", "gcc"), ("pkg-config", "pkg-config"), ("fusermount3", "fuse3"))
DEFAULTS = {"acregmin": 3.0, "acregmax": 60.0, "acdirmin": 30.0, "acdirmax": 60.0}
"""Linux's own defaults."""
NOAC = {"acregmin": 0.0, "acregmax": 0.0, "acdirmin": 0.0, "acdirmax": 0.0, "sync": 1.0}


def missing() -> str:
    """Returns what is missing to mount it here, "" where nothing is."""
    if os.geteuid() != 0:
        return "root"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse"
    if packages := [package for program, package in NEEDED if shutil.which(program) is None]:
        return ", ".join(packages)
    found = subprocess.run(["pkg-config", "--atleast-version=3.12", "fuse3"], capture_output=True, check=False)
    return "" if found.returncode == 0 else "libfuse3-dev"


@functools.cache
def program() -> Path:
    """Returns the compiled client; one per process of tests."""
    target = Path(tempfile.mkdtemp(prefix="slurm_train-nfs-")) / "nfs_client"
    flags = subprocess.run(["pkg-config", "--cflags", "--libs", "fuse3"], capture_output=True, text=True, check=True)
    words = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(target), str(SOURCE), *flags.stdout.split()]
    subprocess.run([*words, "-lpthread"], check=True)
    target.parent.chmod(0o755)
    return target


@dataclass(slots=True, kw_only=True)
class Client:
    """One mount of a server's folder."""

    export: Path
    path: Path
    control: Path
    locks: str = "local"
    namespace: int | None = None
    """A process in whose mount namespace it is mounted; None: this one's."""
    settings: dict[str, float] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def set(self, **settings: float) -> None:
        """Changes settings and faults, see `nfs_client.c`; they are in force when this returns."""
        self.settings |= settings
        text = "".join(f"{name} {value:f}\n" for name, value in self.settings.items())
        temporary = self.control.with_suffix(".new")
        temporary.write_text(text)
        temporary.replace(self.control)
        if self.process is not None and self.process.poll() is None:
            wait_for(self._has_read_settings, within_s=60.0, what=f"{self.control} to be read", poll_s=0.01)

    def _has_read_settings(self) -> bool:
        """Returns whether the client says that it has read the settings as they are now."""
        status = self.control.stat()
        seen = Path(f"{self.control}.seen")
        return seen.exists() and seen.read_text().split() == [str(status.st_ino), str(status.st_mtime_ns)]

    @contextmanager
    def having(self, **settings: float) -> Iterator[None]:
        """Has some settings for as long as the body runs."""
        before = {name: self.settings.get(name, _NEUTRAL.get(name, 0.0)) for name in settings}
        self.set(**settings)
        try:
            yield
        finally:
            self.set(**before)

    def mount(self) -> Client:
        """Mounts it."""
        self.set()
        words = [str(program()), str(self.export), str(self.path), str(self.control), self.locks]
        if self.namespace is not None:
            words = ["nsenter", f"--target={self.namespace}", "--mount", "--wd=/", *words]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(words, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
        wait_for(self.is_mounted, within_s=60.0, what=f"the mount of {self.path}", poll_s=0.02)
        return self

    def is_mounted(self) -> bool:
        """Returns whether it is there for the processes of its namespace."""
        assert self.process is None or self.process.poll() is None, f"the client of {self.path} has ended"
        lines = Path(f"/proc/{self.namespace or 'self'}/mountinfo").read_text().splitlines()
        return any(line.split()[4] == str(self.path) and " fuse.nfs " in line for line in lines)

    def crash(self) -> None:
        """Ends the client as a power cut does: what waits in it is lost."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def unmount(self) -> None:
        """Removes the mount, whoever uses it."""
        enter = [] if self.namespace is None else ["nsenter", f"--target={self.namespace}", "--mount"]
        subprocess.run([*enter, "umount", "--lazy", str(self.path)], capture_output=True, check=False)
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self.crash()


_NEUTRAL = {**DEFAULTS, "cto": 1.0, "room": -1.0, "errno": float(errno.EDQUOT), "flush": 5.0}


@contextmanager
def clients(folder: Path, count: int = 2, *, locks: str = "local", **settings: float) -> Iterator[list[Client]]:
    """Mounts so many clients of one server at `folder/client_<k>`; the server's folder is `folder/server`."""
    export = folder / "server"
    export.mkdir(exist_ok=True)
    made: list[Client] = []
    try:
        for number in range(count):
            path = folder / f"client_{number}"
            path.mkdir(exist_ok=True)
            control = folder / f"control_{number}"
            client = Client(export=export, path=path, control=control, locks=locks, settings=dict(settings))
            made.append(client)
            client.mount()
        yield made
    finally:
        for client in made:
            client.unmount()
