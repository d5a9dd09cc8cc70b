"""Campaign `abandoned-past`: runs that go back in every way, while the nodes' disks keep what they have left.

A history is a run of random attempts on one of three nodes, each with a disk of its own. Between attempts a checkpoint
is damaged, in the run directory or on a disk, a change is accepted, or somebody takes the newest checkpoint away;
within one a rollback goes back. Choosing, saving, copying and removing is the product's own code; only the training is
not there: a step makes a state that knows its parent, and a checkpoint holds the number of its state. At each start the
chosen state must be one that the newest step came from, with every accepted change in force, and the newest such state
that can be reached.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from slurm_train.checkpoint.choice import choose_checkpoint
from slurm_train.checkpoint.commit import Place
from slurm_train.checkpoint.filling import Records, Saved, begin_filling
from slurm_train.checkpoint.local import LocalSaves, NodePlace
from slurm_train.checkpoint.manifest import Manifest, write_file
from slurm_train.checkpoint.verify import newest_committed_step, survey, verify
from slurm_train.errors import CheckpointError
from slurm_train.rundir.attempts import open_attempt
from slurm_train.rundir.events import AcceptedChange, read_changes, record_change
from slurm_train.rundir.ledger import Start
from slurm_train.rundir.lineage import Origin, record_origin
from slurm_train.rundir.paths import RunDirectory, list_checkpoints, name_of
from slurm_train.supervise.supervisor import close_lost
from slurm_train.train.continuity import Continuity
from tests.campaigns.checkpoint_faults import in_memory
from tests.campaigns.record import Tally
from tests.support.ledgers import close_attempt
from tests.support.small_checkpoints import make_header

ATTEMPTS = 12
NUM_DISKS = 3
_STATE_FILE, _OTHER_FILE = "rank_00000.pt", "__0_0.distcp"


class State(NamedTuple):
    """What the weights are after a step.

    Args:
        step: optimizer steps done.
        parent: number of the state before; -1 for the first.
        changes: accepted changes that were in force.
    """

    step: int
    parent: int
    changes: int


class History:
    """One run from its first attempt on."""

    def __init__(self, folder: Path, dice: random.Random) -> None:
        self.run, self.dice = RunDirectory(folder / "runs" / "name" / "id"), dice
        self.disks = [folder / f"disk_{number}" for number in range(NUM_DISKS)]
        self.run.path.mkdir(parents=True)
        self.states = [State(0, -1, 0)]
        self.head = 0
        """The newest state that a step has led to."""
        self.was_taken_away = False
        """Somebody has taken the newest checkpoint out of the run directory, and wants to go on from an older one."""
        self._hidden = ""
        """Id of a save that cannot be read just now."""
        self.last_end = ""
        """How the newest attempt ended."""
        self.has_damaged_disk = False
        self.events: Counter[str] = Counter()
        self.problems: list[str] = []

    def live(self) -> None:
        """Lives through all attempts, or until nothing can be loaded."""
        for _ in range(ATTEMPTS):
            try:
                attempt = _Attempt(self)
                attempt.live()
            except CheckpointError:
                self.events["no checkpoint verifies"] += 1
                return
            if self.problems:
                return
            self._disturb()

    def ancestors(self, number: int) -> list[int]:
        """Returns a state and all that it came from."""
        found = []
        while number >= 0:
            found.append(number)
            number = self.states[number].parent
        return found

    @property
    def is_unsure(self) -> bool:
        """Nobody has written down what a lost attempt had in the run directory, so a removal may be unseen."""
        return self.was_taken_away and self.last_end == "lost"

    def is_allowed(self, number: int, *, is_local: bool) -> bool:
        """Returns whether the run may go on from a state that lies in the run directory, or on a disk alone."""
        state = self.states[number]
        if number not in self.ancestors(self.head):
            return False
        if not is_local:
            return True
        if self.was_taken_away:
            return False
        changes = read_changes(self.run)
        return all(state.step <= change.step for change in changes[state.changes :])

    def _disturb(self) -> None:
        """Does to the run what happens to it between two attempts."""
        self.was_taken_away = False
        self._show_again()
        kind = self.dice.random()
        paths = list_checkpoints(self.run.checkpoints)
        if kind < 0.15 and paths:
            self._damage(paths[0])
            self.events["newest damaged"] += 1
        elif kind < 0.25 and paths and (paths[0] / "COMPLETE").exists():
            self._hidden = name_of(paths[0]).save_id
            (paths[0] / "COMPLETE").rename(self._kept_marker)
            self.events["newest unreadable for a while"] += 1
        elif kind < 0.35 and len(paths) > 1:
            shutil.rmtree(paths[0])
            self.was_taken_away = True
            self.events["newest taken away"] += 1
        elif kind < 0.5 and paths:
            step = newest_committed_step(self.run.checkpoints)
            if step >= 0:
                number = len(read_changes(self.run)) + 1
                record_change(
                    self.run, AcceptedChange(number=number, step=step, config={"optim.lr": [number, number + 1]})
                )
                self.events["change accepted"] += 1
        elif kind < 0.6:
            on_disks = [path for disk in self.disks for path in list_checkpoints(disk)]
            if on_disks:
                self._damage(self.dice.choice(on_disks))
                self.has_damaged_disk = True
                self.events["disk damaged"] += 1

    @property
    def _kept_marker(self) -> Path:
        return self.run.path / "marker_of_hidden"

    def _show_again(self) -> None:
        """Makes readable what could not be read in the attempt before, whatever its name is now."""
        for path in self.run.checkpoints.glob(f"*_{self._hidden}") if self._hidden else ():
            if not (path / "COMPLETE").exists():
                self._kept_marker.rename(path / "COMPLETE")
        self._kept_marker.unlink(missing_ok=True)
        self._hidden = ""

    def _damage(self, path: Path) -> None:
        if self.dice.random() < 0.3:
            (path / "COMPLETE").unlink(missing_ok=True)
            return
        size = (path / _OTHER_FILE).stat().st_size
        (path / _OTHER_FILE).write_bytes(b"?" * size)


class _Attempt:
    """One attempt on one of the nodes."""

    def __init__(self, history: History) -> None:
        run, self.history, self.dice = history.run, history, history.dice
        first_committed = newest_committed_step(run.checkpoints)
        start = Start(job_id=None, restart_count=0, nodes=("n",), world_size=1, first_committed=first_committed)
        close_lost(run, start, past_ends=lambda _: (), last_step=0)
        self.number = open_attempt(run, start)
        disk = self.dice.choice(history.disks)
        self.node = NodePlace(root=disk, node=0, attempt=self.number, keep=2)
        self.target = Place(root=run.checkpoints, attempt=self.number, keep=2)
        self.continuity = Continuity(
            run=run,
            settings={},
            code="",
            same_code=frozenset(),
            data="da7a",
            num_samples=1,
            changes=read_changes(run),
        )
        self.thread = ThreadPoolExecutor(1)
        self.local = LocalSaves(
            run=run,
            place=self.node,
            target=self.target,
            copy_every=2,
            peers=_world(),
            group=_world(),
            thread=self.thread,
        )
        self.origin = Origin()
        self.state = 0
        self.has_moved_on = False

    def live(self) -> None:
        """Resumes, takes some steps, and ends: killed, stopped, or lost together with its supervisor."""
        try:
            self._resume("start")
            for _ in range(self.dice.choice((0, 1, 2, 3, 5, 8))):
                if self.history.problems:
                    return
                self._step()
            end = self.dice.choice(("killed", "stopped", "lost"))
            self.history.last_end = end
            if end == "stopped" and self.has_moved_on:
                self._save(self.target)
            if end != "lost":
                last = newest_committed_step(self.history.run.checkpoints)
                close_attempt(self.history.run, self.number, {"reason": end, "last_committed": last})
        finally:
            self.thread.shutdown()

    def _resume(self, what: str) -> None:
        history = self.history
        allowed = self._allowed_states()
        choose = partial(choose_checkpoint, self.target.root, group=_world(), attempt=self.number)
        choice, notes = self.local.choose(
            lambda copied: choose(copied=copied), reason_against=self.continuity.reason_against
        )
        self.state = 0 if choice is None else _state_in(choice.path)
        self.origin = Origin() if choice is None else choice.origin
        self.has_moved_on = False
        self.target.passed_over[:] = [] if choice is None else [passed.path for passed in choice.passed_over]
        if any("on the nodes only" in note for note in notes):
            history.events["taken from a node"] += 1
        if choice is not None and history.states[self.state].step < history.states[history.head].step:
            history.events["went back"] += 1
        self._judge(what, allowed)

    def _allowed_states(self) -> set[int]:
        """Returns the states that can be gone on from, as far as this node sees them whole."""
        allowed = set()
        for root, is_local in ((self.target.root, False), (self.node.root, True)):
            for path, manifest in survey(root, verify):
                if isinstance(manifest, Manifest) and self.history.is_allowed(_state_in(path), is_local=is_local):
                    allowed.add(_state_in(path))
        return allowed or {0}

    def _judge(self, what: str, allowed: set[int]) -> None:
        history = self.history
        newest = max(history.states[number].step for number in allowed)
        step = history.states[self.state].step
        where = f"{what} of attempt {self.number}: step {step}"
        if self.state not in history.ancestors(history.head):
            history.problems.append(f"{where} is of a past that the run has left")
        elif self.state not in allowed and not history.is_unsure:
            history.problems.append(f"{where} is beyond a change, or beyond what was taken away")
        # A damaged file on a disk is only noticed when it is copied; then the run directory counts.
        elif step < newest and not history.has_damaged_disk and not history.is_unsure:
            history.problems.append(f"{where}, and step {newest} was there")

    def _step(self) -> None:
        history = self.history
        before = history.states[self.state]
        history.states.append(State(before.step + 1, self.state, len(self.continuity.changes)))
        self.state = history.head = len(history.states) - 1
        if not self.has_moved_on:
            self.target.move_aside()
            record_origin(history.run, self.number, self.origin)
            self.has_moved_on = True
            history.was_taken_away = False
        if self.dice.random() < 0.08 and list_checkpoints(self.target.root):
            history.events["rollback"] += 1
            bad_step = history.states[self.state].step
            for place in (self.node, self.target):
                place.discard_from(bad_step)
            self._resume("rollback")
        elif history.states[self.state].step % 2 == 0:
            self._save(self.node)

    def _save(self, place: Place) -> Saved:
        history = self.history
        changes = [{"number": change.number, "step": change.step, "names": []} for change in self.continuity.changes]
        header = make_header(
            history.states[self.state].step,
            attempt=self.number,
            parent=self.origin.save_id,
            extra={"changes": changes},
        )

        def write(staging: Path) -> list[Records]:
            files = {_STATE_FILE: str(self.state).encode(), _OTHER_FILE: b"weights of " + str(self.state).encode()}
            return [{name: write_file(staging / name, content) for name, content in files.items()}]

        filling = begin_filling(place, header, group=None, protect=tuple(self.local.copying))
        saved = filling.end(lambda: write(filling.staging))
        if place is self.node:
            self.local.add(saved, group=_world())
            self.thread.submit(lambda: None).result()
        return saved


def _state_in(path: Path) -> int:
    return int((path / _STATE_FILE).read_text())


def _world() -> Any:
    return dist.group.WORLD


@contextmanager
def group_of_one() -> Iterator[None]:
    """Makes a process group of this process alone, where there is none."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Lives through so many histories."""
    events: Counter[str] = Counter()
    with group_of_one():
        for number in range(trials):
            with in_memory(folder) as memory:
                history = History(memory, random.Random(f"{seed} {number}"))
                history.live()
            events += history.events
            tally.add(f"history {number}", history.problems)
    return {what: str(count) for what, count in sorted(events.items())}
