"""What is checked and printed before a start: what a run needs from this machine, its plan as one table, its code."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_train.cli.drift import tell_of_another
from slurm_train.cli.terminal import note
from slurm_train.config.batch import planned_shares, shares_in_words, total_steps
from slurm_train.config.schema import BatchSection, OptimSection, RunConfig, TrackSection
from slurm_train.data.check import known_num_samples, require_readable
from slurm_train.errors import ConfigError
from slurm_train.formatting import shorten
from slurm_train.launch.hub import fetch_hub_files
from slurm_train.launch.placement import CAUSAL_LM, layout_rows
from slurm_train.launch.plan import RunPlan
from slurm_train.launch.snapshot import Source, read_source
from slurm_train.launch.write import require_writable
from slurm_train.models.pretrained_names import num_token_ids, require_effect, require_source
from slurm_train.slurm.job_variables import exported

if TYPE_CHECKING:
    from slurm_train.config.hydra import HydraSettings
    from slurm_train.config.words import Words


def read_settings_of(flags: Words) -> HydraSettings:
    """Returns what the words and the person's own files set of Hydra itself; prints which of it is unused.

    Raises:
        ConfigError: something that cannot do here what it does under Hydra.
    """
    from slurm_train.config.hydra import read_settings

    settings = read_settings(flags)
    for text in settings.notes:
        note(text)
    return settings


def look_at(
    plan: RunPlan,
    *,
    env: Mapping[str, str],
    cwd: Path,
) -> Source:
    """Refuses what a run misses on this machine, prints its plan, and returns its code.

    Nothing is touched but the cache of the Hub.

    Args:
        plan: the run.
        env: the environment.
        cwd: the folder that the words were typed in.
    """
    require_writable(plan.run, share=plan.config.run.share)
    take_inputs(plan, cwd=cwd)
    tell_of_another(plan)
    print_rows(plan_rows(plan))
    warn_unexported_keys(plan.config, env)
    source = read_source(plan.run, plan.config, cwd, env=env)
    say_source(source)
    return source


# --- what a run needs from this machine ---


def take_inputs(plan: RunPlan, *, cwd: Path) -> None:
    """Fetches what a run reads from the Hub, and refuses what it misses besides.

    Raises:
        DataError: as `refuse_missing_inputs`.
        ConfigError: as `refuse_missing_inputs`, or files cannot be fetched.
    """
    # Without the files, everything that does not depend on them.
    refuse_missing_inputs(plan, cwd=cwd)
    for files in plan.hub:
        if files.missing:
            note(f"{files.key}: {files.words}")
            fetch_hub_files([files])
    refuse_missing_inputs(plan, cwd=cwd)


def refuse_missing_inputs(plan: RunPlan, *, cwd: Path) -> None:
    """Refuses data that cannot be read, a `_target_` that does not exist and missing packages, as far as it can tell.

    Files of the Hub that are still to be fetched are not missed, and what depends on them is not looked at.

    Raises:
        DataError: prepared text is asked for, and there is none.
        ConfigError: a `_target_` names a module or a name that does not exist, or a tracker is not installed.
    """
    config = plan.config
    awaited = {files.key for files in plan.hub if files.missing}
    # Another interpreter may have what this one lacks.
    has_this_python = config.cluster is None or config.cluster.python is None
    if config.track != TrackSection() and has_this_python:
        from slurm_train.tools.trackers import require_installed

        require_installed(config.track)
    if config.trains:
        model = config.model or {}
        if model.get("_target_") == CAUSAL_LM:
            if "model.path" not in awaited:
                require_source(model_type=model.get("model_type"), path=model.get("path"), cwd=cwd)
                require_effect(model.get("config") or {}, path=model.get("path"), cwd=cwd)
            if has_this_python and importlib.util.find_spec("transformers") is None:
                hint = "pip install 'slurm-train[hf]'"
                raise ConfigError("model=hf needs transformers, which is not installed", hint=hint)
        if not awaited & {"model.path", "data.tokenizer"}:
            require_readable(config.data or {}, vocab_size=num_token_ids(model, cwd=cwd), cwd=cwd)
        if config.train.precision == "fp8" and has_this_python and importlib.util.find_spec("torchao") is None:
            hint = "pip install 'slurm-train[fp8]'"
            raise ConfigError("train.precision=fp8 needs torchao, which is not installed", hint=hint)
        weights = config.train.init_from
        is_awaited = "train.init_from" in awaited
        if weights is not None and not is_awaited and not (cwd / Path(weights).expanduser()).exists():
            raise ConfigError(
                f"train.init_from={weights} is not there",
                hint="name a directory with config.json and model.safetensors, one safetensors file, or a repository "
                "of the Hub: org/name",
            )
    from slurm_train.config.target import require_target

    # A rank's Python starts in this directory, or in the snapshot of it.
    search = [str(cwd), *sys.path]
    own: dict[str, dict[str, Any] | None]
    own = {"task": config.task} if config.task else {"model": config.model, "data": config.data}
    own |= {f"callbacks[{number}]": mapping for number, mapping in enumerate(config.callbacks)}
    # Where ranks have a Python of their own, torch may be in that one alone.
    if config.trains and importlib.util.find_spec("torch") is not None:
        own |= _calls_of(config.optim)
    collate = (config.data or {}).get("collate")
    if isinstance(collate, str):
        own["data.collate"] = {"_target_": collate, "_args_": [None]}
    elif isinstance(collate, Mapping):
        own["data.collate"] = dict(collate)
    for key, mapping in own.items() if config.script is None else ():
        require_target(key, mapping, search=search)
    if config.callbacks:
        _check_callbacks(config, search=search)


def _check_callbacks(config: RunConfig, *, search: Sequence[str]) -> None:
    """Makes the callbacks that come with this package, which finds wrong values of theirs."""
    from slurm_train.config.target import keywords_in_source
    from slurm_train.train.callbacks import Monitor, build_callbacks

    if not config.trains:
        raise ConfigError(
            "callbacks are called by the built-in trainer, not by a task or a script", hint="leave callbacks out"
        )
    shipped = [
        callback
        for callback in config.callbacks
        if str(callback.get("_target_", "slurm_train.")).startswith("slurm_train.")
    ]
    compares = any(isinstance(callback, Monitor) for callback in build_callbacks(shipped).values())
    if compares and not (config.train.evaluate and config.train.eval_every_steps):
        raise ConfigError(
            "a callback compares evaluations, and the run makes none on its way",
            hint="set train.eval_every_steps=100, and leave train.evaluate at true",
        )
    data = config.data or {}
    if compares and data.get("_target_") and not data.get("heldout"):
        taken = keywords_in_source(str(data["_target_"]), search=search)
        if taken is not None and "split" not in taken:
            raise ConfigError(
                f"a callback compares evaluations, and data._target_={data['_target_']} has no held-out samples: it "
                "takes no `split`, and data.heldout is not set",
                hint="set data.heldout to the arguments that differ for them, or leave the callback out",
            )


def _calls_of(optim: OptimSection) -> dict[str, dict[str, Any] | None]:
    """Returns by key what an optimizer's classes and a schedule of the user's own will be called with."""
    given: dict[str, Any] = {"_target_": optim._target_, "_args_": [None]}
    calls: dict[str, dict[str, Any] | None] = {}
    # The default with keywords that every torch knows need not be looked up.
    if optim.keywords or optim._target_ != OptimSection()._target_:
        calls["optim"] = {**given, "lr": optim.lr, **optim.keywords}
    for index, rule in enumerate(optim.rules()):
        own = {} if rule._target_ is None else {"_target_": rule._target_}
        calls[f"optim.groups[{index}]"] = {**given, **own, **rule.keywords}
    if isinstance(optim.schedule, dict):
        passed = {"_args_": [0], "warmup_samples": 0, "total_samples": 0}
        calls["optim.schedule"] = {"_target_": None, **optim.schedule, **passed}
    return calls


def warn_unexported_keys(config: RunConfig, env: Mapping[str, str]) -> None:
    """Prints which keys of trackers are set in this shell and do not travel into the job."""
    if config.cluster is None or config.track == TrackSection():
        return
    from slurm_train.tools.trackers import unexported_keys

    names = unexported_keys(config.track, env, exported(env, config.cluster.export))
    if names:
        note(f"{', '.join(names)} is not exported to the job; to export it: cluster.export=[{','.join(names)}]")


# --- the plan as a table ---


def print_rows(rows: Sequence[tuple[str, str]]) -> None:
    """Prints names and texts as two columns."""
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        note(f"  {name:<{width}}  {text}")


def plan_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """Returns the rows of the plan's table."""
    config, world = plan.config, plan.world
    place = "this machine" if config.cluster is None else world.nodes_in_words
    rows = [("run", str(plan.run.path)), ("ranks", f"{world.size} = {place}")]
    if config.trains:
        rows += [
            ("global batch", ", ".join([plan.batch.as_sum(), *_growth(config.batch)])),
            *_shares_rows(plan),
            ("length", _length_text(plan)),
            ("peak lr", _lr_text(plan)),
            ("checkpoints", _checkpoint_text(plan)),
        ]
        per_rank, schedule = config.parallel.stages_per_rank, config.parallel.pipeline_schedule
        rows[2:2] = layout_rows(plan.layout, world, plan.batch, stages_per_rank=per_rank, schedule=schedule)
        rows[2:2] = [("parallel", plan.chosen)] if plan.chosen else []
    if config.track != TrackSection():
        from slurm_train.tools.trackers import asked_trackers

        rows.append(("trackers", ", ".join(asked_trackers(config.track)) or "none"))
    rows += [("hub", f"{files.key}: {files.words}") for files in plan.hub]
    if config.container is not None:
        rows.append(("container", f"{config.container.kind} {config.container.image}"))
    if config.cluster is not None:
        rows += [("site", config.site)] if config.site else []
        rows += [("CPUs", plan.cpus.why)] if plan.cpus.why else []
        rows += [("shell", "; ".join(plan.from_shell))] if plan.from_shell else []
        if spares := config.cluster.spare_nodes:
            held = plan.num_devices / world.size - 1
            rows.append(
                ("spare nodes", f"{spares}, which wait for a lost or bad node's place: {held:.0%} more node hours")
            )
        rows.append(("requeue", _requeue_text(plan)))
    return rows


def _shares_rows(plan: RunPlan) -> list[tuple[str, str]]:
    if isinstance(plan.config.batch.shares, str):
        return []
    ranks_per_node = plan.world.ranks_per_node
    shares = planned_shares(plan.config, plan.batch, ranks_per_node=ranks_per_node)
    nodes = [f"node {number}:" for number in range(1, plan.world.num_nodes + 1)]
    return [("shares", shares_in_words(shares, ranks_per_node=ranks_per_node, nodes=nodes))]


def _requeue_text(plan: RunPlan) -> str:
    if plan.config.launch == "interactive":
        return "never: launch=interactive"
    return "after preemption, time limit, node failure" if plan.config.requeue.enabled else "never"


def _growth(batch: BatchSection) -> list[str]:
    return [f"x {factor} after step {after}" for after, factor in batch.growth.items()]


def _length_text(plan: RunPlan) -> str:
    train, global_size = plan.config.train, plan.batch.global_size
    if plan.num_samples is not None:
        return f"{train.max_steps} steps, {plan.num_samples:,} samples"
    num_samples, epochs = known_num_samples(plan.config.data or {}, cwd=Path(plan.directory)), f"{train.max_epochs:g}"
    if num_samples is None:
        return f"{epochs} epochs; the ranks count the steps when they have opened the data"
    steps = total_steps(plan.config, num_samples=num_samples, global_size=global_size)
    return f"{epochs} epochs of {num_samples:,} samples, {steps} steps"


def _lr_text(plan: RunPlan) -> str:
    optim = plan.config.optim
    if plan.lr == optim.lr:
        return f"{plan.lr:g}"
    return f"{plan.lr:g} ({optim.lr_retune} rule: {optim.lr:g} was tuned for a global batch of {optim.lr_global_size})"


def _checkpoint_text(plan: RunPlan) -> str:
    settings = plan.config.checkpoint
    if settings.every_steps == "auto":
        return f"as often as pays off with an interruption every {settings.failure_every_h:g} h, {settings.keep} kept"
    when = f"every {settings.every_steps} steps" if settings.every_steps else "at a stop and at the end only"
    return f"{when}, {settings.keep} kept"


def say_source(source: Source) -> None:
    """Prints which of the user's code a run would not have a copy of."""
    if source.left_out:
        note(f"not copied into the run: {shorten(source.left_out)}")
    if source.elsewhere:
        places = ",".join(source.elsewhere)
        note(f"imported from where it is edited, not from a copy in the run: {places.replace(',', ', ')}")
        note(f"to have the run copy it as well: run.snapshot_folders=[{places}]")
