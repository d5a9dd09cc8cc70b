"""A writer that is stopped at any call and goes on beside its successor harms nothing of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.thawed_writers import CARELESS, SCENES, Scene, results_everywhere, thawed_everywhere

pytestmark = [
    pytest.mark.faults,
    # The child of the fork touches files only; it starts no thread that outlives it and takes no lock.
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


def problems_of(trials) -> list[str]:
    done = list(trials)
    assert len(done) > 5
    return [f"{trial.what}: {trial.problem}" for trial in done if trial.problem]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_no_verified_checkpoint_of_the_successor_disappears(scene: Scene, fast_path: Path) -> None:
    every = {"local-save": 31, "claim": 11, "local-claim": 1}.get(scene.name, 7)  # the campaign stops at each call
    assert problems_of(thawed_everywhere(scene, fast_path, keep=1, every=every)) == []


def test_no_result_is_replaced_or_faked(fast_path: Path) -> None:
    assert problems_of(results_everywhere(fast_path)) == []


def test_this_check_can_fail(fast_path: Path) -> None:
    assert any(
        "cannot be trusted" in one for one in problems_of(thawed_everywhere(CARELESS, fast_path, keep=1, every=5))
    )
