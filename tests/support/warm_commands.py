"""Command lines without the seconds that importing torch takes: each is a process forked from one that has imported it.

What a person types runs in a process of its own, in their folder and environment; the ranks that it starts on this
machine are forked as well. That cold interpreters get there is seen by tests/end_to_end/test_main_path_here.py and
wherever a `Person` types.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from slurm_train.rundir.paths import RunDirectory
from slurm_train.supervise import main as attempts
from slurm_train.supervise import ranks
from slurm_train.supervise.ranks import LocalRanks
from tests.support.command_line import Done, Person
from tests.support.warm_ranks import WarmRank, fork_server, start_rank

_PROGRAM = Path(__file__)


@dataclass(frozen=True, slots=True)
class WarmPerson(Person):
    """Somebody who types command lines in a folder, as the user who runs the tests and with their Python.

    Args:
        imports: modules that each process finds imported beside torch.
    """

    imports: tuple[str, ...] = ()

    def types(self, *words: str, timeout_s: float = 120.0, env: dict[str, str] | None = None) -> Done:
        """Runs `python -m slurm_train WORDS` to its end."""
        with tempfile.TemporaryDirectory(prefix="typed-") as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            process = self.begins(*words, log=out, errors=err, env=env)
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
            return Done(code, out.read_text(), err.read_text())

    def begins(self, *words: str, log: Path, errors: Path | None = None, env: dict[str, str] | None = None) -> WarmRank:
        """Starts `python -m slurm_train WORDS` and returns at once.

        Args:
            words: the command line.
            log: what it prints is appended there.
            errors: where its stderr is appended, if not to the log.
            env: variables beside those of the person.
        """
        environment = self.environment() | (env or {})
        orders = ("type", str(self.folder), *words)
        return start_rank(_PROGRAM, *orders, env=environment, log=log, errors=errors, imports=self.imports)


def _type_words(folder: str, words: Sequence[str]) -> int:
    from slurm_train.verbs import run

    _enter(folder)
    fork_server()
    attempts.start_local = _start_ranks
    return run(words)


def _start_ranks(
    command: Sequence[str], *, run: RunDirectory, attempt: int, num_ranks: int, env: Mapping[str, str]
) -> LocalRanks:
    """Starts the ranks as `start_local` does."""
    if list(command[:4]) != [sys.executable, "-m", "slurm_train", "worker"]:
        return ranks.start_local(command, run=run, attempt=attempt, num_ranks=num_ranks, env=env)
    size = str(num_ranks)
    folder = run.code if run.code.is_dir() else Path.cwd()
    started: list[Any] = []
    for rank in range(num_ranks):
        number = str(rank)
        place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": "0"}
        log = run.rank_log(attempt, rank)
        log.touch()
        # Rank 0 prints where this process does.
        out = Path(f"/proc/{os.getpid()}/fd/1") if rank == 0 else log
        err = Path(f"/proc/{os.getpid()}/fd/2") if rank == 0 else log
        words = ("work", str(folder), *command[4:])
        started.append(start_rank(_PROGRAM, *words, env={**env, **place}, log=out, errors=err))
    return LocalRanks(started)


def _work(folder: str, words: Sequence[str]) -> NoReturn:
    from slurm_train.worker.main import main

    _enter(folder)
    os.setsid()
    main(words)


def _enter(folder: str) -> None:
    """Makes this process as one that was started in the folder by `python -m`."""
    os.chdir(folder)
    python_path = os.environ.get("PYTHONPATH", "")
    sys.path[:1] = [folder, *filter(None, python_path.split(os.pathsep))]


if __name__ == "__main__":
    role, folder, *words = sys.argv[1:]
    if role == "work":
        _work(folder, words)
    sys.exit(_type_words(folder, words))
