"""A small checkpoint without torch, and a file system that kills, fails or loses power at the n-th call."""

from __future__ import annotations

import os
import pathlib
import signal
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_train.checkpoint.commit import commit, open_staging
from slurm_train.checkpoint.directory import checkpoint_name
from slurm_train.checkpoint.manifest import CheckpointHeader, Manifest
from slurm_train.checkpoint.shards import write_file

CALLS = ("open", "write", "fsync", "close", "rename", "replace", "unlink", "mkdir", "rmdir")


def make_header(step: int, **changes: Any) -> CheckpointHeader:
    facts: dict[str, Any] = {
        "step": step,
        "samples": 8 * step,
        "epoch": 0,
        "world_size": 1,
        "mesh": {"dp_replicate": 1},
        "batch_plan": {"global_size": 8},
        "config_hash": "c0ffee",
        "data_fingerprint": "da7a",
        "torch_version": "2.6.0",
        "attempt": 1,
        "epoch_fence": 1,
    }
    return CheckpointHeader(**(facts | changes))


def stage(root: Path, header: CheckpointHeader, *, size: int = 24) -> tuple[Path, Manifest]:
    staging = open_staging(root, header)
    names = ("rank_00000.pt", "__0_0.distcp", ".metadata")
    files = {name: write_file(staging / name, os.urandom(size)) for name in names}
    return staging, Manifest.of(header, files)


def make_checkpoint(root: Path, step: int, **changes: Any) -> Path:
    staging, manifest = stage(root, make_header(step, **changes))
    return commit(staging, root / checkpoint_name(step), manifest)


class FaultyFiles:
    """Counts the calls of `os` that change or open files, and does something at the n-th.

    fault: called as fault(when, name) with when "before" or "after" at call number `at`.
    watch: called after every call as watch(name, args, result); its own calls do not count.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self.is_watching = False
        self.lock = threading.RLock()
        self.names: list[str] = []

    @contextmanager
    def installed(
        self,
        *,
        at: int = 0,
        fault: Callable[[str, str], None] | None = None,
        watch: Callable[[str, tuple[Any, ...], Any], None] | None = None,
    ) -> Iterator[FaultyFiles]:
        def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                with self.lock:  # files are hashed by several threads
                    return counted(*args, **kwargs)

            def counted(*args: Any, **kwargs: Any) -> Any:
                if self.is_watching:
                    return real(*args, **kwargs)
                self.num_calls += 1
                self.names.append(name)
                is_it = fault is not None and self.num_calls == at
                if is_it and name != "close":  # a close that reports an error has closed all the same
                    fault("before", name)
                try:
                    result = real(*args, **kwargs)
                except OSError:  # a file that is not there: the call is over all the same
                    if is_it:
                        fault("after", name)
                    raise
                if watch is not None:
                    self.is_watching = True
                    watch(name, args, result)
                    self.is_watching = False
                if is_it:
                    fault("before" if name == "close" else "after", name)
                    fault("after", name)
                return result

            return call

        with pytest.MonkeyPatch.context() as patch:
            accessor = getattr(pathlib, "_normal_accessor", None)  # Python 3.10 keeps its own references
            for name in CALLS:
                wrapped = wrap(name, getattr(os, name))
                patch.setattr(os, name, wrapped)
                if accessor is not None and hasattr(accessor, name):
                    patch.setattr(type(accessor), name, staticmethod(wrapped))
            yield self


def count_calls(work: Callable[[], Any]) -> int:
    with FaultyFiles().installed() as files:
        work()
    return files.num_calls


def run_killed(work: Callable[[], Any], *, at: int, when: str) -> bool:
    """Runs the work in a forked child that is killed at that call; says whether it was killed."""

    def kill(moment: str, name: str) -> None:
        if moment == when:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            with FaultyFiles().installed(at=at, fault=kill):
                work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def run_failing(work: Callable[[], Any], *, at: int, number: int) -> tuple[Any, BaseException | None]:
    """Runs the work with an OSError at that call; gives its result or its error."""

    def fail(moment: str, name: str) -> None:
        if moment == "before":
            raise OSError(number, os.strerror(number), name)

    with FaultyFiles().installed(at=at, fault=fail):
        try:
            return work(), None
        except Exception as err:
            return None, err


class PowerCut:
    """Follows which bytes and which directory entries were made durable, and rebuilds what a power cut leaves.

    Everything that is there at the start counts as durable.
    """

    def __init__(self, root: Path) -> None:
        self.root_inode = root.stat().st_ino
        self.content: dict[int, bytes] = {}
        self.entries: dict[int, dict[str, int]] = {}
        for path in [root, *root.rglob("*")]:
            self._remember(path)

    def watch(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if name == "fsync":
            self._remember(Path(f"/proc/self/fd/{args[0]}").readlink())
        elif name == "mkdir":
            self.entries[Path(args[0]).stat().st_ino] = {}
        elif name == "open" and args[1] & os.O_CREAT and os.fstat(result).st_size == 0:
            self.content[os.fstat(result).st_ino] = b""  # inode numbers are used again

    def rebuild(self, live: Path, target: Path, *, durable_names_only: bool) -> None:
        """Writes what is left: durable bytes, under durable names only or under all names that were given."""
        if durable_names_only:
            self._rebuild_from(self.root_inode, target)
            return
        for path in [live, *sorted(live.rglob("*"))]:
            copy = target / path.relative_to(live)
            if path.is_dir():
                copy.mkdir()
            else:
                copy.write_bytes(self.content.get(path.stat().st_ino, b""))

    def _rebuild_from(self, inode: int, target: Path) -> None:
        target.mkdir()
        for name, child in self.entries[inode].items():
            if child in self.entries:
                self._rebuild_from(child, target / name)
            else:
                (target / name).write_bytes(self.content.get(child, b""))

    def _remember(self, path: Path) -> None:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            self.entries[status.st_ino] = {child.name: child.stat().st_ino for child in path.iterdir()}
        else:
            self.content[status.st_ino] = path.read_bytes()


@pytest.fixture
def fast_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: thousands of fsyncs cost seconds there, minutes on a disk."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)


@pytest.fixture
def root(fast_path: Path) -> Path:
    return fast_path / "checkpoints"


@pytest.fixture
def kit() -> SimpleNamespace:
    """The functions above, for tests (test folders are not packages)."""
    return SimpleNamespace(
        header=make_header,
        stage=stage,
        make=make_checkpoint,
        FaultyFiles=FaultyFiles,
        PowerCut=PowerCut,
        count_calls=count_calls,
        run_killed=run_killed,
        run_failing=run_failing,
    )
