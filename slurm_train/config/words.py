"""Reads the words of a command line before Hydra does: flags, and a few spellings that Hydra alone would refuse.

`+cluster=4x8` and `+cluster=2-4x8` exist for every number; `cluster.time=4:00:00` is cluster.time_limit_min as Slurm
writes it; `cluster.env.NCCL_DEBUG=INFO` needs no `+`, because that mapping is open; a `model._target_=` of your own
does not inherit the arguments of the model it replaces (`data` and `optim` likewise); a value that is a text, such as
`cluster.nodelist=node[1-2],node5`, arrives as it was typed. A word that is none of all this is refused with what was
probably meant.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import yaml

from slurm_train.config.schema import RunConfig, all_keys, unknown_key_error
from slurm_train.config.synonyms import OTHER_NAMES, advise
from slurm_train.errors import ConfigError

_OPEN_MAPPINGS = ("cluster.sbatch.", "cluster.srun.", "cluster.env.", "task.", "optim.schedule.", "batch.growth.")
_CUSTOM_GROUPS = ("model", "data", "optim")
# The shipped primary file chooses none of these, so a choice of one is an addition in Hydra's terms.
_OPTIONAL_GROUPS = ("cluster", "experiment", "site", "container")
# A setting of Hydra that is a text, which may have an equals sign.
_JOB_NAME = "hydra.job.name"
_SIZE = re.compile(r"([1-9]\d{0,4}(?:-[1-9]\d{0,4})?)x([1-9]\d{0,2})")
SLURM_LISTS = ("partition", "nodelist", "exclude")
"""Texts of `cluster` that Slurm takes several of, with commas."""
# Those, and flags of the same kind. In --constraint brackets around all mean something to Slurm.
_LISTS_OF_SLURM = (*SLURM_LISTS, "mail-type", "licenses", "gres")
_LIST_IN_BRACKETS = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]")
# A text between quotes, as Hydra reads it.
_QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
# An item of a list that needs no reading: without quotes and brackets; a reference such as ${seed} is part of it, and
# so is a name in braces such as {step}.
_PLAIN_ITEM = r"(?:[^\[\]{}'\"$,]|\{\w+\}|\$\{[^\[\]{},'\"]+\}|\$(?!\{))*"
_ITEM = re.compile(rf"\s*({_QUOTED})\s*(?=,|$)|({_PLAIN_ITEM})")
# A list of such items, some of them in quotes.
_LIST_OF_TEXTS = rf"\[(?!\])(?:\s*(?:{_QUOTED})\s*|{_PLAIN_ITEM})(?:,(?:\s*(?:{_QUOTED})\s*|{_PLAIN_ITEM}))*\]"
_LISTS = re.compile(rf"{_QUOTED}|({_LIST_OF_TEXTS})")
# A path that begins with the home, of nothing that has a meaning to Hydra.
_IN_HOME = re.compile(r"~[^,\[\]{}()'\"$\\]*")
# A mapping of the same kind.
_PLAIN_MAPPING = re.compile(r"\{([^\[\]{}'\"]+)\}")
_OPEN_TEXTS = ("cluster.env", "cluster.sbatch", "cluster.srun")
# How Hydra's functions that give several values begin.
_SWEEP_CALL = re.compile(r"(?:choice|range|glob|interval|shuffle|sort|tag|str|int|float|bool)\s*\(")
# Slurm's own formats of a time limit: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS.
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})")
_OVERRIDE = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[\w./@:-]+)(?:=(?P<value>.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """A command line taken apart: overrides for Hydra, and the flags that steer it, each a field of its name."""

    overrides: list[str] = field(default_factory=list)
    search_path: list[str] = field(default_factory=list)
    """What `hydra.searchpath=[...]` adds behind the shipped configurations."""
    accept: list[str] = field(default_factory=list)
    """Changes of a run in progress that the person accepts: keys, "config", "code", "data"."""
    after: list[str] = field(default_factory=list)
    """Runs that Slurm waits for before it starts the job, from `after=RUN`: no part of the configuration."""
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
    when: str | None = None
    """Numbers of nodes, for which `plan` prints when the run would start and end."""
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


_NO_FLAGS = ("overrides", "search_path", "after")
FLAGS = {f"--{field_.name.replace('_', '-')}": field_ for field_ in fields(Words) if field_.name not in _NO_FLAGS}
SHORT = {
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


def read_words(words: Sequence[str], *, verbs: Collection[str] = ()) -> Words:
    """Returns the flags and the overrides of a command line.

    Args:
        words: as typed.
        verbs: what a word that is no setting may have been meant for.

    Raises:
        ConfigError: an unknown flag, a flag without its value, or flags that exclude each other.
    """
    values: dict[str, Any] = {"overrides": [], "accept": [], "after": []}
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if not word.isascii() and any("\ud800" <= character <= "\udfff" for character in word):
            raise ConfigError(f"{word!r} is not UTF-8", hint="check the encoding of your terminal or of the file name")
        if word.startswith("-"):
            _read_flag(word, remaining, values)
        elif word.partition("=")[0].lstrip("+") == "hydra.searchpath":
            values["search_path"] = _read_search_path(word)
        elif word.startswith("after="):
            values["after"] += read_names(word.removeprefix("after="), example="after=gpt-stdlib,3f9a1c07")
        else:
            if not _is_override(word):
                raise _unknown_word_error(word, [*values["overrides"][-1:], ""][0], remaining, verbs)
            values["overrides"].append(word)
    # Of flags that exclude each other one would have been ignored.
    actions = [f"--{name}" for name in ("run", "multirun", "cfg", "info") if name in values]
    if len(actions) > 1:
        raise ConfigError(f"{actions[0]} and {actions[1]} exclude each other", hint="drop one of the two")
    for name in ("resolve", "package"):
        if name in values and "cfg" not in values:
            more = "; a partition is cluster.partition=NAME" if name == "package" else ""
            raise ConfigError(f"--{name} is about what --cfg prints", hint=f"add --cfg job, or drop --{name}{more}")
    return Words(**values)


def _read_flag(word: str, remaining: list[str], values: dict[str, Any]) -> None:
    """Adds what a flag says to `values`; takes its value from `remaining` if it is the next word."""
    typed, _, value = word.partition("=")
    flag = SHORT.get(typed, typed)
    if flag in _REFUSED:
        raise ConfigError(f"Hydra's flag {typed} is not one of this program", hint=_REFUSED[flag])
    flag_field = FLAGS.get(flag)
    choices = FLAG_CHOICES.get(flag)
    is_switch = flag_field is not None and flag_field.default is False
    if flag_field is None or (is_switch and value):
        raise ConfigError(f"there is no flag {word!r}", hint=_hint_for_flag(typed, value or [*remaining, ""][0]))
    if is_switch:
        values[flag_field.name] = True
        return
    if flag == "--info" and not value and (not remaining or remaining[0] not in FLAG_CHOICES[flag]):
        value = "all"
    value = value or (remaining.pop(0) if remaining else "")
    if not value:
        raise ConfigError(f"the flag {typed} needs a value", hint=f"write {typed} VALUE")
    if choices and value not in choices:
        raise ConfigError(f"{typed} {value!r} is not one of its values", hint=f"use {', '.join(choices)}")
    if flag == "--accept":
        values["accept"] += read_names(value)
    else:
        values[flag_field.name] = value


def _hint_for_flag(typed: str, value: str) -> str:
    """Returns what to type instead of a flag that there is not: a setting is written without dashes."""
    import difflib

    key = typed.lstrip("-").replace("-", "_")
    if _is_setting(key):
        return f"a setting has no dashes: write {key}={value if _is_value(value) else 'VALUE'}"
    advice = advise(typed, value if _is_value(value) else None)
    if advice:
        return advice
    near = difflib.get_close_matches(typed, FLAGS, n=1, cutoff=0.75)
    flags = f"did you mean {near[0]}?" if near else f"the flags are {', '.join(sorted(FLAGS))};"
    return f"{flags} Settings are written key=value"


def _is_setting(key: str) -> bool:
    keys = all_keys(RunConfig)
    return key in keys and not any(word.startswith(f"{key}.") for word in keys)


def _is_value(word: str) -> bool:
    return bool(word) and not word.startswith("-") and "=" not in word


def _unknown_word_error(word: str, before: str, after: Sequence[str], verbs: Collection[str]) -> ConfigError:
    """Returns the error for a word that is no setting, with what was probably meant.

    Args:
        word: as typed.
        before: the setting in front of it, "" if there is none.
        after: the words behind it.
        verbs: those that there are.
    """
    import difflib

    following = [*after, ""][0]
    value = following.lstrip("=") or [*after, "", ""][1]
    key = word.rstrip("=:")
    advised = advise(word, following if _is_value(following) else None)
    near = difflib.get_close_matches(word, [*verbs, *OTHER_NAMES], n=1, cutoff=0.7)
    hint = "settings are written key=value, e.g. optim.lr=3e-4; `python -m slurm_train --help` lists the verbs"
    if before.endswith(("=", ",")) or before.count("[") > before.count("]") or before.count("{") > before.count("}"):
        hint = f'a blank ends a word: write {before}{word}, or with its blanks in quotes: "{before} {word}"'
    elif word.startswith("="):
        hint = "no blanks around the equals sign: write key=value, e.g. optim.lr=3e-4"
    elif _is_setting(key) and (word != key or following.startswith("=") or _is_value(following)):
        hint = f"write {key}={value}, without blanks"
    elif word in verbs:
        hint = f"the verb is the first word: python -m slurm_train {word} ..."
    elif word.endswith(".py"):
        arguments = [argument for argument in after if not argument.startswith("+")]
        setting = f"script=[{','.join([word, *arguments])}]"
        hint = f'a script of yours runs on every rank with "{setting}"; docs/bring-your-own.md has the other ways'
    elif word.endswith((".yaml", ".yml")):
        folder, _, name = word.rpartition("/")
        hint = f"write --config-dir {folder or '.'} --config-name {name.rpartition('.')[0]}"
    elif word.endswith((".parquet", ".jsonl", ".json", ".txt")):
        hint = f"write data=hf data.path={word}"
    elif _SIZE.fullmatch(word):
        hint = f"write +cluster={word}"
    elif advised:
        hint = advised
    elif near:
        hint = f"did you mean `{near[0]}`?" if near[0] in verbs else advise(near[0])
    elif "/" in word:
        hint = f"for a run: `status {word}`, `logs {word}`, `resume {word}`"
    elif word.isidentifier() and verbs:
        hint = f"verbs: {', '.join(verbs)}; settings are written key=value"
    return ConfigError(f"{word!r} is neither a verb nor a setting", hint=hint)


def read_names(text: str, *, example: str = "--accept optim.lr,code") -> list[str]:
    """Returns the names that follow `--accept` or `after=`, e.g. "optim.lr,code".

    Raises:
        ConfigError: there are none.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"{text!r} has no names", hint=f"write them with commas, e.g. {example}")
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
    overrides = _with_time_limit(overrides)
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
        # A group, with or without a package, has options of its own.
        is_group = "/" in key or re.split(r"[.@]", key)[0] in (*_CUSTOM_GROUPS, "experiment", "hydra")
        if not (sign or is_open or is_group or key in all_keys(RunConfig)):
            raise unknown_key_error(key, all_keys(RunConfig), value=value)
        added = "++" if is_open else "+" if key in _OPTIONAL_GROUPS else ""
        prepared.append(f"{sign or added}{key}={_as_typed(key, value)}")
    return prepared


def _with_time_limit(words: Sequence[str]) -> list[str]:
    """Returns overrides with `cluster.time=4:00:00` as `cluster.time_limit_min=240`; an unfinished minute counts.

    Raises:
        ConfigError: it is none of Slurm's formats, or both are typed.
    """
    split = [split_word(word) for word in words]
    keys = {key for _, key, _ in split} & {"cluster.time", "cluster.time_limit_min"}
    if len(keys) > 1:
        raise ConfigError(f"{' and '.join(sorted(keys))} both give the time limit", hint="drop one of the two")
    for _, key, value in split:
        text = (value or "").strip("'\"")
        if key == "cluster.time_limit_min" and not text.isdigit() and is_time(text):
            message = f"cluster.time_limit_min={text} is no whole number of minutes"
            raise ConfigError(message, hint=f"write cluster.time={text}")
    return [
        word if key != "cluster.time" or value is None else f"{sign}cluster.time_limit_min={minutes(value)}"
        for word, (sign, key, value) in zip(words, split, strict=True)
    ]


def is_time(text: str) -> bool:
    """Returns whether a text is in one of Slurm's formats of a time limit, e.g. "1-12:00"."""
    return _TIME.fullmatch(text) is not None


def minutes(text: str) -> int:
    """Returns the minutes of a time limit as Slurm writes it, e.g. 240 for "4:00:00"; an unfinished minute counts.

    Raises:
        ConfigError: it is none of Slurm's formats.
    """
    match = _TIME.fullmatch(text.strip("'\""))
    if match is not None:
        days = match["days"]
        parts = [int(part) for part in match["clock"].split(":")]
        # Slurm reads 30:00 as minutes and seconds, but 1-12:30 as a day, hours and minutes.
        clock = [*parts, 0, 0][:3] if days or len(parts) == 3 else [0, *parts, 0][:3]
        seconds = 86400 * int(days or 0) + 3600 * clock[0] + 60 * clock[1] + clock[2]
        if seconds > 0:
            return math.ceil(seconds / 60)
    raise ConfigError(
        f"cluster.time={text} is no time limit",
        hint="write it as Slurm does, D-HH:MM:SS, HH:MM:SS or minutes: cluster.time=4:00:00",
    )


def _as_typed(key: str, value: str) -> str:
    """Returns a value in Hydra's spelling: quoted where the key holds a text, so that it arrives unchanged."""
    kind = _kind_of(key)
    mapping = _PLAIN_MAPPING.fullmatch(value) if key in _OPEN_TEXTS else None
    if mapping:
        # Hydra would make 1000.0 of 1e3.
        pairs = (item.partition(":") for item in mapping[1].split(","))
        words = (f"{name.strip()}: {_as_typed(f'{key}.x', word.strip())}" for name, _, word in pairs)
        return f"{{{', '.join(words)}}}"
    if kind == "texts":
        return with_quoted_items(key, value)
    if kind == "other" and _IN_HOME.fullmatch(value):
        # Hydra's grammar has no ~; a shell expands it only at the beginning of a word.
        return quoted(value)
    in_brackets = _LIST_IN_BRACKETS.fullmatch(value)
    is_list_of_slurm = key.rpartition(".")[2].replace("_", "-") in _LISTS_OF_SLURM and kind in ("text", "flag")
    if is_list_of_slurm and in_brackets is not None and in_brackets[1].strip():
        # As in a file: Slurm has commas between the items, and no brackets around them.
        items = (item.strip().strip("'\"") for item in in_brackets[1].split(","))
        return quoted(",".join(items))
    keeps_meaning = value == "null" or (kind == "flag" and value.lower() in ("true", "false"))
    if kind not in ("text", "flag") or keeps_meaning or value.startswith(("'", '"')):
        return value
    return quoted(value)


def with_quoted_items(key: str, value: str) -> str:
    """Returns a value in Hydra's spelling: the items of lists of texts are quoted, so that they arrive unchanged.

    Also those of several lists, as a sweep has them: Hydra would make 1000.0 of 1e3, and cannot read --lr=1 without.
    Items that are in quotes already stay as they are.
    """
    if _kind_of(key) != "texts":
        return value

    def with_quotes(match: re.Match[str]) -> str:
        if match[1] is None:
            # A text of the person's own in quotes, outside of a list.
            return match[0]
        # Blanks around an item are no part of it, to Hydra; other white space is.
        items = [in_quotes or quoted(plain.strip(" \t")) for in_quotes, plain in _items(match[1][1:-1])]
        return f"[{','.join(items)}]"

    return _LISTS.sub(with_quotes, value)


def _items(text: str) -> Iterator[tuple[str, str]]:
    """Yields the items of a list of texts, each as (in quotes, "") or ("", plain)."""
    position = 0
    while position <= len(text):
        match = _ITEM.match(text, position)
        assert match is not None
        yield match[1] or "", match[2] or ""
        position = match.end() + 1


def _kind_of(key: str) -> Literal["text", "texts", "flag", "other"]:
    if key.startswith("cluster.env.") or key == _JOB_NAME:
        return "text"
    if key.startswith(("cluster.sbatch.", "cluster.srun.")):
        return "flag"
    hint = None if key in _OPTIONAL_GROUPS else all_keys(RunConfig).get(key)
    if hint in (str, str | None):
        return "text"
    return "texts" if hint in (list[str], list[str] | None) else "other"


def is_list_of_texts(key: str) -> bool:
    """Returns whether a key holds a list of texts, such as the words of a script."""
    return _kind_of(key) == "texts"


def is_one_value(key: str, value: str) -> bool:
    """Returns whether a value is one text even in a sweep, although it has commas or brackets.

    A text has no need of a grammar where it has no comma. A text for Slurm keeps its commas (cluster.exclude=a,b), and
    so does a plain list of texts; choice(...) sweeps them.
    """
    kind = _kind_of(key)
    if kind == "texts":
        return re.fullmatch(_LIST_OF_TEXTS, value) is not None
    if kind == "other" or _SWEEP_CALL.match(value):
        return False
    return "," not in value or key.startswith("cluster.") or key == _JOB_NAME


def is_plain_texts(key: str, value: str) -> bool:
    """Returns whether the values of a sweep are texts that need no grammar, e.g. "a,1e3" for run.name."""
    return _kind_of(key) == "text" and re.search(r"[()\[\]{}'\"$\\]", value) is None


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
    if match is None or not _is_override(word):
        raise _unknown_word_error(word, "", (), ())
    return match["sign"] or "", match["key"], match["value"]


def _is_override(word: str) -> bool:
    match = _OVERRIDE.fullmatch(word)
    return match is not None and (match["value"] is not None or match["sign"] == "~")


def cluster_sizes(overrides: Sequence[str]) -> list[tuple[str, int | str, int]]:
    """Returns the sizes named by `cluster=NxG` words as (name, nodes, GPUs per node).

    E.g. ("4x8", 4, 8), or ("2-4x8", "2-4", 8).

    Raises:
        ConfigError: a number alone.
    """
    sizes = list[tuple[str, int | str, int]]()
    for sign, key, value in map(split_word, overrides):
        if key != "cluster" or not value or sign == "~":
            continue
        for name in value.split(","):
            if name.isdigit():
                raise ConfigError(
                    f"{sign}cluster={value} does not say what {name} counts",
                    hint=f"write {sign}cluster={name}x8 for {name} nodes with 8 GPUs each, or "
                    f"{sign}cluster=1x{name} for {name} GPUs of one node",
                )
            size = _SIZE.fullmatch(name)
            if size is not None:
                nodes = int(size[1]) if size[1].isdigit() else size[1]
                sizes.append((name, nodes, int(size[2])))
    return sizes
