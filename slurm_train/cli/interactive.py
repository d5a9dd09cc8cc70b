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
from collections.abc import Mapping, Sequence

from slurm_train.cli.here import on_stop
from slurm_train.cli.logs import LogPrinter, choose_log
from slurm_train.cli.terminal import note
from slurm_train.rundir.paths import RunDirectory, existing_attempts


def attend(run: RunDirectory, command: Sequence[str], *, env: Mapping[str, str]) -> int:
    """Runs bash with the run's script, or salloc, to its end; prints rank 0's output; returns the exit code.

    The first Ctrl-C, or a closed terminal, asks the ranks to save and stop; the second one does not wait.
    """
    before = max(existing_attempts(run), default=-1)
    # A session of its own keeps Ctrl-C on the terminal from reaching srun, which would kill the ranks.
    process = subprocess.Popen(list(command), env=dict(env), stdin=subprocess.DEVNULL, start_new_session=True)
    asked, num_done = list[None](), 0

    def is_over() -> bool:
        """Does what was asked since the last call, and returns whether the process has ended."""
        nonlocal num_done
        if len(asked) > num_done and process.poll() is None:
            is_first, num_done = num_done == 0, len(asked)
            # Nothing can be printed to a closed terminal.
            with contextlib.suppress(OSError):
                if not is_first:
                    os.killpg(process.pid, signal.SIGTERM)
                    note("ending the ranks")
                elif max(existing_attempts(run), default=-1) > before:
                    run.stop_file.touch()
                    note("saving and stopping; Ctrl-C once more ends the ranks at once")
                else:
                    # Without a new attempt there is nothing to save.
                    process.terminate()
                    note("nothing has begun; giving it up")
        return process.poll() is not None

    with on_stop(lambda: asked.append(None)):
        # Rank 0's log of the newest attempt that began here, else what srun says.
        LogPrinter(run, 0, attempt=None, env=env).follow(
            lambda: choose_log(run, attempt=None, rank=0, after=before), until=is_over
        )
    code = process.wait()
    if code and not run.result.exists():
        note(f"ended with exit code {code}; `status {run.run_id}` says why, and the same command continues the run")
    return 128 - code if code < 0 else code
