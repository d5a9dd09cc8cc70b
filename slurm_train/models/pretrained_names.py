"""What the shipped GPT is called in transformers: its configuration and the names and order of its weights.

Two architectures have forms that the GPT can take, `llama` and `gpt2`. Rotary positions turn the same halves there, so
nothing is reordered. Imports no torch and no transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurm_train.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Place:
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
    thirds: Mapping[str, int]
    """Parts that are one matrix there, one after the other."""
    transposed: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    """Endings of tensors that some published files have beside the weights."""

    def place(self, name: str) -> Place:
        """Returns where a parameter of ours lies, e.g. of "blocks.3.attention.q.weight"."""
        part, _, kind = name.rpartition(".")
        if not part.startswith("blocks."):
            return Place(f"{self.parts[part]}.{kind}")
        _, number, part = part.split(".", 2)
        return Place(
            f"{self.block.format(number)}.{self.block_parts[part]}.{kind}",
            third=self.thirds.get(part),
            is_transposed=kind == "weight" and part in self.transposed,
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
    thirds={},
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
    transposed=("attention.q", "attention.k", "attention.v", "attention.out", "feed_forward.up", "feed_forward.out"),
    ignored=("attn.bias", "attn.masked_bias"),
)


@dataclass(frozen=True, slots=True)
class GptForm:
    """A GPT's architecture in transformers and its configuration there."""

    architecture: Architecture
    config: dict[str, Any]
    tied: bool


def gpt_form(settings: Mapping[str, Any]) -> GptForm:
    """Returns what a GPT with these arguments is called in transformers.

    Args:
        settings: all arguments of the `GPT`, defaults included.

    Raises:
        ConfigError: no architecture has this form.
    """
    words = {name: settings[name] for name in ("norm", "activation", "positions", "bias")}
    heads, shared = settings["num_heads"], settings["num_kv_heads"] or settings["num_heads"]
    if (words["norm"], words["activation"], words["positions"]) == ("rmsnorm", "swiglu", "rope"):
        return GptForm(LLAMA, _llama(settings, shared=shared), bool(settings["tied"]))
    plain = words["norm"] == "layernorm" and words["activation"] != "swiglu" and words["positions"] == "learned"
    if plain and words["bias"] and shared == heads:
        return GptForm(GPT2, _gpt2(settings), bool(settings["tied"]))
    text = ", ".join(f"{name}={value}" for name, value in words.items())
    raise ConfigError(
        f"no architecture of transformers has the form of this GPT: {text}, num_kv_heads={shared} of {heads}",
        hint="Llama's form is norm=rmsnorm activation=swiglu positions=rope, GPT-2's norm=layernorm "
        "activation=gelu_tanh positions=learned bias=true (docs/models.md); without --format the weights are "
        "written under this model's own names",
    )


def _llama(settings: Mapping[str, Any], *, shared: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": float(settings["rope_theta"]), "rope_type": "default"}
    if scaling := dict(settings["rope_scaling"] or {}):
        original = int(scaling.pop("original_context"))
        rope |= {"rope_type": "llama3", "original_max_position_embeddings": original}
        rope |= {name: float(value) for name, value in scaling.items()}
    return {
        **_both(settings),
        "intermediate_size": settings["hidden"] or 4 * settings["width"],
        "num_key_value_heads": shared,
        "hidden_act": "silu",
        "rms_norm_eps": settings["norm_eps"],
        "rope_parameters": rope,
        "attention_bias": settings["bias"],
        "mlp_bias": settings["bias"],
        "attention_dropout": settings["dropout"],
    }


def _gpt2(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_both(settings),
        "n_inner": settings["hidden"] or 4 * settings["width"],
        "activation_function": "gelu_new" if settings["activation"] == "gelu_tanh" else "gelu",
        "layer_norm_epsilon": settings["norm_eps"],
        **dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), settings["dropout"]),
    }


def _both(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": settings["vocab_size"],
        "max_position_embeddings": settings["context"],
        "num_hidden_layers": settings["num_layers"],
        "num_attention_heads": settings["num_heads"],
        "hidden_size": settings["width"],
        "tie_word_embeddings": settings["tied"],
        # Which tokens begin and end a text is the tokenizer's affair.
        "bos_token_id": None,
        "eos_token_id": None,
    }
