"""`supervise RUN_DIR -- srun ...`: what the batch script calls; owns one attempt from its opening to its end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from slurm_train.cli.liveness import holder_lives
from slurm_train.config.frozen import load_config
from slurm_train.errors import EXIT_WRONG_USE, ClusterError, ConfigError, RunError
from slurm_train.launch.meeting import probe_port
from slurm_train.launch.preparation import record_job
from slurm_train.launch.visibility import require_seen_by_all
from slurm_train.requeue.supervise import Site, ignore_stop_signals, say, supervise
from slurm_train.requeue.watch import hang_of, limits_of, watching
from slurm_train.rundir.attempts import AttemptStart
from slurm_train.rundir.heartbeat import Beat
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.lock import this_process
from slurm_train.rundir.lookup import read_job
from slurm_train.slurm.allocation import Allocation
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.environment import is_job_variable
from slurm_train.slurm.step_errors import violent_end


def main(words: Sequence[str]) -> int:
    """Runs an attempt inside an allocation and returns the exit code of the batch script."""
    run, command = _read(words)
    env = _job_environment(os.environ)
    ignore_stop_signals()
    allocation = Allocation.from_env(env)
    config = load_config(run.config)
    if (record := read_job(run)) is None or record.job_id != allocation.requeue_id:
        record_job(run, allocation.requeue_id)

    commands, limits = SlurmCommands(env), limits_of(config)

    def launch(attempt: int) -> int:
        end = partial(_kill_steps, commands)
        with watching(run, attempt, limits=limits, world_size=allocation.num_tasks, end_ranks=end):
            return _run_step(run, command, attempt=attempt, nodes=allocation.nodes, env=env)

    site = _site(run, allocation, commands)
    return supervise(run, config.requeue, site, launch, is_own_code=not config.trains)


def _job_environment(env: Mapping[str, str]) -> dict[str, str]:
    # Typed inside `srun --pty bash`, the script is about the whole job, not about the shell's step. Ranks and options
    # of srun that a shell has left over are nobody's.
    of_job = (name for name in env if name.startswith("SLURM") and not name.startswith("SLURM_STEP_"))
    kept = {*of_job, *(name for name in env if not is_job_variable(name))}
    return {name: value for name, value in env.items() if name in kept}


def _read(words: Sequence[str]) -> tuple[RunDirectory, list[str]]:
    if len(words) < 3 or words[1] != "--":
        raise ConfigError(f"supervise cannot read {list(words)}", hint="supervise RUN_DIR -- srun ...")
    return RunDirectory(Path(words[0])), list(words[2:])


def _site(run: RunDirectory, allocation: Allocation, commands: SlurmCommands) -> Site:
    job_id = allocation.requeue_id
    return Site(
        start=AttemptStart(
            job_id=job_id,
            restart_count=allocation.restart_count,
            nodes=allocation.nodes,
            world_size=allocation.num_tasks,
        ),
        holder=this_process(job_id=job_id),
        is_alive=lambda holder: holder_lives(holder, commands),
        show_job=lambda: _show_job(job_id, commands),
        requeue=lambda: _requeue(job_id, commands),
        explain=lambda attempt: _read_step_errors(run, attempt),
        can_relaunch=True,
    )


def _kill_steps(commands: SlurmCommands, beats: Mapping[int, Beat]) -> None:
    for step_id in {beat.source.step_id for beat in beats.values()} - {""}:
        commands.kill_step(step_id)


def _read_step_errors(run: RunDirectory, attempt: int) -> str:
    # Ranks that were ended as hung were killed, and srun would name whoever died first.
    if sentence := hang_of(run, attempt):
        return sentence
    log = run.attempt_logs(attempt) / "batch.log"
    return violent_end(log.read_text(encoding="utf-8", errors="replace")) if log.exists() else ""


def _show_job(job_id: str, commands: SlurmCommands) -> dict[str, str] | None:
    try:
        return commands.show_job(job_id)
    except ClusterError as err:
        say(f"Slurm does not say how job {job_id} stands: {err.message}")
        return None


def _requeue(job_id: str, commands: SlurmCommands) -> bool:
    try:
        return commands.requeue(job_id)
    except ClusterError as err:
        say(f"job {job_id} could not be requeued: {err.message}")
        return False


def _run_step(
    run: RunDirectory, command: Sequence[str], *, attempt: int, nodes: Sequence[str], env: Mapping[str, str]
) -> int:
    step_env = {
        **env,
        "SLURM_TRAIN_ATTEMPT": str(attempt),
        "MASTER_ADDR": nodes[0],
        "MASTER_PORT": str(probe_port(str(run.path), attempt=attempt, env=env)),
    }
    say(f"attempt {attempt} of {run.name}/{run.run_id} on {', '.join(nodes)}; rank logs in {run.attempt_logs(attempt)}")
    argv = [word.replace("{attempt}", str(attempt)) for word in command]
    with (run.attempt_logs(attempt) / "batch.log").open("ab") as log:
        try:
            require_seen_by_all(run, nodes, env)
        except RunError as err:
            text = f"error: {err}"
            print(text, file=sys.stderr, flush=True)
            log.write(f"{text}\n".encode())
            return EXIT_WRONG_USE
        return subprocess.run(
            argv, env=step_env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False
        ).returncode
