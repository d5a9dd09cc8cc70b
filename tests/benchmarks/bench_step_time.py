"""Step time of this toolkit with everything on, beside a bare DDP loop, accelerate and Lightning. Two gloo ranks.

All four train the same model on the same in-memory batches with the same optimizer flags in one process group, in
turns (A B C D A B C D ...), so noise of the machine hits all alike. "Everything on" is: stops, clipping, schedule,
metrics.jsonl every 10 steps, display, stop flag and STOP file, heartbeat, look for stragglers, garbage collector
control. Peers get what they offer for the same: clipping and a schedule; Lightning a CSV log every 10 steps too. No
peer pays for a DataLoader.

    python tests/benchmarks/bench_step_time.py [--rounds 20] [--out result.json]
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

RANKS = 2
NUM_SAMPLES = 8192
INPUTS = 64
CLASSES = 10
# name: (hidden width, hidden layers, samples per rank, steps per turn)
CASES = {"1 ms": (64, 1, 16, 100), "50 ms": (1024, 4, 128, 6)}
LR = 1e-3
CLIP = 1.0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--peers", nargs="*", default=["accelerate", "lightning"])
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def start_ranks(options: argparse.Namespace) -> None:
    """Starts the ranks of each case and prints rank 0's table."""
    results = {}
    for case in options.cases:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        with tempfile.TemporaryDirectory() as scratch:
            words = [sys.executable, __file__, "--rounds", str(options.rounds), "--cases", case]
            words += ["--peers", *options.peers, "--out", f"{scratch}/out.json"]
            env = {**os.environ, "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
            env |= {"MASTER_PORT": str(port), "GROUP_RANK": "0", "BENCH_SCRATCH": scratch, "OMP_NUM_THREADS": "1"}
            env |= {"TORCHELASTIC_RUN_ID": "bench", "NODE_RANK": "0"}
            ranks = [
                subprocess.Popen(words, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)})
                for rank in range(RANKS)
            ]
            codes = [rank.wait() for rank in ranks]
            if any(codes):
                raise SystemExit("a rank failed")
            results[case] = json.loads(Path(scratch, "out.json").read_text())
    print_table(results)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


def print_table(results: dict[str, Any]) -> None:
    print(f"{'case':<8}{'loop':<14}{'median ms':>10}{'CPU ms':>9}{'x bare':>8}{'CPU x bare':>12}")
    for case, loops in results.items():
        for name, values in loops.items():
            print(
                f"{case:<8}{name:<14}{values['wall_ms']:>10.3f}{values['cpu_ms']:>9.3f}"
                f"{values['ratio']:>8.3f}{values['cpu_ratio']:>12.3f}"
            )


def measure(options: argparse.Namespace) -> None:
    """One rank: measures all loops in turns."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    case = options.cases[0]
    hidden, layers, batch, steps = CASES[case]
    makers: dict[str, Callable[..., Callable[[int], tuple[float, float]]]] = {"bare": bare_loop, "ours": our_loop}
    makers |= {name: {"accelerate": accelerate_loop, "lightning": lightning_loop}[name] for name in options.peers}
    loops = {name: make(hidden, layers, batch, rank) for name, make in makers.items()}
    for loop in loops.values():
        loop(steps)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    names = list(loops)
    for turn in range(options.rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            samples[name].append(loops[name](steps))
    if rank == 0:
        options.out.write_text(json.dumps({name: summary(times, samples["bare"]) for name, times in samples.items()}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def summary(times: list[tuple[float, float]], bare: list[tuple[float, float]]) -> dict[str, float]:
    """Medians per step, and medians of the ratios to the bare loop of the same round."""
    return {
        "wall_ms": 1e3 * statistics.median(wall for wall, _ in times),
        "cpu_ms": 1e3 * statistics.median(cpu for _, cpu in times),
        "ratio": statistics.median(a[0] / b[0] for a, b in zip(times, bare, strict=True)),
        "cpu_ratio": statistics.median(a[1] / b[1] for a, b in zip(times, bare, strict=True)),
    }


def make_model(hidden: int, layers: int) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    middle = [part for _ in range(layers) for part in (nn.Linear(hidden, hidden), nn.ReLU())]
    return nn.Sequential(nn.Linear(INPUTS, hidden), nn.ReLU(), *middle, nn.Linear(hidden, CLASSES))


def make_data() -> tuple[Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, INPUTS, generator=generator)
    return inputs, torch.randint(0, CLASSES, (NUM_SAMPLES,), generator=generator)


def plain_batches(batch: int, rank: int) -> Iterator[tuple[Any, Any]]:
    """The shuffled batches of the bare loop and the peers: one permutation an epoch, sliced by rank."""
    import torch

    inputs, targets = make_data()
    for epoch in itertools.count():
        order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(epoch))
        for start in range(0, NUM_SAMPLES, batch * RANKS):
            chosen = order[start + rank * batch : start + (rank + 1) * batch]
            yield inputs[chosen], targets[chosen]


def timed(run: Callable[[int], None], steps: int) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    run(steps)
    return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps


def bare_loop(hidden: int, layers: int, batch: int, rank: int) -> Callable[[int], tuple[float, float]]:
    import torch
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(make_model(hidden, layers), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    batches = plain_batches(batch, rank)

    def run(steps: int) -> None:
        for _ in range(steps):
            inputs, targets = next(batches)
            cross_entropy(model(inputs), targets).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()

    return lambda steps: timed(run, steps)


def our_loop(
    hidden: int, layers: int, batch: int, rank: int, pace: Any = "auto"
) -> Callable[[int], tuple[float, float]]:

    from slurm_train.config.batch import BatchPlan
    from slurm_train.config.schema import CheckpointSection, HealthSection, OptimSection, RunConfig, TrainSection
    from slurm_train.metrics.progress import LineDisplay
    from slurm_train.rundir.heartbeat import BeatSource, Limits
    from slurm_train.rundir.timing import Spent
    from slurm_train.train.optimizer import build_optimizer
    from slurm_train.train.trainer import Trainer, build_loop
    from tests.support.ranks import make_rank

    config = RunConfig(
        optim=OptimSection(lr=LR, betas=[0.9, 0.999], weight_decay=0.01, grad_clip_norm=CLIP),
        train=TrainSection(max_steps=10**6),
        checkpoint=CheckpointSection(every_steps=None),
        health=HealthSection(pace_every_steps=pace),
    )
    plan = BatchPlan(local_size=batch, ranks=RANKS, accumulation=1)
    own = make_rank(Path(os.environ["BENCH_SCRATCH"]), config, plan=plan, rank=rank, ranks=RANKS)
    source = BeatSource(rank=rank, host="here", pid=os.getpid())
    own.heartbeat.start(own.run, 0, source, limits=Limits(600, 300))
    model = make_model(hidden, layers)
    optimizer = build_optimizer(model, optim=config.optim)
    data: Any = TensorSource()
    trainer = Trainer(rank=own, model=model, optimizer=optimizer, train_data=data, heldout=None, flops_per_token=0.0)
    display = LineDisplay(io.StringIO(), max_steps=10**6, every_s=0.5) if rank == 0 else None
    loop = build_loop(trainer, display=display, spent=Spent(begin_unix_s=time.time()))
    return lambda steps: timed(lambda count: loop.advance(loop.position.step + count), steps)


class TensorSource:
    """The same data behind the toolkit's own protocol."""

    def __init__(self) -> None:
        self.inputs, self.targets = make_data()

    def __len__(self) -> int:
        return NUM_SAMPLES

    def batch(self, indices: Any) -> tuple[Any, ...]:
        import torch

        chosen = torch.from_numpy(indices)
        return self.inputs[chosen], self.targets[chosen]

    def fingerprint(self) -> str:
        return "0" * 32


def accelerate_loop(hidden: int, layers: int, batch: int, rank: int) -> Callable[[int], tuple[float, float]]:
    import torch
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from torch.nn.functional import cross_entropy

    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)])
    bare = make_model(hidden, layers)
    model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=LR, fused=True))
    schedule = accelerator.prepare(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.optimizer, 10**6))
    batches = plain_batches(batch, rank)

    def run(steps: int) -> None:
        for _ in range(steps):
            inputs, targets = next(batches)
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(inputs), targets))
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

    return lambda steps: timed(run, steps)


def lightning_loop(hidden: int, layers: int, batch: int, rank: int) -> Callable[[int], tuple[float, float]]:
    import logging

    import lightning as L
    import torch
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.strategies import DDPStrategy
    from torch.nn.functional import cross_entropy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model(hidden, layers)

        def training_step(self, pair: Any, _: int) -> Any:
            loss = cross_entropy(self.net(pair[0]), pair[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=LR, fused=True)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10**6)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class Watch(L.Callback):
        """Times all but the first few steps: setting up a fit is not a step."""

        skipped = 2
        start = (0.0, 0.0)

        def on_train_batch_start(self, trainer: Any, module: Any, pair: Any, index: int) -> None:
            if index == self.skipped:
                self.start = (time.perf_counter(), time.process_time())

    module, batches = Module(), plain_batches(batch, rank)

    def run(steps: int) -> tuple[float, float]:
        watch = Watch()
        trainer = L.Trainer(
            accelerator="cpu",
            devices=RANKS,
            strategy=DDPStrategy(gradient_as_bucket_view=True, process_group_backend="gloo"),
            max_steps=steps + watch.skipped,
            gradient_clip_val=CLIP,
            logger=CSVLogger(os.environ["BENCH_SCRATCH"]),
            log_every_n_steps=10,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            callbacks=[watch],
        )
        end = {}
        trainer.fit_loop.on_advance_end = wrap(trainer.fit_loop.on_advance_end, end)
        trainer.fit(module, itertools.islice(batches, steps + watch.skipped))
        return (end["wall"] - watch.start[0]) / steps, (end["cpu"] - watch.start[1]) / steps

    return run


def wrap(original: Callable[[], None], end: dict[str, float]) -> Callable[[], None]:
    """Notes the time at which the last step of an epoch was done."""

    def noted() -> None:
        end["wall"], end["cpu"] = time.perf_counter(), time.process_time()
        original()

    return noted


if __name__ == "__main__":
    arguments = parse_arguments()
    measure(arguments) if "RANK" in os.environ else start_ranks(arguments)
