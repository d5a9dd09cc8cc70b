"""Finds runs on disk by what a person types: a path, a run name, a run id (or its beginning), or a job id.

A person's roots, the folders in which runs of theirs lie, are remembered in one small file. It may be lost at any time:
every start adds its root again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from slurm_train.errors import ConfigError, RunError
from slurm_train.formatting import shorten
from slurm_train.rundir.files import (
    append_line,
    change_times,
    listed,
    make_private,
    read_lines,
    write_atomic,
)
from slurm_train.rundir.jobs import read_job
from slurm_train.rundir.paths import ID_DIGITS, USER_PREFIX, RunDirectory, as_typed
from slurm_train.rundir.places import all_places, run_place
from slurm_train.rundir.plan_record import PlanRecord
from slurm_train.rundir.sweep import (
    SweepDirectory,
    array_job_id,
    existing_arrays,
    list_sweeps,
    read_table,
    sweep_folders,
)
from slurm_train.trust import is_own_folder, owner_id, trusted_owners

_ASK_OWNER = "ask the owner to open it (run.share=group, or chmod -R g+rX), or name another root with --root"


def run_of_hash(root: Path, name: str, full_hash: str) -> RunDirectory:
    """Returns the place of a run by the hash of what is trained, whose beginning is the run's id.

    Args:
        root: of the runs.
        name: of the run.
        full_hash: the whole hash.

    Raises:
        ConfigError: another training of this user has the same id.
    """
    run = run_place(root, name, full_hash[:ID_DIGITS])
    try:
        other_hash = PlanRecord.read(run.plan).config_hash
    except OSError:
        # What is in the way is reported when the run directory is made.
        return run
    # A run whose settings were changed on purpose has a hash that its id is not the beginning of.
    if other_hash.startswith(run.run_id) and other_hash != full_hash:
        raise ConfigError(
            f"{run.path} is another training, whose id is the same by chance (hashes {other_hash}, {full_hash})",
            hint="give this one another name: run.name=NAME",
        )
    return run


def list_runs(root: Path) -> list[RunDirectory]:
    """Returns all runs below a root, newest first; hidden folders (`doctor` has one) hold none."""
    runs: list[Path] = []
    for place in all_places(root):
        for name in listed(place):
            if not name.name.startswith((".", USER_PREFIX)):
                runs += _runs_in(name)
    existing = [config.parent for config in change_times(run / "config.yaml" for run in runs)]
    times = change_times(existing)
    return [RunDirectory(path) for path in sorted(times, key=lambda path: times[path], reverse=True)]


def _runs_in(name: Path) -> list[Path]:
    """Returns what may be runs in a folder of one name; a link of another user may lead to anybody's runs."""
    if owner_id(name) in trusted_owners():
        return listed(name)
    if name.is_symlink():
        return []
    return [run for run in listed(name) if run.is_dir() and not run.is_symlink()]


def find_runs(root: Path, words: list[str]) -> list[RunDirectory]:
    """Returns the runs that the words name; all of them for no words.

    A word that names runs of this user names no other.

    Raises:
        RunError: a word names nothing, or is the beginning of several run ids; all runs belong to another user.
    """
    runs = list_runs(root)
    closed = ""
    if not runs or words:
        closed = closed_places(root)
    if not runs and closed:
        raise RunError(f"you may not see the runs below {root}: {closed}", hint=_ASK_OWNER)
    if not words:
        return runs
    named_runs: list[RunDirectory] = []
    for word in words:
        matches = [run for run in runs if _matches(run, word)]
        matches = list(filter(is_own, matches)) or matches or _by_path(word)
        if not matches:
            names = ", ".join(sorted({f"{run.name}/{run.run_id}" for run in runs})[:8]) or "none"
            hint = f"runs there: {names}; --root names another root"
            hint += f"; folders that you may not enter: {closed}" if closed else ""
            raise RunError(f"no run matches {word!r} below {root}", hint=hint)
        exact = [run for run in matches if word in (run.run_id, f"{run.name}/{run.run_id}")]
        # Of a run that was moved aside the id has an ending, e.g. "3f9a1c07.old".
        matches = exact or matches
        _require_clear(word, matches)
        named_runs += [run for run in matches if run not in named_runs]
    return named_runs


# A job id, a run id or a sweep id (or its beginning), NAME/ID. A name alone may mean something else in each folder.
_ID = re.compile(r"\d+(?:_\d+)?|(?:[^/]+/)?[0-9a-f]{4,}")


def _roots_file(env: Mapping[str, str]) -> Path:
    home = env.get("HOME", "/")
    # Whoever has no home of their own, as in containers, has "/": nothing is read or written there.
    default_state = f"{home}/.local/state" if home != "/" else os.devnull
    state = env.get("XDG_STATE_HOME", "")
    return Path(state if state.startswith("/") else default_state) / "slurm-train" / "roots.jsonl"


def remember_root(root: Path, env: Mapping[str, str]) -> None:
    """Adds a root to those that are known, where that is possible; several processes may do so at once."""
    file = _roots_file(env)
    # A home that is full, read-only or absent does not prevent the start of a run.
    with contextlib.suppress(OSError):
        if not any(line.get("root") == str(root) for line in read_lines(file)):
            make_private(file.parent)
            append_line(file, {"root": str(root)})


def known_roots(env: Mapping[str, str]) -> list[Path]:
    """Returns the roots that are known and exist, newest last; forgets those that are gone."""
    file = _roots_file(env)
    try:
        # XDG_STATE_HOME may lie where others make files as well.
        if file.lstat().st_uid not in trusted_owners():
            return []
        roots = list(dict.fromkeys(str(line.get("root")) for line in read_lines(file)))
    except OSError:
        return []
    existing = [root for root in roots if os.path.isdir(root)]  # noqa: PTH112  # Path.is_dir may raise
    if existing != roots:
        with contextlib.suppress(OSError):
            write_atomic(file, "".join(json.dumps({"root": root}) + "\n" for root in existing), durable=False)
    return [Path(root) for root in existing]


def root_of(word: str, root: Path, env: Mapping[str, str]) -> Path:
    """Returns the root below which a job id, run id or sweep id names something: this one, else one that is known."""
    if not _ID.fullmatch(word) or os.path.exists(word):  # noqa: PTH110  # as above
        return root
    places = (root, *reversed(known_roots(env)))
    # Of several roots the one with a run of this user: in a shared root others may give theirs the same id.
    for holds in (_holds_own, _holds):
        for place in places:
            if holds(place, word):
                return place
    return root


def _holds_own(root: Path, word: str) -> bool:
    is_run = any(_matches(run, word) and is_own(run) for run in list_runs(root))
    return is_run or _sweep_among(_own_sweeps(root), root, word) is not None


def _holds(root: Path, word: str) -> bool:
    return any(_matches(run, word) for run in list_runs(root)) or find_sweep(root, word) is not None


def newest_runs(roots: Iterable[Path], number: int) -> list[RunDirectory]:
    """Returns the newest runs below some roots, newest first."""
    times = change_times(run.path for root in roots for run in list_runs(root))
    return [RunDirectory(path) for path in sorted(times, key=lambda path: times[path], reverse=True)[:number]]


def closed_places(root: Path) -> str:
    """Returns the folders in which runs may lie and which this user may not enter, with their owners; "" for none."""
    root = root.resolve()
    # Not Path.is_dir, which raises where a folder above may not be entered.
    nearest = next(parent for parent in (root, *root.parents) if os.path.isdir(parent))  # noqa: PTH112
    names = [name for name in listed(root) if not name.name.startswith(".")]
    places = [nearest, *names, *(run for name in names for run in listed(name))]
    closed = [place for place in places if os.path.isdir(place) and not os.access(place, os.X_OK)]  # noqa: PTH112
    return shorten((f"{place} of {owner_of(place)}" for place in closed), 3)


def owner_of(path: Path) -> str:
    """Returns the user who owns a file, e.g. "ada", or "uid 1000" where that user has no name here."""
    try:
        return path.owner()
    except KeyError:
        return f"uid {path.stat().st_uid}"


def find_run(root: Path, word: str | None) -> RunDirectory:
    """Returns the one run that a word names; the newest of that name; without a word the newest of all.

    Where others keep runs below the same root, this user's own come first.

    Raises:
        RunError: nothing matches, or an abbreviated id fits several runs.
    """
    runs = find_runs(root, [word] if word else [])
    if not runs:
        raise RunError(f"there is no run below {root}", hint="start one, or name its root with --root")
    return next((run for run in runs if is_own(run)), runs[0])


def is_own(run: RunDirectory | SweepDirectory) -> bool:
    """Returns whether a run or sweep belongs to this user; one whose directory is gone counts as this user's."""
    try:
        return run.path.lstat().st_uid == run.path.stat().st_uid == os.geteuid()
    except OSError:
        return True


def _require_clear(word: str, matches: list[RunDirectory]) -> None:
    ids = sorted({run.run_id for run in matches})
    if len(ids) > 1 and all(run.run_id.startswith(word) and run.name != word for run in matches):
        raise RunError(f"{word!r} is the beginning of several run ids: {', '.join(ids)}", hint="type more of it")


def _matches(run: RunDirectory, word: str) -> bool:
    job = read_job(run) if word.replace("_", "").isdigit() else None
    return (
        word in (run.name, f"{run.name}/{run.run_id}")
        or (len(word) >= 4 and run.run_id.startswith(word))
        or (job is not None and word in job.job_ids)
    )


def _by_path(word: str) -> list[RunDirectory]:
    path = as_typed(Path(word).resolve())
    return [RunDirectory(path)] if (path / "config.yaml").is_file() else []


def require_writable_folder(path: Path, *, hint: str) -> Path:
    """Returns the nearest folder that exists, the path itself or one above it; it may be written to.

    Args:
        path: absolute.
        hint: for the error.

    Raises:
        RunError: what is there is not writable, or is not a folder.
    """
    # os.path, since Path.exists raises where a folder above may not be entered.
    existing = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        kind = "is not writable" if existing.is_dir() else "is not a directory"
        raise RunError(f"{path} cannot be made: {existing} {kind}", hint=hint)
    return existing


# --- sweeps ---


def find_sweep(root: Path, word: str) -> SweepDirectory | None:
    """Returns the sweep that a word names: its id or the beginning of it, a path, the job id of one of its arrays, or
    a run name that no other run has.

    A word that names a sweep or runs of this user names no sweep of another.

    Raises:
        RunError: the word is the beginning of several ids, or of one of a sweep that this user may not read.
    """
    if (Path(word) / "sweep.jsonl").is_file():
        return SweepDirectory(as_typed(Path(word).resolve()))
    own_sweeps = _own_sweeps(root)
    named = _sweep_among(own_sweeps, root, word)
    if named is not None or len(own_sweeps) == len(sweep_folders(root)):
        return named
    if any(is_own(run) and _matches(run, word) for run in list_runs(root)):
        return None
    named = _sweep_among([sweep for sweep in list_sweeps(root) if sweep not in own_sweeps], root, word)
    if named is None:
        _refuse_closed_sweep(root, word)
    return named


def _own_sweeps(root: Path) -> list[SweepDirectory]:
    return [sweep for sweep in list_sweeps(root) if is_own_folder(sweep.path)]


def _sweep_among(sweeps: Sequence[SweepDirectory], root: Path, word: str) -> SweepDirectory | None:
    short = word.removeprefix("sweeps/")
    matches = [sweep for sweep in sweeps if len(short) >= 4 and sweep.sweep_id.startswith(short)]
    matches = [sweep for sweep in matches if sweep.sweep_id == short] or matches
    if len(matches) > 1:
        ids = ", ".join(sorted(sweep.sweep_id for sweep in matches))
        raise RunError(f"{word!r} is the beginning of several sweeps: {ids}", hint="type more of it")
    if not matches and word.isdigit():
        matches = [sweep for sweep in sweeps if any(array_job_id(array) == word for array in existing_arrays(sweep))]
    if matches:
        return matches[0]
    by_name = (_sweep_with_name(place / word, sweeps) for place in all_places(root))
    return next((sweep for sweep in by_name if sweep is not None), None)


def _refuse_closed_sweep(root: Path, word: str) -> None:
    short = word.removeprefix("sweeps/")
    for path in sweep_folders(root) if len(short) >= 4 else ():
        is_closed = not os.access(path, os.X_OK) or (path / "sweep.jsonl").exists()
        if path.name.startswith(short) and is_closed:
            hint = "ask its owner: run.share=group shares new sweeps, chmod -R g+rX an old one"
            raise RunError(f"sweep {path} is not yours, and you may not read it", hint=hint)


def _sweep_with_name(folder: Path, sweeps: Iterable[SweepDirectory]) -> SweepDirectory | None:
    """Returns the newest sweep whose runs are all that a folder of runs holds: then the name means all of them."""
    named = {config.parent for config in folder.glob("*/config.yaml")}
    if not named:
        return None
    return next((sweep for sweep in sweeps if named <= {element.run.path for element in read_table(sweep)}), None)
