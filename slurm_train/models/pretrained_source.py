"""Where a model of transformers comes from: an architecture or a directory. Imports no torch and no transformers."""

from __future__ import annotations

from pathlib import Path

from slurm_train.errors import ConfigError

CONFIG_FILE = "config.json"


def require_source(*, model_type: str | None, path: str | None, cwd: Path) -> None:
    """Does nothing where there is one of both, and the directory is there.

    Args:
        model_type: transformers' name of an architecture.
        path: a directory with config.json, or the path of a config.json.
        cwd: directory that a relative path starts from.

    Raises:
        ConfigError: both or neither are given, or the directory has no config.json.
    """
    if (model_type is None) == (path is None):
        raise ConfigError(
            f"model=hf was given model.model_type={model_type} and model.path={path}; it takes one of them",
            hint="e.g. model.model_type=llama 'model.config={hidden_size: 64, num_hidden_layers: 2}'",
        )
    if path is None or (cwd / path).is_file():
        return
    if not (cwd / path / CONFIG_FILE).is_file():
        raise ConfigError(
            f"model.path={path}: there is no {Path(path) / CONFIG_FILE}",
            hint="name a directory on this machine; nothing is downloaded (`hf download NAME --local-dir DIR` does)",
        )
