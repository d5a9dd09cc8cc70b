"""A model of transformers from its configuration: trained in shards, exported, and loaded by the library itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from slurm_train.checkpoint.load import read_model
from slurm_train.metrics import read_metrics
from slurm_train.models.causal_lm import causal_lm
from tests.support.extras import NEEDS_TRANSFORMERS
from tests.support.small_checkpoints import checkpoint_of
from tests.support.warm_commands import WarmPerson
from tests.support.warm_ranks import LLAMA

pytestmark = [NEEDS_TRANSFORMERS, pytest.mark.distributed, pytest.mark.slow, pytest.mark.full]

SHAPE = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
CONFIG = ",".join(f"{key}:{value}" for key, value in SHAPE.items())
WORDS = ("run.name=shards", "model=hf", "model.model_type=llama",
         f"model.config={{{CONFIG}}}", "data.context=32", "train.max_steps=50",
         "train.log_every_steps=1", "train.eval_every_steps=null", "batch.global_size=8", "train.sample_tokens=0",
         "checkpoint.every_steps=null")  # fmt: skip
TOKENS = torch.randint(0, 257, (2, 32), generator=torch.Generator().manual_seed(0))


def test_a_llama_is_trained_in_shards_exported_and_loaded_by_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    person = WarmPerson(tmp_path, imports=LLAMA)
    shards = ("run.processes=2", "parallel.dp_replicate=1", "parallel.dp_shard=2")
    done = person.types(*WORDS, *shards, timeout_s=280)
    assert done.code == 0, done.err
    (run,) = (tmp_path / "runs" / "shards").iterdir()
    losses = [line["loss"] for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
    assert len(losses) == 50 and losses[-1] < 0.8 * losses[0]

    done = person.types("checkpoint", "export", "shards", "out", "--format", "hf", timeout_s=280)
    assert (done.code, done.out) == (0, "out\n"), done.err
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    ours = causal_lm(model_type="llama", config=SHAPE).eval()
    saved = read_model(checkpoint_of(run / "checkpoints", 50))[1]
    ours.load_state_dict(saved)
    with torch.no_grad():
        assert theirs(TOKENS).logits.equal(ours(TOKENS))
    back = causal_lm(path=str(tmp_path / "out")).state_dict()
    assert back.keys() == saved.keys() and all(tensor.equal(saved[name]) for name, tensor in back.items())
