"""Reads the words of a command line before Hydra does: flags, and a few spellings that Hydra alone would refuse.

`+cluster=4x8` exists for every N and G; `cluster.env.NCCL_DEBUG=INFO` needs no `+`, because that mapping is open; a
`model._target_=` of your own does not inherit the arguments of the model it replaces; a value that is a text, such as
`cluster.nodelist=node[1-2],node5`, arrives as it was typed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

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
    """A command line taken apart: overrides for Hydra, and the flags that steer it."""

    overrides: list[str] = field(default_factory=list)
    config_dir: str | None = None
    config_path: str | None = None
    """Folder or package with a primary file of the person's own; looked at before `config_dir`."""
    config_name: str = "config"
    search_path: tuple[str, ...] = ()
    """What `hydra.searchpath=[...]` adds behind the shipped configurations."""
    show: str | None = None
    """Which configuration to print instead of running: job, hydra or all."""
    info: str | None = None
    """Which facts about the composition to print instead of running."""
    resolve: bool = False
    package: str | None = None
    single: bool = False
    multirun: bool = False
    wait: bool = False
    ranks: bool = False
    """Whether `plan` prints where each rank stands."""
    suggest: str | None = None
    """GiB of one device, for which `plan` prints layouts that fit."""
    json: bool = False
    measure: bool = False
    accept: tuple[str, ...] = ()
    """Changes of a run in progress that the person accepts: keys, "config", "code", "data"."""
    help: bool = False
    hydra_help: bool = False
    version: bool = False

    @property
    def only_prints(self) -> bool:
        """Whether something about the configuration is printed instead of running."""
        return self.show is not None or self.info is not None


def read_words(words: Sequence[str]) -> Words:
    """Returns the flags and the overrides of a command line.

    Raises:
        ConfigError: an unknown flag, a flag without its value, or a word that is not `key=value`.
    """
    for word in words:
        if not word.isascii() and any("\ud800" <= character <= "\udfff" for character in word):
            raise ConfigError(f"{word!r} is not UTF-8", hint="check the encoding of your terminal or of the file name")
    values: dict[str, str | bool | tuple[str, ...]] = {}
    accepted: list[str] = []
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("-"):
            name, _, given = word.partition("=")
            if name == "--accept":
                accepted += read_names(given or (rest.pop(0) if rest else ""))
            else:
                values.update(_read_flag(name, given, rest))
        elif word.partition("=")[0].lstrip("+") == "hydra.searchpath":
            values["search_path"] = _read_search_path(word)
        else:
            overrides.append(word)
    read = Words(overrides=overrides, accept=tuple(accepted), **values)  # type: ignore[arg-type]  # the table below gives each its type
    # Of flags that do not go together one would have been ignored.
    actions = {"--run": read.single, "--multirun": read.multirun, "--cfg": read.show, "--info": read.info}
    given_actions = [flag for flag, value in actions.items() if value]
    if len(given_actions) > 1:
        one, other = given_actions[:2]
        raise ConfigError(f"{one} and {other} do not go together", hint=f"drop {one}, or {other}")
    for flag, value in (("--resolve", read.resolve), ("--package", read.package)):
        if value and not read.show:
            raise ConfigError(f"{flag} is about what --cfg prints", hint=f"add --cfg job, or drop {flag}")
    return read


def read_names(text: str) -> list[str]:
    """Returns the names that follow `--accept`, e.g. "optim.lr,code".

    Raises:
        ConfigError: there are none.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError("the flag --accept needs a value", hint="write --accept optim.lr, or --accept code,data")
    return names


def _read_search_path(word: str) -> tuple[str, ...]:
    value = word.partition("=")[2]
    listed = re.fullmatch(r"\[(.*)\]", value, re.DOTALL)
    if listed is None:
        raise ConfigError(
            f"{word!r} names no list of places", hint='write "hydra.searchpath=[file:///my/conf,pkg://my_package.conf]"'
        )
    return tuple(item.strip(" '\"") for item in listed[1].split(",") if item.strip(" '\""))


_FLAGS = {
    "--config-dir": "config_dir",
    "-cd": "config_dir",
    "--config-path": "config_path",
    "-cp": "config_path",
    "--config-name": "config_name",
    "-cn": "config_name",
    "--cfg": "show",
    "-c": "show",
    "--package": "package",
    "-p": "package",
    "--suggest": "suggest",
}
_SWITCHES = {
    "--run": "single",
    "-r": "single",
    "--multirun": "multirun",
    "-m": "multirun",
    "--wait": "wait",
    "--ranks": "ranks",
    "--json": "json",
    "--measure": "measure",
    "--resolve": "resolve",
    "--help": "help",
    "-h": "help",
    "--hydra-help": "hydra_help",
    "--version": "version",
}
# Flags of Hydra's that would be misunderstood here, with what to type instead.
_REFUSED = {
    "--shell-completion": "type `python -m slurm_train completion bash` (or zsh, fish); it prints the script to source",
    "--experimental-rerun": "a run's configuration is frozen: `python -m slurm_train resume RUN` continues it",
}
_REFUSED["-sc"] = _REFUSED["--shell-completion"]
_CHOICES = {
    "show": ("job", "hydra", "all"),
    "info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}


def _read_flag(name: str, given: str, rest: list[str]) -> dict[str, str | bool]:
    if name in _SWITCHES and not given:
        return {_SWITCHES[name]: True}
    if name in ("--info", "-i"):
        value = given or (rest.pop(0) if rest and rest[0] in _CHOICES["info"] else "all")
        return _checked(name, "info", value)
    if name in _REFUSED:
        raise ConfigError(f"Hydra's flag {name} is not one of this program", hint=_REFUSED[name])
    if name not in _FLAGS:
        known = ", ".join(sorted(flag for flag in (*_FLAGS, *_SWITCHES, "--info", "--accept") if flag.startswith("--")))
        raise ConfigError(f"there is no flag {name!r}", hint=f"the flags are {known}; settings are written key=value")
    if not given and not rest:
        raise ConfigError(f"the flag {name} needs a value", hint=f"write {name} VALUE")
    return _checked(name, _FLAGS[name], given or rest.pop(0))


def _checked(flag: str, target: str, value: str) -> dict[str, str | bool]:
    if target in _CHOICES and value not in _CHOICES[target]:
        raise ConfigError(f"{flag} {value!r} is not one of its values", hint=f"use {', '.join(_CHOICES[target])}")
    return {target: value}


def prepare_overrides(overrides: Sequence[str]) -> list[str]:
    """Returns the overrides as Hydra wants them.

    Raises:
        ConfigError: a word that is not an override, or a key that does not exist.
    """
    parsed = [split_word(word) for word in overrides]
    custom = {
        key.split(".")[0] for _, key, _ in parsed if key.split(".")[0] in _CUSTOM_GROUPS and key.endswith("._target_")
    }
    custom -= {key for _, key, _ in parsed}
    prepared = [f"{group}=custom" for group in sorted(custom)]
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


def _as_typed(key: str, value: str) -> str:
    """Returns a value in Hydra's spelling: quoted where the key holds a text, so that it arrives unchanged."""
    kind = _kind_of(key)
    if kind == "texts" and (plain := _PLAIN_LIST.fullmatch(value)):
        # Blanks around an item are no part of it, to Hydra; other white space is.
        items = [item.strip(" \t") for item in plain[1].split(",")]
        return f"[{','.join(_quoted(item) for item in items)}]"
    keeps_meaning = value == "null" or (kind == "flag" and value.lower() in ("true", "false"))
    if kind not in ("text", "flag") or keeps_meaning or value.startswith(("'", '"')):
        return value
    return _quoted(value)


def _kind_of(key: str) -> Literal["text", "texts", "flag", "other"]:
    if key.startswith("cluster.env.") or key in _HYDRA_TEXTS:
        return "text"
    if key.startswith(("cluster.sbatch.", "cluster.srun.")):
        return "flag"
    if key in _OPTIONAL_GROUPS:
        return "other"
    hint = all_keys(RunConfig).get(key)
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


def _quoted(text: str) -> str:
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


def _check_key(key: str) -> None:
    head = key.split(".")[0].split("@")[0]
    if "/" in key or head in (*_CUSTOM_GROUPS, "experiment", "hydra"):
        return
    known = all_keys(RunConfig)
    if key not in known:
        raise unknown_key_error(key, known)


def chosen_sites(overrides: Sequence[str]) -> list[str]:
    """Returns the names that `site=NAME` words choose."""
    found = (split_word(word) for word in overrides)
    return [value for sign, key, value in found if key == "site" and value and value != "null" and sign != "~"]


def cluster_sizes(overrides: Sequence[str]) -> list[tuple[str, int, int]]:
    """Returns the sizes named by `cluster=NxG` words as (name, nodes, GPUs per node), e.g. ("4x8", 4, 8)."""
    sizes = []
    for word in overrides:
        sign, key, value = split_word(word)
        if key == "cluster" and value and sign != "~":
            sizes += [(m.group(), int(m[1]), int(m[2])) for m in map(_SIZE.fullmatch, value.split(",")) if m]
    return sizes
