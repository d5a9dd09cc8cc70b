"""The training of `lightning_training`, as a part of a run here: FOLDER STEP_S GATE.

What differs is the callback, and that there is neither a requeue nor a checkpoint of the user's own to set up.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from docs.peers.common_training import LOCAL_SIZE, NUM_RANKS, SAVE_EVERY, STEPS, Numbers, Tiny, note_done, note_step
from docs.peers.lightning_training import Training
from slurm_train.adapters.lightning import SessionCallback


class Noting(pl.Callback):
    """Keeps the lines of steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Keeps the step's line."""
        if trainer.is_global_zero:
            note_step(self.folder, trainer.global_step)


class Plain(Training):
    """Without its own line of a step: where the ranks stop, Lightning does not come to the module's hook any more."""

    def on_train_batch_end(self, *_: Any) -> None:
        """Keeps nothing."""


def main() -> None:
    """Trains to the end."""
    folder = Path(sys.argv[1])
    pl.seed_everything(0)
    training = Plain(folder, Tiny(float(sys.argv[2]), sys.argv[3]))
    callback = SessionCallback(every_steps=SAVE_EVERY, log_every_steps=1)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=NUM_RANKS,
        num_nodes=1,
        max_steps=STEPS,
        max_epochs=1,
        callbacks=[Noting(folder), callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = Numbers()
    # An order of its own: around a shuffled loader Lightning's sampler draws from torch's generator.
    sampler = DistributedSampler(data, num_replicas=NUM_RANKS, rank=callback.session.rank)
    loader = StatefulDataLoader(data, batch_size=LOCAL_SIZE, sampler=sampler)
    trainer.fit(training, loader, ckpt_path=callback.newest())
    if trainer.is_global_zero and trainer.global_step >= STEPS:
        note_done(folder, training.model)


if __name__ == "__main__":
    main()
