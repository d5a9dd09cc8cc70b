"""State that ranks do not share, in everything that is saved: callbacks, models, optimizers, streams.

Each trial draws up to four ranks (replicas, shards or stages) and what each of them holds: alike, on the first, the
last or some ranks only, under names of their own, of other sizes and types. They save twice, and hold something else
the second time. What is on disk must be all of it, once; or the save was refused and named what no checkpoint can keep.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.campaigns.record import Tally
from tests.support.divided_states import examples, problems_of

_AT_ONCE = 50


def draw_examples(number: int, *, of_seed: int) -> list[dict[str, Any]]:
    """Returns so many different examples, or a few less."""
    drawn: list[dict[str, Any]] = []
    how = settings(
        max_examples=number,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )

    @seed(of_seed)
    @how
    @given(examples())
    def draw(example: dict[str, Any]) -> None:
        drawn.append(example)

    draw()
    return drawn


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Tries so many examples, some in one start of the ranks."""
    drawn = draw_examples(trials, of_seed=seed)
    for first in range(0, len(drawn), _AT_ONCE):
        tried = drawn[first : first + _AT_ONCE]
        for number, problems in enumerate(problems_of(tried), start=first):
            tally.add(f"example {number}", problems)
    saves = [save for example in drawn for save in example["saves"]]
    refused = [save for save in saves if save["wrong"]]
    on_some = [
        save for save in saves if not save["wrong"] and len({frozenset(of_rank) for of_rank in save["held"]}) > 1
    ]
    sizes = Counter(len(example["stages"]) for example in drawn)
    return {
        "saves": f"{len(saves)}, of which {len(on_some)} of ranks that hold different names",
        "refused by name": f"{len(refused)}",
        "ranks": ", ".join(f"{size} in {count}" for size, count in sorted(sizes.items())),
    }
