"""`checkpoint ls | verify | diff | gc | export`: what checkpoints a run has, whether they verify, and what is in them.

`diff` and `export` read tensors and import torch; the others do not.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from slurm_train.checkpoint.collect import collect_checkpoints
from slurm_train.checkpoint.commit import list_passed_over
from slurm_train.checkpoint.manifest import MANIFEST_FILE
from slurm_train.checkpoint.verify import find_kept, newest_verified, read_manifest, survey, verify
from slurm_train.cli.selection import parse_runs, split_step
from slurm_train.cli.terminal import note
from slurm_train.config.frozen import load_config
from slurm_train.config.schema import measured_average, nested
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, CheckpointError
from slurm_train.formatting import byte_size, table
from slurm_train.rundir.lookup import find_run
from slurm_train.rundir.paths import list_checkpoints, name_of, require_private
from slurm_train.slurm.commands import SlurmCommands

_BEST = "best"


def main(words: Sequence[str]) -> int:
    """Prints tables to stdout; 1 if a checkpoint cannot be trusted (verify) or weights differ (diff)."""
    arguments = parse_runs("checkpoint", words)
    return _ACTIONS[arguments.action](arguments)


def _show(arguments: argparse.Namespace) -> int:
    checks_bytes = arguments.action == "verify"
    root = find_run(arguments.root, arguments.run).checkpoints
    kept = find_kept(root)
    rows: list[tuple[str, ...]] = []
    has_damaged = False
    for path, outcome in survey(root, verify if checks_bytes else read_manifest):
        if isinstance(outcome, CheckpointError):
            has_damaged = True
            rows.append((path.name, "-", "-", "-", "-", outcome.message))
            continue
        state = ", ".join(
            ["verified" if checks_bytes else "complete", *(str(entry) for entry in kept if entry.path == path)]
        )
        counts = (str(outcome.step), str(outcome.samples), str(outcome.world_size))
        rows.append((path.name, *counts, byte_size(outcome.num_bytes), state))
    for path in list_passed_over(root):
        note(f"{path} was passed over and counts for nothing; it is left for you to look at")
    if not rows:
        note(f"no checkpoint in {root}")
        return EXIT_DONE
    print(table(("CHECKPOINT", "STEP", "SAMPLES", "RANKS", "SIZE", "STATE"), rows))
    if any(entry.is_best and _measures_average(entry.path) for entry in kept):
        note("the best were chosen by averaged weights: `checkpoint export RUN@best FILE --ema` writes these")
    return EXIT_FAILURE if checks_bytes and has_damaged else EXIT_DONE


def find_checkpoint(word: str, *, root: Path) -> Path:
    """Returns the checkpoint that a word names: a path, RUN@STEP, RUN@best, or RUN for its newest that verifies.

    Raises:
        CheckpointError: the run has none, or none of that step, or it keeps the best by several measures.
        RunError: there is no such run.
    """
    if (Path(word) / MANIFEST_FILE).is_file():
        return Path(word)
    run, step = split_step(word)
    checkpoints = find_run(root, run or None).checkpoints
    if step == _BEST or step.startswith(f"{_BEST}:"):
        return _find_best(checkpoints, run=run, measure=step.removeprefix(_BEST).removeprefix(":"))
    if step:
        paths = {str(name_of(path).step): path for path in reversed(list_checkpoints(checkpoints))}
        if step not in paths:
            steps = ", ".join(reversed(paths)) or "none"
            raise CheckpointError(f"{checkpoints} has no checkpoint of step {step}", hint=f"steps there: {steps}")
        return paths[step]
    if not list_checkpoints(checkpoints):
        raise CheckpointError(
            f"{checkpoints} has no checkpoint yet",
            hint="`status` shows how far the run is, and checkpoint.every_steps says when it saves",
        )
    search = newest_verified(checkpoints)
    if search.newest is None:
        raise CheckpointError(f"no checkpoint in {checkpoints} verifies", hint="look with `checkpoint verify`")
    return search.newest[0]


def _find_best(checkpoints: Path, *, run: str, measure: str) -> Path:
    """Returns the best checkpoint of a run.

    Args:
        checkpoints: of the run.
        run: as typed, for the hint.
        measure: by which it is the best; "" where the run keeps the best by one measure only.

    Raises:
        CheckpointError: there is none, or it is not clear which one is meant.
    """
    best: dict[str, Path] = {}
    for kept in find_kept(checkpoints):
        if kept.is_best:
            best.setdefault(kept.rule.removeprefix(f"{_BEST} "), kept.path)
    if not best:
        raise CheckpointError(
            f"{checkpoints} has no best checkpoint", hint="the callback BestCheckpoint keeps it, see docs/callbacks.md"
        )
    if measure in best or (not measure and len(best) == 1):
        return best[measure or next(iter(best))]
    words = ", ".join(f"{run}@{_BEST}:{name}" for name in best)
    found = ", ".join(f"{name} (step {name_of(path).step})" for name, path in best.items())
    raise CheckpointError(
        f"{checkpoints} has no best checkpoint by {measure}"
        if measure
        else f"{checkpoints} has a best checkpoint by {len(best)} measures: {found}",
        hint=f"write {words}",
    )


def _measures_average(path: Path) -> bool:
    """Returns whether the evaluations of the run that saved a checkpoint measured averaged weights."""
    settings = read_manifest(path).extra.get("settings") or {}
    return measured_average(settings.get("callbacks") or ()) is not None


def _diff(arguments: argparse.Namespace) -> int:
    from slurm_train.checkpoint.load import differences, read_model

    paths = [find_checkpoint(word, root=arguments.root) for word in (arguments.first, arguments.second)]
    first_header, first_tensors = read_model(paths[0])
    second_header, second_tensors = read_model(paths[1])
    first_facts = asdict(first_header)
    second_facts = asdict(second_header)
    changed = [key for key in first_facts if key != "files" and first_facts[key] != second_facts[key]]
    if changed:
        facts = [(key, str(first_facts[key]), str(second_facts[key])) for key in changed]
        print(table(("FACT", "FIRST", "SECOND"), facts))
    rows = differences(first_tensors, second_tensors)
    if rows:
        print(table(("TENSOR", "DIFFERENCE"), rows))
    else:
        note(f"all {len(first_tensors)} tensors of the model are equal, bit for bit")
    return EXIT_FAILURE if rows else EXIT_DONE


def _collect(arguments: argparse.Namespace) -> int:
    run = find_run(arguments.root, arguments.run)
    require_private(run)
    keep = load_config(run.config).checkpoint.keep if arguments.keep is None else arguments.keep
    pruned = collect_checkpoints(run, SlurmCommands(os.environ), keep=keep)
    for path in pruned.discarded:
        print(path)
    for problem in pruned.problems:
        note(problem)
    for path in pruned.untrusted:
        note(f"{path} cannot be trusted; look at it")
    num_kept = len(list_checkpoints(run.checkpoints)) - len(pruned.untrusted)
    note(f"{len(pruned.discarded)} removed, {num_kept} kept")
    return EXIT_FAILURE if pruned.problems else EXIT_DONE


def _export(arguments: argparse.Namespace) -> int:
    from slurm_train.checkpoint.load import export_model, export_to, read_model

    path = find_checkpoint(arguments.checkpoint, root=arguments.root)
    target = Path(arguments.target)
    if arguments.format == "hf":
        from slurm_train.data.prepare import end_of_document
        from slurm_train.models.pretrained import write_pretrained
        from slurm_train.models.pretrained_names import tokenizer_directory

        manifest, tensors = read_model(path, averaged=arguments.ema)
        settings = nested(manifest.extra.get("settings", {}))
        model = settings.get("model", {})
        data = settings.get("data", {})
        tokenizer = tokenizer_directory(model, data)
        end = end_of_document(data)

        def write(folder: Path) -> int:
            notes = write_pretrained(
                folder, tensors, model=model, shard_size=arguments.shard_size, tokenizer=tokenizer, end=end
            )
            for words in notes:
                note(words)
            return len(tensors)

        num_tensors = export_to(target, write)
    else:
        num_tensors = export_model(path, target, averaged=arguments.ema)
    note(f"{num_tensors} tensors of {path}")
    if not arguments.ema and _measures_average(path):
        note("these are the trained weights; the run's evaluations measured averaged ones, which --ema writes")
    print(arguments.target)
    return EXIT_DONE


_ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "ls": _show,
    "verify": _show,
    "diff": _diff,
    "gc": _collect,
    "export": _export,
}
