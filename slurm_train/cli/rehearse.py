"""`rehearse [settings]`: does this program come back from a preemption? A table, in minutes, by runs of it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm_train.cli.preview import refuse_unused_flags, take_inputs
from slurm_train.cli.terminal import answer, note, working_folder
from slurm_train.config.compose import compose
from slurm_train.config.words import Words, read_words, split_word
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, ConfigError, require_all
from slurm_train.formatting import duration
from slurm_train.plan.choice import settle_parallel
from slurm_train.plan.plan import RunPlan, plan_run
from slurm_train.rundir.files import make_private, to_json, write_atomic
from slurm_train.rundir.removal import remove_tree
from slurm_train.slurm.devices import VISIBLE
from slurm_train.slurm.job_variables import exported
from slurm_train.tools.rehearsal.case import Notice, Setting
from slurm_train.tools.rehearsal.rehearsal import LABELS, Scope, place_of, rehearse
from slurm_train.tools.rehearsal.verdict import Rehearsal
from slurm_train.verbs import PUBLIC_VERBS, parse

_OWN_KEYS = ("run.root", "checkpoint.every_steps", "train.log_every_steps", "launch", "notify", "track")
"""Keys that a rehearsal sets itself."""
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
_SHELLS = ("bash", "sh", "zsh")


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
    root = plan.run.place
    place = place_of(root, plan.run.name, plan.run.run_id[:8])
    remove_tree(place)
    make_private(place)
    setting = Setting(
        words=_words(flags, plan),
        source=cwd,
        place=place,
        env=_environment(plan, env),
        without=(root,),
        pattern=pattern,
    )
    scope = _scope(plan, flags, steps=arguments.steps, seconds=arguments.seconds, notice_s=arguments.notice, only=only)
    _say_cost(scope)
    rehearsal = rehearse(setting, scope, say=note)
    write_atomic(place / _RESULT, to_json(rehearsal.to_json()))
    _print(rehearsal, as_json=arguments.json)
    return EXIT_DONE if rehearsal.survives else EXIT_FAILURE


def _print(rehearsal: Rehearsal, *, as_json: bool) -> None:
    if as_json:
        answer(to_json(rehearsal.to_json()))
        return
    answer(rehearsal.text())
    note(f"logs and files of all its runs: {rehearsal.place}")


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
            (
                config.uses_cluster,
                "a rehearsal on Slurm is not there yet",
                "leave +cluster out to rehearse on this machine",
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


def _words(flags: Words, plan: RunPlan) -> tuple[str, ...]:
    """Returns the words of every run: the person's, without what a rehearsal sets itself, and its own."""
    typed = [word for word in flags.overrides if not split_word(word)[1].startswith(_OWN_KEYS)]
    keys = {split_word(word)[1] for word in typed}
    own = [f"--config-dir={flags.config_dir}"] if flags.config_dir else []
    # Of the trainer; a program of one's own reports when it likes.
    own += ["train.log_every_steps=1"]
    if not plan.config.uses_cluster and "run.processes" not in keys:
        own += ["run.processes=1"]
    return (*typed, *own)


def _environment(plan: RunPlan, env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of the runs: those that a job gets, without keys of trackers; nothing is sent anywhere."""
    names = exported(env, plan.config.slurm.export) | {name for name in VISIBLE if name in env}
    kept = {name: env[name] for name in names if name in env}
    cpus = len(os.sched_getaffinity(0))
    threads = {"OMP_NUM_THREADS": str(max(1, cpus // _parallel(plan)))}
    return {**threads, **kept, **_NO_TRACKERS}


def _parallel(plan: RunPlan) -> int:
    """Returns how many runs there are at a time: one where they share a GPU."""
    if plan.config.uses_cluster or Path("/dev/nvidiactl").exists():
        return 1
    return max(1, min(4, len(os.sched_getaffinity(0))))


def _scope(plan: RunPlan, flags: Words, *, steps: int, seconds: float, notice_s: float, only: Sequence[str]) -> Scope:
    config = plan.config
    keys = {split_word(word)[1]: split_word(word)[2] for word in flags.overrides}
    script = config.script or [""]
    return Scope(
        name=" ".join(script[:2]) if config.script else plan.run.name,
        num_steps=steps,
        longest_s=seconds,
        notice=Notice(grace_s=0.0, kill_wait_s=notice_s, lead_s=notice_s),
        num_parallel=_parallel(plan),
        is_shell=Path(script[0]).name in _SHELLS or script[0].endswith(".sh"),
        other_ranks=_other_ranks(plan, keys.get("run.processes")),
        saves_by_config=True,
        only=only,
    )


def _other_ranks(plan: RunPlan, processes: str | None) -> tuple[str, ...] | str:
    """Returns the words for another number of ranks, or why there is none."""
    num_ranks = int(processes) if processes and processes.isdigit() else 1
    if plan.config.script is None:
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
