"""Reads git's facts about a folder with code: files, commit, uncommitted difference; and which files hold secrets.

A repository's configuration names programs (fsmonitor, hooks, filters, textconv, transports), and the folder may come
from another person. So `run_git` starts git in a way that runs none of them. Therefore it may also read a repository of
another owner, such as a group's checkout, which git refuses by default; but only if the same person owns the folder,
whose code is about to be run anyway. Otherwise a repository in a folder above, e.g. /tmp, could decide which files are
the code.
"""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_train.rundir.files import read_json
from slurm_train.trust import trusted_owners

# An empty value disables core.fsmonitor in every version; before 2.36 "false" was the name of a program.
_SWITCHED_OFF = ("core.fsmonitor=", "core.hooksPath=/dev/null", "diff.external=")
# Objects that a partial clone lacks are not fetched, since the remote may be a command. No index is written.
_GIT_ENVIRONMENT = (
    *("GIT_ALLOW_PROTOCOL=none", "GIT_NO_LAZY_FETCH=1", "GIT_TERMINAL_PROMPT=0"),
    *("GIT_OPTIONAL_LOCKS=0", "GIT_PAGER=cat"),
)
# Inside a hook of git these variables name another repository than that of the folder.
_OF_ANOTHER_REPOSITORY = (
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_NAMESPACE"),
    *("GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_CONFIG_PARAMETERS", "GIT_CONFIG_COUNT"),
    "GIT_EXTERNAL_DIFF",
)
# Submodules are not read, since that starts another git, which follows the submodule's configuration.
_DIFFERENCE = (
    *("diff", "--binary", "--no-color", "--no-ext-diff", "--no-textconv"),
    *("--ignore-submodules=dirty", "--submodule=short"),
)
# Files that usually hold secrets; a run keeps its copies for ever, and other people may see them.
_SECRET_FILES = (
    *(".env", ".env.*", "*.env", ".envrc", ".netrc", "_netrc", ".pgpass", ".pypirc", ".npmrc", ".git-credentials"),
    *("*.pem", "*.p12", "*.pfx", "*.key", "*.keytab", "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "kaggle.json"),
    *("credentials", "credentials.json", "client_secret*.json", "service_account*.json", "service-account*.json"),
    *("secrets.yaml", "secrets.yml", "secrets.toml", "secrets.json", ".htpasswd"),
)
SENT_FILE = ".slurm_train_sent.json"
"""In a folder that was sent from another machine: its files, and what git has said of it there."""
_EXAMPLES = (".env.example", ".env.sample", ".env.template", "example.env")


@dataclass(frozen=True, slots=True)
class SourceState:
    """git's facts about a folder: the files that belong to the code, the commit, and the uncommitted difference."""

    files: tuple[str, ...] | None = None
    """Paths relative to the folder, those of submodules and of repositories inside it as well; None outside git."""
    commit: str | None = None
    difference: str = ""
    """The changes of tracked files since the commit, as a diff."""
    problem: str = ""
    """git's error if it cannot read the repository of the folder; "" for none, or outside of a repository."""
    untracked: frozenset[str] = frozenset()
    """Those of `files` that the commit does not know."""


def run_git(
    folder: Path | str,
    *words: str,
    env: Mapping[str, str] | None = None,
    compares: bool = False,
    timeout_s: float | None = None,
) -> bytes | None:
    """Returns git's output for a folder, None if git fails or is missing.

    Programs that the configuration of the folder names are not started.

    Args:
        folder: the folder.
        words: git's subcommand and its arguments; a diff needs --no-ext-diff and --no-textconv besides.
        env: environment; None: this process's.
        compares: the command compares the content of files, for which git would run filters. They are disabled by
            their names; if a name cannot be written in a setting, None is returned.
        timeout_s: how long git may take; None: without limit.
    """
    settings = []
    if compares:
        filters = _filters(folder, env)
        if filters is None:
            return None
        for name in filters:
            settings += [f"filter.{name}.clean=", f"filter.{name}.process=", f"filter.{name}.required=false"]
    try:
        finished = _start_git(folder, words, settings, env=env, timeout_s=timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return finished.stdout if finished.returncode == 0 else None


def _start_git(
    folder: Path | str,
    words: Sequence[str],
    settings: Sequence[str],
    *,
    env: Mapping[str, str] | None,
    timeout_s: float | None = None,
) -> subprocess.CompletedProcess[bytes]:
    command = ["env"]
    for variable in _OF_ANOTHER_REPOSITORY:
        command += ["-u", variable]
    command += [*_GIT_ENVIRONMENT, "git", "-C", str(folder)]
    for setting in (*_SWITCHED_OFF, *_trusted(Path(folder)), *settings):
        command += ["-c", setting]
    return subprocess.run(
        [*command, *words], capture_output=True, stdin=subprocess.DEVNULL, env=env, timeout=timeout_s, check=False
    )


def _repository_of(folder: Path) -> Path | None:
    """Returns the nearest folder, this one or above, with a checked-out repository; None for none."""
    real = Path(os.path.realpath(folder))
    return next((place for place in (real, *real.parents) if os.path.lexists(place / ".git")), None)


def _trusted(folder: Path) -> list[str]:
    """Returns the setting that allows git to read a repository of another owner, if the same person owns the folder."""
    top = _repository_of(folder)
    if top is None:
        return []
    try:
        is_of_one_owner = (top / ".git").lstat().st_uid == folder.stat().st_uid
    except OSError:
        return []
    return [f"safe.directory={top}"] if is_of_one_owner else []


def _problem(folder: Path, env: Mapping[str, str]) -> str:
    """Returns git's error for the repository of a folder, "" if the folder is in no repository."""
    if _repository_of(folder) is None:
        return ""
    try:
        finished = _start_git(folder, ("ls-files",), (), env=env)
    except OSError as err:
        return str(err)
    return " ".join(finished.stderr.decode(errors="replace").split()) or f"exit code {finished.returncode}"


def _filters(folder: Path | str, env: Mapping[str, str] | None) -> list[str] | None:
    """Returns the names of a repository's filters, None if one of them cannot be disabled by its name."""
    keys = run_git(folder, "config", "--null", "--name-only", "--get-regexp", r"^filter\.", env=env) or b""
    names: set[str] = set()
    for key in keys.decode(errors="replace").split("\0"):
        match = re.fullmatch(r"filter\.(.*)\.[a-z]+", key, re.DOTALL)
        if match is None:
            continue
        if not re.fullmatch(r"[A-Za-z0-9_-]+", match[1]):
            return None
        names.add(match[1])
    return sorted(names)


def read_git(folder: Path, env: Mapping[str, str], *, prefix: str = "") -> SourceState:
    """Returns git's facts about a folder, including submodules and other repositories inside it.

    A submodule that is not checked out stays in the list as the name of a folder.

    Args:
        folder: the folder.
        env: environment of the caller.
        prefix: its path below the outermost folder, e.g. "libs/mylib/".
    """
    if sent := read_json(folder / SENT_FILE, writers=trusted_owners()):
        sent_files, not_in_commit = tuple(sent["files"]), frozenset(sent["untracked"])
        return SourceState(sent_files, sent["commit"], sent["difference"], untracked=not_in_commit)
    # -t puts a letter and a blank in front of each name: "?" for files that git does not track.
    listed = run_git(folder, "ls-files", "-z", "-t", "--cached", "--others", "--exclude-standard", env=env)
    if listed is None:
        return SourceState(problem=_problem(folder, env))
    commit = (run_git(folder, "rev-parse", "HEAD", env=env) or b"").decode().strip() or None
    difference = _difference(folder, env, prefix=prefix)
    files: list[str] = []
    untracked: set[str] = set()
    entries = set(listed.decode(errors="surrogateescape").split("\0")) - {""}
    tag_of_name = {entry[2:].rstrip("/"): entry[0] for entry in entries}  # git ends a repository inside with "/"
    for name, tag in sorted(tag_of_name.items()):
        inner = SourceState()
        if os.path.lexists(f"{folder}/{name}/.git") and not (folder / name).is_symlink():
            inner = read_git(folder / name, env, prefix=f"{prefix}{name}/")
        names = [name] if inner.files is None else [f"{name}/{file}" for file in inner.files]
        files += names
        # The commit of a repository that is no submodule is recorded nowhere.
        untracked |= set(names) if tag == "?" else {f"{name}/{file}" for file in inner.untracked}
        difference += inner.difference
    return SourceState(tuple(files), commit, difference, untracked=frozenset(untracked))


def _difference(folder: Path, env: Mapping[str, str], *, prefix: str) -> str:
    """Returns the uncommitted changes of a repository as a diff, without secrets and without files that have a filter.

    What a filter stores (Git LFS) cannot be compared without running it.
    """
    excluded = [f":(top,exclude,icase,glob)**/{pattern}" for pattern in _SECRET_FILES]
    excluded += [f":(top,exclude,attr:filter={name})" for name in _filters(folder, env) or ()]
    prefixes = (f"--src-prefix=a/{prefix}", f"--dst-prefix=b/{prefix}")
    changed = run_git(folder, *_DIFFERENCE, *prefixes, "HEAD", "--", ":/", *excluded, env=env, compares=True)
    return (changed or b"").decode(errors="replace")


def is_secret_file(name: str) -> bool:
    """Returns whether a path's last part is the name of a file that usually holds secrets, e.g. ".env"."""
    base_name = name.rpartition("/")[2].lower()
    return base_name not in _EXAMPLES and any(fnmatch.fnmatchcase(base_name, pattern) for pattern in _SECRET_FILES)
