"""A stream of your own: samples from tar files, read one after the other, as WebDataset writes them.

From this folder:

    python own_stream.py shards
    python -m slurm_train model._target_=own_model.Regressor data._target_=own_stream.Shards data.path=shards

Each rank reads its own shards. `state_dict` says how far it is, so an interrupted run on as many ranks goes on with the
very next sample.
"""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from own_model import Waves
from torch import Tensor


class Shards:
    """The samples of a folder of tar files, pass after pass; each member is a saved (inputs, targets).

    Args:
        path: the folder.
        rank: the data-parallel rank; it reads the shards rank, rank + num_ranks, ...
        num_ranks: how many ranks there are; each needs a shard.
    """

    def __init__(self, path: str, rank: int = 0, num_ranks: int = 1) -> None:
        self.shards = sorted(Path(path).glob("*.tar"))[rank::num_ranks]
        self.shard = self.sample = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.shard < len(self.shards):
            with tarfile.open(self.shards[self.shard]) as tar:
                for member in tar.getmembers()[self.sample :]:
                    file = tar.extractfile(member)
                    assert file is not None
                    # Before the sample is given: the state then says that it has been.
                    self.sample += 1
                    yield torch.load(io.BytesIO(file.read()), weights_only=True)
            self.shard, self.sample = self.shard + 1, 0
        self.shard = 0

    def state_dict(self) -> dict[str, Any]:
        return {"shard": self.shard, "sample": self.sample}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shard, self.sample = state["shard"], state["sample"]


def write_shards(folder: Path, *, num_shards: int = 4, size: int = 256) -> None:
    """Writes noisy waves into tar files."""
    folder.mkdir(parents=True, exist_ok=True)
    waves = Waves(size=num_shards * size)
    for shard in range(num_shards):
        with tarfile.open(folder / f"{shard:03d}.tar", "w") as tar:
            for number in range(shard * size, (shard + 1) * size):
                buffer = io.BytesIO()
                # A row of a tensor would be saved with all the others.
                torch.save(tuple(part.clone() for part in waves[number]), buffer)
                member = tarfile.TarInfo(f"{number:06d}.pt")
                member.size = buffer.tell()
                buffer.seek(0)
                tar.addfile(member, buffer)


if __name__ == "__main__":
    write_shards(Path(sys.argv[1]))
