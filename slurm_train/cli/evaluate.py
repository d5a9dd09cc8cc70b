"""`evaluate RUN|CHECKPOINT`: measures saved weights on the held-out samples, here or with +cluster=NxG on Slurm.

Settings change what is measured and how (data.path=DIR, parallel.dp_shard=8). An evaluation is a run of its own in
`evaluations/` of the run's directory, with the run's code; nothing else of the run changes. It prints its result.json.

`generate RUN|CHECKPOINT --prompt TEXT`: lets a language model continue a text, and prints both. It uses the tokenizer
of the run's data, and a GPU of this machine if there is one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from slurm_train.data.prepare import Encoding

_NAME = "evaluations"


def main(words: Sequence[str]) -> int:
    """Evaluates here and prints the result, or submits the evaluation; a second time it prints what is known."""
    arguments = parse_runs("evaluate", words)
    checkpoint, run = find_saved(arguments.run, root=arguments.root)
    plan = _plan(run, checkpoint, settings=arguments.settings, config_dir=arguments.config_dir)
    if not plan.run.result.exists():
        require_writable(plan.run)
        refuse_missing_inputs(plan, cwd=Path(plan.directory))
        note(f"evaluates {checkpoint} in {plan.run.path}")
        code = Start(words=["evaluate", *words], env=dict(os.environ)).run(plan, run)
        if code != EXIT_DONE or not plan.run.result.exists():
            return code
    answer(json.dumps(read_json(plan.run.result)))
    return EXIT_DONE


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


def _plan(run: RunDirectory, checkpoint: Path, *, settings: Sequence[str], config_dir: str | None) -> RunPlan:
    """Returns the plan of an evaluation: the run's model and data, and none of what makes it a training elsewhere."""
    before, facts = load_config(run.config), read_json(run.plan) or {}
    if not before.trains:
        raise RunError(
            f"{run.name}/{run.run_id} is a task or script of your own, which the built-in evaluation does not know",
            hint="`evaluate` is for runs with model and data",
        )
    is_submitted = any(word.lstrip("+").startswith("cluster=") for word in settings)
    alone = replace(
        before,
        launch="slurm",
        run=RunSection(root=str(run.path), name=_NAME, processes=before.run.processes),
        batch=BatchSection(local_size=facts.get("batch", {}).get("local_size"), by_length=before.batch.by_length),
        train=replace(
            before.train, evaluate=True, eval_max_batches=None, evaluate_from=str(checkpoint), init_from=None
        ),
        ddp=DdpSection(),
        parallel=ParallelSection(),
        track=TrackSection(),
        callbacks=[],
        cluster=before.cluster if is_submitted else None,
    )
    config: RunConfig = apply_words(alone, settings, config_dir=config_dir)
    return plan_run(Composed(config, {}, {}), cwd=Path.cwd(), env=dict(os.environ))


# --- generate ---


def generate(words: Sequence[str]) -> int:
    """Lets a language model continue a text, and prints both; uses a GPU of this machine if there is one."""
    arguments = parse_runs("generate", words)
    least = {"max_new_tokens": 1, "temperature": 0, "top_k": 1}
    for name, bound in least.items():
        value, flag = getattr(arguments, name), f"--{name.replace('_', '-')}"
        if value is not None and not value >= bound:
            raise ConfigError(f"{flag} must be at least {bound}, got {value}", hint=f"for example {flag} {bound}")
    if arguments.tokenizer is not None:
        arguments.tokenizer = str(Path(arguments.tokenizer).resolve())
    checkpoint, run = find_saved(arguments.run, root=arguments.root)
    import_from_snapshot(str(run.path), python_path=os.environ.get("PYTHONPATH", ""))
    import torch

    from slurm_train.checkpoint.load import read_model, require_fit
    from slurm_train.models.first_weights import fill, first_values
    from slurm_train.train.build import build_model
    from slurm_train.train.metrics import sample_text

    config = load_config(run.config)
    model = build_model(config)
    if not hasattr(model, "generate"):
        raise ConfigError(
            f"{type(model).__name__} cannot generate text",
            hint="the shipped GPT and model=hf can; a model of your own needs generate(tokens_BT, num_tokens=..., "
            "**how), as slurm_train.models.sampling.sample",
        )
    encoding = _encoding(config, arguments.tokenizer)
    require_fit(checkpoint, model.state_dict())
    _, tensors = read_model(checkpoint)
    fill([model], first_values(model), device=torch.device("cpu"))
    model.load_state_dict(tensors)
    prompt = arguments.prompt or ""
    text = sample_text(
        model.to("cuda" if torch.cuda.is_available() else "cpu"),
        encoding,
        prompt,
        seed=arguments.seed,
        num_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        end=encoding.end_of_document,
    )
    answer(prompt + text.removesuffix("\n\n"))
    return EXIT_DONE


def _encoding(config: RunConfig, tokenizer: str | None) -> Encoding:
    """Returns the encoding of `--tokenizer`, else that of the data, else that in the model's directory."""
    from slurm_train.data.build import build_source
    from slurm_train.data.prepare import FileEncoding, tokenizer_file

    if tokenizer is None:
        source = build_source(config.data or {}, split="train", seed=config.seed)
        if hasattr(source, "encoding"):
            found: Encoding = source.encoding()  # type: ignore[union-attr]  # it has one
            return found
        tokenizer = (config.model or {}).get("path")
        if tokenizer is None or not tokenizer_file(Path(tokenizer)).is_file():
            raise ConfigError(
                f"no tokenizer is known: data._target_={(config.data or {}).get('_target_')} is not prepared text",
                hint="name one: --tokenizer tokenizer.json",
            )
    return FileEncoding(tokenizer_file(Path(tokenizer)))
