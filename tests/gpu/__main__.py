"""What only a GPU can show, in one command: `python -m tests.gpu --out DIR --budget-s 560`.

Each check is a process of its own with a time limit. The most valuable ones come first; one that no longer fits into
the budget is listed as left out. All of them need two budgets: `--only A` and `--only B`. After each check
`DIR/results.json` and `DIR/summary.md` are written anew, and `DIR/log.txt` has what the checks printed. The exit code
is 1 if a check failed, 2 if nothing could be checked.

`--device cpu` runs the code of every check that has a meaning without a GPU, with small sizes. It shows that the checks
themselves work; its results are labelled and count for nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.loops import commit
from tests.gpu.catalogue import CHECKS, GROUPS, Check
from tests.support.command_line import REPOSITORY

PASSED, FAILED, TIMED_OUT = "passed", "FAILED", "TIMED OUT"
NO_BUDGET, NEEDS_GPU, DRY = "left out: no budget", "not run: needs a GPU", "ran on the CPU: no result"
_SLOWER_ON_CPU = 6


@dataclass(frozen=True)
class Outcome:
    """How one check ended."""

    name: str
    status: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def main() -> int:
    """Runs the checks; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--budget-s", type=float, default=560.0, help="seconds for everything (560)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    names = [*GROUPS, *(check.name for check in CHECKS)]
    parser.add_argument("--only", nargs="*", choices=names, help="these checks, or all of group A or B, alone")
    parser.add_argument("--wheels", type=Path, help="folder of wheels with packages that this Python lacks")
    asked = parser.parse_args()
    began_s = time.monotonic()
    asked.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-checks-") as scratch:
        env = environment(os.environ, device=asked.device, site=install(asked.wheels, Path(scratch, "site")))
        facts = machine(env, device=asked.device)
        for obstacle in facts.get("compile_obstacles", ()):
            print(f"nothing can be compiled here: {obstacle}; checks of compiled training will fail", file=sys.stderr)
        if asked.device == "cuda" and not facts.get("gpu"):
            print(f"torch finds no GPU here: {facts}; --device cpu tries the checks themselves", file=sys.stderr)
            return 2
        outcomes: list[Outcome] = []
        for check in [one for one in CHECKS if not asked.only or {one.name, one.group} & set(asked.only)]:
            left_s = asked.budget_s - (time.monotonic() - began_s)
            outcomes.append(run(check, env, left_s=left_s, out=asked.out, scratch=Path(scratch)))
            write(outcomes, facts, out=asked.out, seconds=time.monotonic() - began_s)
            print(line_of(outcomes[-1]), flush=True)
    return exit_code(outcomes)


def environment(env: Mapping[str, str], *, device: str, site: Path | None) -> dict[str, str]:
    """Returns the environment of the checks: the repository and the wheels can be imported, a dry run sees no GPU."""
    paths = [str(REPOSITORY), *([str(site)] if site else []), env.get("PYTHONPATH", "")]
    found = {**env, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    # A check is no job, also where the machine is a job's.
    found = {name: value for name, value in found.items() if not name.startswith(("SLURM_", "TORCHELASTIC_"))}
    # torch keeps what it has read of it at the first matrix product for as long as the process lives, so a check that
    # trains in the default mode and then deterministically needs it from the start.
    found.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return {**found, "CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else found


def install(wheels: Path | None, site: Path) -> Path | None:
    """Puts wheels into a folder that can be imported from, without any index."""
    if wheels is None:
        return None
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        raise SystemExit(f"{wheels} has no wheels")
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*words, "--target", str(site), *files], check=True)
    return site


_MACHINE = """
import json, os, platform, torch
found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
if torch.cuda.is_available():
    properties = torch.cuda.get_device_properties(0)
    found |= {"gpu": properties.name, "gpus": torch.cuda.device_count(), "gpu_memory_gb": properties.total_memory / 1e9}
    found |= {"cudnn": torch.backends.cudnn.version(), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
from slurm_train.rundir.node_disk import compile_obstacles
found["compile_obstacles"] = compile_obstacles(os.environ, on_gpu="gpu" in found)
print(json.dumps(found))
"""


def machine(env: Mapping[str, str], *, device: str) -> dict[str, Any]:
    """Returns versions and the card."""
    found = subprocess.run([sys.executable, "-c", _MACHINE], env=dict(env), capture_output=True, text=True, timeout=120)
    facts = json.loads(found.stdout.splitlines()[-1]) if found.returncode == 0 else {"error": found.stderr[-2000:]}
    return {**facts, "device": device, "commit": commit()}


def run(check: Check, env: Mapping[str, str], *, left_s: float, out: Path, scratch: Path) -> Outcome:
    """Runs one check in a process of its own, unless it does not fit into what is left of the budget."""
    on_cpu = env.get("CUDA_VISIBLE_DEVICES") == ""
    if on_cpu and not check.runs_on_cpu:
        return Outcome(check.name, NEEDS_GPU)
    if left_s < check.usual_s:
        return Outcome(check.name, NO_BUDGET)
    folder = scratch / check.name
    folder.mkdir()
    words = [sys.executable, "-m", "tests.gpu.catalogue", check.name, str(folder)]
    # A few shared cores take their time, also for small sizes.
    limit_s, began_s = min(left_s, check.limit_s * (_SLOWER_ON_CPU if on_cpu else 1)), time.monotonic()
    with (out / "log.txt").open("ab") as log:
        log.write(f"==== {check.name}\n".encode())
        log.flush()
        # A group of its own: what a check has started ends with it.
        process = subprocess.Popen(words, env=dict(env), stdout=log, stderr=log, cwd=REPOSITORY, start_new_session=True)
        try:
            code: int | None = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
    seconds = time.monotonic() - began_s
    result = folder / "result.json"
    found = json.loads(result.read_text()) if result.exists() else {}
    figures, error = found.get("figures", {}), found.get("error", "")
    if code is None:
        return Outcome(check.name, TIMED_OUT, seconds, figures, f"not done within {limit_s:.0f} s; see log.txt")
    if code or not found or error:
        why = error or f"it ended with exit code {code} and without a result; see log.txt"
        return Outcome(check.name, FAILED, seconds, figures, why)
    return Outcome(check.name, DRY if on_cpu else PASSED, seconds, figures)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a check and the processes that it has left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def write(outcomes: Sequence[Outcome], facts: Mapping[str, Any], *, out: Path, seconds: float) -> None:
    """Writes all results so far, whole or not at all."""
    document = {"machine": dict(facts), "seconds": seconds, "checks": [asdict(one) for one in outcomes]}
    for name, text in (("results.json", json.dumps(document, indent=1)), ("summary.md", summary(outcomes, facts))):
        temporary = out / f"{name}.new"
        temporary.write_text(text + "\n")
        temporary.replace(out / name)


def summary(outcomes: Sequence[Outcome], facts: Mapping[str, Any]) -> str:
    """Returns the results as Markdown."""
    by_name = {check.name: check for check in CHECKS}
    head = ", ".join(f"{key} {value}" for key, value in facts.items() if value)
    note = "**On the CPU: this tries the checks themselves and is no result.**\n\n" if facts["device"] == "cpu" else ""
    rows = [
        f"| `{one.name}` | {one.status} | {one.seconds:.0f} | {by_name[one.name].asserts} | {figures_of(one)} |"
        for one in outcomes
    ]
    table = "\n".join(["| check | status | s | asserts | figures |", "|---|---|--:|---|---|", *rows])
    errors = "".join(f"\n\n## {one.name}\n\n```\n{one.error}\n```" for one in outcomes if one.error)
    return f"# GPU checks\n\n{note}{head}\n\n{table}{errors}"


def figures_of(outcome: Outcome) -> str:
    """Returns the plain figures of a check in one line; results.json has all of them."""
    plain = {key: value for key, value in outcome.figures.items() if not isinstance(value, (dict, list))}
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in plain.items()
    )


def line_of(outcome: Outcome) -> str:
    """Returns a check's end in one line, for the terminal."""
    last = outcome.error.strip().splitlines()[-1:] or [figures_of(outcome)]
    return f"{outcome.name:<20} {outcome.status:<26} {outcome.seconds:5.0f} s  {last[0]}"[:240]


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """Returns 1 if a check failed, 2 if none was run, else 0."""
    statuses = {one.status for one in outcomes}
    if statuses & {FAILED, TIMED_OUT}:
        return 1
    return 0 if statuses & {PASSED, DRY} else 2


if __name__ == "__main__":
    sys.exit(main())
