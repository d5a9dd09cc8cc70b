"""The verb `rehearse`: a program that comes back and one that does not, and what it leaves alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support import light_training
from tests.support.command_line import Person

PRINTS = """
import os, time
open("mine.txt", "a").write("again")
os.makedirs("checkpoints", exist_ok=True)
for step in range(1, 100):
    open("checkpoints/last.pt", "w").write(str(step))
    time.sleep(0.1)
    print(f"step {step}/99 loss {1 / step:.4f}", flush=True)
"""


WRITES_BESIDE_ITS_SOURCE = """
import time
from slurm_train import session
open("args.yml", "a").write("new: 1")
run = session.join()
saved = run.newest()
for step in range(saved.step + 1 if saved else 1, 100):
    time.sleep(0.1)
    run.report(step, loss=1 / step, max_steps=99)
    if run.should_stop():
        with run.save(step) as folder:
            (folder / "step").write_text(str(step))
        run.leave()
"""


@pytest.fixture
def person(tmp_path: Path) -> Person:
    folder = tmp_path / "project"
    folder.mkdir()
    return Person(folder)


def test_a_program_that_loads_nothing_does_not_survive_and_leaves_the_folder_alone(person: Person) -> None:
    (person.folder / "prints.py").write_text(PRINTS)
    done = person.types("rehearse", "script=[prints.py]", "--steps", "6", "--only", "killed", "--json")
    assert done.code == 1, done.err
    facts = json.loads(done.out)
    (row,) = facts["rows"]
    assert (row["key"], row["is_good"], row["outcome"]) == ("killed", False, "began_anew")
    assert row["came_back"] == "began anew at step 1"
    assert "checkpoints/last.pt" in row["advice"] and row["see"] == "docs/scripts.md#the-scripts-own-resume"
    assert sorted(path.name for path in person.folder.iterdir()) == ["prints.py", "runs"]
    status = person.types("status", "--json")
    assert "prints" not in status.out + status.err, "rehearsed runs are no runs of the person"


@pytest.mark.full
def test_a_program_of_two_ranks_that_prints_no_step_is_disturbed_by_the_clock_and_on_as_many_ranks(
    person: Person,
) -> None:
    (person.folder / "silent.py").write_text("import time\ntime.sleep(100)\n")
    words = ("script=[silent.py]", "run.processes=2", "--seconds", "1", "--json")
    facts = json.loads(person.types("rehearse", *words, timeout_s=200).out)
    assert [(row["key"], row["is_good"]) for row in facts["rows"]] == [("preempted", False), ("killed", False)]
    assert all("printed nothing" in row["advice"] and row["ended_after_s"] is not None for row in facts["rows"])


@pytest.mark.full
def test_what_a_program_writes_beside_its_source_keeps_it_from_no_second_start(person: Person) -> None:
    (person.folder / "writes.py").write_text(WRITES_BESIDE_ITS_SOURCE)
    words = ("script=[writes.py]", "--steps", "6", "--only", "preempted", "--json")
    done = person.types("rehearse", *words, timeout_s=400)
    assert done.code == 0, (done.out, done.err)


@pytest.mark.full
def test_a_program_of_the_session_survives_a_kill_and_a_preemption(person: Person) -> None:
    light_training.add_program(person)
    words = light_training.words(steps=400, step_s=0.1, save_every=3)
    done = person.types("rehearse", *words, "--only", "preempted,killed", "--json", timeout_s=200)
    facts = json.loads(done.out)
    assert done.code == 0, (done.out, done.err)
    preempted, killed = facts["rows"]
    assert (preempted["is_good"], preempted["repeated"], preempted["left_out"]) == (True, 0, 0)
    assert preempted["losses"].startswith("equal") and killed["losses"].startswith("equal")


SEEDED_BY_ITS_SHELL = """
import os, random, time
random.seed(int(os.environ["RUN_ID"]))
step = int(open("last.pt").read()) if os.path.exists("last.pt") else 0
while step < 60:
    step += 1
    open("last.pt", "w").write(str(step))
    time.sleep(0.2)
    print(f"step {step} loss {random.random()}", flush=True)
"""


@pytest.mark.full
def test_a_variable_that_a_shell_sets_anew_at_each_start_is_named(person: Person) -> None:
    (person.folder / "train.py").write_text(SEEDED_BY_ITS_SHELL)
    (person.folder / "run.sh").write_text("export RUN_ID=$RANDOM SAME=1\npython train.py\n")
    words = ("script=[bash,run.sh]", "--steps", "10", "--only", "killed", "--json")
    (row,) = json.loads(person.types("rehearse", *words, timeout_s=200).out)["rows"]
    assert (row["outcome"], row["is_good"]) == ("came_back", False) and row["losses"].startswith("differ")
    assert [fact.partition(";")[0] for fact in row["facts"]] == ["another value at its second start: RUN_ID"]


@pytest.mark.parametrize(
    ("program", "place"),
    [
        (
            "import os\nopen(os.path.join(os.path.dirname(os.path.realpath(__file__)), *['data', 'x.bin']))",
            "data/x.bin",
        ),
        # Its own error names no place.
        (
            "from pathlib import Path\nif not (Path(__file__).parents[1] / 'sets').exists(): raise SystemExit('none')",
            "sets",
        ),
    ],
)
def test_what_a_program_did_not_find_beside_its_source_is_named(person: Person, program: str, place: str) -> None:
    for path in (person.folder / "data/x.bin", person.folder.parent / "sets/x.bin"):
        path.parent.mkdir()
        path.write_text("x")
    (person.folder / "fails.py").write_text(program)
    done = person.types("rehearse", "script=[fails.py]")
    hint = done.err.partition("hint: ")[2].partition(": not in the run's copy of the code")[0]
    assert done.code == 2 and place in hint, done.err
    shutil.rmtree(person.folder / "runs")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--steps", "3"), "--steps=3"),
        (("--only", "fire"), "--only=fire"),
        (("--pattern", "step"), "has no group `step`"),
        (("--pattern", "("), "no regular expression"),
    ],
)
def test_wrong_words_are_refused_before_anything_is_written(
    person: Person, words: tuple[str, ...], message: str
) -> None:
    (person.folder / "prints.py").write_text(PRINTS)
    done = person.types("rehearse", "script=[prints.py]", *words)
    assert (done.code, message in done.err) == (2, True), done.err
    assert not (person.folder / "runs").exists()


def test_a_program_gets_all_variables_but_secrets_and_is_named_with_its_error_where_it_fails(person: Person) -> None:
    (person.folder / "fails.py").write_text("import os\nprint(os.environ['MY_DATA'])\nos.environ['MY_API_KEY']\n")
    done = person.types("rehearse", "script=[fails.py]", env={"MY_DATA": "here", "MY_API_KEY": "s"})
    assert done.code != 0 and "MY_API_KEY" in done.err and "all but secrets" in done.err
    shutil.rmtree(person.folder / "runs")
