"""What a trace says: the longest kernels, own times of operations, and where nothing runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.benchmarks.trace_summary import read, summarise, table

pytestmark = pytest.mark.full


def event(name: str, start: float, us: float, *, cat: str = "kernel", tid: int = 7) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": us, "pid": 0, "tid": tid}


GPU = {
    "traceEvents": [
        event("aten::mm", 0, 5, cat="cpu_op"),
        event("cudaLaunchKernel", 1, 2, cat="cuda_runtime"),
        event("gemm", 100, 300),
        event("gemm", 420, 280),
        event("softmax|x", 600, 300, tid=8),
        event("Memcpy DtoH", 950, 50, cat="gpu_memcpy"),
        {"ph": "i", "name": "mark", "ts": 3},
        {"ph": "M", "name": "process_name"},
    ]
}


def test_kernels_are_added_up_and_gaps_are_those_of_all_streams() -> None:
    found = summarise(GPU)
    assert found.kind == "kernels"
    assert found.totals == [("gemm", 580, 2), ("softmax|x", 300, 1), ("Memcpy DtoH", 50, 1)]
    assert (found.span_us, found.busy_us) == (900, 830)
    assert found.gaps == [(50, "softmax|x", "Memcpy DtoH"), (20, "gemm", "gemm")]


def test_the_table_is_per_step() -> None:
    text = table(summarise(GPU), steps=2)
    head = "3 kinds of kernels, 2 calls and 0.45 ms per step; nothing runs for 0.04 ms of it (7.8 %), 1 times for 10 us"
    assert text.startswith(head)
    assert "| `gemm` | 0.290 | 62.4 | 1.0 | 290.0 |" in text
    assert "| 50.0 | `softmax\\|x` | `Memcpy DtoH` |" in text


def test_without_kernels_operations_count_without_what_they_call() -> None:
    calls = [
        event("linear", 0, 100, cat="cpu_op"),
        event("mm", 10, 60, cat="cpu_op"),
        event("copy", 15, 20, cat="cpu_op"),
        event("add", 150, 50, cat="cpu_op"),
        event("mm", 20, 30, cat="cpu_op", tid=9),
    ]
    found = summarise({"traceEvents": calls})
    assert found.kind == "operations"
    assert set(found.totals) == {("linear", 40, 1), ("mm", 70, 2), ("copy", 20, 1), ("add", 50, 1)}
    assert found.busy_us == 150 and [gap.us for gap in found.gaps] == [50]


@pytest.mark.parametrize("suffix", ["json", "json.gz"])
def test_a_trace_of_torch_is_read(tmp_path: Path, suffix: str) -> None:
    values = torch.ones(64, 64)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(3):
            values = values @ values
    path = tmp_path / f"trace.{suffix}"
    found.export_chrome_trace(str(path))
    totals = {one.name: one.calls for one in summarise(read(path)).totals}
    assert totals["aten::mm"] == 3
