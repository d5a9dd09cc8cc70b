"""Variables that a person takes for known: those of the shell that a job will not have, and $NAME in typed words.

On a person's own machine a program has all of the shell; a job has what travels (`slurm.job_variables`). A program that
falls back on a default where a variable is missing would train something else there, without a word. So its source is
read before it is submitted: the file that the script or a `_target_` names, the files of the person's own that it
imports, shell files, and configurations with `${oc.env:NAME}`. Nothing is imported or run.

No shell reads a setting after the person's own, neither here nor on a node. So $NAME that arrives is a text with a
dollar: a path that this program reads is refused, other words are named.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_train.code.program_source import SourceFile, read_program, shell_commands
from slurm_train.config.program import program_of
from slurm_train.config.schema import ClusterSection, RunConfig
from slurm_train.errors import ConfigError
from slurm_train.formatting import shorten
from slurm_train.slurm.devices import VISIBLE
from slurm_train.slurm.job_variables import exported, is_job_variable

_MOST_FILES = 300
_MOST_NAMED = 8
_IN_SHELL = re.compile(r"\$\{?(\w+)")
_ASSIGNED = r"(?m)(?:^|[;&(]|\b(?:export|local|declare|readonly|for|read)\s)\s*{name}\b(?:=|\s+in\b|\s*$)"
# Where a path begins: a variable in capitals, or a person's home.
_UNEXPANDED = re.compile(r"(?:^|[=:])(?:\$\{?(?P<name>[A-Z_][A-Z0-9_]*)\}?|~)(?=[/:]|$)")
_EXPANDS = re.compile(r"\b(?:expandvars|expanduser|envsubst|eval)\b")
_IN_YAML = re.compile(r"\$\{oc\.env:\s*(\w+)")
# They say where a shell runs and what its terminal is like. A job has its own, or none, and programs know both.
_OF_ONE_SHELL = re.compile(
    r"(?:_|PWD|OLDPWD|SHLVL|HOST|HOSTNAME|HOSTTYPE|MACHTYPE|OSTYPE|MAIL|EDITOR|VISUAL|PAGER|LESS\w*|COLUMNS|LINES"
    r"|COLORTERM|LS_COLORS|PS\d|PROMPT\w*|HIST\w*|DISPLAY|XAUTHORITY|WAYLAND_\w+|DBUS_\w+|SSH_\w+|TERM_\w+|TMUX\w*|STY"
    r"|VSCODE_\w+|INVOCATION_ID|JOURNAL_STREAM|GPG_\w+|WINDOWID|DESKTOP_SESSION|CI)"
)
_READS = ("get", "pop", "setdefault")
# Keywords of click, typer, pydantic and configargparse, and packages whose own functions read a variable by its name.
_KEYWORDS = ("envvar", "env_var", "env")
_READERS = ("environs", "decouple", "environ")


def variable_notes(config: RunConfig, *, cwd: Path, env: Mapping[str, str]) -> list[str]:
    """Returns what a person is told of variables that do not arrive as the words or the program expect, a line each.

    Args:
        config: of the run.
        cwd: the folder of its code: the one that it is submitted from, or the copy of it.
        env: the environment of the submitting shell.
    """
    return [*unexpanded_notes(config, cwd=cwd), *unexported_notes(config, cwd=cwd, env=env)]


def unexported_variables(
    config: RunConfig, *, cwd: Path, env: Mapping[str, str], paths: Sequence[str] | None = None
) -> dict[str, str]:
    """Returns the variables of this shell that the program of a run reads and that its job does not get.

    Args:
        config: of the run.
        cwd: the folder that it is submitted from.
        env: the environment of the shell.
        paths: where Python finds packages; default: as this Python.

    Returns:
        Name -> the file that reads it, relative to `cwd` where it lies below.
    """
    cluster = config.slurm
    if not config.is_submitted or _has_login_shell(cluster):
        return {}
    travels = exported(env, cluster.export)
    candidates = {
        name
        for name in env
        if name.isidentifier()
        and name not in travels
        and name not in cluster.env
        and name not in VISIBLE
        and not is_job_variable(name)
        and not _OF_ONE_SHELL.fullmatch(name)
        and not any(re.search(rf"\b{name}\b", line) for line in cluster.setup)
    }
    if not candidates:
        return {}
    found: dict[str, str] = {}
    for source in read_program(config, cwd, paths=paths):
        for name, path in _read_in(source).items():
            if name in candidates:
                found.setdefault(name, str(path.relative_to(cwd)) if path.is_relative_to(cwd) else str(path))
    return found


def unexported_notes(config: RunConfig, *, cwd: Path, env: Mapping[str, str]) -> list[str]:
    """Returns what a person is told of variables that a job does not get, a line each."""
    cluster = config.slurm
    if not config.is_submitted:
        return []
    names = [name for name in cluster.export if name.isidentifier()]
    of_a_job = [name for name in names if is_job_variable(name)]
    absent = [name for name in names if name not in env and name not in of_a_job]
    notes = []
    if of_a_job:
        notes.append(f"cluster.export: each job has its own {', '.join(of_a_job)}, and gets none from this shell")
    if absent:
        near = [match for name in absent for match in difflib.get_close_matches(name.upper(), env, n=1, cutoff=0.8)]
        meant = f" (did you mean {', '.join(near)}?)" if near else ""
        notes.append(f"cluster.export: this shell has no {', '.join(absent)}, so the job gets none{meant}")
    missing = unexported_variables(config, cwd=cwd, env=env)
    if missing:
        places = [f"{name} ({file})" for name, file in sorted(missing.items())]
        kept = [name for name in cluster.export if name not in absent]
        notes.append(
            f"the program reads variables of this shell that the job does not get: {shorten(places, _MOST_NAMED)}; to "
            f"export them: cluster.export=[{','.join([*kept, *sorted(missing)])}]"
        )
    return notes


def refuse_unexpanded(config: RunConfig, env: Mapping[str, str]) -> None:
    """Refuses a path that this program itself reads and that begins with a variable.

    Raises:
        ConfigError: it is one.
    """
    paths = {"run.root": config.run.root, "train.init_from": config.train.init_from}
    used = program_of(config).used
    for group, section in (("model", used.model), ("data", used.data)):
        if not _is_own(section):
            paths |= dict(_texts_in(section, group))
    for key, text in paths.items():
        match = re.match(r"\$\{?(\w+)", text or "")
        if match is None:
            continue
        name = match[1]
        hint = f'let the shell do it ("{key}=${name}/..." in double quotes); in a file: ${{oc.env:{name}}}/...'
        if name not in env:
            hint = f"this shell has no {name}: name a path that this machine and all nodes see"
            if key.startswith("data."):
                hint += "; for the nodes' own disks see docs/own-data.md#data-on-the-nodes-own-disks"
        raise ConfigError(f"{key}={text} begins with a variable that was not expanded", hint=hint)


def unexpanded_notes(config: RunConfig, *, cwd: Path) -> list[str]:
    """Returns what a person is told of $NAME in words that go on as they are: to a program, the environment, Slurm.

    Args:
        config: of the run.
        cwd: the folder of its code.
    """
    notes = []
    for key, text in _words_of_program(config):
        match = _UNEXPANDED.search(text)
        # The rank puts the run directory into the words of a script.
        if match is None or (key == "script" and match["name"] == "SLURM_TRAIN_RUN_DIR"):
            continue
        if any(_EXPANDS.search(source.text) for source in read_program(config, cwd)):
            continue
        advice = "$HOME in double quotes is expanded by your shell"
        if match["name"]:
            name = match["name"]
            advice = f'let it read os.environ["{name}"]; if this shell has {name}, it is expanded in double quotes'
        notes.append(f"{key}={text}: nothing expands this, the program gets these characters; {advice}")
        break
    cluster = config.slurm
    for name, value in cluster.env.items():
        if _UNEXPANDED.search(str(value)):
            line = f"'cluster.setup=[\"export {name}={value}\"]'"
            notes.append(f"cluster.env.{name}={value}: nothing expands this; the node expands a line of setup: {line}")
    for section, flags in (("cluster.sbatch", cluster.sbatch), ("cluster.srun", cluster.srun)):
        for flag, value in flags.items():
            if _UNEXPANDED.search(str(value)):
                notes.append(
                    f"{section}.{flag}={value}: nothing expands this, Slurm gets these characters; in double "
                    "quotes your shell does"
                )
    return notes


def _words_of_program(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yields the texts that a program of the person's own gets, and their keys."""
    words = config.script or []
    of_shell = {*shell_commands(words)}
    for word in words[1:]:
        if word not in of_shell:
            yield "script", word
    sections = program_of(config).sections
    for group in ("task", "model", "data"):
        section = sections.get(group)
        if _is_own(section):
            yield from _texts_in(section, group)


def _is_own(section: Mapping[str, Any] | None) -> bool:
    """Returns whether a section builds something that does not ship with this package."""
    return section is not None and not str(section.get("_target_", "slurm_train.")).startswith("slurm_train.")


def _texts_in(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yields the texts of a section and their keys."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts_in(inner, f"{key}.{name}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _texts_in(inner, f"{key}[{index}]")


def _has_login_shell(cluster: ClusterSection) -> bool:
    """Returns whether a job begins like a login shell, whose variables are not known here."""
    if any(name.replace("_", "-") == "get-user-env" and value for name, value in cluster.sbatch.items()):
        return True
    return any("/etc/profile" in line for line in cluster.setup)


def _read_in(source: SourceFile) -> dict[str, Path]:
    """Returns the variables that a file reads, with the file, or that of the configuration that it names."""
    if source.tree is None:
        return dict.fromkeys(_used_in_shell(source.text), source.path)
    found = dict.fromkeys(_names_read(source.tree), source.path)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.keyword) and node.arg == "config_path":
            folder = Path(os.path.normpath(source.path.parent / str(_constant(node.value))))
            for path in sorted(folder.rglob("*.yaml"))[:_MOST_FILES] if folder.is_dir() else ():
                with contextlib.suppress(OSError, ValueError):
                    found = dict.fromkeys(_IN_YAML.findall(path.read_text(encoding="utf-8")), path) | found
    return found


def _used_in_shell(text: str) -> Iterator[str]:
    """Yields the variables that a shell's commands use and do not set before."""
    for match in _IN_SHELL.finditer(text):
        # `LR=${LR:-1}` reads what it sets.
        begin = max(text.rfind(end, 0, match.start()) for end in "\n;") + 1
        if not re.search(_ASSIGNED.format(name=match[1]), text[:begin]):
            yield match[1]


def _names_read(tree: ast.Module) -> set[str]:
    """Returns the environment variables that a module reads, as far as it names them; not those that it sets first."""
    constants = dict[str, str]()
    copies = {"environ"}
    set_first = set[str]()
    packages = set[str]()
    for statement in tree.body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            module = getattr(statement, "module", None)
            packages |= {module} if module else {alias.name for alias in statement.names}
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            (target,) = statement.targets
            value = _constant(statement.value)
            if isinstance(target, ast.Name) and value is not None:
                constants[target.id] = value
            elif isinstance(target, ast.Subscript) and _is_environment(target.value, copies):
                set_first.add(_constant(target.slice) or "")
    for node in ast.walk(tree):
        # `env = os.environ`, `env = dict(os.environ)`: what is read from it is read from there.
        if isinstance(node, ast.Assign) and any(_is_environment(part, {"environ"}) for part in ast.walk(node.value)):
            is_copy = isinstance(node.value, (ast.Name, ast.Attribute)) or _is_copy(node.value)
            copies |= {target.id for target in node.targets if isinstance(target, ast.Name) and is_copy}
    reads_by_name = bool(packages & {*_READERS})
    names = set[str]()
    for node in ast.walk(tree):
        named: list[ast.AST] = []
        if isinstance(node, ast.Subscript) and _is_environment(node.value, copies) and isinstance(node.ctx, ast.Load):
            named = [node.slice]
        elif isinstance(node, ast.Compare) and any(_is_environment(part, copies) for part in node.comparators):
            named = [node.left]
        elif isinstance(node, ast.keyword) and node.arg in _KEYWORDS:
            named = list(node.value.elts) if isinstance(node.value, (ast.List, ast.Tuple)) else [node.value]
        elif isinstance(node, ast.Call) and node.args:
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            owner = function.value if isinstance(function, ast.Attribute) else None
            is_of_environment = owner is not None and _is_environment(owner, copies)
            is_reader = reads_by_name and getattr(owner or function, "id", "") in ("env", "config")
            if name in ("getenv", "getenvb") or (name in _READS and is_of_environment) or is_reader:
                named = [node.args[0]]
            elif name == "expandvars":
                names |= {*_IN_SHELL.findall(_constant(node.args[0]) or "")}
        for part in named:
            name = constants.get(part.id) if isinstance(part, ast.Name) else _constant(part)
            names |= {name} if name else set()
    return names - set_first


def _is_environment(node: ast.AST, names: set[str]) -> bool:
    """Returns whether an expression is `os.environ`, or a name for it or for a copy of it."""
    if isinstance(node, ast.Attribute):
        return node.attr in ("environ", "environb")
    return isinstance(node, ast.Name) and node.id in names


def _is_copy(node: ast.AST) -> bool:
    """Returns whether a call gives a copy: `dict(os.environ)`, `os.environ.copy()`."""
    if not isinstance(node, ast.Call):
        return False
    return getattr(node.func, "id", "") == "dict" or getattr(node.func, "attr", "") == "copy"


def _constant(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
