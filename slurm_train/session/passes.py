"""Whether a loader of the program begins its pass anew after a resume, seen by the first batch of the pass.

A program that hands over an object with a counter may still read its samples from the beginning of the epoch: the
object (an engine, a sampler) says where it is, and the loader does not follow it. So a checkpoint has a digest of the
first batch of each pass over a `DataLoader` of torch that was under way, and how many batches it had given. After a
resume the batches until the first step are compared with it. Without torch nothing is watched.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from typing import Any

PASSES = "passes"
"""Key of a checkpoint's header: first batch and number of batches of each pass that was under way on rank 0."""


@dataclass(slots=True)
class _Pass:
    """A pass over a loader."""

    first: str
    """Digest of its first batch."""
    given: int = 0
    """Batches that the program has got."""


class Passes:
    """The passes over loaders of torch in this process."""

    def __init__(self) -> None:
        self._under_way: weakref.WeakKeyDictionary[Any, _Pass] = weakref.WeakKeyDictionary()
        self._saved: dict[str, int] = {}
        """Batches of the passes in the checkpoint, by the digest of the first one."""
        self._is_watching = False

    def take(self, saved: list[list[Any]]) -> None:
        """Takes over the passes of the checkpoint that the program continues, and begins to watch loaders."""
        self._saved = {str(first): int(given) for first, given in saved}
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
            try:
                batch = give(iterator)
            except StopIteration:
                self._under_way.pop(iterator, None)
                raise
            self._add(iterator, batch)
            return batch

        kind.__next__ = give_and_note

    def _add(self, iterator: Any, batch: Any) -> None:
        # Imported late, since it imports torch.
        from slurm_train.checkpoint.replicas import digest

        present = self._under_way.get(iterator)
        if present is None:
            present = self._under_way[iterator] = _Pass(digest({"batch": batch}))
        present.given += 1

    def state(self) -> list[list[Any]]:
        """Returns the passes that are under way and not at their end, for a checkpoint."""
        return [
            [present.first, present.given]
            for iterator, present in self._under_way.items()
            if present.given < _length(iterator)
        ]

    def look(self, step: int) -> str:
        """Returns what is to be said at the first step after a resume, "" for nothing; later steps say nothing.

        Args:
            step: of the checkpoint.
        """
        saved = self._saved
        self._saved = {}
        for present in self._under_way.values():
            used = saved.get(present.first, 0)
            if present.given <= used:
                return (
                    f"since the resume, a loader gave batch 1 of the epoch again, of which {used} batches were used "
                    f"when step {step} was saved: their samples are used again; skip them, take run.batches, or hand "
                    "over a stateful loader"
                )
        return ""


def _length(iterator: Any) -> float:
    """Returns the batches of a pass; of a stream nobody knows them."""
    try:
        return len(iterator)
    except TypeError:
        return float("inf")
