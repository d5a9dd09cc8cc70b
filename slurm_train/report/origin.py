"""Where a run came from: its settings, what was chosen among them, and its provenance."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from slurm_train.config.defaults import Setting, read_settings
from slurm_train.report.markup import Html, join, tag
from slurm_train.report.quantity import as_float, moment, setting
from slurm_train.report.surroundings import differences, environment_facts, folder_facts
from slurm_train.report.table import facts

_MOST_DIFF_LINES = 3000
_KNOWN = (
    "words",
    "directory",
    "user",
    "host",
    "python",
    "time_unix_s",
    "git_commit",
    "git_dirty",
    "git_diff",
    "versions",
    "environment",
    "folders",
    "elsewhere",
)


def settings(config: Mapping[str, Any]) -> Html:
    """Returns the configuration: what was chosen first, then every key by section with the chosen ones marked."""
    if not config:
        return tag("p", "config.yaml cannot be read.", class_="none")
    every = read_settings(config)
    chosen = [one for one in every if one.is_chosen]
    sections = groupby(every, key=lambda one: one.key.partition(".")[0])
    return join(
        tag("p", f"{len(chosen)} of {len(every)} settings differ from the defaults.", class_="note"),
        _chosen(chosen),
        tag(
            "details",
            tag("summary", f"All {len(every)} settings"),
            tag("div", [_section(list(found)) for _, found in sections], class_="sections"),
        ),
    )


def _chosen(chosen: Sequence[Setting]) -> Html | None:
    if not chosen:
        return None
    rows = [
        tag(
            "tr",
            tag("th", one.key, scope="row"),
            tag("td", tag("b", setting(one.value))),
            tag("td", f"default {setting(one.default)}" if one.default is not None else "", class_="quiet"),
        )
        for one in chosen
    ]
    return tag("div", tag("table", tag("tbody", rows), class_="settings"), class_="scroll")


def _section(found: Sequence[Setting]) -> Html:
    rows = [
        tag(
            "tr",
            tag("th", one.key, scope="row"),
            tag("td", setting(one.value)),
            class_="chosen" if one.is_chosen else None,
            title=f"default: {setting(one.default)}" if one.is_chosen and one.default is not None else None,
        )
        for one in found
    ]
    return tag("table", tag("tbody", rows), class_="settings")


def provenance(origin: Mapping[str, Any], *, environment: Mapping[str, Any] | None = None) -> Html:
    """Returns where the code came from, the command line, the environment and the uncommitted changes.

    Args:
        origin: what provenance.json holds; keys that this version does not know are shown as they are.
        environment: of the newest attempt; None: that of the submission.
    """
    if not origin:
        return tag("p", "provenance.json is missing.", class_="none")
    submitted = origin.get("environment")
    ran_in = environment or (submitted if isinstance(submitted, Mapping) else {})
    found = [*_code(origin), *(environment_facts(ran_in) or _versions(origin)), *_others(origin)]
    return join(facts(found), [_difference(text, path) for path, text in differences(origin)])


def _code(origin: Mapping[str, Any]) -> list[tuple[str, str | Html]]:
    words = origin.get("words")
    command = shlex.join(["python", "-m", "slurm_train", *map(str, words)]) if isinstance(words, list) else "-"
    commit = str(origin.get("git_commit") or "not a git repository")
    when, who = moment(as_float(origin.get("time_unix_s"))), f"{origin.get('user', '-')} on {origin.get('host', '-')}"
    return [
        ("command", tag("code", command, class_="command")),
        ("submitted", f"{when} by {who}"),
        ("directory", tag("code", str(origin.get("directory", "-")))),
        ("commit", join(tag("code", commit), " with uncommitted changes" if origin.get("git_dirty") else None)),
        *folder_facts("also copied", origin.get("folders")),
        *folder_facts("not copied", origin.get("elsewhere")),
    ]


def _versions(origin: Mapping[str, Any]) -> list[tuple[str, str | Html]]:
    """Returns what runs from before there was an environment on record know of theirs."""
    versions = origin.get("versions")
    found: list[tuple[str, str | Html]] = [("python", tag("code", str(origin.get("python", "-"))))]
    if isinstance(versions, Mapping) and versions:
        texts = [tag("span", f"{name} {version}", class_="version") for name, version in versions.items()]
        found.append(("versions", tag("span", texts, class_="versions")))
    return found


def _others(origin: Mapping[str, Any]) -> list[tuple[str, str | Html]]:
    """Returns what else was written down, folded where it is more than a value."""
    found: list[tuple[str, str | Html]] = []
    for key, value in origin.items():
        if key in _KNOWN or value in (None, "", [], {}):
            continue
        name = key.replace("_", " ")
        if isinstance(value, (str, int, float)) and "\n" not in str(value):
            found.append((name, setting(value)))
            continue
        lines = value.splitlines() if isinstance(value, str) else _lines(value)
        text = tag("pre", "\n".join(lines[:_MOST_DIFF_LINES]))
        found.append((name, tag("details", tag("summary", f"{len(lines)} lines"), text)))
    return found


def _lines(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [f"{key} {setting(item)}" for key, item in value.items()]
    return [setting(item) for item in value]


def _difference(text: str, path: str) -> Html:
    lines = text.splitlines()
    shown = [_diff_line(line) for line in lines[:_MOST_DIFF_LINES]]
    left_out = len(lines) - len(shown)
    where = f" in {path}" if path else ""
    return tag(
        "details",
        tag("summary", f"Uncommitted changes{where}: {len(lines)} lines of difference"),
        tag("pre", shown, f"... {left_out} more lines in provenance.json\n" if left_out else None, class_="diff"),
        class_="difference",
    )


def _diff_line(line: str) -> Html:
    is_header = line.startswith(("+++", "---", "diff ", "@@", "index "))
    kind = "head" if is_header else {"+": "added", "-": "removed"}.get(line[:1])
    return tag("span", line + "\n", class_=kind)
