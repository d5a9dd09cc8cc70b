"""Says in the user's terms what Hydra, OmegaConf or YAML would not accept.

Their messages tell how their own machinery works; a person wants the key that was typed, what there is, and what to
type instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from slurm_train.config.schema import RunConfig
from slurm_train.config.structure import all_keys, unknown_key_error
from slurm_train.errors import ConfigError

_ABSENT = re.compile(r"Could not (?:override|delete)(?: from config)?[. ]*'?([\w./@-]+)'?")
_NO_OPTION = re.compile(
    r"Could not find '([^']+)'.*?Available options in '[^']+':\s*(.*?)\s*Config search path", re.DOTALL
)
_GENERAL_HINT = "`--cfg job` prints every key"


def explain(err: Exception, *, composed_keys: Callable[[], Sequence[str]]) -> ConfigError:
    """Returns the error to show for an exception of the composition.

    Args:
        err: the exception.
        composed_keys: gives the keys there are without the settings that failed; called only where it helps.
    """
    text = str(err)
    missing_value = re.search(r"Missing mandatory value: .*?full_key: (\S+)", text, re.DOTALL)
    if missing_value:
        key = missing_value.group(1)
        return ConfigError(f"{key} has no value", hint=f"set {key}=...")
    no_option = _NO_OPTION.search(text)
    if no_option:
        return _no_option(no_option.group(1), " ".join(no_option.group(2).split()))
    absent = _ABSENT.search(text) or re.search(r"Key '([^']+)' is not in struct", text)
    if absent:
        return _absent(getattr(err, "full_key", None) or absent.group(1), composed_keys)
    return ConfigError(" ".join(text.split("\nConfig search path")[0].split()), hint=_GENERAL_HINT)


def no_cluster_error(key: str) -> ConfigError:
    """Returns the error for a cluster setting in a run that asks for no cluster."""
    return ConfigError(
        f"{key} was set, but the run asks for no cluster",
        hint="add +cluster=<nodes>x<GPUs per node>, e.g. +cluster=4x8",
    )


def _no_option(name: str, options: str) -> ConfigError:
    if name.startswith("cluster/"):
        return ConfigError(
            f"there is no configuration {name!r}",
            hint=f"write +cluster=<nodes>x<GPUs per node>, e.g. +cluster=4x8, or one of: {options}",
        )
    return ConfigError(f"there is no configuration {name!r}", hint=f"there are: {options}")


def _absent(key: str, composed_keys: Callable[[], Sequence[str]]) -> ConfigError:
    if key.startswith("cluster.") and key in all_keys(RunConfig):
        return no_cluster_error(key)
    error = unknown_key_error(key, composed_keys())
    if key.startswith(("model.", "data.")):
        return ConfigError(error.message, hint=f"{error.hint} +{key}=... adds one on purpose")
    return error
