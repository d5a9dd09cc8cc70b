"""How a model computes a loss of its own: whether `forward` takes labels, and which items its mean is over.

Models of transformers compute a loss when they are called with `labels`. It is a mean over the labels that count, with
parts that a caller cannot compute: class weights, the load balancing of routers. Here it is multiplied by the number of
these labels, so that sums over micro-batches and ranks give every label the same weight. A model that takes
`num_items_in_batch` divides by that number in place of its own count.

Whether labels are compared with the score before them (causal language models) or with the one at their place
(encoder-decoders, masked models, classifiers) follows from the architecture, never from the data.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from slurm_train.errors import ConfigError

IGNORED = -100
"""Label of an item that does not count, as torch's cross entropy has it."""
LABELS = "labels"
_COUNT = "num_items_in_batch"
_MASK = "attention_mask"
_ROUTER_SCALES = ("router_aux_loss_coef", "aux_loss_coef")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLoss:
    """How a model is asked for its own loss."""

    name: str
    """Of the class that computes it."""
    takes_labels: bool
    """`forward` can be called with them."""
    takes_count: bool
    """`forward` takes the number of items that the sum is divided by."""
    shifts: bool | None
    """Labels are compared with the scores before them; None where nothing says so or otherwise."""
    router_scale: float
    """What the model multiplies `aux_loss` of its output by, 0 where it has none."""
    context: int | None
    """Positions that a table of the model has, None where it has no such table."""
    needs_mask: bool
    """Scores depend on padded positions unless an `attention_mask` says which they are."""
    num_scores: int | None
    """Scores for each label of a model of transformers that compares them as classes, None for others."""
    padding_id: int
    """The token id that the model takes for padding, 0 where it names none."""
    ignored_in_images: int
    """The label that does not count in labels of images."""
    is_of_samples: bool
    """The mean is over samples, each with as many labels as it may have, as that of CTC is."""

    def words(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the keywords that a model is called with for a batch.

        The mean of a micro-batch in which no label counts would be NaN. All of its labels become 0 then, and the loss
        is multiplied by a count of 0.
        """
        labels = batch.get(LABELS)
        words = {name: value for name, value in batch.items() if name != LABELS}
        if labels is None or not self.takes_labels:
            return words
        if labels.is_floating_point():
            return {**words, LABELS: labels}
        if self.is_of_samples:
            return {**words, LABELS: labels}
        counted = self._counted(labels)
        words[LABELS] = torch.where(counted.any(), labels, torch.zeros_like(labels))
        return {**words, _COUNT: counted.sum().clamp(min=1)} if self.takes_count else words

    def count(self, labels: Tensor | None, *, size: int) -> Tensor:
        """Returns how many items a mean is over (a scalar tensor): whole-number labels that count, else samples."""
        if labels is None or labels.is_floating_point() or self.is_of_samples:
            return torch.full((), size, device=None if labels is None else labels.device)
        return self._counted(labels).sum()

    def shifted(self, shifts: bool) -> OwnLoss:
        """Returns a copy with another value of `shifts`."""
        return replace(self, shifts=shifts)

    def aligned(self, labels: Tensor | None) -> Tensor | None:
        """Returns the label that each score is compared with, of the shape of `labels`."""
        if labels is None or not self.shifts or labels.dim() < 2:
            return labels
        return next_labels(labels)

    def _counted(self, labels: Tensor) -> Tensor:
        is_image = labels.dim() > 2
        seen = labels[:, 1:] if self.shifts and labels.dim() > 1 else labels
        return seen != (self.ignored_in_images if is_image else IGNORED)


def next_labels(labels: Tensor) -> Tensor:
    """Returns labels (B, T, ...) shifted to the place of the token before; nothing follows the last one."""
    return torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)), dim=1)


def own_loss_of(model: nn.Module) -> OwnLoss:
    """Returns how a model computes its loss; a model of transformers inside of it counts, too."""
    library = next((module for module in model.modules() if "loss_type" in vars(module)), None)
    words = inspect.signature(model.forward).parameters
    takes_any = any(word.kind is inspect.Parameter.VAR_KEYWORD for word in words.values())
    owner = model if library is None else library
    config = getattr(owner, "config", None)
    accepts_count = library is not None and _accepts_count(library)
    ignored = getattr(config, "semantic_loss_ignore_index", None)
    passes_on = takes_any and library is not None and _MASK in inspect.signature(library.forward).parameters
    takes_mask = _MASK in words or passes_on
    return OwnLoss(
        name=type(owner).__name__,
        takes_labels=LABELS in words or takes_any,
        takes_count=accepts_count and takes_any if _COUNT not in words else library is None or accepts_count,
        shifts=_shifts(model, library),
        router_scale=_router_scale(owner, config),
        context=None if library is None else _table_of_positions(library),
        needs_mask=takes_mask and not _ignores_padding(library, config, router_scale=_router_scale(owner, config)),
        num_scores=None if library is None else _num_scores(library, config),
        padding_id=_padding_id(config),
        ignored_in_images=ignored if isinstance(ignored, int) else IGNORED,
        is_of_samples=library is not None and type(library).__name__.endswith("ForCTC"),
    )


def loss_in(outputs: Any) -> Tensor | None:
    """Returns the loss that a model gave, as `.loss`, as "loss" of a dict, or as the one scalar of a tuple; or None.

    Raises:
        ConfigError: it is no scalar.
    """
    if isinstance(outputs, tuple) and not hasattr(outputs, "_fields"):
        scalars = [part for part in outputs if isinstance(part, Tensor) and part.dim() == 0]
        return scalars[0] if len(scalars) == 1 and scalars[0].is_floating_point() else None
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if loss is None:
        return None
    if not isinstance(loss, Tensor) or loss.dim():
        shape = f"a tensor of {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ConfigError(
            f"the loss that the model gave is {shape}, not a scalar tensor",
            hint="let it be the mean over the labels that count, or define training_loss(batch) on the model",
        )
    return loss


def scores_in(outputs: Any) -> Any:
    """Returns what a model gave as scores: the output itself, or its `logits`."""
    if isinstance(outputs, Mapping) and "logits" in outputs:
        return outputs["logits"]
    return getattr(outputs, "logits", outputs)


def _shifts(model: nn.Module, library: nn.Module | None) -> bool | None:
    owner = model if library is None else library
    if getattr(getattr(owner, "config", None), "is_encoder_decoder", False):
        return False
    if library is None:
        return None
    losses: Any = importlib.import_module("transformers.loss.loss_utils")
    names: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    kind = getattr(library, "loss_type", None)
    if kind in losses.LOSS_MAPPING:
        is_causal = losses.LOSS_MAPPING[kind] is losses.ForCausalLMLoss
    else:
        is_causal = type(library).__name__ in names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    # Around a backbone the model has a head, and a loss, of its own.
    is_whole = library is model or type(library).__name__ not in names.MODEL_MAPPING_NAMES.values()
    if is_causal:
        return True
    return False if is_whole else None


def _accepts_count(library: nn.Module) -> bool:
    """Returns whether a model of transformers divides by a given number of items, as its Trainer finds it out."""
    declared = getattr(library, "accepts_loss_kwargs", None)
    if declared is not None:
        return bool(declared)
    words = inspect.signature(library.forward).parameters.values()
    return any(word.kind is inspect.Parameter.VAR_KEYWORD for word in words)


def _ignores_padding(library: nn.Module | None, config: Any, *, router_scale: float) -> bool:
    """Returns whether a model of transformers wants no mask for what pads the end of a sample.

    In a causal language model padding at the end has no effect; but routers are balanced over all tokens, and a model
    that was made to fill masks, as BERT, looks ahead unless it is configured as a decoder. Audio models whose first
    layer normalises over all frames were trained without a mask.
    """
    if library is None:
        return False
    if getattr(config, "feat_extract_norm", None) == "group":
        return True
    names: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    is_causal = type(library).__name__ in names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    fills_masks = getattr(config, "model_type", None) in names.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    looks_ahead = fills_masks and not getattr(config, "is_decoder", False)
    return is_causal and not looks_ahead and not router_scale


def _num_scores(library: nn.Module, config: Any) -> int | None:
    kind = getattr(library, "loss_type", None)
    number = None
    if kind in ("ForSequenceClassification", "ForTokenClassification"):
        is_of_classes = getattr(config, "problem_type", None) in (None, "single_label_classification")
        number = getattr(config, "num_labels", None) if is_of_classes else None
    elif kind in ("ForCausalLM", "ForMaskedLM"):
        number = getattr(config.get_text_config(), "vocab_size", None)
    # One score is a value that is compared by squared error.
    return number if isinstance(number, int) and number > 1 else None


def _padding_id(config: Any) -> int:
    number = getattr(config, "pad_token_id", None)
    vocab_size = getattr(config, "vocab_size", None)
    if isinstance(number, int) and isinstance(vocab_size, int) and 0 <= number < vocab_size:
        return number
    return 0


def _table_of_positions(library: nn.Module) -> int | None:
    """Returns the length of the embedding of positions that a text model of transformers has."""
    context = getattr(getattr(library, "config", None), "max_position_embeddings", None)
    tables = [
        module
        for name, module in library.named_modules()
        if isinstance(module, nn.Embedding) and ("position" in name or name.endswith("wpe"))
    ]
    # Some leave the first rows to padding.
    fits = isinstance(context, int) and any(0 <= table.num_embeddings - context <= 2 for table in tables)
    return context if fits else None


def _router_scale(owner: nn.Module, config: Any) -> float:
    places = (owner, config, getattr(config, "text_config", None))
    scales = (getattr(place, name, None) for place in places for name in _ROUTER_SCALES)
    return next((float(scale) for scale in scales if isinstance(scale, (int, float))), 0.0)
