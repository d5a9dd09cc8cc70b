"""NFS repeats a request whose reply was lost: what was carried out is then reported as failed, and must count."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from slurm_train.checkpoint.commit import STAGING_SUFFIX, Place
from slurm_train.rundir.attempts import open_attempt, publish_result
from slurm_train.rundir.files import rename, write_atomic
from slurm_train.rundir.jobs import process_lives, read_holder, release_lock, take_lock, this_process
from slurm_train.rundir.ledger import Start
from slurm_train.rundir.paths import RunDirectory


@pytest.fixture
def twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Carries out each rename, link and mkdir twice, as a server does that gets the request twice."""
    for name in ("rename", "replace", "link"):
        once = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *words, _once=once, **named: (_once(*words, **named), _once(*words))[0])
    mkdir, made = os.mkdir, list[object]()

    def make_twice(path: object, *words: object, **named: object) -> None:
        mkdir(path, *words, **named)  # type: ignore[arg-type]
        if not made and str(path).endswith(STAGING_SUFFIX):
            made.append(path)
            mkdir(path)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "mkdir", make_twice)


@pytest.mark.usefixtures("twice")
def test_what_was_carried_out_counts(tmp_path: Path) -> None:
    write_atomic(tmp_path / "file", "one")
    write_atomic(tmp_path / "file", "two")
    assert (tmp_path / "file").read_text() == "two"
    run = RunDirectory(tmp_path)
    attempt = open_attempt(run, Start(job_id=None, restart_count=0, nodes=("a",), world_size=1))
    publish_result(run, attempt, {"attempt": attempt})
    assert json.loads(run.result.read_text()) == {"attempt": attempt}
    me = this_process()
    take_lock(run.lock, me, is_alive=process_lives)
    assert read_holder(run.lock) == me
    release_lock(run.lock, me)
    assert not run.lock.exists()
    staging = Place(root=run.checkpoints, attempt=0).open_staging(3)
    assert staging.is_dir() and [path.name for path in run.checkpoints.iterdir()] == [staging.name]


def test_a_missing_source_is_an_error_where_the_target_is_another(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("other")
    with pytest.raises(FileNotFoundError):
        rename(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").read_text() == "other"
