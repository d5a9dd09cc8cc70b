"""`generate` on a real Slurm: replicas that take turns with the prompts, and ranks with a part of the model each."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.rundir.paths import RunDirectory
from tests.support.command_line import Person
from tests.support.slurm_runs import wait_until_finished

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
TRAINED_HERE = (
    *("run.name=a", "run.processes=1", "data=text", "data.path=shards", "data.context=16", "model.context=16"),
    *("model.num_layers=1", "model.num_heads=2", "model.width=32", "batch.global_size=8", "train.max_steps=20"),
    *("checkpoint.every_steps=20", "train.threads=1", "train.sample_tokens=0", "optim.warmup_samples=0"),
)
ASKED = ("generate", "a", "--prompt", "shards of", "--prompt", "pages, ", "--temperature", "0", "--max-new-tokens", "9")


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(("+cluster=1x2",), id="replicas", marks=pytest.mark.campaign),
        # The seed decides nothing at temperature 0, but makes another run: the texts of one layout are those of all.
        pytest.param(("--seed", "1", "+cluster=2x1", "parallel.dp_shard=2"), id="shards"),
    ],
)
@pytest.mark.campaign
def test_texts_are_those_of_this_machine(person: Person, where: tuple[str, ...]) -> None:
    (person.folder / "shards.txt").write_text("shards of 7 pages, " * 200)
    for typed in (("prepare", "shards.txt", "--out", "shards"), TRAINED_HERE):
        done = person.types(*typed)
        assert done.code == 0, done.err
    here = person.types(*ASKED)
    assert here.code == 0 and here.out.startswith("shards of") and "\npages, " in here.out, here.out + here.err
    run = RunDirectory(Path(person.types(*ASKED, *where).out.split()[1]))
    assert run.path.parent.name == "generations"
    wait_until_finished(run)
    again = person.types(*ASKED, *where)
    assert again.out == here.out and again.code == 0, again.out + again.err
