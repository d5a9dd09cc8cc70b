"""`doctor +cluster=NxG`: a job that does what every run does before it trains, measures as well, and ends.

It works in a folder that this command makes, `<root>/.doctor/<random name>`: whatever the words call the run, no folder
of a run is touched, and no verb lists it. Where all is well the folder is removed again; else it stays, with its logs.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from slurm_train.cli.display import note
from slurm_train.cli.submit import hand_over, require_slurm
from slurm_train.config.compose import compose
from slurm_train.config.words import Words
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, ClusterError, ConfigError, RunError
from slurm_train.launch.acceptance import require_acceptable
from slurm_train.launch.container import Ranks
from slurm_train.launch.plan import RunPlan, plan_run
from slurm_train.launch.preparation import write_run_directory
from slurm_train.launch.script import render_script
from slurm_train.launch.snapshot import ask_git, read_answers
from slurm_train.launch.source import read_source
from slurm_train.rundir.events import fatal_line, read_preflight
from slurm_train.rundir.layout import RunDirectory, existing_attempts
from slurm_train.slurm.commands import SlurmCommands

_FOLDER = ".doctor"
"""No run has such a name: run.name refuses a leading dot."""
_FIRST = ("preflight.bandwidth=true",)
_LAST = ("preflight.enabled=true", "preflight.only=true", "requeue.enabled=false")
_LOOK_EVERY_S = 1.0


def look_at_nodes(settings: Sequence[str], env: Mapping[str, str], *, as_json: bool) -> int:
    """Runs the job to its end, prints what it found, and returns 0, or 1 where something keeps runs from working.

    Args:
        settings: words of a run; they name a cluster.
        env: the environment.
        as_json: print the record instead of the table.

    Raises:
        ClusterError: no Slurm here, or it refuses the job.
        ConfigError: the words ask for no cluster.
    """
    plan = _in_own_folder(plan_run(compose(Words(overrides=[*_FIRST, *settings, *_LAST])), cwd=Path.cwd(), env=env))
    if plan.config.cluster is None:
        raise ConfigError(
            f"doctor {' '.join(settings)} asks for no nodes",
            hint="`doctor +cluster=NxG` looks at nodes; `doctor` alone looks at the site",
        )
    if plan.config.cluster.launcher == "torchrun":
        raise ConfigError(
            f"doctor {' '.join(settings)} would start its ranks by torchrun, under which there is no preflight",
            hint="add cluster.launcher=srun, and give one number of nodes: they are the same nodes",
        )
    commands = SlurmCommands(env)
    require_slurm(commands, env)
    script = _prepare(plan, commands, env)
    if "SLURM_JOB_ID" in env and "SLURM_STEP_ID" not in env:
        note(f"looking at the nodes of this allocation, job {env['SLURM_JOB_ID']}")
        subprocess.run(["bash", str(plan.run.submit_script)], env=dict(env), stdout=sys.stderr, check=False)
    else:
        _submit_and_wait(plan, script, commands, env)
    code = _report(plan.run, as_json=as_json)
    if code == EXIT_DONE:
        # Made by this very command, under a name that nobody else has.
        shutil.rmtree(plan.run.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            plan.run.path.parent.rmdir()
    return code


def _in_own_folder(plan: RunPlan) -> RunPlan:
    root = plan.run.path.parent.parent
    return replace(plan, run=RunDirectory(root / _FOLDER / secrets.token_hex(4)))


def _prepare(plan: RunPlan, commands: SlurmCommands, env: Mapping[str, str]) -> str:
    """Writes the run directory of the job, and returns the script."""
    script = render_script(plan)
    require_acceptable(script, commands, plan)
    Ranks(plan.config, plan.run, plan.directory).make_mount_points()
    cwd = Path.cwd()
    write_run_directory(plan, read_source(plan, cwd, read_answers(ask_git(cwd, env)), env=env), script=script)
    return script


def _submit_and_wait(plan: RunPlan, script: str, commands: SlurmCommands, env: Mapping[str, str]) -> None:
    assert plan.config.cluster is not None
    # A look at nodes is for those that were found bad as well.
    job_id = hand_over(plan.run, script, commands, env=env, export=plan.config.cluster.export)
    note(f"submitted job {job_id}; logs in {plan.run.logs}; Ctrl-C cancels it")
    try:
        _wait(job_id, commands)
    except KeyboardInterrupt:
        commands.cancel([job_id])
        raise


def _wait(job_id: str, commands: SlurmCommands) -> None:
    told = ""
    while True:
        try:
            state = commands.job_states([job_id]).get(job_id)
        except ClusterError:
            time.sleep(_LOOK_EVERY_S)
            continue
        if state is None or not state.is_active:
            return
        said = f"{state.phase.value} {state.reason or state.nodelist}".strip()
        if said != told:
            told = said
            note(f"job {job_id} is {said}")
        time.sleep(_LOOK_EVERY_S)


def _report(run: RunDirectory, *, as_json: bool) -> int:
    attempts = existing_attempts(run)
    record = read_preflight(run, attempts[-1]) if attempts else {}
    if not record:
        log = run.logs / "batch.log"
        said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:] if log.exists() else []
        raise RunError(
            f"the job ended without a word about its nodes: {said[-1] if said else 'its log is empty'}",
            hint=f"look at {run.logs}",
        )
    if as_json:
        print(json.dumps(record, indent=2))
    else:
        print("\n".join(record.get("table", [])))
        for finding in record.get("findings", []):
            print(f"{finding['level']}: {finding['line']}")
        note(f"{len(record.get('findings', []))} findings in {record.get('seconds', 0):g} s")
    return EXIT_FAILURE if fatal_line(record) else EXIT_DONE
