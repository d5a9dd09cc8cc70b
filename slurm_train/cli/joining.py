"""A rank that torchrun has started: which attempt it is, where it writes, and how its end is told to torchrun.

Under `cluster.launcher=torchrun` a supervisor has opened the attempt of the first round and closes that of the last.
Under a plain torchrun there is none, and rank 0 does both.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from slurm_train.checkpoint.directory import newest_committed_step
from slurm_train.distributed.meeting import MeetingPoint
from slurm_train.distributed.place import RankPlace
from slurm_train.distributed.rendezvous import agree_on_attempt
from slurm_train.errors import EXIT_DONE, EXIT_REQUEUE, RunError
from slurm_train.rundir.attempts import (
    AttemptStart,
    begin_round,
    close_attempt,
    note_saved,
    read_round,
    rendezvous_secret,
)
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.timing import last_step

_NOTHING_TO_DO = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A rank in its round."""

    env: dict[str, str]
    """The environment, with SLURM_TRAIN_ATTEMPT as it is in this round."""
    closes: bool
    """Whether this rank writes the end of the attempt: rank 0 where no supervisor does."""


def join_round(run: RunDirectory, env: Mapping[str, str], *, timeout_s: float) -> Joined | None:
    """Returns this rank's attempt, None where the run is finished already. Collective; its output goes to its log then.

    Raises:
        RendezvousError: ranks are missing.
        RunError: somebody else runs the run, or a newer attempt has taken it over.
    """
    place = RankPlace.from_env(env)
    first = int(env["SLURM_TRAIN_ATTEMPT"]) if "SLURM_TRAIN_ATTEMPT" in env else None
    point = _meeting_point(run, place, env, timeout_s=timeout_s)
    attempt = agree_on_attempt(
        place, point, open_attempt=lambda nodes: _begin(run, place, env, first=first, nodes=nodes)
    )
    if attempt == _NOTHING_TO_DO:
        if place.is_first:
            print(f"slurm_train: {run.path} is finished already; see {run.result}", file=sys.stderr, flush=True)
        return None
    os.environ["SLURM_TRAIN_ATTEMPT"] = str(attempt)
    if first is not None or not place.is_first:
        write_to_own_log(run, attempt, place.rank)
    return Joined(env={**env, "SLURM_TRAIN_ATTEMPT": str(attempt)}, closes=first is None and place.is_first)


def leave_round(run: RunDirectory, joined: Joined, code: int) -> int:
    """Returns the code that torchrun is to see: ranks that have saved and stopped are not to be started again."""
    if joined.closes and code in (EXIT_DONE, EXIT_REQUEUE):
        attempt = int(joined.env["SLURM_TRAIN_ATTEMPT"])
        begun, is_done = read_round(run, attempt), code == EXIT_DONE
        facts = {
            "exit_code": code,
            "reason": "done" if is_done else "stopped",
            "action": "finish" if is_done else "stop",
            "note": "the run is finished" if is_done else "saved and stopped; the same command continues the run",
            "first_step": 0 if begun is None else begun.first_step,
            "last_step": last_step(run),
        }
        close_attempt(run, attempt, facts)
    if code == EXIT_REQUEUE:
        note_saved(run, int(joined.env["SLURM_TRAIN_ATTEMPT"]))
        return EXIT_DONE
    return code


def _meeting_point(run: RunDirectory, place: RankPlace, env: Mapping[str, str], *, timeout_s: float) -> MeetingPoint:
    from slurm_train.distributed.ports import candidate_ports, master_of

    name = f"{run.name}/{run.run_id} lobby {env['TORCHELASTIC_RUN_ID']}"
    return MeetingPoint(
        master_addr=master_of(env),
        ports=candidate_ports(name),
        run_id=name,
        attempt=0,
        timeout_s=timeout_s,
        secret=rendezvous_secret(run, is_first=place.is_first, wait_s=timeout_s),
    )


def _begin(
    run: RunDirectory, place: RankPlace, env: Mapping[str, str], *, first: int | None, nodes: tuple[str, ...]
) -> int:
    if first is None:
        _refuse_held(run, env)
        _refuse_changed(run)
        if run.result.exists():
            return _NOTHING_TO_DO
        if run.stop_file.exists():
            # Ranks that were started again while the others stopped have nothing to do either.
            raise RunError(f"{run.stop_file} is there, so nothing is started", hint=f"remove it: rm {run.stop_file}")
    start = AttemptStart(
        job_id=None,
        restart_count=0,
        nodes=nodes,
        world_size=place.world_size,
        committed_step=newest_committed_step(run.checkpoints),
    )
    return begin_round(run, start, first=first)


def _refuse_changed(run: RunDirectory) -> None:
    from slurm_train.launch.snapshot import require_sealed
    from slurm_train.rundir.paths import require_private

    require_private(run)
    require_sealed(run)


def _refuse_held(run: RunDirectory, env: Mapping[str, str]) -> None:
    from slurm_train.slurm.commands import SlurmCommands
    from slurm_train.status.activity import live_holder

    if (holder := live_holder(run, SlurmCommands(env))) is not None:
        raise RunError(f"{run.path} is being run by {holder}", hint="wait for it, or `cancel` it first")


def write_to_own_log(run: RunDirectory, attempt: int, rank: int) -> None:
    """Has stdout and stderr of this process go to its rank's log."""
    sys.stdout.flush()
    sys.stderr.flush()
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    log = os.open(run.rank_log(attempt, rank), flags, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
