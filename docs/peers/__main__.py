"""The same training under this toolkit, submitit, Lightning, and the same faults: who ends all steps by itself?

    python -m docs.peers [--faults grace,node] [--peers own,lightning] [--write]

Prints a Markdown table. Needs the one-machine cluster (`python -m slurm_train devcluster up --nodes 4 --gpus 8`) for
itself, and submitit, Lightning and transformers installed. `--write` keeps the outcomes beside this file, in the place
of older ones of the same peers and faults, and rewrites docs/peers.md: so single cells can be measured again.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

from docs.peers.common_training import AT_STEP, STEPS
from docs.peers.faults import FAULTS, Fault, show_job
from docs.peers.job import PEERS, Job, Wish, end_jobs
from docs.peers.outcome import Outcome, judge, keep, table
from docs.peers.page import write_page
from tests.support.cluster_faults import qos_pair
from tests.support.command_line import Person
from tests.support.waiting import wait_for

_START_S = 600.0
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY")
_STILL_S = 15.0
"""A job that has ended this long ago does not come back here."""


def main() -> int:
    """Runs what was asked for and prints the table."""
    asked = _parser().parse_args()
    peers, faults = asked.peers.split(","), asked.faults.split(",")
    person = Person(Path(tempfile.mkdtemp(prefix="slurm_train-peers-")))
    golden = _golden(person, peers)
    outcomes = {name: _try(person, name, peers, golden) for name in faults}
    names = {peer: PEERS[peer][0] for peer in peers}
    print(
        table(outcomes, peers=names, faults={name: (FAULTS[name].what, FAULTS[name].ends_cancelled) for name in faults})
    )
    if asked.write:
        keep(outcomes)
        write_page()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=",".join(PEERS), help=f"default: {','.join(PEERS)}")
    parser.add_argument("--faults", default=",".join(FAULTS), help=f"default: {','.join(FAULTS)}")
    parser.add_argument("--write", action="store_true", help="keep the outcomes and rewrite docs/peers.md")
    return parser


def _golden(person: Person, peers: Sequence[str]) -> dict[str, str]:
    """Returns the digest of each peer's undisturbed training."""
    jobs = _submit_all(person, peers, Wish(name="golden", step_s=0.02))
    try:
        _wait_for_ends(jobs, within_s=_START_S)
        assert all(job.digest for job in jobs), f"unfinished without a fault: {[job for job in jobs if not job.digest]}"
        return {job.peer: job.digest for job in jobs}
    finally:
        end_jobs(jobs)


def _try(person: Person, name: str, peers: Sequence[str], golden: dict[str, str]) -> dict[str, Outcome]:
    fault = FAULTS[name]
    began = time.monotonic()
    pair = nullcontext(("normal", "")) if fault.grace_s is None else qos_pair(f"peers{name}", grace_s=fault.grace_s)
    with pair as (weak, strong):
        gate = person.folder / f"go-{name}"
        wish = Wish(
            name=name,
            step_s=fault.step_s,
            gate=str(gate) if fault.is_gated else "",
            qos=weak,
            time_limit_min=fault.time_limit_min,
        )
        jobs = _submit_all(person, peers, wish)
        try:
            for job in jobs if fault.is_gated else []:
                wait_for(lambda job=job: len(job.steps) >= AT_STEP, within_s=_START_S, what=f"step {AT_STEP} of {job}")
            gate.touch()
            with fault.cause(jobs, strong):  # type: ignore[attr-defined]
                _wait_for_ends(jobs, within_s=_patience_s(fault))
            found = {job.peer: _outcome(job, golden[job.peer]) for job in jobs}
        finally:
            end_jobs(jobs)
    for peer, outcome in found.items():
        print(f"{name}: {peer}: {outcome}", file=sys.stderr, flush=True)
    print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return found


def _submit_all(person: Person, peers: Sequence[str], wish: Wish) -> list[Job]:
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda peer: PEERS[peer][1](person, wish), peers))


def _patience_s(fault: Fault) -> float:
    # What comes back needs its start once more; a short limit is used up once or twice.
    return 420.0 + fault.step_s * STEPS + 90.0 * fault.time_limit_min * (fault.time_limit_min < 10)


def _wait_for_ends(jobs: list[Job], *, within_s: float) -> None:
    """Returns when all have ended for good, or when the time is over: what is there then counts."""
    deadline = time.monotonic() + within_s
    ended_since: dict[str, float] = {}
    while time.monotonic() < deadline:
        for job in jobs:
            if show_job(job)["JobState"] in _ENDED:
                ended_since.setdefault(job.job_id, time.monotonic())
            else:
                ended_since.pop(job.job_id, None)
        still = [
            job for job in jobs if time.monotonic() - ended_since.get(job.job_id, time.monotonic()) > _still_s(job)
        ]
        if len(still) == len(jobs):
            return
        time.sleep(0.5)


def _still_s(job: Job) -> float:
    return 0.0 if job.digest else _STILL_S


def _outcome(job: Job, golden: str) -> Outcome:
    record = show_job(job)
    return judge(
        state=record["JobState"],
        restarts=int(record["Restarts"]),
        steps=job.steps,
        num_steps=STEPS,
        digest=job.digest,
        golden=golden,
        measured=datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
    )


if __name__ == "__main__":
    sys.exit(main())
