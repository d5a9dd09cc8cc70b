"""From words to a configuration, and what they say to Hydra itself."""

from __future__ import annotations

from slurm_train.cli.terminal import note
from slurm_train.config.hydra import HydraSettings, read_settings
from slurm_train.config.words import Words


def read_settings_of(flags: Words) -> HydraSettings:
    """Returns what the words and the person's own files say to Hydra; prints its notes.

    Raises:
        ConfigError: something that cannot do here what it does under Hydra.
    """
    settings = read_settings(flags)
    for text in settings.notes:
        note(text)
    return settings
