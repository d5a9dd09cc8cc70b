"""What share of the time a large job trains: computed from what bench_scale measures and from what is assumed here.

    python -m tests.benchmarks.bench_scale --json now.json
    python -m tests.benchmarks.time_share now.json [--queue-s 600] [--failure-every-h 3.1] ...

Failures come with the number of GPUs: one per `failure-every-h` hours at 16,384 (Llama 3, arXiv 2407.21783, section
3.3.4). Each costs its detection, the wait for nodes, the start of the ranks, the look at the checkpoint and the reading
of it, and the steps since the save. The time between two saves is Young's optimum, sqrt(2 x stall x time between
failures), but at least a minute, and a minute for saves to the nodes' own disks. What remains of the time trains:

    share = (1 - stall / interval) / (1 + cost of a failure / time between failures)

Measured are the seconds of the ranks' start and of the look at the checkpoint; the rest are options, with what is
assumed for them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks.bench_scale import PARTS, Cost, estimated_s
from tests.support.options import read_options

_SIZES = (1024, 16384)
_LARGEST = 16384


class Site(NamedTuple):
    """What is assumed; each is an option of the command line."""

    failure_every_h: float = 3.1
    """Of 16,384 GPUs."""
    lost_nodes: float = 0.75
    """Share of the failures that take a node along (hardware, 78 % in Llama 3); the others kill a rank."""
    detect_s: float = 60.0
    """From a failure until all ranks have ended."""
    queue_s: float = 600.0
    """Until Slurm has a node instead of a lost one."""
    launch_s: float = 5.0
    """Of srun."""
    import_s: float = 20.0
    """Python's and torch's processor time, and CUDA's start."""
    warmup_s: float = 30.0
    """The first steps: NCCL connects, the compiler reads its cache."""
    bytes_per_gpu: float = 0.4e9
    """Of a checkpoint: 405e9 parameters x 16 bytes / 16,384."""
    shared_bytes_per_s: float = 1e12
    """Of the shared file system, for all nodes together."""
    stall_s: float = 2.0
    """Seconds for which a save holds up training."""


class Items(NamedTuple):
    """What is used."""

    stage: bool = False
    spares: bool = False
    copies: bool = False
    """Saves every minute; with spare nodes also on the next node."""
    warm: bool = False


_NAMES = {
    "stage": "`cluster.stage_python`",
    "spares": "`cluster.spare_nodes`",
    "copies": "`checkpoint.local_dir`",
    "warm": "`requeue.warm_ranks`",
}


def seconds_of(results: Mapping[str, Any], num_gpus: int) -> dict[str, float]:
    """Returns the estimate of each part that was measured."""
    parts = {part.name: part for part in PARTS}
    found = {}
    for name, row in results.items():
        costs = {int(size): Cost(**cost) for size, cost in row["costs"].items()}
        found[name] = estimated_s(parts[name], costs, op_s=1e-3, server_ops=30000.0, num_ranks=num_gpus)
    return found


def share(site: Site, items: Items, parts: Mapping[str, float], num_gpus: int) -> tuple[float, float]:
    """Returns the share of the time that trains, and the seconds that a failure costs."""
    between_s = site.failure_every_h * 3600.0 * _LARGEST / num_gpus
    imports_s = site.import_s + parts["starting_staged" if items.stage else "starting"]
    # Ranks that wait are tied to their nodes: after a lost one all start cold.
    launch_s = (site.launch_s + imports_s) * (site.lost_nodes if items.warm else 1.0)
    start_s = launch_s + parts["start_of_all"] + site.warmup_s
    look_s = parts["restoring"] + parts["verifying"] + parts["loading"]
    whole = site.bytes_per_gpu * num_gpus
    # Verified and loaded. What is on the nodes is copied into the run directory, and loaded from the nodes.
    is_there = items.copies * (1.0 if items.spares else 1 - site.lost_nodes)
    read_s = (2 - is_there) * whole / site.shared_bytes_per_s
    young_s = max(60.0, math.sqrt(2 * site.stall_s * between_s))
    lost_s, stalled = young_s / 2, site.stall_s / young_s
    if items.copies:
        # A local save stalls for the copy to host memory alone, and saves to the run directory go on as before. Without
        # spare nodes there is no copy on the next node.
        lost_s = 30.0 if items.spares else site.lost_nodes * lost_s + (1 - site.lost_nodes) * 30.0
        stalled += 0.1 / 60.0
    wait_s = site.lost_nodes * (0.0 if items.spares else site.queue_s)
    cost_s = site.detect_s + wait_s + start_s + look_s + read_s + lost_s
    return (1 - stalled) / (1 + cost_s / between_s), cost_s


def table(site: Site, results: Mapping[str, Any]) -> str:
    """Returns the shares in Markdown: nothing, each item alone, all of them, and all but each."""
    every = Items(*(True,) * len(_NAMES))
    rows = [("none of them", Items())]
    rows += [(f"{words} alone", Items(**{name: True})) for name, words in _NAMES.items()]
    rows += [(f"all but {words}", every._replace(**{name: False})) for name, words in _NAMES.items()]
    rows.append(("all of them", every))
    head = "".join(f" at {size:,}: share | cost of a failure |" for size in _SIZES)
    lines = [f"| used |{head}", "|---|" + "--:|--:|" * len(_SIZES)]
    for name, items in rows:
        cells = ""
        for size in _SIZES:
            part, cost_s = share(site, items, seconds_of(results, size), size)
            cells += f" {100 * part:.2f} % | {cost_s:,.0f} s |"
        lines.append(f"| {name} |{cells}")
    return "\n".join(lines)


def main() -> None:
    """Prints the table."""
    asked = vars(read_options("results", **Site()._asdict()))
    results = json.loads(Path(asked.pop("results")).read_text())
    print(table(Site(**asked), results))


if __name__ == "__main__":
    main()
