"""Where a run came from: its settings, what was chosen among them, its code, and what it ran in."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from slurm_train.config.frozen import list_settings
from slurm_train.tools.report.page import Block, as_float, folded, moment, setting, table, text

_MOST_LINES = 3000
# What is shown in a place of its own; what else is in provenance.json is shown as it is.
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
    words, folders, elsewhere = origin.get("words"), _mappings(origin, "folders"), _mappings(origin, "elsewhere")
    commit = {"git_commit": origin.get("git_commit"), "git_dirty": origin.get("git_dirty")}
    when, host = moment(as_float(origin.get("time_unix_s"))), origin.get("host", "-")
    pairs = {
        "command": shlex.join(["python", "-m", "slurm_train", *map(str, words)]) if isinstance(words, list) else "-",
        "submitted": f"{when} by {origin.get('user', '-')} on {host}",
        "directory": str(origin.get("directory", "-")),
        "commit": f"{commit['git_commit'] or 'not a git repository'}{_changed(commit)}",
        "also copied": "\n".join(map(_folder, folders)),
        "not copied": "\n".join(map(_folder, elsewhere)),
        **_environment(environment),
    }
    blocks = []
    for key, value in origin.items():
        name = key.replace("_", " ")
        if key in _KNOWN or not value:
            continue
        if isinstance(value, (str, int, float)) and "\n" not in str(value):
            pairs[name] = setting(value)
        else:
            lines = _lines(value)
            blocks.append(folded(f"{name}: {len(lines)} lines", lines[:_MOST_LINES]))
    found: list[Block] = [{"kind": "facts", "pairs": [pair for pair in pairs.items() if pair[1]]}]
    if packages := _packages(environment):
        found.append(folded(f"{len(packages)} packages", packages))
    # The uncommitted changes of the folder that the command was typed in, and of others that were copied.
    differences = [("", origin.get("git_diff"))]
    differences += [(f" in {one.get('path', '-')}", one.get("git_diff")) for one in folders]
    for where, difference in differences:
        lines = str(difference or "").splitlines()
        if lines:
            more = [f"... {len(lines) - _MOST_LINES} more lines in provenance.json"] if len(lines) > _MOST_LINES else []
            summary = f"Uncommitted changes{where}: {len(lines)} lines of difference"
            blocks.append(folded(summary, [*lines[:_MOST_LINES], *more], is_diff=True))
    return found + blocks


def _mappings(origin: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    values = origin.get(key)
    return [value for value in values if isinstance(value, Mapping)] if isinstance(values, list) else []


def _changed(folder: Mapping[str, Any]) -> str:
    return " with uncommitted changes" if folder.get("git_dirty") else ""


def _folder(folder: Mapping[str, Any]) -> str:
    packages = folder.get("packages")
    names = f" ({', '.join(map(str, packages))})" if isinstance(packages, list) and packages else ""
    commit = f", commit {str(folder.get('git_commit'))[:12]}" if folder.get("git_commit") else ", not in git"
    return f"{folder.get('path', '-')}{names}{commit}{_changed(folder)}"


def _environment(environment: Mapping[str, Any]) -> dict[str, str]:
    """Returns names and values of an environment, as `environment.json` has it; "" for what is not known."""
    known = {key: str(value) for key, value in environment.items() if isinstance(value, (str, int, float)) and value}
    cuda, gpus = known.get("cuda", ""), environment.get("gpus")
    build = f"for {cuda if not cuda[0].isdigit() else f'CUDA {cuda}'}" if cuda else "for the CPU"
    counts = Counter(map(str, gpus)) if isinstance(gpus, list) else {}
    return {
        "python": f"{known.get('python', '')} {known['executable']}" if "executable" in known else "",
        "platform": known.get("platform", ""),
        "torch": f"{known['torch']}, built {build}" if "torch" in known else "",
        "driver": known.get("driver", ""),
        "GPUs": ", ".join(f"{count} x {name}" for name, count in counts.items()),
        "Slurm": known.get("slurm", ""),
    }


def _packages(environment: Mapping[str, Any]) -> list[str]:
    packages, sources = environment.get("packages"), environment.get("sources")
    found = []
    for name, version in packages.items() if isinstance(packages, Mapping) else ():
        source = sources.get(name) if isinstance(sources, Mapping) else None
        facts = []
        if isinstance(source, Mapping):
            facts = ["editable" if source.get("editable") else "", source.get("commit"), source.get("url")]
        shown = ", ".join(str(fact) for fact in facts if fact)
        found.append(f"{name} {version}" + (f" ({shown})" if shown else ""))
    return found


def _lines(value: Any) -> list[str]:
    if isinstance(value, str):
        return value.splitlines()
    if isinstance(value, Mapping):
        return [f"{key} {setting(item)}" for key, item in value.items()]
    return list(map(setting, value))
