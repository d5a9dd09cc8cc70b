"""A sweep from Enter to its job id, against composing as many Hydra configurations and hydra-submitit-launcher.

    python -m tests.benchmarks.bench_sweep_submit --points 1000 [--peer PYTHON]

Three things, one after the other, in processes of their own and by the clock:

- `hydra.compose` of the shipped configuration at every point of the sweep, and nothing else;
- the toolkit's own command until it returns: composed, planned, every run directory written, submitted (held);
- with `--peer`, an interpreter with hydra-submitit-launcher: an empty task over the same points, of which its launcher
  makes an array as well. It returns when all elements have ended, so what is timed is the time until its job is in the
  queue; fewer points (`--peer-points`), since each is a pickle that it writes and a task that then runs.

The jobs are cancelled at the end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time

from tests.benchmarks.bench_start_time import in_a_project
from tests.support.command_line import REPOSITORY, TINY, Person
from tests.support.options import read_options

_CONF = str(REPOSITORY / "conf")
_COMPOSE = """
import itertools, sys, time
from hydra import compose, initialize_config_dir
conf, count = sys.argv[1], int(sys.argv[2])
started = time.perf_counter()
with initialize_config_dir(version_base=None, config_dir=conf):
    for seed in range(count):
        compose("config", overrides=["optim.lr=0.001", f"seed={seed}"])
print(time.perf_counter() - started)
"""
_PEER_TASK = """
import hydra

@hydra.main(version_base=None, config_path=CONF, config_name="config")
def main(cfg):
    pass

main()
"""


def main() -> None:
    """Prints seconds and ratios."""
    asked = read_options(points=1000, peer=str, peer_points=100)
    with in_a_project() as person:
        # What Hydra takes to compose so many configurations, its import not counted.
        compose_s = float(person.runs(person.python, "-c", _COMPOSE, _CONF, str(asked.points), timeout_s=600).out)
        print(f"sweep of {asked.points} runs: hydra.compose of each {compose_s:.1f} s", flush=True)
        if shutil.which("sbatch") is None:
            print("             not submitted, there is no sbatch here")
            return
        report_ours(person, asked.points, compose_s)
        if asked.peer:
            report_peer(asked.peer, person, asked.peer_points, asked.points)


def report_ours(person: Person, points: int, compose_s: float) -> None:
    """Submits our sweep twice and prints how long that takes."""
    words = ("-m", "+cluster=1x8", *TINY, "optim.lr=1e-3", f"seed=range({points})", "cluster.sbatch.hold=true")
    first_s, jobs = timed_sweep(person, words)
    print(
        f"             Enter to the end of the submission {first_s:.1f} s = {first_s / compose_s:.2f} x (promise: 1.5)"
    )
    print(f"             {len(jobs)} sbatch, one per array; {1e3 * first_s / points:.1f} ms a run")
    again_s, none = timed_sweep(person, words)
    subprocess.run(["scancel", *jobs], check=True)
    assert not none, f"submitted again: {none}"
    print(f"             the same words again, nothing missing: {again_s:.1f} s")


def timed_sweep(person: Person, words: tuple[str, ...]) -> tuple[float, list[str]]:
    """Returns the seconds of a command line and the arrays that it submitted."""
    started = time.perf_counter()
    done = person.types(*words, timeout_s=600)
    took_s = time.perf_counter() - started
    assert done.code == 0, done.err
    return took_s, [line.split()[0] for line in done.out.splitlines()]


def report_peer(python: str, person: Person, points: int, our_points: int) -> None:
    """Lets hydra-submitit-launcher submit the same points and prints when its array is in the queue."""
    task = person.folder / "peer.py"
    task.write_text(_PEER_TASK.replace("CONF", repr(_CONF)))
    words = ["-m", "hydra/launcher=submitit_slurm", "hydra.launcher.name=bench-peer", "optim.lr=1e-3"]
    words += ["+hydra.launcher.additional_parameters={hold:true}", "hydra.launcher.mem_gb=null"]
    started = time.perf_counter()
    process = subprocess.Popen(
        [python, str(task), *words, f"seed=range({points})"],
        cwd=person.folder,
        env={**os.environ, "PYTHONPATH": ""},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not person.runs("squeue", "-h", "-n", "bench-peer").out.strip() and process.poll() is None:
            time.sleep(0.2)
        took_s = time.perf_counter() - started
    finally:
        process.kill()
        subprocess.run(["scancel", "--name=bench-peer"], check=False)
    _, err = process.communicate()
    if process.returncode not in (None, -9):
        print(f"             hydra-submitit-launcher did not submit: {err.strip().splitlines()[-1:]}")
        return
    print(
        f"             hydra-submitit-launcher: {points} runs in the queue after {took_s:.1f} s "
        f"({1e3 * took_s / points:.1f} ms a run, {our_points * took_s / points:.1f} s for {our_points}); "
        "then it holds the terminal until all have ended"
    )


if __name__ == "__main__":
    main()
