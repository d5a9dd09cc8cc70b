"""A writer that is stopped (SIGSTOP) before each of its file-system calls, and goes on beside its successor.

A scene prepares a run whose attempt 1 does one piece of work in a forked process. It is stopped before its n-th call;
attempt 2 begins, claims, commits the same step and prunes; at one of these moments the writer is let go. From then on
every checkpoint that attempt 2 owns must verify at each look, and in the end its own must be the newest.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from slurm_train.checkpoint import verify as verify_module
from slurm_train.checkpoint.commit import Place, discard
from slurm_train.checkpoint.local import NodePlace, copy_to_run, newest_reachable
from slurm_train.checkpoint.verify import newest_verified, verify
from slurm_train.errors import CheckpointError
from slurm_train.rundir.attempts import check_fence, open_attempt, publish_result, withdraw_result
from slurm_train.rundir.files import read_json
from slurm_train.rundir.ledger import Start
from slurm_train.rundir.paths import RunDirectory, list_checkpoints, name_of
from tests.support.crash_points import Trial
from tests.support.faulty_files import fork
from tests.support.small_checkpoints import make_checkpoint, make_header, stage

OLD, NEW = 1, 2
MOMENTS = ("has begun", "has claimed", "has committed")


class Stage(NamedTuple):
    """A run, one node's folder, and how many checkpoints stay."""

    folder: Path
    keep: int

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.folder / "name" / "id")

    @property
    def root(self) -> Path:
        return self.run.checkpoints

    def place(self, attempt: int) -> Place:
        return Place(root=self.root, attempt=attempt, keep=self.keep, fence=partial(check_fence, self.run, attempt))

    def node(self, attempt: int) -> NodePlace:
        fence = partial(check_fence, self.run, attempt)
        return NodePlace(root=self.folder / "node", node=0, keep=self.keep, attempt=attempt, fence=fence)

    def open_attempt(self) -> int:
        return open_attempt(self.run, Start(job_id=None, restart_count=0, nodes=("n",), world_size=1))


class Scene(NamedTuple):
    """One piece of work of attempt 1, which is open.

    Args:
        name: for people.
        prepare: makes what is there before.
        work: what is stopped.
        is_local: attempt 2 uses the node's folder as well.
    """

    name: str
    prepare: Callable[[Stage], None]
    work: Callable[[Stage], object]
    is_local: bool = False


def save(stage_of_run: Stage, attempt: int) -> Path:
    """Stages, commits and prunes step NEW, as rank 0 of an attempt does; returns the checkpoint."""
    place = stage_of_run.place(attempt)
    place.fence()
    path = place.commit(*stage(place.root, make_header(NEW, attempt=attempt)))
    place.prune(path)
    return path


def save_local(stage_of_run: Stage, attempt: int) -> Path:
    """Saves step NEW on the node and copies it into the run directory; returns the copy."""
    # An overtaken writer would wait so long for the staging directory that its successor has taken away.
    verify_module.VISIBLE_TIMEOUT_S = 0.05
    tier = stage_of_run.node(attempt)
    tier.fence()
    staging, manifest = stage(tier.root, make_header(NEW, attempt=attempt))
    tier.prune(tier.commit(staging, manifest, here=manifest.files))
    found = newest_reachable(tier, lambda held: held.attempt == attempt and held.step > OLD, group=None)
    assert found is not None
    return copy_to_run(tier, stage_of_run.place(attempt), found, group=None).path


def roll_back_and_save(stage_of_run: Stage) -> None:
    """Goes back to before NEW, and saves it again."""
    stage_of_run.place(1).discard_from(NEW)
    save(stage_of_run, 1)


def claim_and_save(stage_of_run: Stage) -> None:
    """Begins as an attempt does."""
    stage_of_run.place(1).claim()
    save(stage_of_run, 1)


def pass_over_and_save(stage_of_run: Stage) -> None:
    """Begins as an attempt does whose newest checkpoint is damaged, and saves its step again."""
    place = stage_of_run.place(1)
    place.claim()
    place.move_aside()
    save(stage_of_run, 1)


def has_damaged(stage_of_run: Stage) -> None:
    """The newest checkpoint is of an earlier attempt and damaged, with sizes that hold."""
    has((OLD, 0), (NEW, 0))(stage_of_run)
    (list_checkpoints(stage_of_run.root)[0] / "__1_0.distcp").write_bytes(b"x" * 24)


def has(*checkpoints: tuple[int, int], on_node: bool = False) -> Callable[[Stage], None]:
    """Returns a preparation that makes checkpoints, given as (step, attempt)."""

    def prepare(stage_of_run: Stage) -> None:
        for step, attempt in checkpoints:
            make_checkpoint(stage_of_run.root, step, attempt=attempt)
            if on_node:
                make_checkpoint(stage_of_run.folder / "node", step, attempt=attempt)

    return prepare


def prune_all(stage_of_run: Stage) -> None:
    """Keeps the newest of many."""
    place = stage_of_run._replace(keep=1).place(1)
    place.prune(list_checkpoints(place.root)[0])


SCENES = (
    Scene("commit", has((OLD, 1)), lambda one: save(one, 1)),
    Scene("prune", has((0, 1), (OLD, 1), (NEW, 1)), prune_all),
    Scene("rollback", has((OLD, 1), (NEW, 1), (3, 0)), roll_back_and_save),
    Scene("claim", has((OLD, 0), (NEW, 0)), claim_and_save),
    Scene("passed-over", has_damaged, pass_over_and_save),
    Scene("local-save", has((OLD, 1), on_node=True), lambda one: save_local(one, 1), is_local=True),
    Scene("local-claim", has((OLD, 0), (NEW, 0), on_node=True), lambda one: one.node(1).claim_all(), is_local=True),
    Scene("local-close", has((OLD, 1), (NEW, 1), on_node=True), lambda one: one.node(1).discard_from(0), is_local=True),
)


def careless_prune(stage_of_run: Stage) -> None:
    """Looks at the directory, then removes by path whatever is not its own newest."""
    own = save(stage_of_run, 1)
    for path in list_checkpoints(stage_of_run.root):
        if path != own:
            discard(path)


CARELESS = Scene("careless", has((OLD, 1)), careless_prune)


def thawed_everywhere(scene: Scene, folder: Path, *, keep: int, every: int = 1) -> Iterator[Trial]:
    """Stops the writer before each of its calls, or every n-th, and lets it go at each moment of its successor."""
    template = Stage(folder / "template", keep)
    _prepare(template, scene)
    for moment, words in enumerate(MOMENTS):
        for at in itertools.count(1, every):
            here = Stage(folder / "trial", keep)
            shutil.copytree(template.folder, here.folder)
            name, problem = _try(scene, here, at=at, moment=moment)
            shutil.rmtree(here.folder)
            if not name:
                break
            yield Trial(
                f"{scene.name}, keep={keep}: stopped before call {at} ({name}), until attempt 2 {words}", problem
            )


def results_everywhere(folder: Path) -> Iterator[Trial]:
    """Stops who publishes a result before each call, until another attempt has published, or it was withdrawn."""
    for words, succeed in (("has published", _publish_next), ("was withdrawn", _withdraw)):
        for at in itertools.count(1):
            here = Stage(folder / "result", 1)
            _prepare(here, Scene("result", lambda _: None, lambda _: None))
            child, name = _start_stopped(lambda run=here.run: publish_result(run, 1, {"attempt": 1}), at=at)
            expected = succeed(here) if name else None
            if name:
                os.kill(child, signal.SIGCONT)
                os.waitpid(child, 0)
                found = read_json(here.run.result)
                problem = "" if found == expected else f"the result is {found}, expected {expected}"
                yield Trial(f"result: stopped before call {at} ({name}), until another {words}", problem)
            shutil.rmtree(here.folder)
            if not name:
                break


def _publish_next(here: Stage) -> dict[str, int]:
    attempt = here.open_attempt()
    publish_result(here.run, attempt, {"attempt": attempt})
    return {"attempt": attempt}


def _withdraw(here: Stage) -> None:
    withdraw_result(here.run, here.folder / "kept.json")


def _prepare(here: Stage, scene: Scene) -> None:
    here.run.path.mkdir(parents=True)
    (here.folder / "node").mkdir()
    assert [here.open_attempt() for _ in range(2)] == [0, 1]
    scene.prepare(here)


def _try(scene: Scene, here: Stage, *, at: int, moment: int) -> tuple[str, str]:
    """Returns the call before which the writer was stopped, "" if it ran through, and what is wrong afterwards."""
    child, name = _start_stopped(lambda: scene.work(here), at=at)
    if not name:
        return "", ""
    successor, problems = _succeed(here, is_local=scene.is_local), []
    try:
        for number, owned in enumerate(successor):
            if number == moment:
                os.kill(child, signal.SIGCONT)
                while os.waitpid(child, os.WNOHANG) == (0, 0):
                    problems += _damaged(owned)
                    time.sleep(0.001)
            problems += _damaged(owned)
    except Exception as err:  # whatever it is, it is this trial's problem
        problems.append(f"attempt 2 failed: {type(err).__name__}: {err}")
        if not child_is_gone(child):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return name, "; ".join(dict.fromkeys(problems))


def child_is_gone(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG) != (0, 0)
    except ChildProcessError:
        return True


def _succeed(here: Stage, *, is_local: bool) -> Iterator[list[Path]]:
    """Yields at each moment of attempt 2 the checkpoints that must verify from then on."""
    attempt = here.open_attempt()
    assert attempt == 2
    yield []
    if is_local:
        here.node(2).claim_all()
    found = here.place(2).claim().newest
    assert found is not None, "it found no checkpoint to go on from"
    yield [path for path in list_checkpoints(here.root) if name_of(path).attempt == 2]
    saved = save_local(here, 2) if is_local else save(here, 2)
    kept = [path for path in list_checkpoints(here.root) if name_of(path).attempt == 2]
    yield [*kept, *(path for path in list_checkpoints(here.node(2).root) if name_of(path).attempt == 2)]
    newest = newest_verified(here.root).newest
    assert newest is not None, "no checkpoint verifies"
    assert newest[0] == saved or name_of(newest[0]).step > NEW, f"the newest is {newest[0].name}, not {saved.name}"


def _damaged(owned: list[Path]) -> list[str]:
    problems = []
    for path in owned:
        try:
            verify(path)
        except CheckpointError as err:
            problems.append(err.message)
    return problems


def _start_stopped(work: Callable[[], object], *, at: int) -> tuple[int, str]:
    """Runs the work in a forked child until it stops before a call; returns the child and the call's name."""
    reader, writer = os.pipe()

    def stop(when: str, name: str) -> None:
        if when == "before":
            os.write(writer, name.encode())
            os.kill(os.getpid(), signal.SIGSTOP)

    child = fork(work, at=at, fault=stop)
    os.close(writer)
    _, status = os.waitpid(child, os.WUNTRACED)
    try:
        return child, os.read(reader, 64).decode() if os.WIFSTOPPED(status) else ""
    finally:
        os.close(reader)
