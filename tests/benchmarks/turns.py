"""Several loops measured in turns by gloo ranks of this machine, so that its noise hits all of them alike.

A benchmark module calls `main`; it is started again for each rank, and gives there its loops for one case.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from tests.support.options import read_options
from tests.support.ports import rank_environments

RANKS = 2
Turn = TypeVar("Turn")
Facts = dict[str, dict[str, float]]
"""Of each loop, e.g. {"bare": {"ms": 1.2, "ratio": 1.0}}."""


def main(
    measure: Callable[[str, int], Facts],
    show: Callable[[dict[str, Facts]], None],
    *,
    rounds: int,
    cases: Iterable[str],
) -> None:
    """Runs `measure(case, rounds)` on two ranks for each case, and shows what their rank 0 returned.

    Args:
        measure: called in each rank, with a process group open; ends with what is the same on all ranks.
        show: prints the results by case.
        rounds: the default.
        cases: their names.
    """
    asked = read_options(rounds=rounds, cases=tuple(cases), out=Path)
    if "BENCH_SCRATCH" in os.environ:
        _become_rank(lambda: measure(asked.cases[0], asked.rounds), asked.out)
    results = {case: _run_ranks(case, asked.rounds) for case in asked.cases}
    show(results)
    if asked.out:
        asked.out.write_text(json.dumps(results, indent=1) + "\n")


def _run_ranks(case: str, rounds: int) -> Facts:
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "out.json")
        module: Any = sys.modules["__main__"].__spec__
        words = [sys.executable, "-m", module.name, "--cases", case, "--rounds", str(rounds), "--out", str(out)]
        base = {**os.environ, "BENCH_SCRATCH": scratch, "OMP_NUM_THREADS": "1"}
        ranks = [subprocess.Popen(words, env=env) for env in rank_environments(RANKS, base)]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit("a rank failed")
        found: Facts = json.loads(out.read_text())
        return found


def _become_rank(measure: Callable[[], Facts], out: Path) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    facts = measure()
    if dist.get_rank() == 0:
        out.write_text(json.dumps(facts))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def in_turns(loops: Mapping[str, Callable[[], Turn]], *, rounds: int) -> dict[str, list[Turn]]:
    """Runs every loop once a round, each round begun by another one; returns what each gave, round by round."""
    import torch.distributed as dist

    given: dict[str, list[Turn]] = {name: [] for name in loops}
    names = list(loops)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            given[name].append(loops[name]())
    return given


def timed(run: Callable[[int], object], steps: int) -> tuple[float, float]:
    """Returns wall and CPU seconds per step."""
    wall, cpu = time.perf_counter(), time.process_time()
    run(steps)
    return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps


def summary(times: Mapping[str, list[tuple[float, float]]], *, base: str) -> Facts:
    """Returns medians per step, and medians of the ratios to the base loop of the same round."""
    return {
        name: {
            "ms": 1e3 * median(wall for wall, _ in own),
            "cpu_ms": 1e3 * median(cpu for _, cpu in own),
            "ratio": median(a[0] / b[0] for a, b in zip(own, times[base], strict=True)),
            "cpu_ratio": median(a[1] / b[1] for a, b in zip(own, times[base], strict=True)),
        }
        for name, own in times.items()
    }


def show_table(results: Mapping[str, Facts], columns: Mapping[str, str]) -> None:
    """Prints a line per case and loop; `columns` has a format for each figure, e.g. {"ms": ".3f"}."""
    print(f"{'case':<14}{'loop':<26}" + "".join(f"{name:>14}" for name in columns))
    for case, loops in results.items():
        for name, facts in loops.items():
            print(f"{case:<14}{name:<26}" + "".join(f"{facts[key]:>14{how}}" for key, how in columns.items()))


def our_loop(model: Any, source: Any, *, local_size: int, **sections: Any) -> tuple[Any, Any]:
    """Returns the toolkit's loop with everything on (metrics, display, heartbeat, stop flag), and the heartbeat.

    Args:
        model: what is trained.
        source: of samples.
        local_size: samples of a rank's batch.
        **sections: of the configuration, besides endless steps and no checkpoints.
    """
    from slurm_train.config.batch import BatchPlan
    from slurm_train.config.schema import CheckpointSection, RunConfig, TrainSection
    from slurm_train.metrics import SILENT, Display
    from slurm_train.rundir.heartbeat import Limits
    from slurm_train.rundir.timing import Spent
    from slurm_train.train.build import build_trainer
    from slurm_train.train.optimizer import build_optimizer
    from tests.support.ranks import make_parts, make_rank

    train = TrainSection(max_steps=10**6, eval_every_steps=None, sample_tokens=0)
    config = RunConfig(train=train, checkpoint=CheckpointSection(every_steps=None), **sections)
    plan, number = BatchPlan.equal(local_size=local_size, ranks=RANKS, accumulation=1), int(os.environ["RANK"])
    display = Display(io.StringIO(), max_steps=10**6, every_s=0.5) if number == 0 else SILENT
    folder = Path(os.environ["BENCH_SCRATCH"])
    rank = make_rank(folder, config, plan=plan, rank=number, ranks=RANKS, display=display)
    rank.heartbeat.start(rank.run, 0, rank=number, host="here", limits=Limits(600, 300))
    parts = make_parts(rank, model, build_optimizer(model, optim=config.optim), source)
    spent = Spent(begin_unix_s=time.time())
    return build_trainer(parts, callbacks={}, spent=spent), rank.heartbeat
