"""What a run ran in: interpreter, platform, torch, driver, GPUs, Slurm, packages; and code that lies elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slurm_train.report.markup import Html, join, tag

Pair = tuple[str, str | Html]


def environment_facts(environment: Mapping[str, Any]) -> list[Pair]:
    """Returns names and values of an environment, as `environment.json` has it; those that are not known left out."""
    return [pair for pair in _facts(environment) if pair[1]]


def _facts(environment: Mapping[str, Any]) -> Iterator[Pair]:
    known = {key: str(value) for key, value in environment.items() if isinstance(value, (str, int, float)) and value}
    if "executable" in known:
        yield "python", join(known.get("python", ""), " ", tag("code", known["executable"]))
    yield "platform", known.get("platform", "")
    if "torch" in known:
        cuda = known.get("cuda", "")
        build = "for the CPU" if not cuda else f"for {cuda if not cuda[0].isdigit() else f'CUDA {cuda}'}"
        yield "torch", f"{known['torch']}, built {build}"
    yield "driver", known.get("driver", "")
    gpus = environment.get("gpus")
    if isinstance(gpus, list):
        yield "GPUs", ", ".join(f"{count} x {name}" for name, count in Counter(map(str, gpus)).items())
    yield "Slurm", known.get("slurm", "")
    yield "packages", _packages(environment.get("packages"), environment.get("sources"))


def _packages(packages: Any, sources: Any) -> Html:
    if not isinstance(packages, Mapping) or not packages:
        return Html("")
    origins = sources if isinstance(sources, Mapping) else {}
    lines = [f"{name} {version}{_source(origins.get(name))}" for name, version in packages.items()]
    return tag("details", tag("summary", f"{len(lines)} packages"), tag("pre", "\n".join(lines)))


def _source(source: Any) -> str:
    if not isinstance(source, Mapping):
        return ""
    facts = [
        "editable" if source.get("editable") else "",
        str(source.get("commit") or ""),
        str(source.get("url") or ""),
    ]
    return f" ({', '.join(filter(None, facts))})"


def folder_facts(name: str, folders: Any) -> list[Pair]:
    """Returns the further folders that a run's code lies in: path, packages, commit."""
    found = [folder for folder in folders if isinstance(folder, Mapping)] if isinstance(folders, list) else []
    lines = [tag("div", tag("code", str(folder.get("path", "-"))), _commit(folder)) for folder in found]
    return [(name, join(*lines))] if lines else []


def differences(origin: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the uncommitted changes of a run's code with the folder they are in, "" for the one it was typed in."""
    folders = origin.get("folders")
    others: Sequence[Any] = folders if isinstance(folders, list) else ()
    pairs = [("", origin.get("git_diff"))]
    pairs += [(str(one.get("path", "-")), one.get("git_diff")) for one in others if isinstance(one, Mapping)]
    return [(path, str(text)) for path, text in pairs if text]


def _commit(folder: Mapping[str, Any]) -> str:
    packages = folder.get("packages")
    names = f" ({', '.join(map(str, packages))})" if isinstance(packages, list) and packages else ""
    commit = f", commit {str(folder.get('git_commit'))[:12]}" if folder.get("git_commit") else ", not in git"
    return names + commit + (" with uncommitted changes" if folder.get("git_dirty") else "")
