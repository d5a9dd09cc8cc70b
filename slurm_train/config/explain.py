"""Says in the user's terms what Hydra, OmegaConf or YAML would not accept.

Their messages tell how their own machinery works; a person wants the key that was typed, what there is, and what to
type instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from hydra.errors import OverrideParseException

from slurm_train.config.launchers import launcher_error
from slurm_train.config.schema import RunConfig, all_keys, unknown_key_error
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
    if isinstance(err, OverrideParseException):
        return _unreadable(err)
    for pattern, say in _SAID.items():
        if (match := re.search(pattern, text, re.DOTALL)) is not None:
            return say(match)
    no_option = _NO_OPTION.search(text)
    if no_option:
        return _no_option(no_option.group(1), " ".join(no_option.group(2).split()))
    absent = _ABSENT.search(text) or re.search(r"Key '([^']+)' is not in struct", text)
    if absent:
        return _absent(getattr(err, "full_key", None) or absent.group(1), composed_keys)
    return ConfigError(" ".join(text.split("\nConfig search path")[0].split()), hint=_GENERAL_HINT)


def _unreadable(err: OverrideParseException) -> ConfigError:
    reason = re.sub(r"Error parsing override '.*?'\n|\nSee https.*", "", str(err), flags=re.DOTALL)
    return ConfigError(
        f"{err.override!r} cannot be read: {' '.join(reason.split())}",
        hint="quote a value with =, commas, brackets or ${a:${b}} once more inside the shell's quotes: \"key='value'\"",
    )


def not_known_yet(reference: str) -> ConfigError:
    """Returns the error for what Hydra would fill in later, e.g. "hydra.runtime.output_dir"."""
    return ConfigError(
        f"${{{reference}}} is not known when the configuration is composed",
        hint="refer to something else: a run's path is derived from its configuration, a job id comes later; "
        "${hydra.job.num} is known in a sweep",
    )


def _several_values(match: re.Match[str]) -> ConfigError:
    word = match[1]
    key, _, value = word.partition("=")
    return ConfigError(
        f"{word} has several values, and makes a run of each only with -m (--multirun)",
        hint=f'add -m; for one list write "{key}=[{value}]", for one text "{key}=\'{value}\'"',
    )


def _no_resolver(match: re.Match[str]) -> ConfigError:
    return ConfigError(
        f"there is no resolver {match[1]!r} for ${{{match[1]}:...}}",
        hint="register one of your own in a module of a package hydra_plugins, beside your code or installed: "
        "every such module is imported when a configuration is composed",
    )


# What Hydra and OmegaConf say about a slip of the pen, and what to say instead.
_SAID: Mapping[str, Callable[[re.Match[str]], ConfigError]] = {
    r"Missing mandatory value: (hydra\.[\w.]+)": lambda match: not_known_yet(match[1]),
    r"Missing mandatory value: .*?full_key: (\S+)": lambda match: ConfigError(
        f"{match[1]} has no value", hint=f"set {match[1]}=..."
    ),
    r"Ambiguous value for argument '(.*?)'\n": _several_values,
    r"Sweep parameters '(.*?)' requires --multirun": _several_values,
    r"Sweeping over Hydra's configuration is not supported : '(.*?)'": lambda match: ConfigError(
        f"{match[1]} speaks to Hydra itself, and has several values", hint="give it one"
    ),
    r"An item is already at '(.*?)'": lambda match: ConfigError(
        f"{match[1]} is there already, and + adds a key", hint=f"write {match[1]}=VALUE, without the +"
    ),
    r"Config group override must be a string or a list": lambda _: ConfigError(
        "null is no option of a group", hint="write ~GROUP to leave a group out, e.g. ~cluster"
    ),
    r"Environment variable '(\w+)' not found": lambda match: ConfigError(
        f"${{oc.env:{match[1]}}}: there is no such variable", hint=f"set it, or write ${{oc.env:{match[1]},default}}"
    ),
    r"Unsupported interpolation type (\S+)": _no_resolver,
    r"Interpolation key '(.*?)' not found": lambda match: ConfigError(
        f"${{{match[1]}}} refers to a key that there is not", hint=_GENERAL_HINT
    ),
}


def no_cluster_error(key: str) -> ConfigError:
    """Returns the error for a cluster setting in a run that asks for no cluster."""
    return ConfigError(
        f"{key} was set, but the run asks for no cluster",
        hint="add +cluster=<nodes>x<GPUs per node>, e.g. +cluster=4x8",
    )


def _no_option(name: str, options: str) -> ConfigError:
    if name.startswith("hydra/launcher/"):
        return launcher_error(name.removeprefix("hydra/launcher/"), {})
    if name.startswith("cluster/"):
        return ConfigError(
            f"there is no configuration {name!r}",
            hint=f"write +cluster=<nodes>x<GPUs per node>, e.g. +cluster=4x8, or one of: {options}",
        )
    group, _, option = name.partition("/")
    own = f"a class of your own: {group}._target_={option}; " if group in ("model", "data") and "." in option else ""
    return ConfigError(f"there is no configuration {name!r}", hint=f"{own}there are: {options}")


def _absent(key: str, composed_keys: Callable[[], Sequence[str]]) -> ConfigError:
    if key.startswith("cluster.") and key in all_keys(RunConfig):
        return no_cluster_error(key)
    if key.startswith("hydra."):
        return ConfigError(f"there is no configuration key {key!r}", hint="`--hydra-help` lists what can be set")
    if key.startswith("container.") and key in all_keys(RunConfig):
        return ConfigError(
            f"{key} was set, but the run asks for no container", hint="add container=apptainer, or container=pyxis"
        )
    error = unknown_key_error(key, composed_keys())
    if key.startswith(("model.", "data.")):
        return ConfigError(error.message, hint=f"{error.hint} +{key}=... adds one on purpose")
    return error
