"""Two ranks that exchange: each collective and each kind of mesh with its time, or DDP's gradients in bfloat16.

    python -m tests.gpu.multi.probe groups OUT.json
    python -m tests.gpu.multi.probe bf16 OUT.json

It starts its ranks itself. `GPU_TESTS_SHARE=1` puts both on one GPU, `GPU_TESTS_ON_CPU=1` on the CPU with gloo.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slurm_train.config.parallel import ParallelLayout
from slurm_train.config.schema import DdpSection
from slurm_train.distributed.group import choose_device, exchange_once, init_group, newest_collectives, open_axis
from slurm_train.distributed.parallelize import build_mesh
from slurm_train.distributed.place import RankPlace
from slurm_train.session.signals import StopFlag
from slurm_train.train.ddp import TrainingModule, build_ddp, send_bfloat16
from tests.gpu.catalogue import end_with, require
from tests.gpu.multi.environment import rank_environment
from tests.support.ports import rank_environments

_STEPS = 50
_ITEMS = 300


def main() -> int:
    """Starts two ranks, or is one of them; returns the exit code."""
    scene, out = sys.argv[1], Path(sys.argv[2])
    if "RANK" in os.environ:
        place = RankPlace.from_env(os.environ)
        end_with(out.with_suffix(f".{place.rank}.json"), lambda: {"found": SCENES[scene](*open_ranks(place))})
    words = [sys.executable, "-m", "tests.gpu.multi.probe", scene, str(out)]
    processes = [subprocess.Popen(words, env=env) for env in rank_environments(2, rank_environment(dict(os.environ)))]
    codes = [process.wait() for process in processes]
    found = [json.loads(out.with_suffix(f".{rank}.json").read_text()) for rank in range(2)]
    out.write_text(json.dumps(found[0], indent=1))
    print(json.dumps(found, indent=1))
    return max(codes)


def open_ranks(place: RankPlace) -> tuple[RankPlace, torch.device]:
    """Opens the default group as a run does. Collective."""
    device = choose_device(place, os.environ)
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=place.is_first, timeout=timedelta(seconds=60))  # type: ignore[attr-defined]
    init_group(place, store, device=device, timeout_s=60)
    return place, device


def groups(place: RankPlace, device: torch.device) -> dict[str, Any]:
    """Returns the milliseconds of each exchange, the second of its kind, and of the groups of each mesh."""
    found: dict[str, Any] = {"device": str(device), "torch": torch.__version__}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize()
        found[f"{name}_ms"] = 1e3 * (time.perf_counter() - began_s)
        print(f"rank {place.rank}: {name} {found[f'{name}_ms']:.1f} ms", flush=True)

    with timed("first all_reduce"):
        exchange_once(place, device=device, timeout_s=30)
    for name, exchange in exchanges(place.rank, device).items():
        for _ in range(2):
            with timed(name):
                exchange()
    for axis in ("dp_shard", "tp", "pp", "dp_replicate"):
        with timed(f"mesh {axis}"):
            build_mesh(ParallelLayout(**{axis: 2}), device=device)
    # An axis of both ranks is the world itself; this one is split.
    with timed("split"):
        part = open_axis([(0,), (1,)], name="alone")
    with timed("all_reduce of a part"):
        dist.all_reduce(torch.ones(1, device=device), group=part)
    found["groups"] = sorted(
        f"{group.group_desc} {config}" for group, (config, _) in dist.distributed_c10d._world.pg_map.items()
    )
    found["flights"] = len(newest_collectives() or b"")
    with timed("barrier"):
        dist.barrier()
    return found


def exchanges(rank: int, device: torch.device) -> dict[str, Callable[[], None]]:
    """Returns what two ranks exchange, each of which checks what it got."""
    mine = torch.full((1 << 18,), float(rank + 1), device=device)

    def all_reduce() -> None:
        values = mine.clone()
        dist.all_reduce(values)
        require(bool((values == 3).all()), "all_reduce gave another sum")

    def all_gather() -> None:
        whole = mine.new_empty(2 * len(mine))
        dist.all_gather_into_tensor(whole, mine)
        require([value.item() for value in whole[:: len(mine)]] == [1, 2], "all_gather gave other parts")

    def reduce_scatter() -> None:
        part = mine.new_empty(len(mine) // 2)
        dist.reduce_scatter_tensor(part, mine)
        require(bool((part == 3).all()), "reduce_scatter gave another sum")

    def send_and_receive() -> None:
        values = torch.empty_like(mine)
        pair = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, values, 1 - rank)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        require(bool((values == 2 - rank).all()), "another tensor came")

    def broadcast() -> None:
        values = mine.clone()
        dist.broadcast(values, 0)
        require(bool((values == 1).all()), "broadcast gave other values")

    def of_objects() -> None:
        said: list[Any] = [None, None]
        dist.all_gather_object(said, rank)
        require(said == [0, 1], f"the ranks said {said}")

    each = (all_reduce, all_gather, reduce_scatter, send_and_receive, broadcast, of_objects, dist.barrier)
    return {function.__name__: function for function in each}


def bf16(place: RankPlace, device: torch.device) -> dict[str, Any]:
    """Sends gradients in bfloat16 while the backward pass takes and fills small tensors; returns steps and divisors.

    The numbers that the ranks agree on are read by a callback of a future, on a stream of its own. Were their memory
    given back before, one of these tensors would get it.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(24))).to(device)
    objective = _Counted(model)
    module = TrainingModule(objective, stop=StopFlag(), device=device, autocast=None)
    ddp = build_ddp(module, ddp=DdpSection(bucket_cap_mb=1.0, comm="bf16"), device=device)
    send_bfloat16(ddp, module.stats_param)

    def poison(_: Tensor) -> None:
        for _ in range(4):
            torch.full((4,), float("nan"), device=device)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(poison)
    for step in range(_STEPS):
        for parameter in module.parameters():
            parameter.grad = None
        module.backward(ddp(torch.ones(8, 256, device=device)))
        gradient = module.stats_param.grad
        assert gradient is not None
        numbers = gradient.tolist()
        require(numbers[:2] == [0.0, _ITEMS], f"step {step}: the agreed numbers are {numbers}, not 0 and {_ITEMS}")
    return {"steps": _STEPS, "device": str(device), "sanitizer": "TORCH_CUDA_SANITIZER" in os.environ}


class _Counted(nn.Module):
    """A loss with a count that bfloat16 cannot hold, 257 or more."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(batch).square().mean(), torch.full((), float(_ITEMS), device=batch.device)


SCENES: dict[str, Callable[[RankPlace, torch.device], dict[str, Any]]] = {"groups": groups, "bf16": bf16}

if __name__ == "__main__":
    sys.exit(main())
