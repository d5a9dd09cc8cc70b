"""What an end with 0 of a person's own program was: never finished before its end, and no healthy end early."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.rundir.attempts import note_saved
from slurm_train.rundir.files import append_line
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.timing import ProgramProgress
from slurm_train.supervise.own_end import EndKind, OwnEnd, judge, progress_line, read_end
from tests.support.ledgers import attempt_of

FINISHED, STOPPED, EARLY = EndKind
BAR = "\rtrain:  40%|####      | 48/120 [00:10<00:12]\rtrain:  41%|####      | 49/120 [00:11<00:12]"


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        pytest.param(OwnEnd(), FINISHED, id="nothing is known"),
        pytest.param(OwnEnd(step=40), FINISHED, id="steps without a total"),
        pytest.param(OwnEnd(was_asked=True), STOPPED, id="asked"),
        pytest.param(OwnEnd(was_asked=True, step=32, max_steps=36, missing_save=32), STOPPED, id="asked, save missing"),
        pytest.param(OwnEnd(was_asked=True, is_at_end=True, step=36, max_steps=36), FINISHED, id="asked at its end"),
        pytest.param(OwnEnd(is_at_end=True, step=32, max_steps=36), FINISHED, id="stopped early, and said so"),
        pytest.param(OwnEnd(is_at_end=True, missing_save=10, committed=5), EARLY, id="the last save is missing"),
        pytest.param(OwnEnd(step=32, max_steps=36), EARLY, id="before the last step"),
        pytest.param(OwnEnd(step=34, max_steps=36), EARLY, id="two steps before the end"),
        pytest.param(OwnEnd(step=35, max_steps=36), FINISHED, id="counts its steps from 0"),
        pytest.param(OwnEnd(step=35, max_steps=36, was_asked=True), STOPPED, id="counts from 0, asked at the end"),
        pytest.param(OwnEnd(step=0, reached=6), EARLY, id="before an earlier attempt"),
        pytest.param(OwnEnd(reached=6), EARLY, id="joined before, refuses now"),
        pytest.param(OwnEnd(step=6, reached=6), FINISHED, id="nothing was left to do"),
        pytest.param(OwnEnd(repeated_line="step 6 of 120"), EARLY, id="printed no progress"),
    ],
)
def test_the_first_row_that_applies_decides(end: OwnEnd, kind: EndKind) -> None:
    found, words = judge(end)
    assert found is kind and bool(words) == (kind is EARLY)


def test_an_early_end_is_told_with_steps_and_last_words() -> None:
    words = judge(OwnEnd(step=32, max_steps=36, last_words="out of data"))[1]
    assert "step 32 of 36" in words and "out of data" in words and 'mark("end")' in words


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("begin\nstep 1 loss 2.5\nstep 2 loss 2.25\nsaved\nstep 3 loss 2\n", "step 3 loss 2"),
        (BAR + "\rtrain:  41%|####      | 50/120 [00:11<00:12]", "train:  41%|####      | 50/120 [00:11<00:12]"),
        ("one\ntwo\nthree\n", ""),
        ("1\n2\n3\n", ""),
        ("", ""),
    ],
)
def test_the_progress_of_a_program_is_what_its_log_repeats(log: str, line: str) -> None:
    assert progress_line(log) == line


def _print(run: RunDirectory, attempt: int, text: str) -> None:
    run.attempt_logs(attempt).mkdir(parents=True)
    run.rank_log(attempt, 0).write_text(text)


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        ("step 5\nstep 6\nstep 7 of 120\nstep 8 of 120\nstep 9 of 120\n", "the output is there already\n", EARLY),
        ("step 7 of 120\nstep 8 of 120\nstep 9 of 120\n", "step 10 of 120\ndone\n", FINISHED),
        ("step 8 of 10\nstep 9 of 10\nstep 10 of 10\n", "accuracy 0.9\n", FINISHED),
        ("begin\n", "begin\n", FINISHED),
    ],
)
def test_a_second_start_that_prints_no_progress_has_refused(
    first: str, second: str, kind: EndKind, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path)
    _print(run, 0, first)
    _print(run, 1, second)
    ledger = [attempt_of(attempt=0), attempt_of(attempt=1)]
    assert judge(read_end(run, 1, ledger, was_asked=False))[0] is kind
    # A person has changed what the program is to do.
    changed = [attempt_of(), attempt_of(attempt=1, changes=1)]
    assert judge(read_end(run, 1, changed, was_asked=False))[0] is FINISHED


def test_what_was_left_to_do_is_said_by_the_newest_line_of_progress(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for attempt, text in enumerate(("step 8 of 11\nstep 9 of 11\nstep 10 of 11\n", "step 11 of 11\n", "done\n")):
        _print(run, attempt, text)
    ledger = [attempt_of(attempt=attempt) for attempt in range(3)]
    assert judge(read_end(run, 2, ledger, was_asked=False))[0] is FINISHED


@pytest.mark.parametrize(
    ("told", "step_on_record", "kind"),
    [
        (None, None, EARLY),
        (ProgramProgress(), None, EARLY),
        (ProgramProgress(step=9), None, FINISHED),
        (ProgramProgress(step=4), 9, FINISHED),
        (ProgramProgress(step=4, has_told_end=True), None, FINISHED),
    ],
)
def test_a_program_that_has_reported_steps_is_compared_with_the_attempt_before(
    told: ProgramProgress | None, step_on_record: int | None, kind: EndKind, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path)
    _print(run, 1, "")
    if told is not None:
        told.write(run.program(1))
    if step_on_record is not None:
        append_line(run.metrics, {"step": step_on_record, "attempt": 1, "loss": 1.0})
    ledger = [attempt_of(attempt=0, last_step=9), attempt_of(attempt=1, first_committed=8)]
    assert judge(read_end(run, 1, ledger, was_asked=False))[0] is kind
    # It was killed after its last step, so nothing was left to do.
    run.attempt_logs(0).mkdir(parents=True)
    ProgramProgress(step=9, max_steps=9).write(run.program(0))
    if told is None or told.step == 0:
        assert judge(read_end(run, 1, ledger, was_asked=False))[0] is FINISHED


@pytest.mark.parametrize(("step", "kind"), [(80, FINISHED), (60, EARLY)])
def test_a_program_that_reports_now_and_then_ends_before_its_next_report(
    step: int, kind: EndKind, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path)
    _print(run, 0, "")
    for reported in range(20, step + 1, 20):
        append_line(run.metrics, {"step": reported, "attempt": 0, "loss": 1.0, "max_steps": 90})
    append_line(run.metrics, {"step": step + 1, "attempt": 0, "eval_loss": 1.0})
    ProgramProgress(step=step, max_steps=90).write(run.program(0))
    assert judge(read_end(run, 0, [attempt_of()], was_asked=False))[0] is kind


def test_a_ledger_of_an_earlier_version_is_no_evidence(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    _print(run, 0, "")
    end = read_end(run, 0, [attempt_of()], was_asked=False)
    assert judge(end)[0] is FINISHED
    note_saved(run, 0)
    assert judge(read_end(run, 0, [attempt_of()], was_asked=False))[0] is STOPPED


def test_a_program_that_saves_without_the_session_tells_no_step_to_compare(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    _print(run, 0, "")
    _print(run, 1, "")
    for attempt in range(2):
        ProgramProgress().write(run.program(attempt))
    ledger = [attempt_of(attempt=0, last_step=0), attempt_of(attempt=1, first_committed=23)]
    assert judge(read_end(run, 1, ledger, was_asked=False))[0] is FINISHED
