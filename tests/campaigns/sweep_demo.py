"""A sweep of 24 runs in which one configuration crashes and one run is preempted; then the crash is mended.

    python -m tests.campaigns.sweep_demo [--folder DIR]

On the one-machine cluster (`python -m slurm_train devcluster up --nodes 4 --gpus 8`): 22 runs of one rank and two of
2 nodes x 2 ranks, each a file in a folder of the person's own. Looks at what `status`, `collate` and `report` say, at
Slurm's own count of restarts, and at the number of jobs that `resume --only failed` submits after the code was mended.
Ends with 1 and says what is wrong; the page to look at is named last.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.sweep import Element, SweepDirectory, read_table
from tests.campaigns.arrays import restarts
from tests.support.command_line import TINY, Person, new_project
from tests.support.slurm_runs import losses, wait_until_step
from tests.support.waiting import wait_for

_SMALL, _WIDE, _STEPS = 22, 2, 40
_PATIENCE_S = 400.0
_LAB = """
import tiny

class Lab(tiny.Tiny):
    def __init__(self, temperature: float = 1.0):
        super().__init__(step_s=0.5)
        self.temperature = temperature
    def forward(self, x):
        if {check}:
            raise ValueError(f"a temperature of {{self.temperature}} cannot be divided by")
        return super().forward(x) / max(self.temperature, 0.1)
"""
_BROKEN, _MENDED = _LAB.format(check="self.temperature <= 0"), _LAB.format(check="self.temperature < 0")
_CRASHING, _GPUS_PER_NODE = 6, 8
_WORDS = (
    "-m",
    "--config-dir=my_conf",
    "+experiment=glob(trial_*)",
    *TINY[1:],
    "model._target_=lab.Lab",
    f"train.max_steps={_STEPS}",
    "train.threads=1",
    "checkpoint.every_steps=10",
    "run.name=day",
)


def main() -> int:
    """Runs the sweep's day and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=None, help="where the project is made; default: a new one")
    folder = parser.parse_args().folder or Path(tempfile.mkdtemp(prefix="slurm_train-sweep-"))
    person = Person(new_project(folder))
    write_trials(folder / "my_conf" / "experiment")
    (folder / "lab.py").write_text(_BROKEN)
    began_s = time.monotonic()
    done = person.types(*_WORDS)
    jobs = [line.split()[0] for line in done.out.splitlines()]
    if done.code or len(jobs) != 2:
        say(f"WRONG: 2 arrays were expected, code {done.code}\n{done.out}{done.err}")
        return 1
    sweep = SweepDirectory(Path(done.out.split()[1]))
    elements = read_table(sweep)
    say(f"{len(elements)} runs in {len(jobs)} arrays after {time.monotonic() - began_s:.1f} s; {sweep.path}")
    try:
        victim = preempt_one(person, elements)
        problems = [*watch(person, sweep, elements, jobs, victim), *mend(person, sweep, elements, jobs, victim)]
    finally:
        subprocess.run(["scancel", "--quiet", *jobs], check=False)
    page = person.types("report", sweep.sweep_id, "--png", "plots")
    say(f"{time.monotonic() - began_s:.0f} s in all; report: {page.out.strip()}")
    for problem in problems:
        say(f"WRONG: {problem}")
    return 1 if problems or page.code else 0


def write_trials(folder: Path) -> None:
    """Writes one file per run: 22 of one rank, of which one crashes, and two of 2 nodes x 2 ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(_SMALL + _WIDE):
        shape = "{nodes: 1, gpus_per_node: 1}" if number < _SMALL else "{nodes: 2, gpus_per_node: 2}"
        temperature = 0.0 if number == _CRASHING else 1.0 + number / 10
        (folder / f"trial_{number:02d}.yaml").write_text(
            "# @package _global_\ndefaults:\n  - /cluster: base\n"
            f"cluster: {shape}\nseed: {number}\nmodel:\n  temperature: {temperature}\n"
        )


def preempt_one(person: Person, elements: list[Element]) -> int:
    """Submits an urgent job for one GPU more than is free on a small run's node; returns which run had to go."""
    run = elements[_SMALL - 1].run
    wait_until_step(run, 5, within_s=_PATIENCE_S)
    node = str(read_ledger(run)[-1]["nodes"][0])
    shown = subprocess.run(["scontrol", "show", "node", node], capture_output=True, text=True, check=True).stdout
    used = re.search(r"AllocTRES=.*gres/gpu=(\d+)", shown)
    gpus = _GPUS_PER_NODE - int(used[1] if used else 0) + 1
    say(f"an urgent job wants {gpus} GPUs of {node}, one more than are free")
    person.runs(
        "sbatch", "--qos=urgent", f"--nodelist={node}", f"--gres=gpu:{gpus}", "--output=/dev/null", "--wrap=true"
    )
    wait_for(lambda: begun_again(elements), within_s=_PATIENCE_S, what="the second attempt of some run")
    return begun_again(elements)[0]


def begun_again(elements: list[Element]) -> list[int]:
    """Returns which runs, the crashing one aside, have had more than one attempt."""
    attempts = {element.index: len(read_ledger(element.run)) for element in elements}
    return [index for index, count in attempts.items() if count > 1 and index != _CRASHING]


def watch(
    person: Person, sweep: SweepDirectory, elements: list[Element], jobs: list[str], victim: int
) -> Iterator[str]:
    """Waits for the end of all runs and yields what is not as it should be."""
    wait_for(lambda: all(map(is_over, elements)), within_s=_PATIENCE_S, what="the end of all runs")
    print(person.types("status", sweep.sweep_id).out, flush=True)
    rows = json.loads(person.types("status", sweep.sweep_id, "--json").out)
    for element in elements:
        row, is_crash = rows[element.index], element.index == _CRASHING
        if row["state"] != ("failed" if is_crash else "finished"):
            yield f"run {element.index} is {row['state']}"
        if is_crash and "a temperature of 0.0 cannot be divided by" not in json.dumps(row):
            yield "the table does not name the crash"
        if not is_crash and sorted(losses(element.run)) != list(range(1, _STEPS + 1)):
            yield f"run {element.index} has not every step"
    reasons = [entry.get("reason") for entry in read_ledger(elements[victim].run)]
    if reasons != ["preempted", "done"] or begun_again(elements) != [victim]:
        yield f"the preempted run's attempts ended with {reasons}; runs {begun_again(elements)} began again"
    # The one that crashes is tried again in its allocation, once more without that node, and then it ends.
    counts = {f"{job}_{index}": count for job in jobs for index, count in restarts(job).items()}
    restarted = {element.index: counts[str(element.job)] for element in elements if counts[str(element.job)]}
    if restarted != {victim: 1, _CRASHING: 1}:
        yield f"Slurm counts restarts {restarted}, expected one of run {victim} and one of run {_CRASHING}"


def mend(person: Person, sweep: SweepDirectory, elements: list[Element], jobs: list[str], victim: int) -> Iterator[str]:
    """Mends the code, resumes what failed, and yields what is not as it should be."""
    (person.folder / "lab.py").write_text(_MENDED)
    say("the code is mended; resume --only failed --accept code")
    done = person.types("resume", sweep.sweep_id, "--only", "failed", "--accept", "code")
    print(done.err, end="", flush=True)
    new = [line.split()[0] for line in done.out.splitlines()]
    if len(new) != 1:
        yield f"resume submitted {new}\n{done.err}"
        return
    jobs += new
    if len(restarts(new[0]) or {0: 0}) != 1:
        yield f"the job {new[0]} has several elements"
    wait_for(elements[_CRASHING].run.result.exists, within_s=_PATIENCE_S, what="the mended run's end")
    text = person.types("collate", sweep.sweep_id, "--format", "csv").out
    rows = list(csv.DictReader(io.StringIO(text)))
    states = [row["state"] for row in rows]
    if states != ["finished"] * len(elements):
        yield f"collate says {states}"
    # Three crashes without a step between them are enough, and then the mended one.
    expected = {_CRASHING: "4", victim: "2"}
    attempts = {number: row["attempts"] for number, row in enumerate(rows) if row["attempts"] != "1"}
    if attempts != expected:
        yield f"collate counts attempts {attempts}, expected {expected}"
    yield from check_losses(rows, elements)


def check_losses(rows: list[dict[str, Any]], elements: list[Element]) -> Iterator[str]:
    """Yields the rows whose last loss is not the one in the run's own metrics."""
    for row, element in zip(rows, elements, strict=True):
        seen = losses(element.run)
        if abs(float(row["last_loss"]) - seen[max(seen)]) > 1e-4 * abs(seen[max(seen)]):
            yield f"collate says loss {row['last_loss']} of run {element.index}, its metrics {seen[max(seen)]}"


def is_over(element: Element) -> bool:
    """Whether a run has ended and comes back no more."""
    ledger = read_ledger(element.run)
    return bool(ledger) and ledger[-1].get("action") in ("finish", "stop")


def say(text: str) -> None:
    """Prints a line at once."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
