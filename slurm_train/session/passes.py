"""Whether a loader of the program goes on in its pass after a resume, seen by the first batch of the pass.

A program that hands over an object with a counter may still read its samples from the beginning of the epoch, or in
another order: the object (an engine, a sampler) says where it is, and the loader does not follow it. So a checkpoint
has a digest of the first batch of each pass over a `DataLoader` of torch that was under way, its length, how many
batches it had given, and where the streams of random numbers were. After a resume the batches until the first step are
compared with it. A sampler that is not torch's may begin anywhere, so another first batch of it is not named, unless
its samples draw random numbers: those of batches that were left out are not drawn. Without torch nothing is watched.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slurm_train.session.loader_workers import samples_draw

PASSES = "passes"
"""Key of a checkpoint's header: of each pass under way on rank 0 the first batch, the batches given, its length, and
a digest of where the streams of random numbers were."""
_SAMPLERS_OF_TORCH = ("torch.utils.data.sampler", "torch.utils.data.distributed")
_HINT = "take run.replay(loader) or run.batches, or hand over a stateful loader"


@dataclass(slots=True)
class _Pass:
    """A pass over a loader."""

    first: str
    """Digest of its first batch."""
    length: int | None
    """Its batches; None for a stream."""
    begins_at_its_first: bool
    """Whether it cannot begin behind what was used."""
    given: int = 0
    """Batches that the program has got."""
    is_over: bool = False


class LoaderPasses:
    """The passes over loaders of torch in this process."""

    def __init__(self) -> None:
        self._under_way: weakref.WeakKeyDictionary[Any, _Pass] = weakref.WeakKeyDictionary()
        self._left_out: weakref.WeakSet[Any] = weakref.WeakSet()
        """Iterators that are replayed, and so need no comparison."""
        self._at_step: list[_Pass] = []
        """Those under way at the last step: a save may follow after the loop was left, and its iterator with it."""
        self._saved: list[tuple[str, int, int | None]] = []
        """Passes in the checkpoint: digest of the first batch, batches given, and length where it is known."""
        self._saved_streams = ""
        """Where the streams of random numbers were in it."""
        self._is_watching = False
        self._goes_on = False
        """Whether the streams were as in the checkpoint before a batch that this process has read since the resume."""
        self._has_drawn = False
        """Whether samples that this process has read since the resume have drawn random numbers."""
        self.wait_s = 0.0
        """Seconds that the program's main thread has waited for batches."""
        self._is_waiting = False

    @property
    def has_seen(self) -> bool:
        """Whether a loader of torch has given a batch since the last step, or is in a pass."""
        return bool(self._at_step or self._under_way)

    def leave_out(self, iterator: Any) -> None:
        """Takes no note of the batches of an iterator: they are those before a resume by construction."""
        self._left_out.add(iterator)

    def continue_from(self, saved: list[list[Any]]) -> None:
        """Takes over the passes of the checkpoint that the program continues, and begins to watch loaders."""
        # Versions before wrote no lengths and no streams.
        self._saved = [(str(first), int(given), more[0] if more else None) for first, given, *more in saved]
        self._saved_streams = next((more[1] for _, _, *more in saved if len(more) > 1), "")
        self._goes_on = self._has_drawn = False
        self.watch()

    def watch(self) -> None:
        """Takes note of each batch from now on, where the program has imported torch's loaders."""
        loaders = sys.modules.get("torch.utils.data.dataloader")
        if self._is_watching or loaders is None:
            return
        self._is_watching = True
        kind: Any = loaders._BaseDataLoaderIter  # what `for` gets has no public class
        give = kind.__next__

        def give_and_note(iterator: Any) -> Any:
            if iterator in self._left_out:
                return self._timed(give, iterator)
            is_compared = bool(self._saved_streams and self._saved) and not iterator._num_workers
            before = _streams() if is_compared else ""
            try:
                batch = self._timed(give, iterator)
            except StopIteration:
                ended = self._under_way.pop(iterator, None)
                if ended is not None:
                    ended.is_over = True
                raise
            if is_compared:
                self._goes_on |= before == self._saved_streams
                self._has_drawn |= _streams() != before
            self._add(iterator, batch)
            return batch

        kind.__next__ = give_and_note

    def _timed(self, give: Callable[[Any], Any], iterator: Any) -> Any:
        """Returns the next batch; one that another thread reads ahead, or a loader within a loader, delays no step."""
        if self._is_waiting or threading.current_thread() is not threading.main_thread():
            return give(iterator)
        self._is_waiting = True
        start_s = time.perf_counter()
        try:
            return give(iterator)
        finally:
            self.wait_s += time.perf_counter() - start_s
            self._is_waiting = False

    def _add(self, iterator: Any, batch: Any) -> None:
        # Imported late, since it imports torch.
        from slurm_train.checkpoint.replicas import digest

        present = self._under_way.get(iterator)
        if present is None:
            first = digest({"batch": batch})
            present = _Pass(first, _length(iterator), _begins_at_its_first(iterator))
            self._under_way[iterator] = present
        present.given += 1

    def state(self) -> list[list[Any]]:
        """Returns the passes that are under way and not at their end, for a checkpoint."""
        passes = {id(present): present for present in (*self._at_step, *self._under_way.values())}
        under_way = [one for one in passes.values() if not one.is_over and one.given != one.length]
        streams = _streams() if under_way else ""
        return [[one.first, one.given, one.length, streams] for one in under_way]

    def check_loaders(self, step: int) -> str:
        """Takes note of a step; returns what is to be said at the first one after a resume, "" for nothing.

        Args:
            step: of the checkpoint.
        """
        self._at_step = list(self._under_way.values())
        saved = self._saved
        self._saved = []
        for present in self._at_step:
            for first, used, length in saved:
                if present.first == first and present.given <= used:
                    return (
                        f"since the resume, a loader gave batch 1 of the epoch again, of which {used} batches were "
                        f"used when step {step} was saved: their samples are used again; {_HINT}"
                    )
                is_the_same = any(present.first == other for other, _, _ in saved)
                if length is not None and present.length == length and present.begins_at_its_first and not is_the_same:
                    return (
                        f"since the resume, a loader gave another batch 1 than in the epoch of which {used} of "
                        f"{length} batches were used when step {step} was saved: unless a new epoch is to begin here, "
                        f"some samples are used again and others are left out; {_HINT}"
                    )
        goes_through_its_pass = any(present.first == first for present in self._at_step for first, _, _ in saved)
        draws_here = self._has_drawn and not self._goes_on
        if saved and self._at_step and (draws_here or (samples_draw() and not goes_through_its_pass)):
            _, used, _ = saved[0]
            return (
                f"since the resume, samples of a loader draw other random numbers than in the epoch of which {used} "
                f"batches were used when step {step} was saved: those of the used batches were not drawn again; "
                "DataLoader(batches.keyed(data), batch_sampler=batches) has those of each sample, see run.batches"
            )
        return ""


def _streams() -> str:
    """Returns a digest of where the streams of random numbers of this process are; without the GPU's."""
    # Imported late, since it imports torch.
    from slurm_train.distributed.seeds import stream_positions

    return hashlib.blake2b(stream_positions(of_gpu=False), digest_size=8).hexdigest()


def _length(iterator: Any) -> int | None:
    """Returns the batches of a pass; None for a stream."""
    try:
        return len(iterator)
    except TypeError:
        return None


def _begins_at_its_first(iterator: Any) -> bool:
    """Returns whether samplers of torch alone give the order of a pass: they cannot begin behind what was used."""
    batches = iterator._index_sampler
    samplers = (batches, getattr(batches, "sampler", batches))
    return all(type(sampler).__module__ in _SAMPLERS_OF_TORCH for sampler in samplers)
