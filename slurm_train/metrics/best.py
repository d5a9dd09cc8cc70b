"""Which of two values of a metric is the better one, told by its name."""

from __future__ import annotations

# Of all others the smallest is the best.
_LARGEST_IS_BEST = ("accuracy", "mfu", "_per_s", "score", "reward")


def largest_is_best(name: str) -> bool:
    """Returns whether more is better: of "eval_accuracy" it is, of "eval_loss" it is not."""
    return any(word in name for word in _LARGEST_IS_BEST)
