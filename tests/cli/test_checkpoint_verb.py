"""`checkpoint`: what a person asks of the checkpoints of a run, on real ones of a small model."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, safe_open

from slurm_train.checkpoint.commit import Place
from slurm_train.checkpoint.load import differences
from slurm_train.checkpoint.manifest import CheckpointHeader
from slurm_train.checkpoint.save import save_checkpoint
from slurm_train.checkpoint.verify import LAST_FINITE
from slurm_train.config.schema import EMA
from slurm_train.models.gpt import GPT
from slurm_train.rundir.jobs import process_lives, take_lock, this_process
from slurm_train.rundir.paths import RunDirectory, name_of
from tests.cli.conftest import Shell
from tests.support.extras import NEEDS_TRANSFORMERS
from tests.support.small_checkpoints import checkpoint_of


def has_checkpoints(run: RunDirectory, *values: float, **changes: Any) -> None:
    """Saves steps 1, 2, ... with a weight of these values."""
    for step, value in enumerate(values, start=1):
        weights = {"head.weight": torch.full((3, 2), value), "step": torch.tensor(7), "half": torch.ones(4).bfloat16()}
        header = CheckpointHeader(
            step=step, samples=8 * step, epoch=0, world_size=1, mesh={}, batch_plan={}, config_hash="3f9a1c07",
            data_fingerprint="d", torch_version="2", attempt=0, **changes,
        )  # fmt: skip
        tensors = {"model": weights, "optimizer": {"state": {"head.weight": {"exp_avg": torch.zeros(3, 2)}}}}
        save_checkpoint(run.checkpoints, tensors=tensors, rank_state={}, header=header, group=None, keep=9)


@pytest.fixture
def run(shell: Shell) -> RunDirectory:
    run = shell.has_run(cluster=False)
    run.epochs.mkdir()
    (run.epochs / "attempt_0").touch()
    has_checkpoints(run, 1.0, 2.0)
    return run


def damage(run: RunDirectory, step: int) -> None:
    path = checkpoint_of(run.checkpoints, step) / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_ls_and_verify_tell_the_whole_from_the_damaged(shell: Shell, run: RunDirectory) -> None:
    damage(run, 2)
    listed, verified = shell.types("checkpoint ls gpt-stdlib"), shell.types("checkpoint verify")
    assert (listed.code, listed.out.count("complete")) == (0, 2)
    assert verified.code == 1
    assert "__0_0.distcp" in verified.out and verified.out.count("verified") == 1


def test_export_writes_the_newest_that_verifies_or_a_step_and_overwrites_nothing(
    shell: Shell, run: RunDirectory
) -> None:
    has_checkpoints(run, 1.0, 2.0, 3.0)
    damage(run, 3)
    done = shell.types("checkpoint export gpt-stdlib model.safetensors")
    assert (done.code, done.out) == (0, "model.safetensors\n"), done.err
    tensors = load_file("model.safetensors")
    assert sorted(tensors) == ["half", "head.weight", "step"]
    assert tensors["head.weight"].equal(torch.full((3, 2), 2.0)) and tensors["half"].dtype == torch.bfloat16
    with safe_open("model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "step": "2", "samples": "16", "config_hash": "3f9a1c07"}
    again = shell.types("checkpoint export gpt-stdlib@1 model.safetensors")
    assert again.code == 1 and "exists already" in again.err
    assert shell.types("checkpoint export gpt-stdlib@1 one.safetensors").code == 0
    assert load_file("one.safetensors")["head.weight"][0, 0] == 1.0
    before = shell.left()
    nowhere = shell.types("checkpoint export gpt-stdlib@1 no/such/folder/model.safetensors")
    assert nowhere.code == 1 and "cannot write no/such/folder/model.safetensors" in nowhere.err
    for step, message in ((3, "cannot be trusted"), (5, "has no checkpoint of step 5\nhint: steps there: 3, 2, 1")):
        done = shell.types(f"checkpoint export gpt-stdlib@{step} other.safetensors")
        assert done.code == 1 and message in done.err
    (checkpoint_of(run.checkpoints, 2) / ".metadata").chmod(0o666)
    done = shell.types("checkpoint export gpt-stdlib@2 two.safetensors")
    assert done.code == 1 and "belongs to uid" in done.err, "others may write it"
    assert shell.left() == before


@pytest.mark.parametrize("evaluate", [False, True])
def test_the_best_by_two_measures_is_named_and_not_chosen(shell: Shell, run: RunDirectory, evaluate: bool) -> None:
    """Also that it was chosen by averaged weights, which an export without --ema does not write."""
    rules = [
        {"name": "best eval_loss", "keep": 1, "steps": [[3, 0.5]]},
        {"name": "best eval_accuracy", "keep": 2, "steps": [[4, 0.75], [3, 0.5]]},
        {"name": LAST_FINITE, "keep": 1, "steps": [[4, 1.0]]},
    ]
    settings = {"callbacks": [{"_target_": EMA, "decay": 0.9, "evaluate": evaluate}]}
    has_checkpoints(run, 1.0, 2.0, 3.0, 4.0, extra={"kept": rules, "settings": settings})
    listed = shell.types("checkpoint ls")
    states = [line.partition("complete, ")[2].strip() for line in listed.out.splitlines()[1:3]]
    assert states[0] == "best eval_accuracy 0.7500, last finite loss 1.0000"
    assert states[1] == "best eval_loss 0.5000, best eval_accuracy 0.5000"
    for measure, step in (("eval_loss", 3), ("eval_accuracy", 4)):
        done = shell.types(f"checkpoint export {run.run_id}@best:{measure} {step}.safetensors")
        assert load_file(f"{step}.safetensors")["head.weight"][0, 0] == step, done.err
        assert ("--ema" in done.err) is ("--ema" in listed.err) is evaluate
    for word in ("best", "best:eval_f1"):
        refused = shell.types(f"checkpoint export {run.run_id}@{word} model.safetensors")
        assert refused.code == 1
        assert f"write {run.run_id}@best:eval_loss, {run.run_id}@best:eval_accuracy" in refused.err


@pytest.mark.full
@NEEDS_TRANSFORMERS
def test_export_writes_a_directory_for_transformers_and_overwrites_nothing(shell: Shell, run: RunDirectory) -> None:
    settings = {"norm": "rmsnorm", "activation": "swiglu", "tied": False, "width": 16, "num_layers": 1, "vocab_size": 9}
    model = {"_target_": "slurm_train.models.gpt.GPT", **settings}
    header = CheckpointHeader(
        step=3, samples=24, epoch=0, world_size=1, mesh={}, batch_plan={}, config_hash="3f9a1c07", data_fingerprint="d",
        torch_version="2", attempt=0,
        extra={"settings": {f"model.{key}": value for key, value in model.items()}},
    )  # fmt: skip
    weights = GPT(**settings).state_dict()
    save_checkpoint(run.checkpoints, tensors={"model": weights}, rank_state={}, header=header, group=None, keep=9)
    done = shell.types("checkpoint export gpt-stdlib out --format hf --shard-size 5KB")
    assert (done.code, done.out) == (0, "out\n"), done.err
    written = [name for name in shell.left() if name.startswith("out/")]
    assert {"out/config.json", "out/model.safetensors.index.json"} < set(written) and len(written) > 4
    again = shell.types("checkpoint export gpt-stdlib@3 out --format hf")
    assert again.code == 1 and "out exists already" in again.err
    # A model of one's own: step 2 was not saved with the settings of one that is known.
    done = shell.types("checkpoint export gpt-stdlib@2 other --format hf")
    assert done.code == 2 and "is known for the shipped GPT and for model=hf, not for None" in done.err
    assert not [name for name in shell.left() if "partial" in name or name.startswith("other")]


def test_tensors_that_differ_by_a_sign_or_an_imaginary_part_are_not_zero_values_apart() -> None:
    first = {"phase": torch.tensor([1 + 1j]), "bias": torch.tensor([0.0, 1.0])}
    second = {"phase": torch.tensor([1 + 3j]), "bias": torch.tensor([-0.0, 1.0])}
    assert differences(first, first) == []
    assert differences(first, second) == [
        ("bias", "equal values, of which some are 0 and others -0"),
        ("phase", "1 of 1 values, at most 2 apart"),
    ]


def test_diff_names_tensors_and_facts_and_equal_is_equal(shell: Shell, run: RunDirectory) -> None:
    done = shell.types("checkpoint diff gpt-stdlib@1 gpt-stdlib@2")
    assert done.code == 1
    assert "6 of 6 values, at most 1 apart" in done.out and "half" not in done.out
    assert "samples" in done.out
    path = str(checkpoint_of(run.checkpoints, 2))
    done = shell.types("checkpoint", "diff", "gpt-stdlib", path)
    assert (done.code, done.out) == (0, "")
    assert "all 3 tensors of the model are equal" in done.err


def test_a_folder_with_an_at_sign_names_no_step(shell: Shell, run: RunDirectory) -> None:
    shutil.copytree(run.path, "me@lab/runs/gpt-stdlib/3f9a1c07")
    copy = "me@lab/runs/gpt-stdlib/3f9a1c07"
    assert shell.types(f"checkpoint diff {copy} {copy}@2").code == 0
    assert "head.weight" in shell.types(f"checkpoint diff {copy} {copy}@1").out


def test_gc_keeps_the_newest_and_removes_what_dead_attempts_left(shell: Shell, run: RunDirectory) -> None:
    staging = Place(root=run.checkpoints, attempt=0).open_staging(3)
    done = shell.types("checkpoint gc gpt-stdlib --keep 1")
    assert done.code == 0, done.err
    removed = [line.rpartition("/")[2] for line in done.out.splitlines()]
    assert removed[0].startswith("checkpoint_0000001_") and staging.name in removed[1]
    kept = [name_of(path) for path in run.checkpoints.iterdir()]
    assert [(name.step, name.attempt) for name in kept] == [(2, 1)], "attempt 0 cannot remove it any more"
    assert not run.lock.exists()


def test_gc_of_a_run_that_is_going_is_refused(shell: Shell, run: RunDirectory) -> None:
    take_lock(run.lock, this_process(), is_alive=process_lives)
    held = json.loads(run.lock.read_text())
    done = shell.types("checkpoint gc gpt-stdlib")
    assert done.code != 0 and "is being run by" in done.err
    assert json.loads(run.lock.read_text()) == held


def test_a_run_that_has_not_saved_yet_is_no_run_whose_checkpoints_are_broken(shell: Shell) -> None:
    shell.has_run("young", "aaaa0000")
    for words in ("evaluate young", "generate young", "checkpoint export young out.safetensors"):
        done = shell.types(words)
        assert done.code == 1
        assert "checkpoints has no checkpoint yet\nhint: `status` shows how far the run is" in done.err
