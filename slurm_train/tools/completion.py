"""`completion bash|zsh|fish`: prints the script that completes `slurm-train` at a TAB; `complete`: what it asks for.

The library shtab makes the script from the table of verbs. The script is static: verbs, flags and the keys of the
configuration are words in it, and a TAB starts no program. Only the runs below `runs/` are asked for, with `complete`,
which imports nothing slow. Without a verb the words are settings of a run, so what shtab has made for `plan`, which
takes the same words, completes them.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slurm_train.verbs import DEFAULT_ROOT, PUBLIC_VERBS, Verb, parse

if TYPE_CHECKING:
    from argparse import Action, ArgumentParser

_PROGRAM = "slurm-train"

_BASH = """\
_slurm_train_words=(@WORDS@)
_slurm_train_runs() {
  compgen -W "$(@PYTHON@ -m slurm_train complete 2>/dev/null)" -- "$1"
}
# Bash cuts a line at "=" as well. The whole word is matched, and then given without what is before the last "=".
_slurm_train_settings() {
  local line=${COMP_LINE:0:COMP_POINT} before="" match
  local word=${line##*[[:space:]]}
  word=${word#[\\"\\']}
  if [[ $word == *=* ]]; then before=${word%"${word##*=}"}; fi
  while IFS= read -r match; do
    printf '%s\\n' "${match#"$before"}"
  done < <(compgen -W "${_slurm_train_words[*]}" -- "$word")
}
"""
_BASH_END = """
_slurm_train() {
  if ((COMP_CWORD > 1)) && [[ " ${_shtab_slurm_train_subparsers[*]} " != *" ${COMP_WORDS[1]} "* ]]; then
    COMP_WORDS=("${COMP_WORDS[0]}" plan "${COMP_WORDS[@]:1}")
    ((COMP_CWORD += 1))
  fi
  _shtab_slurm_train "$@"
  if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=.] ]]; then compopt -o nospace; fi
}
_shtab_slurm_train_pos_0_COMPGEN=_slurm_train_settings
complete -o bashdefault -F _slurm_train slurm-train
"""

_ZSH = """\
_slurm_train_words=(@WORDS@)
_slurm_train_runs() {
  compadd -- ${(f)"$(@PYTHON@ -m slurm_train complete 2>/dev/null)"}
}
_slurm_train_settings() {
  compadd -S '' -- ${(M)_slurm_train_words:#*[=.]}
  compadd -- ${_slurm_train_words:#*[=.]}
}
"""
_ZSH_END = """
_slurm_train_verbs=(@VERBS@)
_slurm_train() {
  if (( CURRENT == 2 )); then
    _slurm_train_settings
  elif (( ! ${_slurm_train_verbs[(Ie)$words[2]]} )); then
    words=("$words[1]" plan "${(@)words[2,-1]}")
    (( CURRENT += 1 ))
  fi
  _shtab_slurm_train
}
compdef _slurm_train slurm-train
"""

_FISH = """\
set -g _slurm_train_words @WORDS@
function _slurm_train_settings
    printf '%s\\n' $_slurm_train_words
end
function _slurm_train_runs
    @PYTHON@ -m slurm_train complete 2>/dev/null
end
"""
_FISH_END = """
complete -c slurm-train -n _shtab_slurm_train_using -ka '(_slurm_train_settings)'
"""

_SCRIPTS = {"bash": (_BASH, _BASH_END), "zsh": (_ZSH, _ZSH_END), "fish": (_FISH, _FISH_END)}
_RUNS = {"bash": "_slurm_train_runs", "zsh": "_slurm_train_runs", "fish": "(_slurm_train_runs)"}
_SETTINGS = {"bash": "_slurm_train_settings", "zsh": "_slurm_train_settings", "fish": "(_slurm_train_settings)"}

# Characters that no shell expands: of a list of words, bash would run what is in `$(...)`.
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=.,:/@%")
_SIZES = ("1x1", "1x4", "1x8", "2x8", "4x8", "8x8")
_GROUPS = ("model", "data", "optim", "site", "container", "+cluster", "+experiment")
_OPEN_GROUPS = ("model", "data", "optim")
_HYDRA_WORDS = ("hydra.mode=MULTIRUN", "hydra.searchpath=", "hydra.job.name=", "hydra/sweeper=")


def complete(_words: Sequence[str]) -> int:
    """Prints names and ids of the runs and sweeps below `runs/`, one per line, and returns 0."""
    names: list[str] = []
    folders = _subfolders(DEFAULT_ROOT)
    for place in (DEFAULT_ROOT, *(f"{DEFAULT_ROOT}/{name}" for name in folders if name.startswith("@"))):
        for name in _subfolders(place):
            if not name.startswith("@"):
                ids = _subfolders(f"{place}/{name}")
                names += ids if name == "sweeps" else [name, *ids]
    for name in names:
        if _PLAIN.issuperset(name):
            print(name)
    return 0


def _subfolders(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return []


def main(words: Sequence[str]) -> int:
    """Prints the script and returns 0."""
    import shtab

    shell = parse("completion", words).shell
    before, after = _SCRIPTS[shell]
    parser = _build_parser()
    script = shtab.complete(parser, shell, preamble=before) + after
    if shell == "zsh":
        # Of several words of one kind shtab has zsh complete the first only.
        script = script.replace('"(*)::', '"*:').replace('"(*):', '"*:')
    script = script.replace("@WORDS@", " ".join(settings_words()))
    script = script.replace("@VERBS@", " ".join(PUBLIC_VERBS))
    print(script.replace("@PYTHON@", shlex.quote(sys.executable)))
    return 0


# --- what shtab is given ---


def _build_parser() -> ArgumentParser:
    from argparse import ArgumentParser

    parser = ArgumentParser(prog=_PROGRAM, add_help=False)
    _add_flags_of_settings(parser)
    verbs = parser.add_subparsers()
    for name, verb in PUBLIC_VERBS.items():
        # The verbs that read their words themselves have --help among the flags of settings.
        _add_verb(verbs.add_parser(name, help=verb.about, add_help=verb.arguments is not None), verb)
    return parser


def _add_verb(parser: ArgumentParser, verb: Verb) -> None:
    for argument in verb.arguments or ():
        if argument.about:
            action = parser.add_argument(*argument.names, help=argument.about, **argument.options)
            _offer(action, argument.takes)
    if verb.actions:
        actions = parser.add_subparsers()
        for name, action_verb in verb.actions.items():
            _add_verb(actions.add_parser(name, help=action_verb.about), action_verb)
    elif verb.arguments is None:
        _add_flags_of_settings(parser)
        _add_settings(parser)
    elif verb.settings:
        _add_settings(parser)


def _add_flags_of_settings(parser: ArgumentParser) -> None:
    from slurm_train.config.words import FLAG_CHOICES, FLAGS, SHORT

    takes = {"config_dir": "path", "config_path": "path", "accept": "changes"}
    for flag, field in FLAGS.items():
        # Fish knows short flags of one letter only.
        names = [short for short, long in SHORT.items() if long == flag and len(short) == 2]
        if field.default is False:
            parser.add_argument(*names, flag, action="store_true", help=field.name)
        else:
            choices = "|".join(FLAG_CHOICES.get(flag, ()))
            _offer(parser.add_argument(*names, flag, help=field.name), choices or takes.get(field.name, ""))


def _add_settings(parser: ArgumentParser) -> None:
    _offer(parser.add_argument("settings", nargs="*", help="key=value"), "settings")


def _offer(action: Action, takes: str) -> None:
    """Says what is offered for a flag or a word.

    Args:
        action: of the parser.
        takes: as in `Argument`: a kind of word, or words between "|" or ",".
    """
    import shtab

    completers: Mapping[str, Any] = {
        "path": shtab.FILE,
        "run": _RUNS,
        "sweep": _RUNS,
        "run or sweep": _RUNS,
        "settings": _SETTINGS,
    }
    if takes in completers:
        action.complete = completers[takes]  # type: ignore[attr-defined]  # where shtab looks
    elif takes not in ("", "-"):
        action.choices = _words_of_kind(takes)


def _words_of_kind(takes: str) -> list[str]:
    from slurm_train.config.schema import RunConfig, all_keys
    from slurm_train.status.run_status import RunState

    if takes == "states":
        return [*(state.value for state in RunState), "missing"]
    if takes == "changes":
        return ["config", "code", "data", *all_keys(RunConfig)]
    return takes.replace(",", "|").split("|")


# --- the words that are settings ---


def settings_words() -> list[str]:
    """Returns settings as words, e.g. "optim.lr=", "optim.schedule=cosine", "model=gpt", "cluster.env."."""
    words = [*_group_words(), *_key_words(), *_HYDRA_WORDS]
    return sorted(word for word in dict.fromkeys(words) if _PLAIN.issuperset(word))


def _group_words() -> Iterator[str]:
    import yaml

    from slurm_train.assets import asset_dir
    from slurm_train.config.schema import RunConfig, all_keys
    from slurm_train.config.site_profile import present_config_dir

    keys = all_keys(RunConfig)
    for group in _GROUPS:
        name = group.lstrip("+")
        for place in filter(None, (asset_dir("conf"), present_config_dir())):
            folder = place / name
            for path in sorted(folder.glob("*.yaml")):
                if (name, path.stem) != ("cluster", "base"):
                    yield f"{group}={path.stem}"
                if group not in _OPEN_GROUPS:
                    continue
                # What the class of the file takes.
                for keyword in yaml.safe_load(path.read_text(encoding="utf-8")) or {}:
                    if f"{group}.{keyword}" not in keys and not keyword.startswith("_"):
                        yield f"{group}.{keyword}="
        if group in _OPEN_GROUPS:
            yield f"{group}._target_="
    for size in _SIZES:
        yield f"+cluster={size}"


def _key_words() -> Iterator[str]:
    from typing import get_args, get_origin

    from slurm_train.config.schema import RunConfig, all_keys

    kinds = all_keys(RunConfig)
    for key, kind in kinds.items():
        has_parts = any(other.startswith(f"{key}.") for other in kinds)
        if has_parts or key in _OPEN_GROUPS:
            continue
        values = list(_values(kind))
        if values:
            yield from (f"{key}={value}" for value in values)
        elif any(get_origin(option) is dict for option in (kind, *get_args(kind))):
            yield f"{key}."
        else:
            yield f"{key}="


def _values(kind: object) -> Iterator[str]:
    """Yields the values of a type that has few, e.g. "true" and "false" for bool; others may be possible besides."""
    from typing import Literal, get_args, get_origin

    for option in (kind, *get_args(kind)):
        if option is bool:
            yield from ("true", "false")
        elif get_origin(option) is Literal:
            yield from map(str, get_args(option))
