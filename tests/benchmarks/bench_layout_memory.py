"""How far the plan's memory is from what ranks really take: estimate and measured peak, layout by layout.

    python -m tests.benchmarks.bench_layout_memory

gloo ranks on CPU; the fullest rank of each layout is shown. See `tests/support/measured_memory.py` for how the peak is
measured.
"""

from __future__ import annotations

from typing import Any

from tests.support.measured_memory import measure_layouts

BATCH = {"local_size": 4, "accumulation": 1}
TWICE = {"local_size": 4, "accumulation": 2}
FLOWING = {"local_size": 2, "accumulation": 4}
Case = dict[str, dict[str, Any]]


def _case(
    batch: dict[str, Any] = BATCH, *, model: dict[str, Any] | None = None, precision: str = "float32", **parallel: Any
) -> Case:
    sections: Case = {"parallel": {"dp_replicate": 1, **parallel}, "batch": batch, "train": {"precision": precision}}
    return {**sections, "model": model} if model else sections


# Eight heads of queries on two of keys, as Llama has them: key widths are what context parallelism gathers.
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "num_heads": 8, "num_kv_heads": 2}
GPT2 = {"positions": "learned", "activation": "gelu_tanh", "bias": True}
MANY_WORDS = {"vocab_size": 4096, "width": 128}
ALONE = {
    "one process, Llama's form": _case(model=LLAMA),
    "one process, Llama's form, bfloat16": _case(precision="bfloat16", model=LLAMA),
    "one process, GPT-2's form": _case(model=GPT2),
    "one process": _case(),
    "one process, bfloat16": _case(precision="bfloat16"),
    "one process, full checkpointing": _case(activation_checkpointing="full"),
    "one process, selective checkpointing": _case(activation_checkpointing="selective"),
    "one process, alternate checkpointing": _case(activation_checkpointing="alternate"),
    "one process, two micro-batches": _case(TWICE),
}
TWO = {
    "DDP": _case(dp_replicate=2),
    "DDP, two micro-batches": _case(TWICE, dp_replicate=2),
    "FSDP2": _case(dp_shard=2),
    "FSDP2, kept gathered": _case(dp_shard=2, reshard_after_forward=False),
    "FSDP2 from the host": _case(dp_shard=2, cpu_offload=True),
    "FSDP2, gathered in bfloat16": _case(dp_shard=2, gather_dtype="bfloat16"),
    "FSDP2, bfloat16": _case(dp_shard=2, precision="bfloat16"),
    "FSDP2, bfloat16, full checkpointing": _case(dp_shard=2, precision="bfloat16", activation_checkpointing="full"),
    "PP2, bfloat16": _case(FLOWING, pp=2, precision="bfloat16"),
    "FSDP2, selective checkpointing": _case(dp_shard=2, activation_checkpointing="selective"),
    "FSDP2, alternate checkpointing": _case(dp_shard=2, activation_checkpointing="alternate"),
    "FSDP2, full checkpointing": _case(dp_shard=2, activation_checkpointing="full"),
    "FSDP2, two micro-batches": _case(TWICE, dp_shard=2),
    "FSDP2, large vocabulary": _case(dp_shard=2, model=MANY_WORDS),
    "FSDP2, short sequences": _case({"local_size": 1}, dp_shard=2, model={"context": 64, "num_layers": 6}),
    "TP2": _case(tp=2),
    "TP2, short sequences": _case({"local_size": 1}, tp=2, model={"context": 64}),
    "TP2, bfloat16": _case(tp=2, precision="bfloat16"),
    "TP2 by positions": _case(tp=2, sequence_parallel=True),
    "CP2": _case(cp=2),
    "FSDP2, Llama's form": _case(dp_shard=2, model=LLAMA),
    "FSDP2, Llama's form, full checkpointing": _case(dp_shard=2, activation_checkpointing="full", model=LLAMA),
    "FSDP2, Llama's form, alternate checkpointing": _case(
        dp_shard=2, activation_checkpointing="alternate", model=LLAMA
    ),
    "TP2, selective checkpointing": _case(tp=2, activation_checkpointing="selective"),
    "TP2, alternate checkpointing": _case(tp=2, activation_checkpointing="alternate"),
    "TP2 by positions, Llama's form": _case(tp=2, sequence_parallel=True, model=LLAMA),
    "CP2, Llama's form": _case(cp=2, model=LLAMA),
    "PP2, Llama's form": _case(FLOWING, pp=2, model=LLAMA),
    "PP2": _case(FLOWING, pp=2),
    "PP2, large vocabulary": _case(FLOWING, pp=2, model=MANY_WORDS),
    "PP2, GPipe, large vocabulary": _case(FLOWING, pp=2, pipeline_schedule="gpipe", model=MANY_WORDS),
    "PP2, GPipe": _case(FLOWING, pp=2, pipeline_schedule="gpipe"),
    "PP2, two stages each": _case(FLOWING, pp=2, stages_per_rank=2),
}
FOUR = {
    "FSDP2 over 4": _case(dp_shard=4),
    "HSDP 2x2": _case(dp_replicate=2, dp_shard=2),
    "DP2 x TP2": _case(dp_shard=2, tp=2),
    "DP2 x TP2 by positions": _case(dp_shard=2, tp=2, sequence_parallel=True),
    "DP2 x PP2": _case(FLOWING, dp_shard=2, pp=2),
    "TP2 x PP2": _case(FLOWING, tp=2, pp=2),
    "DP2 x CP2": _case(dp_shard=2, cp=2),
}


def main() -> None:
    """Measures all of them and prints a table."""
    print(f"{'layout':38}{'measured':>11}{'estimated':>11}  off")
    worst = 0.0
    for ranks, cases in ((1, ALONE), (2, TWO), (4, FOUR)):
        found = measure_layouts(cases, ranks=ranks)
        for name in cases:
            one = max((each for each in found if each.case == name), key=lambda each: each.peak)
            off = one.estimated / one.peak - 1
            worst = max(worst, abs(off))
            print(f"{name:38}{one.peak / 2**20:7.1f} MiB{one.estimated / 2**20:7.1f} MiB {off:+.1%}", flush=True)
    print(f"farthest off: {worst:.1%}")


if __name__ == "__main__":
    main()
