"""The random generators of a program's rank: kept with each checkpoint, put back on request, and watched for repeats.

A program that seeds its generators at each start and loads its model draws the numbers of its first steps again: the
same dropout, and the same samples where it draws those. Python's generator, numpy's and torch's are kept, also that of
the current GPU. The program saves other generators itself. Without torch nothing is kept.
"""

from __future__ import annotations

import hashlib
import io
import sys
from pathlib import Path
from typing import Any

_FILE = "session_random_{:05d}.pt"
RANDOM = "random"
"""Key of them among a rank's states in a checkpoint of `Session.training`."""


def is_random_file(name: str) -> bool:
    """Returns whether a file of a checkpoint is one of these, and none of the program's."""
    return name.startswith("session_random_")


class RandomStreams:
    """The random generators of one rank.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._begin: dict[str, str] | None = None
        """What identifies the states at the first report of the whole training; None where that is not known."""
        self._first: dict[str, str] | None = None
        """The same at the first report of this attempt."""
        self._is_settled = False

    def write(self, folder: Path) -> None:
        """Writes the states of the generators into this rank's part of a save."""
        if "torch" not in sys.modules:
            return
        import torch

        torch.save(self.state_dict(), folder / _FILE.format(self._rank))

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of the generators, for a checkpoint."""
        from slurm_train.distributed.seeds import rng_state

        return {"state": rng_state(), "begin": self._begin}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts the generators back as they were at a save of this rank."""
        from slurm_train.distributed.seeds import set_rng_state

        set_rng_state(state["state"])

    def restore(self, checkpoint: Path, *, world_size: int) -> str:
        """Puts the generators back as they were at a save, and returns what is to be said of it, "" for nothing.

        A rank that was not there gets the states of the others if those are all alike, else new ones that follow from
        them, so that no two ranks draw the same numbers.

        Args:
            checkpoint: its directory.
            world_size: ranks that have saved it.
        """
        from slurm_train.distributed.seeds import seed_everything, set_rng_state

        mine = _read(checkpoint, self._rank)
        if mine is not None:
            self.load_state_dict(mine)
            return ""
        saved = [found["state"] for rank in range(min(world_size, 2)) if (found := _read(checkpoint, rank)) is not None]
        if not saved:
            return (
                f"{checkpoint.name} has no states of random generators, so they are left as the program has seeded them"
            )
        first, last = saved[0], saved[-1]
        if len(saved) > 1 and bool((first["torch"] == last["torch"]).all()):
            set_rng_state(first)
            return ""
        digest = hashlib.blake2b(first["torch"].numpy().tobytes(), digest_size=8).digest()
        seed_everything(int.from_bytes(digest, "big"), data_parallel_rank=self._rank)
        return ""

    def find_repeats(self, checkpoint: Path | None) -> list[str]:
        """Returns the generators whose numbers are those of the training's first steps again. Called after each step.

        It compares the states at the first report of this attempt, and whether the next step has drawn.

        Args:
            checkpoint: the directory of the one that the attempt goes on from.
        """
        if self._is_settled or "torch" not in sys.modules:
            return []
        present = _digests()
        if self._first is None:
            self._first = present
            if checkpoint is None:
                self._begin = present
            else:
                mine = _read(checkpoint, self._rank)
                self._begin = mine["begin"] if mine is not None else None
            self._is_settled = checkpoint is None or self._begin is None
            return []
        self._is_settled = True
        begin = self._begin or {}
        return [name for name, digest in self._first.items() if begin.get(name) == digest != present.get(name)]


def _read(checkpoint: Path, rank: int) -> dict[str, Any] | None:
    import torch

    from slurm_train.checkpoint.save import rank_file

    # A checkpoint of `Session.training` has them among the rank's other states.
    for path in (checkpoint / _FILE.format(rank), checkpoint / rank_file(rank)):
        if path.exists():
            found: dict[str, Any] = torch.load(io.BytesIO(path.read_bytes()), weights_only=True, map_location="cpu")
            states: dict[str, Any] = found.get(RANDOM, found)
            return states
    return None


def _digests() -> dict[str, str]:
    """Returns a short text for the state of each generator."""
    from slurm_train.distributed.seeds import rng_state

    return {name: _digest(state) for name, state in rng_state().items()}


def _digest(state: Any) -> str:
    values = state.values() if isinstance(state, dict) else [state]
    content = b"".join(value.numpy().tobytes() if hasattr(value, "numpy") else repr(value).encode() for value in values)
    return hashlib.blake2b(content, digest_size=8).hexdigest()
