"""Weights in transformers' layout: out and in again bit for bit, and transformers itself computes the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_train.config.target import instantiate
from slurm_train.errors import CheckpointError, ConfigError
from slurm_train.models.pretrained import load_pretrained, write_pretrained
from tests.support.extras import NEEDS_PEFT, NEEDS_TRANSFORMERS

pytestmark = NEEDS_TRANSFORMERS

TINY = {"_target_": "slurm_train.models.gpt.GPT", "vocab_size": 13, "context": 64, "num_layers": 2, "num_heads": 4,
        "width": 32, "hidden": 48}  # fmt: skip
LLAMA = {**TINY, "norm": "rmsnorm", "activation": "swiglu", "num_kv_heads": 2, "rope_theta": 5e5, "tied": False}
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 16}
GPT2 = {**TINY, "positions": "learned", "activation": "gelu_tanh", "bias": True}
FORMS = {
    "llama": LLAMA,
    "llama, tied, biases": {**LLAMA, "tied": True, "bias": True},
    "llama, stretched": {**LLAMA, "rope_scaling": SCALING},
    "gpt2": GPT2,
    "gpt2, untied, exact GELU": {**GPT2, "tied": False, "activation": "gelu"},
}
TOKENS = torch.randint(0, 13, (2, 64), generator=torch.Generator().manual_seed(0))


def model_of(settings: dict[str, Any], *, seed: int = 0) -> Any:
    """Returns a model whose every parameter is drawn, biases and norms too."""
    torch.manual_seed(seed)
    model = instantiate(settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def written(folder: Path, settings: dict[str, Any], *, shard_size: str = "5GB") -> Any:
    model = model_of(settings)
    write_pretrained(folder, model.state_dict(), model=settings, shard_size=shard_size)
    return model


@pytest.mark.parametrize("settings", FORMS.values(), ids=FORMS)
def test_transformers_computes_the_same_logits_and_the_way_back_is_exact(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    from transformers import AutoModelForCausalLM

    model = written(tmp_path / "out", settings)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, model(TOKENS), rtol=1e-5, atol=1e-5)
    back = model_of(settings, seed=1)
    load_pretrained(back, tmp_path / "out", settings=settings)
    saved, found = model.state_dict(), back.state_dict()
    assert saved.keys() == found.keys() and all(found[name].equal(saved[name]) for name in saved)


def test_large_weights_are_cut_into_files_with_an_index(tmp_path: Path) -> None:
    model = written(tmp_path / "out", LLAMA, shard_size="20KB")
    names = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(names.values())) > 2 and not (tmp_path / "out" / "model.safetensors").exists()
    back = model_of(LLAMA, seed=1)
    load_pretrained(back, tmp_path / "out", settings=LLAMA)
    assert all(back.state_dict()[name].equal(tensor) for name, tensor in model.state_dict().items())


def test_published_files_of_gpt2_have_shorter_names_and_masks(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = written(tmp_path / "out", GPT2)
    file = tmp_path / "out" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file({**tensors, "h.0.attn.bias": torch.ones(1, 1, 64, 64)}, file)
    back = model_of(GPT2, seed=1)
    load_pretrained(back, tmp_path / "out", settings=GPT2)
    assert all(back.state_dict()[name].equal(tensor) for name, tensor in model.state_dict().items())


def test_a_file_has_the_models_own_names(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    settings = {**TINY, "tied": False}
    model, back = model_of(settings), model_of(settings, seed=1)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    load_pretrained(back, tmp_path / "model.safetensors", settings=settings)
    assert all(back.state_dict()[name].equal(tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(ConfigError, match=r"it lacks blocks\.2\..* \.\.\.\n"):
        load_pretrained(model_of({**settings, "num_layers": 3}), tmp_path / "model.safetensors", settings=settings)


def test_weights_of_another_form_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "llama", LLAMA)
    for changes, message in (
        (
            {"rope_theta": 10000.0},
            "rope_parameters {'rope_theta': 10000.0, 'rope_type': 'default'}, there {'rope_theta",
        ),
        ({"norm_eps": 1e-6}, "rms_norm_eps 1e-06, there 1e-05"),
        ({"tied": True, "num_layers": 3}, "num_hidden_layers 3, there 2; tie_word_embeddings True, there False"),
    ):
        settings = {**LLAMA, **changes}
        with pytest.raises(ConfigError) as caught:
            load_pretrained(model_of(settings), tmp_path / "llama", settings=settings)
        assert f"holds weights of another form than this model's: {message}" in caught.value.message
    with pytest.raises(ConfigError, match="holds a model of type llama; this GPT's form is that of gpt2"):
        load_pretrained(model_of(GPT2), tmp_path / "llama", settings=GPT2)
    with pytest.raises(CheckpointError, match="the checkpoint's weights are not those of a llama of this shape"):
        write_pretrained(tmp_path / "x", model_of(LLAMA).state_dict(), model={**LLAMA, "width": 64}, shard_size="5GB")


def test_a_form_that_transformers_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has the form of this GPT: norm=layernorm, activation=gelu, positions=rope"):
        write_pretrained(tmp_path / "x", model_of(TINY).state_dict(), model=TINY, shard_size="5GB")
    assert not (tmp_path / "x").exists()


@NEEDS_PEFT
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft's own call of transformers
def test_adapters_are_written_alone_and_peft_computes_the_same_logits_with_them(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    written(tmp_path / "base", LLAMA)
    settings = {
        "_target_": "slurm_train.models.causal_lm.causal_lm",
        "path": str(tmp_path / "base"),
        "lora": {"r": 2, "target_modules": "all-linear"},
    }
    model = instantiate(settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter) * parameter.requires_grad)
    write_pretrained(tmp_path / "out", model.state_dict(), model=settings, shard_size="5GB")
    assert not (tmp_path / "out" / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", local_files_only=True)
    theirs = PeftModel.from_pretrained(base, tmp_path / "out").eval()
    with torch.no_grad():
        assert theirs(input_ids=TOKENS).logits.equal(model(TOKENS))
