"""Rows of JSONL, Parquet and saved data sets as documents, what is held out of them, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from slurm_train.data.documents import find_documents, split_documents
from slurm_train.data.prepare import PrepareOptions, prepare
from slurm_train.data.shards import map_tokens
from slurm_train.errors import DataError

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
ROWS = [{"id": number, "text": f"row {number} \u00e4"} for number in range(60)]


def write_jsonl(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    return path


def write_parquet(folder: Path) -> Path:
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "rows.parquet", row_group_size=7)
    return folder / "rows.parquet"


def write_saved(folder: Path) -> Path:
    """What Hugging Face's save_to_disk writes: Arrow streams, and their names."""
    saved, table = folder / "saved", pyarrow.Table.from_pylist(ROWS)
    saved.mkdir()
    for number, part in enumerate((table.slice(0, 25), table.slice(25))):
        with (
            pyarrow.OSFile(str(saved / f"data-{number}.arrow"), "wb") as sink,
            pyarrow.ipc.new_stream(sink, table.schema) as out,
        ):
            out.write_table(part)
    files = [{"filename": f"data-{number}.arrow"} for number in range(2)]
    (saved / "state.json").write_text(json.dumps({"_data_files": files}))
    (saved / "dataset_info.json").write_text("{}")
    return saved


@pytest.mark.parametrize("write", [write_jsonl, write_parquet, write_saved])
def test_each_row_is_a_document_in_one_half(write: Callable[[Path], Path], tmp_path: Path) -> None:
    given = write(tmp_path)
    halves = split_documents(find_documents([given]), held_out=0.3)
    texts = [[text.decode() for file, rows in half for text in file.texts(rows, column="text")] for half in halves]
    assert sorted(texts[0] + texts[1]) == sorted(row["text"] for row in ROWS)
    assert 5 <= len(texts[1]) <= 35
    index = prepare([given], out=tmp_path / "out", options=PrepareOptions(held_out=0.3))
    for split, expected in zip(("train", "heldout"), texts, strict=True):
        (tokens,) = map_tokens(tmp_path / "out", index, split)  # type: ignore[arg-type]
        pieces = bytes(np.where(tokens == 256, 0, tokens).astype(np.uint8)).strip(b"\0").split(b"\0")
        assert [piece.decode() for piece in pieces] == expected
        written = index.splits[split].documents, index.splits[split].bytes
        assert written == (len(expected), sum(len(text.encode()) for text in expected))


@pytest.mark.parametrize("held_out", [1e-9, 1 - 1e-9])
def test_both_halves_get_a_row(held_out: float, tmp_path: Path) -> None:
    halves = split_documents(find_documents([write_jsonl(tmp_path)]), held_out=held_out)
    assert sorted(sum(int(rows.sum()) for _, rows in half) for half in halves) == [1, 59]


def test_rows_that_are_added_move_no_other_row(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path)
    _, [(_, before)] = split_documents(find_documents([path]), held_out=0.3)
    path.write_text(path.read_text() + json.dumps(ROWS[0]) + "\n")
    _, [(_, after)] = split_documents(find_documents([path]), held_out=0.3)
    assert np.array_equal(after[:60], before)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"body": "x"}\n', r"a\.jsonl:1 has no column 'text', it has body"),
        ("a.jsonl", b'{"text": 3}\n', r"a\.jsonl, row 0: column 'text' holds int"),
        ("a.jsonl", b"plain words\n", r"a\.jsonl:1 is not JSON"),
        ("a.parquet", b"PAR1 cut short", r"a\.parquet cannot be read"),
        ("a.bin", b"PAR1\0\0", r"a\.bin is not text: it holds zero bytes"),
    ],
)
def test_what_is_no_text_is_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare([tmp_path / name], out=tmp_path / "out", options=PrepareOptions(held_out=0))
    assert not (tmp_path / "out").exists()


def test_of_several_saved_data_sets_one_must_be_named(tmp_path: Path) -> None:
    write_saved(tmp_path)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["saved"]}')
    with pytest.raises(DataError, match="holds several saved data sets: saved"):
        find_documents([tmp_path])
