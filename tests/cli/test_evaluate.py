"""`evaluate` and `generate`: what they plan, submit and refuse; what ranks do with it is in tests/end_to_end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_train.checkpoint.commit import Place
from slurm_train.checkpoint.save import save_checkpoint
from slurm_train.config.frozen import dump_config, load_config
from slurm_train.config.schema import ClusterSection, ParallelSection, RunConfig
from slurm_train.models.gpt import GPT
from slurm_train.rundir.files import read_json
from slurm_train.rundir.paths import RunDirectory, find_save, list_checkpoints, name_of
from slurm_train.rundir.pins import list_pins, read_leases
from tests.cli.conftest import Done, Shell
from tests.support.small_checkpoints import make_header, steps_in

SHAPE: dict[str, Any] = {"num_layers": 1, "width": 16, "num_heads": 2, "vocab_size": 257, "context": 16}


@pytest.fixture
def run(shell: Shell) -> RunDirectory:
    """A run on four nodes with two checkpoints; its data are nowhere."""
    run = shell.has_run(cluster=True)
    config = RunConfig(
        model={"_target_": "slurm_train.models.gpt.GPT", **SHAPE},
        data={"_target_": "slurm_train.data.digits.build"},
        cluster=ClusterSection(nodes=4, gpus_per_node=8, partition="gpu", time_limit_min=60),
        parallel=ParallelSection(dp_shard=32),
    )
    run.config.write_text(dump_config(config))
    for step in (1, 2):
        torch.manual_seed(step)
        tensors = {"model": GPT(**SHAPE).state_dict()}
        save_checkpoint(run.checkpoints, tensors=tensors, rank_state={}, header=make_header(step), group=None, keep=9)
    return run


def test_an_evaluation_is_a_run_of_its_own_below_the_run(shell: Shell, run: RunDirectory) -> None:
    before = shell.left()
    done = shell.types("evaluate gpt-stdlib@1 +cluster=1x8 parallel.dp_shard=8")
    own = done.job_and_run[1]
    assert f"evaluates from {list_checkpoints(run.checkpoints)[1]} in {own.path}\n" in done.err
    assert own.path.parent == run.path / "evaluations"
    config = load_config(own.config)
    assert (config.train.evaluate_from or "").startswith(f"{run.checkpoints}/checkpoint_0000001_")
    assert config.train.evaluate_data is not None, "the digits are here"
    assert (config.cluster.nodes, config.cluster.partition) == (1, "gpu"), "another size of the run's cluster"
    fresh = [name for name in shell.left() if name not in before and "/evaluations" not in name]
    assert len(fresh) == 1 and fresh[0].endswith(f"_{own.run_id}") and "/pinned_" in fresh[0]
    assert shell.submits("evaluate gpt-stdlib@2 +cluster=1x8") != own, "another checkpoint is another record"
    shell.slurm.queue("4711", "PENDING")
    assert "is active already" in shell.refuses("job 4711", "evaluate gpt-stdlib@2 +cluster=1x8")


def test_other_held_out_samples_are_another_evaluation(shell: Shell, run: RunDirectory) -> None:
    """The text was prepared again in the same place: the number of the old one says nothing about it."""
    index = shell.folder / "shards" / "index.json"
    index.parent.mkdir()
    words = "evaluate gpt-stdlib@2 +cluster=1x8 data=text data.path=shards data.context=16"

    def prepared(digest: str) -> Done:
        shards = [{"file": "heldout_00000.bin", "tokens": 99, "xxh3_128": digest * 32}]
        index.write_text(json.dumps({"splits": {"heldout": {"shards": shards}}}))
        return shell.types(words)

    first = prepared("a").job_and_run[1]
    first.result.write_text(json.dumps({"eval_loss": 1.0}))
    assert json.loads(shell.types(words).out) == {"eval_loss": 1.0}, "what is known is not measured again"
    second = prepared("b")
    assert second.job_and_run[1] != first and f"not those of {first.path}" in second.err
    third = prepared("c").job_and_run[1]
    assert load_config(first.config).train.evaluate_data != load_config(third.config).train.evaluate_data


def test_a_script_is_refused_whatever_checkpoints_it_has(shell: Shell, run: RunDirectory) -> None:
    config = replace(load_config(run.config), model=None, data=None, script=["train.py"], parallel=ParallelSection())
    run.config.write_text(dump_config(config))
    none = shell.has_run("plain", "bbbb0000")
    none.config.write_text(dump_config(config))
    saved = list_checkpoints(run.checkpoints)[0]
    for words in ("evaluate gpt-stdlib", "generate gpt-stdlib@1", "evaluate plain", f"generate {saved}"):
        shell.refuses("is a task or script of your own, which the built-in evaluation does not know", words)


def test_it_says_where_it_cannot_see_the_samples(shell: Shell, run: RunDirectory) -> None:
    def build_nothing(*_: object, **__: object) -> None:
        raise OSError("the data are on the nodes")

    shell.patch.setattr("slurm_train.data.build.build_source", build_nothing)
    words = "evaluate gpt-stdlib@2 +cluster=1x8"
    own = shell.submits(words)
    assert load_config(own.config).train.evaluate_data is None
    own.result.write_text(json.dumps({"eval_loss": 1.0}))
    done = shell.types(words)
    assert json.loads(done.out) == {"eval_loss": 1.0} and "whether the held-out samples are still the same" in done.err


def test_a_queued_evaluation_keeps_its_checkpoint_whatever_the_run_does(shell: Shell, run: RunDirectory) -> None:
    own = shell.submits("evaluate gpt-stdlib@1 +cluster=1x8 parallel.dp_shard=8")
    save = Path(load_config(own.config).train.evaluate_from or "")
    before = find_save(save)
    assert before.name.startswith("checkpoint_0000001_attempt_0001_")
    # The run is requeued, claims what it goes on from, saves and prunes.
    place = Place(root=run.checkpoints, attempt=2, keep=1)
    place.claim()
    place.prune(list_checkpoints(run.checkpoints)[0])
    renamed = find_save(save)
    assert not before.exists() and renamed.is_dir() and name_of(renamed).attempt == 2
    again = shell.types("evaluate gpt-stdlib@1 +cluster=1x8 parallel.dp_shard=8")
    assert again.code != 0 or again.job_and_run[1] == own, "the same save is the same evaluation"
    # A rollback goes back to before it.
    place.discard_from(1)
    assert find_save(save).name.startswith("passed_over_checkpoint_0000001_") and steps_in(run.checkpoints) == []


@pytest.mark.parametrize("end", ["cancelled", "job is gone", "measured"])
def test_a_checkpoint_is_let_go_when_its_evaluation_is_over(shell: Shell, run: RunDirectory, end: str) -> None:
    own = shell.submits("evaluate gpt-stdlib@1 +cluster=1x8 parallel.dp_shard=8")
    assert len(list_pins(run.checkpoints)) == 1
    run.epochs.mkdir(exist_ok=True)
    (run.epochs / "attempt_1").touch()
    job_id = (read_json(own.job) or {})["job_ids"][-1] if own.job.exists() else "4711"
    shell.slurm.queue(job_id, "PENDING")
    assert shell.types("checkpoint gc gpt-stdlib --keep 1").code == 0
    assert steps_in(run.checkpoints) == [2, 1], "it is queued"
    if end == "cancelled":
        shell.types("cancel", str(own.path))
        assert list_pins(run.checkpoints) == []
    elif end == "measured":
        own.result.write_text("{}")
    else:
        shell.slurm.queue(job_id, "CANCELLED")
    assert shell.types("checkpoint gc gpt-stdlib --keep 1").code == 0
    assert steps_in(run.checkpoints) == [2]


def test_a_start_that_slurm_refuses_keeps_nothing(shell: Shell, run: RunDirectory) -> None:
    shell.slurm.refuse("sbatch: error: invalid account")
    assert shell.types("evaluate gpt-stdlib@1 +cluster=1x8 parallel.dp_shard=8").code != 0
    assert list_pins(run.checkpoints) == []


def test_a_follower_is_a_small_job_that_keeps_what_it_has_not_scored(shell: Shell, run: RunDirectory) -> None:
    own = shell.submits("evaluate gpt-stdlib --follow +cluster=1x1 parallel.dp_shard=1 --keep 5")
    train = load_config(own.config).train
    assert (train.follow, train.evaluate_from) == ("", str(run.checkpoints))
    assert [(lease.follower_id, lease.most) for lease in read_leases(run.checkpoints)] == [(own.run_id, 5)]
    shell.slurm.queue("4711", "PENDING")
    place = Place(root=run.checkpoints, attempt=1, keep=1)
    place.prune(list_checkpoints(run.checkpoints)[0])
    assert steps_in(run.checkpoints) == [2, 1], "it waits in the queue, and the checkpoints wait for it"
    words = "evaluate gpt-stdlib --follow +cluster=1x1 parallel.dp_shard=1"
    assert "is active already" in shell.refuses("job 4711", words)
    assert len(read_leases(run.checkpoints)) == 1, "the lease is that of the job"
    named = shell.submits(f"{words} --name wiki")
    assert named != own and load_config(named.config).train.follow == "wiki"
    status = json.loads(shell.types("status gpt-stdlib --json").out)[0]
    assert {follower["run"] for follower in status["followers"]} == {own.run_id, named.run_id}
    assert f"follower {own.run_id}: queued, 0 scored" in shell.types("status gpt-stdlib").out
    shell.types("cancel", str(own.path))
    assert [lease.follower_id for lease in read_leases(run.checkpoints)] == [named.run_id]


def test_a_dead_follower_is_forgotten_when_something_is_started(shell: Shell, run: RunDirectory) -> None:
    own = shell.submits("evaluate gpt-stdlib --follow +cluster=1x1 parallel.dp_shard=1")
    shell.slurm.queue("4711", "CANCELLED")
    run.epochs.mkdir(exist_ok=True)
    (run.epochs / "attempt_1").touch()
    assert shell.types("checkpoint gc gpt-stdlib --keep 1").code == 0
    assert read_leases(run.checkpoints) == [] and own.config.exists()


def test_a_scorer_of_ones_own_needs_no_model_of_ours(shell: Shell, run: RunDirectory) -> None:
    (shell.folder / "score.py").write_text("print('{}')")
    run.config.write_text(
        dump_config(replace(load_config(run.config), task={"_target_": "my.main"}, parallel=ParallelSection()))
    )
    words = ("evaluate", "gpt-stdlib", "--follow", "--with", "script=[score.py,--fast]", "+cluster=1x1")
    own = shell.submits(*words)
    config = load_config(own.config)
    assert (config.script, config.task, config.train.follow) == (["score.py", "--fast"], None, "")
    assert (own.code / "score.py").exists(), "it runs as it was when it was submitted"
    named = [shell.submits(*words, "--name", name) for name in ("arc", "mmlu")]
    assert len({own, *named}) == 3, "each measures every checkpoint under its own name"
    shell.refuses("2 ranks are asked for", *words[:-1], "+cluster=1x2")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("evaluate gpt-stdlib --keep 3", "--keep 3 is for an evaluation that follows a run"),
        ("evaluate gpt-stdlib --name a", "--name a is for an evaluation that follows a run"),
        ("evaluate gpt-stdlib --follow --name a-b", "--name 'a-b' becomes a part of the names of measures"),
        ("evaluate gpt-stdlib --follow --with task=x", "--with task=x names no scorer"),
        ("evaluate gpt-stdlib --follow --keep -1", "--keep must be at least 0, got -1"),
        ("evaluate gpt-stdlib --follow data.path=other", "other data would give the measures"),
        ("evaluate gpt-stdlib data=text", "data.path"),
        ("generate gpt-stdlib +cluster=1x2", "no tokenizer is known"),
        ("generate gpt-stdlib +cluster=1x2 optim.rl=1", "there is no configuration key 'optim.rl'"),
        ("generate gpt-stdlib --top-k 0", "--top-k must be at least 1, got 0"),
        pytest.param(
            "generate gpt-stdlib --tokenizer none.json", "none.json is not a tokenizer file", marks=pytest.mark.full
        ),
    ],
)
def test_what_cannot_be_measured_or_continued_is_refused(
    shell: Shell, run: RunDirectory, words: str, text: str
) -> None:
    before = shell.left()
    shell.refuses(text, words)
    assert shell.left() == before


class Rounded(GPT):
    """Gives rounded weights as its `state_dict`, as a model for others may."""

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {name: parameter.detach().half() for name, parameter in self.named_parameters()}


@pytest.mark.full
def test_a_text_is_written_by_the_weights_that_were_trained(shell: Shell, run: RunDirectory) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    tokenizer = shell.folder / "tokenizer.json"
    vocabulary = {chr(ord("a") + number // 26) + chr(ord("a") + number % 26): number for number in range(256)}
    tokenizer.write_text(json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": vocabulary, "merges": []}}))
    words = f"generate gpt-stdlib --max-new-tokens 12 --tokenizer {tokenizer}"
    expected = shell.types(words).out
    assert len(expected) > 12
    config = load_config(run.config)
    model = {**(config.model or {}), "_target_": f"{__name__}.Rounded"}
    run.config.write_text(dump_config(replace(config, model=model)))
    assert shell.types(words).out == expected


@pytest.mark.full
def test_texts_are_a_run_of_their_own_too(shell: Shell, run: RunDirectory) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    tokenizer = shell.folder / "tokenizer.json"
    tokenizer.write_text(json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}))
    words = f"generate gpt-stdlib --prompt a --seed 3 --tokenizer {tokenizer} +cluster=1x2 parallel.dp_shard=1"
    own = shell.submits(words)
    asked = load_config(own.config).train.generate or {}
    assert (own.path.parent, asked["prompts"], asked["seed"]) == (run.path / "generations", ["a"], 3)
    shell.refuses("a text cannot be continued in a layout of", f"{words} parallel.cp=2")
    by_positions = "parallel.tp=2 parallel.sequence_parallel=true"
    shell.refuses("in a layout of tp 2 with parallel.sequence_parallel=true", f"{words} {by_positions}")
    shell.refuses("without a cluster works here", f"generate gpt-stdlib --tokenizer {tokenizer} train.precision=auto")
    checkpoint = list_checkpoints(run.checkpoints)[0]
    run.config.write_text(dump_config(RunConfig(task={"_target_": "my.main"})))
    shell.refuses("is a task or script of your own", f"evaluate {checkpoint}")
