"""What a checkpoint says about itself: the facts of the moment it was taken, and size and hash of every file.

The manifest is the trust anchor: COMPLETE holds the hash of its bytes, and it holds the hashes of everything else. It
is plain JSON, so a login node reads it without torch. Reading is strict: a checkpoint that this version does not fully
understand is refused, not guessed at.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import xxhash

from slurm_train.errors import CheckpointError

FORMAT_VERSION = 1
# What to do about a checkpoint that is not as it was written; its loader and `verify` look for an older one themselves.
DAMAGED_HINT = "`checkpoint verify RUN` shows which checkpoints are whole; take another one, or restore this one"
_HEADER_HINT = "pass the facts of a checkpoint as CheckpointHeader describes them"
MANIFEST_FILE = "manifest.json"
COMPLETE_FILE = "COMPLETE"
_HASH_PREFIX = "xxh3_128:"
_HASH_LENGTH = 32


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and hash of one file.

    Args:
        bytes: exact size.
        xxh3_128: 32 lower-case hexadecimal digits.
    """

    bytes: int
    xxh3_128: str

    def __post_init__(self) -> None:
        """Refuses a negative size and a text that is no hash."""
        if self.bytes < 0 or len(self.xxh3_128) != _HASH_LENGTH or set(self.xxh3_128) - set("0123456789abcdef"):
            raise CheckpointError(f"no file record: {self.bytes} bytes, hash {self.xxh3_128!r}", hint=DAMAGED_HINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointHeader:
    """The facts of the moment a checkpoint was taken.

    Args:
        step: optimizer steps done.
        samples: global samples that those steps consumed.
        epoch: epoch of the next sample.
        world_size: number of ranks that wrote.
        mesh: degree per mesh axis, for example {"dp_replicate": 32}.
        batch_plan: the batch arithmetic as JSON values.
        config_hash: identity of the frozen configuration, as in plan.json.
        data_fingerprint: identity of the data set.
        torch_version: torch that wrote the tensors.
        attempt: attempt of the run that saved it, counted over the whole run.
        job: Slurm job id in the form that names a file, for example "123_4", or "local".
        written_by: free text for people, for example "n01 pid 4711".
        extra: further JSON values of the trainer, for example a learning-rate retune or a tracker's run id.
    """

    step: int
    samples: int
    epoch: int
    world_size: int
    mesh: dict[str, int]
    batch_plan: dict[str, Any]
    config_hash: str
    data_fingerprint: str
    torch_version: str
    attempt: int
    job: str = "local"
    written_by: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuses values of another type and negative counts."""
        for name, kind in _KINDS.items():
            _check_kind(name, getattr(self, name), kind)
        if not self.job.replace("_", "").isalnum() or not self.job.isascii():
            raise CheckpointError(
                f"checkpoint job={self.job!r} cannot be part of a file name", hint="letters, digits and _ are taken"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(CheckpointHeader):
    """A header together with the record of every file, by plain file name."""

    files: dict[str, FileRecord]
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        """Refuses file names that lead elsewhere, and names that the directory itself uses."""
        CheckpointHeader.__post_init__(self)
        for name in self.files:
            check_file_name(name)

    @classmethod
    def of(cls, header: CheckpointHeader, files: dict[str, FileRecord]) -> Manifest:
        """Gives the manifest of a header and its files, in name order."""
        facts = {item.name: getattr(header, item.name) for item in fields(CheckpointHeader)}
        return cls(**facts, files=dict(sorted(files.items())))

    @property
    def num_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(record.bytes for record in self.files.values())

    def to_json(self) -> str:
        """Gives the text of manifest.json; equal manifests give equal text."""
        try:
            return json.dumps(asdict(self), indent=1, sort_keys=True, allow_nan=False) + "\n"
        except (TypeError, ValueError) as err:
            raise CheckpointError(
                f"checkpoint of step {self.step}: header holds what JSON cannot: {err}", hint=_HEADER_HINT
            ) from err

    def digest(self) -> str:
        """Gives the content of COMPLETE, for example "xxh3_128:0a1b..."."""
        return digest_of(self.to_json().encode())

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Reads the text of manifest.json.

        Raises:
            CheckpointError: not JSON, another format version, or any key or type other than expected.
        """
        try:
            facts = json.loads(text)
        except ValueError as err:
            raise CheckpointError(f"{MANIFEST_FILE} is not JSON: {err}", hint=DAMAGED_HINT) from err
        _check_shape(facts)
        files = {name: _record(name, value) for name, value in facts.pop("files").items()}
        return cls(**facts, files=files)


def digest_of(data: bytes) -> str:
    """Gives the marker text for the bytes of a manifest.json."""
    return _HASH_PREFIX + xxhash.xxh3_128_hexdigest(data)


def check_file_name(name: str) -> None:
    """Refuses names that are not plain names inside a checkpoint directory.

    Raises:
        CheckpointError: the name holds a separator or a control character, is "", "." or "..", or is reserved.
    """
    if name in {"", ".", "..", MANIFEST_FILE, COMPLETE_FILE} or "/" in name or "\\" in name or not name.isprintable():
        raise CheckpointError(
            f"{MANIFEST_FILE} names the file {name!r}, which is not a plain file name of a checkpoint",
            hint="do not load this checkpoint: its manifest was not written by slurm_train",
        )


_KINDS: dict[str, type] = {
    "step": int,
    "samples": int,
    "epoch": int,
    "world_size": int,
    "mesh": dict,
    "batch_plan": dict,
    "config_hash": str,
    "data_fingerprint": str,
    "torch_version": str,
    "attempt": int,
    "job": str,
    "written_by": str,
    "extra": dict,
}


def _check_kind(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise CheckpointError(f"checkpoint {name}={value!r} is not of type {kind.__name__}", hint=_HEADER_HINT)
    if isinstance(value, int) and value < 0:
        raise CheckpointError(f"checkpoint {name}={value} is negative", hint=_HEADER_HINT)


def _check_shape(facts: object) -> None:
    """Refuses another format version, and missing or unknown keys."""
    if not isinstance(facts, dict):
        raise CheckpointError(f"{MANIFEST_FILE} holds a {type(facts).__name__}, not an object", hint=DAMAGED_HINT)
    version = facts.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise CheckpointError(
            f"{MANIFEST_FILE} has format version {version!r}; this version reads {FORMAT_VERSION}",
            hint="load it with the version of slurm_train that wrote it",
        )
    expected = {item.name for item in fields(Manifest)}
    if set(facts) != expected:
        missing, unknown = sorted(expected - set(facts)), sorted(set(facts) - expected)
        raise CheckpointError(
            f"{MANIFEST_FILE} lacks the keys {missing} and has the unknown keys {unknown}", hint=DAMAGED_HINT
        )
    _check_kind("files", facts["files"], dict)


def _record(name: str, value: object) -> FileRecord:
    if not isinstance(value, dict) or set(value) != {"bytes", "xxh3_128"}:
        raise CheckpointError(f"{MANIFEST_FILE} has no size and hash for {name!r}, found {value!r}", hint=DAMAGED_HINT)
    _check_kind("files.bytes", value["bytes"], int)
    _check_kind("files.xxh3_128", value["xxh3_128"], str)
    return FileRecord(bytes=value["bytes"], xxh3_128=value["xxh3_128"])
