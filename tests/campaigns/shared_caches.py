"""Caches in places that several users or jobs share, and what becomes of them: a stranger's, thinned, emptied. As root.

Each cache is made as the product makes it, damaged, and used again as the product uses it. Whatever happened, the use
gives what it gave before, or is refused by name; nothing that a stranger has put there is used.
"""

from __future__ import annotations

import getpass
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from slurm_train.checkpoint.commit import Place
from slurm_train.checkpoint.local import NodePlace, copy_to_run, newest_reachable
from slurm_train.checkpoint.manifest import Manifest
from slurm_train.checkpoint.verify import verify
from slurm_train.code.snapshot import index_code, require_sealed
from slurm_train.data.prepare import Packing
from slurm_train.data.shards import map_tokens, read_index
from slurm_train.errors import SlurmTrainError
from slurm_train.rundir.files import make_private, write_atomic
from slurm_train.rundir.node_disk import open_private
from slurm_train.rundir.paths import RunDirectory, require_private
from slurm_train.supervise.staging import stage_python
from tests.campaigns.record import Tally
from tests.support.command_line import REPOSITORY
from tests.support.small_checkpoints import checkpoint_of, make_checkpoint, make_header, stage

STRANGER = 65533
TRAP = "trapped"
_SRUN = '#!/bin/bash\nwhile [ "${1#--}" != "$1" ]; do shift; done\nSLURMD_NODENAME=node1 exec "$@"\n'
_IMPORT = """
import sys
sys.path.insert(0, sys.argv[2])
from slurm_train.code.imports import import_from_stage
import_from_stage(sys.argv[1])
import mine.first, mine.second
print(mine.first.x + mine.second.x)
"""
# What torch does with its cache: a file is loaded as code if it is there.
_LOAD = """
import os, runpy, sys
from pathlib import Path
from slurm_train.rundir.node_disk import kernel_variables
os.environ.update(kernel_variables(os.environ, instead=Path(sys.argv[1])))
folders = [Path(os.environ[name]) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
if os.environ.get("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS") != "0":
    folders.append(Path(sys.argv[2]))
for folder in folders:
    kernel = folder / "kernel.py"
    if not kernel.exists():
        folder.mkdir(parents=True, exist_ok=True)
        kernel.write_text("x = 3")
    print(runpy.run_path(str(kernel)).get("x"))
"""


def _python(program: str, *words: object, **variables: str) -> str:
    """Returns what a process prints.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    unset = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHINDUCTOR", "TRITON"))}
    env = {**unset, "PYTHONPATH": str(REPOSITORY), **variables}
    command = [sys.executable, "-W", "ignore", "-c", program, *map(str, words)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=300).stdout


class Site:
    """A folder for all users, a root of runs, and what a user has.

    Args:
        folder: an empty one, where nobody else may rename.
    """

    def __init__(self, folder: Path) -> None:
        self.disk, self.root, self.home = folder / "disk", folder / "runs", folder / "home"
        for path, mode in ((self.disk, 0o1777), (self.root, 0o700), (self.home, 0o700)):
            path.mkdir()
            path.chmod(mode)
        self.run = RunDirectory(self.root / "gpt" / "3f9a1c07")
        self.packages = self.home / "site-packages"
        self.saved: list[Manifest] = []

    # Each of these uses a cache, and makes it where it is not there; returns what the use gives.

    def packages_on_a_node(self) -> str:
        """What a rank imports from the copy of Python's packages."""
        if not self.packages.exists():
            (self.packages / "mine").mkdir(parents=True)
            for name, text in (("__init__", ""), ("first", "x = 1\n"), ("second", "x = 2\n")):
                (self.packages / "mine" / f"{name}.py").write_text(text)
            srun = self.home / "bin" / "srun"
            srun.parent.mkdir()
            srun.write_text(_SRUN)
            srun.chmod(0o755)
        before, sys.path[:] = sys.path[:], ["", str(self.packages)]
        try:
            env = {"PATH": f"{self.home}/bin:/usr/bin:/bin"}
            variables = stage_python(str(self.disk), self.root, ("node1",), env)
        finally:
            sys.path[:] = before
        return _python(_IMPORT, variables.get("SLURM_TRAIN_STAGE", "/none"), self.packages)

    def archive_of_packages(self) -> str:
        """The same where the node has no copy yet."""
        for copy in self.disk.glob("slurm_train_*"):
            shutil.rmtree(copy)
        return self.packages_on_a_node()

    def kernels(self) -> str:
        """What a rank loads from the caches of torch and Triton; headers are not in what it gives."""
        torchs = self.disk / f"torchinductor_{getpass.getuser()}"
        found = _python(_LOAD, self.home / "instead", torchs, TMPDIR=str(self.disk))
        return "\n".join(found.splitlines()[:2] + [line for line in found.splitlines() if line == TRAP])

    def copy_of_the_code(self) -> str:
        """What a job checks before it imports its code."""
        if not self.run.path.exists():
            for folder in (self.run.path, self.run.code, self.run.code / "mine"):
                make_private(folder)
            for name in ("train.py", "mine/model.py", "mine/data.py"):
                write_atomic(self.run.code / name, f"# {name}\n", durable=False)
            index = index_code(self.run.code.joinpath, ["train.py", "mine/model.py", "mine/data.py"])
            write_atomic(self.run.code_index, json.dumps({"files": index}), durable=False)
        require_private(self.run)
        require_sealed(self.run)
        return " ".join(sorted(path.read_text() for path in self.run.code.rglob("*.py")))

    def checkpoints_on_a_node(self) -> str:
        """Whether a run resumes at a checkpoint of its own: the node has a newer one than the run directory."""
        folder = open_private(self.disk, "gpt", "node1", key="checkpoint.local_dir")
        tier, run = NodePlace(root=folder, node=0, keep=2, attempt=1), Place(root=self.home / "checkpoints", attempt=1)
        if not self.saved:
            paths = [make_checkpoint(run.root, 1), tier.commit(*stage(folder, make_header(2)))]
            self.saved = [verify(path) for path in paths]
            return "its own"
        newest = checkpoint_of(run.root, 1)
        reachable = newest_reachable(tier, lambda _: True, group=None)
        if reachable is not None:
            newest = copy_to_run(tier, run, reachable, group=None).path
        return "its own" if verify(newest) in self.saved else "another's"

    def prepared_text(self) -> str:
        """The tokens that a run reads."""
        text = self.home / "text.txt"
        if not text.exists():
            text.write_text("to be or not to be\n" * 20)
        cache = self.disk / "packed"
        if not cache.exists():
            cache.mkdir()
            cache.chmod(0o1777)
        directory = Packing(str(text), held_out=0.0, cache=str(cache)).make()
        index = read_index(directory)
        return " ".join(str(tokens.tolist()) for tokens in map_tokens(directory, index, "train"))


class Cache(NamedTuple):
    """One cache: how it is used, and where it lies."""

    use: Callable[[Site], str]
    place: Callable[[Site], Path]
    may_refuse: bool
    """A person must act where it is damaged; other caches are made anew, or done without."""
    is_torchs: bool = False
    """Whether it is whole is torch's business: only strangers are tried."""


def _only(pattern: str) -> Callable[[Site], Path]:
    return lambda site: next(iter(sorted(site.disk.glob(pattern))))


def _packed(site: Site) -> Path:
    return next(path for path in sorted((site.disk / "packed").iterdir()) if path.is_dir())


CACHES = {
    "packages on a node": Cache(Site.packages_on_a_node, _only("slurm_train_*"), False),
    "archive of packages": Cache(Site.archive_of_packages, lambda site: next(site.root.glob(".env*")), False),
    "compiled kernels": Cache(Site.kernels, _only("slurm_train-*/kernels-*"), False, True),
    "user's folder with the kernels": Cache(Site.kernels, _only("slurm_train-*"), False, True),
    "torch's own folder": Cache(Site.kernels, _only("torchinductor_*"), False, True),
    "copy of the code": Cache(Site.copy_of_the_code, lambda site: site.run.code, True),
    "checkpoints on a node": Cache(Site.checkpoints_on_a_node, _only("slurm_train-*/gpt/node1"), True),
    "prepared text": Cache(Site.prepared_text, _packed, True),
}


def _files(place: Path) -> list[Path]:
    return sorted(path for path in place.rglob("*") if path.is_file() and not path.is_symlink())


def give_to_stranger(place: Path, _: random.Random) -> None:
    """Everything is somebody else's, source files are traps, and data are zeros."""
    for path in _files(place):
        path.chmod(0o666)
        if path.suffix == ".py":
            path.write_text(f"print({TRAP!r})\nx = 0\n")
        elif path.suffix == ".bin":
            path.write_bytes(bytes(path.stat().st_size))
    for path in (place, *place.rglob("*")):
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


def link_to_stranger(place: Path, chance: random.Random) -> None:
    """The name leads to a folder of somebody else."""
    elsewhere = place.with_name(f"{place.name}-elsewhere")
    place.rename(elsewhere)
    give_to_stranger(elsewhere, chance)
    place.symlink_to(elsewhere)
    os.chown(place, STRANGER, STRANGER, follow_symlinks=False)


def thin(place: Path, chance: random.Random) -> None:
    """A cleaner has removed some of the files."""
    files = _files(place)
    for path in chance.sample(files, -(-len(files) // 2)):
        path.unlink()


def empty(place: Path, chance: random.Random) -> None:
    """A power cut has emptied some of the files."""
    files = _files(place)
    for path in chance.sample(files, -(-len(files) // 2)):
        path.chmod(0o600)
        path.write_bytes(b"")


def clear(place: Path, _: random.Random) -> None:
    """Nothing is left but the folder."""
    for path in place.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


DAMAGES = {
    "a stranger's": give_to_stranger,
    "a link to a stranger's": link_to_stranger,
    "thinned": thin,
    "emptied": empty,
    "cleared": clear,
}


def all_pairs() -> list[tuple[str, str]]:
    """Returns the names of each cache with each damage that is tried on it."""
    return [
        (cache, damage) for damage in DAMAGES for cache in CACHES if "stranger" in damage or not CACHES[cache].is_torchs
    ]


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Runs the trials: each damage of each cache in turn."""
    assert os.geteuid() == 0, "it takes root to be several users"
    chance = random.Random(seed)
    pairs = all_pairs()
    refused = 0
    for number in range(trials):
        cache, damage = pairs[number % len(pairs)]
        with private_folder(folder) as place:
            problems, was_refused = try_one(Site(place), CACHES[cache], DAMAGES[damage], chance)
        refused += was_refused
        tally.add(f"{cache}, {damage}", problems)
    return {"went on": str(trials - refused), "refused by name": str(refused)}


@contextmanager
def private_folder(folder: Path) -> Iterator[Path]:
    """Gives a folder below /tmp, where nobody else may rename, whatever the folder of the campaign is."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix=f"{folder.name}-") as name:
        yield Path(name)


def try_one(
    site: Site, cache: Cache, damage: Callable[[Path, random.Random], None], chance: random.Random
) -> tuple[list[str], bool]:
    """Returns what is wrong after a damage, and whether the use was refused."""
    before = cache.use(site)
    assert TRAP not in before
    damage(cache.place(site), chance)
    try:
        after = cache.use(site)
    except SlurmTrainError as err:
        return ([] if cache.may_refuse else [f"refused: {err.message}"]), True
    except (AssertionError, OSError, subprocess.SubprocessError, ValueError) as err:
        last = getattr(err, "stderr", None) or str(err)
        return [f"{type(err).__name__}: {last.strip().splitlines()[-1:]}"], False
    return ([] if after == before else [f"gave {after[:200]!r} instead of {before[:200]!r}"]), False
