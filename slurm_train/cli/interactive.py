"""`launch=interactive`: the run in an allocation of one's own, with rank 0's output on the terminal.

Inside an salloc (or a job of any kind) it runs there; outside it makes an allocation and gives it back at the end. The
run directory is that of any other run: the same words with launch=slurm, or `resume RUN launch=slurm`, continue it as a
job. Nothing is requeued: a person is waiting.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import FrameType

from slurm_train.cli.changes import weigh
from slurm_train.cli.logs import ChosenLog, LogPrinter
from slurm_train.cli.outputs import RunOutput, make_outputs
from slurm_train.cli.submit import avoid_bad_nodes, require_slurm
from slurm_train.cli.terminal import note
from slurm_train.launch.acceptance import require_acceptable
from slurm_train.launch.container import Ranks
from slurm_train.launch.interactive import require_room, salloc_words
from slurm_train.launch.plan import RunPlan
from slurm_train.launch.preparation import write_run_directory
from slurm_train.launch.provenance import write_provenance
from slurm_train.launch.script import render_script
from slurm_train.launch.source import Source
from slurm_train.rundir.files import size_of
from slurm_train.rundir.layout import RunDirectory, existing_attempts
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.environment import scrubbed
from slurm_train.status.activity import submitting, writing


def run_interactively(
    plan: RunPlan,
    source: Source | None,
    *,
    words: Sequence[str],
    env: Mapping[str, str],
    accept: Collection[str] = (),
    outputs: Sequence[RunOutput] = (),
) -> int:
    """Runs the plan in this allocation, or in one that is made for it, and returns the exit code.

    Args:
        plan: the run.
        source: its code; None: the snapshot that it has.
        words: the command line.
        env: the environment; SLURM_JOB_ID says that this is an allocation.
        accept: changes of a run in progress that the person accepts.
        outputs: what the run shall have besides its own directory.

    Raises:
        ClusterError: no Slurm here, or the allocation is too small, or Slurm would not give one.
        RunError: the run is active already, or it would not be the same training.
    """
    commands, run = SlurmCommands(env), plan.run
    require_slurm(commands, env)
    script = render_script(plan)
    job_id = env.get("SLURM_JOB_ID")
    if job_id is not None:
        require_room(plan, commands.show_job(job_id))
    with submitting(run, commands, inside=job_id):
        if job_id is None:
            require_acceptable(script, commands, plan)
        change = weigh(plan, source, accept=accept)
        Ranks(plan.config, run, plan.directory).make_mount_points()
        with writing(run, commands, inside=job_id):
            write_run_directory(plan, source, script=script, change=change)
        make_outputs(outputs)
    if source is not None:
        write_provenance(run.provenance, source, words=words, slurm=commands.version())
    if job_id is not None:
        return _attend(run, ["bash", str(run.submit_script)], env=env)
    return _attend(run, salloc_words(plan, avoid_bad_nodes(script, run, env)), env=scrubbed(env))


def _attend(run: RunDirectory, command: Sequence[str], *, env: Mapping[str, str]) -> int:
    """Runs a command to its end, prints what rank 0 says meanwhile, and passes Ctrl-C on as a polite stop."""
    before = max(existing_attempts(run), default=-1)
    # A session of its own keeps Ctrl-C on the terminal from reaching srun, which would kill the ranks.
    process = subprocess.Popen(list(command), env=dict(env), stdin=subprocess.DEVNULL, start_new_session=True)
    wish, printer = _Wish(run, process, before), LogPrinter(run, 0, attempt=None, env=env)
    with wish.heard():
        printer.follow(lambda: _newest_log(run, before), until=wish.is_over)
    code = process.wait()
    if code and not run.result.exists():
        note(f"ended with exit code {code}; `status {run.run_id}` says why, and the same command continues the run")
    return 128 - code if code < 0 else code


def _newest_log(run: RunDirectory, before: int) -> ChosenLog | None:
    """Returns rank 0's log of the newest attempt that began after `before`, else what srun says."""
    attempts = [number for number in existing_attempts(run) if number > before]
    if not attempts:
        return None
    logs = (run.rank_log(attempts[-1], 0), run.attempt_logs(attempts[-1]) / "batch.log")
    found = next((path for path in logs if size_of(path)), None)
    return None if found is None else ChosenLog(found, attempts[-1])


class _Wish:
    """A person's wish to stop: Ctrl-C, or a closed terminal. The second one does not wait.

    Args:
        run: the run.
        process: bash with the run's script, or salloc.
        before: newest attempt before it was started; without a newer one there is nothing to save.
    """

    def __init__(self, run: RunDirectory, process: subprocess.Popen[bytes], before: int) -> None:
        self._run, self._process, self._before = run, process, before
        self._asked = self._done = 0

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Counts the signals that ask for a stop while the body runs."""

        def count(_number: int, _frame: FrameType | None) -> None:
            self._asked += 1

        handlers = {number: signal.signal(number, count) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def is_over(self) -> bool:
        """Does what was asked since the last call, and returns whether the process has ended."""
        if self._asked > self._done and self._process.poll() is None:
            self._done = self._asked
            # A closed terminal cannot be told anything.
            with contextlib.suppress(OSError):
                self._stop() if self._done == 1 else self._kill()
        return self._process.poll() is not None

    def _stop(self) -> None:
        if max(existing_attempts(self._run), default=-1) > self._before:
            self._run.stop_file.touch()
            note("saving and stopping; Ctrl-C once more ends the ranks at once")
        else:
            self._process.terminate()
            note("nothing has begun; giving it up")

    def _kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGTERM)
        note("ending the ranks")
