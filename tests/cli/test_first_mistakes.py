"""What a new user types who comes from another trainer, or from Slurm: each answer has the next step in it."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Shell

NEXT_STEP = {
    # Keys of other trainers; tests/config/test_synonyms.py has every name.
    "lr=3e-4": "write optim.lr=3e-4",
    "learning_rate=true": "write optim.lr=3e-4",
    "bf16=true": "write train.precision=bfloat16",
    "batch_size=64": "write batch.global_size=64, over all ranks; batch.local_size=8",
    "trainer.max_epochs=3": "write train.max_epochs=3",
    "warmup_steps=100": "write optim.warmup_samples=3200, which is steps x global batch",
    "train.max_epochs=3 train.max_steps=90": "give one of them",
    "trainer.devices=8": "write +cluster=2x8, nodes x GPUs per node",
    "model.hidden_size=64": "write model.width=",
    "resume_from_checkpoint=true": "`resume RUN`",
    # Flags of other trainers and of Slurm.
    "--learning-rate 3e-4": "write optim.lr=3e-4",
    "--optim.lr 3e-4": "a setting has no dashes: write optim.lr=3e-4",
    "--nodes=2 --gpus-per-node=8": "write +cluster=2x8, nodes x GPUs per node",
    "--partition gpu": "write cluster.partition=gpu",
    "-p gpu": "a partition is cluster.partition=NAME",
    "--time=4:00:00": "write cluster.time=4:00:00",
    "+cluster=1x1 cluster.mem=64": "write cluster.memory_gb_per_node=64",
    "+cluster=1x1 cluster.sbatch.time=60": "cluster.time_limit_min",
    "--dry-run": "`plan` in front of the words",
    "--multi-run": "did you mean --multirun?",
    # Words that are no verbs here.
    "train": "the settings alone train",
    "trian": "the settings alone train",
    "train.py --epochs 3": '"script=[train.py,--epochs,3]"',
    "python train.py": '"script=[train.py,--flag]"',
    "sbatch job.sh": "leave it out: this program starts the ranks",
    "evaluate": "the following arguments are required: RUN",
    "squeue": "`status -w`",
    "4x8": "write +cluster=4x8",
    "my_conf/base.yaml": "write --config-dir my_conf --config-name base",
    "corpus.parquet": "write data=hf data.path=corpus.parquet",
    # Slips of the keyboard, and what the shell makes of blanks and quotes.
    "optim.lr=\u20183e-4\u2019": "type plain ones",
    "train.precision=bf16": '"train.precision=bfloat16"',
    "script=train.py": '"script=[train.py]"',
    "task=train.main": '"task._target_=train.main"',
    "seed=1 plan": "the verb is the first word: python -m slurm_train plan",
    "--config my.yaml": "--config-dir DIR",
    "resume 3f9a1c07 --lr 1e-4": "settings are key=value, without dashes",
    "+optim.lr=1e-4": "without the +",
    "cluster=4": "write +cluster=4x8 for 4 nodes with 8 GPUs each, or +cluster=1x4 for 4 GPUs of one node",
    "optim.lr 3e-4": "write optim.lr=3e-4, without blanks",
    "optim.lr = 3e-4": "write optim.lr=3e-4, without blanks",
    "optim.lr: 3e-4": "write optim.lr=3e-4, without blanks",
    "optim.betas=[0.9, 0.95]": 'with its blanks in quotes: "optim.betas=[0.9, 0.95]"',
    '"optim.lr=\'3e-4"': "quote a value",
    "optim.lr=1e-3,3e-4": "add -m",
    "optm.lr=3e-4": "write optim.lr=3e-4",
    "optim.lrr=3e-4": "did you mean optim.lr",
    "optimizer=sgd": "write optim=sgd",
    "optim.momentum=0.8": "write optim=sgd optim.momentum=0.8",
    "train.max_steps=1e3": 'for example "train.max_steps=8"',
    "batch.local_size=8 batch.global_size=9": "hint: ",
    # Things that are not there.
    "data=text data.path=corpus.txt": "make it with `python -m slurm_train prepare",
    "--config-dir conf": "name a folder with your YAML files",
    "site=mycluster +cluster=1x1": "init mycluster",
    "model._target_=my_model.Model": "hint: ",
    "resume 3f9a1c07": "hint: ",
}
"""What is typed -> a part of the answer."""


@pytest.mark.parametrize("words", NEXT_STEP)
def test_a_mistake_is_answered_with_the_next_step(words: str, shell: Shell) -> None:
    shell.refuses(NEXT_STEP[words], words)
    assert shell.left() == [] and shell.slurm.said("submitted.sh") is None


@pytest.mark.parametrize("words", ["plan -h", "status -h", "resume --help", "checkpoint export -h", "-h train"])
def test_help_behind_a_verb_is_help(words: str, shell: Shell) -> None:
    done = shell.types(words)
    assert done.code == 0 and "python -m slurm_train" in done.out
