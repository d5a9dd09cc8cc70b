"""Kills any rank at any moment, on this machine: the run resumes each time, and no committed step is lost.

The ranks are the product's own workers under its own supervisor; only the processes are forked from one that has
imported torch, so that a life costs a second. A kill is aimed at a random time after the start, at a random moment of a
phase, at an interpreter that still imports, or at all ranks at once. After each one the run directory must have a
verified checkpoint that is no older than the newest that was complete right before; now and then a run is let end and
compared with its golden one.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from slurm_train.checkpoint.verify import newest_verified
from slurm_train.config.frozen import load_config
from slurm_train.distributed.master import probe_port
from slurm_train.rundir.events import first_mark
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.job_variables import scrubbed
from slurm_train.supervise.job import Job
from slurm_train.supervise.ranks import LocalRanks
from slurm_train.supervise.supervisor import Supervisor
from tests.campaigns.checker import History, Look, check, look, read_history
from tests.campaigns.moments import AT_THE_END, NOTE, PHASES, Moment, Note, newest_complete
from tests.campaigns.record import Tally
from tests.campaigns.victims import COUNTED, COUNTED_MODULE, NUM_SAMPLES, UNSHARED
from tests.support.command_line import REPOSITORY, Person
from tests.support.steps import FunctionStep
from tests.support.warm_ranks import WarmRank, start_rank

STEPS = 120
KILLS_PER_RUN = 15
LANES = 2
LONGEST_LIFE_S = 1.2
"""Kills that are aimed at a time come so long after the start at most."""
PATIENCE_S = 2.0
"""How long a rank that has lost a peer may take to end by itself; one that waits in the rendezvous takes longer."""
_NOTED = Path(__file__).with_name("moments.py")
_WORDS = (*COUNTED, UNSHARED, "train.start_timeout_s=20", "checkpoint.every_steps=2")
_ON_THE_WAY = [name for name in PHASES if name not in AT_THE_END]


class Aim(NamedTuple):
    """One kill, chosen before the ranks start.

    Args:
        rank: who dies; None: all ranks at once.
        moment: the rank kills itself then; None: the driver does, `after_s` after the start.
        after_s: see moment; of `NOBODY` longer than any attempt.
        cold: the ranks are fresh interpreters, which import torch themselves.
    """

    rank: int | None = 0
    moment: Moment | None = None
    after_s: float = 0.0
    cold: bool = False

    def __str__(self) -> str:
        who = "all ranks" if self.rank is None else f"rank {self.rank}"
        if self.moment is not None:
            return f"{who} {1e3 * self.moment.delay_s:.1f} ms into {self.moment.phase} no. {self.moment.nth}"
        return f"{who} after {self.after_s:.2f} s{' of a fresh interpreter' if self.cold else ''}"


NOBODY = Aim(after_s=threading.TIMEOUT_MAX)


def choose_aim(dice: random.Random, *, world_size: int, at_the_end: bool) -> Aim:
    """Returns the next kill."""
    rank = dice.randrange(world_size)
    kind = dice.random()
    if not at_the_end and kind < 0.03:
        return Aim(rank=rank, after_s=dice.uniform(0.0, 4.0), cold=True)
    if not at_the_end and kind < 0.4:
        return Aim(rank=None if kind < 0.13 else rank, after_s=dice.uniform(0.0, LONGEST_LIFE_S))
    phase = dice.choice(AT_THE_END if at_the_end else _ON_THE_WAY)
    nth = 1 if phase in (*AT_THE_END, "meet", "group", "resume") else 1 + min(int(dice.expovariate(0.3)), 12)
    of_phase = PHASES[phase]
    moment = Moment(phase, nth, dice.uniform(0.0, of_phase.lasts_s))
    return Aim(rank=0 if of_phase.only_first else rank, moment=moment)


@dataclass(slots=True, kw_only=True)
class Life:
    """One run that is killed again and again."""

    run: RunDirectory
    world_size: int
    modules: Path
    """A folder with what the ranks import before anything else."""
    tally: Tally
    faults: list[str] = field(default_factory=list)
    seen: list[Look] = field(default_factory=list)
    newest: int = 0
    """Step of the newest checkpoint that was ever complete."""
    phases: Counter[str] = field(default_factory=Counter)
    """What the killed ranks were at."""
    killed_peers: int = 0

    def live(self, dice: random.Random, *, kills: int) -> None:
        """Lives through so many kills, or fewer where the run ends before, and then to the end."""
        done = 0
        while done < kills and not self.run.result.exists():
            at_the_end = kills > 4 and done >= kills - 2
            done += self.attempt(choose_aim(dice, world_size=self.world_size, at_the_end=at_the_end))
        for _ in range(2):
            if not self.run.result.exists():
                self.attempt(NOBODY)

    def attempt(self, aim: Aim) -> bool:
        """Runs one attempt; returns whether somebody was killed in it."""
        attempts: list[Attempt] = []

        def launch(number: int) -> int:
            attempts.append(Attempt(self, number, aim))
            return attempts[0].run()

        settings = load_config(self.run.config).requeue
        step = FunctionStep(launch, world_size=self.world_size)
        code = Supervisor(self.run, Job(os.environ), step, settings).supervise()
        ended = attempts[0]
        if not ended.dead:
            if code != 0:
                mark = first_mark(self.run, ended.number)
                words = f"{self.run.path}: attempt {ended.number}, not killed, ended with {code}: {mark and mark.cause}"
                self.tally.spoil([words], trials=1)
            return False
        self._look_after(ended)
        return True

    def judge(self, golden: History) -> None:
        """Compares the run that has ended with its golden one."""
        history = read_history(self.run, seen=self.seen, faults=self.faults)
        problems = [f"{self.run.path}: {one}" for one in check(history, golden=golden, num_samples=NUM_SAMPLES)]
        self.tally.spoil(problems[:5], trials=max(1, len(self.faults)))
        if not problems:
            shutil.rmtree(self.run.path.parent, ignore_errors=True)

    def _look_after(self, ended: Attempt) -> None:
        """Checks what a kill has left."""
        phases = [note.phase for note in ended.dead.values()]
        phase = "+".join(sorted(set(phases)))
        self.faults.append(f"{ended.aim} ({phase})")
        self.seen.append(look(self.run))
        self.newest = max(self.newest, ended.visible)
        search = newest_verified(self.run.checkpoints)
        found = search.newest[1].step if search.newest else 0
        problems = [f"{one.path.name} was complete: {one.reason}" for one in search.passed_over]
        if found < self.newest:
            problems.append(f"checkpoint {self.newest} was complete, what verifies is {found}")
        self.newest = max(self.newest, found)
        self.phases.update(phases)
        words = f"{self.run.path.parent.name} attempt {ended.number}: {ended.aim}, in {phase}; checkpoint {found}"
        self.tally.add(words, problems)


class Attempt:
    """The ranks of one attempt, and the kill that is aimed at them."""

    def __init__(self, life: Life, number: int, aim: Aim) -> None:
        self.life, self.number, self.aim = life, number, aim
        self.visible = 0
        """Newest complete checkpoint right before the kill."""
        self.ranks: list[WarmRank | subprocess.Popen[bytes]] = []
        self._done = threading.Event()
        self._hit: set[int] = set()

    @property
    def dead(self) -> dict[int, Note]:
        """The ranks that the kill has hit, and what each was at."""
        killed = [rank for rank, its in enumerate(self.ranks) if its.returncode == -signal.SIGKILL]
        notes = {rank: Note.read(self._notes(rank)) for rank in killed}
        return {rank: note for rank, note in notes.items() if rank in self._hit or note.visible >= 0}

    def _notes(self, rank: int) -> Path:
        return self.life.run.path / f"notes_{self.number}_{rank}"

    def run(self) -> int:
        """Starts the ranks, kills, waits as the local launcher does; returns the exit code of the whole."""
        env = scrubbed(os.environ) | {"SLURM_TRAIN_ATTEMPT": str(self.number), "MASTER_ADDR": "127.0.0.1"}
        env["PYTHONPATH"] = f"{REPOSITORY}:{self.life.modules}"
        env["MASTER_PORT"] = str(probe_port(str(self.life.run.path), attempt=self.number, env=env))
        for rank in range(self.life.world_size):
            self.ranks.append(self._start(rank, env))
        ranks = LocalRanks(self.ranks, kill_after_s=PATIENCE_S)  # type: ignore[arg-type]  # same methods
        killer = threading.Thread(target=self._kill)
        killer.start()
        code = ranks.wait()
        self._done.set()
        killer.join()
        dead = self.dead
        self.visible = max([self.visible, *(note.visible for note in dead.values())])
        self.life.killed_peers += sum(one.returncode == -signal.SIGKILL for one in self.ranks) - len(dead)
        return code

    def _start(self, rank: int, env: dict[str, str]) -> WarmRank | subprocess.Popen[bytes]:
        size, run = str(self.life.world_size), self.life.run
        env = env | {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
        env |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        notes, log = self._notes(rank), run.rank_log(self.number, rank)
        notes.write_bytes(NOTE.pack(b"cold" if self.aim.cold else b"start", b"", -1))
        if self.aim.cold:
            with log.open("ab") as out:
                argv = [sys.executable, "-m", "slurm_train", "worker", str(run.path)]
                return subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        moment = self.aim.moment if self.aim.rank == rank else None
        modules = sorted(path.stem for path in self.life.modules.glob("*.py"))
        words = [str(self.life.modules), json.dumps(modules), str(notes), json.dumps(moment)]
        return start_rank(_NOTED, *words, "worker", str(run.path), env=env, log=log)

    def _kill(self) -> None:
        if self.aim.moment is not None or self._done.wait(self.aim.after_s):
            return
        self.visible = newest_complete(self.life.run.checkpoints)
        for number, rank in enumerate(self.ranks):
            if self.aim.rank in (None, number) and rank.returncode is None:
                self._hit.add(number)
                rank.send_signal(signal.SIGKILL)


def run(
    tally: Tally,
    *,
    seed: int,
    trials: int,
    folder: Path,
    steps: int = STEPS,
    modules: Sequence[Path] = (COUNTED_MODULE,),
) -> dict[str, str]:
    """Kills so many times, in runs of so many steps; the ranks import the modules before anything else."""
    # A short trial is not worth a second golden run, nor two lanes.
    is_short = trials <= KILLS_PER_RUN
    lanes = 1 if is_short else LANES
    own = folder / "modules"
    own.mkdir(parents=True, exist_ok=True)
    for path in modules:
        shutil.copy(path, own)
    with (folder / "supervisors.log").open("a") as log, redirect_stderr(log):
        golden = {size: train_golden(folder, size, steps=steps) for size in ((2,) if is_short else (2, 1))}
        began_s = time.monotonic()

        def kill_on(lane: int) -> list[Life]:
            """Lets one run after the other live until the lane's share of kills is done."""
            lives: list[Life] = []
            dice, left = random.Random(f"{seed} {lane}"), trials // lanes + (lane < trials % lanes)
            while left > 0:
                size = 1 if dice.random() < 0.1 and 1 in golden else 2
                run = copy_of(golden[size][0], folder / f"lane_{lane}_run_{len(lives)}")
                lives.append(Life(run=run, world_size=size, modules=own, tally=tally))
                lives[-1].live(dice, kills=min(KILLS_PER_RUN, left))
                lives[-1].judge(golden[size][1])
                left -= len(lives[-1].faults)
            return lives

        with ThreadPoolExecutor(lanes) as pool:
            lives = [life for of_lane in pool.map(kill_on, range(lanes)) for life in of_lane]
        wall_s = time.monotonic() - began_s
    phases = sum((life.phases for life in lives), Counter[str]())
    return {
        "unloadable or lost": f"{tally.trials - tally.held}",
        "runs ended and compared": f"{len(lives)}",
        "ranks killed in": ", ".join(f"{phase} {count}" for phase, count in phases.most_common()),
        "peers that had to be killed by the launcher": f"{sum(life.killed_peers for life in lives)}",
        "wall time per kill": f"{wall_s / max(tally.trials, 1):.2f} s",
    }


def train_golden(folder: Path, world_size: int, *, steps: int) -> tuple[RunDirectory, History]:
    """Trains the run that nobody disturbs, as a person would."""
    project = folder / f"golden_{world_size}"
    project.mkdir(exist_ok=True)  # on NFS a repeated request fails
    shutil.copy(COUNTED_MODULE, project)
    words = (*_WORDS, f"train.max_steps={steps}", f"run.processes={world_size}")
    done = Person(project).types(*words, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.code == 0, f"{done.out}\n{done.err}"
    (path,) = project.glob("runs/*/*")
    return RunDirectory(path), read_history(RunDirectory(path))


def copy_of(golden: RunDirectory, folder: Path) -> RunDirectory:
    """Returns a run that has not begun, with what the golden one was given."""
    copy = RunDirectory(folder / golden.path.name)
    copy.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in (golden.config, golden.plan):
        shutil.copy(path, copy.path)
    return copy
