"""A script that was to resume by its own words and begins anew is ended; one that goes on, or may, is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.rundir.events import read_events
from slurm_train.rundir.own_resume import BEGAN_ANEW, OwnResume, mark_taken, record_own_resume
from slurm_train.rundir.paths import RunDirectory
from slurm_train.supervise.look import Look, Ranks
from slurm_train.supervise.own_resume import OwnResumeCheck


def steps(first: int, last: int) -> str:
    return "".join(f"step {step}/100 loss 1.5\n" for step in range(first, last + 1))


@pytest.mark.parametrize(
    ("words", "log", "has_opened", "is_ended"),
    [
        (["--resume", "latest"], steps(1, 5), False, True),
        (["--resume", "latest"], steps(1, 5), True, False),
        (["--resume", "latest"], steps(21, 25), False, False),
        (["--resume", "latest"], "loading\n", False, False),
        ([], steps(1, 5), False, False),
        (None, steps(1, 5), False, False),
    ],
)
def test_a_script_that_begins_anew_is_ended(
    tmp_path: Path, words: list[str] | None, log: str, *, has_opened: bool, is_ended: bool
) -> None:
    run = RunDirectory(tmp_path)
    for attempt, text in enumerate((steps(1, 24), log)):
        run.attempt_logs(attempt).mkdir(parents=True)
        run.rank_log(attempt, 0).write_text(text)
    if words is not None:
        record_own_resume(run, 1, OwnResume(words=words, checkpoint="20.pt", checkpoints=["20.pt"]))
    if has_opened:
        mark_taken(run, 1)
    ended: list[object] = []
    check = OwnResumeCheck(run, end_ranks=ended.append)
    verdict = check(Look(ranks=Ranks(attempt=1, world_size=1), now_s=10.0, now_unix_s=0.0))
    assert verdict is not None
    verdict()
    events = read_events(run, BEGAN_ANEW, attempt=1)
    assert (len(ended), len(events)) == (int(is_ended), int(is_ended))
    if is_ended:
        assert "attempt 0 had come to 24/100" in events[0]["sentence"]


@pytest.mark.parametrize(("log", "is_said"), [("loading\n", True), (steps(21, 25), False)])
def test_a_script_of_which_nothing_shows_that_it_goes_on_is_named_at_its_end(
    tmp_path: Path, log: str, capfd: pytest.CaptureFixture[str], *, is_said: bool
) -> None:
    run = RunDirectory(tmp_path)
    for attempt, text in enumerate((steps(1, 24), log)):
        run.attempt_logs(attempt).mkdir(parents=True)
        run.rank_log(attempt, 0).write_text(text)
    record_own_resume(run, 1, OwnResume(words=["--resume"], checkpoint="20.pt", checkpoints=["20.pt"]))
    verdict = OwnResumeCheck(run, end_ranks=lambda _: None).last(
        Look(ranks=Ranks(attempt=1, world_size=1), now_s=10.0, now_unix_s=0.0)
    )
    assert verdict is not None
    verdict()
    assert ("opened no checkpoint" in "".join(capfd.readouterr())) == is_said
