"""Text to token shards: what `python -m slurm_train prepare` and the embedded data set both do.

Text becomes bytes, 256 ids, and no vocabulary to agree on; or what a tokenizer file of the tokenizers library makes of
it. One more id ends each document, and what the tokenizer puts before a text begins it.

The shards are written into a directory next to the wanted one and renamed into place as a whole, so a reader finds all
of them or none, and any number of processes may prepare the same text at once: the first rename wins, the others use
it. The same command a second time reads nothing but the list of files. Torch-free.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import itertools
import json
import os
import re
import shutil
import stat
import sys
import unicodedata
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from slurm_train.config.data_kinds import kind_of
from slurm_train.data.documents import Document, Half, find_documents, split_documents
from slurm_train.data.file_kind import readable, require_content
from slurm_train.data.shards import (
    FORMAT,
    INDEX,
    ShardIndex,
    SplitIndex,
    Tokens,
    check_sizes,
    read_index,
    write_index,
    write_shards,
)
from slurm_train.errors import ConfigError, DataError
from slurm_train.rundir.files import fsync_directory, read_json
from slurm_train.rundir.removal import remove_tree
from slurm_train.trust import trusted_owners

TOKENIZER = "tokenizer.json"
BYTES = "bytes"
_NUM_BYTE_VALUES = 256
_TOKENIZER_CONFIG = "tokenizer_config.json"
# Of GPT-2 and its kin, Llama 2 and T5, Gemma, Llama 3, BERT.
_END_TOKENS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]")
_CUTS = re.compile(rb'"(truncation|padding)"\s*:\s*\{')
_HEAD_BYTES = 4096
_POST_PROCESSOR = b'"post_processor"'
"""Stands before the vocabulary, in which a token may be called so, too."""
_MOST_TEMPLATE_BYTES = 2**16
# Of a text: 16 MiB in all, read in about 0.1 s from a file server.
_BLOCK_BYTES = 4096
_NUM_BLOCKS = 4096
# Categories of Unicode: marks, controls, formats and separators.
_WITHOUT_FORM = ("Mn", "Me", "Cc", "Cf", "Zs", "Zl", "Zp")
# Documents of each half in which text without a token is looked for: where one is, others are.
_NUM_LOOKED_AT = 64
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTES_AT_ONCE = 4 * 2**20


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """How text becomes shards.

    Attributes:
        held_out: fraction of the files and rows to hold out, 0 <= held_out < 1.
        suffixes: endings that files in folders must have; empty takes all.
        text_column: of files with rows, the column that holds the text.
        tokenizer: a tokenizer.json of the tokenizers library, or a directory that has one; None encodes bytes.
        max_targets: tokens of a full shard; 64 Mi are 128 MiB on disk.

    Raises:
        DataError: the fraction is not below 1.
    """

    held_out: float = 0.1
    suffixes: tuple[str, ...] = ()
    text_column: str = "text"
    tokenizer: Path | None = None
    max_targets: int = 64 * 2**20

    def __post_init__(self) -> None:
        if not isinstance(self.held_out, (int, float)) or not 0 <= self.held_out < 1:
            raise DataError(
                f"the held-out fraction is {self.held_out}, it must be at least 0 and below 1",
                hint="0.1 holds out one file in ten; 0 holds out none",
            )


def prepare(inputs: Sequence[Path], *, out: Path, options: PrepareOptions) -> ShardIndex:
    """Makes the shards of files and folders, or finds them made.

    Args:
        inputs: files and folders of text.
        out: the directory of the shards; must not exist, be empty, or hold the shards of this same input.
        options: how to do it.

    Returns:
        The index of the shards in `out`.

    Raises:
        DataError: the input cannot be read or has no text, or `out` holds something else.
    """
    documents = find_documents(inputs, suffixes=options.suffixes)
    require_columns(documents, options.text_column)
    source = ", ".join(str(given) for given in inputs)
    return prepare_documents(documents, out=out, options=options, source=source)


def require_columns(documents: Sequence[Document], column: str) -> None:
    """Looks at the first row of the first file of each kind.

    Raises:
        DataError: one lacks the column, or a column is named and no file has any.
    """
    first = {document.kind.form: document for document in reversed(documents) if document.has_rows}
    for document in first.values():
        document.require_column(column)
    if not first and column != PrepareOptions().text_column:
        raise DataError(
            f"the column {column!r} was asked for, and {documents[0].path} is text without columns",
            hint="leave it out; files with rows are known by .jsonl, .json, .csv, .tsv, .parquet and .arrow",
        )


def notes_of(index: ShardIndex) -> list[str]:
    """Returns lines about text that is not as it should be."""
    notes = []
    for name, split in index.splits.items():
        if split.empty:
            notes.append(f"{name}: {split.empty} rows or files without text were passed over")
        if split.replaced:
            notes.append(
                f"{name}: {split.replaced} places are no UTF-8 and became U+FFFD; convert such files, e.g. "
                "iconv -f latin1 -t utf-8"
            )
        if split.unknown:
            notes.append(
                f"{name}: {split.unknown} of {split.targets} tokens stand for text that the tokenizer does not know; "
                "take one that was made for such text, or bytes"
            )
        if split.lost:
            num_looked_at = min(split.documents, _NUM_LOOKED_AT)
            notes.append(
                f"{name}: {split.lost} characters of the first {num_looked_at} documents are in no token: the "
                "tokenizer leaves out what it does not know; take one that was made for such text, or bytes"
            )
    return notes


def ends_in_words(index: ShardIndex, options: PrepareOptions) -> str:
    """Returns what begins and ends a document, and whether the tokenizer would have it otherwise."""
    if options.tokenizer is None:
        return f"{index.end_of_document} ends a document"
    tokenizer = tokenizer_file(options.tokenizer)
    encoding = FileEncoding(tokenizer, end_of_document=index.end_of_document, begin_of_document=index.begin_of_document)
    words = f"{encoding.name_of(index.end_of_document)} ends a document"
    if index.begin_of_document:
        words = f"{' '.join(map(encoding.name_of, index.begin_of_document))} begins and {words}"
    return words


def note_of_begin(index: ShardIndex, options: PrepareOptions) -> str | None:
    """Returns a line about shards of an earlier version, which has left out what the tokenizer puts before a text."""
    if options.tokenizer is None or index.begin_of_document:
        return None
    tokenizer = tokenizer_file(options.tokenizer)
    if not _begin_tokens(tokenizer, tokenizer.read_bytes()):
        return None
    encoding = FileEncoding(tokenizer)
    if not encoding.begin_of_document:
        return None
    return (
        f"the tokenizer begins texts with {' '.join(map(encoding.name_of, encoding.begin_of_document))}, and documents "
        "here do not, as an earlier version has made them: another directory (--out, data.cache) gets them with it"
    )


def prepare_documents(documents: Sequence[Document], *, out: Path, options: PrepareOptions, source: str) -> ShardIndex:
    """Makes the shards of documents, or finds them made; see `prepare`."""
    outside = _outside_digest(documents, options)
    digest = _input_digest(documents, outside)
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file", hint="name a directory that does not exist yet")
    if not _is_filled(out):
        directory = out.with_name(f".{out.name}.{uuid.uuid4().hex}.tmp")
        try:
            directory.mkdir(parents=True)
            index = _write_shards(documents, directory, options=options, source=source, digest=digest)
            directory.rename(out)
            fsync_directory(out.parent)
            return index
        except OSError as err:
            if not _is_filled(out):  # else another process was faster
                hint = "name another directory: data.path=DIR, or --out DIR of `prepare`"
                raise DataError(f"{out} cannot be made: {err.strerror}", hint=hint) from err
        finally:
            with contextlib.suppress(OSError):
                remove_tree(directory)
    if not (out / INDEX).exists():
        raise DataError(
            f"{out} is not empty and holds no token shards", hint="name a directory that does not exist yet"
        )
    index = read_index(out)
    check_sizes(out, index)
    # Of shards from before their text was part of the digest, names, sizes and times must do.
    is_same = index.input_digest in (digest, outside)
    if not is_same:
        earlier = _outside_digest(documents, options, has_begin=False)
        is_same = index.input_digest in (earlier, _input_digest(documents, earlier))
    if not is_same:
        raise DataError(
            f"{out} holds the shards of another input or other options (made from {index.source})",
            hint=f"name another directory, or remove {out} first",
        )
    return index


class Packing:
    """Text files that are encoded and packed when they are used for the first time; `prepare` does it ahead of time.

    Args:
        path: files and folders, see `find_documents`; one or several.
        text_column: column of the text, in files with rows.
        tokenizer: a tokenizer.json of the tokenizers library, or a directory that has one; None encodes bytes.
        held_out: fraction of files and rows to hold out.
        cache: the tokens of each input, and of each way to encode it, get a directory of their own here; None takes
            ~/.cache/slurm_train/packed.
        cwd: where relative paths start from.

    Raises:
        ConfigError: `path` is neither a path nor a list of them.
        DataError: the text or the tokenizer is not there.
    """

    def __init__(
        self,
        path: str | Sequence[str],
        *,
        text_column: str = "text",
        tokenizer: str | None = None,
        held_out: float = 0.1,
        cache: str | None = None,
        cwd: Path = Path(),
    ) -> None:
        inputs = [path] if isinstance(path, str) else path
        if not isinstance(inputs, Sequence) or not all(isinstance(name, str) for name in inputs):
            raise ConfigError(
                f"data.path must be a path or a list of paths, got {path!r}", hint="for example data.path=corpus.jsonl"
            )
        self._source = ", ".join(inputs)
        self._documents = find_documents([cwd / Path(name).expanduser() for name in inputs])
        # A column that is missing is seen before a job is submitted.
        require_columns(self._documents, text_column)
        self._options = PrepareOptions(
            held_out=held_out,
            text_column=text_column,
            tokenizer=None if tokenizer is None else cwd / Path(tokenizer).expanduser(),
        )
        root = cwd / Path(cache or "~/.cache/slurm_train/packed").expanduser()
        outside, earlier = (
            _outside_digest(self._documents, self._options, has_begin=has_begin) for has_begin in (True, False)
        )
        self.directory = _place_of_own(root / _input_digest(self._documents, outside))
        if earlier == outside or _is_filled(self.directory):
            return
        made_earlier = _place_of_own(root / _input_digest(self._documents, earlier))
        # Runs that have begun with what an earlier version has made go on with the same samples.
        if _is_filled(made_earlier):
            self.directory = made_earlier

    def make(self) -> Path:
        """Returns the directory of the shards; one process makes them, others wait for it.

        Raises:
            DataError: the text cannot be read, or the shards cannot be written.
        """
        try:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            # Others may write to the folder of a group: no link of theirs is followed.
            lock = os.open(self.directory.with_suffix(".lock"), os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            try:
                # Saves work, and nothing depends on it: where locks do not work, several do the same.
                with contextlib.suppress(OSError):
                    fcntl.flock(lock, fcntl.LOCK_EX)
                is_new = not _is_filled(self.directory)
                index = prepare_documents(
                    self._documents, out=self.directory, options=self._options, source=self._source
                )
            finally:
                os.close(lock)
            notes = notes_of(index) if is_new else []
            if is_new and index.begin_of_document:
                notes.append(ends_in_words(index, self._options))
            _say([*notes, note_of_begin(index, self._options)])
        except OSError as err:
            raise DataError(
                f"{self.directory} cannot be made: {err.strerror}", hint="name another directory: data.cache=DIR"
            ) from err
        return self.directory


def _say(lines: Sequence[str | None]) -> None:
    """Prints lines that this process has not printed yet: each split is read by itself."""
    for line in lines:
        if line is not None and line not in _SAID:
            _SAID.add(line)
            print(line, file=sys.stderr)


_SAID: set[str] = set()


def _place_of_own(directory: Path) -> Path:
    """Returns where the shards of an input lie: under another name where a stranger has taken this one.

    Who may write to the cache of a group is trusted by whoever names it. A folder that everybody may write to is not
    such a cache: what another user has made there is left alone.
    """
    try:
        is_for_all = bool(directory.parent.stat().st_mode & stat.S_IWOTH)
        is_foreign = directory.lstat().st_uid not in trusted_owners()
    except FileNotFoundError:
        return directory
    return directory.with_name(f"{directory.name}-{os.geteuid()}") if is_for_all and is_foreign else directory


def _is_filled(out: Path) -> bool:
    return out.is_dir() and any(out.iterdir())


def _write_shards(
    documents: Sequence[Document], directory: Path, *, options: PrepareOptions, source: str, digest: str
) -> ShardIndex:
    tokenizer = None if options.tokenizer is None else tokenizer_file(options.tokenizer)
    encoding: Encoding = ByteEncoding() if tokenizer is None else FileEncoding(tokenizer)
    if tokenizer is not None:
        shutil.copyfile(tokenizer, directory / TOKENIZER)
    index = ShardIndex(
        source=source,
        input_digest=digest,
        tokenizer=BYTES if tokenizer is None else TOKENIZER,
        dtype="<u2" if encoding.vocab_size <= 2**16 else "<u4",
        vocab_size=encoding.vocab_size,
        end_of_document=encoding.end_of_document,
        splits={},
        begin_of_document=encoding.begin_of_document,
    )
    begin = np.array(index.begin_of_document, dtype="<u4")
    end = np.array([index.end_of_document], dtype="<u4")
    halves = split_documents(documents, held_out=options.held_out)
    for split, half in zip(("train", "heldout"), halves, strict=True):
        texts = _Counted(half, column=options.text_column)
        before = encoding.faults()
        pieces = (piece for tokens in encoding.encode(texts) for piece in (begin, tokens, end))
        shards = write_shards(
            directory, split, pieces, dtype=index.dtype, max_targets=options.max_targets, first=index.end_of_document
        )
        index.splits[split] = SplitIndex(
            documents=texts.count,
            bytes=texts.num_bytes,
            targets=sum(shard.tokens - 1 for shard in shards),
            shards=shards,
            empty=texts.num_empty,
            **{name: count - before[name] for name, count in encoding.faults().items()},
        )
    if not index.splits["train"].documents:
        raise DataError(
            f"{source} has no text to train on: all of its {index.splits['train'].empty} rows and files are empty",
            hint="name another column: data.text_column=NAME, of `prepare` --text-column NAME",
        )
    write_index(directory, index)
    return index


class _Counted:
    """The texts of a half, counted as they are read."""

    def __init__(self, half: Half, *, column: str) -> None:
        self._half = half
        self._column = column
        self.count = self.num_bytes = self.num_empty = 0

    def __iter__(self) -> Iterator[bytes]:
        for document, rows in self._half:
            for text in document.texts(rows, column=self._column):
                if not text:
                    self.num_empty += 1
                    continue
                self.count += 1
                self.num_bytes += len(text)
                yield text


def _input_digest(documents: Sequence[Document], outside: str) -> str:
    """Tells this input and these options from others by what `_outside_digest` sees, and by the text itself.

    Names, sizes and times of two texts may be alike (`cp -p`, archives with normalised times). Of more than 16 MiB of
    text, blocks at equal distances are read, so that 100 GB take no longer, and the beginning of each file.

    Raises:
        DataError: a file cannot be read.
    """
    hasher = xxhash.xxh3_128(outside.encode())
    distance = max(_BLOCK_BYTES, sum(document.num_bytes for document in documents) // _NUM_BLOCKS)
    for document in documents:
        with readable(document.path), document.path.open("rb", buffering=0) as file:
            for position in range(document.start, document.stop, distance):
                file.seek(position)
                hasher.update(file.read(min(_BLOCK_BYTES, document.stop - position)))
    return hasher.hexdigest()


def _outside_digest(documents: Sequence[Document], options: PrepareOptions, *, has_begin: bool = True) -> str:
    """Returns what names, sizes and times of the files, and the options, are told from others by.

    Args:
        documents: the input.
        options: how it becomes shards.
        has_begin: documents begin with what the tokenizer puts there; earlier versions had none.
    """
    made_by = BYTES
    if options.tokenizer is not None:
        made_by = _tokenizer_digest(tokenizer_file(options.tokenizer), has_begin=has_begin)
    column = options.text_column if any(document.has_rows for document in documents) else ""
    hasher = xxhash.xxh3_128(f"{FORMAT} {options.held_out} {options.max_targets} {made_by} {column}\n".encode())
    for document in documents:
        line = f"{document.name}\0{document.start}\0{document.stop}\0{document.modified_ns}\n"
        hasher.update(line.encode(errors="surrogateescape"))
    return hasher.hexdigest()


def _tokenizer_digest(path: Path, *, has_begin: bool) -> str:
    """Tells this tokenizer from others that would give other ids.

    Raises:
        DataError: it cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as err:
        raise DataError(
            f"the tokenizer {path} cannot be read: {err.strerror}", hint="give a tokenizer.json, or its directory"
        ) from err
    digest = xxhash.xxh3_128_hexdigest(data)
    # A model and what was tuned from it often share all but the end token.
    end_token = _end_token_beside(path)
    if end_token is not None:
        digest += f" {end_token}"
    # Shards that were made before these were switched off are others.
    if _CUTS.search(data[:_HEAD_BYTES]):
        digest += " whole"
    begin = _begin_tokens(path, data) if has_begin else []
    return " begins ".join((digest, *begin))


def _end_token_beside(path: Path) -> str | None:
    """Returns the end token that the configuration next to a tokenizer names, None where it names none."""
    return _named_beside(path, "eos_token")


def _named_beside(path: Path, name: str) -> str | None:
    """Returns a special token that the configuration next to a tokenizer names, None where it names none."""
    token = (read_json(path.with_name(_TOKENIZER_CONFIG)) or {}).get(name)
    return token.get("content") if isinstance(token, dict) else token


def _unknown_token(path: Path) -> str:
    """Returns the name of the token that a tokenizer gives for what it does not know, "" where it has none."""
    model = (read_json(path) or {}).get("model") or {}
    if isinstance(model.get("unk_id"), int):  # of Unigram, whose vocabulary is a list
        name, _ = model["vocab"][model["unk_id"]]
        return str(name)
    return str(model.get("unk_token") or "")


def _num_uncovered(text: str, offsets: Sequence[tuple[int, int]]) -> int:
    """Returns how many characters of a text are in no token.

    White space, marks that a normalizer joins with their letter, and characters without a form of their own are left
    aside.
    """
    is_covered = np.zeros(len(text), dtype=bool)
    for start, stop in offsets:
        is_covered[start:stop] = True
    uncovered = (text[place] for place in np.flatnonzero(~is_covered))
    return sum(unicodedata.category(char) not in _WITHOUT_FORM for char in uncovered)


def _begin_tokens(path: Path, data: bytes) -> list[str]:
    """Returns the names of the tokens that a tokenizer puts before a text: by its template, or by its configuration.

    The file is not read by its library, which a login node may not have, and its vocabulary not at all.

    Args:
        path: of the file; `add_bos_token` may stand in the configuration next to it.
        data: its content.
    """
    start = data.find(_POST_PROCESSOR)
    template: Any = None
    if start >= 0:
        text = data[start + len(_POST_PROCESSOR) :][:_MOST_TEMPLATE_BYTES].decode(errors="replace").lstrip(" \n\r\t:")
        with contextlib.suppress(ValueError):
            template = json.JSONDecoder().raw_decode(text)[0]
    names = _before_a_text(template)
    begin = _named_beside(path, "bos_token")
    adds = (read_json(path.with_name(_TOKENIZER_CONFIG)) or {}).get("add_bos_token")
    if adds is True and begin is not None and begin not in names:
        return [begin, *names]
    return [name for name in names if adds is not False or name != begin]


def _before_a_text(processor: Any) -> list[str]:
    """Returns the names of the tokens that a post-processor of the tokenizers library puts before a single text."""
    if not isinstance(processor, dict):
        return []
    kind = processor.get("type")
    if kind == "Sequence":
        return [name for part in processor.get("processors", ()) for name in _before_a_text(part)]
    if kind in ("BertProcessing", "RobertaProcessing"):
        return [processor["cls"][0]]
    pieces = processor.get("single", ()) if kind == "TemplateProcessing" else ()
    before = itertools.takewhile(lambda piece: "SpecialToken" in piece, pieces)
    return [piece["SpecialToken"]["id"] for piece in before]


class ByteEncoding:
    """Each byte is its own id; 256 ends a document."""

    vocab_size = _NUM_BYTE_VALUES + 1
    end_of_document = _NUM_BYTE_VALUES
    begin_of_document: tuple[int, ...] = ()

    def faults(self) -> dict[str, int]:
        """Returns how often text was not taken as it is: never."""
        return {}

    def encode(self, texts: Iterable[bytes]) -> Iterator[Tokens]:
        """Yields the bytes of each text as uint16 (n,)."""
        return (np.frombuffer(text, dtype=np.uint8).astype("<u2") for text in texts)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text; bytes that are no UTF-8 become the replacement character."""
        pieces = (b"\n\n" if token == _NUM_BYTE_VALUES else bytes([token]) for token in tokens)
        return b"".join(pieces).decode(errors="replace")


class FileEncoding:
    """A `tokenizer.json` of the tokenizers library.

    What ends a document is the tokenizer's own end token: `eos_token` of the `tokenizer_config.json` next to the file,
    else a special token with a customary name. A tokenizer without one gets one id more. Documents are encoded whole: a
    length or a padding that was saved in the file is left aside.

    What begins a document is what the tokenizer puts before a text: by its template, or by `add_bos_token` of that
    `tokenizer_config.json`; nothing where that is the end token, which stands there already.

    Args:
        path: the file.
        end_of_document: the id that was chosen when the text was encoded; None chooses.
        begin_of_document: likewise the ids before each document.

    Raises:
        DataError: the library is missing, or the file was not downloaded or is none of its own.
    """

    def __init__(
        self, path: Path, *, end_of_document: int | None = None, begin_of_document: tuple[int, ...] | None = None
    ) -> None:
        if path.is_file():
            require_content(path)
        try:
            tokenizers: Any = importlib.import_module("tokenizers")
        except ImportError as err:
            raise DataError(
                f"the tokenizer {path} needs the tokenizers library, which is not installed",
                hint="pip install 'slurm-train[data]', or leave the tokenizer out to train on bytes",
            ) from err
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as err:  # the library raises bare Exception for every kind of bad file
            raise DataError(f"{path} is not a tokenizer file: {err}", hint="give the library's tokenizer.json") from err
        # Whoever has trained with it may have saved these with it: documents would be cut, and filled up with padding.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._faults = {"replaced": 0, "unknown": 0, "lost": 0}
        self._unknown = self._tokenizer.token_to_id(_unknown_token(path))
        num_ids = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        if end_of_document is None:
            names = [_end_token_beside(path), *_END_TOKENS]
            token_ids = (self._tokenizer.token_to_id(name) for name in names if name)
            end_of_document = next((token for token in token_ids if token is not None), num_ids)
        self.end_of_document = end_of_document
        self.vocab_size = max(num_ids, end_of_document + 1)
        if begin_of_document is None:
            names_before = _begin_tokens(path, path.read_bytes())
            ids_before = [self._tokenizer.token_to_id(name) for name in names_before]
            begin_of_document = tuple(token for token in ids_before if token not in (None, end_of_document))
        self.begin_of_document = begin_of_document

    def name_of(self, token: int) -> str:
        """Returns a token in words, e.g. "<eos> (2)"; the id alone where the tokenizer has none."""
        name = self._tokenizer.id_to_token(token)
        return str(token) if name is None else f"{name} ({token})"

    def faults(self) -> dict[str, int]:
        """Returns how often text was not taken as it is, so far; names are those of `SplitIndex`."""
        return dict(self._faults)

    def encode(self, texts: Iterable[bytes]) -> Iterator[Tokens]:
        """Yields the ids of each text as uint32 (n,); what is no UTF-8 is replaced."""
        self._num_looked_at = 0
        some: list[str] = []
        size = 0
        for text in texts:
            decoded = text.decode(errors="replace")
            self._faults["replaced"] += decoded.count(_REPLACEMENT) - text.count(_REPLACEMENT.encode())
            some.append(decoded)
            size += len(text)
            if size >= _BYTES_AT_ONCE:
                yield from self._encode_some(some)
                some = []
                size = 0
        yield from self._encode_some(some)

    def _encode_some(self, texts: list[str]) -> Iterator[Tokens]:
        # Many at a time: the library spreads them over the cores.
        for text, encoding in zip(texts, self._tokenizer.encode_batch(texts, add_special_tokens=False), strict=True):
            if self._num_looked_at < _NUM_LOOKED_AT:
                self._num_looked_at += 1
                self._faults["lost"] += _num_uncovered(text, encoding.offsets)
            ids = np.array(encoding.ids, dtype="<u4")
            if self._unknown is not None:
                self._faults["unknown"] += int((ids == self._unknown).sum())
            yield ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text, document by document."""
        documents: list[list[int]] = [[]]
        for token in tokens:
            if token == self.end_of_document:
                documents.append([])
            else:
                documents[-1].append(token)
        return "\n\n".join(str(self._tokenizer.decode(document)) for document in documents)


Encoding = ByteEncoding | FileEncoding
"""A way from text to token ids; `vocab_size` is the number of ids, `end_of_document` the one after each document, and
`begin_of_document` those before it."""


def end_of_document(data: Mapping[str, Any]) -> int | None:
    """Returns the id that ends a document in the text of a `data` section; None where it is not known."""
    path = data.get("path")
    text = read_json(Path(path) / INDEX) if isinstance(path, str) else None
    end = (text or {}).get("end_of_document")
    if isinstance(end, int):
        return end
    is_bytes = kind_of(data).packs and not data.get("tokenizer")
    return ByteEncoding.end_of_document if is_bytes else None


def tokenizer_file(path: Path) -> Path:
    """Returns the tokenizer file that a path names: itself, or the one in the directory of a model."""
    directory = path.parent if path.name == "config.json" else path
    return directory / TOKENIZER if directory.is_dir() else path
