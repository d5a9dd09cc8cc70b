"""The loaders of a program that are replayed, and how far it was in them when it was saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurm_train.data.replay import ReplayedLoader

REPLAYS = "replays"
"""Key of a checkpoint's header: the place in each loader, in the order of the calls."""


class Replays:
    """The loaders of one rank that are replayed.

    Args:
        rank: this rank.
        num_ranks: all of them.
        on_begin: called with the iterator of each pass.
        on_skip: called after each batch that was dropped.
        say: prints a note on rank 0.
    """

    def __init__(
        self,
        *,
        rank: int,
        num_ranks: int,
        on_begin: Callable[[Any], None] = lambda _: None,
        on_skip: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._on_begin = on_begin
        self._on_skip = on_skip
        self._say = say
        self._loaders: list[ReplayedLoader] = []
        self._saved: Sequence[Mapping[str, Any]] = ()

    def __len__(self) -> int:
        return len(self._loaders)

    def add(self, loader: Iterable[Any], *, seed: int) -> ReplayedLoader:
        """See `Session.replay`."""
        # Imported late, since it imports torch.
        from slurm_train.data.replay import ReplayedLoader

        replayed = ReplayedLoader(
            loader,
            seed=seed,
            rank=self._rank,
            num_ranks=self._num_ranks,
            done=partial(self._done, len(self._loaders)),
            on_begin=self._on_begin,
            on_skip=self._on_skip,
            say=self._say,
        )
        self._loaders.append(replayed)
        return replayed

    def continue_from(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Takes over the places of a checkpoint; [] at the beginning."""
        self._saved = saved
        for loader in self._loaders:
            loader.restart()

    def state(self) -> list[dict[str, int | None]]:
        """Returns the places, for a checkpoint."""
        return [loader.place.to_json() for loader in self._loaders]

    def _done(self, number: int) -> Mapping[str, Any]:
        return self._saved[number] if number < len(self._saved) else {}
