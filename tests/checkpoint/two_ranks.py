"""One rank of the distributed checkpoint tests: two_ranks.py RANK WORLD_SIZE FOLDER SCENE...

Each scene asserts on both ranks; what it finds wrong is written to FOLDER/SCENE_RANK.txt.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from slurm_train.checkpoint import copies
from slurm_train.checkpoint import tensors as tensors_module
from slurm_train.checkpoint import verify as verify_module
from slurm_train.checkpoint.choice import choose_checkpoint
from slurm_train.checkpoint.commit import Place
from slurm_train.checkpoint.division import Division, own_part, part_if_alike
from slurm_train.checkpoint.load import load_tensors
from slurm_train.checkpoint.local import LocalSaves, NodePlace, copy_to_run, newest_reachable
from slurm_train.checkpoint.manifest import check_hash
from slurm_train.checkpoint.metadata import read_metadata
from slurm_train.checkpoint.save import save_checkpoint, save_to
from slurm_train.checkpoint.state import StagingBuffers
from slurm_train.checkpoint.tensors import tensor_shapes
from slurm_train.checkpoint.verify import verify
from slurm_train.errors import CheckpointError, RunError, SlurmTrainError
from slurm_train.rundir.lineage import Origin, record_origin
from slurm_train.rundir.paths import RunDirectory, list_checkpoints, name_of
from tests.support.small_checkpoints import checkpoint_of, make_header, steps_in


def save(root: Path, step: int, state: dict[str, Any], **changes: Any) -> Any:
    rank_state = {"rank": distributed.get_rank()}
    arguments: dict[str, Any] = {"rank_state": rank_state, "group": distributed.group.WORLD, "keep": 3} | changes
    return save_checkpoint(root, tensors=state, header=make_header(step, world_size=2), **arguments)


def error_of(work: Any, kind: type[SlurmTrainError] = CheckpointError) -> str:
    """Returns message and hint of the error that the work raises."""
    try:
        work()
    except SlurmTrainError as err:
        assert type(err) is kind, err
        return str(err)
    raise AssertionError("no error was raised")


@contextlib.contextmanager
def files_of_rank_1_are_below(num_bytes: int) -> Iterator[None]:
    """Refuses longer files on rank 1, as a disk does that has become full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if distributed.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@contextlib.contextmanager
def rank_1_sees_no_folder() -> Iterator[None]:
    """Hides folders from rank 1, as a node does that has another file system mounted."""
    with pytest.MonkeyPatch.context() as patch:
        if distributed.get_rank() == 1:
            patch.setattr(verify_module, "VISIBLE_TIMEOUT_S", 0.0)
            patch.setattr(Path, "exists", lambda _: False)
        yield


def failure_scene(root: Path) -> None:
    """Rank 1 cannot write (file size limit: torch's files, its own), sees no directory, or has an unsafe state."""
    rank = distributed.get_rank()
    state = {"weights": torch.arange(4096.0), "more": torch.ones(4096)}
    files = verify(save(root, 1, state).path).files
    shares = [files[f"__{number}_0.distcp"].bytes for number in range(2)]
    assert all(4 * 4096 < share < 1.2 * 4 * 4096 for share in shares), "replicated tensors are written once"
    for limit, rank_state in ((4096, {}), (30_000, {"big": torch.ones(10_000)})):
        with files_of_rank_1_are_below(limit):
            error = error_of(lambda state_of_rank=rank_state: save(root, 2, state, rank_state=state_of_rank))
        assert "rank 1" in error and "[Errno 27] File too large" in error and "Traceback" not in error, error
    with rank_1_sees_no_folder():
        error = error_of(lambda: save(root, 2, state))
    assert "rank 1 on " in error and "is not visible on this node" in error, error
    assert "every node mounts at the same path" in error, error
    error = error_of(lambda: save(root, 2, state, rank_state={"path": root} if rank == 1 else {}))
    assert "rank state could not be loaded again" in error and "tensors, numbers, strings" in error, error

    def fence() -> None:
        raise RunError("attempt 2 has taken over", hint="exit")

    error = error_of(lambda: save(root, 2, state, fence=fence), RunError)
    assert error.endswith("attempt 2 has taken over\nhint: exit"), error
    distributed.barrier()
    assert list(root.iterdir()) == list_checkpoints(root) and steps_in(root) == [1], "nothing else is left"
    verify(checkpoint_of(root, 1))


def _refuse(path: Path, _record: Any) -> None:
    raise CheckpointError(f"{path.name}: as a node with bad memory sees it", hint="")


def _note_reads(patch: pytest.MonkeyPatch) -> list[str]:
    """Returns the list of the files that this rank reads from now on."""
    check_hash, read = verify_module.check_hash, list[str]()

    def note(path: Path, record: Any) -> None:
        read.append(path.name)
        check_hash(path, record)

    patch.setattr(verify_module, "check_hash", note)
    return read


def choose_scene(root: Path) -> None:
    """The newest is damaged, its manifest or a file; then all are."""
    group = distributed.group.WORLD
    assert choose_checkpoint(root, group=group, attempt=1) is None
    for step in (1, 2):
        save(root, step, {"weights": torch.full((64,), float(step))})
    with pytest.MonkeyPatch.context() as patch:
        if distributed.get_rank() == 1:
            patch.setattr(verify_module, "check_hash", _refuse)
        error = error_of(lambda: choose_checkpoint(root, group=group, attempt=1), RunError)
    assert "rank 1 on" in error and "rank 0 finds these files whole" in error, error
    save(root, 3, {"weights": torch.full((64,), 3.0)})
    if distributed.get_rank() == 0:
        (checkpoint_of(root, 3) / "manifest.json").write_text("{")
    distributed.barrier()
    choice = choose_checkpoint(root, group=group, attempt=1)
    assert choice is not None and choice.manifest.step == 2
    assert [name_of(item.path).step for item in choice.passed_over] == [3]
    distributed.barrier()
    if distributed.get_rank() == 0:
        shutil.rmtree(checkpoint_of(root, 3))
    for step in (2, 1):
        distributed.barrier()
        if distributed.get_rank() == 0:
            file = checkpoint_of(root, step) / "__0_0.distcp"
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
        if step == 2:
            with pytest.MonkeyPatch.context() as patch:
                read = _note_reads(patch)
                choice = choose_checkpoint(root, group=group, attempt=1)
            assert choice is not None and choice.manifest.step == 1
            shares: list[list[str]] = [[], []]
            distributed.all_gather_object(shares, read)
            times = Counter(shares[0] + shares[1])
            # Those whose turn comes after the damaged one are not read any more.
            assert all(1 <= times[name] <= 3 for name in choice.manifest.files)
            assert times["__0_0.distcp"] == 3, "what is damaged is read again"
            assert all(len(read) < 2 * len(choice.manifest.files) for read in shares), "all ranks share the reading"
            assert [name_of(item.path).step for item in choice.passed_over] == [2]
    error = error_of(lambda: choose_checkpoint(root, group=group, attempt=1))
    assert "none of the 2 checkpoints" in error and "start from the beginning" in error, error


def shard_scene(root: Path) -> None:
    """Saves a copy of each rank's own part; loads it along another dimension, by torch alone, and what does not fit."""
    group, mesh = distributed.group.WORLD, init_device_mesh("cpu", (2,))
    whole = torch.arange(24.0).reshape(6, 4)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    state = {"model": {"sharded": sharded, "one": torch.ones(500), "two": torch.ones(700)}, "step": 5}
    part = part_if_alike(state, rank=distributed.get_rank(), num_ranks=2)
    assert sorted(part["model"]) == [["sharded", "two"], ["one", "sharded"]][distributed.get_rank()]
    staged = StagingBuffers(torch.device("cpu")).stage(part)
    for tensor in (sharded.to_local(), state["model"]["one"], state["model"]["two"]):
        tensor.zero_()
    path = save(root, 1, staged, group=distributed.new_group(backend="gloo")).path
    loaded = {"sharded": distribute_tensor(torch.zeros(6, 4), mesh, [Shard(1)]), "one": torch.zeros(500)}
    load_tensors(path, {"model": loaded}, group=group)
    assert loaded["sharded"].full_tensor().equal(whole) and loaded["one"].equal(torch.ones(500))
    read: dict[str, Any] = {"model": {"sharded": torch.zeros(6, 4), "one": torch.zeros(500)}, "step": 0}
    load(read, storage_reader=FileSystemReader(path), no_dist=True)
    assert read["model"]["sharded"].equal(whole) and read["model"]["one"].equal(torch.ones(500)) and read["step"] == 5
    wrong = error_of(lambda: load_tensors(path, {"model": {"one": torch.zeros(6)}}, group=group))
    missing = error_of(lambda: load_tensors(path, {"x": torch.zeros(1)}, group=group))
    assert "ize mismatch" in wrong and "x" in missing, (wrong, missing)


def _cannot_open(path: Path) -> Any:
    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))


def copies_scene(root: Path) -> None:
    """Two nodes keep each other's files; one of them is lost, and the checkpoint is whole on the other."""
    rank, world = distributed.get_rank(), distributed.group.WORLD
    root.mkdir(parents=True, exist_ok=True)
    place = NodePlace(root=root / f"node{rank}", node=rank, attempt=1, keeps_copies=True)
    # More than one piece of a transfer.
    state = {"weights": torch.arange(6 << 20, dtype=torch.float32), "more": torch.ones(64)}
    facts: dict[str, Any] = {"tensors": state, "rank_state": {"rank": rank}, "group": world}
    saved = save_to(place, header=make_header(1, world_size=2), **facts)
    assert saved.manifest is not None and saved.manifest.files.keys() >= {"rank_00000.pt", "rank_00001.pt"}
    for name, record in saved.manifest.files.items():
        check_hash(saved.path / name, record)
    # One rank has no room for its own files and those of the other.
    room = max(record.bytes for record in saved.manifest.files.values()) // 2
    facts |= {"tensors": {"more": torch.ones(64)}, "rank_state": {"big": torch.ones(6 << 20)} if rank == 0 else {}}
    with files_of_rank_1_are_below(room):
        error = error_of(lambda: save_to(place, header=make_header(2, world_size=2), **facts))
    assert "rank 1" in error and "[Errno 27] File too large" in error, error
    # One rank cannot open what it has written: the other one does not wait for it.
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(copies, "open_plain", _cannot_open)
        error = error_of(lambda: save_to(place, header=make_header(3, world_size=2), **facts))
    assert "rank 0" in error and "Input/output error" in error, error
    distributed.barrier()
    assert [path.name for path in place.root.iterdir()] == [saved.path.name], "the one before is untouched"
    distributed.barrier()
    # What is damaged on one node comes from the other.
    if rank == 0:
        for name in saved.manifest.files:
            (saved.path / name).write_bytes((saved.path / name).read_bytes()[:-1] + b"?")
    found = newest_reachable(place, lambda _: True, group=world)
    assert found is not None and set(found.holders.values()) == {(0, 1), (1, 0)}
    other = Place(root=root / "other", attempt=1, is_leader=rank == 0)
    assert verify(copy_to_run(place, other, found, group=world).path) == saved.manifest
    distributed.barrier()
    if rank == 0:
        shutil.rmtree(place.root)
    found = newest_reachable(place, lambda _: True, group=world)
    assert found is not None and set(found.holders.values()) == {(1,)}
    run = Place(root=root / "run", attempt=1, is_leader=rank == 0)
    copied = copy_to_run(place, run, found, group=world)
    assert verify(copied.path) == saved.manifest


def near_scene(root: Path) -> None:
    """A newer checkpoint is on the nodes: it is copied, and each rank loads what its own node has from there."""
    root.mkdir(parents=True, exist_ok=True)
    rank, world, mesh = distributed.get_rank(), distributed.group.WORLD, init_device_mesh("cpu", (2,))
    whole = torch.arange(2400.0).reshape(60, 40)
    state = {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "count": torch.tensor(5.0), "rate": 0.5}
    node = NodePlace(root=root / f"node{rank}", node=rank, attempt=1)
    run = RunDirectory(root / "run")
    target = Place(root=run.checkpoints, attempt=1, is_leader=rank == 0)
    part = part_if_alike(state, rank=rank, num_ranks=2)
    facts: dict[str, Any] = {"tensors": part, "rank_state": {}, "group": world}
    saved = save_to(node, header=make_header(3, world_size=2), **facts)
    if rank == 0:
        run.path.mkdir()
        record_origin(run, 1, Origin())
    with ThreadPoolExecutor(1) as thread:
        local = LocalSaves(run=run, place=node, target=target, copy_every=1, peers=world, group=world, thread=thread)
        with pytest.MonkeyPatch.context() as patch:
            read = _note_reads(patch)
            choice, notes = local.choose(
                lambda copied: choose_checkpoint(target.root, group=world, attempt=1, copied=copied),
                reason_against=lambda _: "",
            )
    assert choice is not None and choice.manifest == saved.manifest and "on the nodes only" in notes[0]
    assert choice.path.parent == run.checkpoints and choice.near == saved.path and read == []
    opened = _note_opened(run.checkpoints)

    def load() -> list[str]:
        loaded = {
            "sharded": distribute_tensor(torch.zeros(60, 40), mesh, [Shard(0)]),
            "count": torch.zeros(()),
            "rate": 0,
        }
        opened.clear()
        load_tensors(choice.path, loaded, group=world, near=choice.near)
        assert loaded["sharded"].full_tensor().equal(whole) and (loaded["count"], loaded["rate"]) == (5.0, 0.5)
        return [name for name in opened if name.endswith(".distcp")]

    assert load() == [[], ["__0_0.distcp"]][rank], "what all need, the first rank has written"
    if rank == 1:
        own = saved.path / "__1_0.distcp"
        own.write_bytes(own.read_bytes()[:-1] + b"?")
    assert sorted(load()) == [[], ["__0_0.distcp", "__1_0.distcp"]][rank], "what is damaged there is not used"


def _note_opened(folder: Path) -> list[str]:
    """Returns the list of the files in a folder or below it that this process opens from now on."""
    opened: list[str] = []

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and str(args[0]).startswith(str(folder)):
            opened.append(Path(args[0]).name)

    sys.addaudithook(note)
    return opened


def plans_scene(root: Path) -> None:
    """What torch plans is used again until a rank holds something else; each save has what the ranks had then."""
    rank, world, mesh = distributed.get_rank(), distributed.group.WORLD, init_device_mesh("cpu", (2,))
    steps, planned = count(1), list[int]()
    plan = tensors_module.create_default_global_save_plan

    def note(all_plans: Any) -> Any:
        planned.append(len(all_plans))
        return plan(all_plans)

    def state_of(step: int, extra: dict[str, Any]) -> dict[str, Any]:
        whole = torch.arange(24.0).reshape(6, 4) + step
        model = {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "one": torch.full((5,), float(step))}
        return {"model": model, "step": step, "history": list(range(step)), **extra}

    def check(extra: dict[str, Any], *, is_anew: bool, wanted: dict[str, Any] | None = None, **changes: Any) -> Path:
        step = next(steps)
        path: Path = save(root, step, state_of(step, extra), **changes).path
        assert planned == [2] * (is_anew and rank == 0), (step, planned)
        planned.clear()
        verify(path)
        wanted = state_of(step, extra if wanted is None else wanted)
        own = {"model": {"sharded": distribute_tensor(torch.zeros(6, 4), mesh, [Shard(1)]), "one": torch.zeros(5)}}
        values = {
            key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None for key, value in wanted.items()
        }
        loaded = {**values, **own}
        load_tensors(path, loaded, group=world)
        sharded = loaded["model"].pop("sharded").full_tensor()
        assert sharded.equal(wanted["model"].pop("sharded").full_tensor())
        assert str(loaded) == str(wanted) and set(tensor_shapes(path)) == {
            "model.sharded",
            "model.one",
            *tensors_of(wanted),
        }
        return path

    def tensors_of(state: dict[str, Any]) -> set[str]:
        return {key for key, value in state.items() if isinstance(value, torch.Tensor)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors_module, "create_default_global_save_plan", note)
        first = check({}, is_anew=True)
        again = check({}, is_anew=False)
        assert read_metadata(first).state_dict_metadata == read_metadata(again).state_dict_metadata
        # The optimizer has a state now; then its numbers are of another type, in tensors of the same shape.
        grown = {"moment": torch.ones(3)}
        check(grown, is_anew=True)
        check(grown, is_anew=False)
        changed = {"moment": torch.ones(3, dtype=torch.float64)}
        assert tensor_shapes(check(changed, is_anew=True))["moment"].dtype == torch.float64
        # One rank alone has something new.
        lone = {"lone": torch.ones(4), "text": "x"}
        check(lone if rank == 1 else {}, is_anew=True, wanted=lone)
        check(lone if rank == 1 else {}, is_anew=False, wanted=lone)
        # Saves that fail where files are written, or where the folder is not seen: on one rank each.
        with files_of_rank_1_are_below(16):
            error_of(lambda: save(root, 90, state_of(90, {})))
        planned.clear()
        check({}, is_anew=False)
        with rank_1_sees_no_folder():
            error_of(lambda: save(root, 91, state_of(91, {})))
        planned.clear()
        check({}, is_anew=False)
        # Each rank by itself, in the same process; then together with another group.
        save(root / f"rank_{rank}", 1, {"model": {"one": torch.ones(5)}}, group=None)
        planned.clear()
        check({}, is_anew=True)
        check({}, is_anew=False, group=distributed.new_group(backend="gloo"))


def exchanges_scene(root: Path) -> None:
    """Counts what the ranks say to each other: four times for a save, twice more where they hold something else."""
    rank, world = distributed.get_rank(), distributed.group.WORLD
    root.mkdir(parents=True, exist_ok=True)
    run = Place(root=root / "run", attempt=1, is_leader=rank == 0)
    node = NodePlace(root=root / f"node{rank}", node=rank, attempt=1)
    division, steps, called = Division(group=world), count(1), list[str]()

    def save_once(place: Place, *, size: int = 9) -> list[str]:
        called.clear()
        state = {"model": {"one": torch.ones(size), "two": torch.ones(5000)}, "optimizer": {"lr": 0.1}}
        agreed = division.agree(state, values={})
        save_to(
            place,
            tensors=own_part(state, agreed),
            rank_state={},
            header=make_header(next(steps), world_size=2),
            group=world,
            expected=agreed.tensors,
        )
        return called.copy()

    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "all_reduce",
            "all_gather_object",
            "broadcast_object_list",
            "gather_object",
            "scatter_object_list",
        ):
            patch.setattr(distributed, name, _noting(getattr(distributed, name), name, called))
        save_once(run)
        agreement, begin, records, outcome = save_once(run)
        assert agreement == "all_reduce" and {begin, records, outcome} == {"all_gather_object"}
        assert save_once(run, size=10).count("gather_object") == 1, "what is held has changed: it is planned anew"
        assert len(save_once(run, size=10)) == 4
        assert len(save_once(node, size=10)) == 5, "each node's leader lists the description"


def _noting(work: Any, name: str, called: list[str]) -> Any:
    def noted(*args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return work(*args, **kwargs)

    return noted


SCENES = {
    "plans": plans_scene,
    "exchanges": exchanges_scene,
    "failure": failure_scene,
    "choose": choose_scene,
    "shard": shard_scene,
    "copies": copies_scene,
    "near": near_scene,
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
        problem = ""
        try:
            SCENES[name](folder / name)
        except Exception:
            problem = traceback.format_exc()
        (folder / f"{name}_{rank}.txt").write_text(problem)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
