"""Reads YAML files so that a text, a time or a variable arrives as it is written.

YAML 1.1, which PyYAML and so Hydra read, makes 43200 of 12:00:00, 493 of 0755, 1000.0 of 1e3, 1.1 of 1.10 and true of
`yes`. Here a plain word below a key that holds a text keeps its spelling, whatever YAML takes it for. In all other
places base 60 and base 8 alone are not read: they are never meant. The word stays a text, which a number's key refuses.
`cluster.time` may be written in a file as on the command line. Words that could mean two things are refused.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml

from slurm_train.config.schema import ClusterSection, RunConfig, to_mapping, type_hints_of
from slurm_train.config.site_schema import GROUP as SITE
from slurm_train.config.site_schema import SIZE, SiteFile, SitePartition
from slurm_train.config.words import SLURM_LISTS, is_time, minutes
from slurm_train.errors import ConfigError

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PREFIX = "tag:yaml.org,2002:"
_STR = f"{_PREFIX}str"
_INT = f"{_PREFIX}int"
_BOOL = f"{_PREFIX}bool"
_NULL = f"{_PREFIX}null"
_NUMBERS = (_INT, f"{_PREFIX}float")
_BASE_60_OR_8 = re.compile(r".*:.*|[-+]?0[0-7_]+")
_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)
# Hydra looks for the package in so many characters.
_HEADER_LENGTH = 512


class _Flag:
    """A value of `cluster.sbatch` or `cluster.srun`: a text; true or false for a flag without a value."""


# What open mappings hold, where the schema says no more than that they are mappings.
_HELD: Mapping[tuple[type, str], Any] = {
    (ClusterSection, "env"): dict[str, str],
    (ClusterSection, "sbatch"): dict[str, _Flag],
    (ClusterSection, "srun"): dict[str, _Flag],
    (SiteFile, "cluster"): ClusterSection,
    (SitePartition, "cluster"): ClusterSection,
}
_DEFAULTS = to_mapping(ClusterSection())
# Keys of a user's own target that are texts everywhere, whatever else it takes.
_TEXTS = ("_target_", "path", "tokenizer")


class FaithfulLoader(_Base):  # type: ignore[misc]  # PyYAML's C loader, where libyaml is
    """PyYAML's safe loader, which keeps the spelling of texts; takes the place of `yaml.SafeLoader`."""

    def __init__(self, stream: Any) -> None:
        self.place = str(getattr(stream, "name", ""))
        self.holds = _what_it_holds(stream, self.place)
        super().__init__(stream)

    def construct_document(self, node: yaml.Node) -> Any:
        """Returns the value of a file."""
        rewriter = _Rewriter(self.place)
        value = super().construct_document(rewriter.rewritten(node, self.holds, ()))
        is_base = self.place.endswith("/cluster/base.yaml") and isinstance(value, dict)
        return _without_defaults(value) if is_base else value


def read_yaml(path: Path) -> Any:
    """Returns what a configuration file holds, as `FaithfulLoader` reads it.

    Raises:
        OSError: it cannot be read.
        yaml.YAMLError: it is not YAML.
        ConfigError: a word in it could mean two things.
    """
    with path.open(encoding="utf-8") as stream:
        return yaml.load(stream, Loader=FaithfulLoader)  # it is a safe loader


def _without_defaults(cluster: dict[str, Any]) -> dict[str, Any]:
    """Returns what `cluster/base.yaml` says beyond the defaults of the schema.

    The file gives defaults to every cluster. Where these are those of the schema they say nothing, and must not replace
    what a person's primary file or site says.
    """
    kept = {}
    for key, value in cluster.items():
        is_default = key in _DEFAULTS and _DEFAULTS[key] == value
        if key in SIZE or not is_default:
            kept[key] = value
    return kept


def _what_it_holds(stream: Any, place: str) -> Any:
    """Returns the type of what a file holds: of the section that its package or its folder names, else the whole."""
    package = _package_in(stream) if place else None
    if package is None or package == "_group_":
        return _what_a_folder_holds(Path(place).parent.name)
    holds: Any = RunConfig
    for name in package.replace("_global_", "").strip(".").split("."):
        if name:
            holds = _child(holds, name)
    return holds


def _package_in(stream: Any) -> str | None:
    """Returns the package that a file's header names, e.g. "_global_"; None where it names none."""
    match = _PACKAGE.search(stream.read(_HEADER_LENGTH))
    stream.seek(0)
    return None if match is None else match[1]


def _what_a_folder_holds(name: str) -> Any:
    """Returns the type of what the files of a folder hold; the whole configuration where it is no group."""
    if name == SITE:
        return SiteFile
    return type_hints_of(RunConfig).get(name, RunConfig)


class _Rewriter:
    """Gives plain words the tags of what their keys hold.

    Args:
        place: the file, for messages.
    """

    def __init__(self, place: str) -> None:
        self.place = place

    def rewritten(self, node: yaml.Node, hint: Any, path: tuple[str, ...]) -> yaml.Node:
        """Returns a node for a key of a type; an alias is rewritten for each place where it stands.

        Args:
            node: as PyYAML has resolved it.
            hint: type of the key, e.g. `str | None`; None where nothing is known of it.
            path: the keys above it, e.g. ("cluster", "env", "A").

        Raises:
            ConfigError: a word could mean two things.
        """
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, hint, path)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, hint, path)
        assert isinstance(node, yaml.SequenceNode), "YAML has no other nodes"
        if _Flag in _options(hint):
            return self._joined(node)
        items = []
        for position, item in enumerate(node.value):
            items.append(self.rewritten(item, _item(hint), (*path, str(position))))
        return yaml.SequenceNode(node.tag, items, node.start_mark, node.end_mark)

    def _mapping(self, node: yaml.MappingNode, hint: Any, path: tuple[str, ...]) -> yaml.MappingNode:
        names = {str(key.value) for key, _ in node.value}
        if ClusterSection in _options(hint) and {"time", "time_limit_min"} <= names:
            raise ConfigError(
                f"{self._at(node)}: cluster.time and cluster.time_limit_min both give the time limit",
                hint="drop one of the two",
            )
        pairs = [self._pair(key, value, hint, path) for key, value in node.value]
        return yaml.MappingNode(node.tag, pairs, node.start_mark, node.end_mark)

    def _pair(self, key: yaml.Node, value: yaml.Node, hint: Any, path: tuple[str, ...]) -> tuple[yaml.Node, yaml.Node]:
        if key.tag == f"{_PREFIX}merge":
            return key, self._merged(value, hint, path)
        name = str(key.value)
        if isinstance(key, yaml.ScalarNode) and _child(hint, name) is not None:
            key = _as_text(key)
        is_cluster = ClusterSection in _options(hint)
        if is_cluster and name in SLURM_LISTS and isinstance(value, yaml.SequenceNode):
            value = self._joined(value)
        if is_cluster and isinstance(value, yaml.ScalarNode):
            if name == "time":
                key = yaml.ScalarNode(_STR, "time_limit_min", key.start_mark, key.end_mark)
                value = self._minutes(value)
            elif name == "time_limit_min":
                self._require_minutes(value)
        return key, self.rewritten(value, _child(hint, name), (*path, name))

    def _merged(self, value: yaml.Node, hint: Any, path: tuple[str, ...]) -> yaml.SequenceNode:
        """Returns what "<<: *defaults" or "<<: [*a, *b]" merges: it stands at this level."""
        parts = value.value if isinstance(value, yaml.SequenceNode) else [value]
        rewritten: list[yaml.Node] = [self.rewritten(part, hint, path) for part in parts]
        return yaml.SequenceNode(f"{_PREFIX}seq", rewritten, value.start_mark, value.end_mark)

    def _scalar(self, node: yaml.ScalarNode, hint: Any, path: tuple[str, ...]) -> yaml.ScalarNode:
        if node.style or node.tag == _STR:
            return node
        options = _options(hint)
        takes_text = bool(options & {str, _Flag})
        if node.tag == _NULL:
            if node.value == "~" and takes_text and types.NoneType not in options:
                raise self._ambiguous(node, path, 'write null for no value, "~" in quotes for the text')
            return node
        if _Flag in options and node.tag == _BOOL:
            if node.value.lower() not in ("true", "false"):
                raise self._ambiguous(node, path, "write true for a flag without a value; put a text in quotes")
            return node
        takes_other_words = bool(options & {bool, int, float})
        if takes_text and not takes_other_words:
            return _as_text(node)
        is_misread = node.tag in _NUMBERS and _BASE_60_OR_8.fullmatch(node.value) is not None
        return _as_text(node) if is_misread else node

    def _joined(self, node: yaml.SequenceNode) -> yaml.Node:
        """Returns a list as the one text that Slurm takes for it: ["gpu", "long"] as "gpu,long"."""
        if not node.value or not all(isinstance(item, yaml.ScalarNode) for item in node.value):
            return node
        text = ",".join(item.value for item in node.value)
        return yaml.ScalarNode(_STR, text, node.start_mark, node.end_mark, '"')

    def _minutes(self, node: yaml.ScalarNode) -> yaml.ScalarNode:
        if node.tag == _NULL:
            return node
        if "${" in node.value:
            raise ConfigError(
                f"{self._at(node)}: cluster.time={node.value} refers to another key",
                hint="write the time itself, or time_limit_min: ${...} with minutes",
            )
        return yaml.ScalarNode(_INT, str(minutes(node.value)), node.start_mark, node.end_mark)

    def _require_minutes(self, node: yaml.ScalarNode) -> None:
        text = node.value
        if node.tag == _NULL or "${" in text or re.fullmatch(r"[1-9]\d*", text):
            return
        hint = f"write time: {text}" if is_time(text) else "write minutes, or time: 4:00:00 as Slurm does"
        raise ConfigError(f"{self._at(node)}: cluster.time_limit_min={text} is no whole number of minutes", hint=hint)

    def _ambiguous(self, node: yaml.ScalarNode, path: tuple[str, ...], hint: str) -> ConfigError:
        key = ".".join(path)
        return ConfigError(f"{self._at(node)}: {key}: {node.value} is a text or a value of YAML's own", hint=hint)

    def _at(self, node: yaml.Node) -> str:
        parts = [self.place] if self.place else []
        if node.start_mark is not None:
            parts.append(f"line {node.start_mark.line + 1}")
        return ", ".join(parts) or "a YAML file"


def _as_text(node: yaml.ScalarNode) -> yaml.ScalarNode:
    return yaml.ScalarNode(_STR, node.value, node.start_mark, node.end_mark, node.style)


def _options(hint: Any) -> set[Any]:
    """Returns the types that a key takes; an annotated one counts as what it annotates, a list as what it holds."""
    if get_origin(hint) in (Union, types.UnionType):
        options: set[Any] = set()
        for choice in get_args(hint):
            options |= _options(choice)
        return options
    if hasattr(hint, "__metadata__"):
        return _options(get_args(hint)[0])
    return {hint}


def _child(hint: Any, name: str) -> Any:
    """Returns the type of a key below a key of a type; None where nothing is known of it."""
    for option in _options(hint):
        if is_dataclass(option) and isinstance(option, type):
            return _HELD.get((option, name), type_hints_of(option).get(name))
        if get_origin(option) is dict:
            return str if name in _TEXTS else get_args(option)[1]
    return None


def _item(hint: Any) -> Any:
    """Returns the type of the items of a key's list; None where nothing is known of it."""
    for option in _options(hint):
        if get_origin(option) is list:
            return get_args(option)[0]
    return None
