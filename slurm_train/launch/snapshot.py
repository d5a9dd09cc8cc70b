"""The code of a run as it was at submission: tracked, changed and untracked files, but not ignored ones.

A queued or requeued job runs this copy, whatever is edited meanwhile. Git's work is started early and read late, so
that it costs no waiting.

A repository's configuration names programs (fsmonitor, hooks, filters, textconv, transports), and the folder may come
from somebody else: `git_command` runs git so that none of them is started.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurm_train.errors import ConfigError
from slurm_train.launch.editable import built_modules

# Outside git there is no list of what belongs to the code, so it is told by its ending.
_SOURCE_SUFFIXES = frozenset(
    {".py", ".pyi", ".yaml", ".yml", ".toml", ".json", ".cfg", ".ini", ".txt", ".sh", ".so", ".cu", ".cpp"}
)
_MAX_ENTRIES = 20_000
_MOST_NAMED = 5
# Files that hold secrets by custom; a run keeps its copies for ever, and others may be shown them.
_SECRET_FILES = (
    *(".env", ".env.*", "*.env", ".envrc", ".netrc", "_netrc", ".pgpass", ".pypirc", ".npmrc", ".git-credentials"),
    *("*.pem", "*.p12", "*.pfx", "*.key", "*.keytab", "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "kaggle.json"),
    *("credentials", "credentials.json", "client_secret*.json", "service_account*.json", "service-account*.json"),
    *("secrets.yaml", "secrets.yml", "secrets.toml", "secrets.json", ".htpasswd"),
)
_EXAMPLES = (".env.example", ".env.sample", ".env.template", "example.env")


# An empty value switches core.fsmonitor off in every version: before 2.36 "false" was the name of a program.
_SWITCHED_OFF = ("core.fsmonitor=", "core.hooksPath=/dev/null", "diff.external=")
# No object is fetched that a partial clone lacks: the remote may be a command. No index is written.
_GIT_ENVIRONMENT = (
    *("GIT_ALLOW_PROTOCOL=none", "GIT_NO_LAZY_FETCH=1", "GIT_TERMINAL_PROMPT=0"),
    *("GIT_OPTIONAL_LOCKS=0", "GIT_PAGER=cat"),
)
# Inside a hook of git these are about another repository than the folder that is asked about.
_OF_ANOTHER_REPOSITORY = (
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_NAMESPACE"),
    *("GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_CONFIG_PARAMETERS", "GIT_CONFIG_COUNT"),
    "GIT_EXTERNAL_DIFF",
)
_FILTER = re.compile(r"filter\.(.*)\.[a-z]+", re.DOTALL)
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class GitQuestions:
    """Git commands under way in a directory."""

    directory: Path
    env: Mapping[str, str]
    prefix: str
    """Where the directory lies in the one that was asked about first, e.g. "libs/mylib/"; "" for itself."""
    files: subprocess.Popen[bytes]
    commit: subprocess.Popen[bytes]
    difference: subprocess.Popen[bytes]


@dataclass(frozen=True, slots=True)
class OtherFolder:
    """A further folder whose code is in the snapshot, below a place of its own."""

    prefix: str
    """Where in the snapshot, e.g. ".folders/mylib"."""
    directory: Path
    state: SourceState
    files: Sequence[str]
    """Relative to its own directory."""


@dataclass(frozen=True, slots=True)
class SourceState:
    """What git said: the files that belong to the code, the commit, and the uncommitted change."""

    files: tuple[str, ...] | None
    """Paths relative to the directory, those of submodules and of repositories inside it as well; None outside git."""
    commit: str | None
    difference: str


def ask_git(directory: Path, env: Mapping[str, str], *, prefix: str = "") -> GitQuestions | None:
    """Starts asking git about a directory; None where there is no git command.

    Args:
        directory: the directory.
        env: environment of the caller.
        prefix: see `GitQuestions`.
    """
    if shutil.which("git", path=env.get("PATH")) is None:
        return None

    def ask(*words: str, filters: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        command = git_command(directory, *words, filters=filters)
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, env=dict(env)
        )

    files, commit = ask("ls-files", "-z", "--cached", "--others", "--exclude-standard"), ask("rev-parse", "HEAD")
    filters = read_filters(_read(ask(*FILTERS)))
    paths = [":/", *_outside_secrets(), *(f":(top,exclude,attr:filter={name})" for name in filters or ())]
    places = (f"--src-prefix=a/{prefix}", f"--dst-prefix=b/{prefix}")
    # Without knowing the filters nothing is compared: `rev-parse` of nothing fails.
    compare = (
        ("rev-parse", "--verify", "") if filters is None else ("diff", *_DIFFERENCE, *places, "HEAD", "--", *paths)
    )
    difference = ask(*compare, filters=filters or ())
    return GitQuestions(directory, env, prefix, files=files, commit=commit, difference=difference)


FILTERS = ("config", "--null", "--name-only", "--get-regexp", r"^filter\.")
"""Git's words that print what `read_filters` reads."""
# A submodule is not looked into: that starts a git of its own, which obeys the submodule's configuration.
_DIFFERENCE = (
    *("--binary", "--no-color", "--no-ext-diff", "--no-textconv"),
    *("--ignore-submodules=dirty", "--submodule=short"),
)


def git_command(directory: Path | str, *words: str, filters: Sequence[str] = ()) -> list[str]:
    """Returns the words that run git about a folder without any program that the folder's configuration names.

    Args:
        directory: the folder.
        words: git's subcommand and its arguments; a diff needs --no-ext-diff and --no-textconv besides.
        filters: names of filters, for a command that compares the content of files; see `read_filters`.
    """
    settings = [*_SWITCHED_OFF]
    settings += [f"filter.{name}.{what}" for name in filters for what in ("clean=", "process=", "required=false")]
    forget = [word for name in _OF_ANOTHER_REPOSITORY for word in ("-u", name)]
    switched = [word for setting in settings for word in ("-c", setting)]
    return ["env", *forget, *_GIT_ENVIRONMENT, "git", "-C", str(directory), *switched, *words]


def read_filters(output: bytes | None) -> list[str] | None:
    """Returns the names of the filters that a configuration has, None where one cannot be switched off by its name.

    Args:
        output: what git printed for `FILTERS`, None where it failed: there is none.
    """
    keys = (output or b"").decode(errors="replace").split("\0")
    found = {match[1] for key in keys if (match := _FILTER.fullmatch(key)) is not None}
    return sorted(found) if all(map(_PLAIN_NAME.fullmatch, found)) else None


def _outside_secrets() -> Sequence[str]:
    return [f":(top,exclude,icase,glob)**/{pattern}" for pattern in _SECRET_FILES]


def read_answers(questions: GitQuestions | None) -> SourceState:
    """Returns what git said, waiting for it where it is still at work."""
    if questions is None:
        return SourceState(None, None, "")
    files, commit, difference = (
        _read(process) for process in (questions.files, questions.commit, questions.difference)
    )
    names = (
        None if files is None else tuple(sorted(set(filter(None, files.decode(errors="surrogateescape").split("\0")))))
    )
    sha = commit.decode().strip() if commit else None
    state = SourceState(names, sha or None, (difference or b"").decode(errors="replace"))
    return _with_inner(state, questions)


def _with_inner(state: SourceState, questions: GitQuestions) -> SourceState:
    """Returns what git said with submodules, and other repositories inside, in the place of their names.

    One that is not checked out stays as it is: a name of a folder.
    """
    names: list[str] = []
    difference = state.difference
    for name in (name.rstrip("/") for name in state.files or ()):
        folder, inner = questions.directory / name, None
        if os.path.lexists(f"{folder}/.git") and not folder.is_symlink():
            inner = read_answers(ask_git(folder, questions.env, prefix=f"{questions.prefix}{name}/"))
        if inner is None or inner.files is None:
            names.append(name)
            continue
        names += [f"{name}/{one}" for one in inner.files]
        difference += inner.difference
    return replace(state, files=None if state.files is None else tuple(names), difference=difference)


def is_secret_file(name: str) -> bool:
    """Returns whether a path's last part is the name of a file that holds secrets by custom, e.g. ".env"."""
    last = name.rpartition("/")[2].lower()
    return last not in _EXAMPLES and any(fnmatch.fnmatchcase(last, pattern) for pattern in _SECRET_FILES)


def drop_questions(questions: GitQuestions | None) -> None:
    """Ends what is still being asked; does nothing after `read_answers`."""
    if questions is None:
        return
    for process in (questions.files, questions.commit, questions.difference):
        if process.returncode is None:
            process.kill()
            process.communicate()


def _read(process: subprocess.Popen[bytes]) -> bytes | None:
    output, _ = process.communicate()
    return output if process.returncode == 0 else None


def plan_snapshot(
    directory: Path, state: SourceState, *, limit_mb: int, exclude: Path, roots: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """Returns the files to copy, relative to the directory, and what is left out with the reason; touches nothing.

    A link to a folder in the directory stands for the files of that folder. One that leads elsewhere is left out.

    Args:
        directory: a folder with code, the submitting directory for one.
        state: what git said about it.
        limit_mb: largest total size in MiB.
        exclude: the root of the runs, never part of a snapshot.
        roots: places in it that packages are imported from, see `package_folders`.

    Raises:
        ConfigError: the files are more than the limit.
    """
    if state.files is None:
        found = _walk(directory, exclude)
    else:
        found = [*state.files, *built_modules(str(directory), state.files, roots)]
    names, left_out = _behind_links(directory, [name for name in found if not is_secret_file(name)])
    kept, total = [], 0
    for name in names:
        path = directory / name
        if path.is_file() and not path.resolve().is_relative_to(exclude):
            total += path.stat().st_size
            kept.append(name)
    if total > limit_mb << 20:
        raise _too_large(directory, kept, total, limit_mb)
    return kept, left_out


def _behind_links(directory: Path, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns files with those that links to folders stand for, and the folders that are left out, each with why."""
    real = directory.resolve()
    folders = [name for name in names if (directory / name).is_dir()]
    files = [name for name in names if name not in set(folders)]
    found, left_out = list(files), []
    for name in folders:
        target = (directory / name).resolve()
        if not (directory / name).is_symlink():
            left_out.append(f"{name} (a submodule that is not checked out)")
        elif not target.is_relative_to(real):
            left_out.append(f"{name} (a link to {target})")
        else:
            start = "" if target == real else f"{target.relative_to(real)}/"
            inner = [f"{name}/{file[len(start) :]}" for file in files if file.startswith(start)]
            found += inner
            left_out += [] if inner else [f"{name} (a link to {target}, where there is no code)"]
    return found, left_out


def _walk(directory: Path, exclude: Path) -> list[str]:
    found: list[str] = []
    entries = 0
    for folder, subfolders, files in os.walk(directory):
        here = Path(folder)
        subfolders[:] = sorted(
            name
            for name in subfolders
            if not name.startswith((".", "__")) and here / name != exclude and not (here / name / "pyvenv.cfg").exists()
        )
        # Not walked into; `_behind_links` looks where they lead.
        found += [str((here / name).relative_to(directory)) for name in subfolders if (here / name).is_symlink()]
        entries += len(files) + len(subfolders)
        if entries > _MAX_ENTRIES:
            raise ConfigError(
                f"{directory} is not a git repository and holds more than {_MAX_ENTRIES} files: which are the code?",
                hint="start from the folder of your project, or make it a git repository",
            )
        found += [
            str((here / name).relative_to(directory)) for name in sorted(files) if Path(name).suffix in _SOURCE_SUFFIXES
        ]
    return found


def _too_large(directory: Path, names: Sequence[str], total: int, limit_mb: int) -> ConfigError:
    sizes = {name: (directory / name).stat().st_size for name in names}
    ordered = sorted(names, key=lambda name: sizes[name], reverse=True)
    largest = [name for name in ordered if sizes[name] > total / 100][:_MOST_NAMED] or ordered[:_MOST_NAMED]
    return ConfigError(
        f"the code in {directory} is {total / (1 << 20):.1f} MiB, more than run.snapshot_limit_mb={limit_mb}; "
        f"largest: {', '.join(f'{name} ({sizes[name] / (1 << 20):.1f} MiB)' for name in largest)}",
        hint="list what is no code in .gitignore (outside git: start from the folder that holds the code), or raise "
        "run.snapshot_limit_mb",
    )


def write_snapshot(
    directory: Path,
    names: Sequence[str],
    target: Path,
    *,
    others: Sequence[OtherFolder] = (),
    keep: Path | None = None,
) -> None:
    """Copies the files into a fresh folder and puts it in place of an older snapshot.

    Args:
        directory: where they lie.
        names: the files, relative to it.
        target: the snapshot.
        others: further folders.
        keep: what the older snapshot is called from now on; None: it is removed.
    """
    fresh = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    _copy(directory, names, fresh)
    for other in others:
        (fresh / other.prefix).mkdir(mode=0o700, parents=True)
        _copy(other.directory, other.files, fresh / other.prefix)
    # The old snapshot of a sweep is shared, and stays where it is.
    if keep is not None and target.exists() and not target.is_symlink() and not keep.exists():
        target.rename(keep)
    _remove(target)
    fresh.rename(target)


def _copy(directory: Path, names: Sequence[str], fresh: Path) -> None:
    folders = {os.path.dirname(name) for name in names}  # noqa: PTH120  # str in, str out: paths cost 10x here
    for folder in sorted(folders):
        os.makedirs(fresh / folder, mode=0o700, exist_ok=True)  # noqa: PTH103  # as above
    for name in names:
        shutil.copy2(directory / name, fresh / name)
        mode = os.stat(fresh / name).st_mode  # noqa: PTH116  # as above
        if mode & 0o077:
            os.chmod(fresh / name, mode & 0o700)  # noqa: PTH101  # as above


def link_snapshot(target: Path, snapshot: Path) -> None:
    """Puts a link to a shared snapshot in place of an older one; relative, so that the root may be moved."""
    link = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(snapshot, target.parent))
    if not target.is_symlink():
        _remove(target)
    link.replace(target)


def _remove(target: Path) -> None:
    # The snapshot that a link leads to belongs to other runs as well.
    if target.is_symlink() or target.is_file():
        target.unlink()
    else:
        shutil.rmtree(target, ignore_errors=True)
