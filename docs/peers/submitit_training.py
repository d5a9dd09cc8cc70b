"""The training as a user of submitit writes it: a Checkpointable, a loop, a file that is replaced at each save.

Everything below but the call of `checkpoint` is the user's own: what a checkpoint holds, replacing it atomically,
finding it again, and taking up the data in the middle of an epoch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import submitit
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from docs.peers.common_training import LOCAL_SIZE, SAVE_EVERY, Numbers, Tiny, note_done, note_step


class Training(submitit.helpers.Checkpointable):
    """Trains in `folder`; called on every rank, again after each requeue."""

    def __call__(self, folder: str, step_s: float, gate: str) -> int:
        self.folder = Path(folder)
        environment = submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        self.rank, self.step = environment.rank, 0
        self.model = DistributedDataParallel(Tiny(step_s, gate))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._load()
        data = Numbers()
        sampler = DistributedSampler(data, shuffle=True, seed=0)
        for number, (x, y) in enumerate(DataLoader(data, batch_size=LOCAL_SIZE, sampler=sampler), start=1):
            if number > self.step:
                self._step(x, y)
        if self.rank == 0:
            note_done(self.folder, self.model.module)
        return self.step

    def checkpoint(self, *args: Any, **kwargs: Any) -> submitit.helpers.DelayedSubmission:
        """Called by submitit in its signal handler, on rank 0 alone."""
        self._save()
        return submitit.helpers.DelayedSubmission(Training(), *args, **kwargs)

    def _step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        torch.nn.functional.mse_loss(self.model(x), y).backward()
        self.optimizer.step()
        self.step += 1
        if self.rank == 0:
            note_step(self.folder, self.step)
            if self.step % SAVE_EVERY == 0:
                self._save()

    def _save(self) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        temporary = self.folder / f"checkpoint.tmp-{os.getpid()}"
        torch.save(state, temporary)
        temporary.replace(self.folder / "checkpoint.pt")

    def _load(self) -> None:
        path = self.folder / "checkpoint.pt"
        if path.exists():
            state = torch.load(path)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]
