"""Whether the installed version of a library has what an adapter reads and sets in it, asked at the first start.

Adapters need names that a library does not promise. One that is missing would be found at the first resume only, when
hours are trained and there is no way on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version

from slurm_train.errors import ConfigError
from slurm_train.formatting import shorten


def require_names(library: str, owners: Mapping[str, tuple[object, Sequence[str]]], *, supported: str) -> None:
    """Checks that objects of a library have the attributes that an adapter uses.

    Args:
        library: its name as a package, e.g. "lightning".
        owners: by what it is called in the message: an object, and names of its attributes.
        supported: versions that were tried, e.g. "2.6".

    Raises:
        ConfigError: one is missing; the message has the version and all missing names.
    """
    missing = [
        f"{called}.{name}" for called, (owner, names) in owners.items() for name in names if not hasattr(owner, name)
    ]
    if missing:
        raise ConfigError(
            f"{library} {version(library)} lacks what the callback needs to save and to resume: {shorten(missing)}",
            hint=f"install a version that was tried: pip install '{library}{supported}'",
        )
