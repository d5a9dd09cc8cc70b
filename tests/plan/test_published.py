"""The model of speed beside what others have published of their runs."""

from __future__ import annotations

import math

import pytest

from slurm_train.config.batch import BatchPlan
from slurm_train.config.parallel import ParallelLayout
from slurm_train.config.schema import ParallelSection
from slurm_train.plan.cards import PEAK_FLOPS
from slurm_train.plan.layouts import expected_tokens_per_s, tokens_per_s
from slurm_train.plan.memory import GptShape, LayoutFacts
from slurm_train.plan.placement import World

# Width, layers, heads, hidden width.
LLAMA = {"7B": (4096, 32, 32, 14336), "13B": (5120, 40, 40, 17920), "70B": (8192, 80, 64, 28672)}
# KempnerForge, benchmarks/mfu_scaling of 2026-04-05 and its mfu_bench.sh: nodes of 4 H200, 4,096 positions, everything
# computed again. Model, GPUs, tp, dp_shard, local, accumulation, tokens per second of all GPUs.
PUBLISHED = (
    ("7B", 1, 1, 1, 2, 4, 10_471),
    ("7B", 2, 1, 2, 2, 4, 18_728),
    ("7B", 2, 2, 1, 4, 2, 13_163),
    ("7B", 4, 1, 4, 4, 2, 38_983),
    ("7B", 4, 4, 1, 4, 2, 25_135),
    ("7B", 4, 2, 2, 4, 2, 25_980),
    ("7B", 8, 4, 2, 4, 2, 44_299),
    ("13B", 8, 1, 8, 4, 4, 35_405),
    ("13B", 8, 4, 2, 4, 4, 27_345),
    ("7B", 16, 4, 4, 4, 2, 82_988),
    ("13B", 16, 4, 4, 4, 4, 53_814),
    ("7B", 32, 4, 8, 4, 2, 155_917),
    ("13B", 32, 4, 8, 4, 4, 104_309),
    ("70B", 32, 4, 8, 2, 4, 17_657),
)


def llama(
    name: str, *, tp: int = 1, dp_shard: int, local: int, accumulation: int, recompute: str, positions: int
) -> LayoutFacts:
    width, layers, heads, hidden = LLAMA[name]
    return LayoutFacts(
        shape=GptShape(
            vocab_size=128_256, context=positions, num_layers=layers, num_heads=heads, num_kv_heads=8, width=width,
            hidden=hidden, norm="rmsnorm", activation="swiglu", tied=False,
        ),
        layout=ParallelLayout(tp=tp, dp_shard=dp_shard),
        batch=BatchPlan.equal(local_size=local, ranks=dp_shard, accumulation=accumulation),
        settings=ParallelSection(tp=tp, dp_shard=dp_shard, activation_checkpointing=recompute),  # type: ignore[arg-type]
        half=True,
        positions=positions,
    )  # fmt: skip


def test_fourteen_published_runs_are_put_into_order() -> None:
    ratios = []
    for name, num_gpus, tp, dp_shard, local, accumulation, measured in PUBLISHED:
        facts = llama(
            name, tp=tp, dp_shard=dp_shard, local=local, accumulation=accumulation, recompute="full", positions=4096
        )
        on_node = min(num_gpus, 4)
        ratios.append(tokens_per_s(facts, World((on_node,) * (num_gpus // on_node))) / measured)
    assert max(ratios) / min(ratios) < 1.32
    assert math.prod(ratios) ** (1 / len(ratios)) == pytest.approx(1.0, abs=0.06)
    fsdp, cut = ratios[3], ratios[4]
    assert fsdp / cut == pytest.approx(1.0, abs=0.1), "what cutting costs: 4 GPUs, FSDP over TP, measured 1.55"


@pytest.mark.parametrize(("in_float8", "measured"), [(False, 6667), (True, 8532)])
def test_a_run_may_expect_what_torchtitan_has_of_llama_8b_on_eight_h100(in_float8: bool, measured: int) -> None:
    facts = llama("7B", dp_shard=8, local=1, accumulation=1, recompute="selective", positions=8192)
    found = expected_tokens_per_s(facts, World((8,)), peak_flops=PEAK_FLOPS["H100"], in_float8=in_float8)
    assert found / 8 == pytest.approx(measured, rel=0.05)


def test_a_run_may_expect_what_llm_c_has_of_gpt2_on_eight_h100() -> None:
    facts = LayoutFacts(
        shape=GptShape(vocab_size=50257, context=1024, num_layers=12, num_heads=12, width=768, positions="learned"),
        layout=ParallelLayout(dp_replicate=8),
        batch=BatchPlan.equal(local_size=64, ranks=8, accumulation=1),
        settings=ParallelSection(),
        half=True,
        positions=1024,
    )
    found = expected_tokens_per_s(facts, World((8,)), peak_flops=PEAK_FLOPS["H100"], in_float8=False)
    assert found / 8 == pytest.approx(468_100, rel=0.05)
    a100 = expected_tokens_per_s(facts, World((8,)), peak_flops=PEAK_FLOPS["A100"], in_float8=False)
    assert a100 / found == pytest.approx(312 / 989, rel=0.05)
