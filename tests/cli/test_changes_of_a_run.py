"""The same command, or `resume`, with something changed: shown and refused before anything happens, or accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slurm_train.checkpoint.commit import Place
from slurm_train.checkpoint.manifest import CheckpointHeader, Manifest
from slurm_train.config.frozen import load_config, trained_settings
from slurm_train.errors import DataError, RunError
from slurm_train.rundir.events import read_changes
from slurm_train.rundir.paths import RunDirectory
from slurm_train.train.saving import Continuity, build_continuity

OWN = (
    "model._target_=mine.Model",
    "data._target_=mine.Data",
    "batch.global_size=96",
    "batch.local_size=3",
    "run.name=a",
)


def save(run: RunDirectory, step: int = 40, **changes: Any) -> Manifest:
    """Leaves a checkpoint of the run as it is configured now, without weights."""
    plan = json.loads(run.plan.read_text())
    size = plan["batch"]["global_size"]
    parts: dict[str, Any] = {"data": "d1", "num_samples": 100}
    continuity = build_continuity(run, load_config(run.config), global_size=size, **parts)
    facts: dict[str, Any] = {
        "step": step,
        "samples": step * size,
        "epoch": 0,
        "world_size": plan["world"]["size"],
        "mesh": {},
        "batch_plan": plan["batch"],
        "config_hash": run.run_id,
        "data_fingerprint": "d1",
        "torch_version": "",
        "attempt": 0,
        "extra": continuity.as_extra(),
    }
    header = CheckpointHeader(**(facts | changes))
    manifest = Manifest.of(header, {})
    place = Place(root=run.checkpoints, attempt=0)
    place.commit(place.open_staging(step), manifest)
    return manifest


@pytest.fixture
def run(shell: Any) -> RunDirectory:
    """A run on 4 x 8 ranks that has ended with a checkpoint of step 40."""
    (shell.folder / "mine.py").write_text("class Model: ...\nclass Data: ...\n")
    (shell.folder / "notes.md").write_text("notes")
    run: RunDirectory = shell.types("+cluster=4x8", *OWN).job_and_run[1]
    shell.slurm.account("4711", "CANCELLED by 0")
    (shell.slurm.folder / "submitted.sh").unlink()
    save(run)
    return run


def files_of(run: RunDirectory) -> dict[str, bytes]:
    return {str(path.relative_to(run.path)): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


REFUSED: list[tuple[tuple[str, ...], str, str]] = [
    (("optim.lr=1e-4",), "optim.lr  0.003 -> 0.0001", "optim.lr"),
    (("seed=1",), "seed  0 -> 1  (another order: some samples of this epoch come twice, others not at all)", "seed"),
    (("data.size=9", "optim.eps=1"), "optim.eps  1e-08 -> 1.0", "optim.eps,data.size"),
    (("batch.global_size=192",), "batch.global_size  96 -> 192", "batch.global_size"),
]


@pytest.mark.parametrize(("words", "row", "names"), REFUSED)
def test_what_changes_the_training_is_shown_and_refused(
    words: tuple[str, ...], row: str, names: str, shell: Any, run: RunDirectory
) -> None:
    before = files_of(run)
    done = shell.types("resume", run.run_id, *(f"+{w}" if w.startswith("data.") else w for w in words))
    assert (done.code, done.out) == (2, "")
    assert f"a/{run.run_id} has been trained up to step 40; from there on it would be trained differently" in done.err
    assert row in done.err and f"--accept {names};" in done.err
    assert shell.slurm.said("submitted.sh") is None and files_of(run) == before, "nothing happened"


def test_what_was_accepted_is_on_record_and_what_it_replaced_is_kept(shell: Any, run: RunDirectory) -> None:
    old = run.config.read_bytes()
    done = shell.types("resume", run.run_id, "optim.lr=1e-4", "train.log_every_steps=3", "--accept", "optim.lr")
    assert done.job_and_run[1] == run
    assert "train.log_every_steps: 10 -> 3 (does not change what is trained)" in done.err
    (change,) = read_changes(run)
    assert (change.number, change.step, change.config) == (1, 40, {"optim.lr": [0.003, 0.0001]})
    assert (run.before_change(1) / "config.yaml").read_bytes() == old
    assert load_config(run.config).optim.lr == 1e-4
    assert json.loads(run.plan.read_text())["lr"]["planned"] == 1e-4
    shell.slurm.account("4711", "CANCELLED by 0")
    assert shell.types("resume", run.run_id).code == 0, "accepted once is enough"


def test_a_log_interval_needs_nobodys_leave(shell: Any, run: RunDirectory) -> None:
    assert shell.types("resume", run.run_id, "train.log_every_steps=3").code == 0
    assert read_changes(run) == [] and load_config(run.config).train.log_every_steps == 3


SIZES = {"cluster=2x8": (16, 3, 2), "cluster=1x6": (6, 2, 8), "cluster=1x1": (1, 3, 32)}


@pytest.mark.parametrize("word", SIZES)
def test_another_size_keeps_the_global_batch_and_no_more_samples_on_a_rank(
    word: str, shell: Any, run: RunDirectory
) -> None:
    assert shell.types("resume", run.run_id, word, "cluster.partition=small").code == 0
    plan = json.loads(run.plan.read_text())
    found = (plan["world"]["size"], plan["batch"]["local_size"], plan["batch"]["accumulation"])
    assert found == SIZES[word] and plan["batch"]["global_size"] == 96
    script = shell.slurm.said("submitted.sh")
    assert f"--nodes={word[8]}" in script and "--partition=small" in script
    assert read_changes(run) == []


def test_a_global_batch_that_must_change_takes_the_learning_rate_along(shell: Any, run: RunDirectory) -> None:
    done = shell.types("resume", run.run_id, "cluster=1x7")
    assert done.code == 2 and "batch.global_size=96 cannot be split over 7 ranks" in done.err
    words = ("cluster=1x7", "batch.global_size=98", "optim.lr_retune=linear")
    assert shell.types("resume", run.run_id, *words).code == 2
    assert shell.types("resume", run.run_id, *words, "--accept", "batch.global_size,optim.lr_retune").code == 0
    plan = json.loads(run.plan.read_text())
    assert plan["lr"] == {
        "planned": pytest.approx(0.003 * 98 / 96),
        "configured": 0.003,
        "retune": "linear",
        "tuned_for_global_size": 96,
    }


def test_the_weights_of_a_shipped_model_do_not_fit_another_width(shell: Any) -> None:
    run = shell.types("+cluster=4x8").job_and_run[1]
    shell.slurm.account("4711", "CANCELLED by 0")
    save(run)
    done = shell.types("resume", run.run_id, "model.width=320", "--accept", "config")
    assert done.code == 2 and "do not fit another shape of the model" in done.err
    assert "model.width  160 -> 320" in done.err


def test_changed_code_is_shown_by_file_and_taken_when_accepted(shell: Any, run: RunDirectory) -> None:
    (shell.folder / "mine.py").write_text("class Model: ...\nclass Data:\n    size = 1\n")
    (shell.folder / "new.py").write_text("x = 1\n")
    (shell.folder / "notes.md").write_text("other notes")
    done = shell.types("+cluster=4x8", *OWN)
    assert done.code == 2 and "code  mine.py: +2 -1" in done.err and "code  new.py: new, +1 -0" in done.err
    assert "notes.md" not in done.err and "--accept code;" in done.err
    assert shell.slurm.said("submitted.sh") is None
    done = shell.types("+cluster=4x8", *OWN, "--accept", "code")
    assert done.code == 0
    assert (run.code / "new.py").exists() and not (run.before_change(1) / "code" / "new.py").exists()
    (change,) = read_changes(run)
    assert change.names == ["code"] and change.code is not None
    assert change.code["files"] == ["mine.py: +2 -1", "new.py: new, +1 -0"]


def test_resume_runs_the_copy_and_says_that_the_files_have_changed(shell: Any, run: RunDirectory) -> None:
    (shell.folder / "mine.py").write_text("class Model: ...\n")
    done = shell.types("resume", run.run_id)
    assert done.code == 0 and "your files have changed since this run copied them: mine.py: +0 -1" in done.err
    assert "class Data" in (run.code / "mine.py").read_text()


def test_nothing_is_protected_before_the_first_checkpoint(shell: Any) -> None:
    (shell.folder / "mine.py").write_text("class Model: ...\nclass Data: ...\n")
    run = shell.types("+cluster=4x8", *OWN).job_and_run[1]
    shell.slurm.account("4711", "FAILED")
    (shell.folder / "mine.py").write_text("class Model: ...\nclass Data: ...  # mended\n")
    assert shell.types("+cluster=4x8", *OWN).code == 0
    assert "mended" in (run.code / "mine.py").read_text()


def test_a_snapshot_that_was_touched_is_refused_and_can_be_replaced(shell: Any, run: RunDirectory) -> None:
    (run.code / "mine.py").chmod(0o600)
    (run.code / "mine.py").write_text("edited in place")
    done = shell.types("resume", run.run_id)
    assert done.code == 2 and "is not what was submitted: mine.py: changed" in done.err
    assert shell.types("resume", run.run_id, "--accept", "code").code == 0
    assert "class Model" in (run.code / "mine.py").read_text()


def test_a_frozen_file_edited_by_hand_is_found(shell: Any, run: RunDirectory) -> None:
    run.config.write_text(run.config.read_text().replace("lr: 0.003", "lr: 0.5"))
    done = shell.types("resume", run.run_id)
    assert done.code == 2 and "optim.lr  0.003 -> 0.5" in done.err and "put back what was edited" in done.err


def test_other_values_under_the_same_name_are_another_run_and_it_says_so(shell: Any, run: RunDirectory) -> None:
    done = shell.types("+cluster=4x8", *OWN, "optim.lr=0.1")
    assert done.code == 0 and done.job_and_run[1] != run
    assert f"a new run; a/{run.run_id} (unfinished, step 40) has optim.lr=0.003 instead of 0.1" in done.err
    assert f"resume {run.run_id} optim.lr=0.1 --accept optim.lr" in done.err


def test_a_finished_run_can_be_made_longer(shell: Any, run: RunDirectory) -> None:
    run.result.write_text("{}")
    assert "there is nothing to resume" in shell.types("resume", run.run_id, "optim.lr=1").err
    assert "train.max_steps  300 -> 400" in shell.types("resume", run.run_id, "train.max_steps=400").err
    assert run.result.exists()
    assert shell.types("resume", run.run_id, "train.max_steps=400", "--accept", "train.max_steps").code == 0
    assert not run.result.exists() and (run.before_change(1) / "result.json").exists()


def test_a_name_that_nothing_has_is_refused(shell: Any, run: RunDirectory) -> None:
    done = shell.types("resume", run.run_id, "optim.lr=1", "--accept", "optim.lrr")
    assert done.code == 2 and "--accept optim.lrr: there is no such key" in done.err and "optim.lr" in done.err
    assert "the flag --accept needs a value" in shell.types("+cluster=4x8", "--accept").err


def test_prepared_text_that_was_made_again_is_found_before_anything_is_submitted(shell: Any) -> None:
    def prepare(content: str) -> None:
        (shell.folder / "text.txt").write_text(content)
        assert shell.types("prepare", "text.txt", "--out", "tokens").code == 0

    prepare("to be or not to be\n" * 900)
    words = ("+cluster=1x1", "data=text", "data.path=tokens")
    run = shell.types(*words).job_and_run[1]
    shell.slurm.account("4711", "CANCELLED by 0")
    from slurm_train.data.shards import known_fingerprint

    data = load_config(run.config).data
    assert data is not None
    fingerprint = known_fingerprint(data, cwd=shell.folder)
    assert fingerprint is not None and len(fingerprint) == 32
    save(run, data_fingerprint=fingerprint)
    assert shell.types("resume", run.run_id).code == 0
    shell.slurm.account("4711", "CANCELLED by 0")
    for path in (shell.folder / "tokens").iterdir():
        path.unlink()
    prepare("that is the question\n" * 900)
    done = shell.types("resume", run.run_id)
    assert done.code == 2 and f"data  fingerprint {fingerprint} -> " in done.err
    assert shell.types("resume", run.run_id, "--accept", "data").code == 0
    assert read_changes(run)[0].names == ["data"]


@pytest.mark.parametrize(("words", "code"), [((), 2), (("task._target_=mine.main",), 0)])
def test_a_task_that_saves_checkpoints_reads_its_own_data(words: tuple[str, ...], code: int, shell: Any) -> None:
    (shell.folder / "mine.py").write_text("def main(context): ...\n")
    run = shell.types("+cluster=1x1", *words).job_and_run[1]
    shell.slurm.account("4711", "CANCELLED by 0")
    save(run, data_fingerprint="of its own", extra={})
    shell.patch.setattr("slurm_train.cli.drift.known_fingerprint", lambda data, **_: "of stdlib" if data else None)
    done = shell.types("+cluster=1x1", *words)
    assert done.code == code and ("data  fingerprint of its own -> of stdlib" in done.err) == (code == 2), done.err


def continuity_of(run: RunDirectory, **facts: Any) -> Continuity:
    settings = trained_settings(load_config(run.config), global_size=96)
    found = build_continuity(run, load_config(run.config), global_size=96, data="d1", num_samples=100)
    assert found.settings == settings
    return Continuity(**{name: facts.get(name, getattr(found, name)) for name in Continuity.__dataclass_fields__})


def test_the_ranks_look_again(shell: Any, run: RunDirectory) -> None:
    manifest = save(run, step=41)
    assert continuity_of(run).check(manifest) == []
    other = {**continuity_of(run).settings, "optim.lr": 1.0}
    with pytest.raises(RunError, match=r"is not what step 41 was trained with: optim\.lr: 0\.003 -> 1\.0"):
        continuity_of(run, settings=other).check(manifest)
    with pytest.raises(RunError, match="is not what step 41 was trained with"):
        continuity_of(run, code="c0de").check(manifest)
    with pytest.raises(DataError, match="changed since step 41: 100 -> 90 samples, fingerprint d1 -> d2") as caught:
        continuity_of(run, data="d2", num_samples=90).check(manifest)
    assert "--accept data" in caught.value.hint


def test_the_ranks_know_what_was_accepted_and_checkpoints_say_it(shell: Any, run: RunDirectory) -> None:
    accept = ("optim.lr=1e-4", "--accept", "optim.lr,code,data")
    (Path(shell.folder) / "mine.py").write_text("class Model: ...\nclass Data: ...\n# new\n")
    manifest = save(run, step=41)
    assert shell.types("resume", run.run_id, *accept).code == 0
    notes = continuity_of(run, data="d2").check(manifest)
    assert [note.removeprefix("from step 41 on, as accepted: ") for note in notes] == [
        "optim.lr: 0.003 -> 0.0001",
        "other code",
        "another data set, 100 -> 100 samples, fingerprint d1 -> d2",
    ]
    later = save(run, step=42)
    assert later.extra["changes"] == [{"number": 1, "step": 41, "names": ["optim.lr", "code", "data"]}]
    assert continuity_of(run).check(later) == []
