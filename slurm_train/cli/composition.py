"""From words to a configuration: the quick way for ordinary words, the whole way where something is said to Hydra."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_train.config.words import Words

if TYPE_CHECKING:
    from slurm_train.config.compose import Composed
    from slurm_train.config.hydra_settings import HydraSettings


def read_settings_of(flags: Words) -> HydraSettings | None:
    """Returns what the words and the person's own files say to Hydra; None where they say nothing. Prints its notes.

    Raises:
        ConfigError: something that cannot do here what it does under Hydra.
    """
    from slurm_train.config.lean import is_enough

    if is_enough(flags):
        return None
    from slurm_train.cli.display import note
    from slurm_train.config.hydra_settings import read_settings

    settings = read_settings(flags)
    for text in settings.notes:
        note(text)
    return settings


def compose_one(flags: Words, settings: HydraSettings | None) -> Composed:
    """Returns the configuration of the one run that the words ask for.

    Raises:
        ConfigError: an unknown key, group or value; a launcher and a cluster that do not go together.
    """
    from slurm_train.config.compose import compose

    composed = (settings.composed() if settings is not None else None) or compose(flags)
    if settings is not None:
        from slurm_train.config.hydra_settings import refuse_cluster

        refuse_cluster(settings, composed.config)
    return composed
