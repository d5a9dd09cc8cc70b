"""The data sets of this package, as far as they are known from the name in `data._target_`, without running their code.

Other modules ask what a data set is; only this one compares names. A source that was built describes itself
(`data.source.describe`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DataKind:
    """A data set of this package."""

    target: str
    """The value of `data._target_`."""
    is_text: bool = True
    """Whether it gives windows of tokens."""
    packs: bool = False
    """Whether text is encoded at its first use: as bytes, or by `data.tokenizer`, and kept in `data.cache`."""


EMBEDDED = DataKind("slurm_train.data.stdlib.build", packs=True)
PREPARED = DataKind("slurm_train.data.text.build")
PACKED = DataKind("slurm_train.data.text.build_packed", packs=True)
MIX = DataKind("slurm_train.data.mix.build")
DIGITS = DataKind("slurm_train.data.digits.build", is_text=False)
KINDS = (EMBEDDED, PREPARED, PACKED, MIX, DIGITS)
_USERS_OWN = DataKind("", is_text=False)
_BY_TARGET = {kind.target: kind for kind in KINDS}


def kind_of(data: Mapping[str, Any] | None) -> DataKind:
    """Returns what the `data` mapping of a configuration names; one that is nothing here for a user's own."""
    return _BY_TARGET.get(str((data or {}).get("_target_")), _USERS_OWN)


def packs_somewhere(data: Mapping[str, Any] | None) -> bool:
    """Returns whether a data set, or a part of it such as a source of a mix, is encoded at its first use."""
    return any(kind.packs and kind.target in str(data) for kind in KINDS)
