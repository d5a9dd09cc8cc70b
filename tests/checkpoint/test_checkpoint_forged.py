"""Checkpoints that somebody made to run code as their reader, with hashes that fit: nothing in them may act."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, MetadataIndex

from slurm_train.checkpoint.load import load_rank_state, read_model
from slurm_train.checkpoint.manifest import COMPLETE_FILE, MANIFEST_FILE, Manifest, digest_of, read_record
from slurm_train.checkpoint.metadata import METADATA_FILE, check_metadata, read_metadata
from slurm_train.checkpoint.save import rank_file, save_checkpoint
from slurm_train.checkpoint.tensors import TensorPlan, describe_tensors, read_tensors, tensor_shapes, write_tensors
from slurm_train.checkpoint.verify import verify
from slurm_train.errors import CheckpointError
from tests.support.small_checkpoints import make_header

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Trap:
    """Touches a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.canary,)


def forge(path: Path, **facts: Any) -> None:
    """Writes manifest and marker that fit whatever lies in the directory."""
    files = {
        entry.name: read_record(entry) for entry in path.iterdir() if entry.name not in (MANIFEST_FILE, COMPLETE_FILE)
    }
    text = Manifest.of(make_header(4, **facts), files).to_json().encode()
    (path / MANIFEST_FILE).write_bytes(text)
    (path / COMPLETE_FILE).write_bytes(digest_of(text))


def write(path: Path, tensors: dict[str, Any]) -> None:
    plan = TensorPlan(tensors, group=None)
    plan.settle([""])
    _, lengths = write_tensors(path, plan)
    describe_tensors(path, plan, [lengths])


@pytest.fixture
def honest(tmp_path: Path) -> Path:
    """A directory as a save leaves it, without what each rank keeps for itself."""
    path = tmp_path / "checkpoint_0000004"
    path.mkdir(mode=0o700)
    values = {"lr": 0.1, "betas": (0.9, 0.95), "names": ["a"], "none": None, "kind": torch.bfloat16}
    tensors = {"a": torch.arange(3), "b": torch.ones(2, 2, dtype=torch.bfloat16), "values": values}
    write(path, tensors)
    return path


def test_what_we_write_is_read_back_without_pickle(honest: Path) -> None:
    wanted = {"a": torch.zeros(3, dtype=torch.int64), "values": {"lr": 0, "betas": None, "names": [], "none": 1}}
    read_tensors(honest, wanted, group=None)
    assert wanted["a"].tolist() == [0, 1, 2]
    assert wanted["values"] == {"lr": 0.1, "betas": (0.9, 0.95), "names": ["a"], "none": None}
    assert set(tensor_shapes(honest)) == {"a", "b"}


def test_metadata_that_is_code_is_refused_although_every_hash_fits(honest: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (honest / METADATA_FILE).write_bytes(pickle.dumps(Trap(canary)))
    forge(honest)
    for read in (verify, tensor_shapes, lambda path: read_tensors(path, {"a": torch.zeros(3)}, group=None)):
        with pytest.raises(CheckpointError, match="which no checkpoint needs"):
            read(honest)
    assert not canary.exists()
    with pytest.raises(CheckpointException):  # it stumbles, after it has run it
        load({"a": torch.zeros(3)}, storage_reader=FileSystemReader(honest), no_dist=True)
    assert canary.exists(), "torch's own reader should have fallen into the trap; else this test proves nothing"


def test_a_plain_value_that_is_code_is_not_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    path = tmp_path / "checkpoint_0000004"
    save({"lr": Trap(canary)}, storage_writer=FileSystemWriter(path), no_dist=True)
    forge(path)
    verify(path)
    with pytest.raises(CheckpointError):
        read_tensors(path, {"lr": 0.0}, group=None)
    assert not canary.exists()
    load({"lr": 0.0}, storage_reader=FileSystemReader(path), no_dist=True)
    assert canary.exists(), "torch's own planner should have fallen into the trap"


def test_a_value_that_could_not_be_read_back_is_refused_at_the_save(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="lr could not be loaded again"):
        write(tmp_path, {"a": torch.zeros(1), "lr": Path("x")})


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "torch.hub.load"])
def test_no_callable_is_found_by_name(name: str, tmp_path: Path) -> None:
    module, _, attribute = name.rpartition(".")
    # STACK_GLOBAL and GLOBAL, with and without a dotted attribute, which newer protocols walk.
    texts = [
        f"c{module}\n{attribute}\n.".encode(),
        b"\x80\x04" + _text(module) + _text(attribute) + b"\x93.",
        b"\x80\x04" + _text("torch") + _text("Size.__reduce__") + b"\x93.",
        b"\x80\x04" + _text("torch") + _text(f"serialization.{attribute}") + b"\x93.",
    ]
    for data in texts:
        (tmp_path / METADATA_FILE).write_bytes(data)
        with pytest.raises(CheckpointError, match="which no checkpoint needs"):
            read_metadata(tmp_path)


def _text(word: str) -> bytes:
    return b"\x8c" + bytes([len(word)]) + word.encode()


@pytest.mark.parametrize("target", ["../../secret", "/etc/passwd", "..", "a/b", "x\ny"])
def test_metadata_that_leads_out_of_the_directory_is_refused(honest: Path, target: str) -> None:
    metadata = read_metadata(honest)
    metadata.storage_data[MetadataIndex("a")] = _StorageInfo(target, 0, 1)
    (honest / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    for read in (read_metadata, lambda path: check_metadata(path, Manifest.of(make_header(4), {}))):
        with pytest.raises(CheckpointError, match="not a plain file name"):
            read(honest)


@pytest.mark.parametrize(("offset", "length"), [(0, 10**9), (10**9, 1), (-1, 1), (8, -16)])
def test_verify_refuses_parts_that_the_files_do_not_have(honest: Path, offset: int, length: int) -> None:
    metadata = read_metadata(honest)
    name = next(iter(metadata.storage_data.values())).relative_path
    metadata.storage_data[MetadataIndex("a")] = _StorageInfo(name, offset, length)
    (honest / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    forge(honest)
    with pytest.raises(CheckpointError, match="which the checkpoint does not have"):
        verify(honest)


WEIGHTS = {"a": "float32[3,4]", "count": "int64[]"}


def lose_name(metadata: Any) -> None:
    del metadata.state_dict_metadata["model.a"]


def lose_part(metadata: Any) -> None:
    del metadata.storage_data[next(index for index in metadata.storage_data if index.fqn == "model.count")]


def lose_shape(metadata: Any) -> None:
    metadata.state_dict_metadata["model.a"].size = torch.Size([4, 3])


def lose_type(metadata: Any) -> None:
    metadata.state_dict_metadata["model.count"].properties.dtype = torch.int32


def lose_rows(metadata: Any) -> None:
    chunk = metadata.state_dict_metadata["model.a"].chunks[0]
    metadata.state_dict_metadata["model.a"].chunks[0] = replace(chunk, sizes=torch.Size([2, 4]))


@pytest.mark.parametrize("lose", [lose_name, lose_part, lose_shape, lose_type, lose_rows])
def test_a_checkpoint_without_a_weight_that_its_manifest_lists_is_not_trusted(root: Path, lose: Any) -> None:
    model = {"a": torch.ones(3, 4), "count": torch.tensor(1)}
    header = make_header(4)
    path = save_checkpoint(root, tensors={"model": model}, rank_state={}, header=header, group=None, keep=1).path
    assert verify(path).weights == WEIGHTS
    metadata = read_metadata(path)
    lose(metadata)
    (path / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    forge(path, weights=WEIGHTS)
    for read in (verify, read_model):
        with pytest.raises(CheckpointError, match="1 of 2 tensors are not in the files as they should be: model"):
            read(path)
    forge(path)
    assert verify(path).weights == {}, "an older one does not say what it should have"


@pytest.mark.parametrize(
    ("names", "is_whole"), [(("a", "b.c"), False), (("a",), True), (("0", "1"), True)], ids=["lost", "whole", "numbers"]
)
def test_an_older_checkpoint_is_not_exported_without_parameters_that_were_trained(
    root: Path, names: tuple[str, ...], is_whole: bool
) -> None:
    state = {"model": {"a": torch.ones(3)}, "optimizer": {"state": {name: {"step": torch.ones(())} for name in names}}}
    path = save_checkpoint(root, tensors=state, rank_state={}, header=make_header(4), group=None, keep=1).path
    forge(path)
    if is_whole:
        assert read_model(path)[1].keys() == {"a"}
        return
    with pytest.raises(CheckpointError, match=r"lacks parameters that were trained: b\.c"):
        read_model(path)


class ByName:
    """Pickles as a call of getattr: how Python 3.11.0 to 3.11.3 pickle the members of an enum."""

    def __init__(self, owner: Any, name: Any) -> None:
        self.found = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self.found


def test_the_enum_of_the_metadata_is_read_by_name_and_by_value(honest: Path) -> None:
    for member in _MEM_FORMAT_ENCODING:
        for form in (ByName(_MEM_FORMAT_ENCODING, member.name), _ByValue(member.value)):
            metadata = read_metadata(honest)
            metadata.planner_data = form
            (honest / METADATA_FILE).write_bytes(pickle.dumps(metadata))
            forge(honest)
            verify(honest)
            assert read_metadata(honest).planner_data is member


class _ByValue:
    def __init__(self, value: int) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return _MEM_FORMAT_ENCODING, (self.value,)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (_MEM_FORMAT_ENCODING, "__class__"),
        (_MEM_FORMAT_ENCODING, "mro"),
        (torch.Size, "numel"),
        (Path, "touch"),
        ("text", "format"),
    ],
)
def test_getattr_gives_nothing_but_a_member_of_that_enum(honest: Path, owner: Any, name: str) -> None:
    metadata = read_metadata(honest)
    metadata.planner_data = ByName(owner, name)
    (honest / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="which no checkpoint needs"):
        read_metadata(honest)


def test_every_cut_of_the_metadata_is_an_error_and_not_a_crash(honest: Path) -> None:
    data = (honest / METADATA_FILE).read_bytes()
    for length in range(len(data)):
        (honest / METADATA_FILE).write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            read_metadata(honest)


def test_a_link_in_place_of_the_metadata_is_not_followed(honest: Path, tmp_path: Path) -> None:
    (honest / METADATA_FILE).rename(tmp_path / "elsewhere")
    (honest / METADATA_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="symbolic links"):
        read_metadata(honest)


def test_rank_state_that_is_code_is_not_run(honest: Path, tmp_path: Path) -> None:
    torch.save(Trap(tmp_path / "canary"), honest / rank_file(0))
    forge(honest)
    with pytest.raises(pickle.UnpicklingError):
        load_rank_state(honest, 0)
    assert not (tmp_path / "canary").exists()
