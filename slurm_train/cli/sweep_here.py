"""Trains the runs of a sweep on this machine: one after the other, or some at a time, each in a process of its own.

A run that fails ends no other. Ctrl-C, or a closed terminal, asks the runs at work to save and stop; the same words
continue.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

from slurm_train.cli.multirun import missing_runs
from slurm_train.cli.outputs import RunOutput, make_outputs
from slurm_train.cli.terminal import note
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, EXIT_REQUEUE
from slurm_train.launch.provenance import write_provenance
from slurm_train.launch.source import Source
from slurm_train.launch.sweep import SweepPlan, describe
from slurm_train.launch.sweep_files import write_sweep
from slurm_train.rundir.sweep import Element, SweepDirectory, submitting
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.status.activity import writing

_LOOK_S = 0.2


@dataclass(slots=True)
class _Started:
    element: Element
    process: subprocess.Popen[bytes]


def run_here(
    plan: SweepPlan,
    source: Source,
    *,
    words: Sequence[str],
    env: Mapping[str, str],
    outputs: Sequence[RunOutput] = (),
) -> int:
    """Trains what is missing and returns 0, 1 if a run failed, 75 if it was asked to stop.

    Raises:
        RunError: another command here runs the same sweep.
    """
    sweep = plan.sweep
    with submitting(sweep):
        commands = SlurmCommands(env)
        missing = missing_runs([one.run for one in plan.plans], commands)
        holding = partial(writing, commands=commands)
        code = write_sweep(plan, source, dict.fromkeys(missing), words=words, holding=holding)
        make_outputs(outputs)
        if code is not None:
            write_provenance(code.provenance, source, words=words, slurm=None)
        print(f"- {sweep.path}", flush=True)
        todo = [element for element in plan.elements if element.run in missing]
        return train_each(sweep, todo, num_parallel=plan.max_parallel or 1, env=env)


def train_each(sweep: SweepDirectory, elements: Sequence[Element], *, num_parallel: int, env: Mapping[str, str]) -> int:
    """Trains runs that are on disk, so many at a time, and returns the exit code of the whole."""
    waiting, at_work, failed = list(elements), list[_Started](), 0
    with _heard_stop() as stop:
        while waiting or at_work:
            while waiting and len(at_work) < num_parallel and not (stop or sweep.stop_file.exists()):
                at_work.append(_start(waiting.pop(0), shares_terminal=num_parallel > 1, env=env))
            if stop:
                return _stop(at_work, num_waiting=len(waiting))
            if not at_work:
                break
            ended = [one for one in at_work if one.process.poll() is not None]
            failed += sum(not one.element.run.result.exists() for one in ended)
            at_work = [one for one in at_work if one not in ended]
            if not ended:
                time.sleep(_LOOK_S)
    if waiting:
        return _stopped(len(waiting))
    if elements:
        note(f"{len(elements) - failed} of {len(elements)} runs are finished; next:")
        for verb in ("status", "collate", "report"):
            note(f"  python -m slurm_train {verb} {sweep.sweep_id}")
    return EXIT_FAILURE if failed else EXIT_DONE


@contextlib.contextmanager
def _heard_stop() -> Iterator[list[int]]:
    """Gives the signals that asked for a stop so far (Ctrl-C, `kill`, a closed terminal): no exception at any line."""
    heard: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.signal(number, lambda number, _frame: heard.append(number)) for number in numbers}
    try:
        yield heard
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _stop(at_work: Sequence[_Started], *, num_waiting: int) -> int:
    # A terminal tells the runs as well, `kill` does not; asked twice they save once.
    for one in at_work:
        one.process.terminate()
    for one in at_work:
        one.process.wait()
    return _stopped(num_waiting + sum(not one.element.run.result.exists() for one in at_work))


def _stopped(num_left: int) -> int:
    note(f"stopped; {num_left} runs are not finished, and the same words continue them")
    return EXIT_REQUEUE


def _start(element: Element, *, shares_terminal: bool, env: Mapping[str, str]) -> _Started:
    run = element.run
    note(f"run {element.index}: {describe(element.overrides)}  {run.path}")
    # What a run says on stdout is for people here; stdout is for data.
    command = [sys.executable, "-m", "slurm_train", "resume", str(run.path)]
    log: BinaryIO | None = (run.logs / "batch.log").open("ab") if shares_terminal else None
    try:
        process = subprocess.Popen(
            command, env=dict(env), stdin=subprocess.DEVNULL, stdout=log or sys.stderr, stderr=log
        )
    finally:
        if log is not None:
            log.close()
    return _Started(element, process)
