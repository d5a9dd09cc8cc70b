"""`--on HOST` in front of any words: sends this folder to a login node by ssh, and runs the same words there.

HOST is what `ssh` takes: a name of your ssh config, or user@host. HOST:FOLDER keeps the project in a folder of your
choice there, e.g. hpc:/work/me/gpt; without it, in ~/slurm_train/NAME. The folder holds

    runs/            the runs, unless run.root names another place
    trees/HASH/      the code as it was sent, one folder for each state of it; equal files are one, by hard links

A tree gets its name when all of it is there, so a command finds it whole or not at all, and commands that are typed at
the same time have trees of their own. Jobs run the copy of the code in their run directory, never a tree.

Words and facts travel as base64, which no shell on the way changes. Nothing that is secret is in them.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, BinaryIO
from zipfile import ZipFile

from slurm_train import __version__
from slurm_train.cli.terminal import note
from slurm_train.code.git import SENT_FILE, read_git
from slurm_train.code.imports import import_roots, own_paths
from slurm_train.code.snapshot import plan_files
from slurm_train.config.schema import RunConfig
from slurm_train.errors import EXIT_DONE, ConfigError, RunError
from slurm_train.formatting import COMMAND
from slurm_train.rundir.files import read_json
from slurm_train.rundir.removal import remove_tree
from slurm_train.trust import is_own_folder, trusted_owners
from slurm_train.verbs import DEFAULT_ROOT, VERBS, parse, run

_PYTHON = "~/.slurm_train/env/bin/python"
"""On the host: Python of the environment that `init --on` makes."""
_REPLY = b"slurm_train: "
"""Begins the line of a reply; what a profile of the host prints before it is passed over."""
_KEPT_S = 30 * 86400.0
"""So long an unused tree stays."""
_MOST_SEARCHED = 8
"""So many trees are searched for files that are there already."""
_PART = ".part-"
"""Begins the name of what is not complete."""
_NO_COMMAND = 127
_NO_CONNECTION = 255
_TAKES_NO_CODE = ("init", "devcluster", "completion", "prepare")
_INSTALL = """
set -eu
umask 077
mkdir -p ~/.slurm_train
cd ~/.slurm_train
python=@PYTHON@
[ -z "$python" ] || rm -rf env
for name in python3.13 python3.12 python3.11 python3.10 python3; do
    [ -n "$python" ] || ! "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || python=$name
done
[ -n "$python" ] || { echo "no Python 3.10 or newer here; add --python PATH"; exit 1; }
if [ ! -x env/bin/python ]; then
    # The packages of the site stay visible: its torch may be built for its GPUs.
    "$python" -m venv --system-site-packages env || { rm -rf env; exit 1; }
fi
env/bin/python -m pip --disable-pip-version-check install --quiet "./@WHEEL@"
# Also another state of the same version.
env/bin/python -m pip --disable-pip-version-check install --quiet --force-reinstall --no-deps "./@WHEEL@"
"""


def main(words: Sequence[str]) -> int:
    """Runs the words on the host; returns their exit code.

    Args:
        words: the host, and what would be typed there behind `python -m slurm_train`.
    """
    has_terminal = all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    return type_there(words[0] if words else "", words[1:], out=sys.stdout.buffer, has_terminal=has_terminal)


def type_there(on: str, words: Sequence[str], *, out: Any, has_terminal: bool = False) -> int:
    """Runs words on a host; returns their exit code.

    Args:
        on: HOST or HOST:FOLDER.
        words: what would be typed there behind `python -m slurm_train`.
        out: the binary stream that gets what they print on stdout.
        has_terminal: this process's streams are a terminal, and the words are to have one.
    """
    host, _, folder = on.partition(":")
    if not host or host.startswith("-"):
        raise ConfigError(
            f"--on needs a host, got {on!r}",
            hint="--on HOST, a name of your ssh config, or HOST:FOLDER; then any words",
        )
    folder = folder or f"~/slurm_train/{Path.cwd().name}"
    outputs = _outputs_of(words)
    for target in outputs.values():
        if not Path(target).resolve().parent.is_dir():
            raise ConfigError(f"{target}: there is no such folder here", hint="make it, or name another")
    with Connection(host) as ssh:
        if words[:1] == ["init"]:
            words = _install(ssh, words)
        code = read_code(words) if _takes_code(words) else None
        request: dict[str, Any] = {"on": on, "folder": folder, "words": list(words), "outputs": outputs}
        if code is not None:
            request |= {"tree": code.tree, "num_header_bytes": len(code.header), "paths": code.paths}
        if not has_terminal or outputs:
            return _exchange(ssh, request, code, out)
        if code is not None and _exchange(ssh, {**request, "only_receives": True}, code, out) != EXIT_DONE:
            raise RunError(f"{host} has not taken the folder, see above", hint="type the same command again")
        return ssh.require_answer(ssh.start_request({**request, "has_terminal": True}, terminal=True).wait())


class Connection:
    """One connection to a host for all of a command, so that a password or second factor is asked for once.

    Where the ssh config of the person shares connections, it is left to do so.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self._options = ["-a", "-x", "-o", "RemoteCommand=none", "-o", "ClearAllForwardings=yes"]
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Connection:
        try:
            settings = subprocess.run(
                ["ssh", "-G", "--", self.host], capture_output=True, text=True, check=False
            ).stdout
        except FileNotFoundError as err:
            raise RunError("there is no ssh here", hint="install OpenSSH") from err
        if not re.search(r"(?m)^controlpath (?!none$)", settings):
            # Below /tmp, since a socket's path has 104 characters at most.
            self._folder = tempfile.TemporaryDirectory(prefix="slurm_train-ssh-", dir="/tmp")
            shared = ("ControlMaster=auto", "ControlPersist=yes", f"ControlPath={self._folder.name}/%C")
            self._options += [word for option in shared for word in ("-o", option)]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._folder is not None:
            subprocess.run([*self._ssh, "-O", "exit", "--", self.host], capture_output=True, check=False)
            self._folder.cleanup()

    @property
    def _ssh(self) -> list[str]:
        return ["ssh", *self._options]

    def start(self, command: str, *, terminal: bool = False, **streams: Any) -> subprocess.Popen[bytes]:
        """Starts a command for the host's shell; Ctrl-C is left to this process."""
        # Else ssh says at the end that the shared connection is closed.
        words = [*self._ssh, *(("-t", "-o", "LogLevel=ERROR") if terminal else ("-T",)), "--", self.host, command]
        ignore = None if terminal else lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)
        return subprocess.Popen(words, preexec_fn=ignore, **streams)

    def start_request(self, request: Mapping[str, Any], **options: Any) -> subprocess.Popen[bytes]:
        """Starts `answer_request` there, with the environment of a login shell, as Slurm's commands need on many sites.

        What the profile prints goes to stderr.
        """
        text = base64.urlsafe_b64encode(json.dumps(request).encode()).decode()
        inner = f"exec {_PYTHON} -m slurm_train there {text} >&3 3>&-"
        return self.start(f"exec sh -c 'exec 3>&1 >&2; exec bash -lc \"{inner}\"'", **options)

    def require_answer(self, code: int) -> int:
        """Returns an exit code of ssh, unless the host was not reached, or has no such package.

        Raises:
            RunError: with what to type; ssh and the host have said why.
        """
        if code == _NO_CONNECTION:
            raise RunError(
                f"the connection to {self.host} was refused or lost, see above",
                hint=f"`ssh {self.host}` by hand has to work; then type the same command again: it is the same run",
            )
        if code == _NO_COMMAND:
            raise RunError(
                f"{self.host} has no slurm_train in {_PYTHON}", hint=f"python -m slurm_train --on {self.host} init"
            )
        return code


@dataclass(frozen=True, slots=True)
class RemoteRun:
    """A run or sweep on another machine, see `submit(..., on=HOST)`; it has no state but its folder there."""

    on: str
    """HOST or HOST:FOLDER."""
    path: str
    """Its directory there."""

    def status(self) -> list[dict[str, Any]]:
        """Returns what is known now, for each run: the keys of `status --json`."""
        return _parsed(printed_there(self.on, ["status", self.path, "--json"]))

    def wait(self) -> list[dict[str, Any]]:
        """Returns the status of each run when all have ended; one connection waits.

        Raises:
            RunError: the connection was lost; `wait()` again.
        """
        looks = printed_there(self.on, ["status", self.path, "--json", "-w", "10"])
        return _parsed(looks.splitlines()[-1])

    def logs(self, *, rank: int = 0) -> str:
        """Returns the log of a rank; -1: of the batch script."""
        return printed_there(self.on, ["logs", self.path, f"--rank={rank}"])

    def cancel(self) -> None:
        """Ends its jobs."""
        printed_there(self.on, ["cancel", self.path])


def submit_there(on: str, words: Sequence[str], *, verbose: bool = False) -> RemoteRun:
    """Submits the run of a command line on a host, with the code of this folder.

    Args:
        on: HOST or HOST:FOLDER.
        words: of the command line.
        verbose: print the plan and the notes to stderr.

    Raises:
        RunError: the host cannot be reached, or has refused; it has printed why to stderr.
    """
    printed = printed_there(on, ["submit", *["--verbose"][: int(verbose)], *words])
    return RemoteRun(on, json.loads(printed.splitlines()[-1]))


def printed_there(on: str, words: Sequence[str]) -> str:
    """Returns what words print on a host.

    Raises:
        RunError: they have failed there, and have printed why to stderr.
    """
    out = io.BytesIO()
    code = type_there(on, words, out=out)
    if code != EXIT_DONE:
        raise RunError(f"`{' '.join(words)}` on {on} ended with exit code {code}", hint="its words are on stderr")
    return out.getvalue().decode()


def _parsed(text: str) -> list[dict[str, Any]]:
    value = json.loads(text)
    return value if isinstance(value, list) else [value]


# --- here: the folder is sent ---


def _takes_code(words: Sequence[str]) -> bool:
    """Returns whether words look at the folder that they are typed in."""
    if not words:
        return True
    verb = VERBS.get(words[0])
    is_setting = verb is None or bool(verb.settings) or (verb.arguments is None and not verb.actions)
    return (
        is_setting and words[0] not in _TAKES_NO_CODE and not {"--help", "-h", "--version", "--hydra-help"} & {*words}
    )


@dataclass(frozen=True, slots=True)
class CodeToSend:
    """The code of this folder, as a run would copy it."""

    header: bytes
    """What the host is told of it: hash, size and mode of each file, and git's facts."""
    contents: Mapping[str, bytes]
    """The files by hash."""
    paths: Sequence[str]
    """Files and folders of this machine that the words name, and that are no code."""

    @property
    def tree(self) -> str:
        """Its name on the host."""
        return hashlib.sha256(self.header).hexdigest()[:16]


def read_code(words: Sequence[str]) -> CodeToSend:
    """Returns the code of this folder.

    Raises:
        ConfigError: it is larger than `run.snapshot_limit_mb`.
    """
    here = Path.cwd()
    state = read_git(here, os.environ)
    typed = [match[1] for word in words if (match := re.fullmatch(r"run\.snapshot_limit_mb=(\d+)", word))]
    limit_mb = int(typed[-1]) if typed else RunConfig().run.snapshot_limit_mb
    names, _ = plan_files(here, state, limit_mb=limit_mb, exclude=(here / DEFAULT_ROOT).resolve())
    contents: dict[str, bytes] = {}
    files: dict[str, tuple[str, int, int]] = {}
    for name in names:
        data = (here / name).read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        contents[digest] = data
        files[name] = (digest, len(data), (here / name).stat().st_mode & 0o100)
    facts = {
        "files": files,
        "commit": state.commit,
        "difference": state.difference,
        "untracked": sorted(state.untracked),
        "roots": import_roots(str(here), own_paths(), sys.meta_path),
    }
    return CodeToSend(json.dumps(facts, sort_keys=True).encode(), contents, _paths_in(words, here, names))


def _exchange(ssh: Connection, request: Mapping[str, Any], code: CodeToSend | None, out: Any) -> int:
    """Sends what the host lacks, has the words run there, and hands on what they print; returns their exit code.

    Ctrl-C closes the input of the other end, which interrupts the words there; they say how they end.
    """
    process = ssh.start_request(request, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    stdin: Any = process.stdin
    stdout: Any = process.stdout
    # The other end may have ended.
    with contextlib.suppress(BrokenPipeError), process:
        if code is not None:
            stdin.write(code.header)
            stdin.flush()
        if (version := _read_reply(stdout).get("version", __version__)) != __version__:
            note(
                f"{ssh.host} has slurm_train {version}, here is {__version__}; to have the same: "
                f"python -m slurm_train --on {ssh.host} init"
            )
        reply = {} if code is None else _read_reply(stdout)
        if absent := reply.get("absent"):
            raise ConfigError(
                f"{', '.join(absent)}: on this machine alone; {ssh.host} has no such file, and it is no code",
                hint=f"copy it there once (rsync -a {absent[0]} {ssh.host}:...), and type its path there",
            )
        for digest in reply.get("missing", ()):
            assert code is not None
            stdin.write(code.contents[digest])
        stdin.flush()
        if request["outputs"]:
            _take_outputs(stdout, request["outputs"])
        while True:
            try:
                for data in iter(lambda: stdout.read1(1 << 16), b""):
                    out.write(data)
                    out.flush()
                break
            except KeyboardInterrupt:
                stdin.close()
    return ssh.require_answer(process.wait())


def _paths_in(words: Sequence[str], here: Path, names: Sequence[str]) -> list[str]:
    """Returns the files and folders of this machine that words name and that are not among the files that are sent."""
    sent = {*names, *(str(parent) for name in names for parent in PurePosixPath(name).parents)}
    texts = [text for word in words for text in re.split(r"[=,\[\]{}]", word) if text]
    found = [text for text in texts if "/" in text or (here / text).is_file()]
    is_here = [text for text in found if (here / text).expanduser().exists()]
    return [text for text in dict.fromkeys(is_here) if os.path.normpath(text) not in sent]


def _read_reply(stream: Any) -> dict[str, Any]:
    for line in iter(stream.readline, b""):
        if line.startswith(_REPLY):
            reply: dict[str, Any] = json.loads(line[len(_REPLY) :])
            return reply
    return {}


# --- here: what a verb writes is brought back ---


def _outputs_of(words: Sequence[str]) -> dict[str, str]:
    """Returns where what the words write is to lie here, by its name in the folder from which it is fetched."""
    if words[:1] == ["report"]:
        arguments = parse("report", words[1:])
        page = {"report.html": arguments.out or f"report-{Path(arguments.what or 'newest').name}.html"}
        return page | ({"png": arguments.png} if arguments.png else {})
    if words[:1] == ["collate"] and (out := parse("collate", words[1:]).out):
        return {Path(out).name: out}
    if words[:2] == ["checkpoint", "export"]:
        target = parse("checkpoint", words[1:]).target
        return {Path(target).name: target}
    return {}


def _take_outputs(stream: Any, outputs: Mapping[str, str]) -> None:
    """Prints what the words have printed, and puts the files that they have written in their places here."""
    print(_read_reply(stream).get("text", ""), end="")
    parent = Path(next(iter(outputs.values()))).resolve().parent
    with tempfile.TemporaryDirectory(dir=parent, prefix=".fetched-") as place:
        with tempfile.TemporaryFile(dir=place) as fetched:
            shutil.copyfileobj(stream, fetched)
            # Its names cannot lead out of the folder, and its entries are files. It is empty where the words failed.
            if fetched.tell():
                ZipFile(fetched).extractall(place)
        for name, target in outputs.items():
            if Path(place, name).exists():
                if Path(target).is_dir():
                    remove_tree(Path(target))
                Path(place, name).replace(target)


# --- here: the host's own environment is made ---


def _install(ssh: Connection, words: Sequence[str]) -> list[str]:
    """Installs this version on the host, in an environment of its own; returns the words that go on there."""
    words = list(words)
    python = ""
    if "--python" in words[:-1]:
        at = words.index("--python")
        python = words[at + 1]
        del words[at : at + 2]
    with tempfile.TemporaryDirectory() as place:
        wheel = _write_wheel(Path(place))
        note(f"sending {wheel.name} to {ssh.host}")
        sending = ssh.start(
            f"exec sh -c 'mkdir -p -m 700 ~/.slurm_train && cat > ~/.slurm_train/{wheel.name}'", stdin=subprocess.PIPE
        )
        with contextlib.suppress(BrokenPipeError):
            sending.communicate(wheel.read_bytes())
        ssh.require_answer(sending.returncode)
    note("installing it there, with torch where the site has none: minutes")
    script = _INSTALL.replace("@PYTHON@", "'" + python.replace("'", "'\\''") + "'").replace("@WHEEL@", wheel.name)
    installing = ssh.start("exec bash -ls", stdin=subprocess.PIPE)
    installing.communicate(script.encode())
    ssh.require_answer(installing.returncode)
    if installing.returncode:
        raise RunError(f"nothing was installed on {ssh.host}, see above", hint="type the same command again")
    return words


def _write_wheel(folder: Path) -> Path:
    """Writes the wheel of this version, from the sources of an editable installation or from the installed files."""
    installed = distribution("slurm_train")
    source = json.loads(installed.read_text("direct_url.json") or "{}")
    if source.get("dir_info", {}).get("editable"):
        path = source["url"].removeprefix("file://")
        words = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "--wheel-dir", str(folder), path]
        if subprocess.run(words, check=False, stdout=sys.stderr).returncode:
            raise RunError(f"no wheel of {path} can be built, see above", hint="pip install --upgrade pip")
        return next(folder.glob("*.whl"))
    wheel = folder / f"slurm_train-{installed.version}-py3-none-any.whl"
    with ZipFile(wheel, "w") as archive:
        for file in installed.files or ():
            if (
                ".." not in file.parts
                and "__pycache__" not in file.parts
                and file.name not in ("INSTALLER", "direct_url.json")
            ):
                archive.write(str(installed.locate_file(file)), str(file))
    return wheel


# --- there ---


def answer_request(words: Sequence[str]) -> int:
    """Does what `--on` of another machine asks for, by its first word; returns the exit code."""
    request = json.loads(base64.urlsafe_b64decode(words[0]))
    has_terminal = request.get("has_terminal", False)
    if not has_terminal:
        _reply(version=__version__)
    folder = Path(request["folder"]).expanduser()
    (folder / DEFAULT_ROOT).mkdir(parents=True, exist_ok=True)
    if not is_own_folder(folder):
        raise RunError(f"{folder} belongs to another user", hint="name a folder of yours: --on HOST:FOLDER")
    place, typed = folder, request["words"]
    has_code = "tree" in request
    if has_code:
        place = folder / "trees" / request["tree"]
        typed = _with_root(typed, folder / DEFAULT_ROOT)
        if not has_terminal and (not _receive(place, request) or request.get("only_receives")):
            return EXIT_DONE
    os.chdir(place)
    roots = (read_json(place / SENT_FILE, writers=trusted_owners()) or {})["roots"] if has_code else []
    # As a Python that is started there has it.
    sys.path[:1] = [str(place), *(str(place / root) for root in roots if root)]
    os.environ["PWD"] = str(place)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [*sys.path[: 1 + len(roots)], os.environ.get("PYTHONPATH")])
    )
    if request["outputs"]:
        return _write_outputs(typed, request["outputs"])
    command = f"{COMMAND} --on {shlex.quote(request['on'])}"
    return run(typed, command=command) if has_terminal else _run_until_hung_up(typed, command=command)


def _with_root(words: Sequence[str], root: Path) -> list[str]:
    """Returns the words with the place of new runs, which is beside the trees, unless they name one."""
    verb = VERBS.get(words[0]) if words else None
    if (verb is not None and verb.settings == "after") or any(word.startswith("run.root=") for word in words):
        return list(words)
    return [*words, f"run.root={root}"]


def _run_until_hung_up(words: Sequence[str], *, command: str) -> int:
    """Runs words in processes that the end of this one's input interrupts, as Ctrl-C at the other end makes it."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setpgrp()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        return run(words, command=command)

    def interrupt_at_end() -> None:
        while os.read(0, 4096):
            pass
        os.killpg(child, signal.SIGINT)

    threading.Thread(target=interrupt_at_end, daemon=True).start()
    return _exit_code(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _exit_code(returned: int) -> int:
    """Returns what a shell makes of a signal."""
    return returned if returned >= 0 else 128 - returned


def _write_outputs(words: Sequence[str], outputs: Mapping[str, str]) -> int:
    """Runs words that write files; sends what they print, and the files as a zip archive, to stdout."""
    with tempfile.TemporaryDirectory(prefix="slurm_train-") as place:
        if words[0] == "checkpoint":
            typed = [f"{place}/{Path(word).name}" if word in outputs.values() else word for word in words]
        else:
            flags = [word for name in outputs for word in ("--png" if name == "png" else "--out", f"{place}/{name}")]
            typed = [*words, *flags]
        command = [sys.executable, "-m", "slurm_train", *typed]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
        text = done.stdout.decode(errors="replace")
        for name, target in outputs.items():
            text = text.replace(f"{place}/{name}", target)
        _reply(text=text)
        files = list(filter(Path.is_file, Path(place).rglob("*")))
        if files:
            with ZipFile(sys.stdout.buffer, "w") as archive:
                for file in files:
                    archive.write(file, file.relative_to(place))
        return _exit_code(done.returncode)


def _reply(**facts: Any) -> None:
    sys.stdout.buffer.write(b"\n" + _REPLY + json.dumps(facts).encode() + b"\n")
    sys.stdout.buffer.flush()


def _receive(tree: Path, request: Mapping[str, Any]) -> bool:
    """Takes the files of a tree that no recent one has, and gives the tree its name when all of it is there.

    Returns:
        Whether it did; not where the words name files that are on the other machine alone.
    """
    stdin = sys.stdin.buffer
    header = _read_exactly(stdin, request["num_header_bytes"])
    files: dict[str, tuple[str, int, int]] = json.loads(header)["files"]
    tree.parent.mkdir(exist_ok=True, mode=0o700)
    absent = [path for path in request["paths"] if not (tree / path).expanduser().exists()]
    is_there = tree.is_dir() and len(_whole_files(tree)) == len(files)
    present = _present(tree.parent) if not is_there else {}
    sizes = {digest: size for digest, size, mode in files.values() if (digest, mode) not in present}
    missing = [] if is_there or absent else list(sizes)
    _reply(missing=missing, absent=absent)
    if absent:
        return False
    received = {digest: _read_exactly(stdin, sizes[digest]) for digest in missing}
    if any(hashlib.sha256(data).hexdigest() != digest for digest, data in received.items()):
        raise RunError("a file has arrived changed", hint="type the same command again")
    if not is_there:
        part = Path(tempfile.mkdtemp(dir=tree.parent, prefix=_PART))
        for folder in {(part / name).parent for name in files}:
            folder.mkdir(parents=True, exist_ok=True)
        for name, (digest, _, mode) in files.items():
            content = present[digest, mode] if (digest, mode) in present else received[digest]
            _make_file(part / name, content, 0o400 | mode)
        (part / SENT_FILE).write_bytes(header)
        (part / DEFAULT_ROOT).symlink_to(Path("..", "..", DEFAULT_ROOT))
        _give_name(part, tree, num_files=len(files))
    os.utime(tree)
    _remove_unused(tree.parent)
    return True


def _read_exactly(stream: BinaryIO, num_bytes: int) -> bytes:
    data = stream.read(num_bytes)
    if len(data) != num_bytes:
        raise RunError("the connection ended before all files were here", hint="type the same command again")
    return data


def _present(trees: Path) -> dict[tuple[str, int], Path]:
    """Returns the files of the trees that were used last, by hash and mode."""
    recent = sorted(trees.iterdir(), key=lambda tree: tree.stat().st_mtime)[-_MOST_SEARCHED:]
    return {kind: tree / name for tree in recent for name, kind in _whole_files(tree).items()}


def _whole_files(tree: Path) -> dict[str, tuple[str, int]]:
    """Returns hash and mode of the files of a tree that are as they were written: as long, and read-only."""
    files = (read_json(tree / SENT_FILE, writers=trusted_owners()) or {}).get("files", {})
    whole: dict[str, tuple[str, int]] = {}
    for name, (digest, size, mode) in files.items():
        with contextlib.suppress(OSError):
            status = (tree / name).lstat()
            if status.st_size == size and not status.st_mode & 0o222:
                whole[name] = (digest, mode)
    return whole


def _make_file(path: Path, content: bytes | Path, mode: int) -> None:
    """Writes a file, or makes a link to one, where the file system has links."""
    if isinstance(content, Path):
        with contextlib.suppress(OSError):
            os.link(content, path)
            return
        content = content.read_bytes()
    path.write_bytes(content)
    path.chmod(mode)


def _give_name(part: Path, tree: Path, *, num_files: int) -> None:
    with contextlib.suppress(OSError):
        part.rename(tree)
        return
    # Another command was faster, or somebody has changed the tree.
    if len(_whole_files(tree)) == num_files:
        remove_tree(part)
        return
    tree.rename(tempfile.mkdtemp(dir=tree.parent, prefix=_PART))
    part.rename(tree)


def _remove_unused(trees: Path) -> None:
    """Removes what nobody has used for long, and what commands that were cut off have left.

    A job begins in the folder that it was submitted from, so trees that runs name stay.
    """
    old_s = time.time() - _KEPT_S
    old = [tree for tree in trees.iterdir() if tree.stat().st_mtime < old_s]
    plans = (trees.parent / DEFAULT_ROOT).glob("*/*/provenance.json") if old else ()
    used = {(read_json(plan) or {}).get("directory") for plan in plans}
    for tree in old:
        if str(tree) not in used:
            remove_tree(tree)
