"""Which rank writes what: everything that ranks hold is written once, or the save is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_train.checkpoint.division import (
    Agreement,
    Division,
    Leaf,
    Variant,
    describe,
    divide,
    require_savable,
    weights_in,
)
from slurm_train.checkpoint.tree import merge_state
from slurm_train.errors import RunError
from tests.fakes.thread_peers import ThreadPeers, on_threads
from tests.support.divided_states import VALUE as OF_VALUE
from tests.support.divided_states import examples, problems_of, wrong_names
from tests.support.warm_ranks import run_alone

BIG, SMALL, VALUE = Leaf("float32[400]", 1600), Leaf("int64[]", 8), Leaf("a value")


def parts_of(*of_ranks: dict[str, Leaf], part: str = "model") -> dict[str, list[Variant]]:
    """Returns what ranks hold of a part, each something else."""
    return {part: [Variant((rank,), leaves) for rank, leaves in enumerate(of_ranks)]}


def written_by(variants: dict[str, list[Variant]], *, num_ranks: int) -> dict[str, list[int]]:
    """Returns the ranks that write each name."""
    names = {name for of_part in variants.values() for variant in of_part for name in variant.leaves}
    left_out = [divide(variants, rank=rank).left_out for rank in range(num_ranks)]
    holders = {
        name: [r for of_part in variants.values() for v in of_part if name in v.leaves for r in v.ranks]
        for name in names
    }
    return {name: [rank for rank in holders[name] if name not in left_out[rank]] for name in names}


def test_what_one_rank_holds_alone_does_not_move_what_the_others_write() -> None:
    """The sizes that rank 0 sees would give it another share: some weights would be written by nobody."""
    weights = {f"model.{letter}": BIG for letter in "abcdefg"}
    lone = {"callbacks.0 own.Mine.table": Leaf("float32[900]", 3600)}
    variants = {"model": [Variant((0, 1), weights)], **parts_of(lone, {}, part="callbacks")}
    require_savable(variants, stages=[0, 0])
    writers = written_by(variants, num_ranks=2)
    assert writers.keys() == weights.keys() | lone.keys() and all(len(ranks) == 1 for ranks in writers.values())
    assert writers["callbacks.0 own.Mine.table"] == [0]
    assert {ranks[0] for name, ranks in writers.items() if name in weights} == {0, 1}


@pytest.mark.parametrize(
    ("of_ranks", "words"),
    [
        (
            [{"queue": torch.zeros(2)}, {"queue": torch.zeros(3)}],
            r"model\.queue is float32\[2\] on rank 0 and float32\[3\] on",
        ),
        ([{"queue": torch.zeros(2)}, {}], r"model\.queue \(float32\[2\]\) is on rank 0 and not on rank 1"),
    ],
    ids=["another shape", "none"],
)
def test_buffers_that_the_first_step_has_made_otherwise_on_a_rank_are_refused(
    of_ranks: list[dict[str, torch.Tensor]], words: str
) -> None:
    def check(states: list[dict[str, torch.Tensor]], stages: tuple[int, int]) -> list[Exception | None]:
        def on_rank(peers: ThreadPeers) -> None:
            rank = peers.rank()
            Division(group=peers, stage=stages[rank]).check({"model": states[rank]})  # type: ignore[arg-type]

        return on_threads(2, on_rank)

    for refused in check(of_ranks, (0, 0)):
        assert isinstance(refused, RunError)
        with pytest.raises(RunError, match=words):
            raise refused
    assert check([of_ranks[0]] * 2, (0, 0)) == [None, None]
    # Stages of a pipeline have layers of their own.
    assert check([{"queue": torch.zeros(2)}, {}], (0, 1)) == [None, None]


# In a process of its own: a pretended world must not meet another test's group.
SHARDS_WITH_COPIES = """
import json, os, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from slurm_train.checkpoint.division import own_tensors, part_if_alike
from slurm_train.checkpoint.state import local_part, training_state
from slurm_train.checkpoint.tree import full_name, leaves_of
from slurm_train.models.gpt import GPT

def tensors_of(state):
    return {full_name(path): value for path, value in leaves_of(state) if isinstance(value, torch.Tensor)}

def bytes_of(tensors):
    return sum(local_part(tensor).nbytes for tensor in tensors)

# torch keeps the first mesh of its kind for the life of a process.
rank = next((rank for rank in range(3) if os.fork() == 0), 3)
dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "shard"))
model = GPT(vocab_size=64, context=16, num_layers=2, num_heads=2, width=32, tied=False)
for part in (*model.blocks, model):
    fully_shard(part, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
training_state(model, optimizer)
state = training_state(model, optimizer)
part = tensors_of(part_if_alike(state, rank=rank, num_ranks=4))
assert bytes_of(own_tensors(model, optimizer, rank=rank, num_ranks=4)) == bytes_of(part.values())
is_cut = {name: hasattr(tensor, "placements") for name, tensor in tensors_of(state).items()}
with open(sys.argv[1] + f"/{rank}.json", "w") as file:
    json.dump([is_cut, list(part), bytes_of(tensors_of(state).values()), bytes_of(part.values())], file)
if rank == 3:
    for _ in range(3):
        os.wait()
"""


def test_a_shard_with_copies_is_copied_to_the_host_and_written_by_one_of_their_ranks(tmp_path: Path) -> None:
    run_alone(tmp_path, SHARDS_WITH_COPIES, str(tmp_path))
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    for name, is_cut in ranks[0][0].items():
        # Ranks 0 and 2 have the same shards, and 1 and 3.
        for holders in ((0, 2), (1, 3)) if is_cut else (range(4),):
            assert sum(name in ranks[rank][1] for rank in holders) == 1, name
    for _, _, held, staged in ranks:
        assert staged == pytest.approx(held / 2, rel=0.1)


@pytest.mark.parametrize("leaf", [BIG, SMALL])
def test_what_the_last_rank_holds_alone_it_writes(leaf: Leaf) -> None:
    variants = parts_of({}, {}, {"callbacks.0 own.Mine.x": leaf}, part="callbacks")
    require_savable(variants, stages=[0, 0, 0])
    assert written_by(variants, num_ranks=3) == {"callbacks.0 own.Mine.x": [2]}


@pytest.mark.parametrize(
    ("part", "of_ranks", "said"),
    [
        ("model", [{"x": SMALL}, {}], r"x \(int64\[\]\) is on rank 0 and not on rank 1"),
        ("optimizer", [{}, {"x": BIG}, {"x": BIG}], r"x .* is on ranks 1-2 and not on rank 0"),
        ("optimizer", [{"x": VALUE}, {}], r"x \(a value\) is on rank 0 and not on rank 1"),
        ("callbacks", [{}, {"x": VALUE}], r"x \(a value\) is on rank 1 and not on rank 0"),
        ("callbacks", [{"x": BIG}, {"x": SMALL}], r"x is float32\[400\] on rank 0 and int64\[\] on rank 1"),
        ("callbacks", [{"x": BIG}, {"x": VALUE}], r"x is float32\[400\] on rank 0 and a value on rank 1"),
        ("callbacks", [{"x": BIG}, {"x": Leaf(BIG.kind, shards="cut (Shard(dim=0),)")}], r"x is .* cut"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_name_with_the_ranks(part, of_ranks, said) -> None:
    with pytest.raises(RunError, match=said) as caught:
        require_savable(parts_of(*of_ranks, part=part), stages=[0] * len(of_ranks))
    assert "docs/callbacks.md" in caught.value.hint


def test_stages_hold_layers_of_their_own_and_share_the_writing_of_them() -> None:
    first, second = {"model.a": BIG, "model.b": BIG}, {"model.c": BIG, "model.d": BIG}
    variants = {"model": [Variant((0, 1), first), Variant((2, 3), second)]}
    require_savable(variants, stages=[0, 0, 1, 1])
    assert written_by(variants, num_ranks=4) == {"model.a": [0], "model.b": [1], "model.c": [2], "model.d": [3]}
    assert divide(variants, rank=3).weights == dict.fromkeys("abcd", "float32[400]")


def test_values_that_rank_0_lacks_make_room_for_another_ranks_tensors() -> None:
    tensors = {"tables": {"x": torch.ones(2)}}
    assert merge_state({}, tensors).keys() == {"tables"}


def test_one_process_writes_everything_and_knows_its_weights() -> None:
    state = {"model": {"head": torch.zeros(3, 2), "count": torch.tensor(1)}, "optimizer": {"rate": 0.1}}
    agreed = Division(group=None).agree(state, values={"0 own.Mine": {"best": 1.0}})
    assert agreed == Agreement(frozenset(), {"model.head": "float32[3,2]", "model.count": "int64[]"})
    assert agreed.weights == weights_in(state) == {"head": "float32[3,2]", "count": "int64[]"}
    assert describe(state)["optimizer"] == {"optimizer.rate": VALUE}


_SETTINGS = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}


@pytest.mark.distributed
@settings(max_examples=4, **_SETTINGS)
@given(st.lists(examples(), min_size=1, max_size=12))
def test_what_is_saved_covers_what_the_ranks_hold_once_or_is_refused_by_name(tried) -> None:
    """The campaign `unshared-state` tries a thousand."""
    for example, problems in zip(tried, problems_of(tried), strict=True):
        assert problems == [], example


@pytest.mark.distributed
def test_a_refused_state_is_compared_again_and_no_rank_goes_by_what_it_held_before() -> None:
    """A rank that holds the same twice, where the first save was refused for another rank's sake."""
    alone, value = {"model.head": "int64"}, {"callbacks.0 own.Mine.x": OF_VALUE}
    both = {**alone, "model.queue": "float32 400"}
    held = [[alone, alone], [both, alone], [both, alone], [both, both], [both, both | value], [both | value] * 2]
    saves = [
        {"held": of_ranks, "streams": [{"place": 0}] * 2, "wrong": wrong_names(of_ranks, [0, 0])} for of_ranks in held
    ]
    assert [bool(save["wrong"]) for save in saves] == [False, True, True, False, True, False]
    assert problems_of([{"stages": [0, 0], "saves": saves}]) == [[]]


@pytest.mark.distributed
def test_a_rank_that_divides_by_what_it_holds_itself_is_found() -> None:
    weights = {f"model.w{number}": "float32 400" for number in range(5)}
    held = [{**weights, "callbacks.0 own.Mine.x": "float32 401"}, weights]
    save = {"held": held, "streams": [{}, {}], "wrong": []}
    (problems,) = problems_of([{"stages": [0, 0], "saves": [save]}], is_careless=True)
    assert problems and all("tensors are not in the files" in text for text in problems), problems
