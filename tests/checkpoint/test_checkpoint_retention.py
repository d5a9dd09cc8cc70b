from __future__ import annotations

import pytest

from slurm_train.checkpoint.directory import list_checkpoints
from slurm_train.checkpoint.retention import prune, sweep
from slurm_train.errors import CheckpointError


def steps(root):
    return [int(path.name[-7:]) for path in list_checkpoints(root)]


def test_the_newest_whole_ones_stay(root, kit):
    for step in (1, 2, 3, 4):
        kit.make(root, step)
    pruned = prune(root, keep=2, attempt=1, epoch_fence=1)
    assert steps(root) == [4, 3]
    assert [path.name[-1] for path in pruned.kept] == ["4", "3"]
    assert [path.name[-1] for path in pruned.removed] == ["2", "1"]
    assert (pruned.untrusted, pruned.problems) == ((), ())
    assert [path.name for path in root.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("keep", [0, -1])
def test_keep_below_one_is_refused(root, kit, keep):
    kit.make(root, 1)
    with pytest.raises(CheckpointError, match=f"checkpoint.keep={keep} would remove the newest"):
        prune(root, keep=keep, attempt=1, epoch_fence=1)
    assert steps(root) == [1]


def test_damaged_ones_neither_count_nor_go(root, kit):
    paths = {step: kit.make(root, step) for step in (1, 2, 3)}
    (paths[3] / "__1_0.distcp").write_bytes(b"short")
    pruned = prune(root, keep=1, attempt=1, epoch_fence=1)
    assert steps(root) == [3, 2]
    assert pruned.untrusted == (paths[3],)


def test_protected_names_stay(root, kit):
    for step in (1, 2, 3):
        kit.make(root, step)
    prune(root, keep=1, attempt=1, epoch_fence=1, protect={"checkpoint_0000001"})
    assert steps(root) == [3, 1]


def test_what_a_newer_attempt_wrote_is_never_removed(root, kit):
    kit.make(root, 1, epoch_fence=1)
    kit.make(root, 2, epoch_fence=2)
    kit.make(root, 3, epoch_fence=1)
    (kit.make(root, 4, epoch_fence=2) / "COMPLETE").unlink()
    prune(root, keep=1, attempt=1, epoch_fence=1)
    assert steps(root) == [4, 3, 2]


def test_sweep_takes_leftovers_of_earlier_attempts_only(root, kit):
    kit.make(root, 1)
    (kit.make(root, 2) / "COMPLETE").unlink()
    for attempt in (1, 2, 3):
        kit.stage(root, kit.header(9, attempt=attempt))
    (root / ".trash-checkpoint_0000001-00ff").mkdir()
    (root / "notes").mkdir()
    swept = sweep(root, attempt=2, epoch_fence=2)
    assert sorted(path.name for path in root.iterdir()) == [
        "checkpoint_0000001",
        "checkpoint_0000009.tmp-local-2",
        "checkpoint_0000009.tmp-local-3",
        "notes",
    ]
    assert len(swept.removed) == 3
    assert swept.problems == ()


def test_one_that_cannot_be_removed_is_reported_and_does_not_keep_the_others(root, kit, monkeypatch):
    import slurm_train.checkpoint.retention as retention

    for step in (1, 2, 3):
        kit.make(root, step)
    real = retention.discard

    def refuse(path):
        if path.name == "checkpoint_0000002":
            raise OSError(5, "Input/output error")
        real(path)

    monkeypatch.setattr(retention, "discard", refuse)
    pruned = prune(root, keep=1, attempt=1, epoch_fence=1)
    assert [path.name[-1] for path in pruned.removed] == ["1"]
    assert pruned.problems == (f"cannot remove {root / 'checkpoint_0000002'}: [Errno 5] Input/output error",) * 2
