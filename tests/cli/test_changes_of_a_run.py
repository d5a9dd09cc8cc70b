"""The same command, or `resume`, with something changed: shown and refused before anything happens, or accepted."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_train.checkpoint.commit import Place
from slurm_train.checkpoint.manifest import CheckpointHeader, Manifest
from slurm_train.checkpoint.verify import read_manifest
from slurm_train.config.frozen import load_config
from slurm_train.data.check import known_fingerprint
from slurm_train.errors import DataError, RunError
from slurm_train.rundir.events import read_changes
from slurm_train.rundir.files import read_json
from slurm_train.rundir.paths import RunDirectory, list_checkpoints
from slurm_train.train.continuity import Continuity, build_continuity
from tests.cli.conftest import Shell

OWN = "model._target_=mine.Model data._target_=mine.Data batch.global_size=96 batch.local_size=3 run.name=a"
CODE = "class Model: ...\nclass Data(dict): ...\n"


def continuity_of(run: RunDirectory) -> Continuity:
    """Returns what the ranks of a run compare, as it is configured now."""
    size = read_json(run.plan)["batch"]["global_size"]
    return build_continuity(run, load_config(run.config), global_size=size, data="d1", num_samples=100)


def save(run: RunDirectory, step: int = 40, **changes: Any) -> Manifest:
    """Leaves a checkpoint of the run as it is configured now, without weights."""
    plan = read_json(run.plan)
    facts: dict[str, Any] = {
        "step": step,
        "samples": step * plan["batch"]["global_size"],
        "epoch": 0,
        "world_size": plan["world"]["size"],
        "mesh": {},
        "batch_plan": plan["batch"],
        "config_hash": run.run_id,
        "data_fingerprint": "d1",
        "torch_version": "",
        "attempt": 0,
        "extra": continuity_of(run).as_extra(),
    }
    manifest = Manifest.of(CheckpointHeader(**(facts | changes)), {})
    place = Place(root=run.checkpoints, attempt=0)
    place.commit(place.open_staging(step), manifest)
    return manifest


def submitted(shell: Shell, words: str, **changes: Any) -> RunDirectory:
    """Submits a run that has ended with a checkpoint of step 40."""
    run = shell.submits(words)
    shell.slurm.account("4711", "CANCELLED by 0")
    shell.slurm.forget("submitted.sh")
    save(run, **changes)
    return run


@pytest.fixture
def run(shell: Shell) -> RunDirectory:
    """A run of somebody's own code on 4 x 8 ranks."""
    (shell.folder / "mine.py").write_text(CODE)
    (shell.folder / "notes.md").write_text("notes")
    return submitted(shell, f"+cluster=4x8 {OWN}")


REFUSED = [
    ("optim.lr=1e-4", "optim.lr  0.003 -> 0.0001", "optim.lr"),
    ("+data.size=9 optim.eps=1", "optim.eps  1e-08 -> 1.0", "data.size,optim.eps"),
]


def test_keywords_of_somebodys_own_class_are_typed_and_checked_as_at_the_start(shell: Shell) -> None:
    (shell.folder / "mine.py").write_text(
        CODE.replace("class Model: ...", "class Model:\n    def __init__(self, width=1): ...")
    )
    run = submitted(shell, f"+cluster=1x2 {OWN}")
    shell.refuses("model.width  null -> 64", f"resume {run.run_id} model.width=64")
    wrong = "model._target_=mine.Model got an unexpected keyword argument 'widht'\nhint: it takes width"
    shell.refuses(wrong, f"resume {run.run_id} model.widht=64 --accept model")
    # The copy of the code is what goes on, whatever lies here now.
    edited = CODE.replace("class Model: ...", "class Model:\n    def __init__(self, depth=1): ...")
    (shell.folder / "mine.py").write_text(edited)
    shell.refuses("got an unexpected keyword", f"resume {run.run_id} model.width=64 --accept model,code")
    shell.submits(f"resume {run.run_id} model.width=64 --accept model")
    shell.slurm.account("4711", "CANCELLED by 0")
    shell.submits(f"resume {run.run_id} ~model.width --accept model")
    assert "width" not in (load_config(run.config).model or {})


def test_what_changes_the_training_is_shown_and_refused(shell: Shell, run: RunDirectory) -> None:
    def files() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}

    before = files()
    for words, row, names in REFUSED:
        err = shell.refuses(row, f"resume {run.run_id} {words}")
        assert f"a/{run.run_id} has been trained up to step 40; from there on it would be trained differently" in err
        assert f"--accept {names};" in err
    err = shell.refuses("--accept train.max_step: there is no such key", f"resume {run.run_id} --accept train.max_step")
    assert "train.max_steps" in err
    assert shell.slurm.said("submitted.sh") is None and files() == before, "nothing happened"


def test_what_was_accepted_is_on_record_and_what_it_replaced_is_kept(shell: Shell, run: RunDirectory) -> None:
    old = run.config.read_bytes()
    done = shell.types(f"resume {run.run_id} optim.lr=1e-4 train.log_every_steps=10 --accept optim.lr")
    assert done.job_and_run[1] == run
    (change,) = read_changes(run)
    assert (change.number, change.step, change.config) == (1, 40, {"optim.lr": [0.003, 0.0001]})
    assert (run.before_change(1) / "config.yaml").read_bytes() == old
    assert load_config(run.config).optim.lr == 1e-4
    shell.slurm.account("4711", "CANCELLED by 0")
    assert shell.types("resume", run.run_id).code == 0, "accepted once is enough"


def test_settings_that_no_longer_name_the_users_code_are_no_change_of_it(shell: Shell) -> None:
    (shell.folder / "mine.py").write_text("def falling(samples, **_):\n    return 1.0\n")
    run = submitted(shell, "+cluster=4x8 optim.schedule._target_=mine.falling run.name=a")
    (path,) = list_checkpoints(run.checkpoints)
    assert shell.types(f"resume {run.run_id} optim.schedule=linear --accept optim.schedule,data").code == 0
    (note,) = continuity_of(run).check(read_manifest(path))
    assert "from step 40 on, as accepted: optim.schedule" in note


def test_what_the_run_has_written_beside_its_code_is_no_change_of_it(shell: Shell, run: RunDirectory) -> None:
    words = f"+cluster=4x8 {OWN}"
    code = run.code_index.read_text()
    for name in ("log.json", "curves.csv.txt"):
        (shell.folder / name).write_text("1")
    done = shell.types(words)
    assert done.code == 0, done.err
    assert "not copied into the run: curves.csv.txt, log.json (new since it began" in done.err
    assert run.code_index.read_text() == code and not (run.code / "log.json").exists()
    # With another change it may be code as well.
    shell.slurm.account("4711", "CANCELLED by 0")
    (shell.folder / "mine.py").write_text(f"{CODE}A = 1\n")
    assert "log.json: new" in shell.refuses("mine.py: +1 -0", words)
    (shell.folder / "mine.py").write_text(CODE)
    (shell.folder / "more.py").write_text("")
    assert "log.json: new" in shell.refuses("more.py: new", words)
    assert shell.types(f"{words} --accept code").code == 0
    assert (run.code / "log.json").exists() and (run.code / "more.py").exists()


def test_a_changed_file_that_the_program_may_write_is_refused_with_where_it_belongs(shell: Shell) -> None:
    (shell.folder / "mine.py").write_text(CODE)
    (shell.folder / "log.json").write_text("1")
    words = f"+cluster=4x8 {OWN}"
    submitted(shell, words)
    (shell.folder / "log.json").write_text("2")
    assert "what the program writes belongs into its run directory" in shell.refuses("log.json: +1 -1", words)
    (shell.folder / "mine.py").write_text(f"{CODE}A = 1\n")
    assert "what the program writes" not in shell.refuses("mine.py: +1 -0", words)


def test_another_size_keeps_the_global_batch_and_no_more_samples_on_a_rank(shell: Shell, run: RunDirectory) -> None:
    shell.submits(f"resume {run.run_id} cluster=1x6 cluster.partition=small")
    plan = read_json(run.plan)
    found = (plan["world"]["size"], plan["batch"]["local_size"], plan["batch"]["accumulation"])
    assert found == (6, 3, 6) and plan["batch"]["global_size"] == 96
    assert "--partition=small" in shell.slurm.said("submitted.sh") and read_changes(run) == []


def test_any_number_of_ranks_keeps_the_global_batch(shell: Shell, run: RunDirectory) -> None:
    shell.submits(f"resume {run.run_id} cluster=1x7")
    batch = read_json(run.plan)["batch"]
    assert batch["global_size"] == sum(batch["shares"]) == 96 and max(batch["shares"]) - min(batch["shares"]) == 1
    assert batch["local_size"] <= 3 and read_changes(run) == []


def test_a_global_batch_that_changes_takes_the_learning_rate_along(shell: Shell, run: RunDirectory) -> None:
    words = f"resume {run.run_id} cluster=1x7 batch.global_size=98 optim.lr_retune=linear"
    shell.refuses("--accept batch.global_size,", words)
    shell.submits(f"{words} --accept batch.global_size,optim.lr_retune")
    assert read_json(run.plan)["lr"]["planned"] == pytest.approx(0.003 * 98 / 96)


def test_a_checkpoint_does_not_fit_another_width_or_optimizer(shell: Shell) -> None:
    run = submitted(shell, "+cluster=4x8")
    words = f"resume {run.run_id} model.width=320 optim=sgd --accept config"
    refused = shell.refuses("optim._target_  torch.optim.AdamW -> torch.optim.SGD", words)
    assert "model.width     160 -> 320" in refused
    assert "does not fit another shape of the model or another optimizer" in refused


def test_changed_code_is_shown_by_file_and_taken_when_accepted(shell: Shell, run: RunDirectory) -> None:
    (shell.folder / "mine.py").write_text("class Model: ...\nclass Data:\n    size = 1\n")
    (shell.folder / "new.py").write_text("x = 1\n")
    (shell.folder / "notes.md").write_text("other notes")
    err = shell.refuses("code  mine.py: +2 -1", f"+cluster=4x8 {OWN}")
    assert "code  new.py: new, +1 -0" in err and "notes.md" not in err and "--accept code;" in err
    assert shell.slurm.said("submitted.sh") is None
    told = shell.types("resume", run.run_id).err
    assert "copied them: mine.py: +2 -1" in told and "notes.md" not in told
    assert (run.code / "mine.py").read_text() == CODE, "resume runs the copy"
    shell.slurm.account("4711", "CANCELLED by 0")
    shell.submits(f"+cluster=4x8 {OWN} --accept code")
    assert (run.code / "new.py").exists() and not (run.before_change(1) / "code" / "new.py").exists()
    (change,) = read_changes(run)
    assert change.names == ["code"] and change.code is not None
    assert change.code["files"] == ["mine.py: +2 -1", "new.py: new, +1 -0"]


def commit_all(folder: Path) -> None:
    name = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org")
    for words in (["init", "-q"], ["add", "--all"], [*name, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", *words], cwd=folder, check=True)


@pytest.mark.parametrize(
    ("settings", "told"),
    [(f" {OWN}", "your files have changed since this run copied them: mine.py: +2 -1\n"), (" data.path=text", "")],
    ids=["own", "shipped"],
)
def test_only_changes_that_a_run_could_notice_are_told(shell: Shell, settings: str, told: str) -> None:
    """In a repository all files are copied: documents, and code that a shipped model does not import."""
    (shell.folder / "mine.py").write_text(CODE)
    (shell.folder / "notes.md").write_text("notes")
    commit_all(shell.folder)
    run = submitted(shell, f"+cluster=4x8{settings}")
    assert (run.code / "notes.md").exists() and (run.code / "mine.py").exists()
    (shell.folder / "mine.py").write_text("class Model: ...\nclass Data:\n    size = 1\n")
    (shell.folder / "notes.md").write_text("other notes")
    typed = shell.types(f"+cluster=4x8{settings}")
    assert (typed.code == 2) is bool(told), typed.err
    assert ("code  mine.py: +2 -1" in typed.err) is bool(told) and "notes.md" not in typed.err
    shell.slurm.account("4711", "CANCELLED by 0")
    said = shell.types("resume", run.run_id).err
    assert "".join(line for line in said.splitlines(keepends=True) if "your files" in line) == told
    shell.slurm.account("4711", "CANCELLED by 0")
    (shell.folder / "elsewhere").mkdir()
    shell.patch.chdir(shell.folder / "elsewhere")
    assert "your files" not in shell.types("resume", str(run.path)).err, "these are not its files"
    shell.patch.chdir(shell.folder)
    run.result.write_text("{}")
    again = shell.types(f"+cluster=4x8{settings}").err
    assert ("your files have changed since: mine.py: +2 -1;" in again) is bool(told) and "notes.md" not in again


def test_files_of_the_run_that_were_touched_are_refused(shell: Shell, run: RunDirectory) -> None:
    text = run.config.read_text()
    run.config.write_text(text.replace("lr: 0.003", "lr: 0.5"))
    assert "put back what was edited" in shell.refuses("optim.lr  0.003 -> 0.5", f"resume {run.run_id}")
    run.config.write_text(text)
    (run.code / "mine.py").chmod(0o600)
    (run.code / "mine.py").write_text("edited in place")
    shell.refuses("is not what was submitted: mine.py: changed", f"resume {run.run_id}")
    shell.submits(f"resume {run.run_id} --accept code")
    assert (run.code / "mine.py").read_text() == CODE


def test_other_values_under_the_same_name_are_another_run_and_it_says_how_to_change_this_one(
    shell: Shell, run: RunDirectory
) -> None:
    done = shell.types(f"+cluster=4x8 {OWN} optim.lr=0.1")
    assert done.job_and_run[1] != run
    assert f"a new run; a/{run.run_id} (unfinished, step 40) has optim.lr=0.003 instead of 0.1" in done.err
    typed = done.err.partition("to continue that one with the change: ")[2].splitlines()[0]
    assert typed == f"resume {run.run_id} optim.lr=0.1 --accept optim.lr"


def test_a_finished_run_can_be_made_longer(shell: Shell, run: RunDirectory) -> None:
    run.result.write_text("{}")
    shell.refuses("there is nothing to resume", f"resume {run.run_id} optim.lr=1")
    shell.refuses("train.max_steps  300 -> 400", f"resume {run.run_id} train.max_steps=400")
    assert run.result.exists()
    shell.submits(f"resume {run.run_id} train.max_steps=400 --accept train.max_steps")
    assert not run.result.exists() and (run.before_change(1) / "result.json").exists()


def test_a_program_that_was_saved_is_made_longer_by_its_words(shell: Shell) -> None:
    (shell.folder / "train.py").touch()
    run = submitted(shell, "+cluster=1x2 script=[train.py,--steps,300]")
    run.result.write_text("{}")
    shell.refuses('longer: with other words, "script=[train.py,--epochs,6]"', f"resume {run.run_id} seed=3")
    words = f"resume {run.run_id} script=[train.py,--steps,400]"
    shell.refuses("--accept script;", words)
    shell.submits(f"{words} --accept script")
    assert load_config(run.config).script == ["train.py", "--steps", "400"]
    assert not run.result.exists() and (run.before_change(1) / "result.json").exists()


def test_prepared_text_that_was_made_again_is_found_before_anything_is_submitted(shell: Shell) -> None:
    def prepare(content: str) -> None:
        for path in (shell.folder / "tokens").glob("*"):
            path.unlink()
        (shell.folder / "text.txt").write_text(content)
        assert shell.types("prepare text.txt --out tokens").code == 0

    prepare("to be or not to be\n" * 900)
    run = shell.submits("+cluster=1x1 data=text data.path=tokens")
    shell.slurm.account("4711", "CANCELLED by 0")
    fingerprint = known_fingerprint(load_config(run.config).data or {}, cwd=shell.folder)
    save(run, data_fingerprint=fingerprint)
    shell.submits("resume", run.run_id)
    shell.slurm.account("4711", "CANCELLED by 0")
    prepare("that is the question\n" * 900)
    shell.refuses(f"data  fingerprint {fingerprint} -> ", f"resume {run.run_id}")
    shell.submits(f"resume {run.run_id} --accept data")
    assert read_changes(run)[0].names == ["data"]


def test_the_ranks_look_again(shell: Shell, run: RunDirectory) -> None:
    manifest, mine = save(run, step=41), continuity_of(run)
    assert mine.check(manifest) == []
    with pytest.raises(RunError, match=r"is not what step 41 was trained with: optim\.lr: 0\.003 -> 1\.0"):
        replace(mine, settings={**mine.settings, "optim.lr": 1.0}).check(manifest)
    with pytest.raises(DataError, match="changed since step 41: 100 -> 90 samples, fingerprint d1 -> d2") as caught:
        replace(mine, data="d2", num_samples=90).check(manifest)
    assert "--accept data" in caught.value.hint
