"""Step time of this toolkit with everything on, beside a bare DDP loop, accelerate and Lightning. Two gloo ranks.

All train the same model on the same in-memory batches with the same optimizer flags in one process group, in turns.
"Everything on" is: stop agreement, clipping, schedule, metrics.jsonl every 10 steps, display, STOP file, heartbeat,
look for stragglers, garbage collector control. Peers get what they offer for the same: clipping and a schedule;
Lightning a CSV log every 10 steps too. No peer pays for a DataLoader. What the look for stragglers costs is the
difference between "ours" (about four looks a second), "ours, no look" and "ours, every 2" (each second step).

    python -m tests.benchmarks.bench_step_time [--rounds 20] [--out result.json]
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from slurm_train.config.schema import HealthSection, OptimSection
from tests.benchmarks.turns import RANKS, Facts, in_turns, main, our_loop, show_table, summary, timed

NUM_SAMPLES = 8192
INPUTS = 64
CLASSES = 10


class Case(NamedTuple):
    """Sizes of a training: hidden width and layers, samples of a rank's batch, steps of a turn."""

    hidden: int
    layers: int
    batch: int
    steps: int


CASES = {"1 ms": Case(64, 1, 16, 100), "50 ms": Case(1024, 4, 128, 6)}
LR = 1e-3
CLIP = 1.0
Loop = Callable[[int], tuple[float, float]]


def measure(name: str, rounds: int) -> Facts:
    """One rank: measures all loops in turns."""
    case = CASES[name]
    loops: dict[str, Loop] = {
        "bare": bare_loop(case),
        "ours": own_loop(case, "auto"),
        "ours, no look": own_loop(case, None),
        "ours, every 2": own_loop(case, 2),
        "accelerate": accelerate_loop(case),
        "lightning": lightning_loop(case),
    }
    for loop in loops.values():
        loop(case.steps)
    turns = {name: (lambda loop=loop: loop(case.steps)) for name, loop in loops.items()}
    return summary(in_turns(turns, rounds=rounds), base="bare")


def make_model(case: Case) -> nn.Module:
    torch.manual_seed(0)
    middle = [part for _ in range(case.layers) for part in (nn.Linear(case.hidden, case.hidden), nn.ReLU())]
    return nn.Sequential(nn.Linear(INPUTS, case.hidden), nn.ReLU(), *middle, nn.Linear(case.hidden, CLASSES))


def make_data(size: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(size, INPUTS, generator=generator)
    return inputs, torch.randint(0, CLASSES, (size,), generator=generator)


def plain_batches(batch: int) -> Iterator[tuple[Any, Any]]:
    """The shuffled batches of the bare loop and the peers: one permutation an epoch, sliced by rank."""
    inputs, targets = make_data(NUM_SAMPLES)
    rank = int(os.environ["RANK"])
    for epoch in itertools.count():
        order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(epoch))
        for start in range(0, NUM_SAMPLES, batch * RANKS):
            chosen = order[start + rank * batch : start + (rank + 1) * batch]
            yield inputs[chosen], targets[chosen]


def bare_loop(case: Case) -> Loop:
    model = DistributedDataParallel(make_model(case), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    batches = plain_batches(case.batch)

    def run(steps: int) -> None:
        for _ in range(steps):
            inputs, targets = next(batches)
            cross_entropy(model(inputs), targets).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()

    return lambda steps: timed(run, steps)


def own_loop(case: Case, pace: Any) -> Loop:
    optim = OptimSection(lr=LR, betas=[0.9, 0.999], weight_decay=0.01, grad_clip_norm=CLIP)
    health = HealthSection(pace_every_steps=pace)
    loop, _ = our_loop(make_model(case), TensorSource(), local_size=case.batch, optim=optim, health=health)
    return lambda steps: timed(lambda count: loop.advance(loop.position.step + count), steps)


class TensorSource:
    """The same data behind the toolkit's own protocol."""

    def __init__(self) -> None:
        self.inputs, self.targets = make_data(NUM_SAMPLES)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def batch(self, indices: Any) -> tuple[Any, ...]:
        chosen = torch.from_numpy(indices)
        return self.inputs[chosen], self.targets[chosen]

    def fingerprint(self) -> str:
        return "0" * 32


def accelerate_loop(case: Case) -> Loop:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)])
    bare = make_model(case)
    model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=LR, fused=True))
    schedule = accelerator.prepare(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.optimizer, 10**6))
    batches = plain_batches(case.batch)

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


def lightning_loop(case: Case) -> Loop:
    import logging

    import lightning as L
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.strategies import DDPStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model(case)

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

    module, batches = Module(), plain_batches(case.batch)

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
            **dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
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
    columns = {"ms": ".3f", "cpu_ms": ".3f", "ratio": ".3f", "cpu_ratio": ".3f"}
    main(measure, lambda results: show_table(results, columns), rounds=20, cases=CASES)
