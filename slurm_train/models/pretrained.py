"""Weights in the layout of the Hugging Face library: written as a directory that transformers reads, and read again.

What is written goes through the library's own model of the architecture, so names, shapes and configuration are those
that it expects, or nothing is written. What is read is compared with the model by configuration, name and shape.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slurm_train.errors import CheckpointError, ConfigError
from slurm_train.models.causal_lm import (
    PREFIX,
    CausalLM,
    build_network,
    causal_lm,
    pretrained_config,
    require_transformers,
)
from slurm_train.models.gpt import GPT
from slurm_train.models.pretrained_names import Architecture, GptForm, Place, gpt_form

_GPT = f"{GPT.__module__}.{GPT.__qualname__}"
_CAUSAL_LM = f"{causal_lm.__module__}.{causal_lm.__qualname__}"
_INDEX_FILE, _SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
# Dropout and the ids of special tokens change no weight; rotary positions are computed as far as they are needed.
_NOT_COMPARED = ("embd_pdrop", "resid_pdrop", "attn_pdrop", "attention_dropout", "bos_token_id", "eos_token_id")
_NUM_NAMED = 5


def write_pretrained(folder: Path, tensors: Mapping[str, Tensor], *, model: Mapping[str, Any], shard_size: str) -> None:
    """Writes config.json and model.safetensors, in several files with an index where they are larger than a shard.

    Args:
        folder: where to; made if it is missing.
        tensors: the model's, by our names.
        model: the `model` part of the configuration that they were trained with.
        shard_size: largest file, e.g. "5GB".

    Raises:
        ConfigError: transformers is missing, or has no architecture of the model's form.
        CheckpointError: the tensors are not those of the architecture.
    """
    config, named = _in_their_layout(model, tensors)
    require_transformers()
    with torch.device("meta"):
        network: Any = build_network(config)
    try:
        # A tied head has no tensor of its own here.
        left_out = network.load_state_dict(named, assign=True, strict=False)
    except RuntimeError as err:
        raise _misfit(config.model_type, str(err)) from err
    network.tie_weights()
    missing = [name for name, parameter in network.named_parameters() if parameter.is_meta]
    if missing or left_out.unexpected_keys:
        raise _misfit(config.model_type, f"missing {missing[:5]}, unknown {left_out.unexpected_keys[:5]}")
    network.save_pretrained(folder, max_shard_size=shard_size)


def load_pretrained(model: nn.Module, path: Path, *, settings: Mapping[str, Any]) -> None:
    """Gives a model the weights of a safetensors file or of a directory in the library's layout, in place.

    A file has the model's own names, as `checkpoint export` writes it. So has a directory, but for the shipped GPT,
    whose names are translated.

    Args:
        model: whole, on any device.
        path: the file or the directory.
        settings: the `model` part of the configuration.

    Raises:
        ConfigError: there is no such file, or it is of another model.
    """
    if path.is_dir() and isinstance(model, CausalLM):
        raise ConfigError(
            f"train.init_from={path} is a directory of transformers' layout, which model=hf takes as it is",
            hint=f"leave train.init_from out and set model.path={path}",
        )
    places = {name: Place(name) for name, _ in model.named_parameters()}
    architecture = None
    if path.is_dir() and settings.get("_target_") == _GPT:
        form = gpt_form(_all_settings(settings))
        _require_same_config(path, form)
        architecture = form.architecture
        places = {name: architecture.place(name) for name in places}
    with ExitStack() as files:
        found = _Tensors(path, files, architecture)
        found.require(places.values(), names={name for name, _ in model.named_parameters(remove_duplicate=False)})
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _copy(parameter, found.read(places[name]), name=name, path=path)


class _Tensors:
    """The tensors of a file or a directory, read one by one."""

    def __init__(self, path: Path, files: ExitStack, architecture: Architecture | None) -> None:
        self._path, self._architecture = path, architecture
        # The library's handle has no types, and is no mapping.
        self._holders: dict[str, Any] = {}
        for file in _open_all(path, files):
            self._holders |= dict.fromkeys(file.keys(), file)

    def require(self, places: Any, *, names: set[str]) -> None:
        """Refuses files that lack a tensor, or have one that belongs nowhere."""
        wanted = {self._stored(place.name): place.name for place in places}
        missing = sorted(name for stored, name in wanted.items() if stored not in self._holders)
        ignored = self._architecture.ignored if self._architecture else ()
        tied = {"lm_head.weight"} if self._architecture else names
        beside = [name for name in self._holders if name not in wanted and name not in tied]
        unknown = sorted(name for name in beside if not name.endswith(ignored or ("\0",)))
        if missing or unknown:
            parts = [
                f"{word} {', '.join(found[:_NUM_NAMED])}" + (" ..." if len(found) > _NUM_NAMED else "")
                for word, found in (("lacks", missing), ("has besides", unknown))
                if found
            ]
            raise ConfigError(
                f"{self._path} does not hold this model's weights: it {' and '.join(parts)}",
                hint="configure the model with the same shape, or start from other weights",
            )

    def read(self, place: Place) -> Tensor:
        """Returns a tensor as our model has it."""
        stored = self._stored(place.name)
        tensor: Tensor = self._holders[stored].get_tensor(stored)
        if place.third is not None:
            tensor = tensor.chunk(3, dim=-1)[place.third]
        return tensor.T if place.is_transposed else tensor

    def _stored(self, name: str) -> str:
        """Returns the name in the file: of some published files without its first word."""
        short = name.partition(".")[2]
        return short if self._architecture and name not in self._holders and short in self._holders else name


def _in_their_layout(model: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """Returns the library's configuration and the tensors by its names."""
    if model.get("_target_") == _CAUSAL_LM:
        words = {name: model.get(name) for name in ("model_type", "path", "config")}
        return pretrained_config(**words), {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    if model.get("_target_") != _GPT:
        raise ConfigError(
            "the layout of transformers is known for the shipped GPT and for model=hf, "
            f"not for {model.get('_target_')}",
            hint="leave --format out: the weights are then written under the model's own names",
        )
    form = gpt_form(_all_settings(model))
    return _config_of(form), _renamed(form, tensors)


def _renamed(form: GptForm, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    parts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if name == "head.weight" and form.tied:
            continue
        place = form.architecture.place(name)
        turned = tensor.T if place.is_transposed else tensor
        parts.setdefault(place.name, {})[place.third or 0] = turned
    return {name: torch.cat([own[n] for n in sorted(own)], dim=-1).contiguous() for name, own in parts.items()}


def _config_of(form: GptForm) -> Any:
    return require_transformers().AutoConfig.for_model(form.architecture.model_type, **form.config)


def _all_settings(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns every argument of the GPT: what a configuration says, else the default."""
    defaults = {name: p.default for name, p in inspect.signature(GPT.__init__).parameters.items() if name != "self"}
    return {name: model.get(name, default) for name, default in defaults.items()}


def _require_same_config(path: Path, form: GptForm) -> None:
    """Refuses weights that were trained in another form, which shapes alone may not show."""
    theirs = pretrained_config(model_type=None, path=str(path), config=None)
    asked = form.architecture.model_type
    if theirs.model_type != asked:
        raise ConfigError(
            f"{path} holds a model of type {theirs.model_type}; this GPT's form is that of {asked}",
            hint=f"start it with model=hf model.path={path}",
        )
    ours = _config_of(form)
    # A longer context than ours changes no weight where positions are computed.
    passed_over = _NOT_COMPARED + (("max_position_embeddings",) if asked == "llama" else ())
    pairs = ((key, getattr(ours, key), getattr(theirs, key)) for key in form.config if key not in passed_over)
    if rows := [
        f"{key} {own!r}, there {other!r}"
        for key, own, other in pairs
        if _as_meant(own, ours) != _as_meant(other, theirs)
    ]:
        raise ConfigError(
            f"{path} holds weights of another form than this model's: {'; '.join(rows)}",
            hint="set the model's keys as the directory's config.json has them (docs/models.md)",
        )


def _as_meant(value: Any, config: Any) -> Any:
    """Returns a value for comparison: GPT-2's unset inner width is four times the width."""
    return 4 * config.hidden_size if value is None else value


def _open_all(path: Path, files: ExitStack) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    for file in _files_of(path):
        try:
            yield files.enter_context(safe_open(file, framework="pt"))
        except (OSError, SafetensorError) as err:
            raise ConfigError(
                f"cannot read weights from {file}: {err}", hint="name a safetensors file, or a directory that has one"
            ) from err


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    if (path / _INDEX_FILE).is_file():
        named = json.loads((path / _INDEX_FILE).read_text(encoding="utf-8"))["weight_map"].values()
        return [path / name for name in sorted(set(named))]
    return [path / _SINGLE_FILE]


def _copy(parameter: Tensor, tensor: Tensor, *, name: str, path: Path) -> None:
    if parameter.shape != tensor.shape:
        raise ConfigError(
            f"{name} is {tuple(tensor.shape)} in {path}, and {tuple(parameter.shape)} in the model",
            hint="configure the model with the same shape, or start from other weights",
        )
    parameter.copy_(tensor)


def _misfit(kind: str, reason: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint's weights are not those of a {kind} of this shape: {reason[:300]}",
        hint="export it without --format; that writes the weights under the model's own names",
    )
