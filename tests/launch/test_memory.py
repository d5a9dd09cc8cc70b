from __future__ import annotations

from typing import Any

import pytest

from slurm_train.launch.memory import MemoryEstimate, estimate_memory, size

MIB = 1 << 20


def estimate(**changes: Any) -> MemoryEstimate:
    facts: dict[str, Any] = {
        "trained_bytes": 10 * MIB,
        "other_bytes": MIB,
        "activation_bytes": 50 * MIB,
        "accumulation": 1,
        "saves_in_background": True,
        "on_gpu": False,
        "source": "formula, float32",
    }
    return estimate_memory(**{**facts, **changes})


def test_a_rank_on_the_cpu_holds_everything() -> None:
    found = estimate()
    assert found.total_bytes == (11 + 10 + 20 + 50 + 31) * MIB
    assert found.in_words == (
        "122 MiB per rank: weights 11.0 MiB, gradients 10.0 MiB, AdamW 20.0 MiB, activations 50.0 MiB, copy for saves "
        "31.0 MiB (formula, float32)"
    )


def test_the_copy_for_saves_lies_on_the_host_of_a_gpu() -> None:
    found = estimate(on_gpu=True)
    assert found.total_bytes == 91 * MIB
    assert found.in_words.endswith("(formula, float32); on the host 31.0 MiB for saves")
    assert estimate(on_gpu=True, saves_in_background=False).in_words.endswith("(formula, float32)")


def test_accumulation_holds_gradients_twice() -> None:
    assert estimate(accumulation=4).gradient_bytes == 20 * MIB


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (MIB // 10, "0.1 MiB"),
        (99 * MIB, "99.0 MiB"),
        (500 * MIB, "500 MiB"),
        (3 << 29, "1.5 GiB"),
        (100 << 30, "100 GiB"),
    ],
)
def test_sizes_for_people(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


def test_json_has_every_part_and_the_sum() -> None:
    found = estimate().as_json()
    parts = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "host_copy_bytes")
    assert found["total_bytes"] == sum(found[name] for name in parts)
