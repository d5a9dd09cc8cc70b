"""How much memory the shipped models take, by formula, from their configuration alone. Imports no torch.

Counted is what autograd keeps of a micro-batch until the backward pass has used it, operation by operation as the
models' `forward` has them. The way of counting is that of Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models" (arXiv:2205.05198), section 4.1; the numbers differ, since these models are other ones (rotary
positions, no bias, attention that keeps no matrix of positions). `tests/models/test_footprint.py` holds each term
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
    """Counts `models.gpt.GPT` without dropout.

    Per layer and position: the residual stream twice (inputs of the two norms, float32); the two norms' outputs, v,
    turned q and k, the attention's output, and the feed-forward's input and output of GELU (matrix type);
    one float32 per head (log-sum-exp) and two per norm. After the layers: residual stream, norm, log-probabilities.
    """
    kwargs = {**_GPT, **model}
    vocabulary, layers, heads, width = (int(kwargs[key]) for key in ("vocab_size", "num_layers", "num_heads", "width"))
    hidden = int(kwargs["hidden"]) or 4 * width
    tokens = batch * (positions or int(kwargs["context"]))
    kept = _HALF if half else _FLOAT
    # Autocast casts the attention's input anew for each of its three matrices, and keeps all three.
    per_layer = _FLOAT * (2 * width + heads + 4) + kept * ((8 if half else 6) * width + 2 * hidden)
    # Dropout keeps a byte for each number of the two branches.
    per_layer += 2 * width if kwargs["dropout"] else 0
    last = _FLOAT * (width + vocabulary + 2) + kept * width + 2 * _INDEX
    matrices = layers * (4 * width * width + 2 * width * hidden) + vocabulary * width
    parameters = matrices + (2 * layers + 1) * width + (0 if kwargs["tied"] else vocabulary * width)
    # Autocast keeps a copy of each matrix that it has cast.
    cast = kept * matrices if half else 0
    largest = width * max(hidden, 3 * width)
    # The sum is largest either where the loss turns into gradients of the logits, or in the last feed-forward.
    at_loss = 2 * _FLOAT * vocabulary * tokens
    in_layer = (_FLOAT * width + kept * (hidden - width) - _FLOAT * (width + vocabulary)) * tokens
    return Footprint(
        parameters=parameters,
        buffer_bytes=2 * _FLOAT * int(kwargs["context"]) * (width // heads),
        activation_bytes=tokens * (layers * per_layer + last) + cast,
        temporary_bytes=max(at_loss, in_layer + largest * (_FLOAT + (kept if half else 0))),
    )


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
    "width": 160,
    "hidden": 0,
    "dropout": 0.0,
    "tied": True,
}
_CNN = {"num_classes": 10, "channels": 1, "features": 32, "side": 8, "dropout": 0.0}
_MODELS: dict[str, Callable[[Mapping[str, Any], int, int | None, bool], Footprint]] = {
    "slurm_train.models.gpt.GPT": _gpt,
    "slurm_train.models.cnn.CNN": _cnn,
}
