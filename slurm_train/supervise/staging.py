"""Copies Python's packages to the nodes' own disks before the ranks start (`cluster.stage_python`).

A rank opens about 2,000 files until it can train, and each of thousands of ranks would ask the file server for them.
With one archive, which a node reads from its beginning to its end, each node asks once. The archive is written once for
all runs of a root, and again when a package has changed. Later runs use what a node has unpacked.

The ranks import from the copy, so it is used only if nobody but this user can have made it, and if it is complete.
Beside the archive lies its seal, a list of its files with their sizes, and each node compares its copy with the seal
before each job: cleaners of /tmp remove files one by one, and a power failure leaves empty files. If a node cannot
unpack the archive, its ranks import the packages from where they are installed.
"""

from __future__ import annotations

import os
import secrets
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import xxhash

from slurm_train.code.imports import installed_paths, is_installed
from slurm_train.rundir.files import change_times, fsync_file, listed, write_atomic
from slurm_train.slurm.commands import run_program
from slurm_train.supervise.asking import ask_nodes
from slurm_train.supervise.best_effort import say

_ARCHIVES = ".environments_{uid}"
_LONGEST_S = 900.0
_ARCHIVES_KEPT = 2
_IN_USE_S = 3600.0
"""An archive that was used so recently may be on its way to a node."""


def stage_python(folder: str, root: Path, nodes: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Copies this Python's packages to each node, and returns the variables by which the ranks find them there.

    A failure does not end the run: then there are no variables, and a line says why.

    Args:
        folder: on the nodes' own disks, e.g. "/tmp".
        root: of the runs, for the archive.
        nodes: of the run.
        env: the job's environment.
    """
    began_s = time.monotonic()
    paths = installed_paths()
    try:
        files = list(_files(paths))
        digest = _digest(files)
        archive = _archive_folder(root) / f"{digest}.tar"
        if not _is_sealed(archive):
            _write_archive(archive, files, env)
        _remove_old(archive)
        arguments = [folder, archive.stem, str(archive), str(_seal_of(archive))]
        answers = ask_nodes("stage_packages.sh", arguments, nodes, env, words=_ANSWERS, timeout_s=_LONGEST_S)
    except (OSError, subprocess.SubprocessError) as err:
        return _refuse(f"{type(err).__name__}: {err}")
    nodes_by_answer: dict[str, list[str]] = {word: [] for word in _ANSWERS}
    for node in nodes:
        nodes_by_answer[answers.by_node.get(node, "silent")].append(node)
    errors = answers.errors.strip().splitlines()
    complaint = f": {errors[-1]}" if errors else ""
    for word in ("foreign", "open", "silent", "full"):
        named = nodes_by_answer[word]
        if not named:
            continue
        problem = f"{', '.join(named[:8])} ({len(named)} of {len(nodes)}) {_ANSWERS[word]}{complaint}"
        if word != "full":
            return _refuse(problem)
        # The ranks of such a node import from where the packages are installed.
        say(problem)
    seconds = time.monotonic() - began_s
    say(
        f"Python's packages are in {folder} on {len(nodes_by_answer['staged'])} of {len(nodes)} nodes ({seconds:.1f} s)"
    )
    return {"SLURM_TRAIN_STAGE": f"{folder}/slurm_train_{os.getuid()}/{digest}"}


_ANSWERS = {
    "staged": "",
    "full": "could not unpack Python's packages, and import them from where they are installed",
    "foreign": "have a folder of another user, or one that others may enter, where Python's packages would be",
    "open": "have a folder in which anybody may put another one in the place of Python's packages",
    "silent": "did not say whether they have Python's packages",
}


def _refuse(reason: str) -> dict[str, str]:
    say(f"Python's packages are imported from where they are installed: {reason}")
    return {}


def _files(paths: Sequence[str]) -> Iterator[str]:
    """Yields all files of some folders, without folders of packages inside them that Python does not use."""
    for path in paths:
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if not is_installed(name))
            yield from (f"{folder}/{name}" for name in sorted(names))


def _digest(files: Iterable[str]) -> str:
    """Returns a digest of names, sizes and times, which changes if a file is added, removed or changed.

    Installers may give a file the modification time of its archive. No program can set the time of the last change of
    the inode; where a file system has none (squashfs), the hashes of files that installers write into RECORD tell.
    """
    digest = xxhash.xxh3_128(sys.version.encode())
    for file in files:
        # Bytecode is written whenever somebody imports, and adds nothing to its source.
        if file.endswith(".pyc"):
            continue
        status = os.lstat(file)
        line = f"{file} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}\n"
        digest.update(line.encode(errors="surrogateescape"))
        if file.endswith(".dist-info/RECORD"):
            digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def _archive_folder(root: Path) -> Path:
    folder = root / _ARCHIVES.format(uid=os.getuid())
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o022:
        raise PermissionError(f"{folder} belongs to uid {status.st_uid}, mode {stat.filemode(status.st_mode)}")
    return folder


def _seal_of(archive: Path) -> Path:
    """Returns the file with the content of an archive: sorted lines of size and name; the last is about itself."""
    return archive.with_suffix(".list")


def _is_sealed(archive: Path) -> bool:
    """Returns whether an archive exists and has the size that its seal says."""
    try:
        last_line = _seal_of(archive).read_bytes().splitlines()[-1]
        return last_line == _length_line(archive)
    except (FileNotFoundError, IndexError):
        return False


def _length_line(archive: Path) -> bytes:
    # The other lines begin with a digit, so this one is sorted behind them.
    return f"archive {archive.stat().st_size}".encode()


def _write_archive(archive: Path, files: Sequence[str], env: Mapping[str, str]) -> None:
    fresh = archive.with_name(f".{archive.stem}.{secrets.token_hex(4)}.tmp")
    try:
        words = ["tar", "--create", "--file", str(fresh), "--directory=/", "--null", "--files-from=-"]
        names = "".join(f"{file[1:]}\0" for file in files)
        finished = run_program(words, env=env, timeout_s=_LONGEST_S, cwd="/", text=names)
        # 1: a file changed while it was read, e.g. bytecode that another process writes; a changed package would change
        # the digest.
        if finished.return_code > 1:
            raise OSError(f"tar: {finished.last_line}")
        fsync_file(fresh)
        fresh.rename(archive)
        # A folder of sys.path may lie in another one, as lib-dynload does.
        lines = [*sorted(set(_sealed_lines(files))), _length_line(archive)]
        write_atomic(_seal_of(archive), b"".join(line + b"\n" for line in lines))
    finally:
        fresh.unlink(missing_ok=True)


def _sealed_lines(files: Iterable[str]) -> Iterator[bytes]:
    for file in files:
        status = os.lstat(file)
        is_kept = stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)
        if is_kept and not file.endswith(".pyc") and "\n" not in file:
            yield f"{status.st_size} {file[1:]}".encode(errors="surrogateescape")


def _remove_old(archive: Path) -> None:
    """Marks an archive as used now, and removes the others except the one used before it and those in use."""
    os.utime(archive)
    times = change_times(path for path in listed(archive.parent) if path.suffix in (".tar", ".tmp"))
    newest = sorted((path for path in times if path.suffix == ".tar"), key=lambda path: times[path], reverse=True)
    in_use_s = times.get(archive, 0.0) - _IN_USE_S
    for path, time_s in times.items():
        if path not in newest[:_ARCHIVES_KEPT] and time_s < in_use_s:
            _seal_of(path).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
