"""Time from Enter to job id, against a bare `sbatch` plus what importing hydra and submitit costs.

    python -m tests.benchmarks.bench_submit_time --rounds 15

Each round times, one after the other: an interpreter that imports hydra and submitit and ends; a bare `sbatch` of the
script that the toolkit would submit; the toolkit's own command until its job id is on stdout. All jobs are held and
cancelled at the end. The floor of a round is the sum of the first two.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from statistics import median

from tests.benchmarks.bench_start_time import in_a_project
from tests.support.command_line import TINY, Person
from tests.support.options import read_options

_IMPORTS = (sys.executable, "-c", "import hydra, submitit")


def main() -> None:
    """Prints medians and the ratio."""
    rounds = read_options(rounds=15).rounds
    if shutil.which("sbatch") is None:
        print("submit time: not measured, there is no sbatch here")
        return
    with in_a_project() as person:
        report([one_round(person, number) for number in range(rounds + 1)][1:])


def one_round(person: Person, number: int) -> tuple[float, float, float]:
    """Returns the seconds of imports, bare sbatch and toolkit; their jobs are cancelled."""
    env = person.environment()
    started = time.perf_counter()
    subprocess.run(_IMPORTS, env=env, check=True)
    imports_s = time.perf_counter() - started
    words = [sys.executable, "-m", "slurm_train", "+cluster=2x4", *TINY, "cluster.sbatch.hold=true"]
    started = time.perf_counter()
    process = subprocess.Popen(
        [*words, f"run.name=bench{number}"],
        cwd=person.folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    ours_s = time.perf_counter() - started
    process.wait()
    job, path = line.split()
    bare = ["sbatch", "--parsable", f"{path}/submit.sh"]
    started = time.perf_counter()
    bare_job = subprocess.run(bare, env=env, capture_output=True, text=True, check=True).stdout.strip()
    sbatch_s = time.perf_counter() - started
    subprocess.run(["scancel", job, bare_job], check=True)
    return imports_s, sbatch_s, ours_s


def report(rounds: list[tuple[float, float, float]]) -> None:
    """Prints medians and the ratio round by round."""
    imports_s, sbatch_s, ours_s = (median(column) for column in zip(*rounds, strict=True))
    ratio = median(ours / (imports + sbatch) for imports, sbatch, ours in rounds)
    print(f"submit time: import hydra, submitit {1e3 * imports_s:.0f} ms, bare sbatch {1e3 * sbatch_s:.0f} ms")
    print(f"             Enter to job id {1e3 * ours_s:.0f} ms = {ratio:.2f} x their sum (promise: 2.0, and 600 ms)")


if __name__ == "__main__":
    os.environ.pop("SLURM_JOB_ID", None)
    main()
