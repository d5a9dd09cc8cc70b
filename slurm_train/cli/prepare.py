"""`prepare INPUT ... --out DIR`: turns text into memory-mapped token shards, train and held-out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slurm_train.cli.terminal import note
from slurm_train.code.hub import HubFiles, fetch_hub_files, pin_path
from slurm_train.data.prepare import PrepareOptions, ends_in_words, note_of_begin, notes_of, prepare
from slurm_train.errors import EXIT_DONE
from slurm_train.verbs import parse

_MUCH_MORE = 2.0
"""So many times the asked share is said."""


def main(words: Sequence[str]) -> int:
    """Prepares text, prints the directory of the shards on stdout and returns 0."""
    arguments = parse("prepare", words)
    tokenizer: Path | None = None
    if arguments.tokenizer:
        pinned: list[HubFiles] = []
        tokenizer = Path(pin_path("--tokenizer", arguments.tokenizer, "tokenizer", Path.cwd(), pinned))
        for files in pinned:
            note(f"--tokenizer: {files.words}")
        fetch_hub_files(pinned)
    options = PrepareOptions(
        held_out=arguments.held_out,
        suffixes=tuple(arguments.suffix),
        text_column=arguments.text_column,
        tokenizer=tokenizer,
    )
    index = prepare([Path(name) for name in arguments.inputs], out=Path(arguments.out), options=options)
    note(f"{index.source}: {index.vocab_size} token ids ({index.tokenizer}), {ends_in_words(index, options)}")
    for name, split in index.splits.items():
        note(
            f"  {name:8} {split.documents:>8} documents {split.bytes:>14,} bytes {split.targets:>14,} tokens "
            f"in {len(split.shards)} shards"
        )
    for line in filter(None, (*notes_of(index), note_of_begin(index, options))):
        note(line)
    held_out = index.splits["heldout"].targets if "heldout" in index.splits else 0
    share = held_out / max(sum(split.targets for split in index.splits.values()), 1)
    if share > _MUCH_MORE * arguments.held_out:
        note(
            f"{share:.0%} of the tokens are held out, and --held-out {arguments.held_out} was asked: whole files are, "
            "chosen by a hash of their names; of few files make one (`cat *.txt > all.txt`), whose end is held out then"
        )
    print(arguments.out)
    return EXIT_DONE
