"""What Hydra's words ask for besides the run directory: a path that leads there, and Hydra's files about it.

Looked at before anything is written, made as soon as the run directory stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_train.cli.terminal import note
from slurm_train.errors import ConfigError
from slurm_train.launch.plan import RunPlan
from slurm_train.rundir.paths import RunDirectory

if TYPE_CHECKING:
    from slurm_train.config.hydra import HydraSettings, Output


@dataclass(frozen=True, slots=True)
class RunOutput:
    """What one run shall have."""

    run: RunDirectory
    alias: Path | None
    output: Output


def plan_outputs(
    settings: HydraSettings,
    plans: Sequence[RunPlan],
    words: Sequence[Sequence[str]],
    *,
    cwd: Path,
    first: int = 0,
) -> list[RunOutput]:
    """Returns what is asked for each run; empty where Hydra was told nothing. Touches nothing.

    Args:
        settings: what was said to Hydra.
        plans: the runs.
        words: the words of each.
        cwd: where the words were typed.
        first: the number of the first run in the sweep.

    Raises:
        ConfigError: a path that cannot be told, or the same for two runs.
        RunError: something lies there.
    """
    from slurm_train.config.hydra import read_output
    from slurm_train.rundir.lookup import require_free

    found = []
    for number, (plan, own) in enumerate(zip(plans, words, strict=True), start=first):
        output = read_output(settings, plan.config, own, number=number if settings.words.multirun else None)
        if output is not None:
            found.append(RunOutput(plan.run, _alias(output.path, cwd), output))
    _refuse_same(found)
    for one in found:
        if one.alias is not None:
            require_free(one.alias, one.run)
    return found


def make_outputs(outputs: Sequence[RunOutput]) -> None:
    """Makes the links and writes the files.

    Raises:
        RunError: something has come to lie there, or nothing can be written.
    """
    from slurm_train.rundir.files import make_private, write_atomic
    from slurm_train.rundir.lookup import make_alias

    for one in outputs:
        if one.output.folder is not None:
            folder = one.run.path / one.output.folder
            make_private(folder)
            for name, text in one.output.files.items():
                write_atomic(folder / name, text, durable=False)
        if one.alias is not None:
            make_alias(one.alias, one.run)


def say_outputs(outputs: Sequence[RunOutput]) -> None:
    """Says where runs are found besides their own directories."""
    aliases = [one.alias for one in outputs if one.alias is not None]
    if aliases:
        more = f" (and {len(aliases) - 1} more)" if len(aliases) > 1 else ""
        note(f"  found at      {aliases[0]}{more}: a link to the run directory")


def _alias(path: str | None, cwd: Path) -> Path | None:
    """Returns the asked path; None for the folder that the words were typed in, which is Hydra's way to say nowhere."""
    alias = None if path is None else Path(cwd, Path(path).expanduser())
    return None if alias is None or alias.resolve() == cwd.resolve() else alias


def _refuse_same(outputs: Sequence[RunOutput]) -> None:
    seen: dict[Path, RunOutput] = {}
    for one in outputs:
        if one.alias is not None and seen.setdefault(one.alias, one).run != one.run:
            raise ConfigError(
                f"two runs of the sweep would both be at {one.alias}",
                hint="put ${hydra.job.num} or ${hydra.job.override_dirname} into hydra.sweep.subdir",
            )
