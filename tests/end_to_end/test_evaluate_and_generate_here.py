"""`evaluate` and `generate` with a text model that was trained here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slurm_train.rundir.paths import RunDirectory
from tests.support.command_line import Done, Person
from tests.support.warm_commands import WarmPerson

pytestmark = [pytest.mark.distributed, pytest.mark.full]
WORDS = (
    *("run.name=a", "run.processes=2", "data=text", "data.path=shards", "data.context=16", "model.context=16"),
    *("model.num_layers=1", "model.num_heads=2", "model.width=32", "batch.global_size=8", "train.max_steps=20"),
    *("checkpoint.every_steps=10", "train.threads=1", "train.sample_tokens=0", "optim.warmup_samples=0"),
)


@pytest.fixture(scope="module")
def person(tmp_path_factory: pytest.TempPathFactory) -> Person:
    person = WarmPerson(tmp_path_factory.mktemp("project"))
    for name in ("shards", "other"):
        (person.folder / f"{name}.texts").mkdir()
        for number in range(20):
            (person.folder / f"{name}.texts" / f"{number}.txt").write_text(f"{name} of {number} pages, " * 20)
        succeeds(person, "prepare", f"{name}.texts", "--out", name)
    succeeds(person, *WORDS)
    return person


def succeeds(person: Person, *words: str) -> Done:
    done = person.types(*words)
    assert done.code == 0, done.err
    return done


def run_of(person: Person) -> RunDirectory:
    (path,) = (person.folder / "runs" / "a").iterdir()
    return RunDirectory(path)


def evaluates(person: Person, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(succeeds(person, "evaluate", *words).out)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and "evaluations" not in str(path)
    }


def test_weights_are_measured_as_in_the_run_and_the_run_stays_as_it_is(person: Person) -> None:
    run = run_of(person)
    before, trained = contents(run.path), json.loads(run.result.read_text())
    # From a cold interpreter once.
    found = evaluates(Person(person.folder), "a")
    assert (found["step"], found["eval_loss"]) == (20, trained["eval_loss"])
    earlier = evaluates(person, "a@10", "parallel.dp_replicate=1", "parallel.dp_shard=2")
    assert earlier["step"] == 10 and earlier["eval_loss"] > found["eval_loss"]
    assert evaluates(person, "a", "data.path=other")["eval_loss"] > found["eval_loss"]
    again = succeeds(person, "evaluate", "a")
    assert json.loads(again.out) == found and not again.err, "what is known is not measured again"
    assert contents(run.path) == before
    assert len(list((run.path / "evaluations").iterdir())) == 3


def test_averaged_weights_are_measured_where_the_run_evaluates_them(person: Person) -> None:
    ema = "slurm_train.train.callbacks.EMA"
    callbacks = f"callbacks=[{{_target_: {ema}, decay: 0.5}}, {{_target_: {ema}, evaluate: true}}]"
    succeeds(person, *WORDS[1:], "run.name=averaged", callbacks)
    (path,) = (person.folder / "runs" / "averaged").iterdir()
    trained = json.loads((path / "result.json").read_text())
    in_parts = ("run.processes=2", "parallel.dp_replicate=1", "parallel.dp_shard=2")
    measured = succeeds(person, "evaluate", "averaged", *in_parts)
    assert "step 20: averaged weights, as in the training's own evaluations: " in measured.err
    assert json.loads(measured.out)["eval_loss"] == pytest.approx(trained["eval_loss"], rel=1e-6)
    weights_of_steps = evaluates(person, "averaged", "callbacks=[]")
    assert abs(weights_of_steps["eval_loss"] - trained["eval_loss"]) > 0.01
    assert weights_of_steps["eval_loss"] == pytest.approx(evaluates(person, "a")["eval_loss"], rel=1e-6)
    followed = succeeds(person, "evaluate", "averaged", "--follow")
    assert f"step 20: eval_loss {trained['eval_loss']:.4f}" in followed.err


def test_a_model_continues_a_text_and_the_seed_decides_how(person: Person) -> None:
    def text(*words: str, person: Person = person) -> str:
        return succeeds(person, "generate", "a", "--prompt", "shards of", "--max-new-tokens", "30", *words).out

    from_cold = text(person=Person(person.folder))
    assert from_cold == text("--seed", "0") != text("--seed", "1")
    likely = text("--temperature", "0")
    assert likely == text("--top-k", "1") and likely.startswith("shards of")
    assert len(likely) > len("shards of\n")
