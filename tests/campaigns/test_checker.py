"""A history without a fault passes; every planted violation is reported by the rule it breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.campaigns.checker import Consumed, History, Look, Written, check
from tests.campaigns.victims import lost_steps

NUM_SAMPLES, LOCAL, RANKS = 6, 2, 2
LAST = 6


def line(step: int, attempt: int, **changes: Any) -> dict[str, Any]:
    facts = {
        "step": step,
        "samples": 4 * step,
        "loss": 1.0 / step,
        "lr": 0.1,
        "grad_norm": 2.0 / step,
        "samples_digest": 100 + step,
        "attempt": attempt,
        "world_size": RANKS,
        "time_unix_s": 10.0 * attempt + step,
    }
    return facts | changes


def consumed(step: int, attempt: int) -> list[Consumed]:
    """Epoch after epoch in a fixed order; global batches of 4, so that they straddle epochs of 6."""
    start = 4 * (step - 1)
    positions = [tuple((start + rank * LOCAL + one) % NUM_SAMPLES for one in range(LOCAL)) for rank in range(RANKS)]
    return [Consumed(attempt=attempt, rank=rank, step=step, samples=positions[rank]) for rank in range(RANKS)]


def seen(time_unix_s: float, *steps_and_attempts: tuple[int, int]) -> Look:
    newest_first = sorted(steps_and_attempts, reverse=True)
    written = tuple(
        Written(step=step, attempt=attempt, complete_unix_s=10.0 * attempt + step + 0.5)
        for step, attempt in newest_first
    )
    return Look(time_unix_s=time_unix_s, checkpoints=written)


RESULT = {"step": LAST, "samples": 4 * LAST, "weights_digest": "abc"}

GOLDEN = History(
    lines=tuple(line(step, 0) for step in range(1, LAST + 1)),
    started=(0,),
    opened_unix_s={0: 0.0},
    ledger=(),
    seen=(seen(8.0, (2, 0), (4, 0), (6, 0)),),
    result=RESULT,
)

# Attempt 0 does 1 to 4 and is killed; its checkpoint of step 2 is resumed by attempt 1.
GOOD = History(
    lines=tuple(line(step, 0) for step in range(1, 5)) + tuple(line(step, 1) for step in range(3, LAST + 1)),
    started=(0, 1),
    opened_unix_s={0: 0.0, 1: 10.0},
    ledger=(),
    seen=(seen(0.0), seen(3.0, (2, 0)), seen(9.0, (2, 0)), seen(18.0, (2, 0), (4, 1), (6, 1))),
    consumed=tuple(
        one
        for step, attempt in [*((step, 0) for step in range(1, 5)), *((step, 1) for step in range(3, LAST + 1))]
        for one in consumed(step, attempt)
    ),
    result=RESULT,
)


def test_steps_done_again_are_counted() -> None:
    # Attempt 0 did step 4 before attempt 1 was open, which began with step 3.
    assert lost_steps(GOOD, 0) == 2
    late = with_line(GOOD, 0, 4, time_unix_s=10.5)
    assert lost_steps(late, 0) == 1, "what it did after its successor had begun is not its loss"
    assert lost_steps(GOOD, 1) is None


def test_a_run_without_a_fault_passes() -> None:
    assert check(GOOD, golden=GOLDEN, num_samples=NUM_SAMPLES) == []


def with_line(history: History, attempt: int, step: int, **changes: Any) -> History:
    chosen = [{**one, **changes} if (one["attempt"], one["step"]) == (attempt, step) else one for one in history.lines]
    return replace(history, lines=tuple(chosen))


def with_samples(history: History, attempt: int, step: int, rank: int, samples: tuple[int, ...]) -> History:
    where = (attempt, step, rank)
    chosen = [
        replace(one, samples=samples) if (one.attempt, one.step, one.rank) == where else one for one in history.consumed
    ]
    return replace(history, consumed=tuple(chosen))


def without_samples(history: History, attempt: int, step: int, rank: int) -> History:
    where = (attempt, step, rank)
    return replace(
        history, consumed=tuple(one for one in history.consumed if (one.attempt, one.step, one.rank) != where)
    )


PLANTED: dict[str, tuple[Callable[[History], History], str]] = {
    "a commit goes away": (
        lambda good: replace(good, seen=(*good.seen, seen(19.0, (2, 0), (4, 1)))),
        "checkpoint 6 was there, later the newest was 4",
    ),
    "an attempt starts before a checkpoint that was there": (
        lambda good: replace(good, seen=(seen(9.0, (4, 0)), seen(18.0, (4, 0), (6, 1)))),
        "attempt 1 began after step 2, checkpoint 4 was there before",
    ),
    "one number for two attempts": (
        lambda good: replace(good, started=(0, 1, 1)),
        "attempt 1 was opened 2 times",
    ),
    "an attempt without its epoch file": (
        lambda good: replace(good, opened_unix_s={0: 0.0}),
        "attempt 1 has no epoch file",
    ),
    "a zombie's commit": (
        lambda good: replace(
            good,
            seen=(
                *good.seen[:-1],
                Look(time_unix_s=18.0, checkpoints=(Written(step=6, attempt=0, complete_unix_s=12.0),)),
            ),
        ),
        "checkpoint 6 of attempt 0 became visible after the next attempt was open",
    ),
    "a zombie that stays": (
        lambda good: with_line(good, 0, 4, time_unix_s=21.0),
        "attempt 0 wrote step 4 11.0 s after the next one was open",
    ),
    "a step is passed over": (
        lambda good: replace(good, lines=tuple(one for one in good.lines if one["step"] != 5)),
        "the history has the steps 1, 2, 3 ... 6 (5 of them), and ends at 6",
    ),
    "an attempt goes back": (
        lambda good: replace(good, lines=(*good.lines, line(5, 1))),
        "attempt 1 did the steps 3, 4, 5 ... 5 (5 of them)",
    ),
    "a repeated step differs": (
        lambda good: with_line(good, 1, 3, loss=0.3333333333333334),
        "step 3 loss: 0.3333333333333334 in attempt 1, 0.3333333333333333 in attempt 0",
    ),
    "a repeated step has other samples": (
        lambda good: with_samples(good, 0, 4, 1, (2, 4)),
        "step 4 of rank 1 was given other samples in attempt 1",
    ),
    "a sample twice in an epoch": (
        lambda good: with_samples(good, 1, 5, 0, (4, 4)),
        "epoch 2: 1 samples more than once, e.g. [4]",
    ),
    "a rank that did not count": (
        lambda good: without_samples(good, 0, 1, 1),
        "step 1 of attempt 0 was counted by the ranks [0] of 2",
    ),
    "nothing was counted": (
        lambda good: replace(good, consumed=()),
        "0 samples were counted, the result says 24",
    ),
    "both times unlike the golden run": (
        lambda good: with_line(with_line(good, 0, 3, lr=0.2), 1, 3, lr=0.2),
        "step 3 lr: 0.2 in attempt 1, golden 0.1",
    ),
    "other weights": (
        lambda good: replace(good, result={**RESULT, "weights_digest": "abd"}),
        "weights_digest at the end: 'abd', golden 'abc'",
    ),
    "no result": (
        lambda good: replace(good, result=None),
        "weights_digest at the end: None, golden 'abc'",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_reported(name: str) -> None:
    plant, words = PLANTED[name]
    assert words in check(plant(GOOD), golden=GOLDEN, num_samples=NUM_SAMPLES)
