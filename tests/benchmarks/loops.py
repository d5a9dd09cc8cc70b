"""Training loops that are measured in turns on one device: each a process that waits for its turns.

A process of its own keeps compiled code, memory and settings of one loop away from the others. What lasts between turns
is on the device; what a loop's allocator only keeps for later is given back after each turn.

A benchmark calls `serve` in the process of a loop and `Loop` in its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks import trace_summary
from tests.support.command_line import REPOSITORY

Run = Callable[[int], None]
"""Takes so many optimizer steps."""
Figures = dict[str, Any]


class Loop:
    """A loop in a process of its own.

    Args:
        module: is started again for the loop, e.g. "tests.benchmarks.bench_gpt2".
        name: of the loop, for the table.
        order: what the process needs to know, as plain values; it finds it in argv as JSON, behind "--loop".
        folder: of its own, "folder" in the order.
    """

    def __init__(self, module: str, name: str, order: Mapping[str, Any], folder: Path) -> None:
        self.name = name
        self.turns: list[Figures] = []
        self.facts: Figures = {}
        self._folder, self._log = folder, folder / "log.txt"
        argv = [sys.executable, "-m", module, "--loop", json.dumps({**order, "folder": str(folder)})]
        with self._log.open("ab") as file:
            self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file)
        assert self._process.stdout is not None and self._process.stdin is not None
        self._answers, self._orders = self._process.stdout, self._process.stdin

    def await_ready(self, *, timeout_s: float) -> None:
        """Waits until the loop is built and warm.

        Raises:
            RuntimeError: it ended, or takes longer.
        """
        self.facts = self._answer(timeout_s)

    def turn(self, steps: int) -> Figures:
        """Lets the loop take steps and returns what it measured: seconds per step, peak bytes."""
        self.turns.append(self.ask({"steps": steps}))
        return self.turns[-1]

    def ask(self, order: Mapping[str, Any], *, timeout_s: float = 300.0) -> Figures:
        """Sends an order and returns the answer."""
        self._orders.write(json.dumps(order).encode() + b"\n")
        self._orders.flush()
        return self._answer(timeout_s)

    def trace(self) -> str:
        """Returns where the time of a step goes, as a section of a page."""
        path = self._folder / "trace.json"
        self.ask({"steps": 2, "trace": str(path)})
        table = trace_summary.table(trace_summary.summarise(trace_summary.read(path)), steps=2)
        return f"## {self.name}: where a step's time goes\n\n{table}"

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        self._answers.close()
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()

    def _answer(self, timeout_s: float) -> Figures:
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            line = self._answers.readline() if selector.select(timeout_s) else b""
        if not line:
            said = self._log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"the loop {self.name!r} gave no answer within {timeout_s:.0f} s:\n{said}")
        found: Figures = json.loads(line)
        return found


def serve(build: Callable[[Mapping[str, Any]], tuple[Run, Figures]], order: Mapping[str, Any]) -> None:
    """Builds a loop and takes its turns, until the process is ended.

    Args:
        build: returns what takes steps, and facts about the loop; with "save" among them, a function that measures a
            save when it is asked for.
        order: what `Loop` was given; "warm_up" is the steps before the first turn (3).
    """
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    # Whatever prints to stdout from here on does not disturb the answers.
    os.dup2(2, 1)
    import torch

    on_gpu = torch.cuda.is_available()
    sync: Callable[[], None] = torch.cuda.synchronize if on_gpu else lambda: None
    began_s = time.perf_counter()
    run, facts = build(order)
    save: Callable[[], Figures] | None = facts.pop("save", None)
    run(int(order.get("warm_up", 3)))
    sync()
    facts = {**facts, "start_s": time.perf_counter() - began_s}
    while True:
        if on_gpu:
            torch.cuda.empty_cache()
        print(json.dumps(facts), file=channel)
        line = sys.stdin.readline()
        if not line:
            os._exit(0)
        asked = json.loads(line)
        run(1)  # memory that was given back is taken again
        sync()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        if "trace" in asked:
            with torch.profiler.profile() as found:
                run(int(asked["steps"]))
                sync()
            found.export_chrome_trace(asked["trace"])
            facts = {}
            continue
        if asked.get("save"):
            assert save is not None
            facts = save()
            continue
        start_s, cpu_s = time.perf_counter(), time.process_time()
        run(int(asked["steps"]))
        sync()
        facts = {
            "step_s": (time.perf_counter() - start_s) / asked["steps"],
            # What the host was busy for: near the step's time, the device waits for it.
            "host_cpu_s": (time.process_time() - cpu_s) / asked["steps"],
            "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        }


def start_loops(
    module: str, orders: Mapping[str, Mapping[str, Any]], scratch: Path, undo: contextlib.ExitStack
) -> tuple[list[Loop], list[str]]:
    """Returns the loops that could be built and warmed up, each in a folder of its own, and notes about others.

    All are built at the same time, on cores of their own as far as there are; `undo` ends all of them.
    """
    loops, notes = list[Loop](), list[str]()
    # What one of them has compiled the next ones find.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(scratch / "inductor"))
    started = []
    for name, order in orders.items():
        loop = Loop(module, name, order, Path(tempfile.mkdtemp(dir=scratch)))
        undo.callback(loop.close)
        started.append(loop)
    for loop in started:
        try:
            loop.await_ready(timeout_s=300)
            loops.append(loop)
        except RuntimeError as err:
            loop.close()
            notes.append(not_measured(loop.name, err))
    return loops, notes


def not_measured(name: str, err: Exception) -> str:
    """Returns a note for the page."""
    return f"`{name}` could not be measured:\n\n```\n{str(err)[-1500:]}\n```"


def left_out(names: Sequence[str]) -> list[str]:
    """Returns a note about those that were not begun."""
    return [f"Left out, since the budget was spent: {', '.join(names)}."] if names else []


def take_turns(loops: Sequence[Loop], *, rounds: int, steps: int, until_s: float = float("inf")) -> int:
    """Lets every loop have one turn a round, each round begun by another one; returns the rounds that were made.

    Args:
        loops: ready ones.
        rounds: how many.
        steps: of a turn.
        until_s: time of `time.monotonic` after which no further round begins.
    """
    for number in range(rounds):
        if number and time.monotonic() > until_s:
            return number
        first = number % len(loops)
        for loop in (*loops[first:], *loops[:first]):
            loop.turn(steps)
    return rounds


def row(loop: Loop, *, base: Loop | None = None, tokens: int) -> Figures:
    """Returns a line of the table.

    Args:
        loop: what is shown.
        base: what it is compared with, round by round, if anything.
        tokens: of an optimizer step.

    Facts of the base, or of the loop itself, have "flops", per token: ours and 6 N + 12 L T C; and the "peak" of the
    device per second, None where it is not known.
    """
    step_s = median(turn["step_s"] for turn in loop.turns)
    rate, facts, compared = tokens / step_s, (base or loop).facts, {}
    flops, peak = facts["flops"], facts["peak"]
    if base:
        ratios = [theirs["step_s"] / own["step_s"] for own, theirs in zip(loop.turns, base.turns, strict=False)]
        compared = {f"speed_against_{base.name.replace(' ', '_')}": median(ratios)}
    return {
        "loop": loop.name,
        "tokens_per_s": rate,
        "step_ms": 1e3 * step_s,
        **compared,
        "mfu": rate * flops[0] / peak if peak else None,
        "mfu_6n_12ltc": rate * flops[1] / peak if peak else None,
        "peak_gb": max(turn["peak_bytes"] for turn in loop.turns) / 1e9,
        "step_ms_spread": 1e3
        * (max(turn["step_s"] for turn in loop.turns) - min(turn["step_s"] for turn in loop.turns)),
        "host_cpu_ms": 1e3 * median(turn["host_cpu_s"] for turn in loop.turns),
        "start_s": loop.facts.get("start_s"),
        "rounds": len(loop.turns),
    }


def commit() -> str:
    """Returns what is measured, "" where the code is no checkout."""
    words = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError):
        return subprocess.run(words, capture_output=True, text=True, timeout=20).stdout.strip()
    return ""


def machine() -> Figures:
    """Returns versions and the card: what a figure is worth nothing without."""
    import torch

    found: Figures = {"torch": torch.__version__, "python": platform.python_version(), "device": "cpu"}
    found["commit"] = commit()
    for name in ("triton", "lightning", "pytorch_lightning", "accelerate", "transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if torch.cuda.is_available():
        found |= {"device": torch.cuda.get_device_name(0), "cuda": torch.version.cuda}
        found |= {"cudnn": torch.backends.cudnn.version(), "gpus": torch.cuda.device_count()}
    return found


def markdown(title: str, facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns rows with the same keys as a table, under a line of facts."""
    keys = list(rows[0]) if rows else []
    dry = [] if facts.get("device") != "cpu" else ["**On a CPU, in a tiny form: this shows that it runs, no speed.**"]
    head = ", ".join(f"{key} {value}" for key, value in facts.items() if value not in (None, ""))
    lines = [f"| {' | '.join(keys)} |", "|---|" + "--:|" * (len(keys) - 1)]
    lines += [f"| {' | '.join(_cell(one.get(key)) for key in keys)} |" for one in rows]
    return "\n\n".join([f"# {title}", *dry, head, "\n".join(lines)])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
    return "" if value is None else str(value)


def keep(out: Path | None, name: str, document: Mapping[str, Any], text: str) -> None:
    """Prints the Markdown, and keeps it with the same as JSON where a folder is given."""
    print(text)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.md").write_text(text + "\n")
        (out / f"{name}.json").write_text(json.dumps(document, indent=1, default=str) + "\n")
