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


def make_run(root: Path, name: str, run_id: str, *, job_ids: tuple[str, ...] = (), age_s: float = 0.0) -> None:
    run = RunDirectory(root / name / run_id)
    run.path.mkdir(parents=True)
    run.config.write_text("seed: 0\n")
    if job_ids:
        run.job.write_text(json.dumps({"job_ids": list(job_ids), "submit_time_unix_s": 5.0}))
    touched = 1_000_000_000 - age_s
    os.utime(run.path, (touched, touched))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_run(tmp_path, "gpt", "3f9a1c07", job_ids=("12", "15"), age_s=10)
    make_run(tmp_path, "gpt", "3f9abbbb", age_s=20)
    make_run(tmp_path, "cnn", "77aa0000", job_ids=("20_3",), age_s=5)
    (tmp_path / "cnn" / "not_a_run").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", "77aa0000 3f9a1c07 3f9abbbb"),
        ("gpt", "3f9a1c07 3f9abbbb"),
        ("gpt/3f9abbbb", "3f9abbbb"),
        ("3f9ab", "3f9abbbb"),
        ("12", "3f9a1c07"),
        ("20_3", "77aa0000"),
        ("PATH", "77aa0000"),
        ("cnn 77aa0000 gpt", "77aa0000 3f9a1c07 3f9abbbb"),
    ],
)
def test_runs_are_known_by_name_id_beginning_job_or_path_newest_first(words: str, expected: str, root: Path) -> None:
    typed = words.replace("PATH", str(root / "cnn" / "77aa0000")).split()
    assert [run.run_id for run in find_runs(root, typed)] == expected.split()


@pytest.mark.parametrize("ending", [".old", "x", "_backup"])
def test_a_whole_id_means_its_run_also_beside_one_that_was_moved_aside(ending: str, root: Path) -> None:
    make_run(root, "gpt", f"3f9a1c07{ending}", age_s=1)
    for word in ("3f9a1c07", "gpt/3f9a1c07"):
        assert [run.run_id for run in find_runs(root, [word])] == ["3f9a1c07"]
    with pytest.raises(RunError, match="is the beginning of several run ids"):
        find_runs(root, ["3f9a1c"])


@pytest.mark.parametrize("word", ["3f9", "11", "20", "/nowhere"])
def test_a_word_that_names_nothing_is_answered_with_what_there_is(word: str, root: Path) -> None:
    with pytest.raises(RunError, match=f"no run matches {word!r} below {root}") as caught:
        find_runs(root, [word])
    assert caught.value.hint.startswith("runs there: cnn/77aa0000, gpt/3f9a1c07, gpt/3f9abbbb")


def test_one_run_is_the_newest_of_what_matches(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_run(root, "gpt").run_id == "3f9a1c07"
    assert find_run(root, None).run_id == "77aa0000"
    with pytest.raises(RunError, match="'3f9a' is the beginning of several run ids: 3f9a1c07, 3f9abbbb"):
        find_run(root, "3f9a")
    with pytest.raises(RunError, match="there is no run below"):
        find_run(root / "nowhere", None)
    monkeypatch.chdir(root / "gpt")
    assert find_run(Path("elsewhere"), "3f9abbbb").run_id == "3f9abbbb"


def test_a_run_is_found_under_the_path_that_it_was_started_with(tmp_path: Path) -> None:
    real, link = tmp_path / "auto" / "runs", tmp_path / "home"
    real.mkdir(parents=True)
    link.symlink_to("auto")
    spelled = link / "runs" / "name" / "0123456789ab"
    spelled.mkdir(parents=True)
    (spelled / "config.yaml").write_text("{}\n")
    (spelled / "plan.json").write_text(json.dumps({"path": str(spelled)}))
    for root in (real, link / "runs"):
        for words in ([], ["name"], ["0123456789ab"], [f"{real}/name/0123456789ab"]):
            assert find_runs(root, words) == [RunDirectory(spelled)]
    # The folder was moved: what is recorded is another place.
    (spelled / "plan.json").write_text(json.dumps({"path": str(tmp_path / "gone" / "name" / "0123456789ab")}))
    assert find_runs(link / "runs", []) == [RunDirectory(real / "name" / "0123456789ab")]


def test_a_run_that_is_removed_while_they_are_listed_is_left_out(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = lookup.change_times

    def remove_then_look(paths: Iterable[Path]) -> dict[Path, float]:
        found = list(paths)
        shutil.rmtree(root / "gpt", ignore_errors=True)
        return real(found)

    monkeypatch.setattr(lookup, "change_times", remove_then_look)
    assert [run.run_id for run in list_runs(root)] == ["77aa0000"]


HASH = "3f9a1c07b2e4" + 52 * "0"


def test_a_run_has_the_place_of_its_hash_unless_another_training_is_there(tmp_path: Path) -> None:
    place = RunDirectory(tmp_path / "gpt" / HASH[:12])
    assert run_of_hash(tmp_path, "gpt", HASH) == place
    place.path.mkdir(parents=True)
    # The same training, and one that was changed since its submission.
    for written in (HASH, "aaaa" + HASH[4:]):
        place.plan.write_text(json.dumps({"config_hash": written}))
        assert run_of_hash(tmp_path, "gpt", HASH) == place
    place.plan.write_text(json.dumps({"config_hash": HASH[:-1] + "1"}))
    with pytest.raises(ConfigError, match="is another training, whose id is the same by chance"):
        run_of_hash(tmp_path, "gpt", HASH)
