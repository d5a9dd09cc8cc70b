"""What people type, on the Slurm of every Debian release: each flow once, on a one-machine cluster in its own root.

`run` builds and removes a cluster; the flows are typed inside, by this module as a program:
`python -m tests.support.devcluster exec --slurm 24.11 -- python -m tests.campaigns.versions [FLOW ...]`.
`faults` runs other campaigns there, with fewer trials.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import IO, Any, NamedTuple

from slurm_train.errors import SlurmTrainError
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.sweep import SweepDirectory, read_table
from slurm_train.tools.devcluster.cluster import crash_node, start_node
from slurm_train.tools.devcluster.plan import DEFAULT_STATE_DIR
from tests.campaigns.arrays import restarts
from tests.campaigns.record import Tally, first_line
from tests.support.cluster_faults import start_urgent_job
from tests.support.command_line import REPOSITORY, TINY, Done, Person
from tests.support.ledgers import ledger_lines
from tests.support.process_faults import kill, rank_pid
from tests.support.slurm_runs import (
    all_logs,
    at_work,
    command,
    job_state,
    losses,
    wait_for_state,
    wait_until_ended,
    wait_until_finished,
    wait_until_step,
)
from tests.support.waiting import wait_for

PATIENCE_S = 400.0
FAILURES = (AssertionError, OSError, ValueError, subprocess.SubprocessError, SlurmTrainError)
_DEVCLUSTER = (sys.executable, "-m", "tests.support.devcluster")
_SIZE = ("--nodes", "4", "--gpus", "8")
_NODES, _AT_ONCE = ("node1", "node2", "node3", "node4"), 2
_WORDS = (*TINY, "train.threads=1", "checkpoint.every_steps=10")
_SCRIPT = """
import os
import torch.distributed as dist
dist.init_process_group("gloo")
print(f"rank {dist.get_rank()} of {dist.get_world_size()} on {os.environ['SLURMD_NODENAME']}")
dist.destroy_process_group()
"""


class Place(NamedTuple):
    """Somebody who types, and the nodes that no other flow uses at this time."""

    person: Person
    free: Queue[str]

    def types(self, *words: str, says: str = "", code: int = 0, timeout_s: float = 120.0) -> Done:
        """Types words that must end with this exit code and print this."""
        done = self.person.types(*words, timeout_s=timeout_s)
        said = done.out + done.err
        assert done.code == code and says in said, f"exit code {done.code}, not {code} with {says!r}: {said}"
        return done

    @contextmanager
    def nodes(self, count: int) -> Iterator[list[str]]:
        """Takes so many nodes and gives them back at the end."""
        taken = [self.free.get(timeout=2 * PATIENCE_S) for _ in range(count)]
        try:
            yield taken
        finally:
            for node in taken:
                self.free.put(node)

    @contextmanager
    def run(self, name: str, *words: str, count: int = 2, steps: int = 12, step_s: float = 0.0) -> Iterator[_Run]:
        """Submits a run with one rank on each of some nodes; `words` may say otherwise."""
        with self.nodes(count) as nodes:
            place = (f"+cluster={count}x1", f"cluster.nodelist={','.join(nodes)}", f"run.name={name}")
            pace = (f"train.max_steps={steps}", f"model.step_s={step_s}")
            job, run = self.person.types(*place, *_WORDS, *pace, *words).job_and_run
            try:
                yield _Run(job, run, nodes, steps)
            finally:
                command("scancel", "--quiet", job, must=False)


class _Run(NamedTuple):
    job: str
    run: RunDirectory
    nodes: list[str]
    steps: int

    def at_step(self, step: int) -> RunDirectory:
        wait_until_step(self.run, step, within_s=PATIENCE_S)
        return self.run

    def ends_as(self, *reasons: str) -> dict[str, Any]:
        """Returns the result when it is there, and checks how each attempt has ended and that no step is missing.

        A node that is back may get the end of the lost job's step late, and end the next attempt's step of that number.
        """
        result = wait_until_finished(self.run, within_s=PATIENCE_S)
        found = [entry["reason"] for entry in wait_until_ended(self.run)]
        if found in (["node_failure", "failed", "done"], ["node_failure", "signalled", "done"]):
            del found[1]
        assert found == list(reasons), f"ended as {found}, not {list(reasons)}\n{all_logs(self.run)}"
        assert sorted(losses(self.run)) == list(range(1, self.steps + 1)), "steps are missing"
        return result


def _plan(place: Place) -> None:
    place.types("plan", "+cluster=2x1", *_WORDS, says="would take it")
    for words, key in (
        ("+cluster=2x1 cluster.partition=nowhere", "set cluster.partition"),
        ("+cluster=2x1 cluster.qos=nowhere", "set cluster.qos"),
        ("+cluster=2x1 cluster.account=nowhere", "set cluster.account"),
        ("+cluster=9x1", "lower cluster.nodes"),
        ("+cluster=2x1 cluster.time_limit_min=9999", "cluster.time_limit_min"),
    ):
        place.types(*words.split(), *_WORDS, "batch.global_size=18", says=key, code=2)


def _submit(place: Place) -> None:
    with place.run("submitted") as one:
        one.ends_as("done")
        for text in ("finished", one.job):
            place.types("status", one.run.name, says=text)
        place.types("logs", one.run.name, says="finished step 12")


def _preempt(place: Place) -> None:
    with place.run("preempted", "cluster.sbatch.exclusive=true", steps=60, step_s=0.3) as one:
        one.at_step(4)
        start_urgent_job(one.nodes)
        one.ends_as("preempted", "done")
        first, second = ledger_lines(one.run)
        assert first["last_step"] == second["first_step"], "a step was done again"


def _time_limit(place: Place) -> None:
    with place.run("limited", "cluster.time_limit_min=2", steps=600, step_s=0.3) as one:
        wait_for(lambda: len(ledger_lines(one.run)) > 1, within_s=PATIENCE_S, what="a second attempt")
        first = ledger_lines(one.run)[0]
        assert (first["reason"], first["action"]) == ("time_limit", "requeue"), first


def _scancel(place: Place) -> None:
    with place.run("scancelled", steps=60, step_s=0.3) as one:
        one.at_step(4)
        command("scancel", one.job)
        wait_for_state(one.job, "CANCELLED", within_s=60)
        # On a busy machine the supervisor may be killed (KillWait) before it has written the end.
        place.types("status", one.run.name, says="cancelled")


def _cancel_and_resume(place: Place) -> None:
    with place.run("cancelled", steps=60, step_s=0.3) as one:
        one.at_step(4)
        place.types("cancel", one.run.name)
        wait_for_state(one.job, "CANCELLED", within_s=60)
        assert place.types("resume", one.run.name).job_and_run[0] != one.job
        one.ends_as("cancelled", "done")


def _node_lost(place: Place) -> None:
    with place.run("lost", steps=60, step_s=0.3) as one:
        one.at_step(12)
        lost = one.nodes[-1]
        crash_node(DEFAULT_STATE_DIR, node=lost)
        try:
            wait_for(lambda: job_state(one.job) == "PENDING", within_s=120, what="the requeue of the job")
        finally:
            start_node(DEFAULT_STATE_DIR, node=lost)
        one.ends_as("node_failure", "done")


def _rank_killed(place: Place) -> None:
    with place.run("killed", steps=60, step_s=0.3) as one:
        kill(rank_pid(one.at_step(4), 1))
        one.ends_as("failed", "done")


def _array(place: Place) -> None:
    """Four elements: one is preempted, one requeued, one cancelled by its element id; one is left alone."""
    with place.nodes(2) as nodes:
        where = (f"cluster.nodelist={nodes[0]}", "cluster.gpus_per_node=1", "run.name=array")
        pace = ("train.max_steps=80", "model.step_s=0.3")
        words = ("+cluster=1x1", *where, *_WORDS, *pace, "cluster.gpu_flag=none", "cluster.sbatch.gres=gpu:1")
        job, path = place.types("-m", *words, "seed=1,2,3,4").out.split()
        runs = [element.run for element in read_table(SweepDirectory(Path(path)))]
        try:
            for run in runs:
                wait_until_step(run, 4, within_s=PATIENCE_S)
            command("scontrol", "requeue", f"{job}_1")
            command("scancel", f"{job}_2")
            # The others have given back one GPU each: with as many as the two that are left have, one must go.
            wait_for(lambda: restarts(job).get(1) == 1, within_s=60, what="the requeue of element 1")
            wait_until_ended(runs[2])
            urgent = ("--qos=urgent", "--gres=gpu:2", f"--nodelist={nodes[0]}", "--output=/dev/null", "--wrap=true")
            command("sbatch", *urgent)
            wait_for(lambda: sum(restarts(job).values()) == 2, within_s=PATIENCE_S, what="a preempted element")
            for run in (runs[0], runs[1], runs[3]):
                wait_until_finished(run, within_s=PATIENCE_S)
                assert sorted(losses(run)) == list(range(1, 81)), "steps are missing"
            reasons = [[entry["reason"] for entry in ledger_lines(run)] for run in runs]
            assert sorted(map(len, reasons)) in ([1, 1, 2, 2], [1, 1, 1, 3]), reasons
            assert reasons[2] == ["cancelled"] and sum(one.count("preempted") for one in reasons) == 1, reasons
        finally:
            command("scancel", "--quiet", job, must=False)


def _uneven(place: Place) -> None:
    with place.run("uneven", "cluster.gpus_per_node=[4,2]", "batch.global_size=12", steps=6) as one:
        assert one.ends_as("done")["world_size"] == 6


def _torchrun(place: Place) -> None:
    with place.run("torchrun", "cluster.launcher=torchrun", "cluster.gpus_per_node=2") as one:
        assert one.ends_as("done")["world_size"] == 4


def _script(place: Place) -> None:
    (place.person.folder / "script.py").write_text(_SCRIPT)
    with place.nodes(2) as nodes:
        words = ("+cluster=2x1", f"cluster.nodelist={','.join(nodes)}", "script=[script.py]")
        run = place.types(*words).job_and_run[1]
        wait_until_finished(run, within_s=PATIENCE_S)
        for rank, node in enumerate(sorted(nodes)):
            assert f"rank {rank} of 2 on {node}" in run.rank_log(0, rank).read_text()


def _interactive(place: Place) -> None:
    """In an allocation that it makes, and in one that has more than the run asks for."""
    with place.nodes(2) as nodes:
        words = ("launch=interactive", *_WORDS, "+cluster=1x2", f"cluster.nodelist={nodes[0]}")
        place.types(*words, "run.name=asked", says="step 12", timeout_s=PATIENCE_S)
        large = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=4", "--cpus-per-task=4")
        typed = (sys.executable, "-m", "slurm_train", *words[:-1], "run.name=inside")
        done = place.person.runs("salloc", *large, f"--nodelist={','.join(nodes)}", *typed, timeout_s=PATIENCE_S)
        assert done.code == 0 and "step 12" in done.out, done.out + done.err


def _doctor(place: Place) -> None:
    done = place.person.types("doctor")
    assert done.code in (0, 1) and "Traceback" not in done.err and "Slurm" in done.out, done.out + done.err


def _init(place: Place) -> None:
    place.types("init", "--print", "--yes", says="partition: main")


FLOWS: dict[str, Callable[[Place], None]] = {
    "`plan`, and five wrong requests refused": _plan,
    "submit, `status`, `logs`": _submit,
    "preempted": _preempt,
    "time limit": _time_limit,
    "`scancel`": _scancel,
    "`cancel`, `resume`": _cancel_and_resume,
    "node lost": _node_lost,
    "rank killed": _rank_killed,
    "array, one element each preempted, requeued, cancelled": _array,
    "`cluster.gpus_per_node=[4,2]`": _uneven,
    "torchrun": _torchrun,
    "`script=`": _script,
    "`launch=interactive`, own and larger allocation": _interactive,
    "`doctor`": _doctor,
    "`init`": _init,
}


def run(suite: str, tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Types so many of the flows, the first ones, in a cluster of its own; nothing is drawn from the seed."""
    version, cells = "", dict.fromkeys(list(FLOWS)[:trials], "not reached")
    with own_cluster(suite, *_SIZE):
        for line in lines_of(suite, "tests.campaigns.versions", *cells, log=folder / "errors"):
            version = line.get("version", version)
            cells |= {line["flow"]: line["cell"]} if "flow" in line else {}
    for flow, cell in cells.items():
        tally.add(flow, [] if re.fullmatch(r"\d+ s", cell) else [cell])
    tally.table[version] = cells
    return {"Slurm": version}


# Campaigns that need no particular Slurm, and how many trials of each there are on every version.
FAULTS = {
    "kills": 39,
    "lost-work": 20,
    "exactness": 10,
    "storm": 12,
    "no-progress": 2,
    "cancel": 40,
    "two-starters": 10,
    "continuation": 20,
    "split-brain": 10,
    "controller": 10,
    "hang": 6,
    "arrays": 16,
}


def faults(suite: str, tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Runs so many campaigns, the first ones of `FAULTS`, in a cluster of its own."""
    cells: dict[str, str] = {}
    with own_cluster(suite, *_SIZE):
        for name in list(FAULTS)[:trials]:
            words = (name, "--seed", str(seed), "--trials", str(FAULTS[name]))
            with _process_in(suite, "tests.campaigns", *words, stderr=subprocess.STDOUT) as process:
                said = process.communicate()[0]
            (folder / name).write_text(said)
            held, tried = read_verdict(name, said)
            if held:
                tally.add(name, trials=held)
            if process.returncode:
                last = said.strip().splitlines() or ["nothing was printed"]
                tally.add(name, last[-3:], trials=max(1, tried - held))
            cells[f"`{name}`"] = f"{held} of {tried}"
        found = devcluster("exec", "--slurm", suite, "--", "sinfo", "--version").stdout
    tally.table[found.split()[-1]] = cells
    return {"Slurm": found.split()[-1]}


def read_verdict(name: str, said: str) -> tuple[int, int]:
    """Returns how many trials held, and of how many, from what a campaign has printed; 0 and 0 if it did not end."""
    found = re.search(rf"(?m)^{name}: (\d+) of (\d+) held in", said)
    return (int(found[1]), int(found[2])) if found else (0, 0)


@contextmanager
def own_cluster(slurm: str, *options: str) -> Iterator[None]:
    """Builds a cluster in a root of its own, e.g. of "trixie", and removes it."""
    try:
        up = devcluster("up", "--slurm", slurm, *options)
        assert up.returncode == 0, f"no cluster: {up.stderr.strip()[-300:]}"
        yield
    finally:
        devcluster("down", "--slurm", slurm)


def lines_of(slurm: str, module: str, *words: str, log: Path) -> Iterator[dict[str, Any]]:
    """Yields what a program in such a cluster says (see `say`), as it comes."""
    with log.open("w") as errors, _process_in(slurm, module, *words, stderr=errors) as process:
        assert process.stdout is not None
        yield from map(json.loads, process.stdout)


def _process_in(slurm: str, module: str, *words: str, stderr: IO[str] | int) -> subprocess.Popen[str]:
    argv = [*_DEVCLUSTER, "exec", "--slurm", slurm, "--", "python", "-m", module, *words]
    return subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=stderr, text=True)


def devcluster(*words: str) -> subprocess.CompletedProcess[str]:
    """Types a `devcluster` command."""
    return subprocess.run([*_DEVCLUSTER, *words], cwd=REPOSITORY, capture_output=True, text=True, check=False)


def type_here(names: list[str]) -> None:
    """Types flows on the cluster of this machine; prints its version, and per flow a line: seconds, or the reason."""
    say(version=command("sinfo", "--version").split()[-1])
    free: Queue[str] = Queue()
    for node in _NODES:
        free.put(node)

    def type_flow(flow: str) -> None:
        began_s = time.monotonic()
        try:
            with at_work(Path(tempfile.mkdtemp())) as person:
                FLOWS[flow](Place(person, free))
        except FAILURES as err:
            print(f"{flow}: {err}", file=sys.stderr, flush=True)
            say(flow=flow, cell=first_line(err)[:300])
        else:
            say(flow=flow, cell=f"{time.monotonic() - began_s:.0f} s")

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(type_flow, names or FLOWS))


def say(**facts: object) -> None:
    """Prints a line of JSON for `lines_of`."""
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    type_here(sys.argv[1:])
