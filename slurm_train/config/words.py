"""Reads the words of a command line before Hydra does: flags, and a few spellings that Hydra alone would refuse.

`+cluster=4x8` exists for every N and G; `cluster.env.NCCL_DEBUG=INFO` needs no `+`, because that mapping is open; a
`model._target_=` of your own does not inherit the arguments of the model it replaces; a value that is a text, such as
`cluster.nodelist=node[1-2],node5`, arrives as it was typed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import yaml

from slurm_train.config.schema import RunConfig, all_keys, unknown_key_error
from slurm_train.errors import ConfigError

_OPEN_MAPPINGS = ("cluster.sbatch.", "cluster.srun.", "cluster.env.", "task.")
_CUSTOM_GROUPS = ("model", "data")
# The shipped primary file chooses none of these, so a choice of one is an addition in Hydra's terms.
_OPTIONAL_GROUPS = ("cluster", "experiment", "site", "container")
# Settings of Hydra's own that are texts: paths and names, which may hold an equals sign.
_HYDRA_TEXTS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.output_subdir", "hydra.job.name")
_SIZE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,2})")
# A list whose items need no reading: no quotes, no brackets inside, no references.
_PLAIN_LIST = re.compile(r"\[([^\[\]{}'\"]+)\]")
# How Hydra's functions that give several values begin.
_SWEEP_CALL = re.compile(r"(?:choice|range|glob|interval|shuffle|sort|tag|str|int|float|bool)\s*\(")
_OVERRIDE = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[\w./@:-]+)(?:=(?P<value>.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """A command line taken apart: overrides for Hydra, and the flags that steer it, each a field of its name."""

    overrides: list[str] = field(default_factory=list)
    search_path: list[str] = field(default_factory=list)
    """What `hydra.searchpath=[...]` adds behind the shipped configurations."""
    accept: list[str] = field(default_factory=list)
    """Changes of a run in progress that the person accepts: keys, "config", "code", "data"."""
    config_dir: str | None = None
    config_path: str | None = None
    """Folder or package with a primary file of the person's own; looked at before `config_dir`."""
    config_name: str = "config"
    cfg: str | None = None
    """Which configuration to print instead of running: job, hydra or all."""
    info: str | None = None
    """Which facts about the composition to print instead of running."""
    package: str | None = None
    suggest: str | None = None
    """GiB of one device, for which `plan` prints layouts that fit."""
    resolve: bool = False
    run: bool = False
    multirun: bool = False
    wait: bool = False
    ranks: bool = False
    """Whether `plan` prints where each rank runs."""
    json: bool = False
    measure: bool = False
    help: bool = False
    hydra_help: bool = False
    version: bool = False

    @property
    def only_prints(self) -> bool:
        """Whether something about the configuration is printed instead of running."""
        return self.cfg is not None or self.info is not None


_NO_FLAGS = ("overrides", "search_path")
FLAGS = {f"--{one.name.replace('_', '-')}": one for one in fields(Words) if one.name not in _NO_FLAGS}
_SHORT = {
    "-cd": "--config-dir",
    "-cp": "--config-path",
    "-cn": "--config-name",
    "-c": "--cfg",
    "-i": "--info",
    "-p": "--package",
    "-r": "--run",
    "-m": "--multirun",
    "-h": "--help",
    "-sc": "--shell-completion",
}
FLAG_CHOICES = {
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}
# Flags of Hydra's that would be misunderstood here, with what to type instead.
_REFUSED = {
    "--shell-completion": "type `python -m slurm_train completion bash` (or zsh, fish); it prints the script to source",
    "--experimental-rerun": "a run's configuration is frozen: `python -m slurm_train resume RUN` continues it",
}


def read_words(words: Sequence[str]) -> Words:
    """Returns the flags and the overrides of a command line.

    Raises:
        ConfigError: an unknown flag, a flag without its value, or flags that exclude each other.
    """
    values: dict[str, Any] = {"overrides": [], "accept": []}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.isascii() and any("\ud800" <= character <= "\udfff" for character in word):
            raise ConfigError(f"{word!r} is not UTF-8", hint="check the encoding of your terminal or of the file name")
        if word.startswith("-"):
            _read_flag(word, rest, values)
        elif word.partition("=")[0].lstrip("+") == "hydra.searchpath":
            values["search_path"] = _read_search_path(word)
        else:
            values["overrides"].append(word)
    # Of flags that exclude each other one would have been ignored.
    actions = [f"--{name}" for name in ("run", "multirun", "cfg", "info") if name in values]
    if len(actions) > 1:
        raise ConfigError(f"{actions[0]} and {actions[1]} exclude each other", hint="drop one of the two")
    for name in ("resolve", "package"):
        if name in values and "cfg" not in values:
            raise ConfigError(f"--{name} is about what --cfg prints", hint=f"add --cfg job, or drop --{name}")
    return Words(**values)


def _read_flag(word: str, rest: list[str], values: dict[str, Any]) -> None:
    """Adds what a flag says to `values`; takes its own value from `rest` where it is the next word."""
    typed, _, value = word.partition("=")
    flag = _SHORT.get(typed, typed)
    if flag in _REFUSED:
        raise ConfigError(f"Hydra's flag {typed} is not one of this program", hint=_REFUSED[flag])
    known, choices = FLAGS.get(flag), FLAG_CHOICES.get(flag)
    is_switch = known is not None and known.default is False
    if known is None or (is_switch and value):
        hint = f"the flags are {', '.join(sorted(FLAGS))}; settings are written key=value"
        raise ConfigError(f"there is no flag {word!r}", hint=hint)
    if is_switch:
        values[known.name] = True
        return
    if flag == "--info" and not value and (not rest or rest[0] not in FLAG_CHOICES[flag]):
        value = "all"
    value = value or (rest.pop(0) if rest else "")
    if not value:
        raise ConfigError(f"the flag {typed} needs a value", hint=f"write {typed} VALUE")
    if choices and value not in choices:
        raise ConfigError(f"{typed} {value!r} is not one of its values", hint=f"use {', '.join(choices)}")
    if flag == "--accept":
        values["accept"] += read_names(value)
    else:
        values[known.name] = value


def read_names(text: str) -> list[str]:
    """Returns the names that follow `--accept`, e.g. "optim.lr,code".

    Raises:
        ConfigError: there are none.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"{text!r} has no names", hint="write them with commas, e.g. --accept optim.lr,code")
    return names


def _read_search_path(word: str) -> list[str]:
    try:
        places = yaml.safe_load(word.partition("=")[2])
    except yaml.YAMLError:
        places = None
    if not isinstance(places, list):
        hint = 'write "hydra.searchpath=[file:///my/conf,pkg://my_package.conf]"'
        raise ConfigError(f"{word!r} is not a list of places", hint=hint)
    return [str(place) for place in places]


def prepare_overrides(overrides: Sequence[str]) -> list[str]:
    """Returns the overrides as Hydra wants them.

    Raises:
        ConfigError: a word that is not an override, or a key that does not exist.
    """
    parsed = [split_word(word) for word in overrides]
    keys = {key for _, key, _ in parsed}
    custom = [group for group in _CUSTOM_GROUPS if f"{group}._target_" in keys and group not in keys]
    prepared = [f"{group}=custom" for group in custom]
    for word, (sign, key, value) in zip(overrides, parsed, strict=True):
        if value is None:
            prepared.append(word)
            continue
        # With the dot, the mapping as a whole is one as well: cluster.env={A: 1}.
        is_open = f"{key}.".startswith(_OPEN_MAPPINGS) or ("." in key and key.split(".")[0] in custom)
        if not sign and not is_open:
            _check_key(key)
        added = "++" if is_open else "+" if key in _OPTIONAL_GROUPS else ""
        prepared.append(f"{sign or added}{key}={_as_typed(key, value)}")
    return prepared


def _check_key(key: str) -> None:
    head = key.split(".")[0].split("@")[0]
    known = all_keys(RunConfig)
    if "/" not in key and head not in (*_CUSTOM_GROUPS, "experiment", "hydra") and key not in known:
        raise unknown_key_error(key, known)


def _as_typed(key: str, value: str) -> str:
    """Returns a value in Hydra's spelling: quoted where the key holds a text, so that it arrives unchanged."""
    kind = _kind_of(key)
    if kind == "texts" and (plain := _PLAIN_LIST.fullmatch(value)):
        # Blanks around an item are no part of it, to Hydra; other white space is.
        items = (quoted(item.strip(" \t")) for item in plain[1].split(","))
        return f"[{','.join(items)}]"
    keeps_meaning = value == "null" or (kind == "flag" and value.lower() in ("true", "false"))
    if kind not in ("text", "flag") or keeps_meaning or value.startswith(("'", '"')):
        return value
    return quoted(value)


def _kind_of(key: str) -> Literal["text", "texts", "flag", "other"]:
    if key.startswith("cluster.env.") or key in _HYDRA_TEXTS:
        return "text"
    if key.startswith(("cluster.sbatch.", "cluster.srun.")):
        return "flag"
    hint = None if key in _OPTIONAL_GROUPS else all_keys(RunConfig).get(key)
    if hint in (str, str | None):
        return "text"
    return "texts" if hint in (list[str], list[str] | None) else "other"


def is_one_value(key: str, value: str) -> bool:
    """Returns whether a value is one text even in a sweep, although it has commas or brackets.

    A text has no need of a grammar where it has no comma. A text for Slurm keeps its commas (cluster.exclude=a,b), and
    so does a plain list of texts; choice(...) sweeps them.
    """
    kind = _kind_of(key)
    if kind == "texts":
        return _PLAIN_LIST.fullmatch(value) is not None
    if kind == "other" or _SWEEP_CALL.match(value):
        return False
    return "," not in value or key.startswith("cluster.") or key in _HYDRA_TEXTS


def quoted(text: str) -> str:
    """Returns a text in quotes that Hydra's grammar reads back unchanged."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text, Quote.single).with_quotes()


def split_word(word: str) -> tuple[str, str, str | None]:
    """Returns sign, key and value of `[+]key=value`; the value is None for `~key`.

    Raises:
        ConfigError: the word is no override.
    """
    match = _OVERRIDE.fullmatch(word)
    if match is None or (match["value"] is None and match["sign"] != "~"):
        raise ConfigError(
            f"{word!r} is neither a verb nor a setting",
            hint="settings are written key=value, e.g. optim.lr=3e-4; `python -m slurm_train --help` lists the verbs",
        )
    return match["sign"] or "", match["key"], match["value"]


def cluster_sizes(overrides: Sequence[str]) -> list[tuple[str, int, int]]:
    """Returns the sizes named by `cluster=NxG` words as (name, nodes, GPUs per node), e.g. ("4x8", 4, 8)."""
    sizes = []
    for sign, key, value in map(split_word, overrides):
        if key == "cluster" and value and sign != "~":
            sizes += [(m.group(), int(m[1]), int(m[2])) for m in map(_SIZE.fullmatch, value.split(",")) if m]
    return sizes
