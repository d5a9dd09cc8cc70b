"""`evaluate RUN|CHECKPOINT`: measures saved weights on the held-out samples, here or with +cluster=NxG on Slurm.

Settings change what is measured and how (data.path=DIR, parallel.dp_shard=8). An evaluation is a run of its own in
`evaluations/` of the run's directory, with the run's code; nothing else of the run changes. It prints its result.json.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from slurm_train.cli.checkpoint import find_checkpoint
from slurm_train.cli.inputs import refuse_missing_inputs
from slurm_train.cli.selection import parse_runs
from slurm_train.cli.start import Start
from slurm_train.cli.terminal import answer, note
from slurm_train.config.compose import Composed, apply_words
from slurm_train.config.frozen import load_config
from slurm_train.config.schema import BatchSection, DdpSection, ParallelSection, RunConfig, RunSection, TrackSection
from slurm_train.errors import EXIT_DONE, RunError
from slurm_train.launch.plan import RunPlan, plan_run
from slurm_train.launch.write import require_writable
from slurm_train.rundir.files import read_json
from slurm_train.rundir.paths import RunDirectory, require_private

_NAME = "evaluations"


def main(words: Sequence[str]) -> int:
    """Evaluates here and prints the result, or submits the evaluation; a second time it prints what is known."""
    arguments = parse_runs("evaluate", words)
    checkpoint, run = find_saved(arguments.run, root=Path(arguments.root))
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
