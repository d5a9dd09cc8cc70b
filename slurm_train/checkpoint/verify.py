"""The directory of checkpoints as a reader sees it: what may be trusted, and which is the newest.

A reader trusts a directory only if COMPLETE holds the hash of manifest.json and every file has the recorded size and
hash. Order comes from the names alone (`rundir.paths`): no link, no file time, no clock. A starting attempt renames
what it goes on from (see `commit`), so a reader looks for a vanished one under its new name. Nothing here writes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from slurm_train.checkpoint.manifest import (
    COMPLETE_FILE,
    DAMAGED_HINT,
    MANIFEST_FILE,
    Manifest,
    check_hash,
    check_sizes_in,
    digest_of,
    open_plain,
    read_failure,
)
from slurm_train.checkpoint.metadata import METADATA_FILE, check_metadata
from slurm_train.errors import CheckpointError, UnknownCheckpointError
from slurm_train.rundir.files import LOOKS_AT_STALE, ask_server, is_stale
from slurm_train.rundir.paths import RunDirectory, list_checkpoints, list_displaced, name_of, parse_name
from slurm_train.rundir.scores import best_first

VISIBLE_TIMEOUT_S = 120.0
_NUM_HASHING_THREADS = 4


class PassedOver(NamedTuple):
    """A checkpoint that was not trusted.

    Args:
        path: its directory.
        reason: why, naming the file.
    """

    path: Path
    reason: str


class Search(NamedTuple):
    """The outcome of looking for the newest verified checkpoint.

    Args:
        newest: its directory and manifest, None where no checkpoint verifies.
        passed_over: newer ones that were not trusted, newest first.
    """

    newest: tuple[Path, Manifest] | None
    passed_over: tuple[PassedOver, ...]


def survey(root: Path, check: Callable[[Path], Manifest]) -> Iterator[tuple[Path, Manifest | CheckpointError]]:
    """Yields each checkpoint, newest first, with its manifest or the error that a check raises.

    One that a starting attempt renames meanwhile is checked under its new name; one that is removed is left out. What
    has a checkpoint's name and is no directory counts as one that cannot be trusted.

    Args:
        root: the directory of checkpoints; it may be absent.
        check: `read_manifest`, `check_sizes` or `verify`.
    """
    displaced = list_displaced(root)
    for listed in sorted([*list_checkpoints(root), *displaced], key=name_of, reverse=True):
        if listed in displaced:
            yield listed, _displaced_error(listed)
            continue
        path: Path | None = listed
        looks = 0
        while path is not None:
            try:
                yield path, check(path)
                break
            except CheckpointError as err:
                looks += 1
                path_now = _path_of_save(root, name_of(path).save_id)
                is_to_look_again = is_stale(err) and looks < LOOKS_AT_STALE
                if path_now == path and not is_to_look_again:
                    yield path, err
                    break
                path = path_now


def _displaced_error(path: Path) -> CheckpointError:
    what = f"a link to {path.readlink()}" if path.is_symlink() else "no directory"
    return CheckpointError(
        f"checkpoint {path} cannot be trusted: it is {what}",
        hint="links are not followed: move the directory itself back to this place",
    )


def _path_of_save(root: Path, save_id: str) -> Path | None:
    """Returns the present directory of the checkpoint with an id, None where it has been removed."""
    for path in list_checkpoints(root):
        if name_of(path).save_id == save_id:
            return path
    return None


LAST_FINITE = "last finite loss"
"""Name of the rule by which a checkpoint stays while the losses of a program are not finite (`session.losses`)."""


def newest_verified(root: Path, check: Callable[[Path], Manifest] | None = None) -> Search:
    """Looks for the newest checkpoint that verifies; `root` may be absent.

    Args:
        root: the directory of checkpoints.
        check: `verify`, or what does the same together with other processes.

    Raises:
        UnknownCheckpointError: of one that is newer than what verifies it is not known whether it is whole.
    """
    passed_over: list[PassedOver] = []
    for path, outcome in survey(root, check or verify):
        if isinstance(outcome, Manifest):
            return Search((path, outcome), tuple(passed_over))
        if isinstance(outcome, UnknownCheckpointError):
            raise outcome
        passed_over.append(PassedOver(path, outcome.message))
    return Search(None, tuple(passed_over))


class Kept(NamedTuple):
    """A checkpoint that stays whatever its age, by one rule; several rules may keep the same one.

    Args:
        path: its directory.
        rule: name of the rule, e.g. "best eval_loss".
        value: what the rule goes by.
        is_best: whether `RUN@best` means it.
    """

    path: Path
    rule: str
    value: float
    is_best: bool

    def __str__(self) -> str:
        return f"{self.rule} {self.value:.4f}"


def find_kept(root: Path) -> list[Kept]:
    """Looks which checkpoints stay whatever their age, in the order of the rules, of each the best first."""
    good = {path: outcome for path, outcome in survey(root, read_manifest) if isinstance(outcome, Manifest)}
    return list_kept(next(iter(good.values())), list(good)) if good else []


def list_kept(newest: Manifest, paths: Sequence[Path]) -> list[Kept]:
    """Returns what `find_kept` does.

    Args:
        newest: of the newest checkpoint: what stays is written down there.
        paths: the checkpoints that are there and whole, newest first.
    """
    kept: list[Kept] = []
    by_step = {name_of(path).step: path for path in reversed(paths)}
    by_save = {name_of(path).save_id: path for path in paths}
    for rule in newest.extra.get("kept", ()):
        name = rule["name"]
        if "measure" in rule:
            # What a follower has scored by now, not what was known when the newest was saved.
            run = RunDirectory.of_checkpoint(paths[0])
            scores = best_first(run, measure=rule["measure"], mode=rule["mode"])
            candidates = [(by_save[scored.save_id], scored.value) for scored in scores if scored.save_id in by_save]
        else:
            candidates = [(by_step[step], value) for step, value in rule["steps"] if step in by_step]
        is_best = name != LAST_FINITE
        kept += [Kept(path, name, value, is_best) for path, value in candidates[: rule["keep"]]]
        for step, value in rule.get("earlier", ()):
            if step in by_step:
                kept.append(Kept(by_step[step], f"{name} of other held-out samples", value, is_best=False))
    return kept


def newest_committed_step(root: Path) -> int:
    """Returns the newest step whose marker fits its manifest, -1 where there is none; other files are not read."""
    for _, outcome in survey(root, read_manifest):
        if isinstance(outcome, Manifest):
            return outcome.step
    return -1


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest of a finished checkpoint; its files are not looked at.

    Raises:
        CheckpointError: COMPLETE is missing or does not hold the manifest's hash, or the step is another.
    """
    with _reasons_for(path):
        marker = _read_small(path / COMPLETE_FILE)
        text = _read_small(path / MANIFEST_FILE)
        if marker != digest_of(text):
            raise CheckpointError(f"{COMPLETE_FILE}: not the hash of {MANIFEST_FILE}", hint=DAMAGED_HINT)
        manifest = Manifest.from_json(text)
        name = parse_name(path.name)
        if name is not None and name.step != manifest.step:
            raise CheckpointError(f"{MANIFEST_FILE}: is of step {manifest.step}", hint=DAMAGED_HINT)
    return manifest


def check_sizes(path: Path) -> Manifest:
    """Checks the marker, and that every file is there with its size: a few stats, no data read.

    Enough where this run wrote or verified the files before; not enough to load them for the first time.

    Raises:
        CheckpointError: naming directory, file and reason.
    """
    manifest = read_manifest(path)
    with _reasons_for(path):
        check_sizes_in(path, manifest.files)
    return manifest


def check_copied(path: Path) -> Manifest:
    """Checks what `check_sizes` does, and torch's description: enough where each file was read back as it was copied.

    Raises:
        CheckpointError: naming directory, file and reason.
    """
    manifest = check_sizes(path)
    with _reasons_for(path):
        _check_description(path, manifest)
    return manifest


def verify(path: Path) -> Manifest:
    """Returns the manifest of a checkpoint after reading every byte of it, and torch's description of its tensors.

    Raises:
        CheckpointError: naming directory, file and reason.
    """
    manifest = read_manifest(path)
    verify_share(path, manifest)
    return manifest


def share_of(manifest: Manifest, number: int, of: int) -> list[str]:
    """Returns the files that one of several readers checks: every file is one reader's, large ones are spread."""
    return sorted(sorted(manifest.files, key=lambda name: (-manifest.files[name].bytes, name))[number::of])


def verify_share(path: Path, manifest: Manifest, *, number: int = 0, of: int = 1) -> None:
    """Reads every byte of a share of a checkpoint's files; the first reader also torch's description of its tensors.

    Args:
        path: the checkpoint.
        manifest: what it holds.
        number: which share, from 0.
        of: how many shares there are.

    Raises:
        CheckpointError: naming directory, file and reason.
    """
    names = share_of(manifest, number, of)
    with _reasons_for(path):
        check_sizes_in(path, {name: manifest.files[name] for name in names})
        # Several readers at once: a parallel file system gives one stream a fraction of its bandwidth.
        with ThreadPoolExecutor(min(_NUM_HASHING_THREADS, max(1, len(names)))) as pool:
            list(pool.map(lambda name: check_hash(path / name, manifest.files[name]), names))
        if number == 0:
            _check_description(path, manifest)


def _check_description(path: Path, manifest: Manifest) -> None:
    # In a user's own files it is whatever their version of torch, and their state, has made of it.
    if METADATA_FILE in manifest.files and not manifest.is_directory:
        check_metadata(path, manifest)


def wait_until_visible(path: Path) -> None:
    """Waits until this node sees a path that another node has made.

    NFS keeps a listing for up to a minute; opening the parent again is what makes it ask the server.

    Raises:
        CheckpointError: it is still not there after two minutes.
    """
    deadline = time.monotonic() + VISIBLE_TIMEOUT_S
    pause_s = 0.01
    while not path.exists():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{path} is not visible on this node after {VISIBLE_TIMEOUT_S:g} s; another rank has made it",
                hint="put run.root on a file system that every node mounts at the same path",
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)
        ask_server(path.parent)


def _read_small(path: Path) -> bytes:
    try:
        with open_plain(path) as file:
            return file.read()
    except OSError as err:
        raise read_failure(path.name, err) from err


@contextlib.contextmanager
def _reasons_for(path: Path) -> Iterator[None]:
    """Names the checkpoint in the errors about its files."""
    try:
        yield
    except UnknownCheckpointError as err:
        raise type(err)(f"checkpoint {path} cannot be used here: {err.message}", hint=err.hint) from err
    except CheckpointError as err:
        raise CheckpointError(f"checkpoint {path} cannot be trusted: {err.message}", hint=err.hint) from err
