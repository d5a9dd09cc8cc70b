"""A user's own script on every rank, unmodified: it gets the variables that torchrun would set. Imports no torch.

The script replaces the process of the worker, so signals, exit code and log are its own; `script_main` runs it.
"""

from __future__ import annotations

import contextlib
import errno
import filecmp
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from slurm_train.config.schema import RunConfig
from slurm_train.data.workers import cpus_of_rank
from slurm_train.distributed.place import RankPlace
from slurm_train.errors import ConfigError
from slurm_train.plan.script_words import file_command
from slurm_train.rundir.paths import RunDirectory
from slurm_train.session.client import RANK_STEP, RUN_DIR
from slurm_train.session.signals import StopFlag, leave_to_program
from slurm_train.slurm.job_variables import step_id
from slurm_train.worker.hydra_folder import hydra_folder_word
from slurm_train.worker.own_resume import own_resume_words

_NUM_THREADS = "OMP_NUM_THREADS"
_RUN_DIR_IN_WORD = re.compile(rf"\${RUN_DIR}\b")
_RUNNER = Path(__file__).with_name("script_main.py")


def run_script(
    config: RunConfig,
    *,
    place: RankPlace,
    env: Mapping[str, str],
    code_dir: Path,
    run: RunDirectory,
    attempt: int,
    stop: StopFlag,
) -> NoReturn:
    """Replaces this process by the script; if a signal has asked for a stop before, the process ends by it instead.

    Args:
        config: of the run; its `script` is e.g. ["train.py", "--epochs", "3"], or a program on the PATH.
        place: this rank.
        env: environment; it has MASTER_ADDR and MASTER_PORT already.
        code_dir: directory of the code; a relative script is searched here first, then in the working directory.
        run: the run, whose copy of the code the script imports from.
        attempt: number of the attempt.
        stop: set by the handlers of this process.

    Raises:
        ConfigError: there is no such script, it cannot be started, or MASTER_ADDR or MASTER_PORT is not set.
        RunError: its own resume cannot be used, see `own_resume_words`.
    """
    words = config.script or []
    command = script_command(words, code_dir=code_dir, run=run)
    pattern = in_run(config.own_resume.checkpoints or "", run)
    command += own_resume_words(config.own_resume.words, pattern, place=place, run=run, attempt=attempt)
    folder_word = _hydra_word(words, code_dir=code_dir, run=run)
    if folder_word:
        command.append(folder_word)
        if place.is_first:
            print(f"slurm_train: the script is a Hydra application, and gets {folder_word}", file=sys.stderr)
    edited = edited_arguments(words, code_dir=code_dir, folder=Path.cwd())
    if edited and place.is_first:
        print(
            f"slurm_train: {', '.join(edited)} changed since the submission; where the program reads it, it is the "
            f"present file in {Path.cwd()}; the run's copy is in the folder of the script (`__file__`)",
            file=sys.stderr,
        )
    sys.stdout.flush()
    sys.stderr.flush()
    variables = script_env(place, env, code_dir=code_dir, run=run)
    leave_to_program(stop)
    try:
        os.execve(command[0], command, variables)
    except OSError as err:
        if err.errno != errno.ENOEXEC:
            raise
        # It names no interpreter; a shell would run it itself.
        os.execve(shutil.which("bash") or "/bin/sh", ["bash", *command], variables)


def script_env(place: RankPlace, env: Mapping[str, str], *, code_dir: Path, run: RunDirectory) -> dict[str, str]:
    """Returns the environment of a script on a rank.

    Raises:
        ConfigError: MASTER_ADDR or MASTER_PORT is missing.
    """
    # Modules that a user's file imports from its own folder must come from the same snapshot.
    python_path = os.pathsep.join(filter(None, (str(code_dir), env.get("PYTHONPATH", ""))))
    variables = torchrun_env(place, env)
    variables |= {RUN_DIR: str(run.path), RANK_STEP: step_id(env), "PYTHONPATH": python_path}
    # A program that a signal ends, e.g. by a segmentation fault, then writes its Python stacks into its rank's log.
    variables.setdefault("PYTHONFAULTHANDLER", "1")
    # A Python that a shell or another environment starts would keep the last lines of a killed program to itself.
    variables.setdefault("PYTHONUNBUFFERED", "1")
    if place.local_world_size > 1:
        # If Slurm does not bind tasks, each rank would start a thread for every CPU of the node; torchrun sets 1.
        variables.setdefault(_NUM_THREADS, str(max(1, cpus_of_rank(env, ranks_on_node=place.local_world_size))))
    return variables


def script_command(words: Sequence[str], *, code_dir: Path, run: RunDirectory) -> list[str]:
    """Returns the command line: a Python file or module under this interpreter, anything else as it is.

    `$SLURM_TRAIN_RUN_DIR` in an argument becomes the directory of the run, whose name follows from the words.

    Raises:
        ConfigError: the list is empty, or names nothing that exists.
    """
    if not words:
        raise ConfigError("script=[] names no script", hint="script=[train.py,--flag]")
    name = words[0]
    runner = [sys.executable, "-u", str(_RUNNER), str(run.path)]
    arguments = [in_run(word, run) for word in words[1:]]
    if name == "-m":
        return [*runner, name, *arguments]
    if name.endswith(".py"):
        for base in (code_dir, Path.cwd()):
            if (base / name).is_file():
                return [*runner, str(base / name), *arguments]
        raise ConfigError(
            f"script={name}: no such file in {code_dir} or {Path.cwd()}", hint="give a path from where you submit"
        )
    program = shutil.which(name)
    if program is None:
        # A name without a folder is looked for on the PATH first, as a shell does, then as a Python file is.
        file = next((base / name for base in (code_dir, Path.cwd()) if (base / name).is_file()), None)
        if file is not None:
            first, *others = file_command(file)
            return [shutil.which(first) or first, *others, *arguments]
    if program is None:
        raise ConfigError(f"script={name}: no such program on PATH", hint="a Python script's name ends in .py")
    return [program, *arguments]


def in_run(word: str, run: RunDirectory) -> str:
    """Returns a word with the directory of the run in the place of `$SLURM_TRAIN_RUN_DIR`."""
    return _RUN_DIR_IN_WORD.sub(lambda _: str(run.path), word)


def _hydra_word(words: Sequence[str], *, code_dir: Path, run: RunDirectory) -> str:
    """Returns the word that gives a Hydra application a folder of the run, "" for other programs."""
    is_module = words[0] == "-m"
    name = words[1].replace(".", "/") if is_module else words[0]
    files = [f"{name}.py", f"{name}/__main__.py"] if is_module else [name]
    candidates = [base / file for base in (code_dir, Path.cwd()) for file in files if file.endswith(".py")]
    script = next((file for file in candidates if file.is_file()), None)
    if script is None:
        return ""
    return hydra_folder_word(script, words[2 if is_module else 1 :], run.path / "out")


def edited_arguments(words: Sequence[str], *, code_dir: Path, folder: Path) -> list[str]:
    """Returns the files that arguments name and that differ from the run's copy, e.g. ["config/train.py"].

    Args:
        words: the script and its arguments, e.g. ["train.py", "--config=config/train.yaml"].
        code_dir: the copy.
        folder: where the program looks for relative paths.
    """
    edited = []
    for name in (name for word in words[1:] for name in (word, word.partition("=")[2]) if name):
        copy = code_dir / name
        present = folder / name
        # Most words name no file, and some no path. An absolute path is the same one twice.
        with contextlib.suppress(OSError, ValueError):
            if copy.is_file() and present.is_file() and not filecmp.cmp(copy, present, shallow=False):
                edited.append(name)
    return edited


def torchrun_env(place: RankPlace, env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment with the variables that torchrun sets for each process.

    Raises:
        ConfigError: MASTER_ADDR or MASTER_PORT is missing.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} not set for a script", hint="start it with python -m slurm_train script=[...]"
        )
    ranks = {
        "RANK": place.rank,
        "LOCAL_RANK": place.local_rank,
        "GROUP_RANK": place.node_rank,
        "WORLD_SIZE": place.world_size,
        "LOCAL_WORLD_SIZE": place.local_world_size,
    }
    return {**env, **{name: str(value) for name, value in ranks.items()}}
