"""A history without a fault passes; every planted violation is reported by the rule it breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.campaigns.checker import Consumed, History, Look, Written, check
from tests.campaigns.victims import lost_steps

pytestmark = pytest.mark.full

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
    return [Consumed(attempt, rank, step, positions[rank]) for rank in range(RANKS)]


def seen(time_unix_s: float, *steps_and_attempts: tuple[int, int]) -> Look:
    newest_first = sorted(steps_and_attempts, reverse=True)
    return Look(
        time_unix_s, tuple(Written(step, attempt, 10.0 * attempt + step + 0.5) for step, attempt in newest_first)
    )


RESULT = {"step": LAST, "samples": 4 * LAST, "weights_digest": "abc"}


def history_of(*done: tuple[int, int], opened: dict[int, float], looks: tuple[Look, ...]) -> History:
    """Returns a run that did these steps, given as (step, attempt)."""
    return History(
        lines=tuple(line(step, attempt) for step, attempt in done),
        started=tuple(opened),
        opened_unix_s=opened,
        ledger=(),
        seen=looks,
        consumed=tuple(one for step, attempt in done for one in consumed(step, attempt)),
        result=RESULT,
    )


GOLDEN = history_of(*((step, 0) for step in range(1, LAST + 1)), opened={0: 0.0}, looks=(seen(8.0, (6, 0)),))

# Attempt 0 does 1 to 4 and is killed; its checkpoint of step 2 is resumed by attempt 1.
GOOD = history_of(
    *((step, 0) for step in range(1, 5)),
    *((step, 1) for step in range(3, LAST + 1)),
    opened={0: 0.0, 1: 10.0},
    looks=(seen(0.0), seen(3.0, (2, 0)), seen(9.0, (2, 0)), seen(18.0, (2, 0), (4, 1), (6, 1))),
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
    return history._replace(lines=tuple(chosen))


def with_samples(history: History, attempt: int, step: int, rank: int, samples: tuple[int, ...] | None) -> History:
    """Returns it with other samples of a rank's step, or without them."""
    kept = [one for one in history.consumed if (one.attempt, one.step, one.rank) != (attempt, step, rank)]
    given = [Consumed(attempt, rank, step, samples)] if samples else []
    return history._replace(consumed=tuple(sorted(kept + given)))


PLANTED: tuple[tuple[Callable[[History], History], str], ...] = (
    (
        lambda good: good._replace(seen=(*good.seen, seen(19.0, (2, 0), (4, 1)))),
        "checkpoint 6 was there, later the newest was 4",
    ),
    (
        lambda good: good._replace(seen=(seen(9.0, (4, 0)), seen(18.0, (4, 0), (6, 1)))),
        "attempt 1 began after step 2, checkpoint 4 was there before",
    ),
    (
        lambda good: good._replace(started=(0, 1, 1)),
        "attempt 1 was opened 2 times",
    ),
    (
        lambda good: good._replace(opened_unix_s={0: 0.0}),
        "attempt 1 has no epoch file",
    ),
    (
        lambda good: good._replace(seen=(*good.seen[:-1], Look(18.0, (Written(6, 0, 12.0),)))),
        "checkpoint 6 of attempt 0 became visible after the next attempt was open",
    ),
    (
        lambda good: with_line(good, 0, 4, time_unix_s=21.0),
        "attempt 0 wrote step 4 11.0 s after the next one was open",
    ),
    (
        lambda good: good._replace(lines=tuple(one for one in good.lines if one["step"] != 5)),
        "the history has the steps 1, 2, 3 ... 6 (5 of them), and ends at 6",
    ),
    (
        lambda good: good._replace(lines=(*good.lines, line(5, 1))),
        "attempt 1 did the steps 3, 4, 5 ... 5 (5 of them)",
    ),
    (
        lambda good: with_line(good, 1, 3, loss=0.3333333333333334),
        "step 3 loss: 0.3333333333333334 in attempt 1, attempt 0 0.3333333333333333",
    ),
    (
        lambda good: with_samples(good, 0, 4, 1, (2, 4)),
        "step 4 of rank 1 was given other samples in attempt 1",
    ),
    (
        lambda good: with_samples(good, 1, 5, 0, (4, 4)),
        "epoch 2: 1 samples more than once, e.g. [4]",
    ),
    (
        lambda good: with_samples(good, 0, 1, 1, None),
        "step 1 of attempt 0 was counted by the ranks [0] of 2",
    ),
    (
        lambda good: good._replace(consumed=()),
        "0 samples were counted, the result says 24",
    ),
    (
        lambda good: with_line(with_line(good, 0, 3, lr=0.2), 1, 3, lr=0.2),
        "step 3 lr: 0.2 in attempt 1, golden 0.1",
    ),
    (
        lambda good: good._replace(result={**RESULT, "weights_digest": "abd"}),
        "weights_digest at the end: 'abd', golden 'abc'",
    ),
    (
        lambda good: good._replace(result=None),
        "weights_digest at the end: None, golden 'abc'",
    ),
)


@pytest.mark.parametrize(("plant", "words"), PLANTED, ids=[words[:40] for _, words in PLANTED])
def test_a_planted_violation_is_reported(plant: Callable[[History], History], words: str) -> None:
    assert words in check(plant(GOOD), golden=GOLDEN, num_samples=NUM_SAMPLES)
