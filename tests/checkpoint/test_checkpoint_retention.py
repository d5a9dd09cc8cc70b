from __future__ import annotations

import pytest

from slurm_train.checkpoint.retention import discard_from, prune, sweep
from slurm_train.errors import CheckpointError, RunError
from slurm_train.rundir.layout import list_checkpoints, name_of


def steps(root):
    return steps_of(list_checkpoints(root))


def steps_of(paths):
    return [name_of(path).step for path in paths]


def test_the_newest_whole_ones_stay(root, kit):
    paths = [kit.make(root, step) for step in (1, 2, 3, 4)]
    pruned = prune(root, newest=paths[-1], keep=2, attempt=1)
    assert steps(root) == [4, 3]
    assert (steps_of(pruned.kept), steps_of(pruned.removed)) == ([4, 3], [2, 1])
    assert (pruned.untrusted, pruned.problems) == ((), ())
    assert [path.name for path in root.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("keep", [0, -1])
def test_keep_below_one_is_refused(root, kit, keep):
    path = kit.make(root, 1)
    with pytest.raises(CheckpointError, match=f"checkpoint.keep={keep} would remove the newest"):
        prune(root, newest=path, keep=keep, attempt=1)
    assert steps(root) == [1]


@pytest.mark.parametrize("content", [b"short", b"flipped bits, same size!"])
def test_one_that_is_newer_than_what_was_just_saved_does_not_count(root, kit, content):
    """It was passed over when the run resumed; bytes are not read again, so its sizes may hold."""
    paths = {step: kit.make(root, step) for step in (1, 2, 3)}
    (paths[3] / "__1_0.distcp").write_bytes(content)
    pruned = prune(root, newest=paths[2], keep=1, attempt=1)
    assert steps(root) == [3, 2]
    assert pruned.untrusted == (paths[3],)


def test_a_damaged_one_gives_way_when_its_step_is_saved_again(root, kit):
    damaged = kit.make(root, 3)
    (damaged / "__1_0.distcp").write_bytes(b"short")
    newest = kit.make(root, 3, attempt=2)
    assert prune(root, newest=newest, keep=2, attempt=2).removed == (damaged,)
    assert list_checkpoints(root) == [newest]


def test_protected_names_stay(root, kit):
    paths = [kit.make(root, step) for step in (1, 2, 3)]
    prune(root, newest=paths[2], keep=1, attempt=1, protect={paths[0].name})
    assert steps(root) == [3, 1]


def test_another_attempts_checkpoints_neither_count_nor_go(root, kit):
    for step, attempt in ((1, 1), (2, 2), (3, 0), (5, 2)):
        kit.make(root, step, attempt=attempt)
    newest = kit.make(root, 4)
    pruned = prune(root, newest=newest, keep=1, attempt=1)
    assert steps(root) == [5, 4, 3, 2]
    assert steps_of(pruned.removed) == [1]


def test_a_fence_stops_the_removal(root, kit):
    paths = [kit.make(root, step) for step in (1, 2)]

    def overtaken():
        raise RunError("attempt 2 has taken over")

    with pytest.raises(RunError, match="taken over"):
        prune(root, newest=paths[1], keep=1, attempt=1, fence=overtaken)
    with pytest.raises(RunError, match="taken over"):
        discard_from(root, 1, attempt=1, fence=overtaken)
    assert steps(root) == [2, 1]


def test_going_back_removes_a_step_and_later_ones_of_this_and_earlier_attempts(root, kit):
    for step, attempt in ((1, 1), (2, 0), (3, 1), (4, 2)):
        kit.make(root, step, attempt=attempt)
    assert steps_of(discard_from(root, 2, attempt=1)) == [3, 2]
    assert steps(root) == [4, 1]


def test_sweep_takes_leftovers_of_earlier_attempts_only(root, kit):
    kept = kit.make(root, 1)
    stagings = [kit.stage(root, kit.header(9, attempt=attempt))[0] for attempt in (1, 2, 3)]
    (root / ".trash-checkpoint_0000001-00ff").mkdir()
    (root / "notes").mkdir()
    swept = sweep(root, attempt=2)
    assert {path.name for path in root.iterdir()} == {kept.name, stagings[1].name, stagings[2].name, "notes"}
    assert len(swept.removed) == 2
    assert swept.problems == ()


def test_one_that_cannot_be_removed_is_reported_and_does_not_keep_the_others(root, kit, monkeypatch):
    import slurm_train.checkpoint.retention as retention

    paths = [kit.make(root, step) for step in (1, 2, 3)]
    real = retention.discard

    def refuse(path, **changes):
        if path == paths[1]:
            raise OSError(5, "Input/output error")
        return real(path, **changes)

    monkeypatch.setattr(retention, "discard", refuse)
    pruned = prune(root, newest=paths[2], keep=1, attempt=1)
    assert pruned.removed == (paths[0],)
    assert pruned.problems == (f"cannot remove {paths[1]}: [Errno 5] Input/output error",)
