"""How states of streams and loaders are loaded: to the epoch that they are of, and what is left of a pass.

Libraries are recognized by the names of their classes, since importing them takes long.
"""

from __future__ import annotations

from typing import Any


def go_to_epoch(other: Any, state: Any) -> None:
    """Brings a stream of `datasets`, or that of a loader, to the epoch of a state, which another epoch ignores."""
    stream = getattr(other, "dataset", other)
    epoch = _epoch_in(state)
    if hasattr(stream, "_ex_iterable") and epoch is not None:
        stream.set_epoch(epoch)


def is_at_end_of_pass(other: Any, state: Any) -> bool:
    """Returns whether the state of a torchdata `StatefulDataLoader` is that of its last batch, before its loop ended.

    The first loop over the loader has no batches then, as the rest of the loop that was saved. A program that takes the
    epoch from the number of steps is in the next epoch by then, and leaves it out.

    Args:
        other: any object that was handed over.
        state: that it was given.
    """
    if not any(kind.__name__ == "StatefulDataLoader" for kind in type(other).__mro__):
        return False
    num_given = state.get("_num_yielded")
    if num_given is None:  # with workers
        snapshot = state.get("_snapshot", {})
        num_given = snapshot.get("_snapshot_step", 0) + state.get("_steps_since_snapshot", 0)
    try:
        num_batches = len(other)
    except TypeError:  # a stream
        return False
    return not state.get("_iterator_finished", True) and num_given == num_batches


def _epoch_in(state: Any) -> int | None:
    """Returns the epoch in the state of a stream of `datasets`, which may be within that of a loader."""
    if not isinstance(state, dict):
        return None
    if "examples_iterable" in state and "epoch" in state:
        epoch: int = state["epoch"]
        return epoch
    epochs = (_epoch_in(item) for item in state.values())
    return next((epoch for epoch in epochs if epoch is not None), None)
