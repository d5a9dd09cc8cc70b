"""The frozen configuration on disk: written once by the login half, read by every attempt.

Plain YAML through libyaml: a rank starts without Hydra and OmegaConf.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from slurm_train.config.schema import RunConfig
from slurm_train.config.structure import build_config, to_mapping
from slurm_train.errors import RunError

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def dump_config(config: RunConfig) -> str:
    """Returns the YAML text of a configuration, every key spelled out."""
    text: str = yaml.dump(to_mapping(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def load_config(path: Path) -> RunConfig:
    """Returns the configuration in a frozen file.

    Raises:
        RunError: there is no such file, or it is not YAML.
        ConfigError: the file holds keys or values that this version does not know.
    """
    return build_config(RunConfig, load_values(path))


def load_values(path: Path) -> dict[str, Any]:
    """Returns what a frozen file holds, whatever version has written it.

    Raises:
        RunError: there is no such file, or it is not YAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RunError(f"{path} does not exist", hint="name a run directory, as `status` lists them") from None
    try:
        values = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as err:
        raise _damaged(path, " ".join(str(err).split())) from err
    if not isinstance(values, dict):
        raise _damaged(path, "it holds no mapping")
    return values


def _damaged(path: Path, problem: str) -> RunError:
    return RunError(f"{path} cannot be read: {problem}", hint="type the run's first command again to write it anew")
