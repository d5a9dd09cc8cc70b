"""Tiny models of transformers of all kinds of losses, with samples for them; named by `_target_` in runs, too."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

_TEXT = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_BERT = {**_TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 16}
_DECODER = {**_TEXT, "num_key_value_heads": 2, "max_position_embeddings": 16}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 5.0}
_BART = {"vocab_size": 32, "d_model": 16, "dropout": 0.0, "max_position_embeddings": 16}
_BART |= {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
_BART |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
_IMAGES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
_IMAGES |= {"image_size": 8, "patch_size": 4, "num_labels": 3}
NUM_SAMPLES, LENGTH = 8, 10


def _tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(3, 30, (NUM_SAMPLES, LENGTH), generator=generator)


def _causal(generator: torch.Generator) -> dict[str, Tensor]:
    """Prompts of unequal length do not count."""
    tokens = _tokens(generator)
    labels = tokens.clone()
    for row in range(NUM_SAMPLES):
        labels[row, : row % 5] = -100
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def _copied(generator: torch.Generator) -> dict[str, Tensor]:
    tokens = _tokens(generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _tagged(generator: torch.Generator) -> dict[str, Tensor]:
    batch = _causal(generator)
    return {**batch, "labels": torch.where(batch["labels"] < 0, -100, batch["labels"] % 3)}


def _masked(generator: torch.Generator) -> dict[str, Tensor]:
    batch = _causal(generator)
    is_masked = torch.rand(batch["labels"].shape, generator=generator) < 0.3
    return {**batch, "labels": torch.where(is_masked, batch["labels"], -100)}


def _classes(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": _tokens(generator), "labels": torch.randint(0, 3, (NUM_SAMPLES,), generator=generator)}


def _several_classes(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": _tokens(generator), "labels": torch.rand((NUM_SAMPLES, 3), generator=generator).round()}


def _numbers(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": _tokens(generator), "labels": torch.rand((NUM_SAMPLES,), generator=generator)}


def _images(generator: torch.Generator) -> dict[str, Tensor]:
    pixels = torch.randn(NUM_SAMPLES, 3, 8, 8, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 3, (NUM_SAMPLES,), generator=generator)}


def _spans(generator: torch.Generator) -> dict[str, Tensor]:
    places = torch.randint(0, LENGTH, (2, NUM_SAMPLES), generator=generator)
    return {"input_ids": _tokens(generator), "start_positions": places[0], "end_positions": places[1]}


LIBRARY: dict[str, tuple[str, str, dict[str, Any], Callable[[torch.Generator], dict[str, Tensor]]]] = {
    "causal": ("LlamaForCausalLM", "LlamaConfig", _DECODER, _causal),
    "causal, GPT-2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        | {"attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2},
        _causal,
    ),
    "mixture of experts": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**_DECODER, **_EXPERTS, "num_local_experts": 4},
        _causal,
    ),
    "encoder-decoder": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
        | {"decoder_start_token_id": 0},
        _copied,
    ),
    "encoder-decoder, BART": ("BartForConditionalGeneration", "BartConfig", _BART, _causal),
    "decoder that does not shift": ("BartForCausalLM", "BartConfig", _BART, _tagged),
    "masked": ("BertForMaskedLM", "BertConfig", _BERT, _masked),
    "masked, copied": ("BertForMaskedLM", "BertConfig", _BERT, _copied),
    "token classification": ("BertForTokenClassification", "BertConfig", {**_BERT, "num_labels": 3}, _tagged),
    "classification": ("BertForSequenceClassification", "BertConfig", {**_BERT, "num_labels": 3}, _classes),
    "several classes": ("BertForSequenceClassification", "BertConfig", {**_BERT, "num_labels": 3}, _several_classes),
    "regression": ("BertForSequenceClassification", "BertConfig", {**_BERT, "num_labels": 1}, _numbers),
    "images": ("ViTForImageClassification", "ViTConfig", _IMAGES, _images),
    "spans": ("BertForQuestionAnswering", "BertConfig", _BERT, _spans),
}
"""By kind: class and configuration of transformers, values of the configuration, and what makes a batch."""


def build(*, kind: str) -> nn.Module:
    """Returns a model with random weights."""
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    name, config, values, _ = LIBRARY[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**values))
    return model


def batch_of(kind: str) -> dict[str, Tensor]:
    """Returns a batch of all samples."""
    return LIBRARY[kind][3](torch.Generator().manual_seed(3))


class Samples(Dataset[dict[str, Tensor]]):
    """The samples of a kind."""

    def __init__(self, kind: str, split: str = "train") -> None:
        self.batch = batch_of(kind)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self.batch.items()}
