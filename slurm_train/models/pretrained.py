"""Weights in the layout of the Hugging Face library: written as a directory that transformers reads, and read again.

What is written goes through the library's own model of the architecture, so names, shapes and configuration are those
that it expects, or nothing is written. What is read is compared with the model by configuration, name and shape.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
from collections.abc import Mapping, Set
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
from slurm_train.models.pretrained_names import TOKENIZER_FILE, Architecture, WeightPlace, gpt_form
from slurm_train.rundir.files import read_json

_GPT = f"{GPT.__module__}.{GPT.__qualname__}"
_CAUSAL_LM = f"{causal_lm.__module__}.{causal_lm.__qualname__}"
# What peft puts into the names of weights that it wraps.
_WRAPPERS = re.compile(r"\.(base_layer|original_module|token_adapter)(?=\.)")
_GENERATION_CONFIG = "generation_config.json"
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_TOKENIZER_CONFIG = "tokenizer_config.json"
# As transformers and tokenizers write them; no code that comes with a model.
_TOKENIZER_FILES = (
    TOKENIZER_FILE,
    _TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
)
# Dropout and the ids of special tokens change no weight; rotary positions are computed as far as they are needed.
_NOT_COMPARED = ("embd_pdrop", "resid_pdrop", "attn_pdrop", "attention_dropout", "bos_token_id", "eos_token_id")


def write_pretrained(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    model: Mapping[str, Any],
    shard_size: str,
    tokenizer: Path | None = None,
    end: int | None = None,
) -> list[str]:
    """Writes config.json and model.safetensors, in several files with an index where they are larger than a shard.

    Of a model with `lora` the adapters alone are written, as peft reads them, if the weights that they were trained
    with are those in `model.path`; else the adapters are merged, and the whole model is written. With it come the
    generation settings in `model.path` and the files of the tokenizer.

    Args:
        folder: where to; made if it is missing.
        tensors: the model's, by our names; merging changes them.
        model: the `model` part of the configuration that they were trained with.
        shard_size: largest file, e.g. "5GB".
        tokenizer: directory with the tokenizer that the model was trained with; None: its files are not written.
        end: id of the token that ends a document, for a model that did not begin with one in `model.path`.

    Returns:
        Notes for the user.

    Raises:
        ConfigError: transformers is missing, or has no architecture of the model's form.
        CheckpointError: the tensors are not those of the architecture.
    """
    config, named = _in_their_layout(model, tensors)
    require_transformers()
    settings = model if model.get("_target_") == _CAUSAL_LM else {}
    lora = settings.get("lora")
    if not settings.get("path") and end is not None and end < getattr(config, "vocab_size", 0):
        config.eos_token_id = end
    base = Path(settings["path"]) if settings.get("path") else None
    with torch.device("meta"):
        network: Any = build_network(config)
        names = {name for name, _ in network.named_parameters(remove_duplicate=False)}
        network = with_adapters(network, lora)
    _give_weights(network, named, model_type=config.model_type)
    notes = []
    is_whole = True
    if lora is not None:
        reason = _reason_to_merge(network, base, names=names)
        is_whole = bool(reason)
        if reason:
            network = _merged(network)
            notes.append(f"{reason}: the adapters were merged, and the whole model was written")
        else:
            # Where `PeftModel.from_pretrained` finds the weights that the adapters belong to.
            network.peft_config["default"].base_model_name_or_path = str(base)
    network.save_pretrained(folder, max_shard_size=shard_size)
    if is_whole and base is not None:
        _write_generation_settings(folder, base, changes=settings.get("config") or {})
    if tokenizer is not None:
        _write_tokenizer(folder, tokenizer, end=end)
    return notes


def _write_tokenizer(folder: Path, tokenizer: Path, *, end: int | None) -> None:
    """Copies the files of a tokenizer; what prepared text has is its tokenizer.json alone.

    Args:
        folder: where to.
        tokenizer: where they are.
        end: id of the token that ends a document, if that is known.
    """
    for name in _TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, folder / name)
    if (folder / TOKENIZER_FILE).is_file() and not (folder / _TOKENIZER_CONFIG).exists():
        # Without a class, the library would make the tokenizer that is usual for the architecture.
        read = require_transformers().PreTrainedTokenizerFast(tokenizer_file=str(folder / TOKENIZER_FILE))
        if end is not None and end < len(read):
            read.eos_token = read.convert_ids_to_tokens(end)
        read.save_pretrained(folder)


def _give_weights(network: Any, named: Mapping[str, Tensor], *, model_type: str) -> None:
    """Gives a model of the library, without memory so far, its weights.

    Raises:
        CheckpointError: they are not those of this model.
    """
    weights = dict(named)
    first_names: dict[int, str] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        # What is tied has one tensor here.
        first = first_names.setdefault(id(parameter), name)
        if name not in weights and first in weights:
            weights[name] = weights[first]
    try:
        unknown = network.load_state_dict(weights, assign=True, strict=False).unexpected_keys
        missing = [name for name, parameter in network.named_parameters() if parameter.is_meta]
        if missing or unknown:
            raise RuntimeError(f"missing: {shorten(missing)}; unknown: {shorten(unknown)}")
    except RuntimeError as err:
        raise CheckpointError(
            f"the checkpoint's weights are not those of a {model_type} of this shape: {str(err)[:300]}",
            hint="export it without --format; that writes the weights under the model's own names",
        ) from err


def _reason_to_merge(network: Any, base: Path | None, *, names: Set[str]) -> str:
    """Returns why `base` and the adapters alone would be another model, "" where they are this one.

    Args:
        network: of peft, with the weights of a checkpoint.
        base: `model.path`.
        names: of the parameters before there were adapters.
    """
    if base is None or not any(base.glob("model*.safetensors")):
        return "the weights that the adapters belong to are in no directory"
    unwrapped = network.get_base_model()
    present = {_WRAPPERS.sub("", name): parameter for name, parameter in unwrapped.named_parameters()}
    hidden = sorted(names - present.keys())
    if hidden:
        return f"{hidden[0]} cannot be compared with {base}"
    # Those that are trained are written with the adapters.
    frozen = {name: present[name] for name in sorted(names) if not present[name].requires_grad}
    stored: Mapping[str, Stored | Tensor] = stored_tensors(base)
    # What is tied has one name in the files.
    memory = {parameter.data_ptr() for name, parameter in frozen.items() if name in stored}
    if any(name not in stored and parameter.data_ptr() not in memory for name, parameter in frozen.items()):
        # The library converts what is in the files.
        read = require_transformers().AutoModelForCausalLM.from_pretrained(
            base, config=unwrapped.config, local_files_only=True, use_safetensors=True
        )
        stored = dict(read.named_parameters(remove_duplicate=False))
    for name, parameter in frozen.items():
        original = stored.get(name)
        if original is None:
            continue
        if tuple(original.shape) != tuple(parameter.shape):
            return f"{name} has another shape in {base}"
        value = original if isinstance(original, Tensor) else original((slice(None),) * parameter.dim())
        if not value.to(parameter.dtype).equal(parameter):
            return f"{name} is not as in {base}"
    return ""


def _merged(network: Any) -> Any:
    """Returns the model of the library with the adapters in its weights; a tied head that they change is not tied."""
    base = network.get_base_model()
    tied: dict[int, Tensor] = {}
    for module in network.modules():
        for name, parameter in module._parameters.items():
            # What is added to a head must not be added to the embedding whose memory it shares.
            if parameter is not None and tied.setdefault(parameter.data_ptr(), parameter) is not parameter:
                module._parameters[name] = nn.Parameter(parameter.detach().clone(), requires_grad=False)
    merged = network.merge_and_unload()
    head, embedding = merged.get_output_embeddings(), merged.get_input_embeddings()
    if base.config.tie_word_embeddings and not head.weight.equal(embedding.weight):
        merged.config.tie_word_embeddings = False
    return merged


def _write_generation_settings(folder: Path, base: Path, *, changes: Mapping[str, Any]) -> None:
    """Writes those of the model that the training began with; `model.config` may have changed some of them."""
    file = (base.parent if base.is_file() else base) / _GENERATION_CONFIG
    if file.is_file():
        settings = read_json(file) or {}
        settings |= {name: value for name, value in changes.items() if name in settings or name in _TOKENS}
        (folder / _GENERATION_CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


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
    places = {name: WeightPlace(name) for name, _ in model.named_parameters()}
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
        reads[name] = _placed(holders[name], WeightPlace(name))
    for name, (_, shape) in reads.items():
        if tensors[name].shape != shape:
            raise ConfigError(
                f"{name} is {shape} in {path}, and {tuple(tensors[name].shape)} in the model",
                hint="configure the model with the same shape, or start from other weights",
            )
    for name, (read, _) in reads.items():
        begin_with(tensors[name], read)


def _placed(tensor: Stored, place: WeightPlace) -> tuple[Read, tuple[int, ...]]:
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
