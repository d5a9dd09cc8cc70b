"""Campaign `hostile-neighbours`: strangers at work while ranks look for each other; the ranks meet, or say why not.

A local trial lets eight ranks meet beside a stranger that was there first: real sockets, no torch. One trial in ten is
a job of 2 x 2 ranks on the one-machine Slurm, with a stranger on a third node who knows the candidate ports and waits
for a rank 0 to listen there.
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from slurm_train.distributed.master import meeting_ports
from tests.campaigns.record import Tally, first_line, only_true
from tests.support import meeting_ranks, stranger
from tests.support.command_line import REPOSITORY, TINY, Person
from tests.support.ledgers import ledger_lines
from tests.support.slurm_runs import at_work, wait_until_finished

NOBODY = "undisturbed"
TAKEN = "taken-server"
ATTACKS = (
    *("dripping-client", "silent-client", "garbage-client"),
    *("dripping-server", "silent-server", "garbage-server", TAKEN),
)
_WORLD = 8
_NUM_PORTS = 8
_MOST_MORE_S = 10.0
_ON_SLURM = ("dripping-watcher", "silent-watcher", "garbage-watcher")


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Makes so many trials, the attacks in turn, after three undisturbed ones of each kind that give the measure."""
    took: dict[str, list[float]] = defaultdict(list)
    on_slurm = trials // 10
    usual_s = max(meet_beside(NOBODY, seed=number)[0] for number in range(3))
    for number in range(trials - on_slurm):
        attack = ATTACKS[number % len(ATTACKS)]
        took_s, problems = meet_beside(attack, seed=seed * 1000 + number, within_s=usual_s + _MOST_MORE_S)
        took[attack].append(took_s)
        tally.add(f"{attack}, {took_s:.1f} s", problems)
    if on_slurm:
        with at_work(folder) as person:
            usual_s = max(train_beside(person, NOBODY, number)[0] for number in range(3))
            for number in range(on_slurm):
                attack = _ON_SLURM[number % len(_ON_SLURM)]
                took_s, problems = train_beside(person, attack, number, within_s=usual_s + _MOST_MORE_S)
                took[f"Slurm, {attack}"].append(took_s)
                tally.add(f"Slurm, {attack}, {took_s:.1f} s to the first step", problems)
    shown = (f"{what} {len(times)} times, {max(times):.1f} s" for what, times in sorted(took.items()))
    return {"trials and longest time of the ranks": "; ".join(shown)}


def pairs(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Runs pairs of jobs on the same two nodes at the same time; each must finish at once, with its own ranks."""
    overlapped = 0
    words = ("+cluster=2x1", *TINY, "cluster.nodelist=node[1-2]", "model.step_s=0.05")
    with at_work(folder) as person:
        for number in range(trials):
            with tally.trial(f"pair {number}") as problems:
                names = [f"seed={seed + 2 * number + one}" for one in range(2)]
                runs = [person.types(*words, name).job_and_run[1] for name in names]
                sizes = [wait_until_finished(run)["world_size"] for run in runs]
                ledgers = [ledger_lines(run) for run in runs]
                if sizes != [2, 2] or [len(ledger) for ledger in ledgers] != [1, 1]:
                    problems.append(f"{sizes} ranks, {[len(ledger) for ledger in ledgers]} attempts")
                spans = [(ledger[0]["time_unix_s"], ledger[0]["end_time_unix_s"]) for ledger in ledgers]
                overlapped += max(start for start, _ in spans) < min(end for _, end in spans)
    return {"pairs that ran at the same time": str(overlapped)}


def meet_beside(attack: str, *, seed: int, within_s: float = 60.0) -> tuple[float, list[str]]:
    """Lets ranks meet on this machine while a stranger does what the attack says; returns how long, and problems."""
    draw, ports = random.Random(seed), free_ports(_NUM_PORTS)
    point = {"master_addr": "localhost", "ports": ports, "run_id": "run", "attempt": 0, "timeout_s": 60.0}
    asked = {"world": _WORLD, "point": point | {"secret": f"{draw.getrandbits(128):032x}"}, "word": f"word {seed}"}
    # A server needs its port before rank 0 comes; a client, a rank 0 to call.
    held = 0 if attack == NOBODY or attack.endswith("client") else _NUM_PORTS if attack == TAKEN else draw.randint(1, 4)
    began_s = time.monotonic()
    with ExitStack() as opened:
        if held:
            opened.enter_context(a_stranger(attack, meeting_ranks.HERE, ports[:held]))
            began_s = time.monotonic()
        ranks = [opened.enter_context(some_ranks(asked | {"first": 0, "last": 0, "files": 1024}))]
        if attack.endswith("client"):
            opened.enter_context(a_stranger(attack, meeting_ranks.HERE, ports[:1]))
            time.sleep(draw.uniform(0.0, 2.0))
            began_s = time.monotonic()
        if attack != TAKEN:
            ranks.append(opened.enter_context(some_ranks(asked | {"first": 1, "last": _WORLD - 1})))
        found = [one for its in ranks for one in json.loads(its.communicate(timeout=120)[0])]
    took_s = time.monotonic() - began_s
    port, word = ports[held % _NUM_PORTS], asked["word"]
    expected: list[Any] = [[port, word, True], *[[port, word]] * (_WORLD - 1)]
    is_right = found == expected
    if attack == TAKEN:
        is_right = f"bind none of the ports {', '.join(map(str, ports))}" in str(found[0])
    wrong = {f"the ranks found {found}": not is_right, f"took {took_s:.1f} s of {within_s:.1f} s": took_s > within_s}
    return took_s, only_true(wrong)


def train_beside(person: Person, attack: str, number: int, *, within_s: float = 150.0) -> tuple[float, list[str]]:
    """Runs a job of 2 x 2 ranks while a stranger on a third node looks for its rank 0; returns the same."""
    own = ("train.threads=1", "cluster.nodelist=node[1-2]", f"run.name=beside-{attack}-{number}")
    problems = []
    with ExitStack() as opened:
        job, run = person.types("+cluster=2x2", *TINY, *own).job_and_run
        log = person.folder / f"stranger-{attack}-{number}.txt"
        if attack != NOBODY:
            env = {"SLURM_JOB_ID": job, "SLURM_STEP_ID": "0"}
            # The supervisor's MASTER_PORT, which is tried first, and those of the ranks.
            ports = [port for name in (str(run.path), run.run_id) for port in meeting_ports(name, attempt=0, env=env)]
            opened.enter_context(a_stranger(attack, "node1", ports, inside=("ip", "netns", "exec", "node3"), log=log))
        try:
            wait_until_finished(run)
        except AssertionError as err:
            problems.append(first_line(err))
    entries = ledger_lines(run)
    took_s = sum(float(entry.get("start_s", 0.0)) + float(entry.get("rendezvous_s", 0.0)) for entry in entries)
    wrong = {
        f"{len(entries)} attempts": len(entries) != 1,
        f"took {took_s:.1f} s of {within_s:.1f} s": took_s > within_s,
        "the stranger found nobody to attack": attack != NOBODY and "attacks port" not in log.read_text(),
    }
    return took_s, problems + only_true(wrong)


def free_ports(count: int) -> list[int]:
    """Returns ports that nobody listens at now, below those that the kernel hands out."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as probe:
            if port not in found and probe.connect_ex((meeting_ranks.HERE, port)):
                found.append(port)
    return found


@contextmanager
def some_ranks(asked: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """Starts a process with some of the ranks."""
    command = [sys.executable, "-m", meeting_ranks.__name__, json.dumps(asked)]
    with ExitStack() as opened:
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        opened.enter_context(process)
        opened.callback(process.kill)
        yield process


@contextmanager
def a_stranger(
    attack: str,
    host: str,
    ports: Sequence[int],
    *,
    inside: Sequence[str] = (),
    log: Path | None = None,
) -> Iterator[None]:
    """Lets a stranger do its work, from when it is ready."""
    listed = ",".join(map(str, ports))
    command = [*inside, sys.executable, "-u", str(stranger.__file__), attack, host, listed]
    with ExitStack() as opened:
        output = subprocess.PIPE if log is None else opened.enter_context(log.open("w"))
        process = opened.enter_context(subprocess.Popen(command, stdout=output, text=True))
        opened.callback(process.kill)
        if log is None:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield
