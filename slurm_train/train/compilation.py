"""Compilation by torch: whether a node can, what of a training is compiled, and a cache of it in the run directory.

With the cache an attempt on other nodes does not compile again. torch has its own cache in /tmp of each node. Here the
part of it that the first step has used is one file for each GPU of a node and stage of a pipeline, since torch's
entries name the device; all nodes use those of the first node that has the stage. What was made by another torch, for
another card or another graph is not found by its hash, and compiled. Nothing of the cache may end a run: without a
file, the step compiles.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch

from slurm_train.distributed.parallelize import is_deep
from slurm_train.errors import PreflightError
from slurm_train.models.head import Head
from slurm_train.models.objective import Objective
from slurm_train.models.scores import default_loss
from slurm_train.rundir.files import make_folder, write_atomic
from slurm_train.rundir.node_disk import compile_obstacles
from slurm_train.train.context import Parts, Rank


def require_compiler(rank: Rank) -> None:
    """Checks that this rank's node can compile what the run compiles; the preflight has looked at the nodes of Slurm.

    Where compiling was typed the reason is only said: kernels may have been compiled elsewhere.

    Raises:
        PreflightError: it cannot, and a default has chosen to compile.
    """
    train = rank.config.train
    place = rank.place
    obstacles = compile_obstacles(rank.env, on_gpu=rank.device.type != "cpu") if rank.compiles else []
    if not obstacles:
        return
    problem = f"torch cannot compile kernels on {place.host}: {', '.join(obstacles)}"
    if train.compile == "auto":
        raise PreflightError(
            problem, hint="install what is missing (gcc, python3-dev), or train without compiling: train.compile=false"
        )
    if place.local_rank == 0:
        print(f"warning: {problem}", file=sys.stderr, flush=True)


def compile_in_place(parts: Parts, objective: Objective) -> None:
    """Compiles model and loss where the run does that; names of parameters stay.

    A shallow replica is one graph. The blocks of any other model have been compiled one by one.

    Args:
        parts: has the model.
        objective: the loss around it.
    """
    if not parts.rank.compiles:
        return
    mark_compilations(parts.rank)
    set_compile_mode(parts.rank.config.train.compile_mode)
    rank = parts.rank
    if rank.layout.is_replicated and not is_deep(parts.model, num_replicas=rank.place.world_size):
        objective.compile()
        # Evaluation calls the model by itself.
        parts.model.compile()
        return
    # DDP gets the gradients of a block as soon as its backward pass is over. torch would cut blocks that are larger
    # than a bucket, as GPT-2's are (28 MB), and compile more graphs for that.
    torch._dynamo.config.optimize_ddp = False
    objective.scores.default_loss = torch.compile(default_loss)
    for module in parts.model.modules():
        if isinstance(module, Head):
            module.compile()


def set_compile_mode(mode: str) -> None:
    """Lets all graphs of this process be compiled in a mode of torch.compile, whatever compiles them.

    Args:
        mode: e.g. "max-autotune-no-cudagraphs". Those with CUDA graphs would need static inputs and gradients.
    """
    import torch._inductor.config

    for name, value in torch._inductor.list_mode_options(mode).items():
        setattr(torch._inductor.config, name, value)


def mark_compilations(rank: Rank) -> None:
    """Has each graph that torch begins or ends to compile count as progress, which the hang watchdog looks for.

    A model of many blocks is many graphs, and all of them may take longer than one step may.
    """

    def mark(*_: object) -> None:
        rank.heartbeat.mark(rank.heartbeat.phase)

    # Private in torch 2.7 to 2.13; without it the first step has to be done within its time-out.
    handler: Any = getattr(torch._dynamo, "callback_handler", None)
    with contextlib.suppress(AttributeError):
        handler.register_start_callback(mark)
        handler.register_end_callback(mark)


class CompileCache:
    """What one rank reads before its first step and may write after it.

    Args:
        rank: this rank; nothing is read or written if it does not compile.
    """

    def __init__(self, rank: Rank) -> None:
        place = rank.place
        layout = rank.layout
        stage = layout.coordinates(place.rank).pp
        self._run = rank.run
        self._path = rank.run.compiled(stage, place.local_rank)
        self._is_used = rank.compiles
        # Stages follow each other over the ranks, and the ranks are numbered node by node.
        self._writes = place.rank % (layout.world_size // layout.pp) < place.local_world_size
        self._kept: set[str] = set()

    def load(self) -> None:
        """Gives torch what an earlier attempt has kept."""
        with contextlib.suppress(Exception):  # torch raises anything for a file that is not its own
            if self._is_used and self._path.is_file():
                self._kept = _entries(torch.compiler.load_cache_artifacts(self._path.read_bytes()))

    def keep(self) -> None:
        """Writes what this process has used, if something of it was not kept yet."""
        with contextlib.suppress(Exception):  # a full disk, a torch without it
            artifacts = torch.compiler.save_cache_artifacts() if self._is_used and self._writes else None
            if artifacts is not None:
                data, facts = artifacts
                if not _entries(facts) <= self._kept:
                    make_folder(self._path.parent, within=self._run.path)
                    write_atomic(self._path, data, durable=False)


def _entries(facts: Any) -> set[str]:
    """Returns the keys of torch's entries of all kinds; none for None."""
    return set() if facts is None else {key for keys in facts.artifacts.values() for key in keys}
