"""The GPU checks in the order of their value, and how one of them is run: `python -m tests.gpu.catalogue NAME FOLDER`.

All of them take some 880 s on one H100, by estimate: more than a machine that is lent for ten minutes has. Group A has
the most valuable ones, group B the others.

With a single card a check has one rank with NCCL, or two ranks over gloo on the same card, or one rank of 64 over
torch's fake backend, which computes in earnest and exchanges nothing. `tests/gpu/multi` has the checks of several ranks
with NCCL, also on one card.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch


@dataclass(frozen=True)
class Check:
    """One check: a function `(Stage) -> figures` that raises where something is not as it should be."""

    name: str
    module: str
    """Of `tests.gpu` that has the function of this name."""
    group: str
    """"A" or "B": what `--only` takes in place of names. Each group fits into one budget of 560 s."""
    usual_s: float
    """Seconds that it is expected to take, by estimate for one H100; without so many left it is not begun."""
    limit_s: float
    """Seconds after which it is ended."""
    asserts: str
    runs_on_cpu: bool = True
    """Whether its code has a meaning without a GPU."""


GROUPS = ("A", "B")
CHECKS = (
    Check(
        "cli_end_to_end", "system_checks", "A", 90, 330, "one command trains over NCCL, stops, saves, resumes, finishes"
    ),
    Check("no_sync", "training_checks", "A", 35, 150, "no step waits for the device, in eight settings"),
    Check("resume_bits", "training_checks", "A", 80, 240, "deterministic: an interrupted run has the bits of another"),
    Check("nan_is_masked", "training_checks", "A", 12, 60, "a step with an infinite gradient changes nothing"),
    Check("save_race", "training_checks", "A", 25, 240, "a background save has the values of its own step"),
    Check("save_overlaps", "training_checks", "A", 90, 240, "a save costs one step of 40, 25 ms of idle GPU"),
    Check("two_ranks", "two_rank_checks", "A", 60, 180, "DDP equals accumulation; stop, replicas, bf16"),
    Check("gpt2_quick", "speed_checks", "A", 110, 260, "GPT-2 124M: at least as fast as a tuned plain loop"),
    Check("fsdp_one_rank", "training_checks", "B", 30, 120, "FSDP in bfloat16 near unsharded; float32 angles; offload"),
    Check(
        "compiled_everywhere",
        "training_checks",
        "B",
        105,
        300,
        "graphs for every checkpointing and layout; loss inside",
    ),
    Check("attention_kernels", "speed_checks", "B", 15, 90, "a fused attention kernel runs; chunks equal the whole"),
    Check("flight_is_nccl", "system_checks", "B", 12, 60, "NCCL's flight recorder has 8 all_reduces"),
    Check("device_choice", "system_checks", "B", 20, 90, "device 0, a UUID, none; no silent training on the CPU"),
    Check(
        "hang_sentence", "two_rank_checks", "B", 40, 120, "the sentence about a hang names the rank whose GPU is busy"
    ),
    Check("memory_plan", "speed_checks", "B", 60, 200, "peak memory within 10 % of the plan: 8B and 70B, 64 ranks"),
    Check("nvml", "system_checks", "B", 8, 45, "NVML answers; the card's peak is known", runs_on_cpu=False),
    Check("float8", "training_checks", "B", 40, 150, "float8 by torchao near bfloat16, gathered in float8 too"),
    Check(
        "program_saves", "training_checks", "B", 15, 90, "a program's saves have their steps' values; a resume its bits"
    ),
    Check("loss", "speed_checks", "B", 30, 120, "head and loss: time and memory by the size of a chunk of scores"),
    Check("small_step", "speed_checks", "B", 15, 90, "time and host's time of a step at 0.9 million parameters"),
)


@dataclass(frozen=True)
class Stage:
    """Where a check runs."""

    folder: Path
    """Of its own, empty."""
    on_gpu: bool

    @property
    def device(self) -> torch.device:
        """The device that is checked."""
        return torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")

    def sync(self) -> None:
        """Waits for the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def reset_peak(self) -> None:
        """Begins to look for the most memory anew."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def size(self, on_gpu: Any, on_cpu: Any) -> Any:
        """Returns a size for the GPU, or a small one that only shows that the code runs."""
        return on_gpu if self.on_gpu else on_cpu


class Unmet(Exception):
    """A check found something that is not as it should be."""


def require(holds: object, text: str) -> None:
    """Raises where something does not hold."""
    if not holds:
        raise Unmet(text)


def end_with(path: Path, work: Callable[[], dict[str, Any]]) -> NoReturn:
    """Writes what the work finds, or its "error", and ends without waiting for the threads of process groups."""
    try:
        found = work()
    except BaseException as err:
        traceback.print_exc()
        found = {"error": str(err) if isinstance(err, Unmet) else traceback.format_exc(limit=-6)}
    path.write_text(json.dumps(found, default=str))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if "error" in found else 0)


def main() -> None:
    """Runs one check and writes what it found."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    (module,) = (check.module for check in CHECKS if check.name == name)

    def work() -> dict[str, Any]:
        function = getattr(importlib.import_module(f"tests.gpu.{module}"), name)
        return {"figures": function(Stage(folder, on_gpu=torch.cuda.is_available()))}

    end_with(folder / "result.json", work)


if __name__ == "__main__":
    main()
