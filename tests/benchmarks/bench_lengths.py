"""Variable-length data: batches by length and reading ahead, beside torch's DistributedSampler. Two gloo ranks.

    python -m tests.benchmarks.bench_lengths [--rounds 6] [--out result.json]

A small GPT on sequences of log-normal length (4 to 512 tokens), the same model, data, optimizer and global batch in
turns: a bare DDP loop over DistributedSampler and DataLoader; our loop with batches of equal numbers of samples; with
batches by length. Then all over again with samples that take time to read, our loop with and without `data.prefetch`.
The figures are of whole pools: mean step, its spread from step to step (standard deviation over mean, 95th percentile
over median), the same spread of the larger rank's padded tokens (what there is to do, whatever else the machine does),
the part of a step that a rank waits for the other, padding, tokens (padding not counted) per second, and the ratio of
that to DistributedSampler's in the same round.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean, median, pstdev, quantiles
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from slurm_train.config.schema import BatchSection, HealthSection
from slurm_train.data.mapstyle import MapStyleSource, pad
from slurm_train.data.source import IGNORED
from slurm_train.distributed.pace import PaceProbe
from slurm_train.models.gpt import GPT
from slurm_train.rundir.heartbeat import Heartbeat
from tests.benchmarks.turns import RANKS, Facts, in_turns, main, our_loop, show_table

LOCAL, POOL = 16, 32
NUM_SAMPLES, VOCABULARY, LONGEST = 4096, 257, 512
READ_S = 0.0015
"""What reading one sample takes in the second part: a file on a busy disk."""
WAYS = {
    "memory": ("DistributedSampler", "even", "by length"),
    "slow reading": ("DistributedSampler", "by length", "by length, prefetch 4"),
}


class Turn(NamedTuple):
    """What one rank saw of the steps of one turn."""

    step_s: list[float]
    tokens: int
    sizes: list[int]
    """Padded tokens of each step; with reading ahead, of what was read meanwhile."""
    wait_share: float


Run = Callable[[int], Turn]


def measure(part: str, rounds: int) -> Facts:
    """One rank: all ways in turns, whole pools each."""
    read_s = READ_S if part == "slow reading" else 0.0
    runs = {name: sampler_run(read_s) if name == "DistributedSampler" else our_run(name, read_s) for name in WAYS[part]}
    for run in runs.values():
        run(POOL // 4)
    turns = in_turns({name: (lambda run=run: run(POOL)) for name, run in runs.items()}, rounds=rounds)
    of_ranks: list[Any] = [None] * RANKS
    dist.all_gather_object(of_ranks, turns)
    both = {name: [together(pair) for pair in zip(*(own[name] for own in of_ranks), strict=True)] for name in runs}
    return {name: summary(own, both["DistributedSampler"]) for name, own in both.items()}


def together(pair: tuple[Turn, ...]) -> Turn:
    """Returns what the ranks of one turn saw together."""
    waits = fmean(turn.wait_share for turn in pair)
    both = list(zip(*(turn.sizes for turn in pair), strict=True))
    # A step takes as long as the larger part: the rest of the other is padding, too.
    return Turn(pair[0].step_s, sum(turn.tokens for turn in pair), [RANKS * max(sizes) for sizes in both], waits)


def summary(turns: list[Turn], sampler: list[Turn]) -> dict[str, float]:
    """Returns the figures of one way."""
    times = [seconds for turn in turns for seconds in turn.step_s]
    rates, others = ([turn.tokens / sum(turn.step_s) for turn in some] for some in (turns, sampler))
    sizes, tokens = [size for turn in turns for size in turn.sizes], sum(turn.tokens for turn in turns)
    return {
        "ms": 1e3 * fmean(times),
        "spread": pstdev(times) / fmean(times),
        "tail": quantiles(times, n=20)[-1] / median(times),
        "work": pstdev(sizes) / fmean(sizes),
        "waits": fmean(turn.wait_share for turn in turns),
        "padding": 1 - tokens / sum(sizes),
        "tokens_per_s": median(rates),
        "ratio": median(ours / theirs for ours, theirs in zip(rates, others, strict=True)),
    }


def make_model() -> Any:
    torch.manual_seed(0)
    return GPT(vocab_size=VOCABULARY, context=LONGEST, num_layers=2, num_heads=2, width=64)


class Sequences:
    """Sequences of log-normal length; counts what was asked for and how large it was when padded."""

    def __init__(self, read_s: float) -> None:
        lengths = np.random.default_rng(1).lognormal(4.2, 0.8, NUM_SAMPLES).clip(4, LONGEST).astype(np.int64)
        self.lengths, self.read_s = lengths, read_s
        self.tokens = torch.randint(0, VOCABULARY, (LONGEST + 1,), generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        time.sleep(self.read_s)
        length = int(self.lengths[index])
        return self.tokens[:length], self.tokens[1 : length + 1]


class Stopwatch:
    """Counts the tokens of this rank's batches, with and without padding, and times steps one by one."""

    def __init__(self) -> None:
        self.tokens = self.padded = 0

    def pad(self, samples: list[Any]) -> Any:
        """Collates and counts."""
        inputs, targets = pad(samples)
        self.padded += inputs.numel()
        self.tokens += int((targets != IGNORED).sum())
        return inputs, targets

    def run(self, heartbeat: Heartbeat, step: Callable[[], object], steps: int) -> Turn:
        """Takes so many steps."""
        before, pace = self.tokens, heartbeat.pace
        times, sizes = [], []
        for _ in range(steps):
            start, padded = time.perf_counter(), self.padded
            step()
            times.append(time.perf_counter() - start)
            sizes.append(self.padded - padded)
        spent = heartbeat.pace.since(pace)
        share = spent.wait_s / max(spent.wait_s + spent.own_s, 1e-9)
        return Turn(times, self.tokens - before, sizes, share)


def sampler_run(read_s: float) -> Run:
    """The bare loop over DistributedSampler and DataLoader."""
    watch, data, heartbeat = Stopwatch(), Sequences(read_s), Heartbeat()
    sampler: Any = DistributedSampler(data, shuffle=True, seed=3, drop_last=True)  # type: ignore[arg-type]
    loader = DataLoader(data, batch_size=LOCAL, sampler=sampler, collate_fn=watch.pad, drop_last=True)  # type: ignore
    model = DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    probe = PaceProbe(model, heartbeat, every=2, data_wait_s=lambda: 0.0, on_device=False)

    def batches() -> Any:
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            yield from loader
            epoch += 1

    stream = batches()

    def step() -> None:
        probe.begin()
        inputs, targets = next(stream)
        cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        probe.end()

    return lambda steps: watch.run(heartbeat, step, steps)


def our_run(name: str, read_s: float) -> Run:
    """Our loop with everything on."""
    watch = Stopwatch()
    source = MapStyleSource(Sequences(read_s), collate=watch.pad)  # type: ignore[arg-type]
    loop, heartbeat = our_loop(
        make_model(),
        source,
        local_size=LOCAL,
        batch=BatchSection(by_length=name != "even", pool=POOL),
        data={"_target_": "none", "prefetch": 4 if "prefetch" in name else 0},
        health=HealthSection(pace_every_steps=2),
    )
    return lambda steps: watch.run(heartbeat, lambda: loop.advance(loop.position.step + 1), steps)


if __name__ == "__main__":
    columns = {"ms": ".1f", "spread": ".2f", "tail": ".2f", "work": ".2f", "waits": ".0%", "padding": ".0%"}
    columns |= {"tokens_per_s": ",.0f", "ratio": ".2f"}
    main(measure, lambda results: show_table(results, columns), rounds=6, cases=WAYS)
