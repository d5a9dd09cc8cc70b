"""`evaluate RUN|CHECKPOINT`: measures saved weights on the held-out samples, here or with +cluster=NxG on Slurm.

Settings change what is measured and how (data.path=DIR, parallel.dp_shard=8). An evaluation is a run of its own in
`evaluations/` of the run's directory, with the run's code; nothing else of the run changes. It prints its result.json.
Its id follows from the checkpoint and the held-out samples: asked for again, the result is printed and nothing is
measured; other samples are another evaluation. The checkpoint is kept while the evaluation is queued or running.

`evaluate RUN --follow` scores every checkpoint as it appears, oldest first, until the run is over; with +cluster=1x1
in a small job that is requeued like any other. `--with "script=[score.py]"` calls a scorer of your own for each. A
checkpoint that waits for its score stays, up to `--keep` of them.

`generate RUN|CHECKPOINT --prompt TEXT`: lets a language model continue texts, and prints both, with the tokenizer of
the run's data. Without +cluster=NxG it works in this process, on a GPU of this machine if there is one; with it the
texts are a run of its own in `generations/`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurm_train.checkpoint.manifest import MANIFEST_FILE
from slurm_train.cli.checkpoint import find_checkpoint
from slurm_train.cli.preview import check_inputs
from slurm_train.cli.selection import parse_runs
from slurm_train.cli.start import carry_out
from slurm_train.cli.terminal import answer, note
from slurm_train.code.imports import import_from_snapshot
from slurm_train.code.snapshot import Source, read_source
from slurm_train.config.frozen import load_config
from slurm_train.errors import EXIT_DONE, ConfigError, require_all
from slurm_train.evaluation.follower import MOST_WAITING
from slurm_train.formatting import shorten
from slurm_train.plan.plan import RunPlan
from slurm_train.rundir.files import read_json, to_json
from slurm_train.rundir.lookup import find_run
from slurm_train.rundir.node_disk import kernel_variables
from slurm_train.rundir.paths import RunDirectory, find_save
from slurm_train.slurm.job_variables import node_name
from slurm_train.start.evaluation import (
    enter_run,
    evaluations_of_other_samples,
    is_for_slurm,
    leased,
    pinned,
    plan_evaluation,
    plan_following,
    plan_texts,
    require_trainer,
)
from slurm_train.start.start import Starter
from slurm_train.start.write import require_writable
from slurm_train.status.following import summary_of


def main(words: Sequence[str]) -> int:
    """Evaluates here and prints the result, or submits the evaluation; prints the result again if it is there."""
    arguments = parse_runs("evaluate", words)
    if arguments.follow:
        return _follow(arguments, words)
    flags_of_follow = {"--with": arguments.scorer, "--name": arguments.name, "--keep": arguments.keep}
    for flag, value in flags_of_follow.items():
        if value is not None:
            raise ConfigError(f"{flag} {value} is for an evaluation that follows a run", hint="add --follow")
    checkpoint, run = find_saved(arguments.run, root=arguments.root)
    plan = plan_evaluation(
        run, checkpoint, env=dict(os.environ), settings=arguments.settings, config_dir=arguments.config_dir
    )
    if plan.run.result.exists() and plan.config.train.evaluate_data is None:
        note(
            "measured before, and it cannot be seen from here whether the held-out samples are still the same; to "
            f"measure again, remove {plan.run.path}"
        )
    others = [] if plan.run.result.exists() else evaluations_of_other_samples(plan, run)
    if others:
        note(
            f"the held-out samples are not those of {shorten(str(other.path) for other in others)}, which measured the "
            "same checkpoint: this is another evaluation"
        )
    code, result = _result_of(plan, run, words=["evaluate", *words])
    if result is not None:
        answer(to_json(result))
    return code


def _result_of(plan: RunPlan, run: RunDirectory, *, words: Sequence[str]) -> tuple[int, dict[str, Any] | None]:
    """Returns the exit code and the result of a run that uses a checkpoint; starts it if it has no result yet."""
    if not plan.run.result.exists():
        require_writable(plan.run)
        check_inputs(plan, cwd=Path(plan.directory))
        note(f"{words[0]}s from {find_save(Path(str(plan.config.train.evaluate_from)))} in {plan.run.path}")
        start = Starter(words=words, env=dict(os.environ), say=note)
        with pinned(plan, run, start.commands):
            code = carry_out(start.fresh(plan, run))
        if code != EXIT_DONE or not plan.run.result.exists():
            return code, None
    return EXIT_DONE, read_json(plan.run.result)


def find_saved(word: str, *, root: Path) -> tuple[Path, RunDirectory]:
    """Returns the checkpoint that a word names, and its run; changes into the folder in which the run was typed.

    Raises:
        RunError: the run is no training of the built-in trainer, or others may have written it.
        CheckpointError: there is no such checkpoint.
    """
    is_path = (Path(word) / MANIFEST_FILE).is_file()
    name = word.partition("@")[0]
    require_trainer(RunDirectory.of_checkpoint(Path(word).resolve()) if is_path else find_run(root, name or None))
    real = find_checkpoint(word, root=root).resolve()
    folder = RunDirectory.of_checkpoint(real).path
    run = enter_run(folder)
    return run.path / real.relative_to(folder), run


# --- following ---


def _follow(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    """Scores each checkpoint of a run as it appears, here or in a job; returns the exit code."""
    name = arguments.name or ""
    scorer = arguments.scorer
    settings = arguments.settings
    _check_following(name, scorer, settings, most=arguments.keep)
    run = enter_run(find_run(arguments.root, arguments.run).path.resolve())
    plan = plan_following(
        run, env=dict(os.environ), settings=settings, config_dir=arguments.config_dir, name=name, scorer=scorer
    )
    evaluation = plan.run
    start = Starter(words=["evaluate", *words], env=dict(os.environ), say=note)
    require_writable(evaluation)
    source: Source | RunDirectory = run
    if scorer is None:
        check_inputs(plan, cwd=Path(plan.directory))
    else:
        source = read_source(evaluation, plan.config, Path.cwd(), env=dict(os.environ))
    most = MOST_WAITING if arguments.keep is None else arguments.keep
    with leased(plan, run, start.commands, most=most):
        note(f"scores each checkpoint of {run.name}/{run.run_id} as it appears, in {evaluation.path}")
        code = carry_out(start.fresh(plan, source))
    if code == EXIT_DONE and not plan.config.is_submitted:
        answer(json.dumps(summary_of(evaluation).as_json()))
    return code


def _check_following(name: str, scorer: str | None, settings: Sequence[str], *, most: int | None) -> None:
    """Checks what was typed behind `evaluate --follow`.

    Raises:
        ConfigError: a name that no measure can have, no scorer, other data without a name, or a negative number.
    """
    measures_other_data = any(word.lstrip("+~").startswith("data") for word in settings)
    require_all(
        [
            (
                re.fullmatch(r"\w*", name) is None,
                f"--name {name!r} becomes a part of the names of measures",
                "use letters, digits and _, e.g. --name wiki for eval_wiki_loss",
            ),
            (
                scorer is not None and not scorer.startswith("script="),
                f"--with {scorer} names no scorer",
                'write --with "script=[score.py,--flag]"',
            ),
            (
                scorer is None and measures_other_data and not name,
                "other data would give the measures of the run's own held-out samples another meaning",
                "name them: --name wiki records eval_wiki_loss",
            ),
            (most is not None and most < 0, f"--keep must be at least 0, got {most}", "for example --keep 4"),
        ]
    )


# --- generate ---


def _read_sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns how texts are continued.

    Raises:
        ConfigError: a number is too small.
    """
    least = {"max_new_tokens": 1, "temperature": 0, "top_k": 1}
    for name, bound in least.items():
        value = getattr(arguments, name)
        flag = f"--{name.replace('_', '-')}"
        if value is not None and not value >= bound:
            raise ConfigError(f"{flag} must be at least {bound}, got {value}", hint=f"for example {flag} {bound}")
    return {
        "seed": arguments.seed,
        "num_tokens": arguments.max_new_tokens,
        "temperature": arguments.temperature,
        "top_k": arguments.top_k,
    }


def generate(words: Sequence[str]) -> int:
    """Lets a language model continue texts, and prints both; here, or by a run that is submitted."""
    arguments = parse_runs("generate", words)
    sampling = _read_sampling(arguments)
    settings = arguments.settings
    uses_slurm = is_for_slurm(settings)
    if settings and not uses_slurm:
        raise ConfigError(
            f"{settings[0]} is a setting of a run that is submitted, and `generate` without a cluster works here",
            hint=f"add +cluster=1x1, or leave {settings[0]} out",
        )
    tokenizer = None if arguments.tokenizer is None else str(Path(arguments.tokenizer).resolve())
    prompts = arguments.prompt or [""]
    checkpoint, run = find_saved(arguments.run, root=arguments.root)
    if not uses_slurm:
        return _generate_here(run, checkpoint, prompts, tokenizer=tokenizer, sampling=sampling)
    texts = {"prompts": prompts, "tokenizer": tokenizer, **sampling}
    plan = plan_texts(run, checkpoint, texts, env=dict(os.environ), settings=settings, config_dir=arguments.config_dir)
    _require_generates(run, checkpoint, tokenizer=tokenizer)
    code, result = _result_of(plan, run, words=["generate", *words])
    if result is not None:
        for prompt, text in zip(prompts, result.get("texts", ()), strict=False):
            answer(prompt + text)
    return code


def _generate_here(
    run: RunDirectory, checkpoint: Path, prompts: Sequence[str], *, tokenizer: str | None, sampling: dict[str, Any]
) -> int:
    """Prints each prompt with its continuation; the model is in this process, on a GPU if there is one."""
    import_from_snapshot(str(run.path), python_path=os.environ.get("PYTHONPATH", ""))
    # A model may compile parts of itself.
    os.environ.update(kernel_variables(os.environ, instead=run.kernels(node_name(os.environ))))
    import torch

    from slurm_train.evaluation.evaluate_checkpoint import load_model
    from slurm_train.evaluation.texts import continue_text, encoding_of, require_generates
    from slurm_train.models.build import build_filled_model

    config = load_config(run.config)
    model = build_filled_model(config, device=torch.device("cpu"))
    require_generates(model)
    encoding = encoding_of(config, tokenizer)
    load_model(model, checkpoint)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    for prompt in prompts:
        answer(prompt + continue_text(model, encoding, prompt, **sampling))
    return EXIT_DONE


def _require_generates(run: RunDirectory, checkpoint: Path, *, tokenizer: str | None) -> None:
    """Refuses before the queue a model that writes no text, a missing tokenizer, and weights of another model."""
    import_from_snapshot(str(run.path), python_path=os.environ.get("PYTHONPATH", ""))
    from slurm_train.evaluation.evaluate_checkpoint import require_same_weights
    from slurm_train.evaluation.texts import encoding_of, require_generates
    from slurm_train.models.build import build_names_and_shapes

    config = load_config(run.config)
    model = build_names_and_shapes(config)
    require_generates(model)
    encoding_of(config, tokenizer)
    require_same_weights(model, checkpoint)
