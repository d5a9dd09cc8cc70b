from __future__ import annotations

from slurm_train.slurm.pace import LEAST_S, Pace


def test_the_first_question_is_due_at_once_and_the_next_after_some_seconds() -> None:
    pace = Pace()
    assert pace.is_due(0.0)
    pace.answered(0.0, took_s=0.01)
    assert not pace.is_due(LEAST_S - 0.1) and pace.is_due(LEAST_S)


def test_a_slow_answer_gives_the_controller_a_rest() -> None:
    pace = Pace()
    pace.answered(0.0, took_s=2.0)
    assert pace.due_s == 40.0


def test_no_answer_doubles_the_time_up_to_five_minutes_and_an_answer_ends_that() -> None:
    pace, now_s, pauses = Pace(least_s=5.0), 0.0, []
    for _ in range(8):
        pace.unanswered(now_s)
        pauses.append(pace.due_s - now_s)
        now_s = pace.due_s
    assert pauses == [10, 20, 40, 80, 160, 300, 300, 300]
    pace.answered(now_s, took_s=0.0)
    pace.unanswered(now_s)
    assert pace.due_s - now_s == 10
