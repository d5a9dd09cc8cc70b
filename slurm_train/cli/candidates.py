"""What may follow on a command line: verbs, flags, settings, runs and sweeps. A shell asks for it at every TAB.

A TAB has a tenth of a second, so nothing is imported that a table of words and a look into folders do not need; and
whatever goes wrong is no answer rather than an error in the middle of somebody's line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from slurm_train.assets import asset_dir
from slurm_train.cli.completion_table import FLAGS, KEYS, SETTINGS_FLAGS, STATES, VERBS, WORDS

# Longer lists are read by nobody, and a folder of runs may be on a slow disk.
_MOST = 500
_SIZES = ("1x1", "1x4", "1x8", "2x8", "4x8", "8x8")
_GROUPS = ("model", "data", "cluster", "experiment")
_ADDED_GROUPS = ("cluster", "experiment", "site", "container")
# As `config.site` has it; importing that costs what a TAB has not.
_USER_FOLDER = "~/.config/slurm_train"
_DEFAULTS = {"model": "gpt", "data": "stdlib"}
_HYDRA = (
    *("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.output_subdir", "hydra.job.name"),
    *("hydra.mode", "hydra.searchpath", "hydra/launcher", "hydra/sweeper"),
)
_HYDRA_VALUES = {
    "hydra.mode": "RUN|MULTIRUN",
    "hydra/launcher": "basic",
    "hydra/sweeper": "basic",
    "hydra.run.dir": "path",
}


class Candidate(NamedTuple):
    """Something that may stand in place of the word at the cursor."""

    text: str
    about: str = ""
    goes_on: bool = False
    """More of the same word follows: no blank after it."""


def complete(words: Sequence[str], current: str) -> list[Candidate]:
    """Returns what may stand in place of the current word.

    Args:
        words: the words before it, without the program.
        current: the word up to the cursor, e.g. "optim.l".
    """
    found = _candidates(_Line(list(words)), current)
    # A section stands for all its keys: once is enough.
    fitting = {one.text: one for one in found if one.text.startswith(current)}
    return list(fitting.values())[:_MOST]


class _Line:
    """The words before the cursor, told apart."""

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.verb = words[0] if words and words[0] in VERBS else None
        inner = f"{self.verb} {words[1]}" if len(words) > 1 else ""
        self.entry = inner if inner in WORDS else self.verb
        # A verb without an entry reads settings, and so does a line without a verb.
        self.has_settings = self.entry not in WORDS
        self.flags = SETTINGS_FLAGS if self.has_settings else FLAGS[self.entry or ""]
        self.bare = self._bare(words[len((self.entry or "").split()) :])

    def _bare(self, words: Sequence[str]) -> list[str]:
        """Returns the words that are neither flags nor values of flags."""
        bare, is_value = [], False
        for word in words:
            if not is_value and not word.startswith("-"):
                bare.append(word)
            is_value = not is_value and self._takes_value(word)
        return bare

    def _takes_value(self, word: str) -> bool:
        return word in self.flags and self.flags[word][0] != "-"

    @property
    def open_flag(self) -> str | None:
        """The flag whose value comes next."""
        last = self.words[-1] if self.words else ""
        return last if self._takes_value(last) else None

    def value_of(self, *names: str) -> str | None:
        """Returns what a flag or a setting was given, e.g. for "--root" and "run.root"."""
        for index, word in enumerate(self.words):
            name, sign, value = word.lstrip("+").partition("=")
            if name in names:
                return value if sign else next(iter(self.words[index + 1 : index + 2]), None)
        return None


def _candidates(line: _Line, current: str) -> Iterator[Candidate]:
    flag, sign, value = current.partition("=")
    if line.open_flag is not None:
        yield from _of_kind(line.flags[line.open_flag][0], line, current)
    elif flag.startswith("--") and sign and flag in line.flags:
        yield from _after(f"{flag}=", _of_kind(line.flags[flag][0], line, value))
    elif current.startswith("-"):
        yield from (Candidate(name, about) for name, (_, about) in line.flags.items())
    elif line.has_settings:
        if not line.words:
            yield from (Candidate(verb, about) for verb, about in VERBS.items())
        yield from _settings(line, current)
    else:
        yield from _of_kind(_kind_of_word(line), line, current)
        if line.verb == "resume" and line.bare:
            yield from _settings(line, current)


def _kind_of_word(line: _Line) -> str:
    """Returns what the next bare word of a verb names."""
    kinds = WORDS[line.entry or ""]
    if not kinds:
        return ""
    kind = kinds[min(len(line.bare), len(kinds) - 1)]
    is_over = len(line.bare) >= len(kinds) and not kind.endswith("...")
    return "" if is_over else kind.removesuffix("...")


def _of_kind(kind: str, line: _Line, current: str) -> Iterable[Candidate]:
    """Returns what a flag, a word or a key may be given."""
    if kind in _READERS:
        return _READERS[kind](line, current)
    return [Candidate(choice) for choice in kind.split("|") if choice not in ("", "-", "open")]


def _after(prefix: str, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    return (one._replace(text=prefix + one.text) for one in candidates)


def _in_list(current: str, names: Iterable[str]) -> Iterator[Candidate]:
    """Yields names for the last item of a list with commas, e.g. for "failed,mis"."""
    before = current[: current.rfind(",") + 1]
    return (Candidate(before + name) for name in names if name not in before.split(","))


# Settings


def _settings(line: _Line, current: str) -> Iterator[Candidate]:
    bare = current.lstrip("+~")
    sign = current[: len(current) - len(bare)]
    key, equals, value = bare.partition("=")
    if equals:
        yield from _after(f"{sign}{key}=", _values(key, line, value))
        return
    for name, about in _names(line, sign):
        if name.startswith(bare):
            # Nothing is typed yet: the spelling that Hydra knows as well.
            plus = "+" if not current and name in _ADDED_GROUPS else sign
            yield _staged(f"{plus}{name}", about, start=len(current), takes_value=sign != "~")


def _names(line: _Line, sign: str) -> Iterator[tuple[str, str]]:
    """Yields the keys and groups there are, with what they mean."""
    groups = {*_GROUPS, *_folders(line)}
    for group in sorted(groups):
        yield group, f"{group}=NAME chooses a file" if group != "cluster" else "NxG: nodes x GPUs per node"
    for group in ("model", "data"):
        yield f"{group}._target_", "your own class"
        yield from ((f"{group}.{key}", "") for key in _keys_of_option(line, group))
    if sign != "+":
        # A single plus adds what is not there yet.
        yield from ((name, about) for name, (_, about) in KEYS.items() if name not in groups)
    if sign != "~":
        yield from ((name, "said to Hydra") for name in _HYDRA)


def _staged(name: str, about: str, *, start: int, takes_value: bool) -> Candidate:
    """Returns a key up to its next dot, so that a list is never longer than a screen."""
    dot = name.find(".", start)
    if dot >= 0:
        return Candidate(name[: dot + 1], "", goes_on=True)
    key = name.lstrip("+~")
    is_mapping = key not in _GROUPS and KEYS.get(key, ("", ""))[0] == "open"
    ending = "." if is_mapping else "=" if takes_value else ""
    return Candidate(name + ending, about, goes_on=bool(ending))


def _values(key: str, line: _Line, value: str) -> Iterable[Candidate]:
    if key in _GROUPS or key in _folders(line):
        options = [*_options(line, key), *(_SIZES if key == "cluster" else ())]
        return _in_list(value, [name for name in options if (key, name) != ("cluster", "base")])
    kind = KEYS.get(key, ("path" if key.endswith(".path") else _HYDRA_VALUES.get(key, ""), ""))[0]
    return (
        _of_kind(kind, line, value) if kind == "path" else _in_list(value, [c.text for c in _of_kind(kind, line, "")])
    )


# Files of configurations


def _conf_folders(line: _Line) -> list[Path]:
    own = (line.value_of("--config-dir", "-cd"), line.value_of("--config-path", "-cp"))
    own_folders = (Path(folder).expanduser() for folder in own if folder)
    return [*own_folders, asset_dir("conf"), Path(_USER_FOLDER).expanduser()]


def _folders(line: _Line) -> set[str]:
    """Returns the groups of all folders of configurations."""
    return {name for folder in _conf_folders(line) for name, is_folder in _listed(folder) if is_folder}


def _options(line: _Line, group: str) -> list[str]:
    return sorted({name for folder in _conf_folders(line) for name in _yaml_names(folder / group)})


def _yaml_names(folder: Path) -> list[str]:
    return [name.rpartition(".")[0] for name, _ in _listed(folder) if name.endswith((".yaml", ".yml"))]


def _keys_of_option(line: _Line, group: str) -> list[str]:
    """Returns the keys of the chosen file of a group; a line of YAML that begins with a name is one."""
    option = (line.value_of(group) or _DEFAULTS[group]).rpartition(",")[2]
    for folder in _conf_folders(line):
        path = folder / group / f"{option}.yaml"
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
            names = [text.partition(":")[0] for text in lines if ":" in text]
            return [name for name in names if name.isidentifier() and name != "_target_"]
    return []


def _listed(folder: Path) -> list[tuple[str, bool]]:
    """Returns the names in a folder, and whether each is a folder; hidden ones are left out."""
    try:
        with os.scandir(folder) as entries:
            return [(entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith((".", "_"))]
    except OSError:
        return []


# Runs, sweeps, paths


def _root(line: _Line) -> Path:
    return Path(line.value_of("--root", "run.root") or "runs").expanduser()


def _runs(line: _Line, current: str) -> Iterator[Candidate]:
    """Yields run names and ids; with a slash "name/id", or a path."""
    root = _root(line)
    names = [name for name, is_folder in _listed(root) if is_folder and name != "sweeps"]
    if current.startswith(("/", ".", "~")):
        yield from _paths(line, current)
        return
    for name in names:
        ids = [run_id for run_id, is_folder in _listed(root / name) if is_folder]
        if "/" in current:
            yield from (Candidate(f"{name}/{run_id}") for run_id in ids)
        elif ids:
            yield Candidate(name, f"{len(ids)} runs" if len(ids) > 1 else "1 run")
            yield from (Candidate(run_id, name) for run_id in ids)


def _sweeps(line: _Line, _current: str) -> Iterator[Candidate]:
    ids = _listed(_root(line) / "sweeps")
    return (Candidate(name, "sweep") for name, is_folder in ids if is_folder)


def _runs_and_sweeps(line: _Line, current: str) -> Iterator[Candidate]:
    yield from _runs(line, current)
    yield from _sweeps(line, current)


def _paths(_line: _Line, current: str) -> Iterator[Candidate]:
    folder, slash, _ = current.rpartition("/")
    for name, is_folder in _listed(Path(folder + slash).expanduser()):
        yield Candidate(f"{folder}{slash}{name}{'/' if is_folder else ''}", goes_on=is_folder)


def _primary_files(line: _Line, _current: str) -> Iterator[Candidate]:
    for folder in _conf_folders(line):
        yield from map(Candidate, _yaml_names(folder))


def _states(_line: _Line, current: str) -> Iterator[Candidate]:
    return _in_list(current, STATES)


def _changes(_line: _Line, current: str) -> Iterator[Candidate]:
    return _in_list(current, ("config", "code", "data", *KEYS))


_READERS: dict[str, Callable[[_Line, str], Iterator[Candidate]]] = {
    "run": _runs,
    "sweep": _sweeps,
    "run or sweep": _runs_and_sweeps,
    "path": _paths,
    "primary file": _primary_files,
    "states": _states,
    "changes": _changes,
}
