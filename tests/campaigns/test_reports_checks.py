"""The checks of the campaign `reports` find what they are for; without a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns import reports
from tests.campaigns.record import Tally
from tests.support.command_line import Done, Person

pytestmark = pytest.mark.full

BASE_60 = "#SBATCH --begin=960\n#SBATCH --comment=83\n#SBATCH --wckey=12000.0\nexport JOB_CODE=493\nexport START=90\n"
AS_WRITTEN = (
    "#SBATCH --begin=16:00\n#SBATCH --comment=0123\n#SBATCH --wckey=12e3\nexport JOB_CODE=0755\nexport START=1:30\n"
)
CHECKS = [
    (reports._yaml_values, Done(0, BASE_60, ""), 5),
    (reports._yaml_values, Done(0, AS_WRITTEN, ""), 0),
    (reports._yaml_values, Done(2, "", "hint: put it in quotes"), 0),
    (reports._yaml_values, Done(2, "", "error: no"), 1),
    (reports._yaml_limit, Done(2, "", "hint: write cluster.time=43200"), 2),
    (reports._refused_with(("a", "b"), 1, "cluster.account"), Done(0, "", "would refuse it: b"), 2),
    (reports._refused_with(("a", "b"), 1, "cluster.account"), Done(0, "", "a; b; cluster.account"), 0),
    (reports._no_arrays, Done(2, "", "sbatch gave no reason"), 1),
    (reports._other_message, Done(0, "", "would refuse it; set cluster.constraint"), 1),
    (reports._other_message, Done(0, "", "would refuse it; set cluster.memory_gb_per_gpu"), 0),
    (reports._requeue_by_exit_code, Done(0, "", "comes back requeue"), 2),
    (
        reports._launcher_that_is_seen,
        Done(2, "", "bash: torchrun (wrap.sh, line 2) starts ranks; script=[train.py]"),
        0,
    ),
    (reports._launcher_that_is_seen, Done(0, "7 /runs/a/1f", ""), 4),
    (reports._lines_of_sinfo, Done(2, "CONTROLLER_AWAY", "cannot read sinfo's line"), 2),
]


@pytest.mark.parametrize(("find_problems", "answer", "number"), CHECKS)
def test_what_is_said_is_judged(
    find_problems: reports.Find, answer: Done, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Person, "types", lambda *_words, **_more: answer)
    person = Person(tmp_path / "project")
    person.folder.mkdir()
    assert len(list(find_problems(person))) == number


def test_a_situation_that_cannot_be_typed_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Person, "types", lambda *_words, **_more: Done(2, "", "error: no cluster"))
    monkeypatch.setattr(reports, "command", lambda *_words, **_more: "")
    tally = Tally()
    reports.run(tally, seed=1, trials=4, folder=tmp_path)
    assert (tally.trials, tally.is_kept) == (4, False)
