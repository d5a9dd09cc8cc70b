"""The campaigns by name: what each promises, and the module that puts it to the test."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from tests.campaigns.record import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """One promise and how it is put to the test.

    Args:
        promise: in one sentence, for the page.
        trial: "<module here>:<function>", a function `(*, seed, trials, folder) -> Result`.
        trials: of the full campaign.
        needs_cluster: whether it runs on the one-machine Slurm cluster.
    """

    promise: str
    trial: str
    trials: int
    needs_cluster: bool = True

    def load(self) -> Callable[..., Result]:
        """Returns the function."""
        module, _, name = self.trial.partition(":")
        function: Callable[..., Result] = getattr(importlib.import_module(f"tests.campaigns.{module}"), name)
        return function


CAMPAIGNS: dict[str, Campaign] = {
    "kills-local": Campaign(
        promise="any rank killed at any moment: the run resumes, and no committed step is lost",
        trial="kills_local:run",
        trials=1000,
        needs_cluster=False,
    ),
    "kills": Campaign(
        promise="any rank killed at any moment on a real Slurm: the run resumes, and no committed step is lost",
        trial="strikes:kills",
        trials=100,
    ),
    "crash-points": Campaign(
        promise="killed, full, failing or powered off before and after every file-system call of save, commit and "
        "prune: some verified checkpoint resumes",
        trial="crash_points:run",
        trials=1,
        needs_cluster=False,
    ),
    "thawed-writer": Campaign(
        promise="a writer stopped at every file-system call of a commit, prune, rollback, claim, local save or result, "
        "and released when its successor has begun, claimed or committed the same step: no verified checkpoint and no "
        "result of the successor is lost",
        trial="thawed_writer:run",
        trials=1,
        needs_cluster=False,
    ),
    "two-users": Campaign(
        promise="two uids save and resume in one sticky `checkpoint.local_dir` at the same time, while a stranger has "
        "made their names first, with folders, files and links: neither is kept out, none reads the other's",
        trial="two_users:run",
        trials=70,
        needs_cluster=False,
    ),
    "corruption": Campaign(
        promise="every truncation, every flipped bit, every 512-byte hole of a small checkpoint is detected",
        trial="corruption:run",
        trials=1,
        needs_cluster=False,
    ),
    "exactness": Campaign(
        promise="2 nodes x 2 ranks, 20 mixed interruptions: every loss and the weights have the bits of the "
        "undisturbed run, and each sample is used exactly once per epoch",
        trial="strikes:exactness",
        trials=20,
    ),
    "world-sizes": Campaign(
        promise="32 ranks, then 16, 6 and 1, by `resume RUN cluster=NxG`: the same global batches in the same order, "
        "losses equal to the order of additions",
        trial="world_sizes:run",
        trials=1,
    ),
    "lost-work": Campaign(
        promise="a preemption with grace loses no step, a hard kill at most those since the last checkpoint",
        trial="strikes:lost_work",
        trials=20,
    ),
    "latency": Campaign(
        promise="signal to durable checkpoint within the step under way, one more and the save; job start to first new "
        "step within 1.2x of a bare torch script",
        trial="latency:run",
        trials=10,
    ),
    "cancel": Campaign(
        promise="a run cancelled at any moment ends cancelled and never comes back",
        trial="cancel:run",
        trials=200,
    ),
    "two-starters": Campaign(
        promise="a run that is started twice at once and cancelled in between: one job trains at a time, nothing is "
        "written under live ranks, cancel finds every job, resume finishes the run",
        trial="two_starters:run",
        trials=50,
    ),
    "continuation": Campaign(
        promise="cancelled at any moment around the submission of the job that takes over, with requeue forbidden and "
        "no accounting: the run never comes back",
        trial="continuation:run",
        trials=100,
    ),
    "split-brain": Campaign(
        promise="ranks that outlive their job commit nothing that anybody sees and are gone within 10 s",
        trial="split_brain:run",
        trials=50,
    ),
    "storm": Campaign(
        promise="50 preemptions cost no budget; 3 ends without progress stop the run with a reason",
        trial="budgets:storm",
        trials=51,
    ),
    "full-disk": Campaign(
        promise="a full disk, a used-up quota, EIO or ESTALE at every write of the supervisor around a preemption: "
        "the run comes back and is finished once there is room",
        trial="full_disk:run",
        trials=400,
    ),
    "no-progress": Campaign(
        promise="a limit shorter than the start, and a job that loses its node each time: both stop with a reason",
        trial="budgets:no_progress",
        trials=2,
    ),
    "arrays": Campaign(
        promise="16 elements, some preempted: the others' Restarts stay 0 and all end",
        trial="arrays:run",
        trials=16,
    ),
    "cut-off": Campaign(
        promise="the command of a sweep killed, interrupted or without its terminal at any moment: typed again, each "
        "run is in the queue exactly once",
        trial="cut_off:run",
        trials=41,
    ),
    "goodput": Campaign(
        promise="one failure a minute: at least 0.90 of the allocated time are productive steps",
        trial="strikes:goodput",
        trials=10,
    ),
    "hang": Campaign(
        promise="a stopped rank is named in one sentence with its stacks, and the step ends within time-out + 10 s",
        trial="hang:run",
        trials=20,
    ),
    "preflight": Campaign(
        promise="every fault of nodes and network that has a code is caused on a real Slurm, and named in one line "
        "within 30 s of the job's start",
        trial="preflight:faulty",
        trials=33,
    ),
    "preflight-healthy": Campaign(
        promise="runs on healthy nodes get no finding",
        trial="preflight:healthy",
        trials=20,
    ),
    "stragglers": Campaign(
        promise="a rank, a node or its reading that is slow is named with its node and the cause; a healthy run is not",
        trial="stragglers:run",
        trials=12,
    ),
    "slow-network": Campaign(
        promise="with 100 Mbit/s between the nodes `scaling` says that the network limits, and how much faster bf16, "
        "PowerSGD and post-local SGD are",
        trial="slow_network:run",
        trials=1,
    ),
    "controller": Campaign(
        promise="slurmctld killed while runs train, save and requeue: no run is lost",
        trial="strikes:controller",
        trials=20,
    ),
    "hostile-words": Campaign(
        promise="10,000 hostile strings in every field: refused, or byte for byte what Slurm shows; no shell runs them",
        trial="hostile_words:run",
        trials=10_000,
    ),
    "hostile-neighbours": Campaign(
        promise="strangers who drip, are silent by the thousand, talk rubbish, relay or hold all ports: the ranks meet "
        "within 10 s more than undisturbed or name the cause, and nobody is taken for somebody else",
        trial="hostile_neighbours:run",
        trials=180,
    ),
    "port-pairs": Campaign(
        promise="two jobs that start on the same two nodes at the same time: neither meets the other's ranks",
        trial="hostile_neighbours:pairs",
        trials=20,
    ),
    "secrets": Campaign(
        promise="a canary in environment, words and configuration is nowhere in run directory, script, logs, manifests",
        trial="secrets:run",
        trials=1,
    ),
}
