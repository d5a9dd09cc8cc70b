"""One run on 2 nodes x 2 ranks is interrupted again and again, in every way there is; its golden twin is left alone.

Dropout and random augmentation are on, and the steps count the samples that they were given (`counted`). In the end
every line of metrics.jsonl, also of steps done twice, and the weights must have the golden run's bits, and each sample
must have been used exactly once in each epoch of the steps that count.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.files import read_lines
from slurm_train.rundir.jobs import read_job
from slurm_train.rundir.layout import RunDirectory
from slurm_train.tools.devcluster.cluster import start_node, stop_node
from slurm_train.tools.devcluster.plan import DEFAULT_STATE_DIR, load_plan
from tests.campaigns.checker import check
from tests.campaigns.history import Fault, read_history, watching
from tests.campaigns.result import Result
from tests.support.command_line import Person
from tests.support.controller_faults import controller_away
from tests.support.process_faults import kill, rank_pid, srun_pid, supervisor_pid
from tests.support.slurm_runs import all_logs, job_state, wait_until_finished
from tests.support.waiting import wait_for

NUM_SAMPLES = 97
NUM_RANKS = 4
PATIENCE_S = 240.0
STEP_S = 0.25
_WORDS = (
    "+cluster=2x2",
    "model._target_=counted.Net",
    "data._target_=counted.Samples",
    f"data.size={NUM_SAMPLES}",
    "train.log_every_steps=1",
    "train.eval_every_steps=50",
    "train.samples_digest=true",
    "train.threads=1",
    "train.sample_tokens=0",
    "batch.global_size=8",
    "checkpoint.every_steps=5",
)


@dataclass(slots=True, kw_only=True)
class Victim:
    """The run that is interrupted, and who may type `resume`."""

    run: RunDirectory
    person: Person
    random: random.Random

    @property
    def attempt(self) -> dict[str, Any]:
        """The newest attempt as the ledger has it."""
        return read_ledger(self.run)[-1]

    @property
    def number(self) -> int:
        """Number of the newest attempt, -1 before the first."""
        ledger = read_ledger(self.run)
        return int(ledger[-1]["attempt"]) if ledger else -1

    @property
    def job(self) -> str:
        """The job of the newest attempt."""
        return str(self.attempt["job_id"])

    @property
    def step(self) -> int:
        """The newest step of the newest attempt, 0 before its first."""
        lines = [line for line in read_lines(self.run.metrics) if "loss" in line]
        return int(lines[-1]["step"]) if lines and lines[-1]["attempt"] == self.number else 0

    def rank(self, rank: int) -> int:
        """Returns the process of a rank."""
        return rank_pid(self.run, rank, attempt=self.number)

    def node(self) -> str:
        """Returns one of its nodes."""
        return str(self.random.choice(self.attempt["nodes"]))


def kill_a_rank(victim: Victim) -> None:
    kill(victim.rank(victim.random.randrange(1, NUM_RANKS)))


def kill_rank_0(victim: Victim) -> None:
    kill(victim.rank(0))


def kill_srun(victim: Victim) -> None:
    kill(srun_pid(victim.run))


def kill_slurmstepd(victim: Victim) -> None:
    kill(_parent_of(victim, victim.random.randrange(NUM_RANKS)))


def kill_the_batch_script(victim: Victim) -> None:
    job = victim.job
    kill(supervisor_pid(victim.run))
    _resume_when(victim, job, "FAILED")


def cancel_and_resume(victim: Victim) -> None:
    job = victim.job
    _command("scancel", job)
    _resume_when(victim, job, "CANCELLED")


def preempt(victim: Victim) -> None:
    """An urgent job takes the run's nodes; ranks have the grace time to save."""
    nodes = ",".join(victim.attempt["nodes"])
    words = ("--qos=urgent", f"--nodelist={nodes}", "--nodes=2", "--exclusive", "--output=/dev/null")
    _command("sbatch", "--job-name=exactness-urgent", *words, "--wrap=sleep 1")


def requeue(victim: Victim) -> None:
    _command("scontrol", "requeue", victim.job)


def warn_of_the_limit(victim: Victim) -> None:
    """What `--signal=USR2@...` does before a time limit."""
    _command("kill", "-USR2", *(str(victim.rank(rank)) for rank in range(NUM_RANKS)))


def stop_a_node_daemon(victim: Victim) -> None:
    """The ranks live on for a while, beside their successors."""
    node, number = victim.node(), victim.number
    stop_node(DEFAULT_STATE_DIR, node=node)
    try:
        wait_for(lambda: victim.number > number, within_s=PATIENCE_S, what="another attempt")
    finally:
        start_node(DEFAULT_STATE_DIR, node=node)


def take_a_node_down(victim: Victim) -> None:
    node, number = victim.node(), victim.number
    _command("scontrol", "update", f"nodename={node}", "state=down", "reason=exactness")
    try:
        wait_for(lambda: victim.number > number, within_s=PATIENCE_S, what="another attempt")
    finally:
        # With ReturnToService=2 it comes back by itself as soon as it registers, and then there is nothing to resume.
        subprocess.run(["scontrol", "update", f"nodename={node}", "state=resume"], capture_output=True, check=False)
        wait_for(lambda: _is_up(node), within_s=60, what=f"{node} to come back")


def kill_slurmctld_and_a_rank(victim: Victim) -> None:
    plan = load_plan(DEFAULT_STATE_DIR)
    assert plan is not None, "no cluster is up"
    with controller_away(plan):
        kill_a_rank(victim)
        time.sleep(1.0 + 2.0 * victim.random.random())


INTERRUPTIONS: tuple[Callable[[Victim], None], ...] = (
    kill_a_rank,
    kill_rank_0,
    preempt,
    kill_srun,
    requeue,
    warn_of_the_limit,
    kill_slurmctld_and_a_rank,
    kill_slurmstepd,
    take_a_node_down,
    cancel_and_resume,
    kill_the_batch_script,
    stop_a_node_daemon,
)


def choose(random_: random.Random, count: int) -> list[Callable[[Victim], None]]:
    """Returns so many interruptions in a random order: each kind once before any comes again."""
    chosen: list[Callable[[Victim], None]] = []
    while len(chosen) < count:
        chosen += random_.sample(INTERRUPTIONS, min(len(INTERRUPTIONS), count - len(chosen)))
    random_.shuffle(chosen)
    return chosen


def run(*, seed: int, trials: int, folder: Path) -> Result:
    """Interrupts one run so many times; see the module."""
    random_ = random.Random(seed)
    shutil.copy(Path(__file__).with_name("counted.py"), folder)
    person = Person(folder)
    steps = 40 + 30 * trials
    golden = _submit(person, "golden", steps)
    with _cancelled_at_the_end(golden):
        wait_until_finished(golden, within_s=2 * PATIENCE_S)
    say(f"golden run: {steps} steps, nothing happened to it")
    victim = Victim(run=_submit(person, "interrupted", steps, f"model.step_s={STEP_S}"), person=person, random=random_)
    faults: list[Fault] = []
    problems: list[str] = []
    with watching(victim.run) as seen, _cancelled_at_the_end(victim.run):
        for number, interrupt in enumerate(choose(random_, trials)):
            problems += _try_one(victim, number, interrupt, faults)
        with suppress(AssertionError):
            wait_until_finished(victim.run, within_s=2 * PATIENCE_S)
    history = read_history(victim.run, seen=seen, faults=faults)
    found = check(history, golden=read_history(golden), num_samples=NUM_SAMPLES)
    ledger = read_ledger(victim.run)
    figures = {
        "interruptions": ", ".join(fault.what for fault in faults),
        "attempts": f"{len(ledger)}",
        "reasons in the ledger": ", ".join(str(entry.get("reason", "none")) for entry in ledger),
        "lines of steps compared": f"{len(history.lines)} of {steps} steps",
        "epochs": f"{8 * steps // NUM_SAMPLES}",
    }
    # What is wrong in the end cannot be laid on one of the interruptions.
    held = 0 if found else trials - len(problems)
    return Result(trials=trials, held=held, figures=figures, problems=(*problems, *found[:20]))


def _try_one(victim: Victim, number: int, interrupt: Callable[[Victim], None], faults: list[Fault]) -> Iterator[str]:
    """Interrupts the run once it has done a few steps, and waits until it does steps again; yields what is wrong."""
    name = interrupt.__name__.replace("_", " ")
    began_s = time.monotonic()
    try:
        _wait_for_steps(victim, victim.random.randint(2, 12))
        before, step = victim.number, victim.step
        faults.append(Fault(time_unix_s=time.time(), what=name))
        interrupt(victim)
        wait_for(lambda: victim.number > before, within_s=PATIENCE_S, what=f"another attempt after {name}")
        _wait_for_steps(victim, 1)
    except Exception as err:  # whatever it is, the next interruption has its own chance
        say(f"interruption {number + 1}: {name}: PROBLEM: {type(err).__name__}: {err}")
        print(all_logs(victim.run)[-3000:], flush=True)
        yield f"interruption {number + 1}, {name}: {(str(err) or type(err).__name__).partition(chr(10))[0]}"
        return
    reason = read_ledger(victim.run)[before].get("reason", "no end line")
    say(
        f"interruption {number + 1}: {name} at step {step}: {reason}, "
        f"back in attempt {victim.number} after {time.monotonic() - began_s:.0f} s"
    )


def _wait_for_steps(victim: Victim, count: int) -> None:
    """Returns when the newest attempt has done so many steps."""

    def done() -> bool:
        assert not victim.run.result.exists(), "the run is finished, there is nothing left to interrupt"
        number = victim.number
        lines = [line for line in read_lines(victim.run.metrics) if "loss" in line and line["attempt"] == number]
        return len(lines) >= count

    wait_for(done, within_s=PATIENCE_S, what=f"{count} steps of the newest attempt")


def _submit(person: Person, name: str, steps: int, *words: str) -> RunDirectory:
    return person.types(*_WORDS, f"train.max_steps={steps}", f"run.name={name}", *words).job_and_run[1]


def _resume_when(victim: Victim, job: str, state: str) -> None:
    wait_for(lambda: job_state(job) == state, within_s=PATIENCE_S, what=f"job {job} to be {state}")
    resumed = victim.person.types("resume", victim.run.name)
    assert resumed.code == 0, resumed.err


def _parent_of(victim: Victim, rank: int) -> int:
    text = Path(f"/proc/{victim.rank(rank)}/stat").read_text()
    return int(text.rpartition(")")[2].split()[1])


def _is_up(node: str) -> bool:
    argv = ["sinfo", "--noheader", f"--nodes={node}", "--format=%T"]
    states = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60).stdout.split()
    return bool(states) and set(states) <= {"idle", "mixed", "allocated", "completing"}


def _command(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"


@contextmanager
def _cancelled_at_the_end(run: RunDirectory) -> Iterator[None]:
    try:
        yield
    finally:
        job = read_job(run)
        if job is not None and not run.result.exists():
            subprocess.run(["scancel", "--quiet", job.job_id], check=False, timeout=60)


def say(text: str) -> None:
    """Prints a line with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
