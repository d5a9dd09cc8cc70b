"""Any rank of a small run is killed at any moment; what was committed stays, and the run ends with the same weights.

One run after the other is struck until enough kills were made, each at a moment drawn anew: while ranks import and
meet, between steps, while files are written, at the rename, while old checkpoints are removed, while the last save and
the result are written.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from slurm_train.rundir.layout import RunDirectory
from tests.campaigns.on_slurm import (
    PATIENCE_S,
    Seen,
    Tally,
    at_work,
    end_problems,
    lines_of,
    look,
    lost_commits,
    lost_steps,
    newest_attempt,
    newest_commit,
    spans,
    submit,
    weights,
)
from tests.campaigns.result import Result
from tests.support.command_line import Person
from tests.support.process_faults import rank_pid

_STEPS = 80
_WORDS = (
    f"train.max_steps={_STEPS}",
    "model.step_s=0.02",
    "checkpoint.every_steps=8",
    # Kills at the start end without a new step, as often in a row as the dice say; that budget is another campaign's.
    "requeue.max_fruitless_failures=1000",
)
_SIZES = {"1x2": ("cluster.nodelist=node1",), "2x2": ("cluster.nodelist=node[1-2]",)}
_RANKS = {"1x2": 2, "2x2": 4}
_MOMENTS = ("start", "rendezvous", "step", "step", "save", "commit", "prune")
_LOOK_EVERY_S = 0.0005
_PER_RUN = 13
_EXITS_PER_RUN = 2
"""Once the last step is on record, every further attempt has nothing left to do but to end."""


@dataclass(slots=True)
class Struck:
    """One run and what was done to it."""

    run: RunDirectory
    ranks: int
    seen: list[Seen] = field(default_factory=list)
    moments: list[str] = field(default_factory=list)


def run(*, seed: int, trials: int, folder: Path) -> Result:
    """Kills ranks until `trials` of them were killed."""
    dice, tally = random.Random(seed), Tally()
    struck: list[Struck] = []
    with at_work(folder) as person:
        golden = {size: weights(submitted(person, f"golden-{size}", size)) for size in _SIZES}
        while tally.trials < trials:
            size = "2x2" if len(struck) % 4 == 3 else "1x2"
            one = Struck(submitted(person, f"kills-{len(struck)}", size), _RANKS[size])
            struck.append(one)
            at_most = min(_PER_RUN, trials - tally.trials)
            problems = [*strike(one, dice, at_most=at_most), *end_problems(one.run, golden[size])]
            problems += lost_commits(one.seen, spans(lines_of(one.run)))
            what = f"{size} run {len(struck)}, ranks killed at {', '.join(one.moments) or 'no moment'}"
            tally.add(what, problems, trials=len(one.moments) or int(bool(problems)))
            if not one.moments and not problems and len(struck) > trials:
                break
    return tally.result(figures(struck))


def submitted(person: Person, name: str, size: str) -> RunDirectory:
    """Submits a run and returns it."""
    return submit(person, name, f"+cluster={size}", *_SIZES[size], *_WORDS)[1]


def strike(one: Struck, dice: random.Random, *, at_most: int) -> list[str]:
    """Kills ranks of a run until it is finished or enough were killed; returns what went wrong."""
    attempt = -1
    try:
        while len(one.moments) < at_most:
            attempt = next_attempt(one.run, attempt)
            if attempt < 0:
                break
            moment = "exit" if newest_commit(one.run) > _STEPS - 16 else dice.choice(_MOMENTS)
            if one.moments.count("exit") == _EXITS_PER_RUN:
                break
            if kill_at(one, moment, attempt=attempt, dice=dice):
                one.moments.append(moment)
    except AssertionError as err:
        return [str(err).partition("\n")[0]]
    return []


def next_attempt(run: RunDirectory, attempt: int) -> int:
    """Returns the number of an attempt after this one as soon as it began; -1 where the run is finished instead."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if run.result.exists():
            return -1
        if (newest := newest_attempt(run)) > attempt:
            return newest
        time.sleep(0.02)
    raise AssertionError(f"{run.path}: no attempt after {attempt} within {PATIENCE_S:.0f} s")


def kill_at(one: Struck, moment: str, *, attempt: int, dice: random.Random) -> bool:
    """Kills one rank of an attempt at a moment of it; returns False where the run was finished before."""
    rank, share = dice.randrange(one.ranks), dice.random()
    began = time.monotonic()
    pid = wait_for_rank(one.run, rank, attempt)
    if pid is None or not wait_for_moment(one.run, moment, attempt=attempt, share=share, pid=pid):
        return False
    before = look(one.run, attempt)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        one.seen.append(before)
        print(
            f"   {moment}: rank {rank} of attempt {attempt} {time.monotonic() - began:.2f} s after its start, "
            f"step {before.committed} is committed",
            flush=True,
        )
        return True
    return False


def wait_for_rank(run: RunDirectory, rank: int, attempt: int) -> int | None:
    """Returns a rank's process as soon as there is one; None where the attempt ended without it."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and not run.result.exists() and newest_attempt(run) == attempt:
        with suppress(AssertionError):
            return rank_pid(run, rank, attempt=attempt)
        time.sleep(0.02)
    return None


def wait_for_moment(run: RunDirectory, moment: str, *, attempt: int, share: float, pid: int) -> bool:
    """Waits for a moment of an attempt; returns whether the process is still there then.

    Args:
        run: the run.
        moment: one of the names above.
        attempt: number of the attempt.
        share: where in the moment, from 0 to 1.
        pid: the process.
    """
    if moment in ("start", "rendezvous"):
        # Imports take the first second; ranks meet, load and build in the second one.
        time.sleep(share if moment == "start" else 0.8 + 1.7 * share)
        return is_there(pid)
    deadline = time.monotonic() + PATIENCE_S
    known = names(run)
    while is_there(pid) and time.monotonic() < deadline:
        if has_come(run, moment, attempt=attempt, known=known):
            time.sleep({"step": share, "exit": 0.5 * share}.get(moment, 0.0))
            return is_there(pid)
        time.sleep(0.01 if moment in ("step", "exit") else _LOOK_EVERY_S)
    return False


def has_come(run: RunDirectory, moment: str, *, attempt: int, known: set[str]) -> bool:
    """Returns whether a moment has come; `known` are the checkpoints, staging directories too, when waiting began."""
    if moment == "step":
        return any(line["attempt"] == attempt for line in lines_of(run)[-1:])
    if moment == "exit":
        return any(line["step"] == _STEPS for line in lines_of(run)[-1:])
    # A new attempt renames what it goes on from; the id of the save stays.
    saves = {_save_id(name) for name in known}
    new = [name for name in names(run) if name.startswith("checkpoint_") and _save_id(name) not in saves]
    return any(name.endswith(".tmp") == (moment == "save") for name in new)


def _save_id(name: str) -> str:
    return name.removesuffix(".tmp").rpartition("_")[2]


def names(run: RunDirectory) -> set[str]:
    """Returns what lies in the directory of checkpoints."""
    try:
        return set(os.listdir(run.checkpoints))  # noqa: PTH208  # names are enough, a thousand times a second
    except FileNotFoundError:
        return set()


def is_there(pid: int) -> bool:
    """Returns whether a process has not ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def figures(struck: list[Struck]) -> dict[str, str]:
    """Returns what was measured over all runs."""
    moments = Counter(moment for one in struck for moment in one.moments)
    steps = [spans(lines_of(one.run)) for one in struck]
    again = [lost_steps(its, attempt) for its in steps for attempt in its]
    known = [count for count in again if count is not None]
    return {
        "runs": str(len(struck)),
        "kills": ", ".join(f"{count} at {moment}" for moment, count in sorted(moments.items())),
        "committed steps lost": str(
            sum(len(lost_commits(one.seen, its)) for one, its in zip(struck, steps, strict=True))
        ),
        "steps done again per kill": f"{statistics.mean(known):.1f} of at most 8" if known else "none",
    }
