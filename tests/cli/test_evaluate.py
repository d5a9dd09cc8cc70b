"""`evaluate` and `generate`: what they plan, submit and refuse; what ranks do with it is in tests/end_to_end."""

from __future__ import annotations

import json
import re
from pathlib import Path
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
OWN = {"_target_": "no_such_package.Data"}


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
    # Found by its id alone, as every run.
    assert own.run_id in shell.types("status", own.run_id).out


def test_texts_are_a_run_of_their_own_too(shell: Shell, run: RunDirectory, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}))
    words = f"generate gpt-stdlib --prompt a --prompt b --seed 3 --tokenizer {tokenizer} +cluster=1x2 "
    own = shell.submits(words + "parallel.dp_shard=1")
    assert own.path.parent == run.path / "generations"
    asked = load_config(own.config).train.generate or {}
    assert (asked["prompts"], asked["seed"], asked["tokenizer"]) == (["a", "b"], 3, str(tokenizer))
    before = shell.left()
    shell.refuses("a text cannot be continued in a layout of", words + "parallel.dp_shard=1 parallel.cp=2")
    shell.refuses("without a cluster works here", f"generate gpt-stdlib --tokenizer {tokenizer} train.precision=auto")
    assert shell.left() == before


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("evaluate gpt-stdlib data=text", "data.path"),
        ("evaluate gpt-stdlib optim.rl=1", "there is no configuration key 'optim.rl'"),
        ("generate gpt-stdlib +cluster=1x2", "no tokenizer is known"),
        ("generate gpt-stdlib +cluster=1x2 optim.rl=1", "there is no configuration key 'optim.rl'"),
        ("generate gpt-stdlib --top-k 0", "--top-k must be at least 1, got 0"),
        ("generate gpt-stdlib --temperature nan", "--temperature must be at least 0, got nan"),
        ("generate gpt-stdlib --tokenizer none.json", "none.json is not a tokenizer file"),
        ("generate gpt-stdlib", "no tokenizer is known: data._target_=slurm_train.data.digits.build is not prepared"),
    ],
)
def test_what_cannot_be_measured_or_continued_is_refused(
    shell: Shell, run: RunDirectory, words: str, text: str
) -> None:
    before = shell.left()
    shell.refuses(text, words)
    assert shell.left() == before


def test_what_has_no_model_of_ours_is_refused(shell: Shell, run: RunDirectory) -> None:
    checkpoint = list_checkpoints(run.checkpoints)[0]
    run.config.write_text(run.config.read_text().replace("slurm_train.models.gpt.GPT", "torch.nn.Identity"))
    # Arguments of the GPT are nobody else's business.
    shell.refuses("Identity cannot generate text", f"generate {checkpoint}")
    shell.refuses("Identity cannot generate text", f"generate {checkpoint} +cluster=1x2 parallel.dp_shard=1")
    run.config.write_text(dump_config(RunConfig(task={"_target_": "my.main"})))
    shell.refuses("is a task or script of your own", f"evaluate {checkpoint}")
    run.config.unlink()
    assert re.search("config.yaml does not exist", shell.refuses("config.yaml", f"evaluate {checkpoint}"))
