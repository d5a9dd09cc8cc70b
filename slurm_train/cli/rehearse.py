"""`rehearse [settings]`: does this program come back from a preemption? A table, in minutes, by runs of it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from slurm_train.cli.preview import refuse_unused_flags, take_inputs
from slurm_train.cli.terminal import answer, note, working_folder
from slurm_train.code.program_source import SHELLS
from slurm_train.code.snapshot import Source, read_source
from slurm_train.config.compose import compose
from slurm_train.config.program import program_of
from slurm_train.config.words import Words, read_words, split_word
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, ClusterError, ConfigError, require_all
from slurm_train.formatting import duration
from slurm_train.plan.choice import settle_parallel
from slurm_train.plan.plan import RunPlan, plan_run
from slurm_train.plan.speed import preemption_of
from slurm_train.request.acceptance import salloc_words
from slurm_train.request.batch_script import job_request
from slurm_train.rundir.files import make_private, to_json, write_atomic
from slurm_train.rundir.removal import remove_tree
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.devices import VISIBLE
from slurm_train.slurm.job_variables import exported, scrubbed
from slurm_train.slurm.site import site_of
from slurm_train.supervise.supervisor import on_stop
from slurm_train.tools.rehearsal.case import RehearsalSetting, SiteNotice
from slurm_train.tools.rehearsal.page import PAGE_NAME, render_page
from slurm_train.tools.rehearsal.rehearsal import LABELS, Scope, place_of, rehearse
from slurm_train.tools.rehearsal.verdict import Rehearsal
from slurm_train.verbs import PUBLIC_VERBS, parse

_OWN_KEYS = ("run.root", "checkpoint.every_steps", "train.log_every_steps", "launch", "notify", "track")
"""Keys that a rehearsal sets itself."""
_KILL_WAIT_S = 30.0
"""Slurm's default of KillWait."""
_LIMIT_MIN = 30
"""Of the allocation that is made for a rehearsal."""
_RESULT = "rehearsal.json"
_NO_TRACKERS = {
    "WANDB_MODE": "offline",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1",
    "MLFLOW_TRACKING_URI": "file:mlruns",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""For the runs: what a program logs stays in its folder."""
_PATTERN_HINT = "e.g. 'it (?P<step>\\d+) l=(?P<loss>\\S+)'; the group `epoch` is known, too"


def main(words: Sequence[str]) -> int:
    """Rehearses, prints the table, and returns 0 if the program survives, else 1."""
    arguments = parse("rehearse", words)
    env = dict(os.environ)
    cwd = working_folder(env)
    flags = read_words(arguments.settings, verbs=PUBLIC_VERBS)
    refuse_unused_flags(flags, verb="rehearse")
    plan = plan_run(compose(flags), cwd=cwd, env=env, settle=settle_parallel)
    _require_rehearsable(plan, arguments.steps)
    pattern = _read_pattern(arguments.pattern)
    only = [key for key in (arguments.only or "").split(",") if key]
    unknown = [key for key in only if key not in LABELS]
    if unknown:
        raise ConfigError(f"--only={','.join(unknown)} is no disturbance", hint=f"choose from {','.join(LABELS)}")
    take_inputs(plan, cwd=cwd)
    notice = _notice(plan, env, arguments.notice)
    source = read_source(plan.run, plan.config, cwd, env=env)
    scope = _scope(plan, flags, source, steps=arguments.steps, seconds=arguments.seconds, notice=notice, only=only)
    job_id = env.get("SLURM_JOB_ID") if plan.config.uses_cluster else None
    if plan.config.uses_cluster and job_id is None:
        return _in_own_allocation(plan, scope, words, env)
    root = plan.run.place
    place = place_of(root, plan.run.name, plan.run.run_id[:8])
    remove_tree(place)
    make_private(place)
    setting = RehearsalSetting(
        words=_words(arguments.settings, plan),
        source=cwd,
        place=place,
        env=_environment(plan, env, place),
        without=(root,),
        job_id=job_id,
        pattern=pattern,
    )
    _say_cost(scope)
    with on_stop(_interrupt):
        rehearsal = rehearse(setting, scope, say=note)
    write_atomic(place / _RESULT, to_json(rehearsal.to_json()))
    write_atomic(place / PAGE_NAME, render_page(rehearsal))
    _print(rehearsal, as_json=arguments.json)
    return EXIT_DONE if rehearsal.survives else EXIT_FAILURE


def _interrupt() -> NoReturn:
    """Has the runs that were started ended, and this process."""
    raise KeyboardInterrupt


def _in_own_allocation(plan: RunPlan, scope: Scope, words: Sequence[str], env: Mapping[str, str]) -> int:
    """Rehearses in an allocation that is made for it and given back at the end; returns the exit code."""
    limit_min = min(plan.config.slurm.time_limit_min or _LIMIT_MIN, _LIMIT_MIN)
    ranks = plan.world.num_ranks
    note(
        f"one allocation of {plan.world.nodes_in_words} for at most {limit_min} min: at most {ranks * limit_min} "
        f"minutes of a rank's GPU; it is given back as soon as the {len(scope.only or LABELS) + 1} runs are over"
    )
    script = plan.run.submit_script
    flags = salloc_words(job_request(plan), script, [f"--time={limit_min}"])[:-2]
    command = [*flags, sys.executable, "-m", "slurm_train", "rehearse", *words]
    return subprocess.run(command, env=scrubbed(env), check=False).returncode


def _notice(plan: RunPlan, env: Mapping[str, str], typed_s: float | None) -> SiteNotice:
    """Returns what the site gives a job before it kills it; on this machine Slurm's default."""
    preemption = None
    if typed_s is None and plan.config.uses_cluster:
        with contextlib.suppress(ClusterError):
            preemption = preemption_of(plan.config, site_of(SlurmCommands(env)).facts())
    wait_s = typed_s or (preemption and preemption.kill_wait_s) or _KILL_WAIT_S
    return SiteNotice(grace_s=(preemption and preemption.grace_s) or 0.0, kill_wait_s=wait_s, lead_s=_KILL_WAIT_S)


def _print(rehearsal: Rehearsal, *, as_json: bool) -> None:
    if as_json:
        answer(to_json(rehearsal.to_json()))
        return
    answer(rehearsal.text())
    note(f"the same as a page, and logs and files of all its runs: {rehearsal.place}")


def _require_rehearsable(plan: RunPlan, steps: int) -> None:
    config = plan.config
    require_all(
        [
            (steps < 6, f"--steps={steps} leaves nothing before and after the stop", "give 6 or more"),
            (
                config.container is not None,
                "a rehearsal starts the ranks itself, and a container was asked for",
                "rehearse inside the image, without container=",
            ),
        ]
    )


def _read_pattern(text: str | None) -> re.Pattern[str] | None:
    if text is None:
        return None
    try:
        pattern = re.compile(text)
    except re.error as err:
        raise ConfigError(f"--pattern is no regular expression: {err}", hint=_PATTERN_HINT) from err
    if "step" not in pattern.groupindex:
        raise ConfigError(f"--pattern={text} has no group `step`", hint=_PATTERN_HINT)
    return pattern


def _words(typed: Sequence[str], plan: RunPlan) -> tuple[str, ...]:
    """Returns the words of every run: the person's, without what a rehearsal sets itself, and its own."""
    kept = [word for word in typed if word.startswith("-") or not split_word(word)[1].startswith(_OWN_KEYS)]
    keys = {split_word(word)[1] for word in kept if not word.startswith("-")}
    # Of the trainer; a program of one's own reports when it likes.
    own = ["train.log_every_steps=1"]
    if "train.samples_digest" not in keys:
        own += ["train.samples_digest=true"]
    if plan.config.uses_cluster:
        own += ["launch=interactive"]
    elif "run.processes" not in keys:
        own += ["run.processes=1"]
    return (*kept, *own)


def _environment(plan: RunPlan, env: Mapping[str, str], place: Path) -> dict[str, str]:
    """Returns the variables of the runs, without keys of trackers; nothing is sent anywhere.

    On a cluster they are those that a job gets, else the shell's but for secrets.
    """
    patterns = plan.config.slurm.export if plan.config.uses_cluster else ["*"]
    names = exported(env, patterns) | {name for name in VISIBLE if name in env}
    # Inside an allocation srun and this package read what Slurm has set.
    names |= {name for name in env if plan.config.uses_cluster and name.startswith("SLURM_")}
    kept = {name: env[name] for name in names if name in env}
    cpus = len(os.sched_getaffinity(0))
    threads = {"OMP_NUM_THREADS": str(max(1, cpus // _parallel(plan)))}
    # There is the list of a person's runs, which rehearsed ones are not to be in.
    return {**threads, **kept, **_NO_TRACKERS, "XDG_STATE_HOME": str(place / "state")}


def _parallel(plan: RunPlan) -> int:
    """Returns how many runs there are at a time: one where they share a GPU."""
    if plan.config.uses_cluster or Path("/dev/nvidiactl").exists():
        return 1
    return max(1, min(4, len(os.sched_getaffinity(0))))


def _scope(
    plan: RunPlan, flags: Words, source: Source, *, steps: int, seconds: float, notice: SiteNotice, only: Sequence[str]
) -> Scope:
    config = plan.config
    keys = {split_word(word)[1]: split_word(word)[2] for word in flags.overrides}
    program = program_of(config)
    return Scope(
        name=program.name or plan.run.name,
        num_steps=steps,
        longest_s=seconds,
        notice=notice,
        num_parallel=_parallel(plan),
        is_shell=Path(program.name).name in SHELLS or program.name.endswith(".sh"),
        other_ranks=_other_ranks(plan, keys.get("run.processes"), is_asked="ranks" in only),
        not_copied=[str(beside) for beside in source.beside],
        only=only,
    )


def _other_ranks(plan: RunPlan, processes: str | None, *, is_asked: bool) -> tuple[str, ...] | str:
    """Returns the words for another number of ranks, or why there is none."""
    if not is_asked and not program_of(plan.config).saves:
        return "its author knows whether it goes on with another number; --only ranks tries it"
    nodes, per_node = plan.world.num_nodes, plan.world.ranks_per_node[0]
    if plan.config.uses_cluster:
        if nodes * per_node == 1:
            return "it has one rank; +cluster=1x2 tries it on two, and then on one"
        return ("cluster.nodes=1",) if nodes > 1 else ("cluster.gpus_per_node=1",)
    num_ranks = int(processes) if processes and processes.isdigit() else 1
    if program_of(plan.config).saves:
        return (f"run.processes={1 if num_ranks > 1 else 2}",)
    if num_ranks > 1:
        return ("run.processes=1",)
    return "it has one rank; run.processes=2 tries it on two, and then on one"


def _say_cost(scope: Scope) -> None:
    num_runs = len(scope.only or LABELS)
    longest = duration(scope.longest_s)
    note(
        f"rehearsing {scope.name}: up to {num_runs + 1} runs of about {scope.num_steps} steps (each at most {longest}, "
        f"and two starts), {scope.num_parallel} at a time here; a small program takes 2 to 4 minutes"
    )
