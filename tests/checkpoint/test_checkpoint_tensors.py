"""How a tensor is written: what torch reads again, without a copy that other threads would wait for."""

from __future__ import annotations

import io
import zipfile

import pytest
import torch

from slurm_train.checkpoint import tensors as module
from slurm_train.checkpoint.manifest import NewFile, check_hash

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool]


def written(tensor, tmp_path):
    """Returns what is written of a tensor behind other bytes, as torch's reader cuts it out."""
    path = tmp_path / "tensors"
    with NewFile(path) as file:
        file.write(b"another tensor")
        begin = file.num_bytes
        module._write_one(file, tensor)
        record = file.seal()
    check_hash(path, record)
    return path.read_bytes()[begin:]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int16, torch.complex64, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [(1 << 19,), (300, 1000), (2, 3, 70_000), (1, 1 << 19), (3, 5), (), (4, 0)], ids=str)
def test_torch_reads_what_is_written(dtype, shape, tmp_path):
    tensor = (torch.randn(shape) * 50).to(dtype)
    read = torch.load(io.BytesIO(written(tensor, tmp_path)), weights_only=True)
    assert (read.dtype, read.shape, read.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert read.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))
    assert read.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("width", [800, 8], ids=["large", "small"])
def test_a_view_is_written_without_the_rest(width, tmp_path):
    view = torch.randn(1000, 1000).t()[:, 100 : 100 + width]
    content = written(view, tmp_path)
    assert len(content) < view.nbytes + 2000
    path = tmp_path / "tensor.pt"
    path.write_bytes(content)
    assert torch.load(path, mmap=True).equal(view)
    assert zipfile.ZipFile(path).testzip() is None


def test_a_large_tensor_is_written_from_where_it_is():
    """torch.save copies it into bytes, and no other thread of the process runs meanwhile."""
    tensor, seen = torch.randn(512, 512), []

    class File:
        def write(self, content):
            seen.append(content)
            return len(content)

        def flush(self):
            """Nothing waits."""

    module._write_one(File(), tensor)
    (largest,) = [content for content in seen if len(content) > 1000]
    assert isinstance(largest, memoryview)
    tensor.zero_()
    assert not any(largest), "it is the tensor's own memory"


def test_an_archive_is_made_once_for_all_tensors_of_a_shape(monkeypatch, tmp_path):
    """To make it takes more of the interpreter than all else of a save, and GPT-2 has 784 tensors."""
    made, archive = [], zipfile.ZipFile
    monkeypatch.setattr(zipfile, "ZipFile", lambda *args: made.append(1) or archive(*args))
    monkeypatch.setattr(torch, "save", lambda *_: pytest.fail("torch makes one for each"))
    for number in range(3):
        tensor = torch.full((7, 11), float(number))
        (tmp_path / f"{number}").mkdir()
        read = torch.load(io.BytesIO(written(tensor, tmp_path / f"{number}")), weights_only=True)
        assert read.equal(tensor)
    assert len(made) == 1


def test_an_archive_with_the_sizes_of_a_tensor_above_4_gib_is_read(monkeypatch, tmp_path):
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 1000)
    module._archive_around.cache_clear()
    tensor = torch.randn(20, 17)
    content = written(tensor, tmp_path)
    module._archive_around.cache_clear()
    assert torch.load(io.BytesIO(content), weights_only=True).equal(tensor)
    assert zipfile.ZipFile(io.BytesIO(content)).testzip() is None
