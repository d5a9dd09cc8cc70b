"""Copies of each node's files on the next node, so that a node that is lost takes nothing along.

The nodes form a ring. Each rank sends the files that it has just written to one rank of the next node, over the gloo
group of the save, in the save's own thread. What arrives is compared with the hash that its writer has reported. The
copies are made before the checkpoint gets its name: one that has a name has all of its files twice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO, FileIO
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from slurm_train.checkpoint.manifest import FileRecord, open_plain, receive_file
from slurm_train.errors import CheckpointError

_CHUNK_BYTES = 8 << 20


def keepers(nodes: Sequence[int | None]) -> dict[int, int]:
    """Returns for each rank the rank of the next node that keeps copies of its files; {} where there is one node.

    Args:
        nodes: the node of each rank.
    """
    ranks_of: dict[int | None, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks_of.setdefault(node, []).append(rank)
    ring = list(ranks_of.values())
    keeper_of: dict[int, int] = {}
    for ranks, next_ranks in zip(ring, ring[1:] + ring[:1], strict=True):
        if ranks is next_ranks:
            continue
        for local_rank, rank in enumerate(ranks):
            keeper_of[rank] = next_ranks[local_rank % len(next_ranks)]
    return keeper_of


def exchange_files(
    folder: Path, records: Sequence[Mapping[str, FileRecord]], keeper_of: Mapping[int, int], *, group: ProcessGroup
) -> None:
    """Sends this rank's files to its keeper, and writes the files of ranks whose keeper this rank is. Collective.

    A rank that cannot read or write continues the exchange to its end, so that no other rank waits for it.

    Args:
        folder: where the files are, and the copies go.
        records: the files of each rank.
        keeper_of: see `keepers`.
        group: a gloo group of all ranks, which nothing else uses meanwhile.

    Raises:
        CheckpointError: a copy is not what its writer has reported.
        OSError: a file cannot be read, or a copy cannot be written.
    """
    this_rank = group.rank()
    errors = list[Exception]()

    def send() -> None:
        try:
            for name in sorted(records[this_rank]):
                _send(folder / name, records[this_rank][name].bytes, keeper_of[this_rank], group, errors)
        except Exception as err:  # of the network; the calling thread raises it
            errors.append(err)

    sender = threading.Thread(target=send, name="copies")
    if this_rank in keeper_of:
        sender.start()
    sources = [rank for rank, keeper in keeper_of.items() if keeper == this_rank]
    for source in sources:
        for name, record in sorted(records[source].items()):
            parts = _received(record.bytes, source, group)
            try:
                if receive_file(folder / name, parts) != record:
                    raise CheckpointError(
                        f"the copy of {name} from rank {source} differs from what was written there",
                        hint="nothing to do: the checkpoint before it counts",
                    )
            except (OSError, CheckpointError) as err:
                errors.append(err)
                for _ in parts:
                    pass
    if this_rank in keeper_of:
        sender.join()
    if errors:
        raise errors[0]


def _send(path: Path, num_bytes: int, keeper: int, group: ProcessGroup, errors: list[Exception]) -> None:
    """Sends as many bytes as the keeper expects; zeros where they cannot be read, which its hash shows."""
    chunk = torch.zeros(min(_CHUNK_BYTES, num_bytes), dtype=torch.uint8)
    to = dist.get_global_rank(group, keeper)
    try:
        file: FileIO | BytesIO = open_plain(path)
    except OSError as err:
        errors.append(err)
        file = BytesIO()
    with file:
        for at in range(0, num_bytes, _CHUNK_BYTES):
            part = chunk[: num_bytes - at]
            view = part.numpy().data
            filled = 0
            try:
                while count := file.readinto(view[filled:]):
                    filled += count
            except OSError as err:
                errors.append(err)
            dist.send(part, to, group=group)


def _received(num_bytes: int, source: int, group: ProcessGroup) -> Iterator[memoryview]:
    chunk = torch.empty(min(_CHUNK_BYTES, num_bytes), dtype=torch.uint8)
    rank = dist.get_global_rank(group, source)
    for at in range(0, num_bytes, _CHUNK_BYTES):
        part = chunk[: num_bytes - at]
        dist.recv(part, rank, group=group)
        yield part.numpy().data
