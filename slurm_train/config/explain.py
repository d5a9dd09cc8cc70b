"""Says in the user's terms what Hydra, OmegaConf or YAML would not accept, and what to type instead.

Their messages tell how their own machinery works; a person wants the key that was typed, what there is, and what to
type. Settings of Hydra's launchers are translated: a launcher hands runs to Slurm, or to processes of this machine, and
that is what this program does itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from hydra.errors import OverrideParseException

from slurm_train.config.schema import RunConfig, all_keys, unknown_key_error
from slurm_train.errors import ConfigError

_GENERAL_HINT = "`--cfg job` prints every key"
_ADD_CLUSTER = "+cluster=<nodes>x<GPUs per node>"
_SEVERAL = (
    "{0} has several values, and makes a run of each only with -m (--multirun)",
    'add -m; for one list write "{1}=[{2}]", for one text "{1}=\'{2}\'"',
)
# What Hydra and OmegaConf say about a slip of the pen, and what to say instead; {0} is what the pattern has found.
_SAID: Mapping[str, tuple[str, str]] = {
    r"Missing mandatory value: (hydra\.[\w.]+)": ("", ""),
    r"Missing mandatory value: .*?full_key: (\S+)": ("{0} has no value", "set {0}=..."),
    r"Ambiguous value for argument '(.*?)'\n": _SEVERAL,
    r"Sweep parameters '(.*?)' requires --multirun": _SEVERAL,
    r"Sweeping over Hydra's configuration is not supported : '(.*?)'": (
        "{0} sets something of Hydra itself, and has several values",
        "give it one",
    ),
    r"An item is already at '(.*?)'": ("{0} is there already, and + adds a key", "write {0}=VALUE, without the +"),
    r"Config group override must be a string or a list": (
        "null is no option of a group",
        "write ~GROUP to leave a group out, e.g. ~cluster",
    ),
    r"Environment variable '(\w+)' not found": (
        "${{oc.env:{0}}}: there is no such variable",
        "set it, or write ${{oc.env:{0},default}}",
    ),
    r"Unsupported interpolation type (\S+)": (
        "there is no resolver '{0}' for ${{{0}:...}}",
        "register one of your own in a module of a package hydra_plugins, beside your code or installed: "
        "every such module is imported when a configuration is composed",
    ),
    r"Interpolation key '(.*?)' not found": ("${{{0}}} refers to a key that there is not", _GENERAL_HINT),
}


def explain(err: Exception, *, composed_keys: Callable[[], Sequence[str]]) -> ConfigError:
    """Returns the error to show for an exception of the composition.

    Args:
        err: the exception.
        composed_keys: gives the keys there are without the settings that failed; called only where it helps.
    """
    text = str(err)
    if isinstance(err, OverrideParseException):
        reason = re.sub(r"Error parsing override '.*?'\n|\nSee https.*", "", text, flags=re.DOTALL)
        hint = (
            "quote a value with =, commas, brackets or ${a:${b}} once more inside the shell's quotes: \"key='value'\""
        )
        return ConfigError(f"{err.override!r} cannot be read: {' '.join(reason.split())}", hint=hint)
    for pattern, (message, hint) in _SAID.items():
        if (match := re.search(pattern, text, re.DOTALL)) is not None:
            word = next(iter(match.groups()), "")
            key, _, value = word.partition("=")
            if not message:
                return not_known_yet(word)
            return ConfigError(message.format(word), hint=hint.format(word, key, value))
    if match := re.search(
        r"Could not find '([^']+)'.*?Available options in '[^']+':\s*(.*?)\s*Config search", text, re.S
    ):
        return _no_option(match[1], " ".join(match[2].split()))
    absent = re.search(r"Could not (?:override|delete)(?: from config)?[. ]*'?([\w./@-]+)'?", text)
    absent = absent or re.search(r"Key '([^']+)' is not in struct", text)
    if absent:
        return _absent(getattr(err, "full_key", None) or absent[1], composed_keys)
    return ConfigError(" ".join(text.split("\nConfig search path")[0].split()), hint=_GENERAL_HINT)


def not_known_yet(reference: str) -> ConfigError:
    """Returns the error for what Hydra would fill in later, e.g. "hydra.runtime.output_dir"."""
    return ConfigError(
        f"${{{reference}}} is not known when the configuration is composed",
        hint="refer to something else: a run's path is derived from its configuration, a job id comes later; "
        "${hydra.job.num} is known in a sweep",
    )


def no_cluster_error(key: str) -> ConfigError:
    """Returns the error for a cluster setting in a run that asks for no cluster."""
    return ConfigError(f"{key} was set, but the run asks for no cluster", hint=f"add {_ADD_CLUSTER}, e.g. +cluster=4x8")


def _no_option(name: str, options: str) -> ConfigError:
    group, _, option = name.partition("/")
    if name.startswith("hydra/launcher/"):
        return launcher_error(name.removeprefix("hydra/launcher/"), {})
    hint = f"there are: {options}"
    if group == "cluster":
        hint = f"write {_ADD_CLUSTER}, e.g. +cluster=4x8, or one of: {options}"
    elif group in ("model", "data") and "." in option:
        hint = f"a class of your own: {group}._target_={option}; {hint}"
    return ConfigError(f"there is no configuration {name!r}", hint=hint)


def _absent(key: str, composed_keys: Callable[[], Sequence[str]]) -> ConfigError:
    is_known = key in all_keys(RunConfig)
    if key.startswith("cluster.") and is_known:
        return no_cluster_error(key)
    if key.startswith("container.") and is_known:
        hint = "add container=apptainer, or container=pyxis"
        return ConfigError(f"{key} was set, but the run asks for no container", hint=hint)
    if key.startswith("hydra."):
        return ConfigError(f"there is no configuration key {key!r}", hint="`--hydra-help` lists what can be set")
    error = unknown_key_error(key, composed_keys())
    if key.startswith(("model.", "data.")):
        return ConfigError(error.message, hint=f"{error.hint} +{key}=... adds one on purpose")
    return error


# What hydra-submitit-launcher and hydra-joblib-launcher call it, and what it is called here.
_LAUNCHER_SETTINGS = {
    "timeout_min": "cluster.time_limit_min",
    "cpus_per_task": "cluster.cpus_per_gpu",
    "mem_gb": "cluster.memory_gb_per_node",
    "name": "run.name",
    "array_parallelism": "sweep.max_parallel",
    "n_jobs": "sweep.max_parallel",
    **{key: f"cluster.{key}" for key in ("partition", "account", "qos", "constraint", "exclude", "setup")},
}
_SIZE = ("nodes", "gpus_per_node", "tasks_per_node", "gres")
# Where its files go, and how often it starts a job again, is no question here.
_NEEDLESS = ("submitit_folder", "max_num_timeout", "stderr_to_stdout", "_target_")


def launcher_error(name: str, settings: Mapping[str, str]) -> ConfigError:
    """Returns the error for a launcher of Hydra's, with the words that do the same here.

    Args:
        name: its option, e.g. "submitit_slurm".
        settings: what was given to it, e.g. {"timeout_min": "60", "additional_parameters.mail-type": "END"}.
    """
    if name == "submitit_slurm":
        # --gres=gpu:a100:8
        of_gres = settings.get("gres", "").rpartition(":")[2]
        per_node = settings.get("gpus_per_node") or of_gres or settings.get("tasks_per_node") or "1"
        rest = [_one_word(key, value) for key, value in settings.items() if key not in (*_SIZE, *_NEEDLESS)]
        size = f"+cluster={settings.get('nodes', '1')}x{per_node}"
        hint = f"write {' '.join([size, *rest])} instead ({_ADD_CLUSTER})"
    elif name in ("submitit_local", "joblib"):
        several = f"sweep.max_parallel={settings.get('n_jobs', 'N')} trains several at a time"
        hint = f"drop it: without +cluster the runs are trained here; {several}"
    else:
        hint = f"drop it: {_ADD_CLUSTER} goes through Slurm, e.g. +cluster=4x8; without it, here"
    return ConfigError(f"hydra/launcher={name}: the runs are launched by this program, not by a plugin", hint=hint)


def launcher_setting_error(key: str, value: str) -> ConfigError:
    """Returns the error for a setting of a launcher where none was chosen.

    Args:
        key: its name without "hydra.launcher.".
        value: what it was set to.
    """
    return ConfigError(f"hydra.launcher.{key}: no launcher of Hydra's is used", hint=f"write {_one_word(key, value)}")


def _one_word(key: str, value: str) -> str:
    if key in _LAUNCHER_SETTINGS:
        return f"{_LAUNCHER_SETTINGS[key]}={value}"
    if key in _SIZE:
        return _ADD_CLUSTER
    if key == "srun_args":
        return "cluster.srun.<flag>=<value>"
    return f"cluster.sbatch.{key.removeprefix('additional_parameters.').replace('_', '-')}={value}"
