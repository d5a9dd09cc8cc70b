"""`evaluate` and `generate`: what they plan, submit and refuse; what ranks do with it is in tests/end_to_end."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from slurm_train.checkpoint.save import save_checkpoint
from slurm_train.config.frozen import dump_config, load_config
from slurm_train.config.schema import ClusterSection, ParallelSection, RunConfig
from slurm_train.models.gpt import GPT
from slurm_train.rundir.paths import RunDirectory, list_checkpoints
from tests.cli.conftest import Shell
from tests.support.small_checkpoints import make_header

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
    own = shell.submits("evaluate gpt-stdlib@1 +cluster=1x8 parallel.dp_shard=8")
    assert own.path.parent == run.path / "evaluations"
    config = load_config(own.config)
    assert (config.train.evaluate_from or "").startswith(f"{run.checkpoints}/checkpoint_0000001_")
    assert (config.cluster.nodes, config.cluster.partition) == (1, "gpu"), "another size of the run's cluster"
    assert [name for name in shell.left() if name not in before and "/evaluations" not in name] == []
    assert shell.submits("evaluate gpt-stdlib@2 +cluster=1x8") != own, "another checkpoint is another record"
    shell.slurm.queue("4711", "PENDING")
    assert "is active already" in shell.refuses("job 4711", "evaluate gpt-stdlib@2 +cluster=1x8")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("evaluate gpt-stdlib data=text", "data.path"),
        ("generate gpt-stdlib +cluster=1x2", "no tokenizer is known"),
        ("generate gpt-stdlib +cluster=1x2 optim.rl=1", "there is no configuration key 'optim.rl'"),
        ("generate gpt-stdlib --top-k 0", "--top-k must be at least 1, got 0"),
        ("generate gpt-stdlib --tokenizer none.json", "none.json is not a tokenizer file"),
    ],
)
def test_what_cannot_be_measured_or_continued_is_refused(
    shell: Shell, run: RunDirectory, words: str, text: str
) -> None:
    before = shell.left()
    shell.refuses(text, words)
    assert shell.left() == before


def test_texts_are_a_run_of_their_own_too(shell: Shell, run: RunDirectory) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    tokenizer = shell.folder / "tokenizer.json"
    tokenizer.write_text(json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}))
    words = f"generate gpt-stdlib --prompt a --seed 3 --tokenizer {tokenizer} +cluster=1x2 parallel.dp_shard=1"
    own = shell.submits(words)
    asked = load_config(own.config).train.generate or {}
    assert (own.path.parent, asked["prompts"], asked["seed"]) == (run.path / "generations", ["a"], 3)
    shell.refuses("a text cannot be continued in a layout of", f"{words} parallel.cp=2")
    shell.refuses("without a cluster works here", f"generate gpt-stdlib --tokenizer {tokenizer} train.precision=auto")
    checkpoint = list_checkpoints(run.checkpoints)[0]
    run.config.write_text(dump_config(RunConfig(task={"_target_": "my.main"})))
    shell.refuses("is a task or script of your own", f"evaluate {checkpoint}")
