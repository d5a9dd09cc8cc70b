"""TensorBoard events beside metrics.jsonl: an extra, for those who like its curves. Rank 0 only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_train.errors import ConfigError

_NOT_CURVES = frozenset({"step", "attempt", "world_size", "time_unix_s", "samples_digest"})


class TensorBoardWriter:
    """Writes the numbers of a metrics line as scalars.

    Args:
        directory: where the events go; a resumed run adds a file and hides the steps that it repeats.
        first_step: step at which this attempt begins.

    Raises:
        ConfigError: the tensorboard package is not installed.
    """

    def __init__(self, directory: Path, *, first_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as err:
            raise ConfigError(
                "track.tensorboard=true was asked, but tensorboard is not installed",
                hint="pip install 'slurm-train[track]', or set track.tensorboard=false",
            ) from err
        self._writer: Any = SummaryWriter(str(directory), purge_step=first_step)

    def write(self, values: Mapping[str, Any]) -> None:
        """Adds one metrics line."""
        for key, value in values.items():
            if key not in _NOT_CURVES and isinstance(value, (int, float)):
                self._writer.add_scalar(key, value, values["step"])

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()
