"""Submits a planned run: asks Slurm first, writes the run directory, hands the script over, returns at once."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence

from slurm_train.cli.changes import weigh
from slurm_train.cli.outputs import RunOutput, make_outputs
from slurm_train.cli.terminal import note
from slurm_train.errors import ClusterError
from slurm_train.launch.acceptance import require_acceptable
from slurm_train.launch.avoidance import describe, exclude_flags
from slurm_train.launch.container import Ranks
from slurm_train.launch.plan import RunPlan
from slurm_train.launch.preparation import write_run_directory
from slurm_train.launch.script import render_script
from slurm_train.launch.source import Source
from slurm_train.rundir.events import BAD_NODES_PARTS, list_file
from slurm_train.rundir.jobs import clear_dead, record_job
from slurm_train.rundir.layout import RunDirectory
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.status.activity import holder_lives, submitting, writing


def submit(
    plan: RunPlan,
    source: Source | None,
    *,
    words: Sequence[str],
    env: Mapping[str, str],
    accept: Collection[str] = (),
    outputs: Sequence[RunOutput] = (),
) -> int:
    """Submits and prints `<job id> <run directory>`; nothing is written before Slurm would take the job.

    Args:
        plan: the run.
        source: its code; None: the snapshot that it has.
        words: the command line.
        env: the environment.
        accept: changes of a run in progress that the person accepts.
        outputs: what the run shall have besides its own directory.

    Raises:
        ClusterError: no Slurm here, or it refuses the request.
        RunError: the run is active already, or it would not be the same training.
    """
    commands = SlurmCommands(env)
    require_slurm(commands, env)
    script = render_script(plan)
    importing = _import_early()
    with submitting(plan.run, commands):
        change = weigh(plan, source, accept=accept)
        require_acceptable(script, commands, plan)
        Ranks(plan.config, plan.run, plan.directory).make_mount_points()
        with writing(plan.run, commands):
            write_run_directory(plan, source, script=script, change=change)
        make_outputs(outputs)
        importing.join()
        assert plan.config.cluster is not None
        flags = avoid_bad_nodes(script, plan.run, env)
        job_id = hand_over(plan.run, script, commands, env=env, flags=flags, export=plan.config.cluster.export)
    _say_what_next(plan.run)
    print(f"{job_id} {plan.run.path}", flush=True)
    from slurm_train.launch.provenance import write_provenance

    if source is not None:
        write_provenance(plan.run.provenance, source, words=words, slurm=commands.version())
    return 0


def avoid_bad_nodes(script: str, run: RunDirectory, env: Mapping[str, str]) -> list[str]:
    """Returns words for sbatch or salloc that leave out nodes which were found bad lately, and says which."""
    flags = exclude_flags(script, run, env)
    if text := describe(flags, run):
        note(f"  {text}; see {list_file(run).with_name(BAD_NODES_PARTS)}")
    return flags


def tell_of_bad_nodes(scripts: Sequence[tuple[RunDirectory, str]], env: Mapping[str, str]) -> None:
    """Says which nodes the arrays of a sweep leave out; they do so by themselves."""
    for run, script in scripts[:1]:
        avoid_bad_nodes(script, run, env)


def require_slurm(commands: SlurmCommands, env: Mapping[str, str]) -> None:
    """Refuses where no Slurm commands are, or where the environment asks for another cluster.

    Raises:
        ClusterError: sbatch is not on the PATH, or SLURM_CLUSTERS or the like names another cluster.
    """
    if not commands.is_available():
        raise ClusterError(
            "a cluster was asked for, but there is no Slurm here (no sbatch on the PATH)",
            hint="type this on a login node, or drop +cluster to train on this machine; "
            "to try Slurm on one machine: `python -m slurm_train devcluster up`",
        )

    for name in ("SBATCH_CLUSTERS", "SALLOC_CLUSTERS", "SLURM_CLUSTERS"):
        asked, here = env.get(name, ""), ""
        if asked and asked != (here := commands.show_config().get("ClusterName", "")):
            raise ClusterError(
                f"{name}={asked} asks for another cluster than {here or 'that'} of this machine, which is the one that "
                "status, cancel and requeue ask",
                hint=f"submit from a login node of {asked}, or `unset {name}` to submit here",
            )


def hand_over(
    run: RunDirectory,
    script: str,
    commands: SlurmCommands,
    *,
    env: Mapping[str, str],
    flags: Sequence[str] = (),
    export: Sequence[str] = (),
) -> str:
    """Gives a run's script to Slurm, records the job and returns its id; called inside `submitting`.

    Raises:
        ClusterError: sbatch refused it.
    """
    from slurm_train.launch.submission import submit_script

    # A dead process on this machine can be told from here, not from the node that the job starts on.
    clear_dead(run, is_alive=lambda holder: holder_lives(holder, commands))
    job_id = submit_script(script, folder=run.logs / "submitted", env=env, flags=flags, export=export)
    record_job(run, job_id)
    return job_id


def _import_early() -> threading.Thread:
    # Importing submitit takes 30 ms; sbatch --test-only waits as long for the controller meanwhile.
    def load() -> None:
        import slurm_train.launch.submission  # noqa: F401

    thread = threading.Thread(target=load)
    thread.start()
    return thread


def _say_what_next(run: RunDirectory) -> None:
    note(f"submitted; next:\n  python -m slurm_train status {run.run_id}")
    note(f"  python -m slurm_train logs -f {run.run_id}\n  python -m slurm_train cancel {run.run_id}")
