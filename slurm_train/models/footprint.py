"""How much memory the shipped models take, by formula, from their configuration alone. Imports no torch.

Counted is what autograd keeps of a micro-batch until the backward pass has used it, operation by operation as the
models' `forward` has them. The way of counting is that of Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models" (arXiv:2205.05198), section 4.1; the numbers differ, since these models are other ones (rotary
positions, attention that keeps no matrix of positions). `tests/models/test_footprint.py` holds each term
against torch's own saved tensors.

Shapes: B samples, T positions, C width, H heads, V vocabulary, M hidden width, L layers; for images K, F, S and N.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_FLOAT, _HALF, _INDEX = 4, 2, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What one micro-batch through a model takes, in bytes, beside the parameters."""

    parameters: int
    """Numbers that are trained; each is float32."""
    buffer_bytes: int
    activation_bytes: int
    """Kept from the forward pass for the backward pass."""
    temporary_bytes: int
    """Held for a moment on top of it, where the sum is largest."""


def footprint_of(model: Mapping[str, Any], *, batch_size: int, positions: int | None, half: bool) -> Footprint | None:
    """Returns what a shipped model takes; None for any other.

    Args:
        model: the `model` part of a configuration.
        batch_size: samples of a micro-batch (`batch.local_size`).
        positions: tokens of a sample; None: the model's context.
        half: matrix products in bfloat16 under autocast; the weights stay float32.
    """
    count = _MODELS.get(str(model.get("_target_")))
    return None if count is None else count(model, batch_size, positions, half)


def _gpt(model: Mapping[str, Any], batch: int, positions: int | None, half: bool) -> Footprint:
    """Counts `models.gpt.GPT` in all its forms; dropout as on a GPU."""
    kwargs = {**_GPT, **model}
    vocabulary, layers, width = (int(kwargs[key]) for key in ("vocab_size", "num_layers", "width"))
    hidden, context = int(kwargs["hidden"]) or 4 * width, int(kwargs["context"])
    is_turned, is_gated = kwargs["positions"] == "rope", kwargs["activation"] == "swiglu"
    tokens, kept = batch * (positions or context), _HALF if half else _FLOAT
    matrices, vectors = _gpt_parameters(kwargs)
    table = vocabulary * width
    last = _kept_in_norm(kwargs) + _FLOAT * vocabulary + kept * width + 2 * _INDEX
    # Autocast keeps a copy of each matrix that it has cast.
    cast = kept * (matrices + table) if half else 0
    # What the positions are looked up by.
    largest = width * max(hidden, 3 * width)
    # The sum is largest either where the loss turns into gradients of the logits, or in the last feed-forward.
    at_loss = 2 * _FLOAT * vocabulary * tokens
    inner = (2 if is_gated else 1) * hidden
    in_layer = (_FLOAT * width + kept * (inner - width) - _FLOAT * (width + vocabulary)) * tokens
    return Footprint(
        parameters=matrices + vectors + table * (1 if kwargs["tied"] else 2) + (0 if is_turned else context * width),
        buffer_bytes=context * (2 * _FLOAT * (width // int(kwargs["num_heads"])) if is_turned else _INDEX),
        activation_bytes=tokens * (layers * _kept_in_layer(kwargs, half=half) + last) + cast,
        temporary_bytes=max(at_loss, in_layer + largest * (_FLOAT + (kept if half else 0))),
    )


def _gpt_parameters(kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the numbers in the matrices of all blocks, and those in norms and biases."""
    layers, width, shared = int(kwargs["num_layers"]), int(kwargs["width"]), _shared_width(kwargs)
    hidden = int(kwargs["hidden"]) or 4 * width
    inner = (2 if kwargs["activation"] == "swiglu" else 1) * hidden
    matrices = layers * (2 * width * (width + shared) + width * (inner + hidden))
    norm = width * (2 if kwargs["bias"] and kwargs["norm"] == "layernorm" else 1)
    biases = layers * (3 * width + 2 * shared + inner) if kwargs["bias"] else 0
    return matrices, biases + (2 * layers + 1) * norm


def _kept_in_layer(kwargs: Mapping[str, Any], *, half: bool) -> int:
    """Returns the bytes per position: norms, what enters the matrices, q, k, v and attention's result, feed-forward.

    Of attention also one float32 per head (log-sum-exp). Of the feed-forward input and result of GELU, or both inputs
    and both results of SwiGLU's product and SiLU.
    """
    width, shared, heads = int(kwargs["width"]), _shared_width(kwargs), int(kwargs["num_heads"])
    hidden, is_gated = int(kwargs["hidden"]) or 4 * width, kwargs["activation"] == "swiglu"
    # Autocast casts a norm's result anew for each matrix behind it, and keeps all of them.
    inputs = (5 if is_gated else 4) if half else 2
    numbers = inputs * width + 2 * (width + shared) + (4 if is_gated else 2) * hidden
    # Dropout keeps a byte for each number of the two branches.
    dropped = 2 * width if kwargs["dropout"] else 0
    return 2 * _kept_in_norm(kwargs) + _FLOAT * heads + (_HALF if half else _FLOAT) * numbers + dropped


def _kept_in_norm(kwargs: Mapping[str, Any]) -> int:
    """Returns the bytes per position beside the result: the input and two numbers, or RMSNorm's input and one."""
    width = int(kwargs["width"])
    return _FLOAT * (width + 2) if kwargs["norm"] == "layernorm" else _FLOAT * (2 * width + 1)


def _shared_width(kwargs: Mapping[str, Any]) -> int:
    """Returns the width of all keys of a position, and of all values."""
    heads = int(kwargs["num_heads"])
    return int(kwargs["width"]) // heads * (int(kwargs["num_kv_heads"]) or heads)


def _cnn(model: Mapping[str, Any], batch: int, _positions: int | None, half: bool) -> Footprint:
    """Counts `models.cnn.CNN` without dropout: inputs of convolutions and norms, results of ReLU, pooled positions.

    Under autocast a GPU computes norms in float32, and each convolution keeps a bfloat16 copy of its input.
    """
    kwargs = {**_CNN, **model}
    classes, channels, features, side = (int(kwargs[key]) for key in ("num_classes", "channels", "features", "side"))
    wide, small = 2 * features, side // 2
    pooled = wide * small**2
    # A norm's input, and the result of ReLU, which is the next convolution's input.
    stages = 2 * _FLOAT * ((features + wide) * side**2 + pooled)
    copies = _HALF * (channels * side**2 + features * side**2 + 2 * pooled) if half else _FLOAT * channels * side**2
    per_image = stages + copies + (_INDEX + _FLOAT) * pooled + _FLOAT * classes + _INDEX + 3 * 2 * _GROUPS * _FLOAT
    convolutions = 9 * (channels * features + features * wide + wide * wide)
    linear = classes * (pooled + 1)
    return Footprint(
        parameters=convolutions + 2 * (features + 2 * wide) + linear,
        buffer_bytes=0,
        activation_bytes=batch * per_image + (_HALF * (convolutions + linear) if half else 0),
        # Gradients before and after the widest layer's norm.
        temporary_bytes=batch * 2 * _FLOAT * wide * side**2,
    )


_GROUPS = 8
"""Of the CNN's norms."""
# As the constructors have them; what a configuration leaves out.
_GPT = {
    "vocab_size": 257,
    "context": 256,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 0,
    "width": 160,
    "hidden": 0,
    "norm": "layernorm",
    "norm_eps": 1e-5,
    "activation": "gelu",
    "positions": "rope",
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "bias": False,
    "dropout": 0.0,
    "tied": True,
}
_CNN = {"num_classes": 10, "channels": 1, "features": 32, "side": 8, "dropout": 0.0}
_MODELS: dict[str, Callable[[Mapping[str, Any], int, int | None, bool], Footprint]] = {
    "slurm_train.models.gpt.GPT": _gpt,
    "slurm_train.models.cnn.CNN": _cnn,
}
