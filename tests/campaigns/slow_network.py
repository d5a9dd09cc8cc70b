"""Campaign `slow-network`: the nodes' interfaces are limited to 100 Mbit/s, and `scaling` must say that this limits.

The limit is a token bucket (tc tbf) on the interface of each node's network namespace, taken away in all cases.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.campaigns.record import Tally
from tests.support.cluster_faults import limited_links
from tests.support.command_line import TINY, WIDE_MODULE
from tests.support.slurm_runs import at_work

MBIT_PER_S = 100
NODES, PER_NODE, STEPS = 4, 1, 32
WIDTH = 700
"""Half a million parameters, 2 MB of gradients: 0.24 s at 100 Mbit/s between four ranks."""
WAYS = ("none", "bf16", "powersgd", "post_local_sgd")
_PATIENCE_S = 1500.0


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Makes the study so many times and returns how often it said what is true."""
    figures: dict[str, str] = {}
    for number in range(trials):
        # Whatever ends this early, its jobs and the limit go with it.
        with at_work(folder / str(number)) as person, limited_links(f"{MBIT_PER_S}mbit"):
            (person.folder / "tiny.py").write_text(WIDE_MODULE)
            done = person.types(
                "scaling",
                f"+cluster={NODES}x{PER_NODE}",
                *TINY,
                f"model.width={WIDTH}",
                "batch.global_size=64",
                f"ddp.comm={','.join(WAYS)}",
                f"seed={seed + number}",
                "--steps",
                str(STEPS),
                timeout_s=_PATIENCE_S,
            )
        print(done.out)
        runs = read_study(person.folder)
        tally.add(f"study {number}", what_is_wrong(done.code, done.out, runs))
        figures = figures_of(runs)
    return figures


def read_study(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the runs at the largest size and a fixed local batch by their way of exchanging."""
    paths = list(folder.glob(f"runs/*-scaling/scaling_{NODES}x{PER_NODE}.json"))
    found = json.loads(paths[0].read_text()) if paths else []
    whole = [one for one in found if one["point"]["size"]["nodes"] == NODES and "local" in one["point"]["modes"]]
    return {one["point"]["comm"]: one for one in whole}


def what_is_wrong(code: int, text: str, runs: dict[str, dict[str, Any]]) -> list[str]:
    """Returns what the report has got wrong."""
    if code != 0 or set(runs) != set(WAYS):
        return [f"exit code {code}, results of {sorted(runs)}"]
    found = [] if "the network limits" in text else ["it does not say that the network limits"]
    plain = runs["none"]
    least_s = least_exchange_s(plain)
    if not 0.8 * least_s < plain["comm_s"] < 2 * least_s:
        found.append(f"the exchange took {plain['comm_s']:.3f} s, its bytes take {least_s:.3f} s")
    for way in WAYS[1:]:
        gain = plain["step_s"] / runs[way]["step_s"]
        if gain < 1.2:
            found.append(f"{way} is {gain:.2f}x as fast as the plain exchange")
    return found


def least_exchange_s(run: dict[str, Any]) -> float:
    """Returns the seconds that what a rank sends in a step takes at the limit."""
    return 2 * (NODES - 1) / NODES * float(run["sent_bytes"]) * 8 / (MBIT_PER_S * 1e6)


def figures_of(runs: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Returns the step of each way beside what its bytes take at the limit."""
    figures = {}
    for way, one in runs.items():
        gain, least_ms = runs["none"]["step_s"] / one["step_s"], 1e3 * least_exchange_s(one)
        figures[f"step with {way}"] = f"{1e3 * one['step_s']:.0f} ms ({gain:.1f}x; its bytes take {least_ms:.0f} ms)"
    return figures
