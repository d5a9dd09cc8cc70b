"""The Slurm of another Debian release on this machine, in a root and namespaces of its own, for tests.

A root is a machine of its own: other files, network, processes and names. `devcluster` runs in it as anywhere, so it
disturbs neither a cluster of this machine nor one in another root. All that runs in it writes into a layer above the
installed packages; `stop` ends all of it and removes that layer, and the packages stay for the next `start`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import slurm_train
from slurm_train.errors import ClusterError
from slurm_train.tools.devcluster import system
from slurm_train.tools.devcluster.cluster import PACKAGES, state_lock

CACHE = Path("/var/cache/slurm-train-devcluster")
# Debian's suites, oldest first: the Slurm of each and its libc. sid's grow; these are of the end of 2026.
SUITES = {
    "bullseye": ("20.11", (2, 31)),
    "bookworm": ("22.05", (2, 36)),
    "trixie": ("24.11", (2, 41)),
    "sid": ("26.05", (2, 42)),
}
# What this machine's Python is linked against, by whatever name the suite has it: python3 depends on all of it.
_FURTHER_PACKAGES = ("python3", "ca-certificates")
_INSTALL_TIMEOUT_S = 900.0
_MIRROR = "http://deb.debian.org/debian"
_PIN = "Package: {}\\nPin: release n={}\\nPin-Priority: 1001\\n\\n"
# $1 folder of the root, $2 its host name, $3 the packages, then what of this machine it sees. SIGCHLD stays ignored
# after the exec, so that the kernel reaps the orphans that process 1 inherits.
_BECOME_ROOT = """
set -eu
cd "$1"; name=$2; tree=$3; shift 3
mount -t overlay overlay -o lowerdir="$tree",upperdir=upper,workdir=work root
for folder; do mkdir -p "root$folder"; mount --rbind "$folder" "root$folder"; done
mount --rbind /dev root/dev
mount -t tmpfs tmpfs root/dev/shm
mount -t proc proc root/proc
mount -t sysfs sysfs root/sys
mount -t tmpfs tmpfs root/run
hostname "$name"
echo "127.0.0.1 localhost $name" >root/etc/hosts
ip link set lo up
cd root; mkdir .old; pivot_root . .old; umount -l .old; rmdir .old
trap '' CHLD
exec sleep infinity
"""


class Root(NamedTuple):
    """A Debian suite with Slurm.

    In `folder`: `upper` and `work` have what was written while it ran; `init` names the process that holds it together,
    `log` is what that one said.
    """

    suite: str
    name: str = ""
    """Tells apart several roots with the same packages."""

    def __str__(self) -> str:
        """Returns what `find_root` finds it by, e.g. "trixie" or "trixie/second"."""
        return f"{self.suite}/{self.name}" if self.name else self.suite

    @property
    def folder(self) -> Path:
        """The one directory that holds all of it but the packages."""
        return CACHE / (f"{self.suite}-{self.name}" if self.name else self.suite)

    @property
    def tree(self) -> Path:
        """The installed packages; complete where it exists."""
        return CACHE / self.suite / "tree"

    def init(self) -> system.ProcessRecord | None:
        """Returns process 1 of the root as this machine sees it, None where the root is not started."""
        outer = system.read_record(self.folder / "init")
        if outer is None or not outer.is_alive():
            return None
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text(encoding="ascii").split()
        return system.read_process(int(children[0])) if children else None


def find_root(asked: str) -> Root:
    """Returns the root of a suite ("trixie") or of a version of Slurm ("24.11"); "24.11/NAME" is another one beside it.

    Raises:
        ClusterError: neither a suite nor a version that is known, or no name.
    """
    slurm, slash, name = asked.partition("/")
    if slash and not re.fullmatch(r"[a-z0-9-]{1,20}", name):
        raise ClusterError(f"--slurm {asked}: {name!r} is no name of a root", hint="use small letters, digits and -")
    for suite, (version, _) in SUITES.items():
        if slurm in (suite, version):
            return Root(suite, name)
    known = ", ".join(f"{version} ({suite})" for suite, (version, _) in SUITES.items())
    raise ClusterError(f"--slurm {asked}: no such Slurm", hint=f"one of {known}")


def start(root: Root, *, say: Callable[[str], None] = lambda _: None) -> None:
    """Starts a root unless it runs; its packages are installed first where they are missing.

    It sees the folder that slurm_train is imported from, the Python that runs this, and the current folder.

    Raises:
        ClusterError: packages cannot be installed, the root cannot be entered, or this Python is one of a package
            manager, in whose place the root has its own.
    """
    if root.init() is not None:
        return
    _install(root, say=say)
    places = {Path(place).resolve() for place in (sys.prefix, sys.base_prefix, *_folders_of_the_project())}
    # Parents first. A folder that the root has itself is its own: /, /usr, /root, /tmp.
    visible = [str(place) for place in sorted(places) if not (root.tree / place.relative_to("/")).exists()]
    if str(Path(sys.base_prefix).resolve()) not in visible:
        raise ClusterError(
            f"this Python lies in {sys.base_prefix}, where Debian {root.suite} has its own files",
            hint="use a Python in a folder of its own (pyenv, conda, uv)",
        )
    for name in ("upper", "work", "root"):
        (root.folder / name).mkdir(exist_ok=True)
    (root.folder / "log").unlink(missing_ok=True)
    namespaces = ["--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
    words = [
        "unshare",
        *namespaces,
        "sh",
        "-c",
        _BECOME_ROOT,
        "sh",
        str(root.folder),
        root.suite,
        str(root.tree),
        *visible,
    ]
    system.spawn_daemon(words, record=root.folder / "init", log=root.folder / "log", extra={})
    outer = system.read_record(root.folder / "init")
    assert outer is not None

    def is_entered() -> bool:
        init = root.init()
        return init is not None and Path(f"/proc/{init.pid}/comm").read_text(encoding="utf-8") == "sleep\n"

    if not system.wait_until(lambda: is_entered() or not outer.is_alive(), timeout_s=20) or not outer.is_alive():
        said = (root.folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()[-1:]
        stop(root)
        raise ClusterError(
            f"the root of Debian {root.suite} did not start: {' '.join(said) or 'no output'}",
            hint="it needs a machine or a privileged container that may mount and make namespaces",
        )


def enter(root: Root, words: Sequence[str]) -> int:
    """Runs a command in a root, in the current folder and on this terminal, and returns its exit code.

    The root's own search path has this Python first; nothing of the caller's environment is passed on.

    Raises:
        ClusterError: the root is not started.
    """
    init = root.init()
    if init is None:
        raise ClusterError(
            f"no cluster with Slurm of Debian {root.suite} is up",
            hint=f"python -m tests.support.devcluster up --slurm {root}",
        )
    environment = {
        "PATH": f"{sys.prefix}/bin:{system.SYSTEM_PATH}",
        "LC_ALL": "C.UTF-8",
        "HOME": "/root",
        "TERM": "xterm",
        # For the tests' own programs, wherever the command is typed.
        "PYTHONPATH": str(Path(slurm_train.__file__).parents[1]),
    }
    spaces = ["nsenter", f"--target={init.pid}", "--mount", "--net", "--uts", "--ipc", "--pid", "--root", "--wd"]
    return subprocess.call([*spaces, "sh", "-c", 'cd "$0" && exec "$@"', str(Path.cwd()), *words], env=environment)


def stop(root: Root) -> bool:
    """Ends everything in a root and removes what was written there; its packages stay.

    Returns:
        Whether there was anything to end or remove.

    Raises:
        ClusterError: a process does not end.
    """
    # With process 1 of a process namespace the kernel ends all others, and with the last one every mount and network.
    ended = [process for process in (root.init(), system.read_record(root.folder / "init")) if process is not None]
    system.end_processes(lambda: ended)
    rest = [entry for entry in root.folder.glob("*") if entry not in (root.tree, _unfinished(root))]
    for entry in rest:
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    if root.folder.exists() and not any(root.folder.iterdir()):
        root.folder.rmdir()
    return bool(rest)


def _folders_of_the_project() -> tuple[Path, Path]:
    return Path(slurm_train.__file__).parents[1], Path.cwd()


def _unfinished(root: Root) -> Path:
    return root.tree.with_suffix(".new")


def _install(root: Root, *, say: Callable[[str], None]) -> None:
    """Makes the tree unless it is there, under another name until it is complete; waits for another one's that does."""
    if shutil.which("mmdebstrap", path=system.SYSTEM_PATH) is None and not root.tree.exists():
        raise ClusterError("up --slurm needs mmdebstrap", hint="apt-get install mmdebstrap")
    unfinished = _unfinished(root)
    root.folder.mkdir(parents=True, exist_ok=True)
    with state_lock(CACHE / "any", timeout_s=_INSTALL_TIMEOUT_S):
        if root.tree.exists():
            return
        say(f"install Slurm of Debian {root.suite} into {root.tree}, once (600 MB, one to five minutes)")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.parent.mkdir(exist_ok=True)
        # With this process's environment, in which a proxy may be named; it shows its progress.
        code = subprocess.call(install_words(root.suite, target=unfinished, libc=_own_libc()), stdout=sys.stderr)
        if code != 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise ClusterError(
                f"mmdebstrap could not install Slurm of Debian {root.suite}: exit code {code}, the reason is above",
                hint=f"it downloads from {_MIRROR}; if this Debian release has no Slurm that installs now, use another",
            )
        unfinished.rename(root.tree)


def install_words(suite: str, *, target: Path, libc: tuple[int, ...]) -> list[str]:
    """Returns the command that installs a suite's Slurm into a directory.

    Args:
        suite: Debian's, e.g. "bullseye".
        target: the directory, which does not exist.
        libc: version of this machine's, e.g. (2, 36). Its Python does not run with an older one: then Slurm alone is
            of the suite, and all else of the first one after it that has such a libc.
    """
    later = list(SUITES)[list(SUITES).index(suite) :]
    base = next((suite for suite in later if SUITES[suite][1] >= libc), later[-1])
    pins = {"slurm* libslurm*": suite} if base != suite else {}
    if base in ("trixie", "sid"):
        # slurmdbd ends at the first answer of MariaDB's client library 11.8.9, which both have since November 2026.
        pins["mariadb* libmariadb*"] = "bookworm"
    options = ["--variant=minbase", f"--include={','.join([*PACKAGES.values(), *_FURTHER_PACKAGES])}"]
    if pins:
        preferences = "".join(_PIN.format(*item) for item in pins.items())
        options.append(f"--setup-hook=printf '{preferences}' >\"$1/etc/apt/preferences\"")
    # A mirror of a suite that changes or is archived may be older than its list of packages is valid.
    options += ['--aptopt=Acquire::Check-Valid-Until "false"', "--dpkgopt=path-exclude=/usr/share/doc/*"]
    sources = [f"deb {_MIRROR} {pin} main" for pin in dict.fromkeys((base, *pins.values()))]
    return ["mmdebstrap", *options, base, str(target), *sources]


def _own_libc() -> tuple[int, ...]:
    name = os.confstr("CS_GNU_LIBC_VERSION") or ""
    return tuple(map(int, name.rpartition(" ")[2].split(".")))
