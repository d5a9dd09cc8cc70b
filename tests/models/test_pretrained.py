"""Weights in transformers' layout: out and in again bit for bit, and transformers itself computes the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from slurm_train.checkpoint.state import saved_buffers
from slurm_train.config.target import instantiate
from slurm_train.data.prepare import PrepareOptions, end_of_document, prepare
from slurm_train.errors import CheckpointError, ConfigError
from slurm_train.models.pretrained import load_pretrained, write_pretrained
from slurm_train.models.pretrained_names import require_adapters, tokenizer_directory
from tests.support.extras import NEEDS_PEFT, NEEDS_TRANSFORMERS

pytestmark = [NEEDS_TRANSFORMERS, pytest.mark.full]

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


def assert_read_back(model: Any, path: Path, settings: dict[str, Any]) -> None:
    back = model_of(settings, seed=1)
    load_pretrained(back, path, settings=settings, buffers={})
    saved, found = model.state_dict(), back.state_dict()
    assert saved.keys() == found.keys() and all(found[name].equal(saved[name]) for name in saved)


@pytest.mark.parametrize("settings", FORMS.values(), ids=FORMS)
def test_transformers_computes_the_same_logits_and_the_way_back_is_exact(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    from transformers import AutoModelForCausalLM

    model = written(tmp_path / "out", settings)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, model(TOKENS), rtol=1e-5, atol=1e-5)
    assert_read_back(model, tmp_path / "out", settings)


def test_large_weights_are_cut_into_files_with_an_index(tmp_path: Path) -> None:
    model = written(tmp_path / "out", LLAMA, shard_size="20KB")
    names = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(names.values())) > 2 and not (tmp_path / "out" / "model.safetensors").exists()
    assert_read_back(model, tmp_path / "out", LLAMA)


def test_published_files_of_gpt2_have_shorter_names_and_masks(tmp_path: Path) -> None:
    model, file = written(tmp_path / "out", GPT2), tmp_path / "out" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file({**tensors, "h.0.attn.bias": torch.ones(1, 1, 64, 64)}, file)
    assert_read_back(model, tmp_path / "out", GPT2)


def test_a_file_has_the_models_own_names(tmp_path: Path) -> None:
    settings, file = {**TINY, "tied": False}, tmp_path / "model.safetensors"
    model = model_of(settings)
    save_file(model.state_dict(), file)
    assert_read_back(model, file, settings)
    with pytest.raises(ConfigError, match=r"it lacks blocks\.2\..*, and 3 more\n"):
        load_pretrained(model_of({**settings, "num_layers": 3}), file, settings=settings, buffers={})


def test_running_statistics_come_from_the_file_where_it_has_them(tmp_path: Path) -> None:
    trained = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    trained(torch.randn(8, 2))
    weights = tmp_path / "model.safetensors"
    save_file(trained.state_dict(), weights)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    load_pretrained(model, weights, settings={}, buffers=saved_buffers(model))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in trained.state_dict().items())
    save_file({name: value for name, value in trained.state_dict().items() if "running" not in name}, weights)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    load_pretrained(model, weights, settings={}, buffers=saved_buffers(model))
    assert torch.equal(model[1].running_mean, torch.zeros(3)) and torch.equal(model[0].weight, trained[0].weight)


def test_weights_of_another_form_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "llama", LLAMA)
    for settings, message in (
        ({**LLAMA, "rope_theta": 1e4}, "weights of another form than this model's: rope_parameters {'rope_theta': 1"),
        ({**LLAMA, "num_layers": 3}, "weights of another form than this model's: num_hidden_layers 3, there 2"),
        (GPT2, "holds a model of type llama; this GPT's form is that of gpt2"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_pretrained(model_of(settings), tmp_path / "llama", settings=settings, buffers={})
        assert message in caught.value.message


@pytest.mark.parametrize(
    ("saved", "settings", "error", "message"),
    [
        (LLAMA, {**LLAMA, "width": 64}, CheckpointError, "the checkpoint's weights are not those of a llama of this s"),
        (TINY, TINY, ConfigError, "has the form of this GPT: norm=layernorm, activation=gelu, positions=rope"),
    ],
)
def test_what_transformers_could_not_read_is_not_written(
    tmp_path: Path, saved: dict[str, Any], settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        write_pretrained(tmp_path / "x", model_of(saved).state_dict(), model=settings, shard_size="5GB")
    assert not (tmp_path / "x").exists()


PISSA = {"r": 2, "init_lora_weights": "pissa_niter_2"}
ADAPTERS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "all linear": (LLAMA, {"r": 2, "target_modules": "all-linear"}, True),
    "dora": (LLAMA, {"r": 2, "use_dora": True}, True),
    "trained biases": (GPT2, {"r": 2, "bias": "all"}, True),
    "tied, trained head": (GPT2, {"r": 2, "modules_to_save": ["lm_head"]}, True),
    "tied, adapter at the head": (GPT2, {"r": 2, "target_modules": ["c_attn", "lm_head"]}, True),
    "tied, both trained as one": (GPT2, {"r": 2, "modules_to_save": ["lm_head"], "ensure_weight_tying": True}, True),
    "tied, some tokens": (GPT2, {"r": 2, "trainable_token_indices": [1, 2]}, True),
    "base changed at random": (LLAMA, PISSA, False),
    "base changed": (LLAMA, {"r": 2, "init_lora_weights": "olora"}, False),
    "tied, base changed, adapter at the head": (GPT2, {**PISSA, "target_modules": ["c_attn", "lm_head"]}, False),
    "tied, base changed, trained head": (GPT2, {**PISSA, "modules_to_save": ["lm_head"]}, False),
}
"""Form of the base, `model.lora`, and whether the adapters are enough: the base weights are still those of the base."""


def adapted(base: Path | str, lora: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns a model with adapters that were moved, as by a training, and its settings."""
    settings = {"_target_": "slurm_train.models.causal_lm.causal_lm", "path": str(base), "lora": lora}
    model = instantiate(settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter) * parameter.requires_grad)
    return model, settings


def assert_readers_get(model: Any, out: Path, *, base: Path | None) -> None:
    """Checks the logits that peft computes with a base, or transformers alone."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        expected = model(TOKENS)
        theirs = AutoModelForCausalLM.from_pretrained(base or out, local_files_only=True)
        if base is not None:
            theirs = PeftModel.from_pretrained(theirs, out)
        torch.testing.assert_close(theirs.eval()(input_ids=TOKENS).logits, expected, rtol=1e-5, atol=1e-5)


@NEEDS_PEFT
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of peft's own call; of tied heads
@pytest.mark.parametrize(("form", "lora", "is_adapter"), ADAPTERS.values(), ids=ADAPTERS)
def test_readers_of_adapters_get_the_model_that_was_trained(
    tmp_path: Path, form: dict[str, Any], lora: dict[str, Any], is_adapter: bool
) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    written(base, form)
    model, settings = adapted(base, lora)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    notes = write_pretrained(out, tensors, model=settings, shard_size="5GB")
    assert (out / "adapter_model.safetensors").exists() == is_adapter == (not notes)
    assert (out / "model.safetensors").exists() != is_adapter
    assert_readers_get(model, out, base=base if is_adapter else None)


@NEEDS_PEFT
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_adapters_whose_base_is_another_now_or_in_no_file_are_merged(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    written(base, LLAMA)
    model, settings = adapted(base, {"r": 2})
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file({name: tensor + 1 for name, tensor in load_file(base / "model.safetensors").items()},
              base / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    (note,) = write_pretrained(out, tensors, model=settings, shard_size="5GB")
    assert "is not as in" in note
    assert_readers_get(model, out, base=None)
    # Its weights were drawn at random.
    model, settings = adapted(base / "config.json", {"r": 2})
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert write_pretrained(tmp_path / "other", tensors, model=settings, shard_size="5GB")
    assert_readers_get(model, tmp_path / "other", base=None)


def test_generation_goes_on_and_ends_as_with_the_model_that_the_training_began_with(tmp_path: Path) -> None:
    """Several tokens end a text, sampling has its temperature, and the chat template is the same one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

    base = tmp_path / "base"
    written(base, LLAMA)
    words = Tokenizer(WordLevel({"<eos>": 0, "<eot>": 1, "yes": 2}, unk_token="<eos>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}<eot>{% endfor %}"
    tokenizer.save_pretrained(base)
    GenerationConfig(eos_token_id=[0, 1], do_sample=True, temperature=0.6).save_pretrained(base)
    for name, changes in (("out", {}), ("changed", {"eos_token_id": 2})):
        settings = {"_target_": "slurm_train.models.causal_lm.causal_lm", "path": str(base), "config": changes}
        tensors = instantiate(settings).state_dict()
        directory = tokenizer_directory(settings, {})
        write_pretrained(tmp_path / name, tensors, model=settings, shard_size="5GB", tokenizer=directory)
        read = GenerationConfig.from_pretrained(tmp_path / name)
        assert (read.eos_token_id, read.temperature) == (changes.get("eos_token_id", [0, 1]), 0.6)
        chat = [{"role": "user", "content": "yes"}]
        theirs = AutoTokenizer.from_pretrained(tmp_path / name)
        assert theirs.apply_chat_template(chat, tokenize=False) == "yes<eot>"


def test_a_tokenizer_is_known_where_the_data_name_it_or_were_prepared_with_it(tmp_path: Path) -> None:
    model, other, prepared = (tmp_path / name for name in ("model", "other", "prepared"))
    for folder, text in ((model, "1"), (other, "2"), (prepared, "1")):
        folder.mkdir()
        (folder / "tokenizer.json").write_text(text)
    settings = {"path": str(model)}
    assert tokenizer_directory(settings, {}) == model == tokenizer_directory(settings, {"path": str(prepared)})
    assert tokenizer_directory(settings, {"tokenizer": str(other / "tokenizer.json")}) == other
    (prepared / "tokenizer.json").write_text("3")
    assert tokenizer_directory(settings, {"path": str(prepared)}) == prepared
    assert tokenizer_directory({}, {"path": str(prepared)}) == prepared and tokenizer_directory({}, {}) is None


def test_a_model_of_prepared_text_has_its_tokenizer_and_ends_where_documents_end(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words = Tokenizer(WordLevel({"no": 0, "<eos>": 1, "yes": 2}, unk_token="<eos>"))
    words.pre_tokenizer = Whitespace()
    words.add_special_tokens(["<eos>"])
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").write_text("yes no yes " * 20)
    options = PrepareOptions(tokenizer=tmp_path / "tokenizer.json")
    prepare([tmp_path / "text"], out=tmp_path / "prepared", options=options)
    data = {"_target_": "slurm_train.data.text.build", "path": str(tmp_path / "prepared")}
    end, tokenizer = end_of_document(data), tokenizer_directory(LLAMA, data)
    tensors = model_of(LLAMA).state_dict()
    write_pretrained(tmp_path / "out", tensors, model=LLAMA, shard_size="5GB", tokenizer=tokenizer, end=end)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("yes no yes")["input_ids"] == [2, 0, 2] and theirs.eos_token_id == 1 == end
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.eos_token_id == 1
    assert_read_back(model_of(LLAMA), tmp_path / "out", LLAMA)
    assert end_of_document({"_target_": "slurm_train.data.stdlib.build"}) == 256
    assert end_of_document({"_target_": "my.Data", "path": str(tmp_path)}) is None


@pytest.mark.parametrize("lora", [16, "q_proj", {"r": 4, "init_lora_weights": "eva"}])
def test_adapters_that_cannot_be_meant_are_refused_without_peft(lora: Any) -> None:
    with pytest.raises(ConfigError):
        require_adapters(lora)
