"""The words of `script=`: what they start, and what is refused before anything is submitted.

A rank runs these words once, so a launcher among them (torchrun, srun, composer) would be started once per rank, and
each would start ranks of its own: several trainings that know nothing of each other, and the run ends well. The program
that the words start is looked for behind other programs (`uv run`, `env`, `bash -c`) and in a shell file.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

from slurm_train.code.program_source import SHELLS, shell_argument
from slurm_train.config.schema import RunConfig
from slurm_train.errors import ConfigError

_ALWAYS = (
    *("torchrun", "accelerate", "deepspeed", "horovodrun", "srun", "sbatch", "salloc"),
    *("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "prun"),
)
"""They start ranks, or jobs, whatever follows."""
_LAUNCHERS = {
    **dict.fromkeys(_ALWAYS, ""),
    # Of others, what has to follow; they start one process per GPU that they see.
    "composer": "",
    "dlrover-run": "",
    "jsrun": "",
    "aprun": "",
    "ibrun": "",
    "flux": "run|submit|alloc",
    "fabric": "run",
    "lightning": "run",
    "colossalai": "run",
    "torchx": "run",
    "ray": "start|submit|job|up|exec",
    "tune": r"run (.*\s)?--(nproc[-_]per[-_]node|nnodes)\b",
    "trl": "sft|dpo|grpo|kto|reward|rloo",
    "llamafactory-cli": "train",
    "lmf": "train",
    "axolotl": r"train\b(?!.*--launcher[ =]python)",
    "mim": r"(train|test)\b.*--launcher[ =](pytorch|slurm|mpi)",
    "xtuner": r"train\b.*--launcher[ =](pytorch|slurm|mpi)",
}
_MODULES = {
    "torch.distributed.launch": "torchrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launcher": "torchrun",
    "torch_xla.distributed.xla_dist": "torchrun",
    "accelerate": "accelerate",
    "accelerate.commands.launch": "accelerate",
    "accelerate.commands.accelerate_cli": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
    "deepspeed.launcher.launch": "deepspeed",
    "horovod.runner.launch": "horovodrun",
    "composer.cli.launcher": "composer",
    "lightning.fabric.cli": "fabric",
    "lightning_fabric.cli": "fabric",
    "torchtune._cli.tune": "tune",
    "trl.cli": "trl",
    "llamafactory.cli": "llamafactory-cli",
    "axolotl.cli.main": "axolotl",
    "ray.scripts.scripts": "ray",
}
_INSTEAD = {
    "llamafactory-cli": "script=[-m,llamafactory.launcher,CONFIG.yaml]",
    "lmf": "script=[-m,llamafactory.launcher,CONFIG.yaml]",
    "trl": "script=[-m,trl.scripts.sft,--flag] (or the other name)",
    "axolotl": "script=[-m,axolotl.cli.train,CONFIG.yaml]",
    "tune": "script=[RECIPE.py,--config,CONFIG.yaml]; `tune cp` copies a recipe",
}
"""What to type for programs whose name says nothing of the Python file behind it."""
_WRAPPERS = (
    *("uv", "uvx", "poetry", "pixi", "pdm", "hatch", "rye", "pipenv", "conda", "mamba", "micromamba"),
    *("env", "exec", "command", "nohup", "setsid", "nice", "ionice", "time", "timeout", "stdbuf", "numactl", "taskset"),
    *("nsys", "ncu", "py-spy", "strace", "apptainer", "singularity", "xvfb-run"),
)
"""Programs that start the one behind their own words."""
_WITH_VALUE = (
    *("-n", "--name", "-p", "--prefix", "--cwd", "--with", "--extra", "--group", "--project", "--directory"),
    *("--env-file", "--python", "-e", "--environment", "--manifest-path", "--package", "--index", "-o", "--output"),
    *("-C", "-t", "-k", "-s", "--signal", "-c", "-m", "--cpunodebind", "--membind", "-B", "--bind"),
)
"""Options of these whose value is the next word; "conda run -n deepspeed" names an environment."""
_PYTHON = re.compile(r"python[\d.]*")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_OF_SEVERAL_NODES = re.compile(
    r"--(nnodes|node[-_]rank|num[-_]machines|machine[-_]rank|rdzv[-_]\w+|master[-_]addr|main[-_]process[-_]ip|hostfile)\b"
)
"""Options by which the launchers of several nodes find each other: then they may make up one training."""
_PREPARES = (
    *("cd", "source", ".", "export", "unset", "module", "ml", "set", "ulimit", "eval"),
    *("mkdir", "echo", "conda", "pip"),
)
"""Commands of a shell after which the next one of the line is surely run."""
_OPENS = re.compile(r"(if|for|while|until|case|select|function)\b|.*\(\)\s*\{?$|\{$")
_CLOSES = re.compile(r"(fi|done|esac)\b|\}")
_SHELL_FILE_BYTES = 1 << 18
PLACEHOLDER = re.compile(r"\{(checkpoint|folder|step)\}")
"""In `own_resume.words`: of the newest checkpoint of the script."""


class Launcher(NamedTuple):
    """A program that starts ranks of its own."""

    name: str
    where: str
    """The shell file that starts it, e.g. "wrap.sh, line 3"; "" for the words themselves."""
    words: tuple[str, ...]
    """What follows its name."""


def check_script(config: RunConfig, cwd: Path, *, num_ranks: int) -> None:
    """Refuses words that would start several trainings, or none.

    Args:
        config: of the run.
        cwd: the folder that it is submitted from.
        num_ranks: of the run.

    Raises:
        ConfigError: they start ranks of their own, name a file that does not exist or cannot be started, or a Python
            file that this Python cannot read.
    """
    words = config.script or []
    name = words[0] if words else ""
    launcher = find_launcher(words, cwd)
    if launcher is not None and (num_ranks > 1 or (launcher.name in _ALWAYS and not launcher.where)):
        raise _refusal(launcher, words)
    if name == "-m" and not "".join(words[1:2]).replace(".", "").isidentifier():
        raise ConfigError(f"script={words}: -m is followed by no module", hint='"script=[-m,my_package.train,--flag]"')
    if " " in name and name.split()[0].endswith(".py") and not (cwd / name).is_file():
        raise ConfigError(
            f"script=[{name}]: there is no file of this name in {cwd}",
            hint=f"commas between the words: script=[{','.join([*name.split(), *words[1:]])}]",
        )
    # Other words than Python files may be programs that exist only on the nodes.
    if name.endswith(".py") and not (cwd / name).is_file():
        raise ConfigError(f"script={name}: there is no such file in {cwd}", hint="give its path from where you are")
    # Another Python of the ranks may know another syntax.
    is_this_python = config.container is None and config.slurm.python is None
    if name.endswith(".py") and is_this_python:
        _require_syntax(cwd / name)
    if name and not name.endswith(".py") and (cwd / name).is_file():
        file_command(cwd / name)


def file_command(file: Path) -> list[str]:
    """Returns the words that start a file which is not Python: the file itself, or a shell with it.

    A shell file needs no permission to be executed, as a Python file needs none.

    Raises:
        ConfigError: it is no shell file, and may not be executed.
    """
    if not os.access(file, os.X_OK):
        if file.suffix in (".sh", ".bash"):
            return ["bash", str(file)]
        raise ConfigError(
            f"script={file.name} may not be executed", hint=f"chmod +x {file}, or write script=[bash,{file.name}]"
        )
    return [str(file)]


def find_launcher(words: Sequence[str], cwd: Path) -> Launcher | None:
    """Returns the launcher that a command would start, None for no known one.

    Args:
        words: the command.
        cwd: the folder that relative names of shell files are in.
    """
    return _find(list(words), cwd, where="", seen=frozenset())


def _find(words: Sequence[str], cwd: Path, *, where: str, seen: frozenset[Path]) -> Launcher | None:
    words = list(words)
    while words and _ASSIGNMENT.match(words[0]):
        del words[0]
    if not words:
        return None
    name = PurePath(words[0]).name
    if name in _LAUNCHERS:
        return _as_launcher(name, words[1:], where=where)
    if name == "-m" or _PYTHON.fullmatch(name):
        module = _module_of(words if name == "-m" else words[1:])
        is_launcher = bool(module) and module[0] in _MODULES
        return _as_launcher(_MODULES[module[0]], module[1:], where=where) if is_launcher else None
    if name in SHELLS:
        command, file = shell_argument(words[1:])
        if file:
            return _find_in_file(file, cwd, seen=seen)
        return _find_in_lines(command, cwd, name=where, seen=seen)
    if name in _WRAPPERS:
        return _find(_behind_wrapper(words[1:]), cwd, where=where, seen=seen)
    if name.endswith((".sh", ".bash")):
        return _find_in_file(words[0], cwd, seen=seen)
    return None


def _as_launcher(name: str, words: Sequence[str], *, where: str) -> Launcher | None:
    follows = _LAUNCHERS[name]
    text = " ".join(words)
    return Launcher(name, where, tuple(words)) if not follows or re.match(follows, text) else None


def _module_of(words: Sequence[str]) -> list[str]:
    """Returns the module that Python runs and what follows it; [] for a file or a command."""
    for index, word in enumerate(words):
        if word == "-m":
            return list(words[index + 1 :])
        if word in ("-W", "-X"):
            continue
        if not word.startswith("-") and (index == 0 or words[index - 1] not in ("-W", "-X")):
            return []
    return []


def _behind_wrapper(words: Sequence[str]) -> list[str]:
    """Returns the words from the first on that may be a program: a launcher, Python, a shell, a file."""
    for index, word in enumerate(words):
        name = PurePath(word).name
        if index and words[index - 1] in _WITH_VALUE and not (words[index - 1] == "-m" and name in _MODULES):
            continue
        is_program = name in _LAUNCHERS or name in SHELLS or name in _WRAPPERS or _PYTHON.fullmatch(name)
        if is_program or word == "-m" or name.endswith((".sh", ".bash", ".py")):
            return list(words[index:])
    return []


def _find_in_file(name: str, cwd: Path, *, seen: frozenset[Path]) -> Launcher | None:
    path = cwd / name
    if path in seen:
        return None
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(_SHELL_FILE_BYTES)
    except (OSError, ValueError):
        return None  # it may be there on the nodes
    return _find_in_lines(text, cwd, name=name, seen=seen | {path})


def _find_in_lines(text: str, cwd: Path, *, name: str, seen: frozenset[Path]) -> Launcher | None:
    """Returns the first launcher that a shell surely starts: not in a branch, and not as one of several nodes."""
    for number, words in _commands(text):
        where = f"{name}, line {number}" if name else ""
        launcher = _find(words, cwd, where=where, seen=seen)
        if launcher is not None and not _OF_SEVERAL_NODES.search(" ".join(launcher.words)):
            return launcher
    return None


def _commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the commands that a shell runs in any case, each with the number of its line, as far as can be seen."""
    lines = text.split("\n")
    depth = 0
    index = 0
    while index < len(lines):
        number = index + 1
        line = lines[index]
        while line.endswith("\\") and index + 1 < len(lines):
            index += 1
            line = f"{line[:-1]} {lines[index].strip()}"
        index += 1
        stripped = line.strip()
        if _OPENS.match(stripped) and not re.search(r"\b(fi|done|esac)\s*$", stripped):
            depth += 1
        elif _CLOSES.match(stripped):
            depth -= 1
        elif depth <= 0:
            if re.match(r"(exit|return)\b", stripped):
                return
            yield from ((number, words) for words in _parts_of(stripped))


def _parts_of(line: str) -> Iterator[list[str]]:
    """Yields the commands of a line up to the first whose success decides whether the next one is run."""
    for part in re.split(r"&&|;", line):
        try:
            words = shlex.split(part, comments=True)
        except ValueError:
            return
        yield words
        if words and words[0] not in _PREPARES:
            return


def _refusal(launcher: Launcher, words: Sequence[str]) -> ConfigError:
    # Up to where a shell's own signs begin, e.g. "2>&1 | tee log".
    behind = list(itertools.takewhile(lambda word: not re.match(r"\d?[|<>&]", word), launcher.words))
    first_file = next((index for index, word in enumerate(behind) if word.endswith(".py")), len(behind))
    module = _module_of(["-m", *behind[behind.index("-m") + 1 :]]) if "-m" in behind[:first_file] else []
    script = ",".join(["-m", *module] if module else behind[first_file:])
    instead = _INSTEAD.get(launcher.name, f"script=[{script or 'train.py,--flag'}]")
    subject = f"script={words[0]}"
    if launcher.name != PurePath(words[0]).name:
        subject += f": {launcher.name}" + (f" ({launcher.where})" if launcher.where else "")
    return ConfigError(
        f"{subject} starts ranks, and this program starts one per GPU already: each would start them all",
        hint=f"write {instead}: it finds the variables that torchrun sets, and "
        "+cluster=NODESxGPUS says how many ranks; cluster.launcher=torchrun has torchrun start them",
    )


def _require_syntax(script: Path) -> None:
    """Refuses a script that would fail at its first line, in a job that may have waited for hours.

    Raises:
        ConfigError: this Python does not read it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except SyntaxError as err:
        line = f": {err.text.strip()}" if err.text else ""
        raise ConfigError(
            f"script={script.name}: {type(err).__name__} in line {err.lineno}: {err.msg}{line}", hint="correct it there"
        ) from err
    except (OSError, ValueError, RecursionError):
        return  # it may be readable where the ranks run, which say what is wrong with it
