"""Crash points of a real save and a real resume: torch writes and reads the tensors, all its file calls count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slurm_train.checkpoint.choice import choose_checkpoint
from slurm_train.checkpoint.commit import Place
from slurm_train.checkpoint.filling import Saved
from slurm_train.checkpoint.load import load_rank_state, load_tensors
from slurm_train.checkpoint.save import save_checkpoint
from tests.support.crash_points import NEW, NEXT, OLD, Scene
from tests.support.small_checkpoints import make_header, stage


def state_of(step: int) -> dict[str, Any]:
    """Returns what is saved at a step: weights of two types, and an optimizer's moments."""
    generator = torch.Generator().manual_seed(step)
    weights = {name: torch.randn(size, generator=generator) for name, size in (("first", (8, 4)), ("second", (3,)))}
    moments = {name: weight.double() * step for name, weight in weights.items()}
    return {"model": weights, "optimizer": moments, "step": step}


def rank_state_of(step: int) -> dict[str, Any]:
    """Returns a rank's own state at a step."""
    return {"cursor": [step, 8 * step], "words": torch.arange(step, step + 16)}


def save(root: Path, step: int, *, attempt: int = 1, keep: int = 1) -> Saved:
    """Saves a step as one rank does; the older checkpoints go."""
    header = make_header(step, attempt=attempt)
    return save_checkpoint(
        root, tensors=state_of(step), rank_state=rank_state_of(step), header=header, group=None, keep=keep
    )


def resume(root: Path) -> int:
    """Loads the newest checkpoint, clears away what dead attempts left, and returns the step.

    What is loaded must be what was saved, or an error.
    """
    choice = choose_checkpoint(root, group=None, attempt=2)
    assert choice is not None, "no checkpoint was found"
    step = choice.manifest.step
    loaded = {
        part: {name: torch.zeros_like(tensor) for name, tensor in state_of(step)[part].items()} for part in _PARTS
    }
    loaded["step"] = 0
    load_tensors(choice.path, loaded)
    own = load_rank_state(choice.path, 0)
    Place(root=root, attempt=2).prune_leftovers()
    check_equal(loaded, own, step=step)
    return step


_PARTS = ("model", "optimizer")


def check_equal(loaded: dict[str, Any], own: dict[str, Any] | None, *, step: int) -> None:
    """Asserts that what was loaded is what was saved at that step, bit for bit."""
    expected = state_of(step)
    assert loaded["step"] == step, f"step {step} was loaded as {loaded['step']}"
    for part in _PARTS:
        for name, tensor in expected[part].items():
            assert torch.equal(loaded[part][name], tensor), f"{part}.{name} of step {step} differs"
    assert own is not None and own["cursor"] == rank_state_of(step)["cursor"], (
        f"the rank's state of step {step} differs"
    )
    assert torch.equal(own["words"], rank_state_of(step)["words"]), f"the rank's state of step {step} differs"


def resume_and_save(root: Path, found: int) -> str:
    """The next attempt resumes what was found, saves and leaves nothing behind."""
    step = resume(root)
    if step != found:
        return f"{found} verifies, {step} was resumed"
    saved = save(root, NEXT, attempt=2)
    left = {path.name for path in root.iterdir()}
    if saved.problems or left != {saved.path.name}:
        return f"the next attempt left {sorted(left)}: {saved.problems}"
    return "" if resume(root) == NEXT else "what it saved is not resumed"


def prepare_old(root: Path) -> None:
    """One checkpoint, and a save to come."""
    save(root, OLD)


def prepare_for_resume(root: Path) -> None:
    """Two checkpoints, and what a killed attempt leaves."""
    save(root, OLD)
    save(root, NEW, keep=2)
    stage(root, make_header(9, attempt=0))
    (root / ".trash-x").mkdir()


TORCH_SCENES = (
    Scene(name="torch-save", prepare=prepare_old, work=lambda root: save(root, NEW), recover=resume_and_save),
    Scene(
        name="torch-resume",
        prepare=prepare_for_resume,
        work=resume,
        may_find=frozenset({NEW}),
        recover=resume_and_save,
        # Whatever it gives is checked against what was saved.
        is_told=lambda step: step is not None,
    ),
)
