"""The training as a user of Lightning writes it; run by srun in an sbatch script: FOLDER STEP_S REQUEUE_SIGNAL GATE.

Lightning saves and requeues when the signal comes (auto_requeue); the user adds the periodic checkpoints, and asks for
the newest of them at the start, which is what brings a run back that was killed without a signal.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from docs.peers.common_training import (
    LOCAL_SIZE,
    NUM_RANKS,
    SAVE_EVERY,
    STEPS,
    Numbers,
    Tiny,
    note_done,
    note_step,
)


class Training(pl.LightningModule):
    """The model with its loss and optimizer."""

    def __init__(self, folder: Path, model: Tiny) -> None:
        super().__init__()
        self.folder, self.model = folder, model

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """Returns the loss of a batch."""
        x, y = batch
        return torch.nn.functional.mse_loss(self.model(x), y)

    def on_train_batch_end(self, *_: Any) -> None:
        """Keeps the step's line."""
        if self.trainer.is_global_zero:
            note_step(self.folder, self.trainer.global_step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Trains to the end."""
    folder, step_s, requeue_signal = Path(sys.argv[1]), float(sys.argv[2]), signal.Signals[sys.argv[3]]
    pl.seed_everything(0)
    training = Training(folder, Tiny(step_s, sys.argv[4]))
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=NUM_RANKS,
        num_nodes=1,
        max_steps=STEPS,
        max_epochs=1,
        default_root_dir=folder,
        plugins=[SLURMEnvironment(auto_requeue=True, requeue_signal=requeue_signal)],
        callbacks=[ModelCheckpoint(dirpath=folder / "checkpoints", every_n_train_steps=SAVE_EVERY, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(training, DataLoader(Numbers(), batch_size=LOCAL_SIZE, shuffle=True), ckpt_path="last")
    if trainer.is_global_zero and trainer.global_step >= STEPS:
        note_done(folder, training.model)


if __name__ == "__main__":
    main()
