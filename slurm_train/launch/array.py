"""Cuts the runs of a sweep into job arrays and renders the script of each; nothing is written or submitted here.

The elements of an array have the same resources, so runs of another shape go into another array, and no array has more
elements than the site's MaxArraySize. Each is numbered from 0; which run an element is stands in a file beside the
script. The run's own `submit.sh` does the rest, so an element is carried out like a run submitted alone.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from slurm_train.assets import read_template
from slurm_train.errors import ClusterError
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.sweep import ArrayDirectory
from slurm_train.slurm.flags import sbatch_line

_DEFAULT_MAX_ARRAY_SIZE = 1001
# An array has a name and a log of its own.
_OWN_FLAGS = ("#SBATCH --job-name=", "#SBATCH --output=", "#SBATCH --array=")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPlan:
    """One job array as it would be submitted."""

    runs: tuple[RunDirectory, ...]
    """Element i is the run at position i."""
    directives: tuple[str, ...]
    """The #SBATCH lines that its runs have in common."""
    throttle: int | None = None
    """Elements that may run at once; None: as many as there is room for."""
    after: int | None = None
    """Position of the array whose end it waits for."""


def max_array_size(settings: Mapping[str, str]) -> int:
    """Returns how many elements an array may have at a site, from `scontrol show config`.

    Raises:
        ClusterError: the site allows no job arrays.
    """
    limit = settings.get("MaxArraySize", "")
    # The setting caps the index, which counts from 0: so many elements fit.
    size = int(limit) if limit.isdigit() else _DEFAULT_MAX_ARRAY_SIZE
    count = re.search(r"\bmax_array_tasks=(\d+)", settings.get("SchedulerParameters", ""))
    if count is not None:
        size = min(size, int(count[1]))
    if size < 1:
        raise ClusterError("this site allows no job arrays (MaxArraySize=0)", hint="submit the runs one by one")
    return size


def cut_arrays(
    scripts: Sequence[tuple[RunDirectory, str]], *, max_size: int, max_parallel: int | None
) -> list[ArrayPlan]:
    """Returns the arrays for runs with their own scripts, in the order in which they are to be submitted.

    Args:
        scripts: each run with the text of its `submit.sh`.
        max_size: elements that an array may have.
        max_parallel: runs of the whole sweep that may run at once; None: no limit.
    """
    by_shape: dict[tuple[str, ...], list[RunDirectory]] = {}
    for run, script in scripts:
        by_shape.setdefault(directives_of(script), []).append(run)
    arrays = [
        ArrayPlan(runs=tuple(runs[start : start + max_size]), directives=shape)
        for shape, runs in by_shape.items()
        for start in range(0, len(runs), max_size)
    ]
    return arrays if max_parallel is None else _share(arrays, max_parallel)


def directives_of(script: str) -> tuple[str, ...]:
    """Returns the #SBATCH lines of a run's script without its name and log: runs with the same ones fit one array."""
    lines = (line for line in script.splitlines() if line.startswith("#SBATCH "))
    return tuple(line for line in lines if not line.startswith(_OWN_FLAGS))


def _share(arrays: list[ArrayPlan], max_parallel: int) -> list[ArrayPlan]:
    """Shares the limit among the arrays: Slurm throttles each for itself and knows no throttle over several.

    Arrays beyond the limit wait for the end of one before them, so never more than the limit run.
    """
    lanes = min(max_parallel, len(arrays))
    shares = _split(max_parallel, [len(array.runs) for array in arrays[:lanes]])
    return [
        replace(
            array,
            throttle=min(shares[position % lanes], len(array.runs)),
            after=position - lanes if position >= lanes else None,
        )
        for position, array in enumerate(arrays)
    ]


def _split(total: int, weights: Sequence[int]) -> list[int]:
    """Returns whole numbers of at least 1 that add up to `total`, as near to the weights as can be."""
    shares = [1] * len(weights)
    for _ in range(total - len(weights)):
        neediest = max(range(len(weights)), key=lambda position: weights[position] / shares[position])
        shares[neediest] += 1
    return shares


def render_array(plan: ArrayPlan, folder: ArrayDirectory, *, name: str) -> str:
    """Returns the text of an array's script.

    Args:
        plan: the array.
        folder: where its files lie.
        name: job name, by which an array can be found again whose id was lost.
    """
    spec = f"0-{len(plan.runs) - 1}" + (f"%{plan.throttle}" if plan.throttle is not None else "")
    own = [
        sbatch_line("job-name", name),
        sbatch_line("array", spec),
        sbatch_line("output", str(folder.logs / "%a.log")),
    ]
    return read_template("array.sh").format(
        title=f"{name}: {len(plan.runs)} runs",
        sbatch="\n".join([*own, *plan.directives]),
        runs=shlex.quote(str(folder.runs)),
    )
