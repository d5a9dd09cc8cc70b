"""The verb `prepare`: text files to token shards. Torch-free."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slurm_train.data.prepare import PrepareOptions, prepare
from slurm_train.data.shards import ShardIndex
from slurm_train.errors import EXIT_DONE, SlurmTrainError

_EXAMPLES = """examples:
  python -m slurm_train prepare books/ --suffix .txt --out data/books
  python -m slurm_train data=text data.path=data/books
"""


def main(words: list[str]) -> int:
    """Prepares text and prints the directory of the shards on stdout.

    Args:
        words: what follows `prepare` on the command line.

    Returns:
        The exit code.
    """
    asked = _parser().parse_args(words)
    try:
        options = PrepareOptions(held_out=asked.held_out, suffixes=tuple(asked.suffix), tokenizer=asked.tokenizer)
        index = prepare(asked.inputs, out=asked.out, options=options)
    except SlurmTrainError as err:
        print(f"error: {err}", file=sys.stderr)
        return err.exit_code
    print(_summary(index), file=sys.stderr)
    print(asked.out)
    return EXIT_DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m slurm_train prepare",
        description="Turns text into memory-mapped token shards, split by file into train and held-out.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("inputs", nargs="+", type=Path, metavar="INPUT", help="a file, or a folder to search")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory of the shards, made here")
    parser.add_argument("--held-out", type=float, default=0.1, metavar="FRACTION", help="of the files (default 0.1)")
    parser.add_argument("--suffix", action="append", default=[], metavar=".txt", help="take only such files of folders")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="JSON", help="tokenizer.json; without it bytes are the tokens"
    )
    return parser


def _summary(index: ShardIndex) -> str:
    lines = [f"{index.source}: {index.vocab_size} token ids ({index.tokenizer})"]
    for name, split in index.splits.items():
        lines.append(
            f"  {name:8} {split.documents:>8} documents {split.bytes:>14,} bytes {split.targets:>14,} tokens "
            f"in {len(split.shards)} shards"
        )
    return "\n".join(lines)
