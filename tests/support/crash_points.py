"""Every file-system call of a save, a commit, a prune or a resume: killed, refused, or the last before a power cut.

A scene prepares a directory of checkpoints and does one piece of work in it. Each trial starts anew, does the damage
at one call and says what is wrong afterwards: a verified checkpoint must be found, and the next attempt must be able
to save, to prune and to leave nothing behind.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from slurm_train.checkpoint.commit import Place, list_passed_over
from slurm_train.checkpoint.local import NodePlace, copy_to_run, newest_reachable
from slurm_train.checkpoint.manifest import Manifest, check_hash
from slurm_train.checkpoint.verify import newest_verified, read_manifest
from slurm_train.errors import CheckpointError
from slurm_train.rundir.paths import list_checkpoints, parse_name
from tests.support.faulty_files import FaultyFiles, PowerCut, count_calls, run_failing, run_killed
from tests.support.small_checkpoints import make_checkpoint, make_header, stage

ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
OLD, NEW, NEXT = 1, 2, 4


class Trial(NamedTuple):
    """One damage that was done."""

    what: str
    """E.g. "killed before call 17 (fsync)"."""
    problem: str
    """What is wrong afterwards; "" if nothing."""


class Scene(NamedTuple):
    """One piece of work on a directory of checkpoints.

    Args:
        name: for people.
        prepare: makes what is there before.
        work: what is disturbed.
        may_find: steps of which one must verify afterwards.
        recover: the next attempt, given the step that was found; returns what it finds wrong.
        is_told: whether the work's result says that something failed.
    """

    name: str
    prepare: Callable[[Path], None]
    work: Callable[[Path], Any]
    may_find: frozenset[int] = frozenset({OLD, NEW})
    recover: Callable[[Path, int], str] = lambda root, _: save_next(root)
    is_told: Callable[[Any], bool] = lambda result: bool(getattr(result, "problems", ()))


def prepare_first(root: Path) -> None:
    """One verified checkpoint, and a save to come."""
    make_checkpoint(root, OLD)


def prepare_damaged(root: Path) -> None:
    """A damaged checkpoint stands where the new one goes."""
    prepare_first(root)
    (make_checkpoint(root, NEW) / "__1_0.distcp").write_bytes(b"damaged")


def prepare_saved(root: Path) -> None:
    """The same step is saved already."""
    prepare_first(root)
    make_checkpoint(root, NEW)


def prepare_many(root: Path) -> None:
    """Something of everything that retention takes away."""
    make_checkpoint(root, 0)
    prepare_saved(root)
    stage(root, make_header(9, attempt=0))
    (root / ".trash-x").mkdir()


def save_new(root: Path) -> None:
    """Stages and commits the new checkpoint."""
    Place(root=root, attempt=1).commit(*stage(root, make_header(NEW)))


def prune_all(root: Path) -> Any:
    """Keeps one checkpoint."""
    return Place(root=root, attempt=1).prune(list_checkpoints(root)[0])


def prepare_passed_over(root: Path) -> None:
    """A checkpoint of the attempt's own has damaged bytes, with sizes that hold."""
    prepare_first(root)
    (make_checkpoint(root, NEW) / "__1_0.distcp").write_bytes(b"x" * 24)


def verify_in_order(path: Path) -> Manifest:
    """Verifies one file after the other: of several threads some stop early where another finds damage."""
    manifest = read_manifest(path)
    for name, record in manifest.files.items():
        check_hash(path / name, record)
    return manifest


def save_over_passed_over(root: Path) -> Any:
    """Goes back behind the damaged checkpoint, and reaches its step again."""
    place = Place(root=root, attempt=1)
    if place.claim(verify_in_order).newest is None:
        raise CheckpointError("none of them can be read", hint="as `choose_checkpoint` does")
    staging = place.begin(NEW)
    if parse_name(staging.name) is not None:
        return None
    return place.prune(place.commit(*stage(root, make_header(NEW), staging=staging)))


def save_again(root: Path) -> Any:
    """Writes the step again that the attempt goes on from, and has something to add to it."""
    place = Place(root=root, attempt=1)
    place.claim(verify_in_order)
    place.save_again(NEW)
    staging = place.begin(NEW)
    return place.prune(place.commit(*stage(root, make_header(NEW), staging=staging)))


def claim_all(root: Path) -> Any:
    """The next attempt makes what it goes on from its own."""
    return Place(root=root, attempt=2).claim()


def prepare_on_node(root: Path) -> None:
    """One verified checkpoint, and a newer one on the node's own disk."""
    prepare_first(root)
    shutil.rmtree(root.parent / "node", ignore_errors=True)
    make_checkpoint(root.parent / "node", NEW)


def copy_from_node(root: Path) -> Any:
    """Copies the node's checkpoint into the run directory."""
    node = NodePlace(root=root.parent / "node", node=0, attempt=1)
    found = newest_reachable(node, lambda held: held.step == NEW, group=None)
    if found is None:
        raise CheckpointError("the node's checkpoint cannot be read")
    return copy_to_run(node, Place(root=root, attempt=1), found, group=None)


def save_next(root: Path) -> str:
    """The next attempt claims, saves, prunes, and leaves nothing behind but what does not verify."""
    place = Place(root=root, attempt=2)
    place.claim()
    saved = place.commit(*stage(root, make_header(NEXT, attempt=2)))
    pruned = place.prune(saved)
    for_a_person = [*pruned.untrusted, *list_passed_over(root)]
    left = {path.name for path in root.iterdir()} - {path.name for path in for_a_person}
    if pruned.problems or left != {saved.name}:
        return f"the next attempt left {sorted(left)}: {pruned.problems}"
    return ""


SCENES = (
    Scene(name="commit", prepare=prepare_first, work=save_new),
    Scene(name="commit-over-damaged", prepare=prepare_damaged, work=save_new),
    Scene(name="commit-over-passed-over", prepare=prepare_passed_over, work=save_over_passed_over),
    Scene(name="commit-of-saved", prepare=prepare_saved, work=save_new, may_find=frozenset({NEW})),
    Scene(name="commit-again", prepare=prepare_saved, work=save_again, may_find=frozenset({NEW})),
    Scene(
        name="prune",
        prepare=prepare_many,
        work=prune_all,
        may_find=frozenset({NEW}),
        is_told=lambda pruned: bool(pruned.problems or pruned.untrusted),
    ),
    Scene(
        name="claim",
        prepare=prepare_many,
        work=claim_all,
        may_find=frozenset({NEW}),
        is_told=lambda search: search.newest is not None,
    ),
    Scene(name="copy-from-node", prepare=prepare_on_node, work=copy_from_node),
)


def killed_everywhere(scene: Scene, folder: Path, *, every: int = 1) -> Iterator[Trial]:
    """Kills the work before and after each of its calls, or every n-th of them."""
    root, names = _stage_set(scene, folder)
    for at, name in list(enumerate(names, start=1))[::every]:
        for when in ("before", "after"):
            _anew(folder)
            was_killed = run_killed(lambda: scene.work(root), at=at, when=when)
            problem = _after(scene, root) if was_killed else "it was not killed"
            yield Trial(f"{scene.name} killed {when} call {at} ({name})", problem)


def refused_everywhere(scene: Scene, folder: Path, number: int, *, first: int = 0, every: int = 1) -> Iterator[Trial]:
    """Lets each call, or every n-th, fail with an error; then the caller was told, or the save is complete."""
    root, names = _stage_set(scene, folder)
    for at, name in list(enumerate(names, start=1))[first::every]:
        _anew(folder)
        result, error = run_failing(lambda: scene.work(root), at=at, number=number)
        is_told = error is not None or scene.is_told(result)
        problem = "" if is_told or found_step(root) == NEW else "it failed and nobody was told"
        if isinstance(error, AssertionError):
            problem = f"what came out is wrong: {error}"
        yield Trial(f"{scene.name}: {errno.errorcode[number]} at call {at} ({name})", problem or _after(scene, root))


def power_lost_everywhere(scene: Scene, folder: Path) -> Iterator[Trial]:
    """Cuts the power after each call: only what was made durable is left, under durable names or all that were given.

    The work has returned after its last call, so from then on the new checkpoint must be there.
    """
    root, _ = _stage_set(scene, folder)
    _anew(folder)
    found = list(_steps_after_cuts(lambda: scene.work(root), root))
    for number, (name, steps) in enumerate(found, start=1):
        allowed = {NEW} if number == len(found) else scene.may_find
        wrong = sorted({str(step) for step in steps if step not in allowed})
        problem = f"found step {', '.join(wrong)}" if wrong else ""
        yield Trial(f"{scene.name}: power lost after call {number} ({name})", problem)


def found_step(root: Path) -> int | None:
    """Returns the step of the newest checkpoint that verifies."""
    found = newest_verified(root).newest
    return None if found is None else found[1].step


def _steps_after_cuts(work: Callable[[], Any], root: Path) -> Iterator[tuple[str, tuple[int | None, int | None]]]:
    cut = PowerCut(root)
    cuts: list[tuple[str, list[Path]]] = []

    def watch(name: str, args: tuple[Any, ...], result: Any) -> None:
        cut.watch(name, args, result)
        left = [root.with_name(f"after_{len(cuts)}_{kind}") for kind in ("durable", "given")]
        for target, durable_names_only in zip(left, (True, False), strict=True):
            cut.rebuild(root, target, durable_names_only=durable_names_only)
        cuts.append((name, left))

    with FaultyFiles().installed(watch=watch):
        work()
    for name, left in cuts:
        yield name, (found_step(left[0]), found_step(left[1]))
        for target in left:
            shutil.rmtree(target)


def _stage_set(scene: Scene, folder: Path) -> tuple[Path, list[str]]:
    """Prepares the scene and returns where the work is done, and the names of its calls."""
    root = folder / "checkpoints"
    shutil.rmtree(folder / "template", ignore_errors=True)
    scene.prepare(folder / "template")
    _anew(folder)
    with FaultyFiles().installed() as files:
        scene.work(root)
    _anew(folder)
    assert count_calls(lambda: scene.work(root)) == files.num_calls, f"{scene.name} does not do the same twice"
    return root, files.names


def _anew(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    shutil.copytree(folder / "template", folder / "checkpoints")


def _after(scene: Scene, root: Path) -> str:
    """Returns what is wrong with what is left."""
    found = found_step(root)
    if found is None or found not in scene.may_find:
        return f"found step {found}"
    try:
        return scene.recover(root, found)
    except Exception as err:  # whatever it is, it is this trial's problem
        return f"the next attempt failed: {type(err).__name__}: {err}"
