"""What a disturbance did to a run: the row, and the sentence, for each kind of end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from slurm_train.rundir.ledger import Action, End, Reason
from slurm_train.tools.rehearsal.case import (
    KILLED,
    Course,
    Disturbance,
    SignalsAfter,
    SiteNotice,
    StartOfRun,
    preemption,
)
from slurm_train.tools.rehearsal.marks import REPORTS, Mark
from slurm_train.tools.rehearsal.otherwise import ProgramProcess
from slurm_train.tools.rehearsal.page import render_page
from slurm_train.tools.rehearsal.verdict import Rehearsal, ReturnOutcome, Row, Undisturbed, judge, left_out, noise_of

NOTICE = SiteNotice(grace_s=0.0, kill_wait_s=30.0, lead_s=30.0)


def marks(steps: Sequence[int], *, seen_s: float = 0.0, shift: float = 0.0) -> tuple[Mark, ...]:
    return tuple(Mark((0, step), f"step {step}", 1 / (step + 1) + shift, seen_s + step, 60) for step in steps)


UNDISTURBED = Undisturbed(kind=REPORTS, marks=marks(range(1, 17)), files={}, notice=NOTICE)
FIRST = StartOfRun(
    marks={REPORTS: marks(range(1, 9))},
    started_s=0.0,
    signalled_s=8.5,
    ended_s=9.0,
    exit_code=75,
    end=End(time_unix_s=0.0, exit_code=75, reason=Reason.SIGNALLED, action=Action.STOP),
)
SECOND = StartOfRun(marks={REPORTS: marks(range(9, 17))}, started_s=20.0)


def row_of(
    first: StartOfRun, second: StartOfRun | None = SECOND, *, key: str = "preempted", **of_undisturbed: object
) -> Row:
    disturbance = Disturbance(key=key, label=key, signals=preemption(NOTICE) if key == "preempted" else KILLED)
    course = Course(
        disturbance=disturbance,
        starts=tuple(start for start in (first, second) if start is not None),
        run=None,
        seconds=3.0,
    )
    return judge(course, replace(UNDISTURBED, **of_undisturbed))


def failed(error: str, **facts: object) -> StartOfRun:
    return replace(SECOND, marks={}, ended_s=25.0, exit_code=1, traceback=error, **facts)


def test_a_run_that_goes_on_with_the_next_step_and_equal_losses_is_good() -> None:
    row = row_of(FIRST, has_joined=True)
    assert (row.is_good, row.outcome, row.repeated, row.left_out) == (True, ReturnOutcome.CAME_BACK, 0, 0)
    assert row.came_back == "came back at step 9"
    assert (row.losses, row.ended_after_s, row.advice) == ("equal (8)", 0.5, "")


def test_steps_since_the_last_save_are_repeated_and_that_is_good() -> None:
    row = row_of(FIRST, replace(SECOND, marks={REPORTS: marks(range(6, 17))}), key="killed")
    assert (row.is_good, row.repeated) == (True, 3)


@pytest.mark.parametrize(
    ("first", "second", "outcome", "advice"),
    [
        ({}, {"marks": {REPORTS: marks(range(1, 6))}}, ReturnOutcome.BEGAN_ANEW, "saved nothing by then"),
        (
            {"files": {"data/train.bin": (9, 0), "out/last.pt": (9, 0)}, "written": frozenset({"out/last.pt"})},
            {"marks": {REPORTS: marks(range(1, 6))}},
            ReturnOutcome.BEGAN_ANEW,
            "it had written out/last.pt and did not load it",
        ),
        (
            {"written": frozenset({"out/20261129-003521/a.pt"})},
            {"marks": {REPORTS: marks(range(1, 6))}, "written": frozenset({"out/20261129-003611/a.pt"})},
            ReturnOutcome.BEGAN_ANEW,
            "out/<time>/a.pt",
        ),
        (
            {"written": frozenset({"out/last.pt"})},
            {"marks": {REPORTS: marks(range(1, 6))}, "resumed_from": "out/last.pt"},
            ReturnOutcome.BEGAN_ANEW,
            "it loaded last.pt",
        ),
        (
            {"saved_steps": ("checkpoint_0000005",)},
            {"marks": {REPORTS: marks(range(1, 6))}},
            ReturnOutcome.BEGAN_ANEW,
            "training.resume()",
        ),
        (
            {"killed_by_notice": True},
            {"marks": {REPORTS: marks(range(1, 6))}},
            ReturnOutcome.BEGAN_ANEW,
            "act upon the signal",
        ),
        ({}, {"marks": {REPORTS: marks(range(12, 17))}}, ReturnOutcome.CAME_BACK, "3 steps between"),
        (
            {},
            {"marks": {REPORTS: marks(range(9, 17), shift=0.5)}},
            ReturnOutcome.CAME_BACK,
            "other samples or random numbers",
        ),
        (
            {},
            {"marks": {REPORTS: marks(range(9, 17), shift=0.5)}, "remarks": ("their episodes begin anew",)},
            ReturnOutcome.CAME_BACK,
            "the log says: their episodes begin anew",
        ),
        (
            {},
            {"marks": {REPORTS: marks(range(9, 12))}, "ended_s": 30.0, "exit_code": 0, "is_finished": True},
            ReturnOutcome.ENDED_EARLY,
            "exit code of 0",
        ),
    ],
)
def test_each_way_of_not_surviving_has_its_sentence(
    first: dict[str, object], second: dict[str, object], outcome: ReturnOutcome, advice: str
) -> None:
    row = row_of(replace(FIRST, **first), replace(SECOND, **second), has_joined=True)
    assert (row.is_good, row.outcome) == (False, outcome)
    assert advice in row.advice and row.see.startswith("docs/")


@pytest.mark.parametrize(
    ("error", "facts", "advice"),
    [
        ("Error. Experiment already exists. Use --name", {}, "refuses the folder"),
        ("EOFError: Ran out of input", {}, "file that was cut"),
        (
            "RunError: files have changed",
            {"beside_source": frozenset({"logs/a.log"})},
            "beside its source (logs/a.log)",
        ),
        ("ValueError: x", {}, "ValueError: x"),
    ],
)
def test_a_run_that_never_starts_again_is_quoted(error: str, facts: dict[str, object], advice: str) -> None:
    row = row_of(FIRST, failed(error, **facts))
    assert (row.is_good, row.outcome) == (False, ReturnOutcome.NEVER_STARTED)
    assert error in row.advice and advice in row.advice


@pytest.mark.parametrize(
    ("files", "is_whole"),
    [
        ({"out/checkpoint-5/config.json": (9, 0)}, False),
        ({"out/checkpoint-5/config.json": (9, 0), "out/checkpoint-5/optimizer.pt": (0, 0)}, False),
        ({"out/checkpoint-5/config.json": (9, 0), "out/checkpoint-5/optimizer.pt": (90, 0)}, True),
    ],
)
def test_a_checkpoint_that_was_not_written_to_its_end_is_why_a_run_does_not_start(
    files: dict[str, tuple[int, int]], is_whole: bool
) -> None:
    whole = {"out/checkpoint-50/config.json": (9, 0), "out/checkpoint-50/optimizer.pt": (90, 0)}
    second = failed("ValueError: no valid checkpoint at $SLURM_TRAIN_RUN_DIR/out/checkpoint-5")
    row = row_of(replace(FIRST, files=files), second, files=whole)
    assert (row.is_good, row.outcome) == (False, ReturnOutcome.NEVER_STARTED)
    assert ("chooses out/checkpoint-5/, which was not written to its end" in row.advice) is not is_whole


def test_a_second_start_that_was_ended_for_want_of_time_quotes_no_line_as_its_error() -> None:
    row = row_of(FIRST, replace(SECOND, marks={}, last_words="loading"))
    assert (row.is_good, row.outcome) == (False, ReturnOutcome.NEVER_STARTED)
    assert row.came_back == "never came to a step again" and "loading" not in row.advice and "busy" in row.advice


def test_a_kill_before_the_first_save_of_a_program_of_the_session_says_nothing() -> None:
    row = row_of(FIRST, replace(SECOND, marks={REPORTS: marks(range(1, 6))}), key="killed", has_joined=True)
    assert row.is_good is None and any("not saved yet" in fact for fact in row.facts)


def test_a_run_that_is_finished_by_the_stop_has_ended_too_early() -> None:
    row = row_of(replace(FIRST, is_finished=True, exit_code=0), None)
    assert (row.is_good, row.outcome) == (False, ReturnOutcome.ENDED_EARLY)
    assert row.came_back == "ended with 0 at step 8 of 60"


def test_an_exit_code_of_0_after_a_stop_is_a_note_where_the_run_is_started_again() -> None:
    assert FIRST.end is not None
    row = row_of(replace(FIRST, end=replace(FIRST.end, exit_code=0)))
    assert row.is_good is True
    assert any("COMPLETED" in fact for fact in row.facts)


def test_cut_files_and_processes_that_outlive_the_program_are_noted() -> None:
    first = replace(FIRST, files={"last.pt": (3, 0)}, outlived_by=("server.py",))
    row = row_of(first, files={"last.pt": (100, 0)})
    assert [fact for fact in row.facts if "last.pt (3 of 100 bytes)" in fact or "server.py" in fact] == list(
        row.facts[-2:]
    )


def test_children_that_ended_before_it_are_noted_where_it_does_not_come_back() -> None:
    first = replace(FIRST, ended_before=("envs.py",))
    began_anew = replace(SECOND, marks={REPORTS: marks(range(1, 6))})
    assert any("envs.py" in fact for fact in row_of(first, began_anew).facts)
    assert not row_of(first).facts


def test_another_value_at_the_second_start_is_noted_by_its_name_alone() -> None:
    def of_start(run_id: int, num_threads: int = 1) -> tuple[ProgramProcess, ...]:
        return (ProgramProcess(("bash", "run.sh"), {"RUN_ID": run_id, "OMP_NUM_THREADS": num_threads}),)

    first = replace(FIRST, processes=of_start(17))
    (fact,) = row_of(first, replace(SECOND, processes=of_start(18))).facts
    assert fact.startswith("another value at its second start: RUN_ID;") and "18" not in fact
    assert not row_of(first, replace(SECOND, processes=of_start(17))).facts


def test_a_shell_that_has_given_its_place_to_the_program_keeps_no_signal_from_it() -> None:
    def facts_of(*words: str) -> tuple[str, ...]:
        return row_of(replace(FIRST, processes=(ProgramProcess(words, {}),)), is_shell=True).facts

    assert any("begin that with `exec`" in fact for fact in facts_of("/bin/bash", "run.sh"))
    assert not facts_of("python", "train.py")


def test_differences_within_the_noise_of_two_undisturbed_runs_are_no_fault() -> None:
    other = replace(SECOND, marks={REPORTS: marks(range(9, 17), shift=0.01)})
    assert row_of(FIRST, other).is_good is False
    twin = Course(disturbance=Disturbance(key="again", label=""), starts=(other,), run=None, seconds=1.0)
    noise, words = noise_of(twin, UNDISTURBED)
    assert noise == pytest.approx(0.01) and "differ from step 9 on" in words
    assert row_of(FIRST, other, noise=noise).is_good is True


def test_batches_that_a_resume_skips_are_no_steps() -> None:
    skipped = tuple(replace(mark, loss=None) for mark in marks(range(1, 6)))
    row = row_of(FIRST, replace(SECOND, marks={REPORTS: (*skipped, *marks(range(6, 17)))}))
    assert (row.is_good, row.came_back, row.repeated) == (True, "came back at step 6", 3)


def test_digests_of_other_samples_make_a_row_bad_from_their_first_step_on_whatever_the_losses() -> None:
    def with_digests(taken: tuple[Mark, ...], *, others_from: int = 99) -> tuple[Mark, ...]:
        steps = [int(mark.place[1]) for mark in taken]
        digests = [step + (1000 if step >= others_from else 0) for step in steps]
        return tuple(replace(mark, samples_digest=digest) for mark, digest in zip(taken, digests, strict=True))

    expected = with_digests(UNDISTURBED.marks)
    back = marks(range(9, 17))
    equal = row_of(FIRST, replace(SECOND, marks={REPORTS: with_digests(back)}), marks=expected)
    assert (equal.is_good, equal.samples_equal, equal.advice) == (True, True, "")
    others = row_of(FIRST, replace(SECOND, marks={REPORTS: with_digests(back, others_from=12)}), marks=expected)
    assert (others.is_good, others.outcome, others.samples_equal) == (False, ReturnOutcome.CAME_BACK, False)
    assert "step 12" in others.advice and others.losses.startswith("equal")
    assert row_of(FIRST, marks=expected).samples_equal is None, "no digests after the start"


def test_slow_marks_are_enough_to_tell_a_run_that_begins_anew() -> None:
    slow = replace(UNDISTURBED, marks=marks(range(3)))
    assert slow.middle.words == "step 1"


@pytest.mark.parametrize(
    ("ended", "why"),
    [
        ({"exit_code": 0}, "ended before"),
        ({"exit_code": 1, "traceback": "OSError: no data"}, "OSError: no data"),
    ],
)
def test_a_disturbance_that_never_came_says_why(ended: dict[str, object], why: str) -> None:
    row = row_of(replace(FIRST, signalled_s=None, **ended), None)
    assert (row.is_good, row.outcome) == (None, ReturnOutcome.LEFT_OUT) and why in row.came_back
    rehearsal = Rehearsal(name="a.py", place="", undisturbed="", noise="equal", rows=(row,), seconds=1.0)
    assert "was not judged" in rehearsal.text() and "AFTER IT WAS" not in rehearsal.text()


def test_a_run_that_saved_once_or_started_sooner_was_not_too_slow() -> None:
    in_save = Disturbance(key="save", label="killed in a save", signals=KILLED, place=(0, 6), in_save=True)
    first = replace(FIRST, signalled_s=None, ended_s=None)
    row = judge(Course(disturbance=in_save, starts=(first,), run=None, seconds=1.0), UNDISTURBED)
    assert row.came_back == "left out, it saved only once within step 8"
    in_start = Disturbance(key="start", label="", signals=KILLED, after_cpu_s=3.0)
    row = judge(Course(disturbance=in_start, starts=(first,), run=None, seconds=1.0), UNDISTURBED)
    assert row.came_back == "left out, its start was over before the moment came"
    slow = replace(in_save, place=(0, 12))
    assert "too slow" in judge(Course(disturbance=slow, starts=(first,), run=None, seconds=1.0), UNDISTURBED).came_back


@pytest.mark.parametrize(("last_words", "advice"), [("it=3", "'it=3': name the form"), ("", "it printed nothing")])
def test_a_program_that_does_not_say_its_step_is_told_its_last_line(last_words: str, advice: str) -> None:
    row = row_of(FIRST, kind=None, marks=(), last_words=last_words)
    assert (row.is_good, row.outcome) == (False, ReturnOutcome.UNKNOWN) and advice in row.advice


def test_what_a_second_start_refuses_by_itself_is_no_fault_and_stands_below_the_table() -> None:
    refused = failed("ConfigError: 2 ranks, not 1")
    disturbance = Disturbance(key="ranks", label="other ranks", signals=KILLED, words_after=("run.processes=1",))
    starts = (FIRST, replace(refused, exit_code=2))
    row = judge(Course(disturbance=disturbance, starts=starts, run=None, seconds=1.0), UNDISTURBED)
    assert (row.is_good, row.outcome) == (None, ReturnOutcome.REFUSED)
    rehearsal = Rehearsal(name="a.py", place="", undisturbed="", noise="equal", rows=(row,), seconds=1.0)
    assert "AFTER IT WAS" not in rehearsal.text() and "2 ranks, not 1: other ranks" in rehearsal.text()
    assert json.loads(json.dumps(rehearsal.to_json()))["rows"][0]["outcome"] == "refused"


def test_a_program_survives_if_a_row_is_good_and_none_is_bad() -> None:
    good = row_of(FIRST)
    rehearsal = Rehearsal(
        name="a.py", place="", undisturbed="", noise="equal", rows=(good, left_out("epoch", "e", "no")), seconds=1.0
    )
    assert rehearsal.survives and "a.py survives" in rehearsal.text()
    assert not replace(rehearsal, rows=(good, replace(good, is_good=False))).survives
    unjudged = replace(rehearsal, rows=(left_out("epoch", "e", "no"),))
    assert not unjudged.survives and "a.py was not judged" in unjudged.text()


def test_the_page_has_each_row_with_its_sentence() -> None:
    bad = replace(row_of(FIRST), is_good=False, advice="do <this>", see="docs/a.md", facts=("a note",))
    rehearsal = Rehearsal(name="a.py", place="here", undisturbed="16 marks", noise="equal", rows=(bad,), seconds=1.0)
    page = render_page(rehearsal)
    assert "a.py does not survive" in page and "do &lt;this&gt; (docs/a.md)" in page and "a note" in page
    assert "came back at step 9" in page and "<script" not in page


def test_a_preemption_sends_what_slurm_sends() -> None:
    with_grace = preemption(NOTICE._replace(grace_s=15.0, kill_wait_s=5.0))
    assert with_grace == (
        SignalsAfter(0, ("CONT", "TERM")),
        SignalsAfter(15.0, ("TERM", "CONT", "TERM")),
        SignalsAfter(5.0, ("KILL",)),
    )
    assert preemption(NOTICE) == (SignalsAfter(0, ("CONT", "TERM")), SignalsAfter(30.0, ("KILL",)))
