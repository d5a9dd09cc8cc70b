"""`checkpoint ls | verify | diff | gc | export`: what checkpoints a run has, whether they hold, and what is in them.

`diff` and `export` read tensors and import torch; the others do not.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from slurm_train.checkpoint.commit import Place
from slurm_train.checkpoint.directory import newest_verified, read_manifest, survey, verify
from slurm_train.checkpoint.manifest import MANIFEST_FILE, Manifest
from slurm_train.cli.display import note, table
from slurm_train.cli.liveness import holder_lives
from slurm_train.config.frozen import load_config
from slurm_train.config.schema import nested
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, CheckpointError
from slurm_train.rundir.jobs import release_lock, take_lock, this_process
from slurm_train.rundir.layout import existing_attempts, list_checkpoints, name_of
from slurm_train.rundir.lookup import find_run
from slurm_train.slurm.commands import SlurmCommands

_EXAMPLES = """\
examples:
  python -m slurm_train checkpoint ls gpt-stdlib
  python -m slurm_train checkpoint verify 3f9a1c07
  python -m slurm_train checkpoint export gpt-stdlib model.safetensors     the newest that verifies
  python -m slurm_train checkpoint export gpt-stdlib@200 model.safetensors
  python -m slurm_train checkpoint export llama-text llama --format hf     for transformers
  python -m slurm_train checkpoint diff gpt-stdlib@100 gpt-stdlib@200      exit code 1 if weights differ
  python -m slurm_train checkpoint gc gpt-stdlib --keep 1
"""
_RUN_HELP = "run name, run id, job id or path; default: the newest"
_ONE_HELP = "RUN (its newest that verifies), RUN@STEP, or the path of a checkpoint"


def main(words: Sequence[str]) -> int:
    """Prints tables to stdout; 1 if a checkpoint cannot be trusted (verify) or weights differ (diff)."""
    arguments = _build_parser().parse_args(list(words))
    action: Callable[[argparse.Namespace], int] = _ACTIONS[arguments.action]
    return action(arguments)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m slurm_train checkpoint",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--root", default="runs", help="root of the runs (default: runs)")
    actions = parser.add_subparsers(dest="action", required=True, metavar="{ls,verify,diff,gc,export}")
    for name, text in (("ls", "reads the manifests"), ("verify", "reads every byte")):
        actions.add_parser(name, parents=[common], help=text).add_argument(
            "run", nargs="?", metavar="RUN", help=_RUN_HELP
        )
    gc = actions.add_parser("gc", parents=[common], help="removes old checkpoints and what dead attempts left")
    gc.add_argument("run", metavar="RUN", help=_RUN_HELP.partition(";")[0])
    gc.add_argument("--keep", type=int, metavar="N", help="how many stay (default: the run's checkpoint.keep)")
    diff = actions.add_parser("diff", parents=[common], help="compares facts and weights, bit for bit")
    diff.add_argument("first", metavar="A", help=_ONE_HELP)
    diff.add_argument("second", metavar="B", help="likewise")
    export = actions.add_parser("export", parents=[common], help="writes the model for use elsewhere")
    export.add_argument("checkpoint", metavar="RUN", help=_ONE_HELP)
    export.add_argument("target", metavar="OUT", help="the file to write, e.g. model.safetensors; hf: the directory")
    export.add_argument(
        "--format", choices=("safetensors", "hf"), default="safetensors", help="hf: a directory that transformers reads"
    )
    export.add_argument("--shard-size", default="5GB", metavar="SIZE", help="hf: largest file (default: 5GB)")
    return parser


def _show(arguments: argparse.Namespace) -> int:
    check_bytes = arguments.action == "verify"
    root = find_run(Path(arguments.root), arguments.run).checkpoints
    found = survey(root, verify if check_bytes else read_manifest)
    rows = [_row(path, outcome, state="verified" if check_bytes else "complete") for path, outcome in found]
    if not rows:
        note(f"no checkpoint in {root}")
        return EXIT_DONE
    print(table(("CHECKPOINT", "STEP", "SAMPLES", "RANKS", "SIZE", "STATE"), rows))
    return EXIT_FAILURE if check_bytes and any(row[-1] != "verified" for row in rows) else EXIT_DONE


def _row(path: Path, outcome: Manifest | CheckpointError, *, state: str) -> tuple[str, ...]:
    """Returns the table row of a checkpoint; `state` is what one that holds is called."""
    if isinstance(outcome, CheckpointError):
        return (path.name, "-", "-", "-", "-", outcome.message)
    counts = (str(outcome.step), str(outcome.samples), str(outcome.world_size))
    return (path.name, *counts, f"{outcome.num_bytes / 2**20:.1f} MiB", state)


def find_checkpoint(word: str, *, root: Path) -> Path:
    """Returns the checkpoint that a word names: a path, RUN@STEP, or RUN for its newest that verifies.

    Raises:
        CheckpointError: the run has none, or none of that step.
        RunError: there is no such run.
    """
    if (Path(word) / MANIFEST_FILE).is_file():
        return Path(word)
    name, _, step = word.partition("@")
    checkpoints = find_run(root, name or None).checkpoints
    if step:
        paths = list_checkpoints(checkpoints)
        of_step = [path for path in paths if str(name_of(path).step) == step]
        if of_step:
            return of_step[0]
        there = ", ".join(str(name_of(path).step) for path in paths) or "none"
        raise CheckpointError(f"{checkpoints} has no checkpoint of step {step}", hint=f"steps there: {there}")
    search = newest_verified(checkpoints)
    if search.found is None:
        raise CheckpointError(f"no checkpoint in {checkpoints} verifies", hint="look with `checkpoint verify`")
    return search.found[0]


def _diff(arguments: argparse.Namespace) -> int:
    from slurm_train.checkpoint.export import differences, read_model

    paths = [find_checkpoint(word, root=Path(arguments.root)) for word in (arguments.first, arguments.second)]
    (one, tensors), (other, other_tensors) = (read_model(path) for path in paths)
    if facts := _facts_apart(one, other):
        print(table(("FACT", "FIRST", "SECOND"), facts))
    found = differences(tensors, other_tensors)
    if found:
        print(table(("TENSOR", "DIFFERENCE"), found))
    else:
        note(f"all {len(tensors)} tensors of the model are equal, bit for bit")
    return EXIT_FAILURE if found else EXIT_DONE


def _facts_apart(one: Manifest, other: Manifest) -> list[tuple[str, str, str]]:
    mine, theirs = asdict(one), asdict(other)
    return [(key, str(mine[key]), str(theirs[key])) for key in mine if key != "files" and mine[key] != theirs[key]]


def _collect(arguments: argparse.Namespace) -> int:
    run = find_run(Path(arguments.root), arguments.run)
    keep = load_config(run.config).checkpoint.keep if arguments.keep is None else arguments.keep
    commands, holder = SlurmCommands(os.environ), this_process()
    take_lock(run, holder, is_alive=lambda current: holder_lives(current, commands))
    try:
        # All attempts are over. What stays gets the number of the next one, so none of them can remove it any more.
        attempt = max(existing_attempts(run), default=-1) + 1
        place = Place(root=run.checkpoints, attempt=attempt, keep=keep)
        search = place.claim()
        if search.found is not None:
            pruned = place.prune(search.found[0])
        elif search.passed_over:
            raise CheckpointError(
                f"no checkpoint in {run.checkpoints} verifies, so none is removed", hint="look with `checkpoint verify`"
            )
        else:
            pruned = place.sweep()
    finally:
        release_lock(run, holder)
    for path in pruned.removed:
        print(path)
    for line in (*pruned.problems, *(f"{path} cannot be trusted; look at it" for path in pruned.untrusted)):
        note(line)
    note(f"{len(pruned.removed)} removed, {len(pruned.kept)} kept")
    return EXIT_FAILURE if pruned.problems else EXIT_DONE


def _export(arguments: argparse.Namespace) -> int:
    from slurm_train.checkpoint.export import export_model

    path = find_checkpoint(arguments.checkpoint, root=Path(arguments.root))
    if arguments.format == "hf":
        num_tensors = _export_pretrained(path, Path(arguments.target), shard_size=arguments.shard_size)
    else:
        num_tensors = export_model(path, Path(arguments.target))
    note(f"{num_tensors} tensors of {path}")
    print(arguments.target)
    return EXIT_DONE


def _export_pretrained(path: Path, target: Path, *, shard_size: str) -> int:
    from slurm_train.checkpoint.export import export_to, read_model
    from slurm_train.models.pretrained import write_pretrained

    manifest, tensors = read_model(path)
    model = nested(manifest.extra.get("settings", {})).get("model", {})

    def write(folder: Path) -> int:
        write_pretrained(folder, tensors, model=model, shard_size=shard_size)
        return len(tensors)

    return export_to(target, write)


_ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "ls": _show,
    "verify": _show,
    "diff": _diff,
    "gc": _collect,
    "export": _export,
}
