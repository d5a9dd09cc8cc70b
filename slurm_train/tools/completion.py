"""`completion bash|zsh|fish`: prints the script that completes words at a TAB; `complete`: what that script calls.

The script completes `slurm-train`, and `python -m slurm_train` as well; what else completes python stays. It calls

complete bash LINE BREAKS      the line up to the cursor, and where the shell cuts words
complete zsh|fish WORD...      the words after the program; the last one is at the cursor

A TAB has a tenth of a second. So flags and words come from the table of verbs, keys and values of settings from
completion.json, which `.ci/write_configuration_page.py` writes, and nothing slow is imported (pathlib and typing take
10 ms each). Whatever goes wrong gives no answer rather than an error in the middle of somebody's line.
"""

# No pathlib, see above.
# ruff: noqa: PTH100, PTH111, PTH120, PTH123

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from slurm_train.verbs import PUBLIC_VERBS, VERBS, Argument, Verb, parse

_BASH = """\
# Completion of slurm-train and `python -m slurm_train` for bash.
_slurm_train_ask() {
  local IFS=$'\\n'
  COMPREPLY=($("$@" complete bash "${COMP_LINE:0:COMP_POINT}" "$COMP_WORDBREAKS" 2>/dev/null))
  compopt -o nospace +o default +o bashdefault 2>/dev/null
}

# The program that is typed answers; an alias, which is no program, is answered by the Python that printed this.
_slurm_train() {
  local program
  if program=$(type -P -- "${COMP_WORDS[0]/#\\~/$HOME}"); then
    _slurm_train_ask "$program"
  else
    _slurm_train_ask @PYTHON@ -m slurm_train
  fi
}

_slurm_train_python() {
  if [[ ${COMP_WORDS[1]} == -m && ${COMP_WORDS[2]} == slurm_train && $COMP_CWORD -gt 2 ]]; then
    _slurm_train_ask "$(type -P -- "${COMP_WORDS[0]/#\\~/$HOME}")" -m slurm_train
  elif [[ $_slurm_train_before ]]; then
    "$_slurm_train_before" "$@"
  fi
}

# What completes python already is asked for everything else.
if declare -F _comp_load >/dev/null; then
  _comp_load python 2>/dev/null
elif declare -F _completion_loader >/dev/null; then
  _completion_loader python 2>/dev/null
fi
_slurm_train_before=$(complete -p python 2>/dev/null | sed -n 's/.*-F \\([^ ]*\\).*/\\1/p')
[[ $_slurm_train_before == _slurm_train_python ]] && _slurm_train_before=
complete -F _slurm_train slurm-train
complete -o bashdefault -o default -F _slurm_train_python python python3
"""

_ZSH = """\
#compdef slurm-train
# Completion of slurm-train and `python -m slurm_train` for zsh; source it after compinit.
_slurm_train_ask() {
  local kind text about
  local -a finished finished_about open open_about
  while IFS=$'\\t' read -r kind text about; do
    if [[ $kind == more ]]; then
      open+=("$text") open_about+=("$text${about:+  -- $about}")
    elif [[ $kind == done ]]; then
      finished+=("$text") finished_about+=("$text${about:+  -- $about}")
    fi
  done < <("$@" complete zsh "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)
  (( $#open )) && compadd -l -S '' -d open_about -a open
  (( $#finished )) && compadd -l -d finished_about -a finished
}

_slurm_train() {
  local program=${~words[1]}
  if [[ -n ${commands[$program]} || -x $program ]]; then
    _slurm_train_ask $program
  else
    _slurm_train_ask @PYTHON@ -m slurm_train
  fi
}

_slurm_train_python() {
  if [[ ${words[2]} == -m && ${words[3]} == slurm_train ]] && (( CURRENT > 3 )); then
    _slurm_train_ask ${~words[1]} -m slurm_train
  elif (( $+functions[_python] )); then
    _python "$@"
  else
    _files
  fi
}

autoload -Uz +X _python 2>/dev/null
compdef _slurm_train slurm-train
compdef _slurm_train_python python python3
"""

_FISH = """\
# Completion of slurm-train and `python -m slurm_train` for fish.
function __slurm_train_ask
    set -l words (commandline -opc)
    set -l program $words[1]
    command -q $program; or set program @PYTHON@ -m slurm_train
    if test (count $words) -ge 3; and test "$words[2] $words[3]" = "-m slurm_train"
        set program $program -m slurm_train
    end
    command $program complete fish $words[2..-1] (commandline -ct) 2>/dev/null
end

function __slurm_train_by_module
    set -l words (commandline -opc)
    test (count $words) -ge 3; and test "$words[2] $words[3]" = "-m slurm_train"
end

complete -c slurm-train -f -k -a '(__slurm_train_ask)'
for name in python python3
    complete -c $name -n __slurm_train_by_module -f -k -a '(__slurm_train_ask)'
end
"""

_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}

# What a shell would expand or split. Such a name can be typed, but is not put into somebody's line.
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=.,:/@%~")
# Longer lists are of no use, and a folder of runs may be on a slow disk.
_MOST = 500
_SIZES = ("1x1", "1x4", "1x8", "2x8", "4x8", "8x8")
_GROUPS = ("model", "data", "optim", "cluster", "experiment")
_ADDED_GROUPS = ("cluster", "experiment", "site", "container")
_DEFAULTS = {"model": "gpt", "data": "stdlib", "optim": "adamw"}
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LONGEST_TEXT = 60
_FOLDERS = (f"{_PACKAGE}/conf", f"{os.path.dirname(_PACKAGE)}/conf", "~/.config/slurm_train")

Table = dict[str, dict[str, tuple[str, str]]]
"""Parts: "keys" of the configuration, "flags" of settings, "lists". An entry has a name, what it takes and what it
means. Takes: "-" no value, "a|b" one of these, "a,b" a list of these, a key of `_READERS` or a name of "lists", "open"
a mapping with any keys, "" anything."""


def main(words: Sequence[str]) -> int:
    """Prints the script and returns 0."""
    from shlex import quote

    print(_SCRIPTS[parse("completion", words).shell].replace("@PYTHON@", quote(sys.executable)), end="")
    return 0


Candidate = tuple[str, str]
"""What may be put in place of the word at the cursor, and what it means; behind `_UNFINISHED` the word goes on."""
_UNFINISHED = (".", "=", "/")


def complete(words: Sequence[str]) -> int:
    """Prints one candidate per line and returns 0."""
    shell, *rest = words
    if shell == "bash":
        lines = _bash_lines(*rest)
    else:
        found = _plain_candidates(rest[:-1], rest[-1])
        lines = [f"{text}\t{_short(about)}" for text, about in found]
        if shell == "zsh":
            kinds = ("more" if text.endswith(_UNFINISHED) else "done" for text, _ in found)
            lines = [f"{kind}\t{line}" for kind, line in zip(kinds, lines, strict=True)]
    print("\n".join(lines))
    return 0


def _bash_lines(line: str, breaks: str) -> list[str]:
    """Returns the ends of candidates that bash puts in place of what it takes for the current word."""
    words, quote = split_line(line)
    while len(words) > 2 and words[0].partition("=")[0].isidentifier() and "=" in words[0]:
        # NAME=value in front of a command.
        del words[0]
    # Inside quotes the shell takes everything since the quote for the word.
    start = 0 if quote else max((words[-1].rfind(mark) for mark in breaks if not mark.isspace()), default=-1) + 1
    found = _plain_candidates(words[1:-1], words[-1])
    return [text[start:] + ("" if text.endswith(_UNFINISHED) else f"{quote} ") for text, _ in found]


def _plain_candidates(words: Sequence[str], current: str) -> list[Candidate]:
    is_module = list(words[:2]) == ["-m", "slurm_train"]
    return [one for one in candidates(words[2:] if is_module else words, current) if _PLAIN.issuperset(one[0])]


def split_line(line: str) -> tuple[list[str], str]:
    """Returns the words of a line as a shell reads them, the last one up to the cursor, and the quote it is in.

    Args:
        line: e.g. `slurm-train -m "seed=ra`.
    """
    import shlex

    for quote in ("", '"', "'"):
        try:
            # The mark keeps a last word that is empty.
            words = shlex.split(f"{line}\0{quote}")
        except ValueError:
            continue
        return [*words[:-1], words[-1].removesuffix("\0")], quote
    return ["", ""], ""


def candidates(words: Sequence[str], current: str) -> list[Candidate]:
    """Returns what may be put in place of the current word.

    Args:
        words: the words before it, without the program.
        current: the word up to the cursor, e.g. "optim.l".
    """
    # A section is offered once for all its keys.
    fitting = dict(one for one in _Line(words).candidates(current) if one[0].startswith(current))
    return list(fitting.items())[:_MOST]


class _Line:
    """The words before the cursor."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words, self.table = words, read_table()
        self.keys, self.flags = self.table["keys"], self.table["flags"]
        verb, num_names = VERBS.get(words[0]) if words else None, 1
        if verb is not None and verb.actions:
            action = Argument("action", takes="|".join(verb.actions))
            verb, num_names = verb.actions.get("".join(words[1:2]), Verb("", arguments=[action])), 2
        self.has_settings = verb is None or verb.arguments is None
        arguments = (verb.arguments if verb is not None else None) or ()
        if not self.has_settings:
            self.flags = {"--help": ("-", "show flags and examples")}
            self.flags |= {one.names[-1]: (one.takes, one.about) for one in arguments if one.is_flag and one.about}
        self.verb_words = [one for one in arguments if not one.is_flag]
        self.bare: list[str] = []
        """The words that are neither flags nor values of flags."""
        self.open_flag = ""
        """The flag whose value comes next."""
        for word in words[0 if verb is None else num_names :]:
            if not self.open_flag and not word.startswith("-"):
                self.bare.append(word)
            takes_value = not self.open_flag and self.flags.get(word, ("-", ""))[0] != "-"
            self.open_flag = word if takes_value else ""
        settings = verb.settings if verb is not None else ""
        self.may_have_settings = settings == "any" or (settings == "after" and bool(self.bare))

    def candidates(self, current: str) -> Iterator[Candidate]:
        """Yields what may come next, whether it fits the current word or not."""
        flag, equals, value = current.partition("=")
        if self.open_flag:
            yield from self._of_kind(self.flags[self.open_flag][0], current)
        elif flag.startswith("--") and equals and flag in self.flags:
            yield from _prefixed(f"{flag}=", self._of_kind(self.flags[flag][0], value))
        elif current.startswith("-"):
            yield from ((name, about) for name, (_, about) in self.flags.items())
        elif self.has_settings:
            if not self.words:
                yield from ((name, verb.about) for name, verb in PUBLIC_VERBS.items())
            yield from self._settings(current)
        else:
            repeated = [one for one in self.verb_words[-1:] if one.options.get("nargs") in ("*", "+")]
            for one in (self.verb_words[len(self.bare) :] or repeated)[:1]:
                yield from self._of_kind(one.takes, current)
            if self.may_have_settings:
                yield from self._settings(current)

    def value_of(self, *names: str) -> str | None:
        """Returns what a flag or a setting was given, e.g. for "--root" and "run.root"."""
        for index, word in enumerate(self.words):
            name, equals, value = word.lstrip("+").partition("=")
            if name in names:
                return value if equals else next(iter(self.words[index + 1 : index + 2]), None)
        return None

    def _of_kind(self, kind: str, current: str) -> Iterable[Candidate]:
        """Returns what a flag, a word or a key may be given."""
        if kind in _READERS:
            return _READERS[kind](self, current)
        kind, _ = self.table["lists"].get(kind, (kind, ""))
        if "," in kind:
            return _in_list(current, kind.split(","))
        return _named(choice for choice in kind.split("|") if choice not in ("", "-", "open"))

    def _settings(self, current: str) -> Iterator[Candidate]:
        bare = current.lstrip("+~")
        sign = current[: len(current) - len(bare)]
        key, equals, value = bare.partition("=")
        if equals:
            yield from _prefixed(f"{sign}{key}=", self._values(key, value))
            return
        for name, about in self._names(sign):
            if not name.startswith(bare):
                continue
            # Nothing is typed yet: the spelling that Hydra knows as well.
            text = f"{'+' if not current and name in _ADDED_GROUPS else sign}{name}"
            dot = text.find(".", len(current))
            if dot >= 0:
                # Up to its next dot, so that a list is never longer than a screen.
                yield text[: dot + 1], ""
            else:
                is_mapping = name not in _GROUPS and self.keys.get(name, ("", ""))[0] == "open"
                yield text + ("." if is_mapping else "=" if sign != "~" else ""), about

    def _names(self, sign: str) -> Iterator[tuple[str, str]]:
        """Yields the keys and groups there are, with what they mean."""
        groups = self._groups()
        for group in sorted(groups):
            yield group, f"{group}=NAME chooses a file" if group != "cluster" else "NxG: nodes x GPUs per node"
        for group in _DEFAULTS:
            own = [("_target_", "your own class"), *_named(self._keys_of_option(group))]
            yield from (one for one in _prefixed(f"{group}.", own) if one[0] not in self.keys)
        for name, (_, about) in self.keys.items():
            # A single plus adds what is not there yet, and nothing of Hydra's can be taken away.
            if name not in groups and (name.startswith("hydra") or sign != "+") and (sign, name[:5]) != ("~", "hydra"):
                yield name, about

    def _values(self, key: str, value: str) -> Iterable[Candidate]:
        if key in self._groups():
            names = {name for folder in self.folders() for name in _yaml_names(f"{folder}/{key}")}
            sizes = _SIZES if key == "cluster" else ()
            return _in_list(value, [*sorted(names - ({"base"} if key == "cluster" else set())), *sizes])
        kind = self.keys.get(key, ("path" if key.endswith(".path") else "", ""))[0]
        return self._of_kind(kind if kind in _READERS else kind.replace("|", ","), value)

    def folders(self) -> list[str]:
        """Returns the folders of configurations, those of the line first."""
        own = (self.value_of("--config-dir", "-cd"), self.value_of("--config-path", "-cp"))
        return [os.path.expanduser(folder) for folder in (*own, *_FOLDERS) if folder]

    def _groups(self) -> set[str]:
        return {*_GROUPS, *(name for folder in self.folders() for name, is_folder in _list(folder) if is_folder)}

    def _keys_of_option(self, group: str) -> list[str]:
        """Returns the keys of the chosen file of a group; a line of YAML that begins with a name is one."""
        option = (self.value_of(group) or _DEFAULTS[group]).rpartition(",")[2]
        for folder in self.folders():
            try:
                with open(f"{folder}/{group}/{option}.yaml", encoding="utf-8") as file:
                    names = [text.partition(":")[0] for text in file if ":" in text]
            except OSError:
                continue
            return [name for name in names if name.isidentifier() and name != "_target_"]
        return []


def _named(names: Iterable[str], about: str = "") -> Iterator[Candidate]:
    return ((name, about) for name in names)


def _prefixed(prefix: str, found: Iterable[Candidate]) -> Iterator[Candidate]:
    return ((prefix + text, about) for text, about in found)


def _in_list(current: str, names: Iterable[str]) -> Iterator[Candidate]:
    """Yields names for the last item of a list with commas, e.g. for "failed,mis"."""
    before = current[: current.rfind(",") + 1]
    return _named(before + name for name in names if name and name not in before.split(","))


def _list(folder: str) -> list[tuple[str, bool]]:
    """Returns the names in a folder, and whether each is a folder; hidden ones are left out."""
    try:
        with os.scandir(folder or ".") as entries:
            return [(entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith((".", "_"))]
    except OSError:
        return []


def _yaml_names(folder: str) -> list[str]:
    return [name.rpartition(".")[0] for name, _ in _list(folder) if name.endswith((".yaml", ".yml"))]


def _root(line: _Line) -> str:
    return os.path.expanduser(line.value_of("--root", "run.root") or "runs")


def _runs(line: _Line, current: str) -> Iterator[Candidate]:
    """Yields run names and ids; with a slash "name/id", or a path."""
    if current.startswith(("/", ".", "~")):
        yield from _paths(line, current)
        return
    root = _root(line)
    for name in [name for name, is_folder in _list(root) if is_folder and name != "sweeps"]:
        ids = [run_id for run_id, is_folder in _list(f"{root}/{name}") if is_folder]
        if "/" in current:
            yield from _named(f"{name}/{run_id}" for run_id in ids)
        elif ids:
            yield name, f"runs: {len(ids)}"
            yield from _named(ids, name)


def _sweeps(line: _Line, _current: str) -> Iterator[Candidate]:
    return _named((name for name, is_folder in _list(f"{_root(line)}/sweeps") if is_folder), "sweep")


def _paths(_line: _Line, current: str) -> Iterator[Candidate]:
    folder = current[: current.rfind("/") + 1]
    for name, is_folder in _list(os.path.expanduser(folder)):
        yield f"{folder}{name}{'/' if is_folder else ''}", ""


def _primary_files(line: _Line, _current: str) -> Iterator[Candidate]:
    return _named(name for folder in line.folders() for name in _yaml_names(folder))


def _changes(line: _Line, current: str) -> Iterator[Candidate]:
    return _in_list(current, ("config", "code", "data", *(name for name in line.keys if name[:5] != "hydra")))


_READERS: dict[str, Callable[[_Line, str], Iterator[Candidate]]] = {
    "run": _runs,
    "sweep": _sweeps,
    "run or sweep": lambda line, current: chain(_runs(line, current), _sweeps(line, current)),
    "path": _paths,
    "primary file": _primary_files,
    "changes": _changes,
}


def read_table() -> Table:
    """Returns what there is to complete in settings."""
    import json

    with open(f"{_PACKAGE}/tools/completion.json", encoding="utf-8") as file:
        table: Table = json.load(file)
    return table


def _short(text: str) -> str:
    first = " ".join(text.split()).partition(";")[0]
    return first if len(first) <= _LONGEST_TEXT else f"{first[: _LONGEST_TEXT - 3].rstrip()}..."
