"""What became of a peer's training, and the table of all of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

OUTCOMES = Path(__file__).with_name("outcomes.json")


class StepDone(NamedTuple):
    """A step that a training wrote a line of."""

    step: int
    start: int
    """How often the job had been restarted when the process began that did it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One peer after one fault."""

    state: str
    """Slurm's word for the job when nothing more happened."""
    restarts: int
    done_twice: int
    """Steps that were done more than once, counted with their repetitions."""
    never_done: int
    """Steps that were not done at all."""
    done_beside: int
    """Steps that an older start did while a newer one was at work already, in the same files."""
    finished: bool
    is_golden: bool
    """Whether the weights have the bits of the peer's own undisturbed training."""
    measured: str = ""
    """The day, e.g. "2026-11-21"."""

    def cell(self, *, ends_cancelled: bool) -> str:
        """Returns it for the table; bold: not what a person wants."""
        restarts = f", {self.restarts} restart{'s' * (self.restarts != 1)}" if self.restarts else ""
        if ends_cancelled:
            well = self.state == "CANCELLED" and not self.restarts
            return f"{self.state}{restarts}" if well else f"**{self.state}{restarts}**"
        steps = f"{self.done_twice} steps twice" if self.done_twice else "no step twice"
        if not self.finished:
            return f"**{self.state}{restarts}, {self.never_done} steps never**, {steps}"
        if self.done_beside:
            steps += f", **{self.done_beside} beside the new ranks by old ones**"
        weights = "weights equal" if self.is_golden else "**other weights**"
        return f"{self.state}{restarts}, {steps}, {weights}"


def judge(
    *,
    state: str,
    restarts: int,
    steps: Sequence[StepDone],
    num_steps: int,
    digest: str,
    golden: str,
    measured: str = "",
) -> Outcome:
    """Returns the outcome of a training.

    Args:
        state: Slurm's word.
        restarts: of the job.
        steps: that were done, again where they were done again.
        num_steps: of the whole training.
        digest: of its weights, "" where it did not finish.
        golden: of the undisturbed training's weights.
        measured: the day.
    """
    counts = Counter(done.step for done in steps)
    newest = list(accumulate((done.start for done in steps), max))
    return Outcome(
        state=state,
        restarts=restarts,
        done_twice=sum(count - 1 for count in counts.values()),
        never_done=sum(step not in counts for step in range(1, num_steps + 1)),
        done_beside=sum(done.start < start for done, start in zip(steps, newest, strict=True)),
        finished=bool(digest),
        is_golden=bool(digest) and digest == golden,
        measured=measured,
    )


def keep(outcomes: Mapping[str, Mapping[str, Outcome]], path: Path = OUTCOMES) -> None:
    """Puts outcomes (fault -> peer) in the place of older ones."""
    known = read(path)
    for fault, by_peer in outcomes.items():
        known[fault] = {**known.get(fault, {}), **by_peer}
    plain = {fault: {peer: asdict(outcome) for peer, outcome in by_peer.items()} for fault, by_peer in known.items()}
    path.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")


def read(path: Path = OUTCOMES) -> dict[str, dict[str, Outcome]]:
    """Returns the kept outcomes, by fault and peer."""
    loaded = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {fault: {peer: Outcome(**facts) for peer, facts in by_peer.items()} for fault, by_peer in loaded.items()}


def table(
    outcomes: Mapping[str, Mapping[str, Outcome]], *, peers: Mapping[str, str], faults: Mapping[str, tuple[str, bool]]
) -> str:
    """Returns the Markdown table: a row for each fault, a column for each peer.

    Args:
        outcomes: by fault and peer.
        peers: their names for the head.
        faults: their names, and whether the right end is a cancelled job.
    """
    rows = [f"| | {' | '.join(peers.values())} |", f"|---{'|---' * len(peers)}|"]
    for fault, (what, ends_cancelled) in faults.items():
        found = outcomes.get(fault, {})
        cells = [found[peer].cell(ends_cancelled=ends_cancelled) if peer in found else "not run" for peer in peers]
        rows.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(rows)
