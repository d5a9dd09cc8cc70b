"""A `transformers.Trainer` that is part of its run: a callback, and what to resume from.

From this folder; stop it with Ctrl-C and type the same again:

    python -m slurm_train "script=[session_transformers.py,--steps,200]"
    python -m slurm_train +cluster=2x2 "script=[session_transformers.py,--steps,200]"
"""

import argparse
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from slurm_train.adapters.transformers import SessionCallback

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--save-every", type=int, default=50)
parser.add_argument("--step-s", type=float, default=0.0, help="seconds that a batch takes at least")
options = parser.parse_args()


class Counting(torch.utils.data.Dataset):
    """Texts that count upwards."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + index) % 64
        return {"input_ids": tokens, "labels": tokens}


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    time.sleep(options.step_s)
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


set_seed(42)  # the Trainer does so only after the model has its first weights
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, attention_dropout=0.1, **sizes))
callback = SessionCallback()
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        "output",
        max_steps=options.steps,
        save_steps=options.save_every,
        logging_steps=1,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    ),
    train_dataset=Counting(),
    data_collator=collate,
    callbacks=[callback],
)
trainer.train(resume_from_checkpoint=callback.newest())
