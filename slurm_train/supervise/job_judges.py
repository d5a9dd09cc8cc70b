"""The judges of a job of Slurm: what to do about lost nodes, steps in the way, free nodes, and ranks in waiting."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from slurm_train.errors import EXIT_ORPHANED
from slurm_train.rundir.events import append_event
from slurm_train.rundir.files import last_lines, read_record
from slurm_train.rundir.ledger import End, read_ledger
from slurm_train.rundir.paths import RunDirectory, list_checkpoints, name_of
from slurm_train.rundir.plan_record import PlanRecord
from slurm_train.rundir.timing import CAUSES, Spent, last_step, read_notice
from slurm_train.slurm.allocation import compact_nodelist, parse_nodelist
from slurm_train.slurm.records import nodes_in, unix_s
from slurm_train.supervise.best_effort import say
from slurm_train.supervise.growth import (
    Growth,
    Prospect,
    assess,
    newest_growth_unix_s,
    restart_seconds,
    step_seconds,
    wait_seconds,
)
from slurm_train.supervise.job import SlurmJob
from slurm_train.supervise.look import Look
from slurm_train.supervise.nodes import NodePool
from slurm_train.supervise.ranks import LINGER_S, ORPHAN_LINGER_S
from slurm_train.supervise.watch import Judge, Verdict

_SOON_S = 60.0
"""A start within this time counts as now: clocks differ, and Slurm's scheduler runs at intervals."""


def ended_long_ago(look: Look) -> bool:
    """Returns whether the ranks ended so long ago that srun must have missed their end."""
    mark = look.mark
    if mark is None:
        return False
    linger_s = ORPHAN_LINGER_S if mark.exit_code == EXIT_ORPHANED else LINGER_S
    return look.now_unix_s - mark.time_unix_s > linger_s


class LostNodes(Judge):
    """Detects lost nodes before Slurm does, which needs SlurmdTimeout for it (300 s by default).

    The nodes are asked if ranks have failed and srun does not end, or if the heartbeats of a node have stopped.

    Args:
        ask: asks the nodes, and notes those that do not answer.
    """

    name = "the look for lost nodes"
    _FAILED_S = 3.0
    _SILENT_S = 12.0
    _ASK_AGAIN_S = 60.0

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask
        self._beats: dict[str, tuple[int, float]] = {}
        """For each node the sum of its ranks' beats, and since when it has not changed."""
        self._last_question_s = -math.inf

    def __call__(self, look: Look) -> Verdict | None:
        """Asks the nodes if there is a reason to, at most once a minute."""
        sums = Counter[str]()
        for beat in look.ranks.beats.values():
            # More than 0 from the first heartbeat on.
            sums[beat.host] += beat.beats + 1
        for host, total in sums.items():
            if self._beats.get(host, (0, 0.0))[0] != total:
                self._beats[host] = (total, look.now_s)
        mark = look.mark
        has_failed = mark is not None and look.now_unix_s - mark.time_unix_s > self._FAILED_S
        is_silent = any(look.now_s - since_s > self._SILENT_S for _, since_s in self._beats.values())
        is_due = look.now_s - self._last_question_s > self._ASK_AGAIN_S
        if not (has_failed or is_silent) or not is_due:
            return None
        self._last_question_s = look.now_s
        return self._ask


class StepsInTheWay(Judge):
    """Detects a step of an earlier attempt that keeps srun from starting the ranks, and that cannot be ended.

    A slurmctld that was killed restarts from its state files. If a step ended after these were written, slurmctld
    regards it as running until the job ends, also after it was cancelled (22.05), and srun waits for its cores.

    Args:
        job: the job.
        name: of the step of the ranks.
        earlier: names of the steps of earlier attempts.
    """

    name = "the look for steps in the way"
    _EVERY_S = 10.0
    _MOST_LOOKS = 3

    def __init__(self, job: SlurmJob, name: str, *, earlier: Collection[str]) -> None:
        self._job = job
        self._name = name
        self._earlier = earlier
        self._has_begun = False
        self._looks = 0
        self._due_s = time.monotonic() + self._EVERY_S
        self.stuck_steps = ""
        """The ids of such steps that could not be ended, "" for none."""

    def __call__(self, look: Look) -> Verdict | None:
        """Asks Slurm for the steps until the ranks have begun."""
        self._has_begun = self._has_begun or bool(look.ranks.beats)
        if self._has_begun or look.now_s < self._due_s:
            return None
        self._due_s = look.now_s + self._EVERY_S
        return self._cancel_steps

    def _cancel_steps(self) -> None:
        """Cancels such steps, and after some looks reports those that remain."""
        steps: dict[str, str] = {}
        for job_id in self._job.job_ids:
            steps |= self._job.commands.steps(job_id)
        self._has_begun = self._name in steps.values()
        earlier_steps = [step for step, name in steps.items() if name in self._earlier]
        self._looks = self._looks + 1 if earlier_steps and not self._has_begun else 0
        if self._looks >= self._MOST_LOOKS:
            self.stuck_steps = ", ".join(earlier_steps)
        elif self._looks:
            for step in earlier_steps:
                self._job.commands.cancel_step(step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How many nodes a job would have if it were requeued now."""

    nodes: int
    """Its own nodes that are not bad, and free nodes; at most as many as the run can use."""
    exclude: tuple[str, ...] = ()
    """Nodes of the job that were found bad."""
    limit_reason: str = ""
    """Why it would not get more nodes; "" where there is no reason."""


def present_nodes(record: Mapping[str, str] | None, pool: NodePool) -> Sequence[str]:
    """Returns the nodes that a job has now, by its record; all of its pool where that does not say."""
    return (nodes_in(record, "NodeList") if record is not None else []) or pool.nodes


def room_for(run: RunDirectory, job: SlurmJob, pool: NodePool, *, left_out: Collection[str]) -> Room:
    """Asks Slurm how many nodes the job would have if it were requeued now.

    `sbatch --test-only` counts the nodes of running jobs as taken, also those of this job. So it is asked only for
    the missing nodes, with the job's own nodes excluded. Between the requeue and its start the job's own nodes are
    free for anybody: where another job waits for nodes of the same partitions, there is no room.

    Args:
        run: the run, whose script names what it asks for.
        job: its job.
        pool: the nodes of the job.
        left_out: nodes of it that were lost or found bad.

    Raises:
        ClusterError: Slurm does not answer.
    """
    record = job.commands.show_job(job.job_id)
    present = list(present_nodes(record, pool))
    bad = tuple(node for node in present if node in left_out)
    num_healthy = len(present) - len(bad)
    num_missing = pool.sizes[-1] - num_healthy
    if num_missing <= 0:
        return Room(nodes=pool.sizes[-1], exclude=bad)
    if record.get("Requeue") == "0" or nodes_in(record, "ReqNodeList"):
        return Room(nodes=num_healthy, limit_reason="the job may not be requeued, or names its nodes")
    waiting = job.waiting_for(present)
    if waiting:
        return Room(nodes=num_healthy, limit_reason=f"job {waiting[0]} waits for nodes of the same partition")
    excluded = compact_nodelist([*present, *nodes_in(record, "ExcNodeList")])
    flags = (f"--nodes=1-{num_missing}", f"--exclude={excluded}")
    verdict = job.commands.test_only(run.submit_script, *flags)
    start_unix_s = unix_s(verdict.start)
    is_now = start_unix_s is not None and start_unix_s <= time.time() + _SOON_S
    if not is_now or verdict.preempts:
        return Room(nodes=num_healthy, limit_reason="no other node is free")
    num_free = len(parse_nodelist(verdict.nodelist))
    return Room(nodes=num_healthy + min(num_free, num_missing), exclude=bad)


class GrowthWatch(Judge):
    """Asks after saves whether a requeue for more nodes would pay off, and if so stops the ranks for it.

    Args:
        run: the run.
        attempt: number of the attempt.
        job: the job.
        pool: its nodes.
        nodes: how many of them the ranks use.
        left_out: nodes of the job that were lost or found bad.
        stop: asks the ranks to stop for it.
        every_min: `requeue.grow_every_min`; "auto" for a default, but never where jobs may be preempted.
    """

    name = "the look for more nodes"
    _EVERY_S = 5.0
    _AUTO_MIN = 30

    def __init__(
        self,
        run: RunDirectory,
        attempt: int,
        job: SlurmJob,
        pool: NodePool,
        *,
        nodes: int,
        left_out: Collection[str],
        stop: Callable[[Growth], None],
        every_min: int | Literal["auto"],
    ) -> None:
        self._run = run
        self._attempt = attempt
        self._job = job
        self._pool = pool
        self._nodes = nodes
        self._left_out = left_out
        self._stop = stop
        self._has_asked = False
        """Whether the ranks were asked to stop."""
        self._is_auto = every_min == "auto"
        ledger = read_ledger(run)
        every_s = 60.0 * (self._AUTO_MIN if every_min == "auto" else every_min)
        self._wait_s = wait_seconds(ledger, every_s=every_s)
        since_growth_s = time.time() - newest_growth_unix_s(ledger)
        self._due_s = time.monotonic() + max(self._wait_s - since_growth_s, every_s)
        self._look_s = 0.0
        self._last_seen_step: int | None = None
        self._newest_note = ""

    def __call__(self, look: Look) -> Verdict | None:
        """Asks Slurm when the question is due and a checkpoint was completed after that."""
        if self._has_asked or look.now_s < max(self._due_s, self._look_s):
            return None
        self._look_s = look.now_s + self._EVERY_S
        return partial(self._ask_after_save, look.now_s)

    def _ask_after_save(self, now_s: float) -> None:
        newest = next((name_of(path).step for path in list_checkpoints(self._run.checkpoints)), 0)
        if self._last_seen_step is None or newest <= self._last_seen_step:
            self._last_seen_step = newest
            return
        self._last_seen_step = None
        self._due_s = now_s + self._wait_s
        if self._is_auto and self._job.may_be_preempted():
            self._note("it does not grow: jobs of its QOS and partition may be preempted (requeue.grow_every_min)")
            self._due_s = math.inf
            return
        growth = self._assess()
        if growth is None:
            return
        if not growth.is_worth_it:
            self._note(f"it does not grow: {growth.sentence}")
            return
        self._note(f"it grows: {growth.sentence}")
        self._stop(growth)
        self._has_asked = True

    def _assess(self) -> Growth | None:
        """Returns what a requeue would gain now, None where there is no room or nothing was measured yet."""
        run = self._run
        room = room_for(run, self._job, self._pool, left_out=self._left_out)
        nodes = self._nodes
        larger = max((size for size in self._pool.sizes if size <= room.nodes), default=0)
        if larger <= nodes:
            if room.limit_reason:
                self._note(f"it does not grow: {room.limit_reason}")
            return None
        spent = read_record(run.account(self._attempt), Spent)
        if spent is None:
            return None
        ledger = read_ledger(run)
        start_s = spent.begin_unix_s - ledger[-1].start.time_unix_s
        until_now = End(
            time_unix_s=time.time(),
            first_step=spent.first_step,
            last_step=spent.first_step + spent.steps,
            seconds={"start_s": start_s, **{cause: getattr(spent, cause) for cause in CAUSES[1:-1]}},
        )
        ledger[-1] = replace(ledger[-1], end=until_now)
        pace = step_seconds(ledger, nodes=nodes, larger=larger)
        if pace is None:
            return None
        step, larger_step = pace
        end_unix_s = read_notice(run, self._attempt).end_unix_s
        growth = assess(
            Prospect(
                nodes=nodes,
                larger=larger,
                step=step,
                larger_step=larger_step,
                restart=restart_seconds(ledger, delay_s=self._job.requeue_delay_s(), save_s=spent.longest_save_s),
                steps_left=_steps_left(run),
                time_left_s=None if end_unix_s is None else end_unix_s - time.time(),
            )
        )
        return replace(growth, exclude=room.exclude)

    def _note(self, sentence: str) -> None:
        """Prints a sentence and writes it down, if it differs from the one before."""
        if sentence == self._newest_note:
            return
        self._newest_note = sentence
        say(sentence)
        append_event(self._run, "growth", attempt=self._attempt, sentence=sentence)


def _steps_left(run: RunDirectory) -> int | None:
    """Returns how many steps a run has not taken yet, None where it has no end that is known."""
    # A run that is counted in epochs has its number of steps in the metrics, not in the plan.
    lines = last_lines(run.metrics)
    max_steps = lines[-1].get("max_steps") if lines else None
    max_steps = max_steps or PlanRecord.read(run.plan).max_steps
    return None if max_steps is None else max(0, int(max_steps) - last_step(run))


class NextRanks(Judge):
    """Starts the ranks in waiting when the ranks of the attempt train, so that they take no cores from their start."""

    name = "the start of the ranks in waiting"

    def __init__(self, start: Callable[[], None]) -> None:
        self._start = start
        self._has_started = False

    def __call__(self, look: Look) -> Verdict | None:
        """Starts them, once."""
        ranks = look.ranks
        is_complete = len(ranks.beats) == ranks.world_size
        if self._has_started or not is_complete or not all(beat.settled for beat in ranks.beats.values()):
            return None
        self._has_started = True
        return self._start
