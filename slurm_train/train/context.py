"""What one rank knows before anything is built, and a user's own function on every rank.

`Rank` is made by the worker; the built-in trainer and `task` start from the same one. `task._target_: my_package.main`
is called with a `TaskContext`: the process group is open, the device chosen, the threads set, the stop signals caught.
What the function returns is the exit code: None or 0 done, 75 "saved, run me again".
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from slurm_train.config.batch import BatchPlan
from slurm_train.config.parallel import ParallelLayout, solve_layout
from slurm_train.config.program import program_of
from slurm_train.config.schema import RunConfig
from slurm_train.config.target import instantiate
from slurm_train.data.source import SampleSource
from slurm_train.data.workers import cpus_of_rank
from slurm_train.distributed.group import (
    choose_device,
    exchange_once,
    init_group,
    newest_collectives,
    shutdown,
    stay_near,
    use_timeout,
)
from slurm_train.distributed.meeting import MeetingPoint
from slurm_train.distributed.pipeline import Pipeline
from slurm_train.distributed.place import RankPlace
from slurm_train.distributed.rendezvous import check_gloo_address, open_store
from slurm_train.distributed.seeds import seed_everything
from slurm_train.errors import EXIT_DONE, EXIT_REQUEUE, ConfigError
from slurm_train.rundir.heartbeat import limits_of
from slurm_train.rundir.paths import RunDirectory
from slurm_train.session.client import enter
from slurm_train.session.interface import Session
from slurm_train.session.rank_run import LONGEST_SUSPENSION_S, RankRun
from slurm_train.session.signals import StopFlag
from slurm_train.train.continuity import EvaluationBasis
from slurm_train.train.inputs import ModelInputs

_DETERMINISTIC = {
    # cuBLAS reads it when its first handle is made; without it, deterministic mode raises on a GPU.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # NCCL chooses by topology and size, and what it chooses decides the order of additions.
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
}
_AUTOCAST = {
    "float32": None,
    "tf32": None,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.bfloat16,
}
"""Types by name; ranks with different devices use the first that one of them needs."""
_NOTE_OF_TF32 = (
    "note: train.precision=float32 multiplies exactly; train.precision=tf32 is several times as fast on these GPUs, "
    "with 10 bits of each mantissa"
)
# MI300, MI350 and RDNA 4, as torch's own scaled products ask for.
_FLOAT8_OF_AMD = ("gfx94", "gfx95", "gfx12")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank(RankRun):
    """What a rank of a training knows besides: the batch arithmetic, where its peers are, and its device."""

    plan: BatchPlan
    """Batch arithmetic for this world size."""
    point: MeetingPoint
    """Where the ranks of this attempt meet."""
    is_watched: bool = False
    """Whether a supervisor watches the heartbeats, and ends the ranks where they hang."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """This rank's device; `enter_device` chooses it."""
    precision: str = "float32"
    """What `train.precision=auto` means on the devices of all ranks; `join` agrees on it."""

    @property
    def layout(self) -> ParallelLayout:
        """Which rank holds what."""
        return solve_layout(self.config.parallel, world_size=self.place.world_size)

    @property
    def compiles(self) -> bool:
        """Whether model and loss are compiled."""
        return self.config.train.compiles(on_gpu=self.device.type != "cpu")

    @property
    def autocast(self) -> torch.dtype | None:
        """Type of the forward pass's matrix products, None for the parameters' own; with auto known after `join`."""
        if self.config.train.param_dtype == "bfloat16":
            return torch.bfloat16
        return _AUTOCAST[self.precision if self.config.train.precision == "auto" else self.config.train.precision]

    @property
    def random_stream(self) -> int:
        """Number of this rank's random numbers among those of a step.

        Ranks that hold the same layers and read the same samples share one.
        """
        return self.layout.random_stream(self.place.rank, splits_positions=self.config.parallel.sequence_parallel)

    def collective_timeout_s(self, timeout_s: float) -> float:
        """Returns the time-out of collectives: a week where a supervisor's watchdog watches the ranks.

        The watchdog names the rank that hangs; a short time-out would blame whoever waits for it. And the watchdog
        knows of suspended jobs; gloo and NCCL take the time in which they were stopped for a peer that is silent.

        Args:
            timeout_s: without a watchdog.
        """
        has_watchdog = self.is_watched and program_of(self.config).reports and limits_of(self.config) is not None
        return max(timeout_s, LONGEST_SUSPENSION_S) if has_watchdog else timeout_s

    def enter_device(self) -> Rank:
        """Sets deterministic kernels and torch's threads, and makes a device the current one; returns the rank with it.

        The threads are those asked for, else the CPUs that no other rank of the node uses.
        """
        train = self.config.train
        if train.deterministic:
            for name, value in _DETERMINISTIC.items():
                os.environ.setdefault(name, value)
            torch.use_deterministic_algorithms(True)
            # Nothing here reads memory that was not written; to fill it takes time.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # not in its types
            torch.backends.cudnn.benchmark = False
        share = cpus_of_rank(self.env, ranks_on_node=self.place.local_world_size)
        torch.set_num_threads(max(1, share) if train.threads is None else train.threads)
        device = choose_device(self.place, self.env)
        if train.precision == "fp8":
            require_float8(device)
        if train.precision == "tf32":
            torch.set_float32_matmul_precision("high")
        elif train.precision == "float32" and device.type == "cuda" and self.place.rank == 0 and _has_tf32(device):
            print(_NOTE_OF_TF32, file=sys.stderr, flush=True)
        stay_near(device, self.env)
        return replace(self, device=device)

    def join(self) -> Rank:
        """Opens the process group; returns the rank with the agreed precision. Collective over all ranks.

        Raises:
            RendezvousError: the ranks do not find each other, or cannot exchange anything; the message names the node
                that saw it.
        """
        # With GPUs gloo is opened as well, for what the ranks agree on.
        check_gloo_address(self.place, self.env)
        store, _ = open_store(self.place, self.point)
        timeout_s = self.collective_timeout_s(self.config.train.start_timeout_s)
        self.heartbeat.mark("group")
        init_group(
            self.place,
            store,
            device=self.device,
            timeout_s=timeout_s,
            say_after_s=self.config.preflight.collective_timeout_s,
        )
        self.heartbeat.mark("start")
        self.heartbeat.record = newest_collectives
        precision = self.precision
        if self.config.train.precision == "auto" and self.device.type == "cuda":
            precision = min(gather(native_precision(self.device)), key=list(_AUTOCAST).index)
        if "SLURM_STEP_ID" in self.env and self.config.preflight.enabled and self.place.world_size > 1:
            exchange_once(self.place, device=self.device, timeout_s=self.config.preflight.collective_timeout_s)
        return replace(self, precision=precision)


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What a rank has made by itself: a whole model, and the data."""

    model: nn.Module
    optimizer: Optimizer
    train_data: SampleSource
    heldout: SampleSource | None
    flops_per_token: tuple[float, float]
    """Of forward and backward pass of the whole model, as `metrics.flops_per_token` counts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts(Built):
    """What one rank of a group computes with: its part of the model, in the run's layout."""

    rank: Rank
    inputs: ModelInputs
    """How batches get to the model."""
    pipeline: Pipeline | None = None
    """This rank's stages; None where every rank computes all layers."""
    group_names: list[list[str]] | None = None
    """Names in the optimizer's groups over all stages of a pipeline; None where every rank has them all."""
    measured: EvaluationBasis | None = None
    """What evaluations measure; None where there are none."""


def native_precision(device: torch.device) -> str:
    """Returns the fastest type of matrix products that a GPU computes by itself: "bfloat16", "float16" or "float32".

    torch emulates bfloat16 on GPUs before Ampere, which is slower than float32. Volta and Turing have float16.
    """
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bfloat16"
    return "float16" if torch.cuda.get_device_capability(device) >= (7, 0) else "float32"


def _has_tf32(device: torch.device) -> bool:
    """Returns whether a GPU multiplies float32 much faster with a part of the mantissa: NVIDIA's since Ampere."""
    return not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 0)


def require_float8(device: torch.device) -> None:
    """Checks that a device multiplies in float8.

    Raises:
        ConfigError: it does not.
    """
    device_name = "a CPU"
    if device.type == "cuda" and torch.version.hip:
        # ROCm's capabilities are other numbers: (9, 0) is MI250X, which has no float8.
        architecture = str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
        if architecture.startswith(_FLOAT8_OF_AMD):
            return
        device_name = f"{torch.cuda.get_device_name(device)} ({architecture})"
    elif device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= (8, 9):
            return
        device_name = f"{torch.cuda.get_device_name(device)} of compute capability {capability[0]}.{capability[1]}"
    raise ConfigError(
        f"train.precision=fp8 was asked, and this rank has {device_name}",
        hint="float8 needs compute capability 8.9 (Ada, Hopper and later) or AMD's MI300 and later; "
        "train.precision=auto suits every GPU",
    )


def gather(value: Any) -> list[Any]:
    """Returns what every rank gives, in rank order. Collective over all ranks; on the host."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskContext:
    """What a task function gets in addition to its own keywords."""

    config: RunConfig
    """The frozen configuration."""
    run: RunDirectory
    """Where this run keeps its files."""
    place: RankPlace
    """Rank, local rank, node rank, world size."""
    device: torch.device
    """This rank's device; already the current one."""
    stop: StopFlag
    """`stop.requested` turns 1 when this rank is asked to stop; agree on it with the others, save, return 75."""
    attempt: int
    """Counts the starts of this run, from 0."""
    session: Session
    """Its part in the run: `report`, `should_stop`, `save`, `newest`, `leave`; `session.join` gives it as well."""


def run_task(rank: Rank) -> int:
    """Calls the configured function on this rank and returns its exit code. All ranks call it.

    Raises:
        ConfigError: `task._target_` cannot be called, or it returned something else than an exit code.
        SystemExit: it returned the code of a failure.
    """
    config = rank.config
    task = config.task or {}
    rank = rank.enter_device().join()
    # Where the supervisor watches for hangs, it acts first, and names them.
    is_guarded = rank.is_watched and config.health.hang_timeout_s is not None
    use_timeout(LONGEST_SUSPENSION_S if is_guarded else config.train.steady_timeout_s)
    seed_everything(config.seed, data_parallel_rank=rank.place.rank)
    session = enter(rank)
    context = TaskContext(
        config=config,
        run=rank.run,
        place=rank.place,
        device=rank.device,
        stop=rank.stop,
        attempt=rank.attempt,
        session=session,
    )
    try:
        code = instantiate(task, context=context)
    finally:
        session.close()
    if code is not None and type(code) is not int:
        raise ConfigError(
            f"task._target_={task.get('_target_')} returned {code!r}, which is no exit code",
            hint="return None or 0 when done, 75 to be run again",
        )
    if code not in (None, EXIT_DONE, EXIT_REQUEUE):
        # The others may not have come to their end.
        raise SystemExit(code)
    shutdown()
    return EXIT_DONE if code is None else code
