"""Models and tokenizers of the Hugging Face Hub: fetched where a run is submitted, read offline by its ranks.

`org/name` stands for a repository, `org/name@REVISION` for one state of it; an existing file or folder of that name has
priority. The configuration of a run has instead the folder of the commit in the library's cache. The path of the folder
names repository and commit, so a branch that moves later changes no run, and ranks need neither network nor the cache's
variables. The library is imported only if a repository is named.
"""

from __future__ import annotations

import errno
import functools
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from slurm_train.config.data_kinds import PACKED, kind_of
from slurm_train.config.program import program_of
from slurm_train.config.schema import CAUSAL_LM, RunConfig
from slurm_train.errors import ConfigError
from slurm_train.formatting import byte_size

OFFLINE = "HF_HUB_OFFLINE"
_CONFIG = "config.json"
_REFERENCE = re.compile(rf"([\w][\w.-]*/[\w][\w.-]*?)(/{re.escape(_CONFIG)})?(?:@([\w][\w./-]*))?", re.ASCII)
_SNAPSHOT = re.compile(r"(.*/models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40}))(?:/[^/]+)?")
_FILE_SUFFIXES = (".json", ".safetensors")
_COMMIT = re.compile(r"[0-9a-f]{40}")

Kind = Literal["weights", "config", "tokenizer"]
"""The files of a repository that a key reads; all three include the tokenizer."""
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja"),
)
_CONFIG_FILES = (_CONFIG, "generation_config.json", *_TOKENIZER_FILES)
_FILES: Mapping[Kind, Sequence[str]] = {
    "weights": ("model*.safetensors", "model.safetensors.index.json", *_CONFIG_FILES),
    "config": _CONFIG_FILES,
    "tokenizer": _TOKENIZER_FILES,
}
_SUBFOLDERS = "*/*"
_TIMEOUT_S = 20.0
_CANNOT_WRITE = (errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_NEEDED: Mapping[Kind, Sequence[str]] = {
    "weights": (r"config\.json", r"model.*\.safetensors"),
    "config": (r"config\.json",),
    "tokenizer": (r"tokenizer\.json",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFiles:
    """Files of one commit of a repository that a run reads."""

    key: str
    """Key of the configuration, e.g. "model.path"."""
    repository: str
    commit: str
    revision: str
    """The requested branch, tag or commit."""
    kind: Kind
    folder: Path
    """The folder of the commit in the cache."""
    sizes: Mapping[str, int]
    """Bytes by name; empty if the Hub was not asked because everything is in the cache."""

    @property
    def missing(self) -> list[str]:
        """Names of the files that are not in the cache."""
        return [name for name in self.sizes if not (self.folder / name).exists()]

    @property
    def words(self) -> str:
        """Repository, commit, size, and whether it is to be fetched."""
        subject = f"{self.repository} at {self.commit[:12]} ({self.revision})"
        if self.revision == self.commit:
            subject = f"{self.repository} at {self.commit[:12]}"
        missing = self.missing
        if not missing:
            return f"{subject}: in the cache, {self.folder}"
        num_bytes = sum(self.sizes[name] for name in missing)
        return f"{subject}: {len(missing)} files of {byte_size(num_bytes)} are fetched into {self.folder}"


class Snapshot(NamedTuple):
    """A folder of the library's cache that a configuration names."""

    key: str
    repository: str
    commit: str
    folder: Path

    @property
    def repository_folder(self) -> Path:
        """The folder with the files to which the snapshot's links point."""
        return self.folder.parent.parent


class _Reference(NamedTuple):
    repository: str
    is_config: bool
    revision: str | None


def pin_hub_files(config: RunConfig, *, cwd: Path) -> tuple[RunConfig, tuple[HubFiles, ...]]:
    """Replaces each repository that a configuration names by the folder of a commit; writes nothing.

    Args:
        config: the run's.
        cwd: directory that a relative path starts from; a name that exists there is no repository.

    Returns:
        The configuration, and the files that must be in the cache before it is used.

    Raises:
        ConfigError: the repository or its revision does not exist, must not be read with this token or lacks files; the
            Hub cannot be reached or the library is not installed; or a revision is given without a repository.
    """
    used = program_of(config).used
    pinned: list[HubFiles] = []
    model = used.model
    data = used.data
    named: str | None = None
    if model is not None and model.get("_target_") == CAUSAL_LM:
        named = model.get("path")
        model = _pin_model(model, cwd, pinned)
    if data is not None and kind_of(data) is PACKED and isinstance(data.get("tokenizer"), str):
        tokenizer = data["tokenizer"]
        if tokenizer == named and model is not None:
            # By default the model's own tokenizer, which must be of the same commit.
            data = {**data, "tokenizer": model["path"]}
        else:
            data = {**data, "tokenizer": pin_path("data.tokenizer", tokenizer, "tokenizer", cwd, pinned)}
    weights = used.train.init_from
    if weights is not None:
        weights = pin_path("train.init_from", weights, "weights", cwd, pinned)
        config = replace(config, train=replace(config.train, init_from=weights))
    # What the program does not use stays as it is.
    return replace(config, model=model or config.model, data=data or config.data), tuple(pinned)


def _pin_model(model: Mapping[str, Any], cwd: Path, pinned: list[HubFiles]) -> dict[str, Any]:
    """Returns the model's mapping without `revision`, which is part of the folder's path."""
    settings = dict(model)
    path = settings.get("path")
    revision = settings.pop("revision", None)
    if isinstance(path, str):
        # transformers does not know it; the other keys with paths read it themselves.
        path = str(Path(path).expanduser()) if path.startswith("~/") else path
        settings["path"] = pin_path("model.path", path, "weights", cwd, pinned, revision=revision)
    elif revision is not None:
        raise _idle_revision(path, revision)
    return settings


def pin_path(key: str, value: str, kind: Kind, cwd: Path, pinned: list[HubFiles], *, revision: object = None) -> str:
    """Returns the folder in the cache that a key's value stands for, or the value where it is a path.

    Args:
        key: key of the configuration.
        value: its value: a path, `org/name` or `org/name@REVISION`.
        kind: the files that are read.
        cwd: directory that a relative path starts from.
        pinned: the files that must be in the cache; the new ones are appended.
        revision: a branch, tag or commit, given by a key of its own.

    Raises:
        ConfigError: as `pin_hub_files`.
    """
    reference = _read_reference(value, cwd)
    if reference is None:
        if revision is not None:
            raise _idle_revision(value, revision)
        return value
    requested = reference.revision if revision is None else str(revision)
    if reference.revision not in (None, requested):
        raise ConfigError(
            f"{key}={value} and model.revision={requested} name two revisions", hint="leave one of the two out"
        )
    kind = "config" if reference.is_config else kind
    files = _look_up(key, value, reference.repository, requested or "main", kind)
    pinned.append(files)
    return str(files.folder / _CONFIG if reference.is_config else files.folder)


def _idle_revision(path: object, revision: object) -> ConfigError:
    return ConfigError(
        f"model.revision={revision} is for a repository of the Hub, and model.path={path} is none",
        hint="leave model.revision out, or name a repository: model.path=org/name",
    )


def _read_reference(value: str, cwd: Path) -> _Reference | None:
    match = _REFERENCE.fullmatch(value)
    is_file_name = match is not None and match[1].endswith(_FILE_SUFFIXES)
    if match is None or is_file_name or (cwd / value).exists():
        return None
    return _Reference(match[1], match[2] is not None, match[3])


# --- the Hub ---


def _library(key: str, value: str) -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as err:
        raise ConfigError(
            f"{key}={value}: there is no such folder, and to fetch it from the Hub huggingface_hub is missing: {err}",
            hint="pip install 'slurm-train[hf]', or name a folder",
        ) from err
    return huggingface_hub


@functools.cache
def _look_up(key: str, value: str, repository: str, revision: str, kind: Kind) -> HubFiles:
    """Returns the commit and the files of a revision; from the cache if they are complete there and the Hub is away."""
    library = _library(key, value)
    if _COMMIT.fullmatch(revision):
        # The content of a commit does not change, so the Hub need not be asked.
        cached_commit = _cached(library, repository, revision, kind)
        if cached_commit is not None:
            return _from_cache(key, repository, revision, kind, cached_commit)
    try:
        info = library.HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
        if info.gated:
            library.HfApi().auth_check(repository)
    except Exception as err:  # the library raises classes of its own, of its client and of the system
        folder = _cached(library, repository, revision, kind) if _is_unreachable(library, err) else None
        if folder is None:
            raise _refusal(library, err, key=key, value=value, repository=repository, revision=revision) from err
        return _from_cache(key, repository, revision, kind, folder)
    names = {item.rfilename: int(item.size or 0) for item in info.siblings or ()}
    chosen = library.utils.filter_repo_objects(names, allow_patterns=_FILES[kind], ignore_patterns=_SUBFOLDERS)
    sizes = {name: names[name] for name in chosen}
    for pattern in _NEEDED[kind]:
        if not any(re.fullmatch(pattern, name) for name in sizes):
            file_name = pattern.replace("\\", "").replace("model.*", "model")
            raise ConfigError(
                f"{key}={value}: the repository {repository} of the Hub has no {file_name} at {revision}",
                hint="choose a repository with safetensors and tokenizer.json, or convert it into a folder first",
            )
    folder = Path(library.constants.HF_HUB_CACHE).expanduser().resolve()
    folder /= f"models--{repository.replace('/', '--')}/snapshots/{info.sha}"
    return HubFiles(
        key=key, repository=repository, commit=info.sha, revision=revision, kind=kind, folder=folder, sizes=sizes
    )


def _cached(library: Any, repository: str, revision: str, kind: Kind) -> Path | None:
    """Returns the folder of a revision in the cache, None if files of it are missing there."""
    try:
        folder = library.snapshot_download(
            repository,
            revision=revision,
            local_files_only=True,
            allow_patterns=list(_FILES[kind]),
            ignore_patterns=_SUBFOLDERS,
        )
    except OSError:
        return None
    names = [path.name for path in Path(folder).iterdir() if path.exists()]
    for pattern in _NEEDED[kind]:
        if not any(re.fullmatch(pattern, name) for name in names):
            return None
    return Path(folder)


def _from_cache(key: str, repository: str, revision: str, kind: Kind, folder: Path) -> HubFiles:
    return HubFiles(
        key=key, repository=repository, commit=folder.name, revision=revision, kind=kind, folder=folder, sizes={}
    )


def _is_unreachable(library: Any, err: Exception) -> bool:
    """Returns whether the Hub has not answered; a refusal is an answer, an internal error of the server is none."""
    if isinstance(err, library.errors.HFValidationError):
        return False
    if not isinstance(err, library.errors.HfHubHTTPError):
        return True
    return err.response is None or err.response.status_code >= 500


def _refusal(library: Any, err: Exception, *, key: str, value: str, repository: str, revision: str) -> ConfigError:
    """Returns the error in one sentence. The library's message is left out, since it may contain headers."""
    errors = library.errors
    entry = f"{key}={value}"
    if isinstance(err, errors.LocalEntryNotFoundError) and isinstance(err.__cause__, Exception):
        err = err.__cause__
    if isinstance(err, errors.GatedRepoError):
        return ConfigError(
            f"{entry}: the repository {repository} of the Hub is gated, and this login may not read it",
            hint="accept its terms on its page, then type `hf auth login`, or export HF_TOKEN in this shell",
        )
    if isinstance(err, errors.RevisionNotFoundError):
        return ConfigError(
            f"{entry}: the repository {repository} of the Hub has no revision {revision}",
            hint="name a branch, a tag or a commit that its page lists; without one it is main",
        )
    if isinstance(err, (errors.RepositoryNotFoundError, errors.HFValidationError)):
        return ConfigError(
            f"{entry}: there is no such folder here, and no repository {repository} on the Hub that this login may see",
            hint="correct the path or the name; a private repository needs `hf auth login` or HF_TOKEN in this shell",
        )
    if isinstance(err, errors.OfflineModeIsEnabled):
        return ConfigError(
            f"{entry}: there is no such folder here, {OFFLINE} is set, and {repository} is not whole in the cache",
            hint=f"unset {OFFLINE} on a machine with internet, or name a folder",
        )
    status = getattr(getattr(err, "response", None), "status_code", None)
    reason = type(err).__name__ if status is None else f"status {status}"
    return ConfigError(
        f"{entry}: there is no such folder here, and the Hub cannot be asked for {repository} ({reason})",
        hint="type it on a machine with internet (HTTPS_PROXY, HF_ENDPOINT), or copy the files there and name the "
        "folder: `hf download NAME --local-dir DIR`",
    )


def fetch_hub_files(pinned: Sequence[HubFiles]) -> None:
    """Fetches the files that are not in the cache yet.

    Raises:
        ConfigError: it cannot be fetched or written.
    """
    for files in pinned:
        missing = files.missing
        if missing:
            _fetch(files, missing)


def _fetch(files: HubFiles, missing: Sequence[str]) -> None:
    setting = f"{files.key}={files.repository}"
    library = _library(files.key, files.repository)
    num_bytes = sum(files.sizes[name] for name in missing)
    _require_space(setting, files.folder, num_bytes)
    try:
        library.snapshot_download(
            files.repository,
            revision=files.commit,
            allow_patterns=list(_FILES[files.kind]),
            ignore_patterns=_SUBFOLDERS,
        )
        reference = files.folder.parent.parent / "refs" / files.revision
        if files.revision != files.commit:
            # The library records it in the same way, for reads of the cache without network.
            reference.parent.mkdir(parents=True, exist_ok=True)
            reference.write_text(files.commit, encoding="utf-8")
    except Exception as err:  # as in _look_up
        # The library's errors of the network are OSErrors as well, with other numbers or none.
        if isinstance(err, OSError) and err.errno in _CANNOT_WRITE:
            raise ConfigError(
                f"{setting}: the cache of the Hub cannot be written: {err.filename or files.folder}: {err.strerror}",
                hint="make room there, or name another cache: export HF_HOME=/shared/hf, visible on all nodes",
            ) from err
        raise _refusal(
            library,
            err,
            key=files.key,
            value=files.repository,
            repository=files.repository,
            revision=files.commit,
        ) from err
    unfetched = files.missing
    if unfetched:
        raise ConfigError(
            f"{setting}: {', '.join(unfetched[:3])} could not be fetched at {files.commit[:12]}",
            hint="type the same command again: what is in the cache is kept",
        )


def _require_space(setting: str, folder: Path, num_bytes: int) -> None:
    place = next(path for path in folder.parents if path.is_dir())
    free = shutil.disk_usage(place).free
    if free < num_bytes:
        raise ConfigError(
            f"{setting}: {byte_size(num_bytes)} are to be fetched, and {place} has {byte_size(free)} free",
            hint="make room, or name another cache: export HF_HOME=/shared/hf, visible on all nodes",
        )


# --- folders of the cache in a configuration ---


def hub_snapshots(config: RunConfig) -> Iterator[Snapshot]:
    """Yields the folders of the library's cache that a configuration names."""
    used = program_of(config).used
    values = {
        "model.path": (used.model or {}).get("path"),
        "data.tokenizer": (used.data or {}).get("tokenizer"),
        "train.init_from": used.train.init_from,
    }
    for key, value in values.items():
        match = _SNAPSHOT.fullmatch(value) if isinstance(value, str) else None
        if match is not None:
            yield Snapshot(key, f"{match[2]}/{match[3]}", match[4], Path(match[1]))


def require_snapshots(config: RunConfig, *, host: str) -> None:
    """Checks on a node that it sees the folders of the cache that a run reads.

    Raises:
        ConfigError: it does not.
    """
    for snapshot in hub_snapshots(config):
        if not snapshot.folder.is_dir():
            raise ConfigError(
                f"{host} does not see {snapshot.key}={snapshot.folder}, the files of {snapshot.repository} in the "
                "cache of the Hub",
                hint="export HF_HOME=/shared/hf, a folder that all nodes see, and type the first command again; if the "
                f"cache was emptied: `hf download {snapshot.repository} --revision {snapshot.commit}`",
            )
