"""The directory of checkpoints: names, order, and what may be trusted.

A reader trusts a directory only if COMPLETE holds the hash of manifest.json and every file has the recorded size and
hash. Names and order come from the step alone: no link, no file time, no clock. Nothing here writes.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from slurm_train.checkpoint.manifest import COMPLETE_FILE, MANIFEST_FILE, Manifest, digest_of
from slurm_train.checkpoint.metadata import METADATA_FILE, check_metadata
from slurm_train.checkpoint.shards import check_hash, check_size
from slurm_train.errors import CheckpointError

TRASH_PREFIX = ".trash-"
_NAME = re.compile(r"checkpoint_(\d{7,})")
_STAGING = re.compile(r"checkpoint_\d{7,}\.tmp-[A-Za-z0-9_]+-(\d+)(?:\.\d+)?")
_NUM_HASHING_THREADS = 4
_OLDER_HINT = "an older checkpoint may verify: `checkpoint verify RUN` reads all of a run's"


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A checkpoint that was not trusted.

    Args:
        path: its directory.
        reason: why, naming the file.
        was_complete: it carries a COMPLETE marker, so it was whole once and is damaged now.
    """

    path: Path
    reason: str
    was_complete: bool


@dataclass(frozen=True, slots=True)
class Search:
    """The outcome of looking for the newest verified checkpoint.

    Args:
        found: its directory and manifest, None where no checkpoint verifies.
        passed_over: newer ones that were not trusted, newest first.
    """

    found: tuple[Path, Manifest] | None
    passed_over: tuple[PassedOver, ...]


def checkpoint_name(step: int) -> str:
    """Gives the directory name of a step, for example "checkpoint_0001000"."""
    return f"checkpoint_{step:07d}"


def staging_name(step: int, *, job: str, attempt: int) -> str:
    """Gives the name under which an attempt writes, for example "checkpoint_0001000.tmp-123_4-2"."""
    return f"{checkpoint_name(step)}.tmp-{job}-{attempt}"


def step_of(name: str) -> int | None:
    """Gives the step of a finished checkpoint's name, None for any other name."""
    match = _NAME.fullmatch(name)
    step = int(match[1]) if match else None
    return step if step is not None and checkpoint_name(step) == name else None


def staging_attempt(name: str) -> int | None:
    """Gives the attempt that writes (or wrote) under a staging name, None for any other name."""
    match = _STAGING.fullmatch(name)
    return int(match[1]) if match else None


def list_checkpoints(root: Path) -> list[Path]:
    """Lists the directories with a checkpoint's name, newest step first, trusted or not."""
    try:
        with os.scandir(root) as entries:
            steps = {step_of(entry.name): entry.name for entry in entries if entry.is_dir(follow_symlinks=False)}
    except FileNotFoundError:
        return []
    return [root / steps[step] for step in sorted((s for s in steps if s is not None), reverse=True)]


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest of a finished checkpoint; its files are not looked at.

    Raises:
        CheckpointError: COMPLETE is missing or does not hold the manifest's hash, or the step is another.
    """
    try:
        marker, text = _read_small(path / COMPLETE_FILE), _read_small(path / MANIFEST_FILE)
        if marker != digest_of(text).encode():
            raise CheckpointError(f"{COMPLETE_FILE}: not the hash of {MANIFEST_FILE}", hint=_OLDER_HINT)
        manifest = Manifest.from_json(text.decode())
        if step_of(path.name) not in {None, manifest.step}:
            raise CheckpointError(f"{MANIFEST_FILE}: is of step {manifest.step}", hint=_OLDER_HINT)
    except CheckpointError as err:
        raise _untrusted(path, err.message, hint=err.hint) from err
    except UnicodeDecodeError as err:
        raise _untrusted(path, str(err)) from err
    return manifest


def newest_committed_step(root: Path) -> int:
    """Gives the step of the newest checkpoint whose marker fits its manifest, -1 if there is none; no data is read."""
    for path in list_checkpoints(root):
        with contextlib.suppress(CheckpointError):
            return read_manifest(path).step
    return -1


def check_sizes(path: Path) -> Manifest:
    """Checks the marker, and that every file is there with its size: a few stats, no data read.

    Enough where this run wrote or verified the files before; not enough to load them for the first time.

    Raises:
        CheckpointError: naming directory, file and reason.
    """
    manifest = read_manifest(path)
    for name, record in manifest.files.items():
        try:
            check_size(path / name, record)
        except CheckpointError as err:
            raise _untrusted(path, err.message) from err
    return manifest


def verify(path: Path) -> Manifest:
    """Gives the manifest of a checkpoint after reading every byte of it, and torch's description of its tensors.

    Raises:
        CheckpointError: naming directory, file and reason.
    """
    manifest = check_sizes(path)
    try:
        # Several readers at once: a parallel file system gives one stream a fraction of its bandwidth.
        with ThreadPoolExecutor(min(_NUM_HASHING_THREADS, max(1, len(manifest.files)))) as pool:
            list(pool.map(lambda name: check_hash(path / name, manifest.files[name]), manifest.files))
        if METADATA_FILE in manifest.files:
            check_metadata(path, manifest.files)
    except CheckpointError as err:
        raise _untrusted(path, err.message) from err
    return manifest


def newest_verified(root: Path, *, skip: Collection[str] = ()) -> Search:
    """Looks for the newest checkpoint that verifies.

    Args:
        root: the directory of checkpoints; it may be absent.
        skip: directory names not to consider, for example one that turned out to hold NaN.
    """
    passed_over: list[PassedOver] = []
    for path in list_checkpoints(root):
        if path.name in skip:
            continue
        try:
            return Search((path, verify(path)), tuple(passed_over))
        except CheckpointError as err:
            passed_over.append(PassedOver(path, err.message, was_complete=(path / COMPLETE_FILE).exists()))
    return Search(None, tuple(passed_over))


def wait_until_visible(path: Path, *, timeout_s: float) -> None:
    """Waits until this node sees a path that another node has made.

    NFS keeps a listing for up to a minute; opening the parent again is what makes it ask the server.

    Raises:
        CheckpointError: it is still not there after the time.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 0.01
    while not path.exists():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{path} is not visible on this node after {timeout_s:g} s; another rank has made it",
                hint="put run.root on a file system that every node mounts at the same path",
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)
        if path.parent.is_dir():
            os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY))


def _read_small(path: Path) -> bytes:
    """Reads a marker or a manifest; a link in its place is refused."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            return file.read()
    except FileNotFoundError as err:
        missing = "missing, its save did not finish" if path.name == COMPLETE_FILE else "missing"
        raise CheckpointError(f"{path.name}: {missing}", hint=_OLDER_HINT) from err
    except OSError as err:
        raise CheckpointError(f"{path.name}: {err.strerror}", hint=_OLDER_HINT) from err


def _untrusted(path: Path, reason: str, *, hint: str = _OLDER_HINT) -> CheckpointError:
    return CheckpointError(f"checkpoint {path} cannot be trusted: {reason}", hint=hint)
