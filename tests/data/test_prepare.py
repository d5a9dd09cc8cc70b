from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from slurm_train.data.documents import find_documents, hash_name, split_documents
from slurm_train.data.prepare import (
    FileEncoding,
    Packing,
    PrepareOptions,
    _input_digest,
    _outside_digest,
    ends_in_words,
    note_of_begin,
    notes_of,
    prepare,
    prepare_documents,
)
from slurm_train.data.shards import INDEX, check_sizes, map_tokens, read_index, write_index
from slurm_train.data.text import TokenSource
from slurm_train.errors import DataError


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    for number in range(40):
        (folder / "deep" / f"{number}.txt").write_bytes(f"document {number}\n".encode())
    (folder / "picture.png").write_bytes(b"\x00\xff")
    (folder / "empty.txt").touch()
    (folder / ".hidden.txt").write_text("no")
    return folder


def hash_of(path: Path) -> str:
    return xxhash.xxh3_128_hexdigest(path.read_bytes())


TEXT = PrepareOptions(suffixes=(".txt",))


def test_shards_hold_every_document_once_between_ends_of_documents(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    index = prepare([corpus], out=out, options=TEXT)
    assert read_index(out) == index and (index.vocab_size, index.end_of_document) == (257, 256)
    pieces = []
    for split in ("train", "heldout"):
        (tokens,) = map_tokens(out, index, split)
        assert tokens.dtype == np.dtype("<u2") and tokens[0] == tokens[-1] == 256
        assert index.splits[split].targets == len(tokens) - 1
        pieces += bytes(np.where(tokens == 256, 0, tokens).astype(np.uint8)).strip(b"\0").split(b"\0")
    assert sorted(pieces) == sorted(f"document {number}\n".encode() for number in range(40))
    assert index.splits["train"].documents + index.splits["heldout"].documents == 40


def test_split_depends_on_the_relative_path_alone(corpus: Path) -> None:
    documents = find_documents([corpus], suffixes=[".txt"])
    _, held_out = split_documents(documents, held_out=0.25)
    names = {document.name for document, _ in held_out}
    assert names == {d.name for d in documents if hash_name(d.name) < 0.25}
    _, of_fewer = split_documents(documents[:20], held_out=0.25)
    assert {document.name for document, _ in of_fewer} == names & {d.name for d in documents[:20]}


def test_single_file_holds_out_its_end(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_bytes(bytes(range(1, 101)))
    index = prepare([tmp_path / "input.txt"], out=tmp_path / "out", options=PrepareOptions(held_out=0.1))
    (train,), (held_out,) = (map_tokens(tmp_path / "out", index, split) for split in ("train", "heldout"))
    assert train.tolist() == [256, *range(1, 91), 256]
    assert held_out.tolist() == [256, *range(91, 101), 256]


def test_full_shards_repeat_one_token_of_context(corpus: Path, tmp_path: Path) -> None:
    whole = prepare([corpus], out=tmp_path / "whole", options=TEXT)
    cut = prepare([corpus], out=tmp_path / "cut", options=replace(TEXT, max_targets=100))
    (expected,) = map_tokens(tmp_path / "whole", whole, "train")
    shards = list(map_tokens(tmp_path / "cut", cut, "train"))
    assert len(shards) == -(-(len(expected) - 1) // 100)
    assert all(left[-1] == right[0] for left, right in pairwise(shards))
    assert np.array_equal(np.concatenate([shards[0][:1], *(shard[1:] for shard in shards)]), expected)
    hashes = [hash_of(tmp_path / "cut" / shard.file) for shard in cut.splits["train"].shards]
    assert hashes == [shard.xxh3_128 for shard in cut.splits["train"].shards]


def test_other_input_or_options_never_replace_shards(corpus: Path, tmp_path: Path) -> None:
    first = prepare([corpus], out=tmp_path / "out", options=TEXT)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert prepare([corpus], out=tmp_path / "out", options=TEXT) == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    with pytest.raises(DataError, match="holds the shards of another input or other options"):
        prepare([corpus], out=tmp_path / "out", options=PrepareOptions(held_out=0.3))
    (corpus / "new.txt").write_text("more")
    with pytest.raises(DataError, match="holds the shards of another input or other options"):
        prepare([corpus], out=tmp_path / "out", options=TEXT)


@pytest.mark.parametrize("place", [0, 15_000, 29_999])
def test_other_text_under_the_same_name_size_and_time_is_another_input(tmp_path: Path, place: int) -> None:
    directories = []
    for version, letter in (("v1", "a"), ("v2", "b")):
        file = tmp_path / version / "corpus.txt"
        file.parent.mkdir()
        file.write_text("." * place + letter + "." * (29_999 - place))
        os.utime(file, (1_700_000_000, 1_700_000_000))
        directories.append(Packing(str(file), cache=str(tmp_path / "cache")).make())
    assert directories[0] != directories[1]


def test_of_much_text_blocks_and_the_beginning_of_each_file_are_read(tmp_path: Path) -> None:
    big, small = tmp_path / "big.txt", tmp_path / "small.txt"
    with big.open("wb") as file:
        file.truncate(256 * 2**20)
    small.write_text("small")
    digests = set()
    for change in (lambda: None, lambda: small.write_text("SMALL"), lambda: _write_at(big, 128 * 2**20 + 7, 70_000)):
        change()
        digests.add(_input_digest(find_documents([tmp_path]), "options"))
    assert len(digests) == 3


def _write_at(path: Path, place: int, num_bytes: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"x" * num_bytes)


def test_shards_whose_digest_has_no_text_are_used_as_they_are(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    index = prepare([corpus], out=out, options=TEXT)
    older = replace(index, input_digest=_outside_digest(find_documents([corpus], suffixes=TEXT.suffixes), TEXT))
    (out / INDEX).unlink()
    write_index(out, older)
    assert prepare([corpus], out=out, options=TEXT) == older


def _prepare_at_once(corpus: Path, out: Path, barrier: object, results: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    results.put(prepare([corpus], out=out, options=TEXT).input_digest)  # type: ignore[attr-defined]


def test_processes_that_prepare_at_once_all_get_whole_shards(corpus: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    out = tmp_path / "out"
    workers = [context.Process(target=_prepare_at_once, args=(corpus, out, barrier, results)) for _ in range(4)]
    for worker in workers:
        worker.start()
    assert len({results.get(timeout=60) for _ in workers}) == 1
    for worker in workers:
        worker.join(timeout=60)
    (shard,) = read_index(out).splits["train"].shards
    assert hash_of(out / shard.file) == shard.xxh3_128
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out"]


@pytest.mark.parametrize(
    ("given", "out", "options", "message"),
    [
        ("none", "out", {}, "none cannot be read: No such file or directory"),
        ("corpus", "out", {"suffixes": (".md",)}, "no file with the suffixes .md that is not empty"),
        ("corpus", "out", {"held_out": 1.0}, r"the held-out fraction is 1\.0"),
        ("corpus", "corpus/deep", {}, "is not empty and holds no token shards"),
    ],
)
def test_what_cannot_be_prepared_is_refused_and_nothing_is_written(
    given: str, out: str, options: dict[str, Any], message: str, corpus: Path, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DataError, match=message):
        prepare([tmp_path / given], out=tmp_path / out, options=replace(TEXT, **options))
    assert sorted(tmp_path.rglob("*")) == before


def test_file_that_fails_in_the_middle_leaves_nothing(corpus: Path, tmp_path: Path) -> None:
    documents = find_documents([corpus / "deep"])
    (corpus / "deep" / "7.txt").write_text("")
    with pytest.raises(DataError, match="became shorter"):
        prepare_documents(documents, out=tmp_path / "out", options=TEXT, source="test")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


BPE = {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}}


@pytest.mark.full
@pytest.mark.parametrize(
    ("added", "config", "end", "vocab_size"),
    [
        ([], None, 3, 4),
        (["<pad>", "</s>"], None, 4, 5),
        (["<|endoftext|>", "<|im_end|>"], {"eos_token": "<|im_end|>"}, 4, 5),
        (["<x>"], {"eos_token": {"content": "<x>"}}, 3, 4),
    ],
)
def test_a_tokenizer_s_own_end_token_ends_documents(
    added: list[str], config: dict[str, object] | None, end: int, vocab_size: int, tmp_path: Path
) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    model = tmp_path / "model"
    model.mkdir()
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokens = [{"id": 3 + place, "content": text, "special": True, **flags} for place, text in enumerate(added)]
    (model / "tokenizer.json").write_text(json.dumps({**BPE, "added_tokens": tokens}))
    if config is not None:
        (model / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "text.txt").write_text("abba")
    index = prepare([tmp_path / "text.txt"], out=tmp_path / "out", options=PrepareOptions(held_out=0, tokenizer=model))
    assert (index.end_of_document, index.vocab_size) == (end, vocab_size)
    (written,) = map_tokens(tmp_path / "out", index, "train")
    assert written.tolist() == [end, 2, 1, 0, end]
    encoding = FileEncoding(tmp_path / "out" / "tokenizer.json", end_of_document=index.end_of_document)
    assert encoding.decode(written.tolist()[1:]) == "ab b a\n\n"


def special(*texts: str) -> list[dict[str, Any]]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [{"id": 3 + place, "content": text, "special": True, **flags} for place, text in enumerate(texts)]


def template(*pieces: str) -> dict[str, Any]:
    """Returns a template in the form of the tokenizers library; "A" is the text."""
    single = [{"Sequence" if piece == "A" else "SpecialToken": {"id": piece, "type_id": 0}} for piece in pieces]
    ids = {"<bos>": 3, "</s>": 4}
    named = {piece: {"id": piece, "ids": [ids[piece]], "tokens": [piece]} for piece in pieces if piece != "A"}
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": named}


BYTES_ALONE = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}


@pytest.mark.full
@pytest.mark.parametrize(
    ("processor", "config", "begin"),
    [
        (template("<bos>", "A"), {}, [3]),
        (template("<bos>", "A", "</s>"), {}, [3]),
        ({"type": "Sequence", "processors": [BYTES_ALONE, template("<bos>", "A")]}, {}, [3]),
        ({"type": "BertProcessing", "sep": ["</s>", 4], "cls": ["<bos>", 3]}, {}, [3]),
        (template("A", "</s>"), {}, []),
        (template("</s>", "A"), {}, []),
        (None, {"add_bos_token": True, "bos_token": "<bos>"}, [3]),
        (None, {"add_bos_token": True, "bos_token": None}, []),
        (template("<bos>", "A"), {"add_bos_token": True, "bos_token": {"content": "<bos>"}}, [3]),
        (template("<bos>", "A"), {"add_bos_token": False, "bos_token": "<bos>"}, []),
        (None, {"bos_token": "<bos>"}, []),
        (BYTES_ALONE, {}, []),
    ],
    ids=[
        *("Gemma", "begin and end", "Llama 3", "BERT", "T5", "the end token", "by configuration", "no token"),
        *("both", "switched off", "named alone", "GPT-2"),
    ],
)
def test_what_a_tokenizer_puts_before_a_text_begins_documents(
    processor: Any, config: dict[str, Any], begin: list[int], tmp_path: Path
) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    model = tmp_path / "model"
    model.mkdir()
    content = {**BPE, "added_tokens": special("<bos>", "</s>"), "post_processor": processor}
    (model / "tokenizer.json").write_text(json.dumps(dict(sorted(content.items()))))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", **config}))
    (tmp_path / "text.jsonl").write_text('{"text": "abba"}\n{"text": "b"}\n')
    options = PrepareOptions(held_out=0, tokenizer=model)
    index = prepare([tmp_path / "text.jsonl"], out=tmp_path / "out", options=options)
    (written,) = map_tokens(tmp_path / "out", index, "train")
    assert written.tolist() == [4, *begin, 2, 1, 0, 4, *begin, 1, 4]
    assert (read_index(tmp_path / "out"), index.begin_of_document) == (index, tuple(begin))
    assert note_of_begin(index, options) is None
    assert ends_in_words(index, options) == ("<bos> (3) begins and " if begin else "") + "</s> (4) ends a document"
    # What a run writes begins as its data do; without a configuration the library itself says what that is.
    assert TokenSource(tmp_path / "out", index=index, context=2, split="train").encoding().begin_of_document == (
        *begin,
    )
    if not config:
        ids = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json")).encode("abba").ids
        assert ids[: ids.index(2)] == (begin or [4] * (ids[0] == 4))


@pytest.mark.full
def test_shards_that_an_earlier_version_has_made_without_a_begin_are_used_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    content = {**BPE, "added_tokens": special("<bos>", "</s>")}
    text, tokenizer, cache = tmp_path / "text.txt", tmp_path / "tokenizer.json", tmp_path / "cache"
    text.write_text("abba")
    documents = find_documents([text])
    options = PrepareOptions(held_out=0, tokenizer=tokenizer)
    tokenizer.write_text(json.dumps(content))
    older = prepare([text], out=tmp_path / "out", options=options)
    tokenizer.write_text(json.dumps({"post_processor": template("<bos>", "A"), **content}))
    outside = _outside_digest(documents, options, has_begin=False)
    older = replace(older, input_digest=_input_digest(documents, outside))
    (tmp_path / "out" / INDEX).unlink()
    write_index(tmp_path / "out", older)
    shutil.copytree(tmp_path / "out", cache / older.input_digest)
    assert "begin_of_document" not in (cache / older.input_digest / INDEX).read_text()
    assert prepare([text], out=tmp_path / "out", options=options) == older
    words = {"held_out": 0, "tokenizer": str(tokenizer)}
    assert Packing(str(text), cache=str(cache), **words).make() == cache / older.input_digest
    assert "the tokenizer begins texts with <bos> (3), and documents here do not" in capsys.readouterr().err
    index = read_index(Packing(str(text), cache=str(tmp_path / "other"), **words).make())
    assert index.begin_of_document == (3,)
    assert capsys.readouterr().err == "<bos> (3) begins and </s> (4) ends a document\n"


@pytest.mark.full
def test_documents_are_encoded_whole_whatever_length_a_tokenizer_was_used_with(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    cuts = {
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": {
            "strategy": {"Fixed": 6},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 1,
            "pad_type_id": 0,
            "pad_token": "b",
        },
    }
    (tmp_path / "text.txt").write_text("ababab")
    for name, settings in (("plain", {}), ("used", cuts)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"version": "1.0", **settings, **BPE}))
        options = PrepareOptions(held_out=0, tokenizer=tmp_path / f"{name}.json")
        index = prepare([tmp_path / "text.txt"], out=tmp_path / name, options=options)
        (written,) = map_tokens(tmp_path / name, index, "train")
        assert written.tolist() == [3, 2, 2, 2, 3]


@pytest.mark.full
def test_another_end_token_beside_the_same_tokenizer_is_another_way(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    (tmp_path / "text.txt").write_text("abba")
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokens = [{"id": 3 + place, "content": f"<{place}>", "special": True, **flags} for place in range(2)]
    ends = []
    for name in ("base", "chat"):
        model = tmp_path / name
        model.mkdir()
        (model / "tokenizer.json").write_text(json.dumps({**BPE, "added_tokens": tokens}))
        (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<0>" if name == "base" else "<1>"}))
        packing = Packing(str(tmp_path / "text.txt"), tokenizer=str(model), cache=str(tmp_path / "cache"))
        ends.append(read_index(packing.make()).end_of_document)
    assert ends == [3, 4]


def test_text_is_packed_once_and_again_when_it_or_the_way_changes(corpus: Path, tmp_path: Path) -> None:
    text, cache = corpus / "deep", str(tmp_path / "cache")
    first = Packing(str(text), cache=cache).make()
    index = read_index(first)
    assert Packing("deep", cache=cache, cwd=corpus).make() == first
    assert Packing(str(text), cache=cache, held_out=0.5).make() != first
    (text / "7.txt").write_text("other\n")
    assert Packing(str(text), cache=cache).make() != first
    assert read_index(first) == index


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to another user needs root")
@pytest.mark.parametrize(("mode", "is_used"), [(0o1777, False), (0o2770, True)])
def test_shards_that_a_stranger_has_put_into_a_folder_for_all_are_not_used(
    corpus: Path, tmp_path: Path, mode: int, is_used: bool
) -> None:
    """In the folder of a group, whom everybody trusts who names it, they are what the folder is for."""
    cache = tmp_path / "cache"
    first = Packing(str(corpus / "deep"), cache=str(cache)).make()
    cache.chmod(mode)
    os.chown(first, 65534, 65534)
    again = Packing(str(corpus / "deep"), cache=str(cache)).make()
    assert (again == first) is is_used and Packing(str(corpus / "deep"), cache=str(cache)).make() == again
    assert read_index(again) == read_index(first)


def test_a_lock_that_a_stranger_has_made_a_link_is_not_written_to(corpus: Path, tmp_path: Path) -> None:
    packing = Packing(str(corpus / "deep"), cache=str(tmp_path / "cache"))
    packing.directory.parent.mkdir()
    (tmp_path / "thesis").write_text("years of work")
    packing.directory.with_suffix(".lock").symlink_to(tmp_path / "thesis")
    with pytest.raises(DataError, match="cannot be made"):
        packing.make()
    assert (tmp_path / "thesis").read_text() == "years of work"


@pytest.mark.parametrize("damage", ["cut", "missing", "index"])
def test_damaged_shards_are_refused(corpus: Path, tmp_path: Path, damage: str) -> None:
    out = tmp_path / "out"
    prepare([corpus], out=out, options=TEXT)
    shard = out / "train_00000.bin"
    damages = {
        "cut": lambda: shard.write_bytes(shard.read_bytes()[:-2]),
        "missing": shard.unlink,
        "index": lambda: (out / INDEX).write_text('{"format": 1, "splits": 3}'),
    }
    damages[damage]()
    with pytest.raises(DataError):
        check_sizes(out, read_index(out))
    with pytest.raises(DataError):
        prepare([corpus], out=out, options=TEXT)
    with pytest.raises(DataError, match="train_00000.bin" if damage != "index" else INDEX):
        for tokens in map_tokens(out, read_index(out), "train"):
            assert len(tokens)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        ({"type": "WordLevel", "vocab": {"<unk>": 0, "hello": 1}, "unk_token": "<unk>"}, "2 of 4 tokens"),
        ({"type": "Unigram", "vocab": [["<unk>", 0.0], ["hello", -1.0]], "unk_id": 0}, "2 of 4 tokens"),
        (
            {"type": "BPE", "vocab": dict(zip("helo", range(4), strict=True)), "merges": []},
            "9 characters of the first 1 d",
        ),
    ],
    ids=["a token for it", "a token by its number", "left out"],
)
@pytest.mark.full
def test_text_that_a_tokenizer_does_not_know_is_counted(tmp_path: Path, model: dict[str, Any], count: str) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    encoder = tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    encoder.save(str(tmp_path / "tokenizer.json"))
    notes = []
    for name, text in (("unknown", "hello zzzzz \n 1234"), ("known", "hello hello\n")):
        (tmp_path / name).write_text(text)
        options = PrepareOptions(held_out=0, tokenizer=tmp_path / "tokenizer.json")
        notes.append(notes_of(prepare([tmp_path / name], out=tmp_path / f"{name} out", options=options)))
    assert len(notes[0]) == 1 and count in notes[0][0] and not notes[1]
