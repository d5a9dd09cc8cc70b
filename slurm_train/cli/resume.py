"""`resume RUN`: continues an unfinished run from its newest verified checkpoint, with its frozen configuration.

To continue at another size, type the run's first command again with another +cluster=NxG: it is the same run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm_train.cli.arguments import RUN_HELP, build_run_parser
from slurm_train.cli.display import note
from slurm_train.cli.liveness import holder_lives
from slurm_train.cli.submit import refuse_active, require_slurm
from slurm_train.config.frozen import load_config
from slurm_train.errors import ClusterError, RunError
from slurm_train.launch.acceptance import require_acceptable
from slurm_train.launch.preparation import record_job
from slurm_train.launch.resources import renewed_warning
from slurm_train.rundir.files import read_json
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.lock import clear_dead
from slurm_train.rundir.lookup import find_run
from slurm_train.slurm.commands import SlurmCommands

_EXAMPLES = """\
examples:
  python -m slurm_train resume gpt-stdlib     the newest run of that name
  python -m slurm_train resume 3f9a1c07
"""


def main(words: Sequence[str]) -> int:
    """Submits the run's own script again, or trains on here; prints `<job id> <run directory>`."""
    parser = build_run_parser("resume", description=__doc__, examples=_EXAMPLES)
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    arguments = parser.parse_args(list(words))
    run = find_run(Path(arguments.root), arguments.run)
    if run.result.exists():
        raise RunError(
            f"{run.name}/{run.run_id} is finished; there is nothing to resume",
            hint="another run of the same: the first command again with run.name=NAME, or seed=N",
        )
    return resume_here(run, os.environ) if load_config(run.config).cluster is None else resubmit(run, os.environ)


def resubmit(run: RunDirectory, env: Mapping[str, str]) -> int:
    """Submits the run's script again as it stands.

    Raises:
        RunError: the run is active.
        ClusterError: no Slurm here, no script, or Slurm refuses.
    """
    commands = SlurmCommands(env)
    require_slurm(commands)
    refuse_active(run, commands)
    if not run.submit_script.is_file():
        raise ClusterError(f"{run.submit_script} is missing", hint="type the run's first command again")
    script = run.submit_script.read_text(encoding="utf-8")
    require_acceptable(script, commands)
    run.stop_file.unlink(missing_ok=True)
    clear_dead(run, is_alive=lambda holder: holder_lives(holder, commands))
    from slurm_train.launch.submission import submit_script

    flags = renewed_warning(load_config(run.config), run)
    job_id = submit_script(script, folder=run.logs / "submitted", env=env, flags=flags)
    record_job(run, job_id)
    note(f"submitted again; it continues from the newest verified checkpoint in {run.checkpoints}")
    print(f"{job_id} {run.path}", flush=True)
    return 0


def resume_here(run: RunDirectory, env: Mapping[str, str]) -> int:
    """Trains on, on this machine, with the frozen configuration and plan."""
    from slurm_train.cli.here import refuse_queued, supervise_here

    plan = read_json(run.plan)
    if plan is None:
        raise RunError(f"{run.plan} cannot be read", hint="type the run's first command again")
    refuse_queued(run, env)
    run.stop_file.unlink(missing_ok=True)
    return supervise_here(run, load_config(run.config), world_size=int(plan["world"]["size"]), env=env)
