"""Runs whose number of ranks changes, and their twins, which are trained on one rank without a stop.

One shrinks: 4 x 8 ranks, then 2 x 8, 1 x 6 and 1, each time resumed from the command line. The others lose nodes and
get them back in any order: ranks are killed, and the next attempt has another number of them. Samples, digests and
learning rates of every step must be equal, losses to the order in which float32 adds, in a model and data of double
precision.
"""

from __future__ import annotations

import math
import random
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_train.rundir.paths import RunDirectory
from tests.campaigns.record import Tally
from tests.support.command_line import TINY_MODULE, Done, Person
from tests.support.ledgers import ledger_lines
from tests.support.slurm_runs import losses, step_lines, wait_until_finished, wait_until_step
from tests.support.waiting import wait_for
from tests.train.small_runs import PADDED, config_of, finish, run_to_end, start, steps_of

# 96 samples: 3, 6, 16 and 96 for each rank.
SIZES = ("4x8", "2x8", "1x6", "1x1")
_STEPS = 160
_WORDS = (
    "model._target_=tiny.Tiny",
    "data._target_=tiny.Numbers",
    "data.size=1001",
    f"train.max_steps={_STEPS}",
    "train.log_every_steps=1",
    "train.eval_every_steps=null",
    "train.samples_digest=true",
    "train.threads=1",
    "train.sample_tokens=0",
    "checkpoint.every_steps=null",
    "batch.global_size=96",
)
_EXACT = ("samples", "samples_digest", "lr", "epoch")
_NEARLY = ("loss", "grad_norm")
_TOLERANCE = 1e-6
_PATIENCE_S = 600.0
_NUM_STEPS = 20
"""Of `small_runs.BASE`."""
_NUM_LOSSES = 5


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Shrinks so many runs, each with a seed of its own."""
    person = Person(folder / "project")
    person.folder.mkdir(parents=True, exist_ok=True)
    (person.folder / "tiny.py").write_text(in_double(TINY_MODULE))
    worst, started = 0.0, time.monotonic()
    for number in range(seed, seed + trials):
        with tally.trial(f"seed {number}") as problems:
            golden, shrunk = _train_both(person, number)
            found, difference = compare(step_lines(golden), step_lines(shrunk))
            worst = max(worst, difference)
            problems += [*found[:3], *_check_sizes(shrunk)]
    return {
        "sizes": ", ".join(SIZES),
        "steps compared": str(_STEPS),
        "largest relative difference of loss and gradient norm": f"{worst:.1e}",
        "time": f"{time.monotonic() - started:.0f} s",
    }


def lost_nodes(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Trains so many runs, each of which loses a node of one rank five times; every other one has shards."""
    alone = folder / "alone"
    run_to_end(alone, _of_ranks(1, is_sharded=False), ranks=1)
    losses_of_nodes = 0
    worst = 0.0
    for number in range(seed, seed + trials):
        with tally.trial(f"seed {number}") as problems:
            numbers = random.Random(number)
            path = folder / f"run-{number}"
            sizes = _lose_nodes(path, numbers, is_sharded=number % 2 == 1)
            losses_of_nodes += len(sizes) - 1
            found, difference = compare(steps_of(alone), steps_of(path), tolerance=1e-9)
            worst = max(worst, difference)
            problems += found[:3]
            ranks = list(dict.fromkeys(line["world_size"] for line in steps_of(path)))
            print(f"seed {number}: ranks {sizes}, steps on {ranks}, largest relative difference {difference:.1e}")
    return {
        "losses and returns": str(losses_of_nodes),
        "largest relative difference of loss and gradient norm": f"{worst:.1e}",
    }


def _of_ranks(num_ranks: int, *, is_sharded: bool) -> dict[str, Any]:
    return config_of(
        batch={"global_size": 17, "accumulation": 2},
        data=PADDED,
        checkpoint={"every_steps": 2, "background": False},
        parallel={"dp_shard": num_ranks} if is_sharded and num_ranks > 1 else {},
    )


def _lose_nodes(path: Path, numbers: random.Random, *, is_sharded: bool) -> list[int]:
    """Trains a run that loses a rank at five steps; returns how many ranks each attempt had."""
    kills = sorted(numbers.sample(range(3, _NUM_STEPS), _NUM_LOSSES))
    sizes = [4]
    for attempt in range(_NUM_LOSSES + 1):
        num_ranks = sizes[-1]
        config = _of_ranks(num_ranks, is_sharded=is_sharded)
        if attempt == _NUM_LOSSES:
            run_to_end(path, config, ranks=num_ranks, attempt=attempt)
            break
        fault = {"kill_rank": numbers.randrange(num_ranks), "kill_step": kills[attempt]}
        codes, text = finish(start(path, config, ranks=num_ranks, attempt=attempt, fault=fault))
        assert -signal.SIGKILL in codes, text
        sizes.append(numbers.choice([size for size in (2, 3, 4) if size != num_ranks]))
    return sizes


def compare(
    golden: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]], *, tolerance: float = _TOLERANCE
) -> tuple[list[str], float]:
    """Returns what differs between two runs' steps, and the largest relative difference of what may round."""
    if [line["step"] for line in golden] != [line["step"] for line in other]:
        return ["the steps on record differ"], math.inf
    found, worst = [], 0.0
    for one, two in zip(golden, other, strict=True):
        found += [f"step {one['step']} {key}: {two[key]}, not {one[key]}" for key in _EXACT if one[key] != two[key]]
        for key in _NEARLY:
            difference = abs(one[key] - two[key]) / max(abs(one[key]), 1e-30)
            worst = max(worst, difference)
            if not difference <= tolerance:
                found.append(f"step {one['step']} {key}: {two[key]!r}, not {one[key]!r}")
    return found, worst


def _train_both(person: Person, seed: int) -> tuple[RunDirectory, RunDirectory]:
    words = (*_WORDS, f"seed={seed}")
    _require(person.types(*words, f"run.name=golden-{seed}", "run.processes=1", timeout_s=_PATIENCE_S))
    # Slow enough to be stopped in the middle; the golden run need not be.
    shrunk = ("model.step_s=0.02", f"+cluster={SIZES[0]}", f"run.name=shrunk-{seed}")
    run = _require(person.types(*words, *shrunk)).job_and_run[1]
    for stage, size in enumerate(SIZES[1:], start=1):
        _stop_at(run, stage * _STEPS // len(SIZES))
        _require(person.types("resume", run.run_id, f"cluster={size}"))
        print(f"seed {seed}: stopped at step {max(losses(run))}, goes on on {size}")
    wait_until_finished(run, within_s=_PATIENCE_S)
    (path,) = (person.folder / "runs" / f"golden-{seed}").iterdir()
    return RunDirectory(path), run


def _stop_at(run: RunDirectory, step: int) -> None:
    wait_until_step(run, step, within_s=_PATIENCE_S)
    attempt = ledger_lines(run)[-1]["attempt"]
    run.stop_file.touch()
    wait_for(lambda: _has_ended(run, attempt), within_s=120, what=f"the end of attempt {attempt} of {run.path}")


def _has_ended(run: RunDirectory, attempt: int) -> bool:
    entry = ledger_lines(run)[attempt]
    assert entry.get("reason") in (None, "stopped"), f"attempt {attempt}: {entry['note']}"
    return "reason" in entry and not run.lock.exists()


def _check_sizes(run: RunDirectory) -> list[str]:
    expected = [math.prod(map(int, size.split("x"))) for size in SIZES]
    found = [entry["world_size"] for entry in ledger_lines(run)]
    ranks = list(dict.fromkeys(line["world_size"] for line in step_lines(run)))
    return [] if found == expected == ranks else [f"trained on {found} ranks, steps on {ranks}, asked for {expected}"]


def _require(done: Done) -> Done:
    assert done.code == 0, f"exit code {done.code}: {done.err.strip().splitlines()[-1:]}"
    return done


def in_double(module: str) -> str:
    """Returns the module of the tiny model with data and weights in double precision."""
    double = module.replace("torch.randn(size, 8, generator=generator)", _DRAW)
    double = double.replace("torch.arange(8.0)", "torch.arange(8.0, dtype=torch.float64)")
    return double.replace("nn.Linear(16, 1))", "nn.Linear(16, 1)).double()")


_DRAW = "torch.randn(size, 8, generator=generator, dtype=torch.float64)"
