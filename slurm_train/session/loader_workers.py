"""Workers of torch's loaders in a rank: what they tell before they fail. Imports no torch.

A worker sends its batches by a thread. Where that fails, since an item cannot be pickled or a socket cannot be made, it
is printed in the worker, and the rank waits for the batch for ever. Here the rank gets the exception instead, in the
form in which torch raises those of a data set.
"""

from __future__ import annotations

import faulthandler
import functools
import mmap
import os
import sys
from multiprocessing.queues import Queue
from typing import Any

_WATCHED_FETCHES = 2
_has_drawn = mmap.mmap(-1, 1)
"""Shared with processes that are forked: 1 once a worker's samples have drawn random numbers."""


@functools.cache
def tell_of_loader_workers() -> None:
    """Has workers of torch's loaders that are forked from this process tell what ends them, lost batches, and draws."""
    os.register_at_fork(after_in_child=_begin_child)


def samples_draw() -> bool:
    """Returns whether samples of a forked worker have drawn from Python's, numpy's or torch's random numbers."""
    return _has_drawn[0] == 1


def is_loader_worker() -> bool:
    """Returns whether this process is a worker of a loader of torch, without importing torch."""
    loaders = sys.modules.get("torch.utils.data")
    return loaders is not None and loaders.get_worker_info() is not None


def _begin_child() -> None:
    _keep_stacks()
    raise_in_rank()
    note_draws()


def note_draws() -> None:
    """Has this process, if it is a loader's worker, note whether its first samples draw random numbers."""
    fetching: Any = sys.modules.get("torch.utils.data._utils.fetch")
    if fetching is None:
        return
    kind = fetching._MapDatasetFetcher
    fetch = kind.fetch
    num_left = _WATCHED_FETCHES

    def fetch_and_note(fetcher: Any, index: Any) -> Any:
        from slurm_train.distributed.seeds import stream_positions

        nonlocal num_left
        num_left -= 1
        if num_left == 0:
            kind.fetch = fetch
        before = stream_positions()
        samples = fetch(fetcher, index)
        # Samples whose numbers follow from their place draw the same after a resume.
        keyed: Any = sys.modules.get("slurm_train.data.mapstyle")
        is_keyed = keyed is not None and isinstance(fetcher.dataset, keyed.KeyedData)
        if is_loader_worker() and not is_keyed and stream_positions() != before:
            _has_drawn[0] = 1
        return samples

    kind.fetch = fetch_and_note


def _keep_stacks() -> None:
    """Has a worker write its stacks when a signal ends it: torch puts handlers in the place of faulthandler's."""
    handling: Any = sys.modules.get("torch.utils.data._utils.signal_handling")
    if not faulthandler.is_enabled() or not hasattr(handling, "_set_worker_signal_handlers"):
        return
    set_handlers_of_torch = handling._set_worker_signal_handlers

    def set_handlers() -> None:
        set_handlers_of_torch()
        # `enable` alone does nothing where it is enabled already.
        faulthandler.disable()
        # A program may have put a stream of its own in the place of sys.stderr.
        faulthandler.enable(file=2)

    handling._set_worker_signal_handlers = set_handlers


def raise_in_rank() -> None:
    """Has the rank of this process raise what keeps this process, if it is a loader's worker, from sending a batch."""
    # A hook without documentation, which `concurrent.futures` replaces as well; it is called in the sending thread.
    queue_type: Any = Queue
    show = getattr(queue_type, "_on_queue_feeder_error", None)
    if show is None:
        return

    def on_error(queue: Any, err: BaseException, item: Any) -> None:
        # The number of a batch, and the batch.
        if is_loader_worker() and isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], int):
            queue.put((item[0], _wrapped(err)))
        else:
            show(err, item)

    queue_type._on_queue_feeder_error = on_error


def _wrapped(err: BaseException) -> Any:
    """Returns an exception as torch's loader takes it from a worker; it has its class and its traceback as text."""
    from torch import _utils
    from torch.utils.data import get_worker_info

    wrapper: Any = _utils.ExceptionWrapper
    worker: Any = get_worker_info()
    return wrapper((type(err), err, err.__traceback__), where=f"in DataLoader worker process {worker.id}")
