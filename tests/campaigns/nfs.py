"""Runs on NFS that are killed and preempted while the file system misbehaves.

The file system is `tests/support/nfs_client.c`: a FUSE client with the caches, errors and repeated requests of a Linux
NFS client. `nfs-kills` kills ranks on this machine, with one client. `nfs` preempts runs over two nodes on Slurm and
takes nodes from them, where each node has a client of its own and the server's clock is half a minute ahead.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from slurm_train.tools.devcluster.cluster import crash_node, start_node
from slurm_train.tools.devcluster.plan import DEFAULT_STATE_DIR
from tests.campaigns import kills_local
from tests.campaigns.checker import History
from tests.campaigns.record import Tally
from tests.campaigns.victims import Victim, figures_of, golden_run, in_words
from tests.support.cluster_faults import slurmd_pid, start_urgent_job
from tests.support.nfs_mounts import Client, clients
from tests.support.slurm_runs import at_work, command, job_state
from tests.support.waiting import wait_for

CLOCK_S, AWAY_S = 30.0, 60.0
_FAULTS: dict[str, Mapping[str, float]] = {
    "none": {},
    "replies lost": {"lost": 0.2},
    "server away": {"away": 1.0},
    "server slow": {"delay": 0.01},
    "no close-to-open": {"cto": 0.0},
}
_HERE = ("none", "replies lost", "server away", "server slow")
_NODES = ("node[1-2]", "node[3-4]")
_WORDS = ("+cluster=2x1", "checkpoint.every_steps=5", "cluster.sbatch.exclusive=true")


# Kills on this machine


def kills(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Kills ranks so many times while the faults of their one client change."""
    seen: Counter[str] = Counter()
    place = folder / "here"
    place.mkdir()
    with clients(place, 1) as (client,), _changing_faults(client, random.Random(seed), seen):
        found = kills_local.run(tally, seed=seed, trials=trials, folder=client.path / "runs")
    return {**found, "faults": in_words(seen)}


@contextmanager
def _changing_faults(client: Client, dice: random.Random, seen: Counter[str]) -> Iterator[None]:
    """Changes the faults of a client every few seconds; once the server is away for a minute."""
    done = threading.Event()

    def change() -> None:
        # The golden runs are left alone.
        while not done.wait(0.2) and not any(client.export.glob("runs/lane_*")):
            pass
        long_at = time.monotonic() + 20.0
        while not done.wait(dice.uniform(0.2, 2.0)):
            what = dice.choice(_HERE)
            lasts_s = dice.uniform(0.3, 3.0)
            if time.monotonic() > long_at:
                what, lasts_s, long_at = "server away", AWAY_S, float("inf")
            seen[f"{what}{' for a minute' if lasts_s == AWAY_S else ''}"] += 1
            with client.having(**_FAULTS[what]):
                done.wait(lasts_s)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


# Preemptions and lost nodes on Slurm


class Site:
    """A mount for the person at the login node, and one of its own on each node."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("server", "nfs"):
            (folder / name).mkdir(parents=True)
        self.login = self._client("login", None, acdirmin=1.0, acregmin=1.0)
        self.nodes: dict[str, Client] = {}

    def _client(self, name: str, namespace: int | None, **settings: float) -> Client:
        export, path = self._folder / "server", self._folder / "nfs"
        control = self._folder / f"control_{name}"
        client = Client(export=export, path=path, control=control, namespace=namespace, settings=settings)
        return client.mount()

    def mount_on(self, node: str) -> None:
        """Mounts it on a node whose slurmd has just been started; the server's clock is ahead there."""
        # The namespace of a node begins as a copy of this one, with the login node's mount.
        self.nodes[node] = self._client(node, slurmd_pid(node), clock=CLOCK_S)

    def crash(self, node: str) -> None:
        """Cuts a node's power: what waits in its client is lost."""
        crash_node(DEFAULT_STATE_DIR, node=node)
        self.nodes.pop(node).crash()

    def unmount(self) -> None:
        """Removes all mounts."""
        for client in (*self.nodes.values(), self.login):
            client.unmount()


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Interrupts two runs so many times together: one time of six a node is lost, else they are preempted."""
    planned = ["node lost" if number % 6 == 5 else "preempted" for number in range(trials)]
    random.Random(seed).shuffle(planned)
    # Some thirty steps go by between an interruption and the next.
    words = (*_WORDS, f"train.max_steps={100 + 30 * trials}")
    seen: Counter[str] = Counter()
    site = Site(folder / "site")
    with ExitStack() as undo:
        undo.callback(site.unmount)
        for node in ("node1", "node2", "node3", "node4"):
            site.mount_on(node)
        person = undo.enter_context(at_work(site.login.path))
        golden = golden_run(person, "golden", *words, f"cluster.nodelist={_NODES[0]}")

        def interrupt(place: int) -> History:
            own = ("model.step_s=0.25", f"cluster.nodelist={_NODES[place]}")
            victim = Victim.submit(person, random.Random(f"{seed} {place}"), f"run-{place}", *words, *own)
            _interrupt(victim, planned[place::2], site, tally, seen)
            victim.run.stop_file.unlink(missing_ok=True)
            tally.spoil(victim.problems(golden), trials=len(planned[place::2]))
            return victim.history()

        with ThreadPoolExecutor(2) as pool:
            histories = list(pool.map(interrupt, range(2)))
    return {**figures_of(histories), "faults": in_words(seen)}


def _interrupt(victim: Victim, planned: list[str], site: Site, tally: Tally, seen: Counter[str]) -> None:
    for number, what in enumerate(planned):
        fault = victim.dice.choice(list(_FAULTS))
        with tally.trial(f"{victim.run.name}: {what}, {fault}") as problems:
            victim.wait_for_steps(victim.dice.randint(2, 8))
            assert not victim.is_finished, "the run is finished, there is nothing left to interrupt"
            before, nodes = victim.attempt, victim.nodes
            seen[fault] += 1
            lasts_s = AWAY_S if fault == "server away" and number < 6 else victim.dice.uniform(1.0, 6.0)
            with ExitStack() as faults:
                victim.note(what)
                if what == "preempted":
                    for node in nodes:
                        faults.enter_context(site.nodes[node].having(**_FAULTS[fault]))
                    start_urgent_job(nodes)
                else:
                    _lose_a_node(victim, site, victim.dice.choice(nodes))
                ended = time.monotonic() + lasts_s
                while time.monotonic() < ended and (fault == "server away" or victim.attempt == before):
                    time.sleep(0.5)
            victim.wait_for_steps(1, after=before)
            if victim.attempt > before + 1:
                problems.append(f"{victim.attempt - before} attempts until it went on")


def _lose_a_node(victim: Victim, site: Site, node: str) -> None:
    job = victim.job
    site.crash(node)
    wait_for(lambda: job_state(job) == "PENDING", within_s=120, what=f"the requeue of job {job}")
    command("scontrol", "hold", job)
    start_node(DEFAULT_STATE_DIR, node=node)
    site.mount_on(node)
    command("scontrol", "release", job)
