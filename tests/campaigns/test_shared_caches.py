"""The campaign once over, and proof that it can fail."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from slurm_train.assets import read_template
from slurm_train.data import prepare
from slurm_train.supervise import asking
from tests.campaigns import shared_caches
from tests.campaigns.shared_caches import CACHES, DAMAGES, Site, all_pairs, private_folder, try_one

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(os.geteuid() != 0, reason="it takes root to be several users"),
    pytest.mark.full,
]


def problems_of(cache: str, damage: str, folder: Path, *, seed: int = 1) -> list[str]:
    folder = folder / str(seed)
    folder.mkdir()
    with private_folder(folder) as place:
        return try_one(Site(place), CACHES[cache], DAMAGES[damage], random.Random(seed))[0]


@pytest.mark.parametrize(("cache", "damage"), all_pairs())
def test_a_damaged_cache_is_made_anew_or_refused_by_name(cache: str, damage: str, tmp_path: Path) -> None:
    assert problems_of(cache, damage, tmp_path) == []


SEALED = """[ -d "$place" ] && [ -s "$seal" ] && [ "$(lost)" = "$(tail -n 1 "$seal")" ]"""


def _program_without_seal(name: str) -> str:
    program = read_template(name)
    assert SEALED in program
    return program.replace(SEALED, '[ -d "$place" ]')


@pytest.mark.parametrize(
    ("module", "name", "left_out", "cache", "damage"),
    [
        (asking, "read_template", _program_without_seal, "packages on a node", "emptied"),
        (shared_caches, "require_sealed", lambda _: None, "copy of the code", "emptied"),
        (prepare, "_place_of_own", lambda directory: directory, "prepared text", "a stranger's"),
    ],
)
def test_a_check_that_is_left_out_is_found(
    module: object, name: str, left_out: Any, cache: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert left_out != getattr(module, name)
    monkeypatch.setattr(module, name, left_out)
    # Which files are damaged is drawn among all; compiled ones, which are not always there, may be the only ones.
    assert any(problems_of(cache, damage, tmp_path, seed=seed) for seed in range(5))
