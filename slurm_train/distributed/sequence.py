"""Sequence parallelism: between cut matrices the ranks of `tp` have a part of the positions each, not all of them.

What a rank keeps of norms, residuals and dropout is divided by `tp`. The sum behind a matrix that is cut by inputs
becomes a sum of which each rank gets its positions, and before the next cut matrix they are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, PrepareModuleOutput, SequenceParallel

from slurm_train.distributed.context import POSITIONS_DIM
from slurm_train.distributed.pipeline import PassThrough
from slurm_train.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

OWN_POSITIONS = Shard(POSITIONS_DIM)
_WAYS = ("gather", "own", "split")


class GatherFirst(ParallelStyle):
    """Puts the positions of a module's first argument together before it is called; the others are left alone.

    Args:
        stays_spread: whether cut matrices come first in the module. They take what is gathered as it is, and their
            gradients of it are added up once for all of them.
    """

    def __init__(self, *, stays_spread: bool) -> None:
        super().__init__()
        self.stays_spread = stays_spread

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            own = DTensor.from_local(arguments[0], device_mesh, [OWN_POSITIONS], run_check=False)
            whole = own.redistribute(placements=[Replicate()])
            return (whole if self.stays_spread else whole.to_local(), *arguments[1:])

        module.register_forward_pre_hook(gather)
        return module


def position_styles(model: nn.Module, cut: Mapping[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Returns what is done around each part that the model's `sequence_parallel_plan` names.

    Args:
        model: all that this rank has.
        cut: the matrices that are cut, by name.

    Raises:
        ConfigError: the model has no plan, or one that names no part or an unknown way.
    """
    own = getattr(model, "sequence_parallel_plan", None)
    if own is None:
        raise ConfigError(
            f"parallel.sequence_parallel was asked, but {type(model).__name__} does not say where its positions meet",
            hint="define sequence_parallel_plan() on the model (docs/parallel.md), or leave it out",
        )
    plan: Mapping[str, str] = own()
    found: dict[str, ParallelStyle] = {}
    for pattern, way in plan.items():
        named = {name: part for name, part in model.named_modules() if fnmatchcase(name, pattern)}
        if way not in _WAYS or not named:
            raise ConfigError(
                f"{type(model).__name__}.sequence_parallel_plan() has {pattern!r}: {way!r}, which "
                + ("names no part of the model" if way in _WAYS else "is no way to deal positions out"),
                hint=f"the ways are {', '.join(_WAYS)}; patterns are names with *, e.g. 'blocks.*.norm'",
            )
        # Stages send whole sequences to each other: what stands for a part of another one splits and gathers, too.
        present = [name for name, part in named.items() if way != "own" or not isinstance(part, PassThrough)]
        found |= {name: _style(way, holds_cut=any(one.startswith(f"{name}.") for one in cut)) for name in present}
    return found


def passing_styles(root: nn.Module, styles: Mapping[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Returns those of the styles whose part is, in this stage, only passed through."""
    parts = dict(root.named_modules())
    return {name: style for name, style in styles.items() if isinstance(parts.get(name), PassThrough)}


def _style(way: str, *, holds_cut: bool) -> ParallelStyle:
    if way == "gather":
        return GatherFirst(stays_spread=holds_cut)
    if way == "own":
        return SequenceParallel(sequence_dim=POSITIONS_DIM, use_local_output=True)
    return PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=OWN_POSITIONS)
