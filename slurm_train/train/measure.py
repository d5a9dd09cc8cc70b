"""Measures a model without its memory: tensors that have a shape and no numbers go through it once.

`plan --measure` starts `measure` in a process of its own for models that no formula is known for: it imports torch and
the user's code. The configuration comes as YAML on stdin, the sizes go as JSON to stdout. A rank is not needed, nor is
a GPU; matrix products run as the CPU would run them, in bfloat16 where the run would.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import yaml
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from slurm_train.config.data_kinds import EMBEDDED, PREPARED, kind_of
from slurm_train.config.schema import RunConfig, build_config
from slurm_train.config.target import instantiate
from slurm_train.data.batches import BatchStream
from slurm_train.data.build import build_source
from slurm_train.data.source import Batch, Draw, map_tensors
from slurm_train.models.first_weights import lower_parameters
from slurm_train.models.objective import Objective


def main(words: Sequence[str]) -> int:
    """Measures; words are the samples of a micro-batch and "half" or "full"."""
    batch_size, precision = words
    config = build_config(RunConfig, yaml.safe_load(sys.stdin.read()))
    # A model may print; what is read is the last line.
    out = sys.stdout
    sys.stdout = sys.stderr
    measurement = measure_model(config, batch_size=int(batch_size), half=precision == "half")
    print(json.dumps(measurement), file=out)
    return 0


def measure_model(config: RunConfig, *, batch_size: int, half: bool) -> dict[str, Any]:
    """Returns bytes of a model: `trained_bytes`, `optimizer_bytes`, `other_bytes`; of a batch `activation_bytes`.

    Args:
        config: the run's configuration.
        batch_size: samples of a micro-batch.
        half: matrix products in bfloat16.

    Raises:
        Exception: whatever building the model or its data raises; models may be anybody's.
    """
    batch = _example(config, batch_size)
    with FakeTensorMode() as mode:
        model = instantiate(config.model or {})
        if config.train.param_dtype == "bfloat16":
            lower_parameters(model)
    objective = Objective(model)
    # Tensors without numbers would not tell what the labels are.
    objective.choose(batch).check_batch(batch)
    with mode:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        return {
            "trained_bytes": sum(tensor.nbytes for tensor in trained),
            "optimizer_bytes": sum(
                tensor.nbytes * config.optim.num_kept(name, dims=tensor.dim())
                for name, tensor in model.named_parameters()
                if tensor.requires_grad
            ),
            "other_bytes": sum(buffer.nbytes for buffer in (*frozen, *model.buffers())),
            **_try_forward(
                objective, map_tensors(lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype), batch), half=half
            ),
        }


def _try_forward(objective: Objective, batch: Batch, *, half: bool) -> dict[str, Any]:
    # The parameters are known by now, and a model may look at numbers, which are not there.
    try:
        kept = _kept_bytes(objective, batch, half=half)
    except Exception as err:
        return {"problem": f"{type(err).__name__}: {' '.join(str(err).split())[:200]}"}
    # The backward pass goes from the last to the first: what came later is gone by then, and the tensor it is at is
    # there again twice, as a gradient of what comes before and after it.
    peaks = (so_far + 2 * tensor for so_far, tensor in zip(accumulate(kept), kept, strict=True))
    return {"activation_bytes": max(peaks, default=0)}


def _kept_bytes(objective: Objective, batch: Batch, *, half: bool) -> list[int]:
    model_storages = {
        parameter.untyped_storage()._cdata for parameter in (*objective.parameters(), *objective.buffers())
    }
    storages: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=half),
    ):
        objective(batch)
    return [storage.nbytes() for key, storage in storages.items() if key not in model_storages]


def _example(config: RunConfig, batch_size: int) -> Batch:
    """Returns a micro-batch of the run's data; of shipped text its shape alone, since it may not be prepared yet."""
    data = config.data or {}
    if kind_of(data) in (EMBEDDED, PREPARED):
        tokens = torch.zeros(batch_size, int(data.get("context", 256)), dtype=torch.int64)
        return tokens, tokens
    source = build_source(data, split="train", seed=config.seed, part=(0, 1))
    assert source is not None
    import numpy as np

    indices = np.arange(min(batch_size, len(source)), dtype=np.int64)
    return next(BatchStream(source, iter([Draw(indices, indices)]))).tensors
