"""Time in which the job is suspended does not count for its ranks."""

from __future__ import annotations

from slurm_train.supervise.look import CheckedClock


def test_the_clock_stands_still_while_the_process_was_stopped() -> None:
    now = [100.0]
    clock = CheckedClock(lambda: now[0])
    begin_s = clock()
    for now[0] in (101.0, 102.0, 3000.0):
        before_s = clock()
        clock.tick()
        assert clock() == before_s
    assert clock() - begin_s == 7.0, "of the stop, no more than what a busy process may take"
