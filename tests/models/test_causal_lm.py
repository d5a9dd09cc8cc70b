from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slurm_train.config.schema import RunConfig
from slurm_train.errors import ConfigError
from slurm_train.models.build import build_model
from slurm_train.models.causal_lm import causal_lm
from slurm_train.models.first_weights import build_without_memory, fill, first_values
from slurm_train.models.objective import Objective
from tests.support.extras import NEEDS_PEFT, NEEDS_TRANSFORMERS

SHAPE = {"vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA: dict[str, Any] = {"model_type": "llama", "config": {**SHAPE, "intermediate_size": 24, "num_key_value_heads": 2}}
GPT2: dict[str, Any] = {"model_type": "gpt2", "config": SHAPE}
QWEN3: dict[str, Any] = {**LLAMA, "model_type": "qwen3"}
TOKENS = torch.arange(12)[None]
TARGET = "slurm_train.models.causal_lm.causal_lm"


@pytest.mark.full
@NEEDS_TRANSFORMERS
def test_a_padded_dict_is_scored_as_the_library_does_and_its_parts_add_up() -> None:
    model = causal_lm(**LLAMA).eval()
    ids = torch.randint(0, 13, (3, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 4:] = mask[2, 2:] = 0
    batch: Any = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    expected = model.network(**batch).loss
    # The library's own class, with a head for any keyword, is the same to the objective.
    for one in (model, model.network):
        parts = [Objective(one)({key: value[part] for key, value in batch.items()}) for part in (slice(1), slice(1, 3))]
        assert sum(count for _, count in parts) == 3 + 6 + 1
        torch.testing.assert_close(sum(loss for loss, _ in parts) / 10, expected)
    with pytest.raises(ConfigError, match="a batch has token_type_ids, which CausalLM does not take"):
        Objective(model).call.check_batch({**batch, "token_type_ids": mask})


@pytest.mark.full
@NEEDS_TRANSFORMERS
def test_what_cannot_be_cut_is_refused_with_the_reason() -> None:
    for words, reason in (
        (GPT2, "gpt2 cannot be cut: transformers has no tensor parallel plan for it"),
        (QWEN3, "qwen3 cannot be cut: its plan in transformers has the ways replicated_with_grad_allreduce"),
    ):
        with pytest.raises(ConfigError) as caught:
            causal_lm(**words).tensor_parallel_plan()
        assert caught.value.message.startswith(f"parallel.tp was asked, but {reason}")
    model = causal_lm(**LLAMA)
    ours = model.tensor_parallel_plan()
    assert len(ours) == 7 and ours["network.model.layers.*.self_attn.o_proj"] == "rowwise"
    assert set(model.tensor_parallel_counts().values()) == {4, 2, 24}
    plan = dict(model.network.config.base_model_tp_plan)
    del plan["layers.*.self_attn.k_proj"]
    model.network.config.base_model_tp_plan = plan
    with pytest.raises(ConfigError, match=r"leaves network\.model\.layers\.0\.self_attn\.k_proj\.weight whole"):
        model.tensor_parallel_plan()


@pytest.mark.full
@NEEDS_TRANSFORMERS
def test_a_directory_gives_its_weights_and_its_configuration_alone_gives_others(tmp_path: Path) -> None:
    model = causal_lm(**LLAMA)
    model.network.to(torch.bfloat16).save_pretrained(tmp_path / "out")
    back, other = (causal_lm(path=str(tmp_path / "out" / name)) for name in ("", "config.json"))
    saved = model.state_dict()
    assert all(tensor.equal(saved[name].float()) for name, tensor in back.state_dict().items())
    assert not other.state_dict()["network.lm_head.weight"].equal(saved["network.lm_head.weight"].float())
    assert {parameter.dtype for parameter in back.parameters()} == {torch.float32}
    (tmp_path / "out" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"holds no model\.safetensors\nhint: for weights drawn at random name the f"):
        causal_lm(path=str(tmp_path / "out"))


@pytest.mark.full
@NEEDS_TRANSFORMERS
def test_without_memory_the_files_are_read_by_parts(tmp_path: Path) -> None:
    causal_lm(**LLAMA).network.to(torch.bfloat16).save_pretrained(tmp_path)
    expected = causal_lm(path=str(tmp_path)).state_dict()
    model = build_without_memory(lambda: causal_lm(path=str(tmp_path)), seed=0)
    reads = first_values(model)
    first = next(name for name, tensor in expected.items() if tensor.dim() == 2)
    part = (slice(1, 3), slice(2, 7))
    assert reads[first](part).float().equal(expected[first][part])
    fill([model], reads, device=torch.device("cpu"))
    assert all(tensor.equal(expected[name]) for name, tensor in model.state_dict().items())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.full
@NEEDS_TRANSFORMERS
def test_files_that_the_library_converts_are_read_by_the_library(tmp_path: Path) -> None:
    network = causal_lm(**LLAMA).network
    network.save_pretrained(tmp_path)
    # A base model's names have no first word.
    tensors = {
        name.removeprefix("model."): tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = RunConfig(model={"_target_": TARGET, "path": str(tmp_path)})
    notes: list[str] = []
    model = build_model(config, note=notes.append)
    assert len(notes) == 1 and f"transformers converts what is in {tmp_path}" in notes[0]
    assert all(tensor.equal(model.state_dict()[f"network.{name}"]) for name, tensor in network.state_dict().items())


@pytest.mark.full
@NEEDS_PEFT
def test_with_lora_the_adapters_alone_are_trained_and_begin_on_what_the_files_have(tmp_path: Path) -> None:
    causal_lm(**LLAMA).network.save_pretrained(tmp_path)
    model = build_without_memory(lambda: causal_lm(path=str(tmp_path), lora={"r": 2}), seed=0)
    assert all(parameter.is_meta for parameter in model.parameters())
    fill([model], first_values(model), device=torch.device("cpu"))
    adapters = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" in name}
    assert all(tensor.any() == (".lora_A." in name) for name, tensor in adapters.items())
    with torch.no_grad():
        assert model(TOKENS).equal(causal_lm(path=str(tmp_path))(TOKENS))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 8 and all(".lora_" in name for name in trained)  # two layers, two matrices, A and B
    assert model.sharding_plan() == tuple(f"network.base_model.model.model.layers.{number}" for number in range(2))
    with pytest.raises(ConfigError, match=r"parallel\.tp was asked, but llama cannot be cut: model\.lora puts"):
        model.tensor_parallel_plan()
    with pytest.raises(ConfigError, match=r"peft does not take model\.lora=\{'rank': 2\}"):
        causal_lm(**LLAMA, lora={"rank": 2})
    for lora in ({"r": 2, "init_lora_weights": "gaussian"}, {"r": 2, "use_dora": True}):
        config = RunConfig(model={"_target_": TARGET, "path": str(tmp_path), "lora": lora})
        assert not first_values(build_model(config)), lora


@pytest.mark.full
@NEEDS_TRANSFORMERS
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({}, "model=hf was given model.model_type=None and model.path=None; it takes one of them"),
        ({"path": "meta-llama/none"}, "model.path=meta-llama/none: there is no meta-llama/none/config.json"),
        ({"model_type": "lama"}, "transformers does not take the model's configuration: Unrecognized model identif"),
        ({"model_type": "vit"}, "transformers has no causal language model of type vit"),
        (
            {"model_type": "llama", "config": {"hiden_size": 3}},
            "model.config has 'hiden_size', which the architecture llama does not know\nhint: did you mean hidden_size",
        ),
    ],
)
def test_words_that_name_no_model_are_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        causal_lm(**words)
    assert str(caught.value).startswith(message)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"hint: pip install 'slurm-train\[hf\]'"):
        causal_lm(**LLAMA)
