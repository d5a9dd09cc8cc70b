"""Copies Python's packages to the nodes' own disks before the ranks start (`cluster.stage_python`).

A rank opens about 2,000 files until it can train. Of thousands of ranks each of them asks the file server; one archive
that every node reads from its beginning to its end asks it once per node. The archive is written once for all runs of a
root and again when a package has changed, and what a node has unpacked serves the runs after it. Where a node cannot
unpack it, its ranks import from where the packages are installed, as without this.
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

from slurm_train.launch.imports import installed_paths, is_installed
from slurm_train.slurm.commands import run_program
from slurm_train.supervise.monitor import say
from slurm_train.supervise.ranks import run_on_each_node

_ARCHIVES = ".environments_{uid}"
_LONGEST_S = 900.0
# Another user could have put packages where these are looked for: so only what lies in a folder of our own counts.
_UNPACK = """
umask 077
top=$1/slurm_train_$(id -u) place=$1/slurm_train_$(id -u)/$2
mkdir -p "$top" 2>/dev/null
if [ -L "$top" ] || [ ! -O "$top" ] || [ -n "$(find "$top" -maxdepth 0 -perm /022)" ]; then
  echo "foreign $SLURMD_NODENAME"; exit
fi
find "$top" -mindepth 1 -maxdepth 1 -mtime +30 -exec rm -rf {} + 2>/dev/null
if [ ! -d "$place" ]; then
  if fresh=$(mktemp -d "$top/.XXXXXX") && tar -xf "$3" -C "$fresh"; then mv -T "$fresh" "$place"; fi
  [ ! -d "$fresh" ] || rm -rf "$fresh"
fi
if [ -d "$place" ]; then touch "$place"; echo "staged $SLURMD_NODENAME"; else echo "full $SLURMD_NODENAME"; fi
"""


def stage_python(folder: str, root: Path, nodes: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Copies this Python's packages to each node, and returns the variables by which the ranks find them there.

    Nothing that goes wrong ends the run: then the variables are none, and a line says why.

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
        if not archive.exists():
            _write_archive(archive, files, env)
        answers, complaint = _unpack(folder, archive, nodes, env)
    except (OSError, subprocess.SubprocessError) as err:
        return _refuse(f"{type(err).__name__}: {err}")
    by_answer = {word: [node for node in nodes if answers.get(node, "silent") == word] for word in _ANSWERS}
    for word in ("foreign", "silent"):
        if named := by_answer[word]:
            return _refuse(f"{', '.join(named[:8])} ({len(named)} of {len(nodes)}) {_ANSWERS[word]}{complaint}")
    if named := by_answer["full"]:
        say(f"{', '.join(named[:8])} ({len(named)} of {len(nodes)}) {_ANSWERS['full']}{complaint}")
    took_s = time.monotonic() - began_s
    say(f"Python's packages are in {folder} on {len(by_answer['staged'])} of {len(nodes)} nodes ({took_s:.1f} s)")
    return {"SLURM_TRAIN_STAGE": f"{folder}/slurm_train_{os.getuid()}/{digest}"}


_ANSWERS = {
    "staged": "",
    "full": "could not unpack Python's packages, and import them from where they are installed",
    "foreign": "have a folder of another user, or one that others may write, where Python's packages would be",
    "silent": "did not say whether they have Python's packages",
}


def _refuse(why: str) -> dict[str, str]:
    say(f"Python's packages are imported from where they are installed: {why}")
    return {}


def _files(paths: Sequence[str]) -> Iterator[str]:
    """Yields all files of some folders; other folders of packages inside them that Python does not use are left out."""
    for path in paths:
        for here, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if not is_installed(name))
            yield from (f"{here}/{name}" for name in sorted(names))


def _digest(files: Iterable[str]) -> str:
    """Returns what changes if a file is added, removed or changed: from names, sizes and times, not from content."""
    digest = xxhash.xxh3_128(sys.version.encode())
    for file in files:
        # Bytecode is written when somebody imports, and is as good as its source.
        if not file.endswith(".pyc"):
            found = os.lstat(file)
            digest.update(f"{file} {found.st_size} {found.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _archive_folder(root: Path) -> Path:
    folder = root / _ARCHIVES.format(uid=os.getuid())
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o022:
        raise PermissionError(f"{folder} belongs to uid {found.st_uid}, mode {stat.filemode(found.st_mode)}")
    return folder


def _write_archive(archive: Path, files: Iterable[str], env: Mapping[str, str]) -> None:
    fresh = archive.with_name(f".{archive.stem}.{secrets.token_hex(4)}.tmp")
    try:
        words = ["tar", "--create", "--file", str(fresh), "--directory=/", "--null", "--files-from=-"]
        names = "".join(f"{file[1:]}\0" for file in files)
        done = run_program(words, env=env, timeout_s=_LONGEST_S, cwd="/", text=names)
        # 1: a file changed while it was read, e.g. bytecode of somebody who imports; a package would change the digest.
        if done.return_code > 1:
            raise OSError(f"tar: {done.last_line}")
        fresh.rename(archive)
    finally:
        fresh.unlink(missing_ok=True)


def _unpack(folder: str, archive: Path, nodes: Sequence[str], env: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Returns the answer of each node that gave one, and what srun or tar complained about last."""
    words = ["/bin/sh", "-c", _UNPACK, "sh", folder, archive.stem, str(archive)]
    done = run_on_each_node(words, nodes, env, timeout_s=_LONGEST_S)
    lines = (line.split() for line in done.stdout.splitlines())
    complaint = done.stderr.strip().splitlines()
    answers = {words[1]: words[0] for words in lines if len(words) == 2 and words[0] in _ANSWERS}
    return answers, f": {complaint[-1]}" if complaint else ""
