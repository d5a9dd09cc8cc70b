from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from slurm_train.data import stdlib, text
from slurm_train.data.check import known_num_samples
from slurm_train.data.prepare import PrepareOptions, prepare
from slurm_train.data.shards import ShardIndex, SplitIndex, check_sizes, read_index, write_shards
from slurm_train.data.source import IGNORED
from slurm_train.data.text import TokenSource
from slurm_train.errors import DataError

LENGTH = 1003


def num_open(folder: Path) -> int:
    """Returns how many descriptors this process has of files in a folder."""
    found = 0
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found += one.readlink().parent == folder
    return found


@pytest.fixture(params=[10**6, 100], ids=["one shard", "many shards"])
def shards(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    (tmp_path / "a.txt").write_bytes(rng.integers(1, 128, 2 * LENGTH, dtype=np.uint8).tobytes())
    options = PrepareOptions(held_out=0.5, max_targets=request.param)
    prepare([tmp_path / "a.txt"], out=tmp_path / "out", options=options)
    return tmp_path / "out"


def source(shards: Path, split: str, context: int = 16) -> TokenSource:
    made = text.build(path=str(shards), context=context, split=split)  # type: ignore[arg-type]
    assert made is not None
    return made


def test_training_takes_whole_windows_of_each_shard_in_order(shards: Path) -> None:
    train = source(shards, "train")
    inputs, targets = train.batch(np.arange(len(train)))
    assert inputs.shape == targets.shape == (len(train), 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    expected = [shard[1 : 1 + (len(shard) - 1) // 16 * 16].astype(np.int64) for shard in train.shards()]
    assert np.array_equal(targets.flatten().numpy(), np.concatenate(expected))
    others = [source(shards, "train", context=8), source(shards, "heldout")]
    assert len({one.fingerprint() for one in (train, *others)}) == 3, "content and context"
    with pytest.raises(DataError, match="no train window of 5000 tokens"):
        source(shards, "train", context=5000)


@pytest.mark.parametrize("begin", [(), (1, 2)], ids=["after an end", "with tokens of its own"])
def test_positions_begin_anew_with_each_document(tmp_path: Path, begin: tuple[int, ...]) -> None:
    end = 99
    documents = [[*begin, *range(10, 10 + length)] for length in (5, 1, 12, 30, 2, 7)]
    tokens = np.concatenate([[*document, end] for document in documents]).astype("<u4")
    shards = write_shards(tmp_path, "train", [tokens], dtype="<u4", max_targets=10**6, first=end)
    split = SplitIndex(documents=len(documents), bytes=len(tokens), targets=len(tokens), shards=shards)
    index = ShardIndex(
        source="", input_digest="", tokenizer="", dtype="<u4", vocab_size=100, end_of_document=end,
        splits={"train": split, "heldout": split}, begin_of_document=begin,
    )  # fmt: skip
    plain, masked = (
        TokenSource(tmp_path, index=index, context=8, split="heldout", document_mask=is_masked)
        for is_masked in (False, True)
    )
    inputs, targets, position_ids = masked.batch(np.arange(len(masked)))
    for tensor, expected in zip((inputs, targets), plain.batch(np.arange(len(plain))), strict=True):
        assert tensor.equal(expected)
    assert plain.fingerprint() != masked.fingerprint()
    for row, places in zip(inputs.tolist(), position_ids.tolist(), strict=True):
        expected_place = 0
        for number, token in enumerate(row):
            is_first = number == 0 or (row[number - 1] == end if begin else token == end)
            expected_place = 0 if is_first else expected_place + 1
            assert places[number] == expected_place


def test_the_number_of_windows_is_known_without_reading_them(shards: Path, tmp_path: Path) -> None:
    data = {"_target_": "slurm_train.data.text.build", "path": "out", "context": 16}
    assert known_num_samples(data, cwd=tmp_path) == len(source(shards, "train"))
    assert known_num_samples({"_target_": "my_data.Mine"}, cwd=tmp_path) is None
    assert known_num_samples({**data, "path": "nowhere"}, cwd=tmp_path) is None


def test_each_held_out_token_is_a_target_exactly_once(shards: Path) -> None:
    held_out = source(shards, "heldout")
    inputs, targets = held_out.batch(np.arange(len(held_out)))
    real = targets[targets != IGNORED]
    expected = torch.cat([torch.from_numpy(shard[1:].astype(np.int64)) for shard in held_out.shards()])
    assert torch.equal(real, expected)
    assert len(real) == held_out.index.splits["heldout"].targets == LENGTH + 1
    assert inputs.min() >= 0


def test_a_batch_in_any_order_equals_its_samples_one_by_one(shards: Path) -> None:
    held_out = source(shards, "heldout")
    numbers = np.random.default_rng(1).permutation(len(held_out)).astype(np.int64)
    together = held_out.batch(numbers)
    one_by_one = [held_out.batch(numbers[i : i + 1]) for i in range(len(numbers))]
    for part in range(2):
        assert torch.equal(together[part], torch.cat([sample[part] for sample in one_by_one]))


def test_of_many_shards_only_those_that_are_read_are_opened(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abcdefg\n" * 800)
    out = tmp_path / "out"
    prepare([tmp_path / "a.txt"], out=out, options=PrepareOptions(held_out=0, max_targets=16))
    train = source(out, "train")
    assert len(train) == 400 and num_open(out) == 0
    assert text.build(path=str(out), context=16, split="heldout") is None
    # Nothing looks at a file before its first use; then it is named.
    damaged = out / "train_00003.bin"
    damaged.write_bytes(damaged.read_bytes()[:-2])
    assert len(source(out, "train")) == 400
    train.batch(np.array([7, 9, 7, 8]))
    assert num_open(out) == 3
    with pytest.raises(DataError, match=r"train_00003\.bin has 16 tokens, the index says 17"):
        train.batch(np.array([2, 3]))


def test_nodes_share_the_look_at_the_lengths_of_many_shards(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abcdefg\n" * 800)
    prepare([tmp_path / "a.txt"], out=tmp_path / "out", options=PrepareOptions(held_out=0, max_targets=16))
    index = read_index(tmp_path / "out")
    damaged = tmp_path / "out" / "train_00101.bin"
    damaged.write_bytes(damaged.read_bytes()[:-2])

    def sees(node: int, nodes: int) -> bool:
        try:
            check_sizes(tmp_path / "out", index, node=node, nodes=nodes)
        except DataError as err:
            return damaged.name in err.message
        return False

    assert [sees(node, 4) for node in range(4)] == [False, True, False, False]
    assert sees(0, 1) and any(sees(node, 1000) for node in range(1000)), "each is looked at"


def test_standard_library_is_real_text_and_made_once(tmp_path: Path) -> None:
    train = stdlib.build(context=64, path=str(tmp_path / "shards"), split="train")
    held_out = stdlib.build(context=64, path=str(tmp_path / "shards"), split="heldout")
    assert read_index(tmp_path / "shards") == train.index == held_out.index
    assert len(train) * 64 > 4_000_000 and len(held_out) * 64 > 100_000
    assert 0.99 < train.bytes_per_target <= 1.0
    assert train.encoding().decode([104, 105, 256, 255, 33]) == "hi\n\n\ufffd!"
    assert "import" in train.encoding().decode(np.asarray(next(train.shards())[:20_000]).tolist())


def test_a_split_has_the_bytes_and_tokens_that_its_text_has(tmp_path: Path) -> None:
    """Counted by hand: each byte is a token, and each document has an end. Empty rows are counted, and held out too."""
    texts = [f"text {number} " * (number % 7) for number in range(40)] + [None]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    index = prepare([file], out=tmp_path / "out", options=PrepareOptions(held_out=0.3, max_targets=200))
    splits = index.splits.values()
    assert sum(split.empty for split in splits) == sum(not text for text in texts) == 7
    assert sum(split.documents for split in splits) == 34
    assert sum(split.bytes for split in splits) == sum(len(text or "") for text in texts)
    for name, split in index.splits.items():
        assert split.targets == split.bytes + split.documents
        source = text.build(path=str(tmp_path / "out"), context=16, split=name)
        assert source is not None and source.bytes_per_target == split.bytes / split.targets
        targets = torch.cat([source.batch(np.array([window]))[1] for window in range(len(source))])
        num_counted = int((targets != IGNORED).sum())
        if name == "heldout":
            assert num_counted == split.targets
        else:
            # Training takes whole windows: of each file of tokens the end may be missing.
            assert 0 <= split.targets - num_counted < 16 * len(split.shards)
