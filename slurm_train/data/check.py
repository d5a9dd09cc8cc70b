"""What the login node can know of a data set from its configuration, without running its code and without torch.

Prepared text has an index on disk: fingerprint, size and number of token ids are compared before a job is submitted.
Nothing is known here of other data sets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_train.config.data_kinds import EMBEDDED, MIX, PACKED, PREPARED, kind_of
from slurm_train.data.shards import INDEX, Shard, Split, default_path, fingerprint_of
from slurm_train.errors import ConfigError, DataError
from slurm_train.rundir.files import read_json

_KEYS_OF_PACKING = ("path", "text_column", "tokenizer", "held_out", "cache")
_OTHER_KEYS_OF_PACKED = ("_target_", "context", "split", "heldout", "prefetch", "allow_world_change", "document_mask")
"""Settings of packed text, and of any data set, that change nothing of the shards."""


def known_fingerprint(data: Mapping[str, Any], *, cwd: Path, split: Split = "train") -> str | None:
    """Returns the fingerprint of the samples if it is known without running the data set's own code, else None.

    Args:
        data: the `data` mapping of a configuration.
        cwd: directory that a relative path starts from.
        split: which samples.
    """
    shards, context = _shards_of(data, cwd=cwd, split=split)
    hashes = [shard.xxh3_128 for shard in shards]
    return fingerprint_of(hashes, context=context, document_mask=data.get("document_mask") is True) if shards else None


def known_num_samples(data: Mapping[str, Any], *, cwd: Path) -> int | None:
    """Returns the number of training samples if it is known without running the data set's own code, else None.

    Args:
        data: the `data` mapping of a configuration.
        cwd: directory that a relative path starts from.
    """
    shards, context = _shards_of(data, cwd=cwd, split="train")
    return sum((shard.tokens - 1) // context for shard in shards) or None


def _shards_of(data: Mapping[str, Any], *, cwd: Path, split: Split) -> tuple[list[Shard], int]:
    """Returns the shards of a split of prepared text and the length of a window; none where there is none."""
    try:
        directory = _directory_of(data, cwd=cwd)
        shards = (read_json(directory / INDEX) or {})["splits"][split]["shards"] if directory else []
        return [Shard(**shard) for shard in shards], int(data.get("context", 256))
    except (ConfigError, DataError, KeyError, TypeError, OSError):
        return [], 1


def require_readable(data: Mapping[str, Any], *, vocab_size: int | None, cwd: Path) -> None:
    """Checks on the login node that text is there, and that its token ids are among the model's.

    Other data sets only their own code can check.

    Args:
        data: the `data` mapping of a configuration.
        vocab_size: number of token ids of the model, None where it is not known.
        cwd: directory that a relative path starts from.

    Raises:
        ConfigError: the sources of a mix are no mappings with weights, or text files have a setting that there is not.
        DataError: there is no text, or none that is prepared where that is asked for, or it has more token ids than
            the model.
    """
    kind = kind_of(data)
    if kind is MIX:
        sources: Any = data.get("sources")
        require_sources(sources)
        for source in sources.values():
            require_readable({"_target_": PREPARED.target, **source}, vocab_size=vocab_size, cwd=cwd)
        return
    directory = _directory_of(data, cwd=cwd)
    index = read_json(directory / INDEX) if directory else None
    if kind is PREPARED and index is None:
        raise DataError(
            f"data.path={data.get('path')} holds no prepared text: {directory}/{INDEX} is missing or broken",
            hint=f"make it with `python -m slurm_train prepare TEXT_FILES --out {data.get('path')}`",
        )
    num_ids = (index or {}).get("vocab_size")
    if vocab_size is not None and isinstance(num_ids, int) and num_ids > vocab_size:
        raise DataError(
            f"the text has {num_ids} token ids, the model only {vocab_size}",
            hint=f"set the model's number of token ids to {num_ids} or more (model.vocab_size, or vocab_size in "
            "model.config), or encode the text with the model's own tokenizer",
        )


def require_sources(sources: Any) -> None:
    """Checks `data.sources` of a mix.

    Raises:
        ConfigError: there is no source, one is no mapping, or a weight is not above 0.
    """
    example = "data.sources={web: {path: data/web, weight: 3}, code: ...}"
    if not isinstance(sources, Mapping) or not sources:
        problem = "is empty" if sources in (None, {}) else f"must be a mapping, got {sources!r}"
        raise ConfigError(f"data.sources {problem}", hint=example)
    for name, source in sources.items():
        if not isinstance(source, Mapping):
            raise ConfigError(f"data.sources.{name} must be a mapping, got {source!r}", hint=example)
        weight = source.get("weight", 1.0)
        is_number = isinstance(weight, (int, float)) and math.isfinite(weight)
        if not is_number or weight <= 0:
            raise ConfigError(
                f"data.sources.{name}.weight must be above 0, got {weight!r}", hint="leave the source out"
            )


def _directory_of(data: Mapping[str, Any], *, cwd: Path) -> Path | None:
    """Returns where the shards of a data set of ours are or will be, None for any other data set."""
    kind = kind_of(data)
    path = data.get("path")
    if kind is EMBEDDED and not path:
        return default_path()
    if kind in (EMBEDDED, PREPARED):
        return cwd / Path(str(path)).expanduser()
    if kind is PACKED:
        from slurm_train.data.prepare import Packing

        unknown = sorted(data.keys() - {*_KEYS_OF_PACKING, *_OTHER_KEYS_OF_PACKED})
        if unknown:
            raise ConfigError(
                f"data.{unknown[0]} is no setting of text files",
                hint=f"there are {', '.join(_KEYS_OF_PACKING)}, context, split, heldout and prefetch",
            )
        words = {name: data[name] for name in _KEYS_OF_PACKING if name in data}
        return Packing(**words, cwd=cwd).directory
    return None
