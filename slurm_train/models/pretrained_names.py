"""What the shipped GPT is called in transformers, and where a model of transformers comes from.

Two architectures have forms that the GPT can take, `llama` and `gpt2`. Rotary positions turn the same halves there, so
nothing is reordered. Imports no torch and no transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_train.errors import ConfigError
from slurm_train.rundir.files import read_json

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
_ROUTER_SWITCH = "output_router_logits"
_ROUTER_SCALES = ("router_aux_loss_coef", "aux_loss_coef")
# Values of peft's init_lora_weights; without samples some of them become the default without a word.
_FROM_DATA = ("eva", "corda", "lora_ga")


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """Where a parameter lies in the other layout."""

    name: str
    third: int | None = None
    """Which third of the last dimension it is; None: all of it."""
    is_transposed: bool = False
    """Whether inputs come before outputs there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Names of an architecture of transformers, by ours."""

    model_type: str
    parts: Mapping[str, str]
    """Outside of the blocks."""
    block: str
    """What the name of a block begins with, with {} for its number."""
    block_parts: Mapping[str, str]
    ignored: tuple[str, ...]
    """Endings of tensors that some published files have besides the weights."""
    thirds: Mapping[str, int] = field(default_factory=dict)
    """Parts that are one matrix there, one after the other."""
    is_transposed: bool = False
    """Whether the matrices of its blocks have inputs before outputs."""

    def place(self, name: str) -> WeightPlace:
        """Returns where a parameter of ours lies, e.g. of "blocks.3.attention.q.weight"."""
        part, _, kind = name.rpartition(".")
        if not part.startswith("blocks."):
            return WeightPlace(f"{self.parts[part]}.{kind}")
        _, number, part = part.split(".", 2)
        return WeightPlace(
            f"{self.block.format(number)}.{self.block_parts[part]}.{kind}",
            third=self.thirds.get(part),
            is_transposed=self.is_transposed and kind == "weight" and not part.endswith("norm"),
        )


LLAMA = Architecture(
    model_type="llama",
    parts={"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"},
    block="model.layers.{}",
    block_parts={
        "attention_norm": "input_layernorm",
        "attention.q": "self_attn.q_proj",
        "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj",
        "attention.out": "self_attn.o_proj",
        "feed_forward_norm": "post_attention_layernorm",
        "feed_forward.gate": "mlp.gate_proj",
        "feed_forward.up": "mlp.up_proj",
        "feed_forward.out": "mlp.down_proj",
    },
    ignored=("rotary_emb.inv_freq",),
)

GPT2 = Architecture(
    model_type="gpt2",
    parts={
        "embedding": "transformer.wte",
        "embedding.positions": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    block="transformer.h.{}",
    block_parts={
        "attention_norm": "ln_1",
        "attention.q": "attn.c_attn",
        "attention.k": "attn.c_attn",
        "attention.v": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "feed_forward_norm": "ln_2",
        "feed_forward.up": "mlp.c_fc",
        "feed_forward.out": "mlp.c_proj",
    },
    thirds={"attention.q": 0, "attention.k": 1, "attention.v": 2},
    is_transposed=True,
    ignored=("attn.bias", "attn.masked_bias"),
)


def gpt_form(settings: Mapping[str, Any]) -> tuple[Architecture, dict[str, Any]]:
    """Returns a GPT's architecture in transformers and its configuration there.

    Args:
        settings: all arguments of the `GPT`, defaults included.

    Raises:
        ConfigError: no architecture has this form.
    """
    norm, activation, positions, bias = (settings[name] for name in ("norm", "activation", "positions", "bias"))
    heads = settings["num_heads"]
    shared = settings["num_kv_heads"] or settings["num_heads"]
    config = {
        "vocab_size": settings["vocab_size"],
        "max_position_embeddings": settings["context"],
        "num_hidden_layers": settings["num_layers"],
        "num_attention_heads": heads,
        "hidden_size": settings["width"],
        "tie_word_embeddings": settings["tied"],
        # Which tokens begin and end a text is known to the tokenizer only.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    hidden = settings["hidden"] or 4 * settings["width"]
    if (norm, activation, positions) == ("rmsnorm", "swiglu", "rope"):
        rope: dict[str, Any] = {"rope_theta": float(settings["rope_theta"]), "rope_type": "default"}
        scaling = dict(settings["rope_scaling"] or {})
        if scaling:
            original = int(scaling.pop("original_context"))
            rope |= {"rope_type": "llama3", "original_max_position_embeddings": original}
            rope |= {name: float(value) for name, value in scaling.items()}
        return LLAMA, config | {
            "intermediate_size": hidden,
            "num_key_value_heads": shared,
            "hidden_act": "silu",
            "rms_norm_eps": settings["norm_eps"],
            "rope_parameters": rope,
            "attention_bias": bias,
            "mlp_bias": bias,
            "attention_dropout": settings["dropout"],
        }
    if (norm, positions) == ("layernorm", "learned") and activation != "swiglu" and bias and shared == heads:
        return GPT2, config | {
            "n_inner": hidden,
            "activation_function": "gelu_new" if activation == "gelu_tanh" else "gelu",
            "layer_norm_epsilon": settings["norm_eps"],
            **dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), settings["dropout"]),
        }
    raise ConfigError(
        f"no architecture of transformers has the form of this GPT: norm={norm}, activation={activation}, "
        f"positions={positions}, bias={bias}, num_kv_heads={shared} of {heads}",
        hint="Llama's form is norm=rmsnorm activation=swiglu positions=rope, GPT-2's norm=layernorm "
        "activation=gelu_tanh positions=learned bias=true (docs/models.md); without --format the weights are "
        "written under this model's own names",
    )


def require_source(*, model_type: str | None, path: str | None, cwd: Path) -> None:
    """Checks that a model of transformers has one source, an architecture or a directory, and that this one is there.

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
            hint="name a directory on this machine, or a repository of the Hub, e.g. model.path=org/name: its files "
            "are fetched where the run is submitted",
        )


def require_effect(config: Mapping[str, Any], *, path: str | None, cwd: Path) -> None:
    """Checks that settings of `model.config` do something together with the others.

    Args:
        config: values in place of an architecture's defaults or of the file's.
        path: as for `require_source`.
        cwd: directory that a relative path starts from.

    Raises:
        ConfigError: a scale of the routers' loss is set, and the routers have none.
    """
    stored = _stored_config(path, cwd=cwd)
    has_loss = config.get(_ROUTER_SWITCH, stored.get(_ROUTER_SWITCH, False))
    for key in _ROUTER_SCALES:
        if config.get(key) and not has_loss:
            raise ConfigError(
                f"model.config has {key}={config[key]}, which has no effect: {_ROUTER_SWITCH} is false",
                hint=f"add {_ROUTER_SWITCH}: true to model.config, or leave {key} out",
            )


def require_adapters(lora: Any) -> None:
    """Checks `model.lora` as far as that needs no peft.

    Raises:
        ConfigError: it is no mapping, or it asks for first values that peft computes from data before the training.
    """
    if lora is None:
        return
    if not isinstance(lora, Mapping):
        raise ConfigError(
            f"model.lora={lora} is no mapping of arguments of peft's LoraConfig", hint="write 'model.lora={r: 16}'"
        )
    way = lora.get("init_lora_weights")
    if isinstance(way, str) and way.lower() in _FROM_DATA:
        raise ConfigError(
            f"model.lora has init_lora_weights={way}, which peft computes from samples before the first step; it gets "
            "none here",
            hint="leave it out, or take one that needs the weights alone: pissa, olora, orthogonal",
        )


def tokenizer_directory(model: Mapping[str, Any], data: Mapping[str, Any]) -> Path | None:
    """Returns the directory with the files of the tokenizer whose ids a model of transformers was trained on.

    Args:
        model: the `model` mapping of a configuration.
        data: the `data` mapping.

    Returns:
        The one that the data name, else that of the model; that of prepared text where it has another one. None where
        there is none.
    """
    named = data.get("tokenizer") or model.get("path")
    directory = Path(named) if named else None
    if directory is not None and directory.is_file():
        directory = directory.parent
    path = data.get("path")
    prepared = Path(path) if isinstance(path, str) and (Path(path) / TOKENIZER_FILE).is_file() else None
    if directory is None or prepared is None:
        return directory or prepared
    file = directory / TOKENIZER_FILE
    is_same = file.is_file() and file.read_bytes() == (prepared / TOKENIZER_FILE).read_bytes()
    return directory if is_same else prepared


def num_token_ids(model: Mapping[str, Any], *, cwd: Path) -> int | None:
    """Returns how many token ids a model knows, as far as its configuration says it; None where it does not.

    Args:
        model: the `model` mapping of a configuration, of a model of transformers or any with `vocab_size`.
        cwd: directory that a relative path starts from.
    """
    stored = _stored_config(model.get("path"), cwd=cwd)
    places = (model, model.get("config") or {}, stored, stored.get("text_config") or {})
    sizes = (place.get("vocab_size") for place in places)
    return next((int(size) for size in sizes if isinstance(size, int)), None)


def _stored_config(path: str | None, *, cwd: Path) -> dict[str, Any]:
    """Returns what a config.json has, {} without one."""
    if not path:
        return {}
    directory = cwd / Path(str(path)).expanduser()
    return read_json(directory if directory.is_file() else directory / CONFIG_FILE) or {}
