"""One of four gloo ranks that fills the same model in one layout after the other. Reads its orders as JSON from argv.

python first_weights_rank.py '{"port": 12345, "run": "...", "file": "...", "layouts": {"HSDP 2x2": {"dp_shard": 2}}}'
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(Path(__file__).resolve().parent)]


def main() -> None:
    import torch
    import torch.distributed as dist

    orders = json.loads(sys.argv[1])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    alone = {kind: values_of({}, rank=0, ranks=1, orders=orders, kind=kind) for kind in orders["kinds"]}
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{orders['port']}", rank=rank, world_size=ranks)
    for name, parallel in orders["layouts"].items():
        for kind, expected in alone.items():
            own = values_of(parallel, rank=rank, ranks=ranks, orders=orders, kind=kind)
            names: list[Any] = [None] * ranks
            dist.all_gather_object(names, list(own))
            assert {one for of_rank in names for one in of_rank} == expected.keys(), (name, kind)
            wrong = [one for one, tensor in own.items() if not tensor.equal(expected[one])]
            assert not wrong, (name, kind, wrong)
    print("alike", file=sys.stderr)


def values_of(parallel: dict[str, Any], *, rank: int, ranks: int, orders: dict[str, Any], kind: str) -> dict[str, Any]:
    """Returns whole parameters and buffers by name, as this rank has them in a layout."""
    from slurm_train.config.schema import RunConfig, build_config
    from slurm_train.models.build import build_model, load_start_weights
    from slurm_train.train.context import Built
    from slurm_train.train.layout import apply_parallelism
    from slurm_train.train.optimizer import build_optimizer
    from tests.support.ranks import make_rank

    sections = {
        "model": orders["kinds"][kind],
        "parallel": {"dp_replicate": 1, **parallel},
        "train": {"init_from": orders["file"] if kind == "from a file" else None},
    }
    config = build_config(RunConfig, sections)
    model: Any = build_model(config)
    asked = make_rank(Path(orders["run"]), config, rank=rank, ranks=ranks)
    load_start_weights(model, config, run=asked.run, buffers={})
    unused: Any = None
    optimizer = build_optimizer(model, optim=config.optim)
    built = Built(model=model, optimizer=optimizer, train_data=unused, heldout=None, flops_per_token=(0.0, 0.0))
    parts = apply_parallelism(asked, built)
    named = [*parts.model.named_parameters(), *parts.model.named_buffers()]
    tensors: list[tuple[str, Any]] = [(name, tensor.detach()) for name, tensor in named]
    return {name: one.full_tensor() if hasattr(one, "placements") else one for name, one in tensors}


if __name__ == "__main__":
    # gloo's threads do not survive an orderly interpreter exit.
    try:
        main()
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)
