"""Sharded, tensor and pipeline parallel ranks on a real Slurm: preempted, brought back, equal to an undisturbed run."""

from __future__ import annotations

import pytest

from slurm_train.checkpoint.verify import newest_verified
from tests.support.cluster_faults import start_urgent_job
from tests.support.command_line import Person
from tests.support.ledgers import ledger_lines
from tests.support.slurm_runs import losses, wait_until_finished, wait_until_step
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(900)]

MODULE = """
import time
import torch
from torch.utils.data import Dataset
from slurm_train.models.gpt import GPT

class Words(Dataset):
    def __init__(self, split: str = "train"):
        generator = torch.Generator().manual_seed(7 if split == "train" else 8)
        self.tokens = torch.randint(0, 13, (64, 9), generator=generator)
    def __len__(self):
        return len(self.tokens)
    def __getitem__(self, index):
        return self.tokens[index, :-1], self.tokens[index, 1:]

class SlowGPT(GPT):
    def __init__(self, step_s: float = 0.0):
        super().__init__(
            vocab_size=13, context=8, num_layers=4, num_heads=4, width=16, hidden=32, dropout=0.1, tied=False
        )
        self.step_s = step_s
    def forward(self, tokens):
        time.sleep(self.step_s)
        return super().forward(tokens)
"""
WORDS = (
    "model._target_=words.SlowGPT",
    "model.step_s=0.05",
    "data._target_=words.Words",
    "parallel={dp_shard:2,tp:2,pp:2}",
    "batch.global_size=16",
    "train.max_steps=10",
    "train.log_every_steps=1",
    "train.eval_every_steps=5",
    "train.samples_digest=true",
    "checkpoint.every_steps=3",
)


def test_a_preempted_run_of_three_kinds_of_parallelism_ends_as_an_undisturbed_one(
    person: Person,
) -> None:
    (person.folder / "words.py").write_text(MODULE)
    nodes = "node[3-4]"
    where = ("+cluster=2x4", f"cluster.nodelist={nodes}", "run.name=preempted")
    job, run = person.types(*WORDS, *where).job_and_run
    wait_until_step(run, 4, within_s=300)
    start_urgent_job(["node3", "node4"])
    wait_for(lambda: len(ledger_lines(run)) == 2, within_s=120, what="a second attempt")
    found = wait_until_finished(run, within_s=400)
    first, second = ledger_lines(run)
    assert first["reason"] == "preempted" and first["job_id"] == second["job_id"] == job

    calm = person.types(*WORDS, "run.processes=8", "run.name=calm", timeout_s=400)
    assert calm.code == 0, calm.err
    (other,) = (person.folder / "runs" / "calm").iterdir()
    undisturbed = type(run)(other)
    assert losses(run) == losses(undisturbed) and sorted(losses(run)) == list(range(1, 11))
    expected = wait_until_finished(undisturbed)
    for key in ("weights_digest", "eval_loss", "samples"):
        assert found[key] == expected[key]
    newest = newest_verified(run.checkpoints).newest
    assert newest is not None
    assert newest[1].mesh == {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "tp": 2}
