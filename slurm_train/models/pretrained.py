"""Weights in the layout of the Hugging Face library: written as a directory that transformers reads, and read again.

What is written goes through the library's own model of the architecture, so names, shapes and configuration are those
that it expects, or nothing is written. What is read is compared with the model by configuration, name and shape.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slurm_train.errors import CheckpointError, ConfigError
from slurm_train.formatting import shorten
from slurm_train.models.causal_lm import (
    PREFIX,
    CausalLM,
    build_network,
    causal_lm,
    pretrained_config,
    require_transformers,
    with_adapters,
)
from slurm_train.models.first_weights import Index, Read, Stored, begin_with, stored_tensors
from slurm_train.models.gpt import GPT
from slurm_train.models.pretrained_names import Architecture, Place, gpt_form

_GPT = f"{GPT.__module__}.{GPT.__qualname__}"
_CAUSAL_LM = f"{causal_lm.__module__}.{causal_lm.__qualname__}"
# Dropout and the ids of special tokens change no weight; rotary positions are computed as far as they are needed.
_NOT_COMPARED = ("embd_pdrop", "resid_pdrop", "attn_pdrop", "attention_dropout", "bos_token_id", "eos_token_id")


def write_pretrained(folder: Path, tensors: Mapping[str, Tensor], *, model: Mapping[str, Any], shard_size: str) -> None:
    """Writes config.json and model.safetensors, in several files with an index where they are larger than a shard.

    Of a model with `lora` the adapters alone are written, as peft reads them.

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
    lora = model.get("lora") if model.get("_target_") == _CAUSAL_LM else None
    with torch.device("meta"):
        network: Any = with_adapters(build_network(config), lora)
    try:
        # A tied head has no tensor of its own here.
        unknown = network.load_state_dict(named, assign=True, strict=False).unexpected_keys
        network.tie_weights()
        missing = [name for name, parameter in network.named_parameters() if parameter.is_meta]
        if missing or unknown:
            raise RuntimeError(f"missing: {shorten(missing)}; unknown: {shorten(unknown)}")
    except RuntimeError as err:
        raise CheckpointError(
            f"the checkpoint's weights are not those of a {config.model_type} of this shape: {str(err)[:300]}",
            hint="export it without --format; that writes the weights under the model's own names",
        ) from err
    if lora is not None:
        # Where `PeftModel.from_pretrained` finds the weights that the adapters belong to.
        network.peft_config["default"].base_model_name_or_path = model.get("path")
    network.save_pretrained(folder, max_shard_size=shard_size)


def load_pretrained(
    model: nn.Module, path: Path, *, settings: Mapping[str, Any], buffers: Mapping[str, Tensor]
) -> None:
    """Gives a model the weights of a safetensors file or of a directory in the library's layout, in place.

    A file has the model's own names, as `checkpoint export` writes it, also those of buffers; a buffer that it lacks
    stays as the constructor has made it. So has a directory, but for the shipped GPT, whose names are translated.

    Args:
        model: whole; on any device, or without memory: then each rank reads what it holds when it is filled.
        path: the file or the directory.
        settings: the `model` part of the configuration.
        buffers: those of the model that are saved, by full name.

    Raises:
        ConfigError: there is no such file, or it is of another model.
    """
    if path.is_dir() and isinstance(model, CausalLM):
        raise ConfigError(
            f"train.init_from={path} is a directory of transformers' layout, which model=hf takes as it is",
            hint=f"leave train.init_from out and set model.path={path}",
        )
    places = {name: Place(name) for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    is_theirs = path.is_dir() and settings.get("_target_") == _GPT
    ignored: tuple[str, ...] = ()
    if is_theirs:
        architecture = _require_same_config(path, settings)
        places = {name: architecture.place(name) for name in places}
        tied = {"lm_head.weight"}
        ignored = architecture.ignored
    holders = stored_tensors(path)
    stored = {}
    for place in places.values():
        # Some published files leave the first word of each name out.
        short = place.name.partition(".")[2]
        is_short = is_theirs and place.name not in holders and short in holders
        stored[place.name] = short if is_short else place.name
    missing = sorted(name for name, stored_name in stored.items() if stored_name not in holders)
    unused = holders.keys() - stored.values() - tied - buffers.keys()
    unknown = sorted(name for name in unused if not name.endswith(ignored))
    differences = []
    if missing:
        differences.append(f"lacks {shorten(missing)}")
    if unknown:
        differences.append(f"has tensors that the model lacks: {shorten(unknown)}")
    if differences:
        raise ConfigError(
            f"{path} does not hold this model's weights: it {' and '.join(differences)}",
            hint="configure the model with the same shape, or start from other weights",
        )
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    reads = {name: _placed(holders[stored[place.name]], place) for name, place in places.items()}
    for name in buffers.keys() & holders.keys():
        tensors[name] = buffers[name]
        reads[name] = _placed(holders[name], Place(name))
    for name, (_, shape) in reads.items():
        if tensors[name].shape != shape:
            raise ConfigError(
                f"{name} is {shape} in {path}, and {tuple(tensors[name].shape)} in the model",
                hint="configure the model with the same shape, or start from other weights",
            )
    for name, (read, _) in reads.items():
        begin_with(tensors[name], read)


def _placed(tensor: Stored, place: Place) -> tuple[Read, tuple[int, ...]]:
    """Returns what reads a parameter from the tensor that it is a part of, and its shape."""
    if place.third is None and not place.is_transposed:
        return tensor, tensor.shape
    *rows, last = tensor.shape
    start, size = (0, last) if place.third is None else (place.third * (last // 3), last // 3)

    def read(index: Index) -> Tensor:
        *before, columns = reversed(index) if place.is_transposed else index
        part = tensor((*before, slice(start + columns.start, start + columns.stop)))
        return part.T if place.is_transposed else part

    shape = (*rows, size)
    return read, shape[::-1] if place.is_transposed else shape


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
    architecture, config = gpt_form(_all_settings(model))
    parts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if name == "head.weight" and config["tie_word_embeddings"]:
            continue
        place = architecture.place(name)
        thirds = parts.setdefault(place.name, {})
        thirds[place.third or 0] = tensor.T if place.is_transposed else tensor
    named = {}
    for name, thirds in parts.items():
        in_order = [thirds[number] for number in sorted(thirds)]
        named[name] = torch.cat(in_order, dim=-1).contiguous()
    return require_transformers().AutoConfig.for_model(architecture.model_type, **config), named


def _all_settings(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns every argument of the GPT: the configuration's value, else the default."""
    defaults = {name: p.default for name, p in inspect.signature(GPT.__init__).parameters.items() if name != "self"}
    return {name: model.get(name, default) for name, default in defaults.items()}


def _require_same_config(path: Path, settings: Mapping[str, Any]) -> Architecture:
    """Refuses weights that were trained in another form, which shapes alone may not show."""
    architecture, config = gpt_form(_all_settings(settings))
    stored_config = pretrained_config(model_type=None, path=str(path), config=None)
    model_type = architecture.model_type
    if stored_config.model_type != model_type:
        raise ConfigError(
            f"{path} holds a model of type {stored_config.model_type}; this GPT's form is that of {model_type}",
            hint=f"start it with model=hf model.path={path}",
        )
    own_config = require_transformers().AutoConfig.for_model(model_type, **config)
    # A longer context than that of this model changes no weight if positions are computed.
    passed_over = _NOT_COMPARED + (("max_position_embeddings",) if model_type == "llama" else ())
    rows = []
    for key in config:
        if key in passed_over:
            continue
        value = getattr(own_config, key)
        stored_value = getattr(stored_config, key)
        # GPT-2's unset inner width is four times the width.
        if value != (4 * stored_config.hidden_size if stored_value is None else stored_value):
            rows.append(f"{key} {value!r}, there {stored_value!r}")
    if rows:
        raise ConfigError(
            f"{path} holds weights of another form than this model's: {'; '.join(rows)}",
            hint="set the model's keys as the directory's config.json has them (docs/models.md)",
        )
    return architecture
