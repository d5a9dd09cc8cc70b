"""Work whose outcome all ranks share: either everyone goes on, or everyone raises the same error.

A rank that raises alone leaves the others waiting in their next collective, so the work is run, its outcome exchanged,
and only then raised. Each function is one collective; without a group (one process) there is none. The group is that of
torch, or, where a program has none, `Peers` of another kind. torch is imported only where its group is used.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from slurm_train.errors import CheckpointError, SlurmTrainError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Result = TypeVar("Result")
Value = TypeVar("Value")


class Peers:
    """The ranks of a program that exchange values without a process group of torch; base class."""

    def rank(self) -> int:
        """Returns this process's rank."""
        raise NotImplementedError

    def size(self) -> int:
        """Returns the number of ranks."""
        raise NotImplementedError

    def gather_values(self, value: Any) -> list[Any]:
        """Returns what every rank has passed, in rank order. Collective."""
        raise NotImplementedError

    def broadcast_value(self, value: Any, *, source: int) -> Any:
        """Returns what one rank has passed. Collective."""
        return self.gather_values(value if self.rank() == source else None)[source]


Group: TypeAlias = "ProcessGroup | Peers"


class Failure(NamedTuple):
    """What went wrong on one rank, in a form that travels: class, text with rank and host, hint."""

    kind: type[SlurmTrainError]
    text: str
    hint: str


def rank_in(group: Group | None) -> int:
    """Returns this process's rank in the group, 0 without one."""
    return 0 if group is None else group.rank()


def size_of(group: Group | None) -> int:
    """Returns the number of processes in the group, 1 without one."""
    return 1 if group is None else group.size()


def on_rank_zero(group: Group | None, work: Callable[[], Result]) -> Result:
    """Runs the work on rank 0 and gives its result on every rank. Collective.

    Raises:
        SlurmTrainError: the work raised; of the same class if it was one, else CheckpointError.
    """
    return on_rank(0, group, work)


def on_rank(rank: int, group: Group | None, work: Callable[[], Result]) -> Result:
    """Does what `on_rank_zero` does, on another rank of the group. Collective."""
    outcome, cause = _attempt(rank, work) if rank_in(group) == rank else (None, None)
    if isinstance(group, Peers):
        outcome = group.broadcast_value(outcome, source=rank)
    elif group is not None:
        import torch
        import torch.distributed as dist

        box = [outcome]
        source = dist.get_global_rank(group, rank)
        dist.broadcast_object_list(box, src=source, group=group, device=torch.device("cpu"))
        outcome = box[0]
    _raise_failures([outcome], cause)
    return outcome  # type: ignore[return-value]  # not a Failure: those have just been raised


def on_every_rank(group: Group | None, work: Callable[[], Result]) -> list[Result]:
    """Runs the work on every rank and gives all results, in rank order, on every rank. Collective.

    Raises:
        SlurmTrainError: the work raised somewhere; the text names each rank where it did.
    """
    outcome, cause = _attempt(rank_in(group), work)
    outcomes: list[Any] = [outcome]
    if isinstance(group, Peers):
        outcomes = group.gather_values(outcome)
    elif group is not None:
        import torch.distributed as dist

        outcomes = [None] * group.size()
        dist.all_gather_object(outcomes, outcome, group=group)
    _raise_failures(outcomes, cause)
    return outcomes


def shared_out(group: ProcessGroup | None, value: Value, share_out: Callable[[list[Value]], list[Result]]) -> Result:
    """Gathers a value of every rank on rank 0, which makes each rank's share of them; gives this rank's. Collective.

    What all shares together need is only ever on rank 0.

    Raises:
        SlurmTrainError: rank 0 could not share it out.
    """
    share: Result
    if group is None:
        (share,), cause = _shares_of([value], share_out)
    else:
        import torch.distributed as dist

        first = dist.get_global_rank(group, 0)
        values: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
        dist.gather_object(value, values, dst=first, group=group)
        shares, cause = (None, None) if values is None else _shares_of(values, share_out)
        box: list[Any] = [None]
        dist.scatter_object_list(box, shares, src=first, group=group)
        (share,) = box
    _raise_failures([share], cause)
    return share


def _shares_of(
    values: list[Value], share_out: Callable[[list[Value]], list[Any]]
) -> tuple[list[Any], BaseException | None]:
    shares, cause = _attempt(0, lambda: share_out(values))
    return [shares] * len(values) if isinstance(shares, Failure) else shares, cause


def as_agreed(err: BaseException) -> SlurmTrainError:
    """Returns the error that all ranks raise for an exception of one: itself if it is ours, else a CheckpointError."""
    if isinstance(err, SlurmTrainError):
        return err
    is_full = isinstance(err, OSError) and err.errno in {errno.ENOSPC, errno.EDQUOT}
    hint = "free space, raise the quota, or lower checkpoint.keep" if is_full else ""
    return CheckpointError(f"{type(err).__name__}: {err}", hint=hint)


def _attempt(rank: int, work: Callable[[], Result]) -> tuple[Result | Failure, BaseException | None]:
    try:
        return work(), None
    except Exception as err:  # every kind: whatever it is, the other ranks need it
        agreed = as_agreed(err)
        return Failure(type(agreed), f"rank {rank} on {socket.gethostname()}: {agreed.message}", agreed.hint), err


def _raise_failures(outcomes: list[Any], cause: BaseException | None) -> None:
    """Raises one error for all failures; this rank's own exception, if any, is its cause."""
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    if failures:
        hint = next((failure.hint for failure in failures if failure.hint), "")
        raise failures[0].kind("; ".join(failure.text for failure in failures), hint=hint) from cause
