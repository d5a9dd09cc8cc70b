"""Inputs that were exchanged for others with the same name, size and time: each must be taken for another one.

Each trial draws a kind of input (texts for the cache of tokens, a tokenizer, installed packages, a person's own data
set), makes it, changes bytes at a random place, and puts sizes and times back. What the product takes for its identity
must differ then; and it must be the same where nothing but the copy is new.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from slurm_train.data.mapstyle import MapStyleSource
from slurm_train.data.prepare import Packing
from slurm_train.rundir.events import is_same_data
from slurm_train.supervise import staging
from tests.campaigns.record import Tally

_TOKENIZER = '{"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}}}'


class Rows(Dataset[Any]):
    """Numbers in a file, one in each line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return len(self.path.read_text().splitlines())

    def __getitem__(self, number: int) -> int:
        return int(self.path.read_text().splitlines()[number])


def _texts(folder: Path, dice: random.Random) -> list[Path]:
    names = ["corpus.txt", *(f"part_{number}.txt" for number in range(dice.randint(0, 4)))]
    for name in names:
        (folder / name).write_text("".join(dice.choices("abc \n", k=dice.choice((20, 5_000, 40_000)))))
    return [folder / name for name in names]


def _digest_of_texts(folder: Path) -> str:
    return Packing(str(folder), cache=str(folder.parent / "cache")).directory.name


def _tokenizer(folder: Path, _: random.Random) -> list[Path]:
    (folder / "corpus.txt").write_text("a b")
    (folder / "tokenizer.json").write_text(_TOKENIZER)
    return [folder / "tokenizer.json"]


def _digest_with_tokenizer(folder: Path) -> str:
    text = str(folder / "corpus.txt")
    return Packing(text, tokenizer=str(folder / "tokenizer.json"), cache=str(folder.parent / "cache")).directory.name


def _packages(folder: Path, dice: random.Random) -> list[Path]:
    package = folder / "site-packages" / "mine"
    package.mkdir(parents=True)
    modules = [package / f"module_{number}.py" for number in range(dice.randint(1, 5))]
    for module in modules:
        module.write_text(f"x = {dice.randrange(10)}\n")
    return modules


def _digest_of_packages(folder: Path) -> str:
    return staging._digest(staging._files([str(folder / "site-packages")]))


def _rows(folder: Path, dice: random.Random) -> list[Path]:
    rows = [f"{dice.randrange(10_000, 99_999)}" for _ in range(dice.choice((1, 8, 200)))]
    (folder / "rows.txt").write_text("\n".join(rows))
    return [folder / "rows.txt"]


def _fingerprint_of_rows(folder: Path) -> str:
    return MapStyleSource(Rows(folder / "rows.txt")).fingerprint()


def _change_somewhere(path: Path, dice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    place = dice.randrange(len(data))
    data[place] = ord("x") if data[place] != ord("x") else ord("y")
    path.write_bytes(data)


def _change_all_rows(path: Path, dice: random.Random) -> None:
    by = dice.randrange(1, 9)
    path.write_text("\n".join(f"{10_000 + (int(row) - 10_000 + by) % 89_999}" for row in path.read_text().split()))


Kind = tuple[Callable[[Path, random.Random], list[Path]], Callable[[Path], str], Callable[[Path, random.Random], None]]
_KINDS: dict[str, Kind] = {
    "texts": (_texts, _digest_of_texts, _change_somewhere),
    "a tokenizer": (_tokenizer, _digest_with_tokenizer, _change_somewhere),
    "installed packages": (_packages, _digest_of_packages, _change_somewhere),
    "an own data set": (_rows, _fingerprint_of_rows, _change_all_rows),
}


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Exchanges so many inputs."""
    dice = random.Random(seed)
    kinds: Counter[str] = Counter()
    for number in range(trials):
        name = dice.choice(list(_KINDS))
        make, identity, change = _KINDS[name]
        place = folder / f"trial_{number}"
        place.mkdir(parents=True)
        with tally.trial(f"trial {number}, {name}") as problems:
            files = make(place, dice)
            first = identity(place)
            if identity(place) != first:
                problems.append("nothing has changed, and the identity is another")
            changed = dice.choice(files)
            times = changed.stat()
            change(changed, dice)
            os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))
            if changed.stat().st_size != times.st_size:
                problems.append("the trial has changed the size")
            if is_same_data(identity(place), first):
                problems.append(f"{changed.name} has changed, and the identity is the same")
            kinds[name] += 1
        shutil.rmtree(place)
    return {"exchanged": ", ".join(f"{name} {count}" for name, count in kinds.most_common())}
