"""Asynchronous saves: one at a time, in order, from copies in re-used memory that do not follow the training."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from slurm_train.checkpoint.division import own_tensors, part_if_alike
from slurm_train.checkpoint.filling import Saved
from slurm_train.checkpoint.save import BackgroundSaver, save_checkpoint
from slurm_train.checkpoint.state import StagingBuffers, can_pin, training_state
from slurm_train.checkpoint.verify import verify
from slurm_train.errors import CheckpointError, RunError
from slurm_train.rundir.paths import list_checkpoints
from tests.support.small_checkpoints import make_header

PACK_BYTES = 4 << 20
DONE = Saved(Path("checkpoint_0000001"), manifest=None)


@pytest.fixture
def saver() -> BackgroundSaver:
    return BackgroundSaver()


@pytest.fixture
def buffers() -> StagingBuffers:
    return StagingBuffers(torch.device("cpu"))


def raising(error: BaseException):
    def work():
        raise error

    return work


def test_the_caller_goes_on_while_a_save_runs_and_gets_its_outcome_once(saver):
    may_end = threading.Event()
    seen: list[str] = []
    saver.prepare(lambda: seen.append(threading.current_thread().name))
    saver.start(lambda: DONE if may_end.wait(10) and not seen.append("save") else None, step=1)
    assert saver.poll() is None
    with pytest.raises(AssertionError, match="a save is under way"):
        saver.start(lambda: DONE, step=2)
    assert not saver.is_done_within(0.01)
    may_end.set()
    assert saver.is_done_within(10)
    outcome = saver.poll()
    assert (outcome.step, outcome.result, outcome.is_fatal) == (1, DONE, False)
    assert saver.poll() is None and saver.wait() is None
    assert seen == ["checkpoint_0", "save"], "in the order they were handed over, in one thread"


@pytest.mark.parametrize(
    ("error", "is_fatal"),
    [(CheckpointError("full"), False), (RunError("overtaken"), True), (RuntimeError("connection closed"), True)],
)
def test_only_what_the_ranks_agreed_on_is_survivable(saver, error, is_fatal):
    saver.prepare(raising(MemoryError()))  # costs nothing but time
    saver.start(raising(error), step=4)
    outcome = saver.wait()
    assert (outcome.result, outcome.is_fatal) == (error, is_fatal)
    saver.start(lambda: DONE, step=5)
    assert saver.wait().result == DONE


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_does_not_grow_over_thirty_saves(saver, buffers, root):
    state = {f"layer{number}": torch.randn(64, 1024) for number in range(16)}
    resident = []
    for step in range(1, 31):
        staged = buffers.stage(state)
        header = make_header(step)

        def work(staged=staged, header=header) -> Saved:
            return save_checkpoint(root, tensors=staged, rank_state={}, header=header, group=None, keep=2)

        saver.start(work, step=step)
        outcome = saver.wait()
        assert isinstance(outcome.result, Saved), outcome
        resident.append(resident_bytes())
    assert buffers.num_bytes == PACK_BYTES
    # One state is 4 MiB; a copy kept per save would be 80 MiB over the last twenty.
    assert resident[-1] - resident[9] < 8 << 20
    assert [verify(path).step for path in list_checkpoints(root)] == [30, 29]


def state_of(value: float) -> dict:
    weights = {"a": torch.full((3, 4), value), "b": torch.full((3, 4), -value), "half": torch.ones(5).bfloat16()}
    groups = [{"lr": value, "params": ["a", "b"], "tensors": (torch.tensor(value),)}]
    return {"model": weights, "optimizer": {"param_groups": groups, "none": None, "empty": torch.empty(0)}}


def test_a_copy_equals_its_source_and_does_not_follow_it(buffers):
    state = state_of(1.5)
    staged = buffers.stage(state)
    state["model"]["a"].add_(1)
    state["optimizer"]["param_groups"][0]["lr"] = 7.0
    state["optimizer"]["param_groups"][0]["params"].append("c")
    expected = state_of(1.5)
    for name, tensor in expected["model"].items():
        assert staged["model"][name].equal(tensor) and staged["model"][name].dtype == tensor.dtype
    (group,) = staged["optimizer"]["param_groups"]
    assert (group["lr"], group["params"], group["tensors"][0].item()) == (1.5, ["a", "b"], 1.5)
    assert staged["optimizer"]["none"] is None and staged["optimizer"]["empty"].shape == (0,)


class Copies(TorchDispatchMode):
    """Counts what copies tensors, each tensor in a list by itself, as CUDA does between a GPU and the host."""

    def __init__(self):
        super().__init__()
        self.to_host = 0
        self.joined = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._foreach_copy_.default:
            self.to_host += sum(target.device != source.device for target, source in zip(*args[:2], strict=True))
        if func is torch.ops.aten.copy_.default:
            self.to_host += args[0].device != args[1].device
        if func is torch.ops.aten.cat.default:
            self.joined.append(sum(tensor.nbytes for tensor in args[0]))
        return func(*args, **kwargs or {})


def test_small_tensors_leave_a_gpu_in_one_copy():
    """A copy takes the host 3 to 5 us to start: 562 of the 784 of GPT-2 and its optimizer are of a few KB."""
    buffers = StagingBuffers(torch.device("cuda"))
    with FakeTensorMode():
        sizes = {f"{number}.{name}": size for number in range(70) for name, size in SIZES.items()}
        on_gpu = {name: torch.empty(size, device="cuda") for name, size in sizes.items()}
        state = {"model": on_gpu, "steps": {name: torch.empty((), device="cuda") for name in on_gpu}}
        with Copies() as copies:
            staged = buffers.stage(state)
        assert copies.to_host == 70 + 1, "each large one, and the small ones together"
        assert copies.joined == [70 * 4 * (768 + 3072) + 4 * len(on_gpu)]
        assert [tensor.device.type for tensor in staged["model"].values()] == ["cpu"] * len(on_gpu)
        assert [tensor.shape for tensor in staged["model"].values()] == [tensor.shape for tensor in on_gpu.values()]


SIZES = {"matrix": (768, 768), "bias": (768,), "up.bias": (3072,)}


def test_joined_tensors_have_the_bits_of_their_own_and_take_bounded_memory(buffers):
    """Whatever their types and layouts, and however often the state is another one."""
    bits = torch.randint(256, (3 << 20,), dtype=torch.uint8)
    dtypes = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.complex64, torch.bool)
    sizes = []
    for number in range(1, 6):
        of_type = {str(dtype): (bits[: 8 * 99 * number] % 2).view(dtype)[: 90 * number].view(9, -1) for dtype in dtypes}
        state = {
            "of_type": of_type,
            "turned": [value.t() for value in of_type.values()],
            "scalar": torch.tensor(float(number)),
            "none": torch.empty(0, 5),
            "many": tuple(bits[300_000 * begin :][: 700_000 + number] for begin in range(7)),
            "large": bits,
        }
        for _ in range(2):
            staged = buffers.stage(state)
            assert staged["none"].shape == (0, 5)
            tree_map(require_equal_bits, staged, state)
        sizes.append(buffers.num_bytes)
    # Five of 0.7 MB go together: seven take two, and each other type has one.
    assert set(sizes) == {bits.nbytes + (2 + len(dtypes)) * PACK_BYTES}


def require_equal_bits(copied, value):
    assert (copied.shape, copied.dtype, copied.is_contiguous()) == (value.shape, value.dtype, True)
    assert copied.reshape(-1).view(torch.uint8).equal(value.reshape(-1).view(torch.uint8))
    assert copied.data_ptr() != value.data_ptr() or not value.nbytes


def test_prepared_memory_is_what_the_first_copy_takes(buffers):
    model = torch.nn.Linear(40, 30)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    for rank in range(2):
        buffers = StagingBuffers(torch.device("cpu"))
        buffers.prepare(own_tensors(model, optimizer, rank=rank, num_ranks=2))
        size = buffers.num_bytes
        buffers.stage(part_if_alike(training_state(model, optimizer), rank=rank, num_ranks=2))
        assert buffers.num_bytes == size > 0


def test_the_parts_of_the_ranks_make_the_whole_and_what_all_need_is_the_first_ones():
    """Who loads opens the file of each rank that has something it needs."""
    large = {name: torch.ones(size) for name, size in (("a", 900), ("b", 800), ("c", 700), ("d", 600))}
    state = {"model": {**large, "small": torch.ones(2)}, "optimizer": {"groups": [{"lr": 0.1}], "none": None}}
    parts = [part_if_alike(state, rank=rank, num_ranks=2) for rank in range(2)]
    assert [set(part["model"]) for part in parts] == [{"a", "d", "small"}, {"b", "c"}]
    assert parts[0]["optimizer"] == state["optimizer"] and parts[1]["optimizer"] == {}
    assert part_if_alike(state, rank=0, num_ranks=1) == state


def pin_with(monkeypatch, register):
    """Pretends that tensors are on a GPU and that this function pins their buffers; returns which no longer are."""
    unpinned = []
    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unpinned.append)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(StagingBuffers, "_pins", lambda *_: True)
    return unpinned


def test_memory_that_cannot_be_pinned_is_said_once_and_used_as_it_is(buffers, monkeypatch, capsys):
    asked, cleared, zeros = [], [], torch.zeros
    pin_with(monkeypatch, lambda *_: asked.append(1) or 2)

    def noted(*size, device=None, **options):
        cleared.extend([] if device is None else [size])
        return zeros(*size, **options)

    weights = {"weight": zeros(3, 100_000), "moment": torch.ones(5, 90_000)}
    monkeypatch.setattr(torch, "zeros", noted)
    staged = buffers.stage(weights)
    assert staged["moment"].eq(1).all() and staged["weight"].shape == (3, 100_000)
    said = capsys.readouterr().err
    assert said.count("could not be pinned") == 1 and len(asked) == 1, "it is not asked for again"
    assert cleared == [(1,)], "a kernel takes the error that CUDA has kept"


def test_large_buffers_pin_no_more_than_they_need(buffers, monkeypatch):
    """Torch rounds what it pins up to a power of two: an 8B model's moments would take up to twice their size."""
    pinned = []
    pin_with(monkeypatch, lambda _, size, flags: pinned.append((size, flags)) or 0)
    buffers.stage({"weight": torch.zeros(3, 100_000), "moment": torch.zeros(5, 90_000)})
    assert pinned == [(4 * 300_000, 1), (4 * 450_000, 1)]


def test_memory_is_unpinned_before_it_is_freed(monkeypatch):
    """CUDA would go on copying from and to the old pages of the address: a second training loaded wrong values."""
    pinned = []
    unpinned = pin_with(monkeypatch, lambda address, *_: pinned.append(address) or 0)
    buffers = StagingBuffers(torch.device("cpu"))
    staged = buffers.stage({"weight": torch.zeros(3, 100_000), "moment": torch.ones(5, 90_000)})
    assert unpinned == []
    del buffers
    assert unpinned == pinned and len(pinned) == 2
    assert staged["moment"].eq(1).all(), "who holds a copy still has it"


@pytest.mark.gpu
def test_a_copy_from_a_gpu_is_of_the_moment_although_training_goes_on():
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    device = torch.device("cuda", torch.cuda.current_device())
    buffers = StagingBuffers(device)
    weights = torch.zeros(64 << 20, device=device)
    steps = torch.zeros(3)
    for number in range(1, 6):
        weights.fill_(number)
        steps.fill_(number)
        staged = buffers.stage({"weights": weights, "steps": steps})
        buffers.hold_changes()
        weights.fill_(-1)
        steps.fill_(-1)
        buffers.wait_for_copy()
        assert staged["weights"].is_pinned() == can_pin() and not staged["weights"].is_cuda
        assert staged["weights"].eq(number).all() and staged["steps"].eq(number).all()
    assert buffers.num_bytes == weights.nbytes + PACK_BYTES
