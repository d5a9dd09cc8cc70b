"""A loader whose passes can be gone on with, though it has no state: the same pass again, without what was used.

A pass follows from the seed and its number: before it begins, the samplers are given that number, and the streams of
random numbers that its samples draw from are seeded. These streams are kept apart from those of the training, which
draws dropout between two batches. So the same batches come again at each start; those that were used are read and
dropped, and nothing is computed on them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from slurm_train.data.generators import OwnedGenerators
from slurm_train.distributed.seeds import mix
from slurm_train.errors import ConfigError

_LONG_S = 1.0
"""A way back that takes longer is printed."""


@dataclass(frozen=True, slots=True)
class ReplayPlace:
    """How far a program is in a loader, for a checkpoint."""

    epoch: int = 0
    """Passes that are over."""
    batches: int = 0
    """Of the pass that is under way, those that were given."""
    length: int | None = None
    """Batches of a pass; None where the loader does not say."""
    num_workers: int = 0
    """Of the loader."""
    num_ranks: int = 1

    def to_json(self) -> dict[str, int | None]:
        """Returns it for a manifest."""
        return asdict(self)


class ReplayedLoader:
    """The batches of a loader, from any place in any of its passes on.

    Args:
        loader: any iterable that gives its batches from the first on whenever it is iterated, e.g. a `DataLoader`.
        seed: of its passes.
        rank: this rank.
        num_ranks: all of them.
        done: returns the place in the checkpoint that the program continues, as of `ReplayPlace.to_json`, {} for none.
        on_begin: called with the iterator of each pass.
        on_skip: called after each batch that was dropped.
        say: prints a note on rank 0.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        seed: int,
        rank: int,
        num_ranks: int,
        done: Callable[[], Mapping[str, Any]],
        on_begin: Callable[[Any], None],
        on_skip: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._loader = loader
        self._seed = seed
        self._rank = rank
        self._num_ranks = num_ranks
        self._saved_place = done
        self._on_begin = on_begin
        self._on_skip = on_skip
        self._say = say
        self._epoch: int | None = None
        """The pass that the next iterator gives; None: the one that is to be gone on with."""
        self._place: ReplayPlace | None = None

    def _done(self) -> ReplayPlace:
        """Returns the place in the checkpoint that the program continues."""
        return ReplayPlace(**self._saved_place())

    @property
    def epoch(self) -> int:
        """The pass that the training continues with, from 0: the number of passes that are over."""
        return self._done().epoch

    @property
    def start(self) -> int:
        """Batches that the next iterator leaves out."""
        done = self._done()
        return done.batches if self._epoch in (None, done.epoch) else 0

    @property
    def place(self) -> ReplayPlace:
        """How far the program is."""
        return self._place or self._done()

    def set_epoch(self, epoch: int) -> None:
        """Says which pass the next iterator gives; without it, the next one.

        Raises:
            ConfigError: it is over.
        """
        if epoch < self.epoch:
            raise ConfigError(
                f"epoch {epoch} was set, and {self.epoch} passes over this loader are over",
                hint="let the loop begin with `loader.epoch`",
            )
        self._epoch = epoch
        if self._place is not None and epoch != self._place.epoch:
            self._place = replace(self._place, epoch=epoch, batches=0)

    def restart(self) -> None:
        """Goes back to the place in the checkpoint, which is another one now."""
        self._epoch = None
        self._place = None

    def __getattr__(self, name: str) -> Any:
        """Returns what the loader itself has, e.g. its `dataset`."""
        if name.startswith("__") or "_loader" not in vars(self):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        """Returns the batches of a whole pass, done or not."""
        return len(self._loader)  # type: ignore[arg-type]  # TypeError, as of the loader itself

    def __iter__(self) -> Iterator[Any]:
        done = self._done()
        epoch = done.epoch if self._epoch is None else self._epoch
        num_used = done.batches if epoch == done.epoch else 0
        facts = self._facts()
        if num_used:
            self._require_same(done, facts)
        self._place = ReplayPlace(epoch, num_used, **facts)
        self._epoch = epoch + 1
        if num_used != facts["length"]:
            yield from self._read(epoch, num_used, facts)
        self._place = ReplayPlace(epoch + 1, 0, **facts)

    def _read(self, epoch: int, num_used: int, facts: dict[str, Any]) -> Iterator[Any]:
        """Yields what is left of a pass."""
        start_s = time.monotonic()
        self._set_epoch_of_samplers(epoch)
        key = mix(self._seed, epoch, self._rank if self._divides_itself() else 0)
        OwnedGenerators(self._loader).seed(key)
        outside = _streams()
        _seed_streams(key)
        iterator = iter(self._loader)
        self._on_begin(iterator)
        inside = _streams()
        _set_streams(outside)
        number = 0
        while True:
            outside = _streams()
            _set_streams(inside)
            try:
                batch = next(iterator)
            except StopIteration:
                break
            finally:
                inside = _streams()
                _set_streams(outside)
            number += 1
            if number <= num_used:
                self._on_skip()
                spent_s = time.monotonic() - start_s
                if number == num_used and spent_s > _LONG_S:
                    self._say(f"{num_used} batches of epoch {epoch} were read again in {spent_s:.0f} s, and left out")
                continue
            self._place = ReplayPlace(epoch, number, **facts)
            yield batch

    def _facts(self) -> dict[str, Any]:
        try:
            length: int | None = len(self)
        except TypeError:
            length = None
        num_workers = int(getattr(self._loader, "num_workers", 0))
        return {"length": length, "num_workers": num_workers, "num_ranks": self._num_ranks}

    def _require_same(self, done: ReplayPlace, facts: dict[str, Any]) -> None:
        """Checks that a pass can be gone on with, and says what in it will differ.

        Raises:
            ConfigError: its batches are others.
        """
        if (done.length, done.num_ranks) != (facts["length"], facts["num_ranks"]):
            raise ConfigError(
                f"{done.batches} batches of a pass of {done.length} on {done.num_ranks} ranks were used, and the "
                f"loader has {facts['length']} on {facts['num_ranks']} ranks: they are other batches",
                hint="resume with as many ranks, samples and samples in a batch; or take run.batches, which needs "
                "none of it",
            )
        if done.num_workers != facts["num_workers"]:
            self._say(
                f"the loader has {facts['num_workers']} workers, and had {done.num_workers} when {done.batches} "
                "batches of this epoch were used: the order is the same, and samples that draw random numbers draw "
                "others"
            )
        if getattr(self._loader, "persistent_workers", False) and done.epoch:
            self._say(
                "the workers of the loader are persistent, and keep their random numbers from pass to pass: the order "
                "is the same, and samples that draw random numbers draw others; persistent_workers=False is exact"
            )

    def _samplers(self) -> list[Any]:
        batches = getattr(self._loader, "batch_sampler", None)
        holders = (self._loader, getattr(self._loader, "sampler", None), batches, getattr(batches, "sampler", None))
        found = {id(holder): holder for holder in (*holders, getattr(self._loader, "dataset", None))}
        return [holder for holder in found.values() if hasattr(holder, "set_epoch")]

    def _set_epoch_of_samplers(self, epoch: int) -> None:
        for sampler in self._samplers():
            sampler.set_epoch(epoch)

    def _divides_itself(self) -> bool:
        """Returns whether a sampler gives each rank its part of one order, whatever the streams of this rank are.

        Where no sampler does, ranks may divide an order that all of them draw alike.
        """
        return any(hasattr(sampler, "num_replicas") for sampler in self._samplers())


def _streams() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_streams(states: tuple[Any, ...]) -> None:
    python, numpy, of_torch = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(of_torch)


def _seed_streams(key: int) -> None:
    """Seeds the streams of the host; that of a GPU goes on."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)
