"""`plan [settings]`: prints the arithmetic, the ranks and the exact script; submits nothing, writes nothing."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_train.cli.preview import check_inputs, print_rows, read_settings_of
from slurm_train.cli.terminal import note, working_folder
from slurm_train.config.words import Words, read_words
from slurm_train.errors import ClusterError, ConfigError
from slurm_train.formatting import byte_size, count, percent, shorten, table
from slurm_train.plan.placement import TABLE_HEADER, table_rows, topology_text
from slurm_train.plan.plan import RunPlan, ask_node_cpus, plan_run
from slurm_train.plan.preview import plan_rows
from slurm_train.slurm.site import ask_early, site_of
from slurm_train.verbs import PUBLIC_VERBS

if TYPE_CHECKING:
    from slurm_train.config.hydra import HydraSettings
    from slurm_train.config.schema import RunConfig
    from slurm_train.plan.speed import Speed
    from slurm_train.plan.when import Option
    from slurm_train.slurm.commands import SlurmCommands
    from slurm_train.slurm.job_request import JobRequest
    from slurm_train.slurm.refusals import TestVerdict
    from slurm_train.slurm.site import SiteFacts

_MEASURE_S = 300.0
_NOW_S = 5.0
"""Slurm gives the time of its answer, or a moment later, for what it would start at once."""
_TIME_KEYS = ("cluster.time", "cluster.time_limit_min")
_HELP = """\
usage: python -m slurm_train plan [settings]

Prints what the same words without `plan` would do: to stderr batch arithmetic, ranks, memory per rank, GPU-hours, how
the run comes back at this site, what it may lose at worst, and Slurm's own verdict (sbatch --test-only) with the
estimated start; to stdout the batch script. Nothing is submitted or written.

  --json       all of it as one JSON object on stdout
  --measure    memory of a model of your own: it is built without its memory, by a process that imports torch
  --ranks      on stdout a table instead: each rank's node, its number there, and its place on each axis of `parallel`
  --suggest GB on stdout a table instead: layouts of `parallel` that fit into devices of so much memory, best first
  --when NODES on stdout a table instead: when the run would start and end with so many nodes (2,4,8 or 1-4) and with
               its time limit, half and a quarter of it, what ends first is marked; Slurm is asked, nothing is submitted

  python -m slurm_train plan +cluster=4x8 batch.global_size=512
  python -m slurm_train plan --json +cluster=4x8
  python -m slurm_train plan --ranks +cluster=16x4 "parallel={dp_shard:8,tp:4,pp:2}" model.tied=false
  python -m slurm_train plan --suggest 80 +cluster=8x8 model.width=4096 model.num_layers=32 model.tied=false
  python -m slurm_train plan --when 1-4 +cluster=4x8 cluster.time=8:00:00 train.max_steps=20000
  python -m slurm_train plan --measure +cluster=4x8 model._target_=my_package.MyModel data._target_=my_package.MyData
  python -m slurm_train plan -m +cluster=1x8 optim.lr=1e-3,3e-4 "seed=range(8)"
"""


def main(words: Sequence[str]) -> int:
    """Prints the plan and returns 0; what cannot be planned is an error with exit code 2."""
    flags = read_words(words, verbs=PUBLIC_VERBS)
    if flags.help:
        print(_HELP, end="")
        return 0
    if flags.only_prints:
        raise ConfigError("`plan` prints a plan, --cfg and --info print a configuration", hint="drop `plan`")
    env = dict(os.environ)
    cwd = working_folder(env)
    # A table of layouts needs no Slurm.
    commands = ask_early(words if flags.suggest is None else (), env)
    settings = read_settings_of(flags)
    flags = settings.words
    _check_flags(flags)
    if flags.multirun:
        return _plan_sweep(settings, commands, after=flags.after, env=env, cwd=cwd)
    if flags.suggest is not None:
        return _suggest(settings.compose().config, flags.suggest, env)
    if flags.when is not None:
        return _when(settings, commands, flags.when, env=env, cwd=cwd, as_json=flags.json)
    return _plan_run(settings, commands, env=env, cwd=cwd)


def _check_flags(flags: Words) -> None:
    """Refuses flags of which one would be ignored.

    Raises:
        ConfigError: a flag for one run with -m, two tables, or a flag that the asked table does nothing with.
    """
    typed = [f"--{name}" for name in ("json", "measure", "ranks", "suggest", "when") if getattr(flags, name)]
    if flags.multirun and typed:
        raise ConfigError(f"{typed[0]} is for one run", hint="drop -m and give each key one value")
    tables = [flag for flag in typed if flag in ("--ranks", "--suggest", "--when")]
    if not tables or len(typed) == 1 or typed == ["--json", "--when"]:
        return
    if len(tables) > 1:
        raise ConfigError(f"{tables[0]} and {tables[1]} print different tables", hint=f"drop {tables[0]}")
    raise ConfigError(f"{typed[0]} has no effect on the table of {tables[0]}", hint=f"drop {typed[0]}")


def _plan_run(settings: HydraSettings, commands: SlurmCommands, *, env: Mapping[str, str], cwd: Path) -> int:
    """Prints what becomes of one run; with --ranks only where its ranks are."""
    from slurm_train.plan.choice import settle_parallel

    flags = settings.words
    node_cpus = ask_node_cpus(env, commands)
    plan = plan_run(settings.compose(), cwd=cwd, env=env, settle=settle_parallel, node_cpus=node_cpus)
    check_inputs(plan, cwd=cwd)
    _say_variables(plan, env)
    _say_dependency(flags.after, plan, env)
    if flags.ranks:
        print_rows(plan_rows(plan))
        print(table(TABLE_HEADER, table_rows(plan.layout, plan.world)))
        return 0
    from slurm_train.plan.speed import estimate_run

    measured = _measure(plan, env, cwd) if flags.measure else None
    estimate = estimate_run(plan, facts=_site_facts(plan, commands), env=env, measured=measured)
    job = _preview_job(plan, commands, env) if plan.config.uses_cluster else None
    if job is not None:
        plan = job.plan
    if flags.json:
        facts = {
            "run": str(plan.run.path),
            **plan.record.as_json(),
            **estimate.as_json(),
            "slurm": None if job is None else job.slurm,
            "script": None if job is None else job.script,
        }
        print(json.dumps(facts, indent=2))
        return 0
    rows = [("script", "none: the run would train on this machine (add +cluster=NxG for Slurm)")]
    if job is not None:
        rows = job.rows(env)
    print_rows([*plan_rows(plan), *estimate.rows(), *rows])
    if job is not None:
        print(job.script, end="")
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobPreview:
    """What would be submitted, and what Slurm says about it."""

    plan: RunPlan
    """As it would be submitted: without chosen CPUs where Slurm accepts only that."""
    script: str
    slurm: dict[str, Any]
    """See `_ask_slurm`; "topology" besides."""

    def rows(self, env: Mapping[str, str]) -> list[tuple[str, str]]:
        """Returns the rows of the printed plan that are about the job."""
        rows = [("environment", _environment(self.plan.config.slurm.export, env)), ("Slurm", self.slurm["says"])]
        if self.slurm["topology"]:
            rows.append(("topology", self.slurm["topology"]))
        return rows


def _preview_job(plan: RunPlan, commands: SlurmCommands, env: Mapping[str, str]) -> _JobPreview:
    """Returns the job that a submission would make: where Slurm refuses the chosen CPUs, it is one without them."""
    from slurm_train.request.acceptance import acceptable_plans
    from slurm_train.request.batch_script import job_request

    previews: list[_JobPreview] = []

    def ask(plans: Sequence[RunPlan]) -> _JobPreview:
        (asked,) = plans
        request = job_request(asked)
        slurm = _ask_slurm(request, commands, env, asked)
        preview = _JobPreview(plan=asked, script=request.text(), slurm=slurm)
        previews.append(preview)
        if slurm.get("is_accepted") is False:
            raise ClusterError(slurm["says"], hint="the page says what to change")
        return preview

    try:
        _, preview = acceptable_plans([plan], ask)
    except ClusterError:
        # What Slurm says of the job as it is.
        preview = previews[0]
    preview.slurm["topology"] = _topology(preview.plan, preview.slurm.get("nodelist", ""), commands)
    return preview


def _say_dependency(after: Sequence[str], plan: RunPlan, env: Mapping[str, str]) -> None:
    if after:
        from slurm_train.start.start import Starter

        Starter(words=(), env=env, say=note, after=after).dependency(plan.config, plan.run.place)


def _say_variables(plan: RunPlan, env: Mapping[str, str]) -> None:
    from slurm_train.plan.shell_variables import variable_notes

    for line in variable_notes(plan.config, cwd=Path(plan.directory), env=env):
        note(line)


def _site_facts(plan: RunPlan, commands: SlurmCommands) -> SiteFacts | None:
    """Returns Slurm's answers about the site; None without a cluster, or where Slurm does not answer."""
    if not plan.config.uses_cluster or not commands.is_available():
        return None
    try:
        return site_of(commands).facts()
    except ClusterError:
        return None


def _measure(plan: RunPlan, env: Mapping[str, str], cwd: Path) -> dict[str, Any] | None:
    """Returns what a separate process finds of the model, or the "problem"; None where there is nothing to measure.

    The included GPT has formulas, so it is not measured.
    """
    import subprocess

    from slurm_train.config.batch import largest_local_size
    from slurm_train.config.frozen import dump_config
    from slurm_train.plan.cards import has_gpus, in_half
    from slurm_train.plan.memory import GptShape

    config = plan.program.used
    if config.model is None or not plan.layout.is_replicated:
        return None
    if GptShape.of(config.model) is not None:
        return None
    samples = largest_local_size(config, plan.batch, ranks_per_node=plan.world.ranks_per_node)
    half = in_half(config, on_gpu=has_gpus(config, env))
    command = [sys.executable, "-m", "slurm_train", "measure", str(samples), "half" if half else "full"]
    try:
        done = subprocess.run(
            command,
            input=dump_config(config),
            # No GPU is needed, and a login node's may be in use by others.
            env={**env, "CUDA_VISIBLE_DEVICES": ""},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=_MEASURE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"the model was not built within {_MEASURE_S:.0f} s"}
    if done.returncode:
        return {"problem": f"the model cannot be measured here: {_last_error(done.stderr)}"}
    measurement: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measurement


def _last_error(stderr: str) -> str:
    """Returns the last error of this package that a program printed, else its last line, which ends a traceback."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if errors:
        return errors[-1]
    return lines[-1] if lines else "it says nothing"


def _suggest(config: RunConfig, memory: str, env: Mapping[str, str]) -> int:
    """Prints the best layouts that fit to stdout, and the assumed speeds to stderr.

    Args:
        config: the run's; its degrees are ignored.
        memory: GiB of one device, as typed.
        env: environment, for counting local GPUs.

    Raises:
        ConfigError: the amount is no positive number, or nothing fits.
    """
    from slurm_train.plan.layouts import BETWEEN_NODES, FLOPS, INSIDE_NODE, suggest_layouts
    from slurm_train.plan.placement import plan_world

    if not memory.replace(".", "", 1).isdecimal() or not 0 < float(memory) < 1e6:
        raise ConfigError(
            f"--suggest must be a number of GiB greater than 0, got {memory}",
            hint="give the memory of one device in GiB: plan --suggest 80",
        )
    world = plan_world(config, env)
    num_legal, estimates = suggest_layouts(config, world, memory_bytes=int(float(memory) * 2**30))
    if not estimates:
        raise ConfigError(
            f"none of {num_legal} legal layouts of {world.num_ranks} ranks fits into {memory} GiB a device",
            hint="use more nodes, a smaller batch.local_size, or parallel.cpu_offload=true",
        )
    machine = f"{FLOPS / 1e12:.0f} TFLOP/s a device, {INSIDE_NODE / 1e9:.0f} GB/s inside a node"
    note(
        f"  {num_legal:,} legal layouts of {world.num_ranks:,} ranks; speed by a simple model: {machine}, "
        f"{BETWEEN_NODES / 1e9:.0f} GB/s between nodes"
    )
    fastest = max(estimate.tokens_per_s for estimate in estimates if estimate.world == world)
    rows = [
        (
            estimate.label,
            f"{estimate.world.num_nodes}x{estimate.world.ranks_per_node[0]}",
            byte_size(estimate.memory_bytes),
            percent(estimate.tokens_per_s / fastest),
            estimate.words,
        )
        for estimate in estimates
    ]
    print(table(("WHAT", "NODES", "MEMORY", "SPEED", "WORDS"), rows))
    return 0


def _plan_sweep(
    settings: HydraSettings, commands: SlurmCommands, *, after: Sequence[str], env: Mapping[str, str], cwd: Path
) -> int:
    """Prints the sweep's table, and the script of each array to stdout."""
    from slurm_train.cli.multirun import plan_words
    from slurm_train.plan.speed import sweep_rows
    from slurm_train.request.arrays import array_request, cut_arrays, max_array_size, refuses_arrays
    from slurm_train.request.batch_script import job_request

    plan = plan_words(settings=settings, env=env, cwd=cwd)
    _say_variables(plan.plans[0], env)
    _say_dependency(after, plan.plans[0], env)
    for name, text in sweep_rows(plan.plans, facts=_site_facts(plan.plans[0], commands), env=env):
        note(f"  {name:<13}  {text}")
    if not plan.uses_cluster:
        return 0
    site = commands.settings if commands.is_available() else {}
    requests = [(run_plan.run, job_request(run_plan)) for run_plan in plan.plans]
    runs_per_gpu = plan.plans[0].config.sweep.runs_per_gpu
    if runs_per_gpu > 1:
        cpus = plan.plans[0].cpus_per_rank
        part = "its part of the job's CPUs" if cpus is None else f"{count(cpus, 'CPU')} of its own"
        note(f"  {'each run':<13}  one of {runs_per_gpu} on a GPU, which share its memory; {part}")
    limits: dict[str, Any] = {
        "max_parallel": plan.max_parallel,
        "pack": plan.pack,
        "runs_per_gpu": runs_per_gpu,
    }
    arrays = cut_arrays(requests, max_size=max_array_size(site), **limits)
    with contextlib.suppress(ClusterError):
        if commands.is_available() and refuses_arrays(arrays[0], plan.sweep, commands):
            arrays = cut_arrays(requests, max_size=0, **limits)
    if arrays[0].is_alone:
        note(f"  {'arrays':<13}  this site takes none: each of {len(arrays)} jobs is like the first")
        arrays = arrays[:1]
    for number, array in enumerate(arrays):
        request = array_request(array, plan.sweep, number)
        says = _ask_slurm(request, commands, env, plan.plans[0])["says"]
        note(f"  {f'array {number}':<13}  {len(array.runs)} runs; Slurm {says}")
        print(request.text(), end="")
    return 0


def _when(
    settings: HydraSettings, commands: SlurmCommands, sizes: str, *, env: Mapping[str, str], cwd: Path, as_json: bool
) -> int:
    """Prints when the run would start and end, by size and time limit, to stdout, and where the pace is from to stderr.

    Raises:
        ConfigError: there is no cluster, nodes are uneven, or the sizes are none.
        ClusterError: there is no Slurm.
    """
    from slurm_train.plan.speed import estimate_run
    from slurm_train.plan.when import HEADER, START_S, limits_of, read_sizes, rows_of

    numbers = read_sizes(sizes)
    typed = plan_run(settings.compose(), cwd=cwd, env=env, node_cpus=ask_node_cpus(env, commands))
    if not typed.config.uses_cluster:
        raise ConfigError("--when is about jobs of Slurm", hint="name a cluster: plan --when 1-4 +cluster=4x8")
    if not typed.world.is_even:
        raise ConfigError(
            f"--when is for equal nodes, not for {list(typed.world.ranks_per_node)}",
            hint="give cluster.gpus_per_node one number",
        )
    estimate = estimate_run(typed, facts=_site_facts(typed, commands), env=env)
    job_sizes = _JobSizes(
        settings=settings, commands=commands, typed=typed, left_steps=estimate.cost.left_steps, env=env, cwd=cwd
    )
    options: list[Option] = []
    for num_nodes in numbers:
        for limit_min in limits_of(estimate.cost.limit_min):
            options.append(job_sizes.option(num_nodes, limit_min))
    if as_json:
        print(json.dumps([option.as_json() for option in options], indent=2))
        return 0
    sources = dict.fromkeys(pace.source for pace in job_sizes.paces.values() if pace is not None)
    pace = f"pace of {'; '.join(sources)}, falling in proportion to the ranks" if sources else "no pace is known"
    note(f"  {pace}; {START_S:.0f} s assumed from a job's begin to its first step")
    note("  starts by `sbatch --test-only`: today's queue; each later job is taken to wait as long as the first")
    print(table(HEADER, rows_of(options), right=True))
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobSizes:
    """The run of a command line with other numbers of nodes and other time limits."""

    settings: HydraSettings
    commands: SlurmCommands
    typed: RunPlan
    """The run with the size that was typed."""
    left_steps: int | None
    env: Mapping[str, str]
    cwd: Path
    paces: dict[int, Speed | None] = field(default_factory=dict)
    """By number of nodes: earlier runs are read for it, and a time limit does not change it."""

    def option(self, num_nodes: int, limit_min: int | None) -> Option:
        """Returns when the run would start and end with this size and limit, or why it cannot."""
        import time

        from slurm_train.plan.when import Option, option_of, pace_of
        from slurm_train.request.batch_script import job_request
        from slurm_train.rundir.timing import warning_lead_s
        from slurm_train.slurm.records import unix_s

        num_devices = num_nodes * self.typed.num_devices // self.typed.world.num_nodes
        nothing_known = Option(num_nodes=num_nodes, num_devices=num_devices, limit_min=limit_min)
        try:
            plan = self._plan(num_nodes, limit_min)
            answer = _ask_slurm(job_request(plan), self.commands, self.env, plan)
        except ConfigError as err:
            return replace(nothing_known, problem=err.message)
        if not answer.get("is_accepted"):
            return replace(nothing_known, problem=answer.get("message") or answer["says"])
        start = unix_s(answer["start"]) if answer["start"] else None
        starts_in_s = None if start is None else max(0.0, start - time.time())
        if starts_in_s is not None and starts_in_s < _NOW_S:
            starts_in_s = 0.0
        if num_nodes not in self.paces:
            self.paces[num_nodes] = pace_of(plan, self.env)
        limit_s = None if limit_min is None else 60.0 * limit_min
        warns_s = warning_lead_s(plan.config.requeue.warn_before_limit_s, plan.run, limit_s=limit_s)
        return option_of(
            plan,
            left_steps=self.left_steps,
            limit_min=limit_min,
            starts_in_s=starts_in_s,
            pace=self.paces[num_nodes],
            warns_s=warns_s,
        )

    def _plan(self, num_nodes: int, limit_min: int | None) -> RunPlan:
        from slurm_train.plan.choice import settle_parallel

        words = [f"cluster.nodes={num_nodes}"]
        config = self.typed.config
        if self.typed.program.is_planned:
            words.append(f"batch.global_size={self.typed.batch.global_size}")
        limit = config.slurm.time_limit_min
        if limit_min is not None and limit_min != limit:
            words.append(f"cluster.time_limit_min={limit_min}")
        composed = self.settings.composer.compose([*_without_time(self.settings.words.overrides, words), *words])
        node_cpus = ask_node_cpus(self.env, self.commands)
        return plan_run(composed, cwd=self.cwd, env=self.env, settle=settle_parallel, node_cpus=node_cpus)


def _without_time(overrides: Sequence[str], words: Sequence[str]) -> list[str]:
    """Returns overrides without the time limit, where another is given."""
    if not any(word.startswith("cluster.time_limit_min=") for word in words):
        return list(overrides)
    return [word for word in overrides if word.lstrip("+").partition("=")[0] not in _TIME_KEYS]


def _ask_slurm(request: JobRequest, commands: SlurmCommands, env: Mapping[str, str], plan: RunPlan) -> dict[str, Any]:
    """Returns what Slurm "says" about a job, in words, and where there is a verdict what it holds."""
    from slurm_train.request.acceptance import (
        advice,
        outlook_of,
        refused_by,
        require_slurm,
        slurm_verdict,
        step_verdict,
        unchecked,
    )

    if not commands.is_available():
        return {"says": "not here: no sbatch on the PATH, so the script is not checked"}
    try:
        require_slurm(commands, env)
    except ClusterError as err:
        return {"says": f"is not asked: {err.message}; {err.hint}"}
    try:
        verdict = slurm_verdict(request.text(), commands)
        if not verdict.is_accepted:
            separator = "\n    " if "\n" in verdict.message else "; "
            todo = advice(verdict, request, commands, plan)
            says = f"would refuse it: {verdict.message}" + (f"{separator}{todo}" if todo else "")
            return _answer(verdict, says)
        outlook = outlook_of(request, commands, start=verdict.start)
        if outlook.obstacle is not None:
            never = replace(verdict, is_accepted=False, message=outlook.obstacle.what)
            return _answer(never, f"would let it wait for ever: {outlook.obstacle.what}; {outlook.obstacle.todo}")
        remarks = [*outlook.remarks, *filter(None, [unchecked(plan, commands)])]
        if outlook.unknown:
            remarks.append(f"whether limits of account and QOS let it start is not known: {outlook.unknown}")
        refused, refused_here = step_verdict(plan, commands)
        if refused:
            return _answer(verdict, f"would take it, and srun would not start its ranks: {refused}")
        if refused_here:
            remarks.append(refused_by(refused_here))
    except ClusterError as err:
        return {"says": f"does not answer, so the script is not checked: {err.message}"}
    where = f"estimated start {verdict.start or 'not told'} on {verdict.nodelist or '?'}"
    if outlook.waits_for_partition:
        # Slurm estimates as if the partition were up.
        where = "when it starts is not known"
        verdict = replace(verdict, start="")
    return _answer(verdict, "; ".join(["would take it", where, *remarks]))


def _answer(verdict: TestVerdict, says: str) -> dict[str, Any]:
    names = ("is_accepted", "start", "nodelist", "partition", "message")
    return {"says": says, **{name: getattr(verdict, name) for name in names}}


def _topology(plan: RunPlan, nodelist: str, commands: SlurmCommands) -> str:
    """Returns on which switches or blocks the nodes that Slurm would give are; "" where it is not known."""
    from slurm_train.slurm.allocation import parse_nodelist

    cluster = plan.config.slurm
    if not nodelist:
        return ""
    return topology_text(
        plan.layout,
        plan.world,
        nodes=parse_nodelist(nodelist),
        leaf_of=commands.topology(),
        may_ask="switches" not in cluster.sbatch and not cluster.nodelist,
    )


def _environment(patterns: Sequence[str], env: Mapping[str, str]) -> str:
    from slurm_train.slurm.job_variables import exported, is_job_variable

    exported_names = exported(env, patterns)
    text = f"{len(exported_names)} variables travel"
    others = sorted(name for name in env if name not in exported_names and not is_job_variable(name))
    if others:
        text += f"; these do not (cluster.export=[NAME]): {shorten(others, 12)}"
    return text
