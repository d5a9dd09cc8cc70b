"""Whether the installed version of a library has what an adapter reads and sets in it, asked at the first start.

Adapters need names that a library does not promise. One that is missing would be found at the first resume only, when
hours are trained and there is no way on. An older version may have the names and do otherwise: Lightning 2.5.2 has them
all, and a resumed epoch has other batches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from slurm_train.errors import ConfigError
from slurm_train.formatting import shorten


def require_names(library: str, owners: Mapping[str, tuple[object, Sequence[str]]], *, supported: str) -> None:
    """Checks that a library is no older than was tried, and that its objects have the attributes that an adapter uses.

    Args:
        library: its name as a package, e.g. "lightning".
        owners: by what it is called in the message: an object, and names of its attributes.
        supported: versions that were tried, e.g. ">=2.6,<2.7".

    Raises:
        ConfigError: it is older, or a name is missing; the message has the version and all missing names.
    """
    hint = f"install a version that was tried: pip install '{library}{supported}'"
    installed = version(library)
    if _numbers(installed) < _numbers(supported):
        raise ConfigError(f"{library} {installed} is older than what the callback was tried with", hint=hint)
    missing = [
        f"{called}.{name}" for called, (owner, names) in owners.items() for name in names if not hasattr(owner, name)
    ]
    if missing:
        raise ConfigError(
            f"{library} {installed} lacks what the callback needs to save and to resume: {shorten(missing)}", hint=hint
        )


def _numbers(text: str) -> list[int]:
    """Returns the first version in a text as numbers, e.g. [2, 5, 3] of "2.5.3.post0" and of ">=2.5.3,<3"."""
    match = re.search(r"\d+(\.\d+)*", text)
    return [] if match is None else [int(part) for part in match[0].split(".")]
