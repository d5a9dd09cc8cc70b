"""One rank of the property test of divided saves: dividing_ranks.py RANK WORLD_SIZE FOLDER CARELESS.

Each example in FOLDER/examples.json says what each rank holds, save after save. Each rank saves as the trainer does and
writes down how it ended. Rank 0 compares what lies on disk with what all ranks held. FOLDER/RANK.json has the problems.
"""

from __future__ import annotations

import json
import shutil
import sys
import traceback
import zlib
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from slurm_train.checkpoint.commit import Place
from slurm_train.checkpoint.division import OTHERS, Agreement, Division, Variant, describe, divide, own_part
from slurm_train.checkpoint.load import load_tensors
from slurm_train.checkpoint.metadata import read_metadata
from slurm_train.checkpoint.save import rank_file, save_to
from slurm_train.checkpoint.tensors import tensor_shapes
from slurm_train.checkpoint.tree import leaves_of, split_state
from slurm_train.checkpoint.verify import verify
from slurm_train.errors import CheckpointError, RunError
from tests.support.small_checkpoints import make_header

VALUE = "value"
IS_CARELESS = sys.argv[4:] == ["1"]


def tensor_of(name: str, kind: str) -> torch.Tensor:
    """Returns the content that every rank has under a name, e.g. of kind "float32 3x2"."""
    dtype, _, shape = kind.partition(" ")
    sizes = [int(size) for size in shape.split("x")] if shape else []
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (100 * torch.rand(sizes, generator=generator)).to(getattr(torch, dtype))


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Returns {"a": {"b": 1}} for {"a.b": 1}."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        place = tree
        for key in path:
            place = place.setdefault(key, {})
        place[last] = value
    return tree


def state_of(held: dict[str, str], mesh: DeviceMesh) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns state and callbacks' values of a rank, as the trainer makes them."""
    flat: dict[str, Any] = {}
    for name, kind in held.items():
        if kind == VALUE:
            flat[name] = f"of {name}"
        elif kind.startswith("shard "):
            flat[name] = distribute_tensor(tensor_of(name, kind.removeprefix("shard ")), mesh, [Shard(0)])
        else:
            flat[name] = tensor_of(name, kind)
    state = nested(flat)
    tensors, values = split_state(state.pop(OTHERS, {}))
    return state | ({OTHERS: tensors} if tensors else {}), values


def problems_on_disk(path: Path, of_ranks: list[dict[str, str]], streams: list[Any]) -> list[str]:
    """Returns what is not in a checkpoint as the ranks held it, or there twice; one process looks."""
    manifest, described = verify(path), read_metadata(path)
    whole = {name: kind for held in of_ranks for name, kind in held.items()}
    tensors = {name: kind.removeprefix("shard ") for name, kind in whole.items() if kind != VALUE}
    stored = tensor_shapes(path, described=described)
    problems = [f"{name} is missing" for name in sorted(tensors.keys() - stored.keys())]
    problems += [f"{name} is held by nobody" for name in sorted(stored.keys() - tensors.keys())]
    parts = Counter((index.fqn, index.offset) for index in described.storage_data)
    problems += [f"{name} is there {count} times" for name, count in parts.items() if count != 1]
    load_tensors(path, stored, described=described)
    for name in tensors.keys() & stored.keys():
        expected = tensor_of(name, tensors[name])
        if stored[name].dtype != expected.dtype or not stored[name].equal(expected):
            problems.append(f"{name} has other values")
    weights = {name.removeprefix("model.") for name in tensors if name.startswith("model.")}
    if manifest.weights.keys() != weights:
        problems.append(f"the manifest lists {sorted(manifest.weights)}")
    states = [torch.load(path / rank_file(rank), weights_only=True) for rank in range(len(of_ranks))]
    if [state["data"] for state in states] != streams:
        problems.append("the state of a stream differs")
    kept = {".".join(leaf) for leaf, _ in leaves_of({OTHERS: states[0][OTHERS]})}
    values = {name for name, kind in whole.items() if kind == VALUE and name.startswith(OTHERS)}
    return problems + [f"the value {name} is missing" for name in sorted(values - kept)]


def careless(state: dict[str, Any], rank: int, num_ranks: int) -> Agreement:
    """Divides as if all ranks held what this one holds."""
    alike = tuple(range(num_ranks))
    return divide({part: [Variant(alike, leaves)] for part, leaves in describe(state).items()}, rank=rank)


def run_example(example: dict[str, Any], root: Path, groups: list[Any], meshes: list[DeviceMesh]) -> list[str]:
    """Makes the saves of an example; returns problems, which rank 0 alone looks for."""
    rank, stages = distributed.get_rank(), example["stages"]
    if rank >= len(stages):
        return []
    group, mesh = groups[len(stages) - 1], meshes[len(stages) - 1]
    division, problems = Division(group=group, stage=stages[rank]), []
    place = Place(root=root, attempt=1, keep=9, is_leader=rank == 0)
    for step, save in enumerate(example["saves"], start=1):
        state, values = state_of(save["held"][rank], mesh)
        rank_state = {"data": save["streams"][rank]} | ({OTHERS: values} if rank == 0 else {})
        error = ""
        try:
            agreed = careless(state, rank, len(stages)) if IS_CARELESS else division.agree(state, values=values)
            header = make_header(step, world_size=len(stages), weights=agreed.weights)
            path = save_to(
                place,
                tensors=own_part(state, agreed),
                rank_state=rank_state,
                header=header,
                group=group,
                expected=agreed.tensors,
            ).path
        except (RunError, CheckpointError) as err:
            error = err.message
        wrong = save["wrong"]
        if error and not any(name in error for name in wrong):
            problems.append(f"save {step} is refused for {error}; wrong are {wrong}")
        if not error and wrong:
            problems.append(f"save {step} was not refused, and wrong are {wrong}")
        if not error and rank == 0:
            problems += [f"save {step}: {text}" for text in problems_on_disk(path, save["held"], save["streams"])]
        distributed.barrier(group)
    return problems


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
    groups = [distributed.new_group(range(size), backend="gloo") for size in range(1, world_size + 1)]
    meshes = [DeviceMesh("cpu", list(range(size))) for size in range(1, world_size + 1)]
    problems = []
    for number, example in enumerate(json.loads((folder / "examples.json").read_text())):
        try:
            problems.append(run_example(example, folder / f"example_{number}", groups, meshes))
        except Exception:
            problems.append([traceback.format_exc()])
            break  # the other ranks may wait in an exchange
        distributed.barrier()
        if rank == 0:
            shutil.rmtree(folder / f"example_{number}", ignore_errors=True)
    (folder / f"{rank}.json").write_text(json.dumps(problems))
    sys.stdout.flush()
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
