"""The record of torch's own flight recorder: two real gloo ranks, one of which does not come."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from slurm_train.distributed.group import shorten_record
from slurm_train.supervise.hang import read_flight
from tests.support.warm_ranks import run_pair

# Rank 1 stays away from the third all-reduce until rank 0 has told what it knows.
PROGRAM = """
import json, os, torch
import torch.distributed as dist
from slurm_train.distributed.group import newest_collectives
from slurm_train.supervise.hang import read_flight
from tests.support.waiting import wait_for
dist.init_process_group("gloo")
rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
for _ in range(2):
    dist.all_reduce(torch.ones(1000))

def is_over():
    # What is over is written down by a thread of gloo's, a little later.
    flight = read_flight(newest_collectives() or b"")
    return flight is None or flight.over == flight.begun

wait_for(is_over, within_s=20, what="a record of what is over")
if rank == 0:
    work = dist.all_reduce(torch.ones(1000), async_op=True)
record = newest_collectives()
with open(os.environ["OUT"], "w") as file:
    json.dump((record or b"").decode(), file)
store.set(f"told {rank}", "yes")
store.wait(["told 0", "told 1"])
if rank == 1:
    work = dist.all_reduce(torch.ones(1000), async_op=True)
work.wait()
# Rank 0 has the store, and leaves last.
store.set(f"done {rank}", "yes")
if rank == 0:
    store.wait(["done 1"])
os._exit(0)
"""


@pytest.mark.distributed
def test_real_ranks_tell_who_has_not_come(tmp_path: Path) -> None:
    texts = run_pair(tmp_path, PROGRAM)
    if not any(text.strip() for text in texts):
        pytest.skip(f"torch {torch.__version__} records nothing between gloo ranks")
    flights = {rank: flight for rank, text in enumerate(texts) if (flight := read_flight(text)) is not None}
    assert len(flights) == 2, texts
    assert str(flights[0].waits_in).endswith(" of 1,000 elements") and flights[1].waits_in is None
    assert (flights[0].begun, flights[0].over, flights[1].begun) == (
        flights[1].begun + 1,
        flights[1].begun,
        flights[1].over,
    )


def test_a_record_is_shortened_to_the_newest_of_each_group() -> None:
    entries = [
        {
            "pg_id": group,
            "process_group": [str(group), ""],
            "collective_seq_id": number,
            "is_p2p": number == 9,
            "frames": [],
        }
        for group in (0, 1)
        for number in range(10)
    ]
    kept = json.loads(shorten_record(json.dumps({"entries": entries, "pg_status": {"0": {}}})) or b"")
    assert [(one["pg_id"], one["collective_seq_id"]) for one in kept["entries"]] == [
        (group, number) for group in (0, 1) for number in (5, 6, 7, 8)
    ]
    assert kept["pg_status"] == {"0": {}}
    assert shorten_record('{"entries": []}') is None
