"""Where a run came from: its settings, what was chosen among them, its code, and what it ran in."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from slurm_train.config.frozen import list_settings
from slurm_train.tools.report.page import Block, as_float, folded, moment, setting, table, text

_MOST_LINES = 3000
# What `_facts` and `_differences` show; what else is in provenance.json is shown as it is.
_KNOWN = {
    *("words", "directory", "user", "host", "python", "time_unix_s", "git_commit", "git_dirty", "git_diff"),
    *("versions", "environment", "folders", "elsewhere"),
}


def read_config(path: Path) -> Mapping[str, Any]:
    """Returns a frozen configuration as it is written: one of another version is shown all the same."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def settings(config: Mapping[str, Any], *, leave_out: Collection[str] = ()) -> list[Block]:
    """Returns the configuration but for some keys: what was chosen, then every key with the chosen ones marked."""
    if not config:
        return [text("config.yaml cannot be read.", "none")]
    every = [one for one in list_settings(config) if one.key not in leave_out]
    marked = [index for index, one in enumerate(every) if one.is_chosen]
    rows = [
        [one.key, setting(one.value), setting(one.default) if one.is_chosen and one.default is not None else ""]
        for one in every
    ]
    columns = ["key|code", "value", "default"]
    return [
        text(f"{len(marked)} of {len(every)} settings differ from the defaults.", "note"),
        *([table("chosen", columns, [rows[index] for index in marked])] if marked else []),
        table("settings", columns, rows, marked=marked, summary=f"All {len(every)} settings"),
    ]


def provenance(origin: Mapping[str, Any], environment: Mapping[str, Any]) -> list[Block]:
    """Returns where the code came from, the command line, the environment and the uncommitted changes.

    Args:
        origin: what provenance.json holds; keys that this version does not know are shown as they are.
        environment: that the run was carried out in; empty where it is not known.
    """
    if not origin:
        return [text("provenance.json is missing.", "none")]
    pairs = [*_code(origin), *_environment(environment)]
    others = {key.replace("_", " "): value for key, value in origin.items() if key not in _KNOWN and value}
    plain = {
        name: value for name, value in others.items() if isinstance(value, (str, int, float)) and "\n" not in str(value)
    }
    pairs += [(name, setting(value)) for name, value in plain.items()]
    longer = [(name, _lines(value)) for name, value in others.items() if name not in plain]
    packages = _packages(environment.get("packages"), environment.get("sources"))
    return [
        {"kind": "facts", "pairs": [pair for pair in pairs if pair[1]]},
        *([folded(f"{len(packages)} packages", "\n".join(packages))] if packages else []),
        *(folded(f"{name}: {len(lines)} lines", "\n".join(lines[:_MOST_LINES])) for name, lines in longer),
        *_differences(origin),
    ]


def _code(origin: Mapping[str, Any]) -> list[tuple[str, str]]:
    words = origin.get("words")
    when, who = moment(as_float(origin.get("time_unix_s"))), f"{origin.get('user', '-')} on {origin.get('host', '-')}"
    commit = str(origin.get("git_commit") or "not a git repository")
    return [
        ("command", shlex.join(["python", "-m", "slurm_train", *map(str, words)]) if isinstance(words, list) else "-"),
        ("submitted", f"{when} by {who}"),
        ("directory", str(origin.get("directory", "-"))),
        ("commit", commit + (" with uncommitted changes" if origin.get("git_dirty") else "")),
        ("also copied", "\n".join(map(_folder, _mappings(origin.get("folders"))))),
        ("not copied", "\n".join(map(_folder, _mappings(origin.get("elsewhere"))))),
    ]


def _mappings(values: Any) -> Sequence[Mapping[str, Any]]:
    return [value for value in values if isinstance(value, Mapping)] if isinstance(values, list) else []


def _folder(folder: Mapping[str, Any]) -> str:
    packages = folder.get("packages")
    names = f" ({', '.join(map(str, packages))})" if isinstance(packages, list) and packages else ""
    commit = f", commit {str(folder.get('git_commit'))[:12]}" if folder.get("git_commit") else ", not in git"
    return f"{folder.get('path', '-')}{names}{commit}" + (
        " with uncommitted changes" if folder.get("git_dirty") else ""
    )


def _environment(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns names and values of an environment, as `environment.json` has it."""
    known = {key: str(value) for key, value in environment.items() if isinstance(value, (str, int, float)) and value}
    cuda, gpus = known.get("cuda", ""), environment.get("gpus")
    build = f"for {cuda if not cuda[0].isdigit() else f'CUDA {cuda}'}" if cuda else "for the CPU"
    counts = Counter(map(str, gpus)) if isinstance(gpus, list) else {}
    pairs = [
        ("python", f"{known.get('python', '')} {known['executable']}" if "executable" in known else ""),
        ("platform", known.get("platform", "")),
        ("torch", f"{known['torch']}, built {build}" if "torch" in known else ""),
        ("driver", known.get("driver", "")),
        ("GPUs", ", ".join(f"{count} x {name}" for name, count in counts.items())),
        ("Slurm", known.get("slurm", "")),
    ]
    return [pair for pair in pairs if pair[1]]


def _packages(packages: Any, sources: Any) -> list[str]:
    origins = sources if isinstance(sources, Mapping) else {}
    found = packages.items() if isinstance(packages, Mapping) else ()
    return [f"{name} {version}{_source(origins.get(name))}" for name, version in found]


def _source(source: Any) -> str:
    if not isinstance(source, Mapping):
        return ""
    facts = ("editable" if source.get("editable") else "", *(str(source.get(key) or "") for key in ("commit", "url")))
    return f" ({', '.join(filter(None, facts))})"


def _lines(value: Any) -> list[str]:
    if isinstance(value, str):
        return value.splitlines()
    return (
        [f"{key} {setting(item)}" for key, item in value.items()]
        if isinstance(value, Mapping)
        else list(map(setting, value))
    )


def _differences(origin: Mapping[str, Any]) -> Iterator[Block]:
    """Yields the uncommitted changes of the folder that the command was typed in, and of others that were copied."""
    folders = [(f" in {one.get('path', '-')}", one.get("git_diff")) for one in _mappings(origin.get("folders"))]
    for where, difference in [("", origin.get("git_diff")), *folders]:
        if difference:
            lines = str(difference).splitlines()
            left_out = len(lines) - _MOST_LINES
            shown = lines[:_MOST_LINES] + ([f"... {left_out} more lines in provenance.json"] if left_out > 0 else [])
            summary = f"Uncommitted changes{where}: {len(lines)} lines of difference"
            yield folded(summary, "\n".join(shown), is_diff=True)
