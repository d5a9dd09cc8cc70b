"""Rows of JSONL, Parquet and saved data sets as documents, what is held out of them, and what is refused."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from slurm_train.data.documents import find_documents, split_documents
from slurm_train.data.prepare import PrepareOptions, notes_of, prepare
from slurm_train.data.shards import map_tokens
from slurm_train.errors import DataError

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
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


def as_array(_folder: Path) -> tuple[str, bytes]:
    return "rows.json", json.dumps(ROWS, indent=1).encode()


def as_lines(_folder: Path) -> tuple[str, bytes]:
    return "rows.json", "\n".join(json.dumps(row) for row in ROWS).encode()


def as_table(delimiter: str, name: str, encoding: str = "utf-8") -> Callable[[Path], tuple[str, bytes]]:
    def make(_folder: Path) -> tuple[str, bytes]:
        out = io.StringIO()
        writer = csv.DictWriter(out, ["id", "text"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)
        return name, out.getvalue().encode(encoding)

    return make


def as_arrow_file(folder: Path) -> tuple[str, bytes]:
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.ipc.new_file(str(folder / "file"), table.schema) as out:
        out.write_table(table)
    data = (folder / "file").read_bytes()
    (folder / "file").unlink()
    return "rows.feather", data


def compressed(
    make: Callable[[Path], tuple[str, bytes]], ending: str, compress: Callable[[bytes], bytes]
) -> Callable[[Path], tuple[str, bytes]]:
    def packed(folder: Path) -> tuple[str, bytes]:
        name, data = make(folder)
        return name + ending, compress(data)

    return packed


def by_zstd(data: bytes) -> bytes:
    return bytes(pyarrow.compress(data, codec="zstd", asbytes=True))


@pytest.mark.parametrize(
    "make",
    [
        as_array,
        as_lines,
        as_table(",", "rows.csv"),
        as_table(";", "rows.csv"),
        as_table("\t", "rows.tsv"),
        as_table(",", "rows.csv", "utf-8-sig"),
        as_table("\t", "rows.tsv", "utf-16"),
        as_arrow_file,
        compressed(as_lines, ".gz", gzip.compress),
        compressed(as_table(",", "rows.csv"), ".bz2", bz2.compress),
        compressed(as_array, ".xz", lzma.compress),
        compressed(as_lines, ".zst", by_zstd),
        compressed(as_array, "", gzip.compress),
    ],
)
def test_rows_are_read_from_every_kind_of_file(make: Callable[[Path], tuple[str, bytes]], tmp_path: Path) -> None:
    name, data = make(tmp_path)
    (tmp_path / name).write_bytes(data)
    (train, held) = split_documents(find_documents([tmp_path]), held_out=0.3)
    texts = [text.decode() for half in (train, held) for file, rows in half for text in file.texts(rows, column="text")]
    assert sorted(texts) == sorted(row["text"] for row in ROWS)
    with pytest.raises(DataError, match="has no column 'body', it has id, text"):
        prepare([tmp_path / name], out=tmp_path / "out", options=PrepareOptions(text_column="body"))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.txt.gz", gzip.compress("words \u00e4 ".encode() * 50, mtime=0)),
        ("a.txt", ("words \u00e4 " * 50).encode("utf-16")),
    ],
)
def test_compressed_and_marked_text_is_text_and_its_end_is_held_out(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    halves = split_documents(find_documents([tmp_path / name]), held_out=0.1)
    train, held = (b"".join(text for file, rows in half for text in file.texts(rows, column="text")) for half in halves)
    assert (train + held).decode() == "words \u00e4 " * 50
    assert 0 < len(held) < len(train)


@pytest.mark.parametrize("letter", ["\u00e4", "\u6f22", "\U0001f600"])
@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_the_end_that_is_held_out_begins_with_a_whole_character(
    letter: str, compress: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_bytes(compress((letter * 101).encode()))
    for tenths in range(1, 10):
        halves = split_documents(find_documents([tmp_path / "a.txt"]), held_out=tenths / 10)
        train, held = (next(file.texts(rows, column="text")) for ((file, rows),) in halves)
        assert train.decode() + held.decode() == letter * 101


def test_rows_without_text_are_counted_and_nothing_else_is_an_error(tmp_path: Path) -> None:
    rows = [{"text": text} for text in ("one", None, "", "two", "three", None)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    index = prepare([tmp_path / "a.jsonl"], out=tmp_path / "out", options=PrepareOptions(held_out=0))
    assert (index.splits["train"].documents, index.splits["train"].empty) == (3, 3)
    assert notes_of(index) == ["train: 3 rows or files without text were passed over"]
    (tmp_path / "b.jsonl").write_text('{"text": null}\n' * 4)
    with pytest.raises(DataError, match="has no text to train on: all of its 4 rows and files are empty"):
        prepare([tmp_path / "b.jsonl"], out=tmp_path / "other", options=PrepareOptions(held_out=0))


def test_a_column_of_files_without_columns_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    with pytest.raises(DataError, match=r"the column 'body' was asked for, and .*a\.txt is text without columns"):
        prepare([tmp_path / "a.txt"], out=tmp_path / "out", options=PrepareOptions(text_column="body"))


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
        ("a.json", b'{"data": [\n {"text": "x"}]}', r"a\.json:1 is not JSON: .*\nhint: a \.json file has an array"),
        ("a.csv", b'id,text\n1,"open', r"a\.csv is not a table of separated values"),
        ("a.csv", b"id,text\n", r"there is no text in .*a\.csv: no row"),
        ("a.jsonl", b"[" * 100_000 + b"\n", r"a\.jsonl:1 is not JSON"),
        ("a.csv", "id,text\n1,\u00e4".encode("latin-1"), r"a\.csv is not utf-8: .*\nhint: convert it, e\.g\. iconv"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99, mtime=0)[:-20], r"a\.jsonl\.gz cannot be read: "),
        (
            "a.jsonl",
            b'{"text": "f\xfc"}\n',
            r"a\.jsonl:1 is not JSON: 'utf-8' codec .*\nhint: convert it, e\.g\. iconv",
        ),
        ("a.docx", b"PK\x03\x04 and more", r"a\.docx is a zip archive"),
        ("a.parquet.gz", gzip.compress(b"PAR1", mtime=0), r"a\.parquet\.gz is a compressed file of the kind parquet"),
        ("a.bin", b"PAR1\0\0", r"a\.bin is not text: it holds zero bytes"),
        ("a.txt", LFS_POINTER, r"a\.txt was not downloaded: it is a pointer of Git LFS.*\nhint: .*git lfs pull"),
        ("a.parquet", LFS_POINTER, r"a\.parquet was not downloaded: it is a pointer of Git LFS"),
        ("a.txt", b"/annex/objects/SHA256E-s5--ab.txt\n", r"a\.txt was not downloaded: it is a pointer of git-annex"),
    ],
)
def test_what_is_no_text_is_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare([tmp_path / name], out=tmp_path / "out", options=PrepareOptions(held_out=0))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("held_out", [0, 0.1])
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_damage_in_the_middle_of_a_table_is_named(kind: str, held_out: float, tmp_path: Path) -> None:
    from pyarrow import parquet

    path = tmp_path / f"rows.{kind}"
    table = pyarrow.table({"text": [f"row {number} " * 50 for number in range(2000)]})
    if kind == "parquet":
        parquet.write_table(table, path, compression="none", use_dictionary=False)
        data = bytearray(path.read_bytes())
        data[4:3000] = b"\xff" * 2996
    else:
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as out:
            out.write_table(table, max_chunksize=500)
        data = path.read_bytes()[: path.stat().st_size * 2 // 3]
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"rows\.{kind} cannot be read: "):
        prepare([path], out=tmp_path / "out", options=PrepareOptions(held_out=held_out))


def test_of_several_saved_data_sets_one_must_be_named(tmp_path: Path) -> None:
    write_saved(tmp_path)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["saved"]}')
    with pytest.raises(DataError, match="holds several saved data sets: saved"):
        find_documents([tmp_path])


def test_a_saved_data_set_that_lacks_a_file_is_refused(tmp_path: Path) -> None:
    write_saved(tmp_path)
    next((tmp_path / "saved").glob("*.arrow")).unlink()
    with pytest.raises(DataError, match="arrow belongs to the data set that is saved there, and is not there"):
        find_documents([tmp_path])


def test_links_are_followed_and_what_several_names_lead_to_is_taken_once(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "own").mkdir(parents=True)
    (tmp_path / "scratch" / "books").mkdir(parents=True)
    (data / "own" / "a.txt").write_text("own text")
    (tmp_path / "scratch" / "books" / "b.txt").write_text("text of another disk")
    (tmp_path / "scratch" / "c.txt").write_text("another file there")
    (data / "books").symlink_to(tmp_path / "scratch" / "books")
    (data / "c.txt").symlink_to(tmp_path / "scratch" / "c.txt")
    (data / "a_again.txt").symlink_to(data / "own" / "a.txt")
    (data / "latest").symlink_to("own")
    (data / "books" / "round").symlink_to(data)
    (data / "up").symlink_to(tmp_path)
    for inputs in ([data], [data, data / "books", data / "own" / "a.txt"]):
        assert [document.name for document in find_documents(inputs)] == ["a_again.txt", "books/b.txt", "c.txt"]


@pytest.mark.parametrize(("name", "is_wanted"), [("a.txt", True), ("books", True), ("a.lock", False)])
def test_a_link_to_nothing_is_refused_where_text_was_meant(name: str, is_wanted: bool, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("text")
    (tmp_path / name).symlink_to("/gone/there")
    if is_wanted:
        with pytest.raises(DataError, match=rf"{name} is a link to /gone/there, which is not there"):
            find_documents([tmp_path], suffixes=[".txt"])
    assert find_documents([tmp_path], suffixes=[".txt"], skipped=[name])


def test_what_is_to_be_tested_on_is_not_trained_on(tmp_path: Path) -> None:
    data = tmp_path / "repository" / "data"
    data.mkdir(parents=True)
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        write_parquet(data).rename(data / f"{name}.parquet")
    with pytest.raises(DataError, match=r"several splits of a data set: data/test-\S+, data/train-00000-of-00002"):
        find_documents([data.parent])
    assert len(find_documents(sorted(data.glob("train*")))) == 2
    (data / "test-00000-of-00001.parquet").rename(data / "more.parquet")
    assert len(find_documents([data.parent])) == 3


def test_what_describes_rows_is_no_text_of_theirs(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# A data set")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "train.txt").write_text("text")
    assert [document.name for document in find_documents([tmp_path])] == ["README.md", "test/train.txt"]
    write_jsonl(tmp_path)
    assert [document.name for document in find_documents([tmp_path])] == ["rows.jsonl", "test/train.txt"]
