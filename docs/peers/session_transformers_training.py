"""The training as a user of transformers.Trainer writes it, as a part of a run here: FOLDER STEP_S GATE."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments, set_seed

from docs.peers.common_training import LOCAL_SIZE, SAVE_EVERY, STEPS, Numbers, Tiny, note_done, note_step
from slurm_train.adapters.transformers import SessionCallback


class WithLoss(nn.Module):
    """A model that returns its loss, as the Trainer expects it."""

    def __init__(self, model: Tiny) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """x: (batch, 8), y: (batch, 1)."""
        return {"loss": nn.functional.mse_loss(self.model(x), y)}


class Noting(TrainerCallback):
    """Keeps the lines of steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_end(self, _: TrainingArguments, state: TrainerState, *__: Any, **___: Any) -> None:
        """Keeps the step's line."""
        if state.is_world_process_zero:
            note_step(self.folder, state.global_step)


def collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Returns a batch."""
    return {"x": torch.stack([x for x, _ in samples]), "y": torch.stack([y for _, y in samples])}


def main() -> None:
    """Trains to the end."""
    folder = Path(sys.argv[1])
    set_seed(0)
    model = WithLoss(Tiny(float(sys.argv[2]), sys.argv[3]))
    callback = SessionCallback()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            str(folder / "output"),
            max_steps=STEPS,
            save_steps=SAVE_EVERY,
            per_device_train_batch_size=LOCAL_SIZE,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=Numbers(),
        data_collator=collate,
        callbacks=[Noting(folder), callback],
    )
    trainer.train(resume_from_checkpoint=callback.newest())
    if trainer.is_world_process_zero() and trainer.state.global_step >= STEPS:
        note_done(folder, model.model)


if __name__ == "__main__":
    main()
