from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from slurm_train.errors import ConfigError, RunError
from slurm_train.rundir import lookup
from slurm_train.rundir.lookup import find_run, find_runs, list_runs, run_of_hash
from slurm_train.rundir.paths import RunDirectory


def make_run(root: Path, name: str, run_id: str, *, job_ids: tuple[str, ...] = (), age_s: float = 0.0) -> RunDirectory:
    run = RunDirectory(root / name / run_id)
    run.path.mkdir(parents=True)
    run.config.write_text("seed: 0\n")
    if job_ids:
        run.job.write_text(json.dumps({"job_ids": list(job_ids), "submit_time_unix_s": 5.0}))
    touched = 1_000_000_000 - age_s
    os.utime(run.path, (touched, touched))
    return run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_run(tmp_path, "gpt", "3f9a1c07", job_ids=("12", "15"), age_s=10)
    make_run(tmp_path, "gpt", "3f9abbbb", age_s=20)
    make_run(tmp_path, "cnn", "77aa0000", job_ids=("20_3",), age_s=5)
    (tmp_path / "cnn" / "not_a_run").mkdir()
    return tmp_path


def ids(runs: list[RunDirectory]) -> list[str]:
    return [run.run_id for run in runs]


def test_all_runs_newest_first(root: Path) -> None:
    assert ids(list_runs(root)) == ["77aa0000", "3f9a1c07", "3f9abbbb"]
    assert ids(find_runs(root, [])) == ["77aa0000", "3f9a1c07", "3f9abbbb"]
    assert list_runs(root / "nowhere") == []


WORDS = [
    ("cnn", ["77aa0000"]),
    ("gpt", ["3f9a1c07", "3f9abbbb"]),
    ("gpt/3f9abbbb", ["3f9abbbb"]),
    ("3f9a1c07", ["3f9a1c07"]),
    ("3f9ab", ["3f9abbbb"]),
    ("15", ["3f9a1c07"]),
    ("12", ["3f9a1c07"]),
    ("20_3", ["77aa0000"]),
]


@pytest.mark.parametrize(("word", "expected"), WORDS, ids=[word for word, _ in WORDS])
def test_a_run_is_known_by_name_id_beginning_or_job(word: str, expected: list[str], root: Path) -> None:
    assert ids(find_runs(root, [word])) == expected


def test_a_run_is_known_by_its_path(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root / "gpt")
    assert ids(find_runs(Path("elsewhere"), ["3f9abbbb"])) == ["3f9abbbb"]
    assert ids(find_runs(Path("elsewhere"), [str(root / "cnn" / "77aa0000")])) == ["77aa0000"]


def test_a_run_named_twice_comes_once(root: Path) -> None:
    assert ids(find_runs(root, ["cnn", "77aa0000", "gpt"])) == ["77aa0000", "3f9a1c07", "3f9abbbb"]


@pytest.mark.parametrize("word", ["nothing", "3f9", "11", "20", "/nowhere"])
def test_a_word_that_names_nothing_is_answered_with_what_there_is(word: str, root: Path) -> None:
    with pytest.raises(RunError) as caught:
        find_runs(root, [word])
    assert caught.value.message == f"no run matches {word!r} below {root}"
    assert caught.value.hint == "runs there: cnn/77aa0000, gpt/3f9a1c07, gpt/3f9abbbb; --root names another root"


def test_the_beginning_of_several_ids_is_refused(root: Path) -> None:
    with pytest.raises(RunError, match="'3f9a' is the beginning of several run ids: 3f9a1c07, 3f9abbbb"):
        find_runs(root, ["3f9a"])


def test_one_run_is_the_newest_of_what_matches(root: Path) -> None:
    assert find_run(root, "gpt").run_id == "3f9a1c07"
    assert find_run(root, None).run_id == "77aa0000"
    with pytest.raises(RunError, match="there is no run below"):
        find_run(root / "nowhere", None)


def test_a_run_that_is_removed_while_they_are_listed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gone", "here"):
        (tmp_path / "a" / name).mkdir(parents=True)
        (tmp_path / "a" / name / "config.yaml").touch()
    real = lookup.change_times

    def remove_then_look(paths: Iterable[Path]) -> dict[Path, float]:
        found = list(paths)
        shutil.rmtree(tmp_path / "a" / "gone", ignore_errors=True)
        return real(found)

    monkeypatch.setattr(lookup, "change_times", remove_then_look)
    assert [run.run_id for run in list_runs(tmp_path)] == ["here"]


HASH = "3f9a1c07b2e4" + 52 * "0"


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        ({}, "3f9a1c07b2e4"),
        ({"3f9a1c07b2e4": HASH}, "3f9a1c07b2e4"),
        ({"3f9a1c07b2e4": "aaaa" + HASH[4:]}, "3f9a1c07b2e4"),
    ],
    ids=["new", "there", "changed"],
)
def test_a_run_has_the_place_of_its_hash(there: dict[str, str], expected: str, tmp_path: Path) -> None:
    for run_id, full_hash in there.items():
        (tmp_path / run_id).mkdir()
        (tmp_path / run_id / "plan.json").write_text(json.dumps({"config_hash": full_hash}))
    assert run_of_hash(tmp_path, HASH).run_id == expected


def test_another_training_with_the_same_id_is_refused_as_such(tmp_path: Path) -> None:
    (tmp_path / HASH[:12]).mkdir()
    (tmp_path / HASH[:12] / "plan.json").write_text(json.dumps({"config_hash": HASH[:-1] + "1"}))
    with pytest.raises(ConfigError, match="is another training, whose id is the same by chance"):
        run_of_hash(tmp_path, HASH)
