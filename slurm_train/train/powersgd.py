"""PowerSGD as torch has it, and what it takes to be exact: its state travels with each rank's checkpoint.

Vogels et al. 2019, arXiv 1905.13727. A matrix is sent as two thin ones; what they leave out is added to the next
step's gradient (error feedback). These leftovers differ from rank to rank, are as large as the gradients, and decide
what follows, so they are saved and restored. On another number of ranks they cannot be; then they begin at zero, and
the run says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from slurm_train.distributed.seeds import mix
from slurm_train.errors import RunError
from slurm_train.train.exchange import Bucket, Exchange, Reduced

_MIN_RATE = 2.0
# Keeps the orthogonalisation of vanishing gradients from dividing by zero.
_EPSILON = 1e-8


class PowerSgd(Exchange):
    """Sends matrices as products of two thin ones.

    Args:
        start_step: steps up to this one exchange in full.
        rank: columns of the thin matrices.
        seed: of their first values.
        device: where the gradients are.
    """

    name = "powersgd"

    def __init__(self, *, start_step: int, rank: int, seed: int, device: torch.device) -> None:
        super().__init__(start_step=start_step)
        self._rank, self._device = rank, device
        # When to begin is decided here, by the run's step, so torch's own counting never matters.
        self._inner = PowerSGDState(
            None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=2,
            min_compression_rate=_MIN_RATE,
            orthogonalization_epsilon=_EPSILON,
            compression_stats_logging_frequency=2**62,
        )
        self._inner.iter = 2
        self._draws = _Draws(seed)
        self._inner.rng = self._draws  # type: ignore[assignment]  # only randint is called

    def begin(self, step: int) -> None:
        """Says which step follows."""
        super().begin(step)
        self._draws.step = step

    def forget(self) -> None:
        """Drops the leftovers and the thin matrices: a NaN in them would come back at every step."""
        for kept in (self._inner.error_dict, self._inner.p_memory_dict, self._inner.q_memory_dict):
            kept.clear()

    def state(self) -> dict[str, Any]:
        """Returns copies of the leftovers and the thin matrices, by bucket."""
        inner = self._inner
        names = {"error": inner.error_dict, "p": inner.p_memory_dict, "q": inner.q_memory_dict}
        return {name: {bucket: tensor.clone() for bucket, tensor in kept.items()} for name, kept in names.items()}

    def load(self, state: dict[str, Any]) -> None:
        """Takes over what `state` gave."""
        inner = self._inner
        self.forget()
        for name, kept in (("error", inner.error_dict), ("p", inner.p_memory_dict), ("q", inner.q_memory_dict)):
            kept.update({int(bucket): tensor.to(self._device) for bucket, tensor in state.get(name, {}).items()})

    def sent_bytes(self, parameters: Iterable[Tensor]) -> float:
        """Returns the bytes of the thin matrices, and of what is too small to be sent so."""
        return sum(_sent_numbers(parameter, self._rank) * parameter.element_size() for parameter in parameters)

    def _compress(self, bucket: Bucket) -> Reduced:
        leftovers = self._inner.error_dict.get(bucket.index())
        if leftovers is not None and leftovers.numel() != bucket.buffer().numel():
            raise RunError(
                f"bucket {bucket.index()} has {bucket.buffer().numel()} gradients, PowerSGD's state is of "
                f"{leftovers.numel()}",
                hint="ddp.bucket_cap_mb must stay what it was with ddp.comm=powersgd, or resume with another ddp.comm",
            )
        reduced: Reduced = powerSGD_hook(self._inner, bucket)
        return reduced


class _Draws:
    """Gives the seeds of first thin matrices; keyed by the step, so there is nothing to save."""

    def __init__(self, seed: int) -> None:
        self._seed, self.step = seed, 0

    def randint(self, below: int) -> int:
        """Returns a number below a limit, the same on every rank."""
        return mix(self._seed, self.step, 0) % below


def _sent_numbers(parameter: Tensor, rank: int) -> int:
    rows = parameter.shape[0] if parameter.dim() else 1
    columns = parameter.numel() // max(rows, 1)
    thin = (rows + columns) * min(rows, columns, rank)
    return thin if thin * _MIN_RATE < parameter.numel() else parameter.numel()


def one_bucket_mb(parameters: Iterable[Tensor]) -> float:
    """Returns a size of bucket that holds all gradients.

    Between CPU ranks the hook's exchanges wait for each other on gloo's two threads: with one bucket there is always
    one free, and all ranks make them in the same order.
    """
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters) / 2**20 + 1.0
