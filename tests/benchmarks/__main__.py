"""All benchmarks, one after the other: `python -m tests.benchmarks`, or `make bench`.

Each prints ratios between things measured side by side in the same run. They want the machine for themselves.
"""

from __future__ import annotations

import subprocess
import sys

from slurm_train.tools.devcluster.cluster import bring_up, cluster_status, missing_here, tear_down
from slurm_train.tools.devcluster.plan import DEFAULT_STATE_DIR, ClusterPlan

_WITHOUT_SLURM = (
    "bench_step_time",
    "bench_lengths",
    "bench_stop_agreement",
    "bench_checkpoint_stall",
    "bench_sampler",
    "bench_reading",
    "bench_memory",
    "bench_session",
)
_BENCHMARKS = (*_WITHOUT_SLURM, "bench_submit_time", "bench_sweep_submit", "bench_start_time", "bench_preflight")


def main() -> None:
    """Runs every benchmark, on a cluster of its own where none is up."""
    missing = missing_here()
    own_cluster = not missing and cluster_status(DEFAULT_STATE_DIR) is None
    if missing:
        print(f"no Slurm on this machine ({missing}): the submission and the start of a job are not measured")
    if own_cluster:
        bring_up(ClusterPlan(nodes=4, gpus=8), say=print)
    try:
        for name in _BENCHMARKS if not missing else _WITHOUT_SLURM:
            subprocess.run([sys.executable, "-m", f"tests.benchmarks.{name}"], check=True)
    finally:
        if own_cluster:
            tear_down(DEFAULT_STATE_DIR)


if __name__ == "__main__":
    main()
