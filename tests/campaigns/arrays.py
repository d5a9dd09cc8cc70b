"""A job array in which random elements are preempted or requeued: the others never notice, and all end.

Each element holds two GPUs, so that an array of 16 fills the nodes and each urgent job for two GPUs of a node has to
take the place of one element there; which one is Slurm's choice. The elements take their time while a file is there,
and hurry when all disturbances are over. `trials` is the number of elements; 16 take a minute on an idle cluster.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from slurm_train.rundir.sweep import Element, SweepDirectory, read_table
from slurm_train.slurm.records import parse_record
from tests.campaigns.record import Tally
from tests.support import light_training
from tests.support.command_line import Person, new_project
from tests.support.ledgers import ledger_lines
from tests.support.slurm_runs import command, losses
from tests.support.waiting import wait_for

STEPS = 400
_WORDS = (
    "+cluster=1x1",
    *light_training.words(steps=STEPS, save_every=STEPS // 2),
    # One rank, but two devices of the node.
    "cluster.gpu_flag=none",
    "cluster.sbatch.gres=gpu:2",
)
_NODES = ("node1", "node2", "node3", "node4")
_PATIENCE_S = 240.0


class Seen(NamedTuple):
    """What was seen of one element when all was over."""

    index: int
    restarts: int
    """In Slurm's own count."""
    requeued: int
    """How often the campaign requeued this element."""
    preempted: int
    """How often its ledger says that it was preempted."""
    is_finished: bool
    steps: int
    """Different steps on record."""
    in_vain: int = 0
    """How often it was started after its run was finished: 24.11 does that to a job that was preempted before."""


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Submits an array, disturbs half of it and returns what came of each element."""
    chance = random.Random(seed)
    person = Person(new_project(folder / "project"))
    light_training.add_program(person)
    light_training.slow_down(person)
    began_s = time.monotonic()
    done = person.types("-m", *_WORDS, f"seed=range({trials})", "run.name=arrays")
    assert done.code == 0, done.err
    job, path = done.out.split()
    elements = read_table(SweepDirectory(Path(path)))
    try:
        wait_for(
            lambda: all(max(losses(one.run), default=0) >= 2 for one in elements),
            within_s=_PATIENCE_S,
            what="all elements at work",
        )
        print(f"  {trials} elements at work after {time.monotonic() - began_s:.0f} s")
        requeued = _disturb(job, len(elements), chance)
        light_training.speed_up(person)
        wait_for(lambda: all(map(_is_over, elements)), within_s=_PATIENCE_S, what="the end of all elements")
        _wait_until_over(job)
    except AssertionError as err:
        print(f"  {err}")
        requeued = []
    seen = _look(job, elements, requeued)
    command("scancel", job, must=False)
    problems = check(seen)
    for one in seen:
        what = f"element {one.index}: {one.restarts} restarts, {one.steps} steps"
        tally.add(what, [text for index, text in problems if index == one.index])
    tally.spoil([text for index, text in problems if index < 0], trials=1)
    return {
        "preempted by an urgent job": str(sum(one.preempted for one in seen)),
        "requeued by hand": str(sum(one.requeued for one in seen)),
        "elements that nobody disturbed": str(sum(not one.restarts for one in seen)),
        "submission to the last result": f"{time.monotonic() - began_s:.0f} s",
    }


def check(seen: Sequence[Seen]) -> list[tuple[int, str]]:
    """Returns what is wrong with which element, (-1, ...) where it is about all of them."""
    problems = []
    for one in seen:
        if not one.is_finished:
            problems.append((one.index, "has no result"))
        elif one.steps != STEPS:
            problems.append((one.index, f"has {one.steps} of {STEPS} steps on record"))
        if one.restarts != one.requeued + one.preempted + min(one.in_vain, one.preempted):
            causes = f"{one.requeued} requeues and {one.preempted} preemptions"
            problems.append((one.index, f"was restarted {one.restarts} times by {causes} of its own"))
    disturbed = sum(one.requeued + one.preempted > 0 for one in seen)
    if 2 * sum(one.preempted for one in seen) < disturbed or not disturbed:
        problems.append((-1, f"of {disturbed} disturbed elements fewer than half were preempted: it proves nothing"))
    return problems


def _disturb(job: str, num_elements: int, chance: random.Random) -> list[int]:
    """Preempts and requeues so many elements as make half of the array; returns the requeued ones."""
    num_requeued = max(1, num_elements // 5)
    num_preempted = max(1, num_elements // 2 - num_requeued)
    nodes = chance.sample(list(_NODES) * 2, num_preempted)
    urgent = ["sbatch", "--parsable", "--qos=urgent", "--gres=gpu:2", "--output=/dev/null", "--wrap=sleep 1"]
    jobs = [command(*urgent, f"--nodelist={node}") for node in nodes]
    for urgent_job in jobs:
        _wait_until_over(urgent_job)
    before = restarts(job)
    print(f"  urgent jobs on {', '.join(nodes)}: restarts {before}")
    calm = [index for index in range(num_elements) if not before.get(index)]
    requeued = chance.sample(calm, num_requeued)
    for index in requeued:
        print(f"  scontrol requeue {job}_{index}")
        command("scontrol", "requeue", f"{job}_{index}")
    count = num_preempted + num_requeued
    wait_for(lambda: sum(restarts(job).values()) >= count, within_s=60.0, what=f"{count} restarts")
    return requeued


def _wait_until_over(job: str) -> None:
    asked = ("squeue", "-h", "-t", "pending,running,completing", "-j", job)
    wait_for(lambda: not command(*asked, must=False), within_s=60.0, what=f"the end of job {job}", poll_s=0.5)


def restarts(job: str) -> dict[int, int]:
    """Returns how often Slurm has restarted each element of an array."""
    records = [parse_record(part) for part in command("scontrol", "show", "job", job).split("\n\n")]
    return {int(one["ArrayTaskId"]): int(one["Restarts"]) for one in records if one["ArrayTaskId"].isdigit()}


def _look(job: str, elements: Sequence[Element], requeued: Sequence[int]) -> list[Seen]:
    counted = restarts(job)
    seen = []
    for element in elements:
        reasons = [entry.get("reason") for entry in ledger_lines(element.run)]
        seen.append(
            Seen(
                index=element.index,
                restarts=counted.get(element.index, 0),
                requeued=list(requeued).count(element.index),
                preempted=reasons.count("preempted"),
                in_vain=(element.run.logs / "batch.log").read_text().count("is finished already"),
                is_finished=element.run.result.exists(),
                steps=len(losses(element.run)),
            )
        )
    return seen


def _is_over(element: Element) -> bool:
    ledger = ledger_lines(element.run)
    return bool(ledger) and ledger[-1].get("action") in ("finish", "stop")
