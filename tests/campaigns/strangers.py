"""A root that everybody may write to, and a stranger who makes first whatever name is read there. As root.

A user's commands are typed in a clean world and in one where the stranger has made something. The answers are equal, in
time, and the user's processes leave nothing where the stranger put traps. The stranger's runs carry the id of the
user's run, the job of the user's run, and files that name the user's runs, links and programs of the stranger.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import random
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from slurm_train.rundir.events import BAD_NODES_FILE
from slurm_train.rundir.paths import Below, RunDirectory
from slurm_train.rundir.sweep import ArrayDirectory, SweepDirectory
from slurm_train.verbs import VERBS
from slurm_train.verbs import run as run_words
from tests.campaigns.record import Tally
from tests.fakes.slurm_programs import SlurmPrograms
from tests.support.run_files import add_lines
from tests.support.small_checkpoints import make_checkpoint
from tests.support.users import ME, STRANGER, UserWork, as_user

_WITHIN_S = 60.0
_JOB = "4711"
_NEW = ("script=[train.py]", "+cluster=1x1")


class Outcome(NamedTuple):
    """What a command line has given."""

    code: int
    out: str


class World:
    """A shared root, a user with a run in it, and a stranger; each has a folder, and the stranger traps.

    Args:
        folder: an empty one, where nobody else may rename.
        me: uid of the user.
    """

    def __init__(self, folder: Path, *, me: int = ME) -> None:
        self.me = me
        self.folder, self.root, self.home = folder / "site", folder / "site" / "runs", folder / "site" / "home"
        self.trap, self.precious = folder / "site" / "trap", folder / "site" / "home" / "precious"
        self.folder.mkdir(mode=0o755)
        for path, uid, mode in ((self.root, 0, 0o1777), (self.home, me, 0o755), (self.trap, STRANGER, 0o777)):
            path.mkdir()
            os.chown(path, uid, uid)
            path.chmod(mode)
        self.slurm = SlurmPrograms(self.folder / "bin")
        self.precious.write_text("precious")
        (self.home / "train.py").write_text("print('mine')\n")
        (self.home / "score.py").write_text("print('{}')\n")
        for path in (self.home, self.slurm.folder):
            subprocess.run(["chown", "-R", f"{me}:{me}", str(path)], check=True)
        submitted = self.types("run.name=gpt", *_NEW)
        assert submitted.code == 0, submitted
        self.run = RunDirectory(next(self.root.glob("@*/gpt/*")))
        self.as_me(self._fill)
        self._kept = folder / "kept"
        shutil.rmtree(self._kept, ignore_errors=True)
        subprocess.run(["cp", "-a", str(self.folder), str(self._kept)], check=True)

    def _fill(self) -> None:
        """Leaves what an attempt leaves that was stopped."""
        start = {"event": "start", "attempt": 0, "time_unix_s": 10.0, "job_id": _JOB, "restart_count": 0}
        end = {
            "event": "end",
            "attempt": 0,
            "time_unix_s": 20.0,
            "reason": "stopped",
            "action": "stop",
            "note": "asked",
        }
        add_lines(self.run.attempts, (start, end))
        add_lines(self.run.metrics, ({"step": 3, "loss": 1.0, "attempt": 0},))
        for folder in (self.run.epochs, self.run.attempt_logs(0)):
            folder.mkdir(mode=0o700)
        (self.run.epochs / "attempt_0").write_text("{}")
        self.run.rank_log(0, 0).write_text("mine\n")
        for step in (1, 2, 3):
            make_checkpoint(self.run.checkpoints, step, attempt=0)

    def restore(self) -> None:
        """Puts everything back as it was before the stranger and the commands."""
        shutil.rmtree(self.folder)
        subprocess.run(["cp", "-a", str(self._kept), str(self.folder)], check=True)

    def as_me(self, work: Callable[[], object]) -> None:
        """Does something as the user."""
        as_user(self.me, lambda: work() and None)

    def types(self, *words: str) -> Outcome:
        """Runs a command line of the user to its end, within a minute."""
        code, out = UserWork(self.me, partial(self._type, words)).result(within_s=_WITHIN_S)
        return Outcome(code, re.sub(r"\d+(?:\.\d+)?", "#", out.replace(str(STRANGER), "STRANGER")))

    def _type(self, words: Sequence[str]) -> tuple[int, str]:
        os.chdir(self.home)
        os.environ.clear()
        os.environ.update({"PATH": f"{self.slurm.folder}:/usr/bin:/bin", "HOME": str(self.home), "USER": "me"})
        names_run = words[0] in VERBS and words[0] != "plan"
        root = ["--root", str(self.root)] if names_run else [f"run.root={self.root}"]
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
        errors = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            try:
                code = run_words([*words, *root])
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
        # Of a refusal, what was refused: on stdout there is nothing.
        refused = [line for line in errors.getvalue().splitlines() if line.startswith("error: ")]
        out.seek(0)
        return code, out.read() + "\n".join(refused)


class WarmWorld(World):
    """A world of root's in which commands are typed in this process, so that it has all modules that they need.

    Modules of a Python in root's home can be imported as root alone.
    """

    def types(self, *words: str) -> Outcome:
        """Runs a command line in this process."""
        before = (Path.cwd(), dict(os.environ))
        try:
            return Outcome(*self._type(words))
        finally:
            os.chdir(before[0])
            os.environ.update(before[1])


# --- what the user types ---


def _cancel(world: World) -> Outcome:
    world.slurm.queue(_JOB, "PENDING")
    done = world.types("cancel", "gpt")
    return done._replace(out=f"{done.out}{world.slurm.said('cancelled')}")


COMMANDS: dict[str, Callable[[World], Outcome]] = {
    "status": lambda world: world.types("status", "--json", "gpt"),
    "status of all": lambda world: Outcome(world.types("status").code, ""),
    "logs": lambda world: world.types("logs", world.run.run_id),
    "report": lambda world: Outcome(world.types("report", "gpt", "--out", f"{world.home}/page.html").code, ""),
    "checkpoint ls": lambda world: world.types("checkpoint", "ls", world.run.run_id[:6]),
    "checkpoint verify": lambda world: world.types("checkpoint", "verify", "gpt"),
    "checkpoint gc": lambda world: world.types("checkpoint", "gc", "--keep", "2", "gpt"),
    "plan": lambda world: world.types("plan", "run.name=gpt", *_NEW),
    "evaluate": lambda world: world.types("evaluate", "--follow", "gpt", "--with", "script=[score.py]", "+cluster=1x1"),
    "resume": lambda world: world.types("resume", "gpt"),
    "resume by its job": lambda world: world.types("resume", _JOB),
    "cancel": _cancel,
    "submit": lambda world: world.types("run.name=new", *_NEW),
    "submit a sweep": lambda world: world.types("run.name=new", "seed=1,2", "-m", *_NEW),
}


# --- what the stranger makes ---


def _names_of(kind: type) -> list[str]:
    return sorted(value._name for value in vars(kind).values() if isinstance(value, Below))


_IN_RUN = [
    *_names_of(RunDirectory),
    *("logs/attempt_0", "logs/attempt_0/rank_0.log", "epochs/attempt_0", f"jobs/{_JOB}", "events@node.jsonl"),
    *("evaluations/eeee", "checkpoints/checkpoint_0000009_attempt_0000_aaaaaaaa", "checkpoints/pinned_aaaaaaaa_eeee"),
]
_IN_SWEEP = [*_names_of(SweepDirectory), ".lock"]
_IN_ARRAY = [f"arrays/000/{name}" for name in _names_of(ArrayDirectory)]
_IN_ROOT = [
    *(BAD_NODES_FILE, "bad_nodes@node.jsonl", ".submitting_sweeps", ".submitting_sweeps/lock", "sweeps", "new", "gpt"),
    *(".doctor", "mlflow.db", "runs.txt", "plan.json", "config.yaml"),
]


def all_names(world: World) -> list[str]:
    """Returns each name below the root that a stranger can make first and some command reads."""
    run_id = world.run.run_id
    return [
        *_IN_ROOT,
        *(f"aaa/{run_id}/{name}" for name in _IN_RUN),
        *(f"@{STRANGER}/gpt/{run_id}/{name}" for name in _IN_RUN),
        *(f"sweeps/{run_id}/{name}" for name in [*_IN_SWEEP, *_IN_ARRAY]),
        *(f"@{STRANGER}/sweeps/{run_id}/{name}" for name in [*_IN_SWEEP, *_IN_ARRAY]),
        # The places of the user's own that are not made yet.
        f"{own_place_name(world)}.1",
        f".environments_{world.me}",
    ]


def own_place_name(world: World) -> str:
    """Returns the name of the user's folder in the root."""
    return world.run.path.parent.parent.name


def _hostile_text(world: World, path: Path) -> str:
    """Returns what steers most if it is believed: the user's run and job, a program and a link of the stranger's."""
    link = world.trap / "link"
    own = f"../{os.path.relpath(world.run.path, world.root)}"
    facts = {
        "path": f"{link}/{os.path.relpath(path.parent, world.root)}",
        "run": own,
        "index": 0,
        "job_ids": [_JOB],
        "job_id": _JOB,
        "directory": str(world.trap),
        "config_hash": world.run.run_id + "f" * 52,
        "script": ["steal.py"],
        "event": "start",
        "attempt": "none",
        "node": "node1",
        "until_unix_s": 4e9,
        "max_steps": "many",
        "loss": "x",
        "host": "vm",
        "pid": 1,
        "started": "1",
        "submit_time_unix_s": 5e9,
    }
    return f"{world.run.path}\n" if path.suffix == ".txt" else json.dumps(facts) + "\n"


def _write(world: World, path: Path) -> None:
    path.write_text(_hostile_text(world, path))


def _close(world: World, path: Path) -> None:
    _write(world, path)
    path.chmod(0)


def _closed_folder(_: World, path: Path) -> None:
    path.mkdir(mode=0)


def _endless(_: World, path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def _lock(world: World, path: Path) -> None:
    _write(world, path)
    path.chmod(0o666)
    fcntl.flock(os.open(path, os.O_RDWR), fcntl.LOCK_EX)


KINDS: dict[str, Callable[[World, Path], object]] = {
    "a file": _write,
    "a folder": lambda _, path: path.mkdir(mode=0o777),
    "a closed folder": _closed_folder,
    "a link to the user's run": lambda world, path: path.symlink_to(world.run.path),
    "a link to a file of the user's": lambda world, path: path.symlink_to(world.precious),
    "a link to a trap": lambda world, path: path.symlink_to(world.trap),
    "a link to nothing": lambda world, path: path.symlink_to(world.trap / "made"),
    "a named pipe": lambda _, path: os.mkfifo(path, 0o666),
    "a file nobody may read": _close,
    "a file without end": _endless,
    "a locked file": _lock,
}


@contextmanager
def planted(world: World, name: str, kind: str) -> Iterator[None]:
    """Has the stranger make something, with all around it as in a run or sweep, for as long as the body takes."""
    told, teller = os.pipe()
    end, keep = os.pipe()

    def plant() -> None:
        os.close(keep)
        os.umask(0)
        (world.trap / "link").symlink_to(world.root)
        (world.trap / "steal.py").write_text("open('stolen', 'w')\n")
        path = world.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for other in _around(path):
            _write(world, other)
        KINDS[kind](world, path)
        os.write(teller, b"1")
        # A lock lasts as long as this process, which goes on until the other side closes.
        os.read(end, 1)

    stranger = UserWork(STRANGER, plant)
    for descriptor in (teller, end):
        os.close(descriptor)
    try:
        if not os.read(told, 1):
            stranger.result()
        yield
    finally:
        for descriptor in (told, keep):
            os.close(descriptor)
        stranger.end()


def _around(path: Path) -> list[Path]:
    """Returns the files that make a run or a sweep of the folder in which a name lies, if it is in one."""
    for folder in path.parents:
        if folder.parent.name == "sweeps":
            return [file for file in (folder / "sweep.jsonl",) if file != path]
        if folder.parent.name in ("aaa", "gpt"):
            files = (folder / name for name in ("config.yaml", "plan.json", "job.json"))
            return [file for file in files if file != path]
    return []


def try_one(world: World, name: str, kind: str, commands: Sequence[str], expected: Mapping[str, Outcome]) -> list[str]:
    """Returns what is wrong with the answers to some commands while something of the stranger's is there."""
    problems = []
    with planted(world, name, kind):
        for command in commands:
            try:
                outcome = COMMANDS[command](world)
            except (TimeoutError, AssertionError) as err:
                problems.append(f"{command}: {err}")
                continue
            if outcome != expected[command]:
                problems.append(f"{command} gave {outcome}, not {expected[command]}"[:600])
    problems += [f"{path} is the user's" for path in _left_by(world.me, world)]
    if world.precious.read_text() != "precious":
        problems.append("a file behind a link was changed")
    return problems


def _left_by(uid: int, world: World) -> list[Path]:
    """Returns what a user has made where the stranger put traps."""
    theirs = [
        world.trap,
        *(path for path in world.root.iterdir() if path.lstat().st_uid == STRANGER and not path.is_symlink()),
    ]
    left = []
    for place in theirs:
        for folder, folders, files in os.walk(place):
            paths = [Path(folder), *(Path(folder, name) for name in [*folders, *files])]
            left += [path for path in paths if path.lstat().st_uid == uid]
    return left


def outcomes(world: World) -> dict[str, Outcome]:
    """Returns what each command gives where no stranger is, each from the same beginning."""
    expected = {}
    for command, work in COMMANDS.items():
        expected[command] = work(world)
        world.restore()
    return expected


@contextmanager
def prepared_world() -> Iterator[tuple[World, dict[str, Outcome]]]:
    """Gives a world below /tmp, and what the commands give in it without a stranger."""
    assert os.geteuid() == 0, "it takes root to be several users"
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="strangers-") as name:
        outcomes(WarmWorld(Path(name), me=0))
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="strangers-") as name:
        os.chmod(name, 0o755)  # noqa: PTH101
        world = World(Path(name))
        yield world, outcomes(world)


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Runs the trials: names and kinds in a random order, each with some commands of different sorts."""
    del folder
    chance = random.Random(seed)
    with prepared_world() as (world, expected):
        pairs = [(name, kind) for name in all_names(world) for kind in KINDS]
        chance.shuffle(pairs)
        num_answers = 0
        for number in range(trials):
            name, kind = pairs[number % len(pairs)]
            commands = chance.sample(list(COMMANDS), 2)
            problems = []
            for command in commands:
                problems += try_one(world, name, kind, [command], expected)
                world.restore()
                num_answers += 1
            tally.add(f"{name} is {kind}; {', '.join(commands)}", problems)
    return {"names times kinds": str(len(pairs)), "commands answered as without a stranger": str(num_answers)}
