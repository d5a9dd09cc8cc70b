"""One rank of the distributed checkpoint tests: two_ranks.py RANK WORLD_SIZE FOLDER SCENE...

Writes FOLDER/SCENE_RANK.json for each scene.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from slurm_train.checkpoint import directory
from slurm_train.checkpoint.export import weights_digest
from slurm_train.checkpoint.load import choose_checkpoint, load_rank_state, load_tensors
from slurm_train.checkpoint.manifest import CheckpointHeader
from slurm_train.checkpoint.save import save_checkpoint
from slurm_train.checkpoint.state import StagingBuffers, own_part, restore_training_state, training_state
from slurm_train.errors import RunError, SlurmTrainError
from slurm_train.rundir.layout import name_of, parse_name
from tests.support.small_checkpoints import checkpoint_of


def make_header(step: int) -> CheckpointHeader:
    return CheckpointHeader(
        step=step,
        samples=8 * step,
        epoch=0,
        world_size=distributed.get_world_size(),
        mesh={"dp_replicate": distributed.get_world_size()},
        batch_plan={},
        config_hash="c",
        data_fingerprint="d",
        torch_version=torch.__version__,
        attempt=1,
    )


def build(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 * step + distributed.get_rank())
        optimizer.param_groups[0]["lr"] = 1e-3 / (step + 1)
        optimizer.zero_grad()
        model(torch.randn(16, 8, generator=generator)).square().mean().backward()
        optimizer.step()


def save(root: Path, step: int, state: dict[str, Any], **changes: Any) -> Any:
    rank_state = {"rank": distributed.get_rank(), "rng": torch.get_rng_state()}
    arguments: dict[str, Any] = {"rank_state": rank_state, "group": distributed.group.WORLD, "keep": 3} | changes
    return save_checkpoint(root, tensors=state, header=make_header(step), **arguments)


def error_of(work: Any) -> dict[str, str]:
    try:
        work()
    except SlurmTrainError as err:
        return {"kind": type(err).__name__, "message": err.message, "hint": err.hint}
    return {"kind": "none"}


def sees_nothing(path: Path) -> bool:
    return False


def resume_scene(root: Path) -> dict[str, Any]:
    """Trains 6 steps; then the same from the checkpoint of step 3, into a model of another seed."""
    group = distributed.group.WORLD
    model, optimizer = build(0)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    train(wrapped, optimizer, first=0, last=3)
    saved = save(root, 3, training_state(wrapped, optimizer))
    again = save(root, 3, training_state(wrapped, optimizer))
    train(wrapped, optimizer, first=3, last=6)
    other, other_optimizer = build(1)
    choice = choose_checkpoint(root, group=group, attempt=1)
    assert choice is not None
    state = training_state(other, other_optimizer)
    load_tensors(choice.path, state, group=group)
    restore_training_state(other, other_optimizer, state)
    train(torch.nn.parallel.DistributedDataParallel(other), other_optimizer, first=3, last=6)
    rank_state = load_rank_state(choice.path, distributed.get_rank())
    return {
        "digest": weights_digest(model.named_parameters()),
        "resumed_digest": weights_digest(other.named_parameters()),
        "names": sorted(state["model"]),
        "path": name_of(saved.path).step,
        "bytes": [saved.num_bytes > 0, again.num_bytes],
        "rank": rank_state and rank_state["rank"],
        "missing": load_rank_state(choice.path, 7),
        "world_size": choice.manifest.world_size,
    }


def failure_scene(root: Path) -> dict[str, Any]:
    """Rank 1 cannot write (file size limit: torch's files, its own), has an unsafe state; rank 0 is fenced out."""
    rank = distributed.get_rank()
    state = {"weights": torch.arange(4096.0), "more": torch.ones(4096)}
    save(root, 1, state)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    results = {}
    for name, limit, rank_state in (("tensors", 4096, {}), ("rank", 30_000, {"big": torch.ones(10_000)})):
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        results[name] = error_of(lambda state_of_rank=rank_state: save(root, 2, state, rank_state=state_of_rank))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if rank == 1:
        directory.VISIBLE_TIMEOUT_S = 0.0
        exists, Path.exists = Path.exists, sees_nothing
    results["invisible"] = error_of(lambda: save(root, 2, state))
    if rank == 1:
        Path.exists = exists
    results["unsafe"] = error_of(lambda: save(root, 2, state, rank_state={"path": root} if rank == 1 else {}))

    def fence() -> None:
        raise RunError("attempt 2 has taken over", hint="exit")

    results["fence"] = error_of(lambda: save(root, 2, state, fence=fence))
    distributed.barrier()
    return {"errors": results, "left": [parse_name(path.name) and name_of(path).step for path in root.iterdir()]}


def choose_scene(root: Path) -> dict[str, Any]:
    """The newest is damaged for rank 0; then all are."""
    group = distributed.group.WORLD
    for step in (1, 2):
        save(root, step, {"weights": torch.full((64,), float(step))})
    distributed.barrier()
    results: dict[str, Any] = {"empty": choose_checkpoint(root / "absent", group=group, attempt=1)}
    for step in (2, 1):
        if distributed.get_rank() == 0:
            file = checkpoint_of(root, step) / "__0_0.distcp"
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
        if step == 2:
            choice = choose_checkpoint(root, group=group, attempt=1)
            assert choice is not None
            results["chosen"] = [choice.manifest.step, [name_of(item.path).step for item in choice.passed_over]]
        else:
            results["none"] = error_of(lambda: choose_checkpoint(root, group=group, attempt=1))
    return results


def shard_scene(root: Path) -> dict[str, Any]:
    """Saves a tensor that is sharded over the ranks; loads a wrong shape."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    whole = torch.arange(24.0).reshape(6, 4)
    save(root, 1, {"weights": distribute_tensor(whole, mesh, [Shard(0)]), "step": 5})
    path = checkpoint_of(root, 1)
    loaded = {"weights": distribute_tensor(torch.zeros(6, 4), mesh, [Shard(1)])}
    load_tensors(path, loaded, group=distributed.group.WORLD)
    wrong: dict[str, Any] = {"weights": torch.zeros(5)}
    return {
        "equal": bool((loaded["weights"].full_tensor() == whole).all()),
        "wrong": error_of(lambda: load_tensors(path, wrong, group=distributed.group.WORLD)),
        "missing": error_of(lambda: load_tensors(path, {"x": torch.zeros(1)}, group=distributed.group.WORLD)),
    }


def staged_scene(root: Path) -> dict[str, Any]:
    """Saves a copy of each rank's own part, shards and values among it, on a group of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    whole = torch.arange(24.0).reshape(6, 4)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    state = {"model": {"sharded": sharded, "one": torch.ones(5), "two": torch.ones(7)}, "step": 5}
    part = own_part(state, rank=distributed.get_rank(), num_ranks=distributed.get_world_size())
    staged = StagingBuffers(torch.device("cpu")).stage(part)
    for tensor in (sharded.to_local(), state["model"]["one"], state["model"]["two"]):
        tensor.zero_()
    save(root, 1, staged, group=distributed.new_group(backend="gloo"))
    loaded = {name: torch.zeros(shape) for name, shape in (("sharded", (6, 4)), ("one", 5), ("two", 7))}
    load_tensors(checkpoint_of(root, 1), {"model": loaded, "step": 0}, group=distributed.group.WORLD)
    expected = {"sharded": whole, "one": torch.ones(5), "two": torch.ones(7)}
    return {"own": sorted(part["model"]), "equal": all(loaded[name].equal(expected[name]) for name in expected)}


SCENES = {
    "staged": staged_scene,
    "resume": resume_scene,
    "failure": failure_scene,
    "choose": choose_scene,
    "shard": shard_scene,
}


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    for name in sys.argv[4:]:
        result = SCENES[name](folder / name)
        (folder / f"{name}_{rank}.json").write_text(json.dumps(result))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
