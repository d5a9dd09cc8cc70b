"""Matrix products of blocks in float8, by torchao: which layers, how their shards are gathered, and how they are cut.

Every tensor is scaled by its largest value. Parameters keep their names, types and values, so a checkpoint is the same
with and without float8. torchao is imported where it is needed, since that takes seconds.

Shards are gathered in float8, one byte a number: each rank rounds its part with the scale of the whole matrix. For the
passes of a step all scales are computed at once, by one exchange (`ScalesOfStep`). At other times each gathering
computes its scale, so weights that a load or an average has changed are never scaled by old numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from slurm_train.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

_MULTIPLE = 16
"""Of rows and columns, which the hardware needs."""
_KIND = "Float8Linear"


def to_float8(model: nn.Module, *, blocks: Iterable[nn.Module], tp: int = 1, emulate: bool = False) -> None:
    """Lets the matrix products of all blocks compute in float8, in place; parameters and their names stay.

    Head, embedding and norms stay as they are, and matrices whose sizes, or those of their parts, are no multiples of
    16.

    Args:
        model: whole; may have parameters without memory.
        blocks: of the model.
        tp: into how many parts tensor parallelism will cut matrices.
        emulate: computes with rounded numbers in float32, on any device; for tests.

    Raises:
        ConfigError: torchao is missing, or no matrix suits.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as err:
        raise ConfigError(
            f"train.precision=fp8 was asked, and torchao cannot be imported: {err}",
            hint="pip install 'slurm-train[fp8]'",
        ) from err
    multiple = _MULTIPLE * tp
    layers = [
        module
        for block in blocks
        for module in block.modules()
        if type(module) is nn.Linear and module.in_features % multiple == module.out_features % multiple == 0
    ]
    if not layers:
        raise ConfigError(
            f"train.precision=fp8 was asked, but no block of {type(model).__name__} has an nn.Linear whose sizes are "
            f"multiples of {_MULTIPLE}" + (f" times parallel.tp={tp}" if tp > 1 else ""),
            hint="set train.precision=bfloat16",
        )
    suits = set(map(id, layers))
    settings = Float8LinearConfig(emulate=emulate)
    convert_to_float8_training(model, module_filter_fn=lambda module, _name: id(module) in suits, config=settings)


def is_float8(module: nn.Module) -> bool:
    """Returns whether the product of a layer is in float8."""
    # By name, so that torchao is imported for train.precision=fp8 only.
    return type(module).__name__ == _KIND


def float8_styles(*, rowwise: Mapping[str, Any]) -> dict[str, ParallelStyle]:
    """Returns the ways in which tensor parallelism cuts such a layer: its input is in float8 before it is exchanged.

    Args:
        rowwise: arguments for a matrix that is cut by inputs, as torch's `RowwiseParallel` has them.
    """
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

    return {"colwise": Float8ColwiseParallel(), "rowwise": Float8RowwiseParallel(**rowwise)}


def gather_in_float8(model: nn.Module, *, num_shards: int) -> None:
    """Lets FSDP gather the matrices of float8 layers in float8; called before it shards the model.

    A matrix whose rows do not make equal parts is left to be gathered as all other parameters are.

    Args:
        model: all that this rank has; its parameters are replaced.
        num_shards: into how many parts FSDP cuts the rows.
    """
    from torch.distributed.tensor import DTensor
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    build: Any = DTensor
    replaced: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        if not is_float8(module):
            continue
        layer: Any = module
        weight: Any = layer.weight
        is_cut = isinstance(weight, DTensor)
        part: Any = weight._local_tensor if is_cut else weight.detach()
        if len(part) % num_shards:
            continue
        if weight not in replaced:
            kind = layer.config.cast_config_weight.target_dtype
            local_weight = WeightWithDynamicFloat8CastTensor(part, layer.linear_mm_config, kind)
            whole = build(local_weight, weight._spec, requires_grad=False) if is_cut else local_weight
            replaced[weight] = nn.Parameter(whole, requires_grad=weight.requires_grad)
            vars(replaced[weight]).update(vars(weight))
        # Tied weights stay one.
        layer.register_parameter("weight", replaced[weight])


class ScalesOfStep:
    """Finds out the scales of all matrices that are gathered in float8 at once, for the passes of one step.

    Args:
        model: this rank's part; sharded, and not gathered at the moment.
    """

    def __init__(self, model: nn.Module) -> None:
        by_mesh: dict[Any, list[nn.Module]] = {}
        for module in model.modules():
            weight: Any = module.weight if is_float8(module) else None
            # Of a shard; of a replica it is an ordinary tensor.
            if hasattr(getattr(weight, "_local_tensor", None), "fsdp_pre_all_gather"):
                by_mesh.setdefault(weight.device_mesh, []).append(module)
        # One exchange is over one mesh: matrices that `tp` does not cut have another.
        self._groups = [nn.ModuleList(members) for members in by_mesh.values()]
        self._weights: list[Any] = [module.weight for members in by_mesh.values() for module in members]

    @contextmanager
    def computed(self) -> Iterator[None]:
        """Holds while the parameters stay as they are. Collective."""
        if not self._weights:
            yield
            return
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        for members in self._groups:
            precompute_float8_dynamic_scale_for_fsdp(members)
        try:
            yield
        finally:
            for weight in self._weights:
                weight._local_tensor._precomputed_scale = None
