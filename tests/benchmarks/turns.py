"""Several loops measured in turns by gloo ranks of this machine, so that its noise hits all of them alike.

A benchmark module calls `main`; it is started again for each rank, and gives there its loops for one case.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

RANKS = 2
Turn = TypeVar("Turn")
Facts = dict[str, dict[str, float]]
"""Of each loop, e.g. {"bare": {"ms": 1.2, "ratio": 1.0}}."""


def main(
    module: str,
    *,
    doc: str | None,
    rounds: int,
    cases: Sequence[str],
    measure: Callable[[str, int], Facts],
    show: Callable[[dict[str, Facts]], None],
) -> None:
    """Runs `measure(case, rounds)` on two ranks for each case, and shows what their rank 0 returned.

    Args:
        module: the benchmark's, e.g. "tests.benchmarks.bench_lengths".
        doc: its docstring, for --help.
        rounds: the default.
        cases: their names.
        measure: called in each rank, with a process group open; ends with what is the same on all ranks.
        show: prints the results by case.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--cases", nargs="*", choices=cases, default=list(cases))
    parser.add_argument("--out", type=Path, help="where to keep the figures as JSON")
    asked = parser.parse_args()
    if "BENCH_SCRATCH" in os.environ:
        _become_rank(lambda: measure(asked.cases[0], asked.rounds), asked.out)
    results = {case: _run_ranks(module, case, asked.rounds) for case in asked.cases}
    show(results)
    if asked.out:
        asked.out.write_text(json.dumps(results, indent=1) + "\n")


def _run_ranks(module: str, case: str, rounds: int) -> Facts:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "out.json")
        words = [sys.executable, "-m", module, "--cases", case, "--rounds", str(rounds), "--out", str(out)]
        env = {**os.environ, "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "GROUP_RANK": "0"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "BENCH_SCRATCH": scratch, "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(words, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(RANKS)
        ]
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
            "ms": 1e3 * statistics.median(wall for wall, _ in own),
            "cpu_ms": 1e3 * statistics.median(cpu for _, cpu in own),
            "ratio": statistics.median(a[0] / b[0] for a, b in zip(own, times[base], strict=True)),
            "cpu_ratio": statistics.median(a[1] / b[1] for a, b in zip(own, times[base], strict=True)),
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
    from slurm_train.metrics import Display
    from slurm_train.rundir.heartbeat import Limits
    from slurm_train.rundir.timing import Spent
    from slurm_train.train.build import build_trainer
    from slurm_train.train.context import Parts
    from slurm_train.train.optimizer import build_optimizer
    from tests.support.ranks import make_rank

    config = RunConfig(train=TrainSection(max_steps=10**6), checkpoint=CheckpointSection(every_steps=None), **sections)
    plan, number = BatchPlan(local_size=local_size, ranks=RANKS, accumulation=1), int(os.environ["RANK"])
    rank = make_rank(Path(os.environ["BENCH_SCRATCH"]), config, plan=plan, rank=number, ranks=RANKS)
    rank.heartbeat.start(rank.run, 0, rank=number, host="here", limits=Limits(600, 300))
    optimizer = build_optimizer(model, optim=config.optim)
    parts = Parts(
        rank=rank, model=model, optimizer=optimizer, train_data=source, heldout=None, flops_per_token=(0.0, 0.0)
    )
    display = Display(io.StringIO(), max_steps=10**6, every_s=0.5) if number == 0 else None
    return build_trainer(parts, display=display, spent=Spent(begin_unix_s=time.time())), rank.heartbeat
