"""Fine-tunes a causal language model of transformers with LoRA adapters on rows of a JSONL file.

From this folder (pip install 'slurm-train[lora,data]'):

    python finetune.py make
    python -m slurm_train run.name=finetune model=hf model.path=llama 'model.lora={r: 8}' data=hf data.path=chats.jsonl
    python -m slurm_train checkpoint export finetune adapter --format hf
    python finetune.py ask

`make` writes a small model with random weights and the rows, so that nothing has to be downloaded. With a model and
rows of your own, change `model.path`, `data.path` and `data.text_column`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

CHATS = [f"Question: {a} plus {b}? Answer: {a + b}." for a in range(40) for b in range(40)]


def make() -> None:
    """Writes llama/ (model and tokenizer) and chats.jsonl."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    Path("chats.jsonl").write_text("".join(json.dumps({"text": chat}) + "\n" for chat in CHATS), encoding="utf-8")
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokens.decoder = decoders.ByteLevel()
    tokens.train_from_iterator(CHATS, trainers.BpeTrainer(vocab_size=200, special_tokens=["</s>"], show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="</s>")
    tokenizer.save_pretrained("llama")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), eos_token_id=0, **shape)).save_pretrained("llama")


def ask() -> None:
    """Prints the loss of the model without and with the adapter that was exported."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained("llama")(CHATS[77], return_tensors="pt")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("llama"), "adapter").eval()
    with torch.no_grad():
        after = model(**tokens, labels=tokens["input_ids"]).loss
        with model.disable_adapter():
            before = model(**tokens, labels=tokens["input_ids"]).loss
    print(f"loss {before:.3f} without the adapter, {after:.3f} with it")


if __name__ == "__main__":
    {"make": make, "ask": ask}[sys.argv[1]]()
