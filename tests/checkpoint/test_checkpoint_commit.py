"""Names have one owner: what a commit, a claim, a prune and a removal do, at once or arbitrarily late."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from slurm_train.checkpoint import commit as commit_module
from slurm_train.checkpoint.commit import Place, Pruned, discard, list_passed_over
from slurm_train.checkpoint.manifest import FileRecord, Manifest
from slurm_train.checkpoint.verify import Kept, find_kept, newest_verified, verify
from slurm_train.errors import CheckpointError, RunError
from slurm_train.rundir import attempts
from slurm_train.rundir.paths import CheckpointName, RunDirectory, list_checkpoints, name_of
from slurm_train.rundir.pins import pin_save, renew_lease
from tests.support.faulty_files import FaultyFiles, PowerCut
from tests.support.small_checkpoints import make_checkpoint, make_header, stage, steps_in


@pytest.fixture
def place(root):
    """Returns an attempt's hold on the directory."""
    return lambda attempt=1, **changes: Place(root=root, attempt=attempt, **changes)


def owners(root):
    return [(name_of(path).step, name_of(path).attempt) for path in list_checkpoints(root)]


def overtaken():
    raise RunError("attempt 2 has taken over")


def test_a_step_that_is_saved_is_not_written_again_and_its_files_are_not_read(root, place, monkeypatch):
    staging, manifest = stage(root, make_header(3))
    assert place().open_staging(3) != staging, "always a fresh one"
    final = place().commit(staging, manifest)
    assert verify(final) == manifest and final.name == staging.name.removesuffix(".tmp")
    # The leader alone would read for minutes what all ranks have written in seconds.
    monkeypatch.setattr("slurm_train.checkpoint.manifest.read_record", None)
    assert place().begin(3) == final
    assert place(2).begin(3).name.endswith(".tmp"), "another attempt's"
    (final / "__1_0.distcp").write_bytes(b"damaged")
    assert place().begin(3).name.endswith(".tmp")
    (final / "__1_0.distcp").unlink()
    assert place().begin(3).name.endswith(".tmp")


def test_a_process_does_not_end_between_the_fence_and_the_rename(root, place, monkeypatch):
    monkeypatch.setattr(attempts, "_under_way", threading.RLock())
    may_end = []

    def fence():
        with ThreadPoolExecutor(1) as pool:
            may_end.append(pool.submit(attempts.end_publishing, within_s=0.01).result())

    staging, manifest = stage(root, make_header(3))
    place(fence=fence).commit(staging, manifest)
    assert may_end == [False]


def commit_one(root, place):
    place().commit(*stage(root, make_header(3)))


def claim_older(root, place):
    assert place(2).claim().newest is not None


def move_damaged_aside(root, place):
    damaged = root / list_checkpoints(root)[0].name
    assert place(passed_over=[damaged]).move_aside()


def discard_newest(root, place):
    assert discard(list_checkpoints(root)[0])


def begin_saved(root, place):
    """Its own rename was the last call before the file system refused."""
    (root / "renamed").rename(root / str(CheckpointName(4, 1, "0badcafe")))
    assert not place().begin(4).name.endswith(".tmp")


@pytest.mark.parametrize("change", [commit_one, claim_older, move_damaged_aside, discard_newest, begin_saved])
def test_a_change_of_names_is_durable_when_it_returns(root, place, change):
    make_checkpoint(root, 1)
    make_checkpoint(root, 2)
    make_checkpoint(root, 4).rename(root / "renamed")
    cut = PowerCut(root)
    with FaultyFiles().installed(watch=cut.watch):
        change(root, place)
    durable = cut.entries[root.stat().st_ino]
    assert {name for name in durable if not name.startswith(".trash-")} == {path.name for path in root.iterdir()}


def test_the_fence_is_checked_right_before_the_rename(root, place):
    staging, manifest = stage(root, make_header(3))
    seen = []

    def fence():
        seen.extend(path.name for path in root.iterdir())
        overtaken()

    with pytest.raises(RunError, match="taken over"):
        place(fence=fence).commit(staging, manifest)
    assert seen == [staging.name] and (staging / "COMPLETE").exists()
    assert newest_verified(root).newest is None


@pytest.mark.parametrize("size", [23, None])
def test_a_file_that_rank_zero_does_not_see_whole_stops_the_commit(root, place, size):
    staging, manifest = stage(root, make_header(3))
    record = FileRecord(bytes=size or 5, xxh3_128="0" * 32)
    files = dict(manifest.files) | {"__0_0.distcp" if size else "__2_0.distcp": record}
    with pytest.raises(CheckpointError, match=r"distcp"):
        place().commit(staging, Manifest.of(make_header(3), files))
    assert list_checkpoints(root) == []


def test_a_claim_renames_what_holds_and_leaves_what_does_not(root, place):
    old, _, damaged = make_checkpoint(root, 2), make_checkpoint(root, 1), make_checkpoint(root, 3)
    (damaged / "__1_0.distcp").write_bytes(b"x" * 24)
    stage(root, make_header(4))
    search = place(7).claim()
    assert search.newest is not None
    assert search.newest[0] == old.with_name(str(name_of(old)._replace(attempt=7)))
    assert [passed.path for passed in search.passed_over] == [damaged]
    assert owners(root) == [(3, 1), (2, 7), (1, 7)]
    assert not list(root.glob("*.tmp")), "an earlier attempt's staging directory is in the trash"
    assert place(7).claim().newest == search.newest, "its own are not renamed again"
    with pytest.raises(CheckpointError, match=r"belongs to attempt 7, so attempt 4 cannot go on from it"):
        place(4).claim()


@pytest.mark.parametrize("owner", [1, 2])
def test_one_that_was_passed_over_loses_its_name_before_its_step_is_saved_again(root, place, owner):
    """Its sizes hold, so a name of this attempt's number would count as saved already."""
    make_checkpoint(root, 2)
    damaged = make_checkpoint(root, 3, attempt=owner)
    (damaged / "__1_0.distcp").write_bytes(b"x" * 24)
    own = place(2)
    assert own.claim().newest[1].step == 2
    assert damaged.is_dir(), "an attempt that makes no step moves nothing"
    staging = own.begin(3)
    assert staging.name.endswith(".tmp")
    aside = damaged.with_name(f"passed_over_{damaged.name}")
    assert not damaged.exists() and list_passed_over(root) == [aside]
    assert steps_in(root) == [2], "no reader takes it for a checkpoint"
    assert own.passed_over == own.move_aside() == []


def test_the_newest_that_was_passed_over_stays_for_a_person(root, place):
    for step, attempt in ((3, 1), (2, 2), (1, 2)):
        path = make_checkpoint(root, step, attempt=attempt)
        path.rename(path.with_name(f"passed_over_{path.name}"))
    (root / "passed_over_by_me").mkdir()
    pruned = place(3).prune(make_checkpoint(root, 4, attempt=3))
    removed, left = pruned.discarded, list_passed_over(root)
    assert [path.name.split("_")[3] for path in [*removed, *left]] == ["0000001", "0000003", "0000002"]
    assert len(left) == 1, "that of the newest attempt, the highest step"
    assert (root / "passed_over_by_me").is_dir()


def move_away(path, archive):
    """What a person does with a full disk: the directory moves, and a link is left."""
    archive.mkdir(exist_ok=True)
    path.symlink_to(path.rename(archive / path.name))


def test_one_that_was_moved_away_with_a_link_left_is_passed_over_with_its_reason(root, place):
    paths = [make_checkpoint(root, step) for step in (1, 2)]
    archive = root.parent / "archive"
    move_away(paths[1], archive)
    search = newest_verified(root)
    assert search.newest is not None and search.newest[0] == paths[0]
    assert [passed.path for passed in search.passed_over] == [paths[1]]
    assert f"it is a link to {archive / paths[1].name}" in search.passed_over[0].reason
    move_away(paths[0], archive)
    own = place(2)
    search = own.claim()
    assert search.newest is None and len(search.passed_over) == 2, "not the same as a run without checkpoints"


def test_nothing_is_removed_through_a_link(root, place):
    archive = root.parent / "archive"
    for step in (1, 2, 3):
        path = make_checkpoint(root, step)
        move_away(path.rename(path.with_name(f"passed_over_{path.name}")), archive)
    move_away(make_checkpoint(root, 4), archive)
    (root / ".trash-old").symlink_to(archive)
    before = sorted(archive.rglob("*"))
    own = place(2)
    pruned = own.prune(make_checkpoint(root, 5, attempt=2))
    own.discard_from(0)
    assert pruned.problems == [] and sorted(archive.rglob("*")) == before
    assert len([path for path in root.iterdir() if path.is_symlink()]) == 4, "links of a person stay"


def test_one_of_a_later_attempt_is_not_moved_aside(root, place):
    make_checkpoint(root, 1)
    later = make_checkpoint(root, 3, attempt=5)
    (later / "__1_0.distcp").write_bytes(b"short")
    own = place(2)
    own.claim()
    assert own.move_aside() == [] and later.is_dir()


def test_what_an_earlier_attempt_does_late_finds_its_source_gone(root, place):
    """Its fence says nothing, so only the names stop it."""
    make_checkpoint(root, 1)
    staging, manifest = stage(root, make_header(3))
    with pytest.raises(FileNotFoundError):
        place(fence=lambda: place(2).claim() and None).commit(staging, manifest)
    assert owners(root) == [(1, 2)]
    assert not discard(list_checkpoints(root)[0], fence=lambda: place(3).claim() and None)
    assert owners(root) == [(1, 3)]


@pytest.mark.parametrize(("late", "expected"), [("claimed", (3, 3)), ("removed", (1, 3))])
def test_a_checkpoint_that_an_earlier_attempt_moves_during_the_claim(root, place, late, expected):
    """Attempt 2 was stopped in its own claim or removal, and carries it out between attempt 3's look and rename."""
    make_checkpoint(root, 1)
    path = make_checkpoint(root, 3)
    works = iter([lambda: place(2).claim_checkpoint(path) if late == "claimed" else shutil.rmtree(path)])
    found = place(3, fence=lambda: next(works, lambda: None)() and None).claim().newest
    assert found is not None and name_of(found[0])[:2] == expected


def test_the_newest_whole_ones_stay(root, place):
    paths = [make_checkpoint(root, step) for step in (1, 2, 3, 4)]
    pruned = place(keep=2).prune(paths[-1])
    assert pruned == Pruned(discarded=[paths[1], paths[0]])
    assert sorted(root.iterdir()) == paths[2:], "nothing is in the trash"
    place(keep=1).prune(paths[-1], protect={paths[2].name})
    assert steps_in(root) == [4, 3]


def test_what_evaluations_are_still_to_read_stays(root, place):
    paths = [make_checkpoint(root, step) for step in (1, 2, 3, 4)]
    pin_save(root, name_of(paths[0]).save_id, RunDirectory(root.parent / "evaluation"))
    renew_lease(root, RunDirectory(root.parent / "0123456789ab"), most=2)
    place().prune(paths[-1])
    assert steps_in(root) == [4, 3, 1]


def test_as_many_of_the_best_stay_as_their_rule_says_and_of_a_step_the_newest_save(root, place):
    paths = [make_checkpoint(root, step) for step in (1, 2, 2, 3)]
    rule = {"name": "best eval_loss", "keep": 1, "steps": [[2, 0.5], [1, 0.7]]}
    newest = make_checkpoint(root, 4, extra={"kept": [rule]})
    best = max(paths[1:3], key=name_of)
    place().prune(newest)
    assert list_checkpoints(root) == [newest, best]
    assert find_kept(root) == [Kept(best, "best eval_loss", 0.5, is_best=True)]


def test_keep_below_one_is_refused(place):
    with pytest.raises(CheckpointError, match=r"checkpoint\.keep=0 would remove the newest"):
        place(keep=0)


@pytest.mark.parametrize("content", [b"short", b"flipped bits, same size!"])
def test_one_that_is_newer_than_what_was_just_saved_does_not_count(root, place, content):
    """It was passed over when the run resumed; bytes are not read again, so its sizes may hold."""
    paths = {step: make_checkpoint(root, step) for step in (1, 2, 3)}
    (paths[3] / "__1_0.distcp").write_bytes(content)
    assert place().prune(paths[2]).untrusted == [paths[3]]
    assert steps_in(root) == [3, 2]


def test_a_damaged_one_gives_way_when_its_step_is_saved_again(root, place):
    damaged = make_checkpoint(root, 3)
    (damaged / "__1_0.distcp").write_bytes(b"short")
    newest = make_checkpoint(root, 3, attempt=2)
    assert place(2, keep=2).prune(newest).discarded == [damaged]
    assert list_checkpoints(root) == [newest]


def test_another_attempts_checkpoints_neither_count_nor_go(root, place):
    for step, attempt in ((1, 1), (2, 2), (3, 0), (5, 2)):
        make_checkpoint(root, step, attempt=attempt)
    place().prune(make_checkpoint(root, 4))
    assert steps_in(root) == [5, 4, 3, 2]


def test_a_fence_stops_the_removal(root, place):
    paths = [make_checkpoint(root, step) for step in (1, 2)]
    for remove in (lambda own: own.prune(paths[1]), lambda own: own.discard_from(1)):
        with pytest.raises(RunError, match="taken over"):
            remove(place(fence=overtaken))
    assert steps_in(root) == [2, 1]


def test_going_back_removes_a_step_and_later_ones_of_this_and_earlier_attempts(root, place):
    for step, attempt in ((1, 1), (2, 0), (3, 1), (4, 2)):
        make_checkpoint(root, step, attempt=attempt)
    assert [name_of(path).step for path in place().discard_from(2)] == [3, 2]
    assert steps_in(root) == [4, 1]


def test_sweep_takes_leftovers_of_earlier_attempts_only(root, place):
    kept = make_checkpoint(root, 1)
    stagings = [stage(root, make_header(9, attempt=attempt))[0] for attempt in (1, 2, 3)]
    (root / ".trash-checkpoint_0000001-00ff").mkdir()
    (root / "notes").mkdir()
    swept = place(2).prune_leftovers()
    assert {path.name for path in root.iterdir()} == {kept.name, stagings[1].name, stagings[2].name, "notes"}
    assert (len(swept.discarded), swept.problems) == (2, [])


def test_one_that_cannot_be_removed_is_reported_and_does_not_keep_the_others(root, place, monkeypatch):
    paths = [make_checkpoint(root, step) for step in (1, 2, 3)]
    rename = commit_module.rename

    def refuse(source, target):
        if source == paths[1]:
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(commit_module, "rename", refuse)
    pruned = place().prune(paths[2])
    assert pruned.discarded == [paths[0]]
    (problem,) = pruned.problems
    assert str(paths[1]) in problem and "Input/output error" in problem


def test_a_step_is_saved_again_and_again_until_there_is_no_newer_name(root, place):
    attempt = place(keep=1)
    newest = make_checkpoint(root, 1)
    for _ in range(60):
        attempt.save_again(1)
        newer = attempt.commit(*stage(root, make_header(1), staging=attempt.begin(1)))
        attempt.prune(newer)
        assert name_of(newer) > name_of(newest)
        newest = newer
    newest.rename(newest.with_name(str(name_of(newest)._replace(save_id="ffffffff"))))
    attempt.save_again(1)
    with pytest.raises(CheckpointError, match="highest id, ffffffff"):
        attempt.begin(1)
    assert attempt.begin(2).name.endswith(".tmp")


@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_step_that_is_saved_again_is_the_newest_and_replaces_what_no_evaluation_reads(root, place, is_pinned):
    make_checkpoint(root, 1)
    before = make_checkpoint(root, 2)
    attempt = place(keep=2)
    attempt.claim()
    if is_pinned:
        evaluation = RunDirectory(root.parent / "evaluation")
        evaluation.path.mkdir()
        pin_save(root, name_of(before).save_id, evaluation)
    assert attempt.begin(2) == before
    attempt.save_again(2)
    again = attempt.commit(*stage(root, make_header(2), staging=attempt.begin(2)))
    attempt.prune(again)
    assert newest_verified(root).newest[0] == again
    assert steps_in(root) == ([2, 2, 1] if is_pinned else [2, 1])
