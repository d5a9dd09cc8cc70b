from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_train.rundir.files import read_json
from slurm_train.rundir.jobs import Holder, release_lock, take_lock, this_process
from slurm_train.rundir.paths import RunDirectory
from tests.cli.conftest import Shell


def is_held(run: RunDirectory, holder: Holder) -> None:
    """Makes somebody the holder of a run."""
    take_lock(run.lock, holder, is_alive=lambda _holder: True)


JOBS = [
    ({"11": "FAILED", "12": "PENDING"}, ["12"]),
    ({"11": "RUNNING", "12": "FAILED", "13": "PENDING"}, ["13", "11"]),
]


@pytest.mark.parametrize(("words", "cancelled"), JOBS)
def test_every_active_job_is_cancelled_the_newest_first(
    words: dict[str, str], cancelled: list[str], shell: Shell
) -> None:
    run = shell.has_run(job_ids=tuple(words))
    for job_id, word in words.items():
        shell.slurm.queue(job_id, word)
    done = shell.types("cancel 3f9a1c07")
    assert done.code == 0 and "`resume 3f9a1c07` continues it" in done.err
    assert shell.slurm.said("cancelled").split() == cancelled
    stop = {"jobs": sorted(cancelled), "newest_job": int(cancelled[0]), "cancels": True}
    assert read_json(run.stop_file) == stop, "a job that is on its way must not take over"


def test_a_job_that_nobody_recorded_is_found_by_the_lock_and_by_its_script(shell: Shell) -> None:
    run = shell.has_run(job_ids=("11",))
    is_held(run, Holder(job_id="20", host="node1", pid=5, started="1"))
    shell.slurm.has_script("21", run.submit_script)
    shell.slurm.has_script("22", run.logs / "submitted" / "x.sh")
    shell.slurm.has_script("23", run.path.with_name("3f9a1c070") / "submit.sh")
    for job_id in ("20", "21", "22", "23"):
        shell.slurm.queue(job_id, "PENDING")
    assert shell.types("cancel 3f9a1c07").code == 0
    assert shell.slurm.said("cancelled") == "22 21 20\n"
    assert read_json(run.stop_file)["newest_job"] == 23, "a job of this number is on its way already"


def test_what_is_not_active_or_not_named_clearly_is_left_alone(shell: Shell) -> None:
    shell.has_run("gpt", "3f9a1c07", job_ids=("12",))
    shell.has_run("gpt", "3f9abbbb", job_ids=("13",))
    shell.slurm.account("12", "COMPLETED")
    shell.refuses("gpt/3f9a1c07 is neither queued nor running", "cancel 3f9a1c07")
    shell.slurm.queue("13", "RUNNING")
    shell.refuses("is the beginning of several run ids", "cancel 3f9a")
    assert shell.slurm.said("cancelled") is None


def test_a_run_without_a_job_is_asked_to_stop(shell: Shell) -> None:
    run, killed = shell.has_run(cluster=False), []
    is_held(run, this_process())
    shell.patch.setattr(os, "kill", lambda *how: killed.append(how))
    done = shell.types("cancel gpt-stdlib")
    assert done.code == 0 and "asked gpt-stdlib/3f9a1c07 to save and stop" in done.err
    assert killed == [(os.getpid(), signal.SIGTERM)] and not run.stop_file.exists()
    release_lock(run.lock, this_process())
    is_held(run, Holder(job_id=None, host="elsewhere", pid=5, started="1"))
    assert shell.types("cancel gpt-stdlib").code == 0 and run.stop_file.exists()


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="giving a run to another user needs root")


@needs_root
@pytest.mark.parametrize(("user", "code"), [("nobody(65534)", 0), ("root(0)", 2), ("ada(1000)", 2)])
def test_a_run_of_another_user_names_only_jobs_of_its_owner(user: str, code: int, shell: Shell) -> None:
    run = shell.has_run(job_ids=("12",))
    shell.slurm.queue("12", "RUNNING")
    (shell.slurm.folder / "job.out").write_text(f"JobId=12 JobName=gpt\n   UserId={user} GroupId=x(1)\n")
    os.chown(run.path, 65534, 65534)
    done = shell.types("cancel gpt-stdlib")
    assert done.code == code, done.err
    assert shell.slurm.said("cancelled") == ("12\n" if code == 0 else None)
    assert (f"belongs to nobody and names job 12, which is of {user}" in done.err) is (code != 0)


@needs_root
def test_a_run_of_another_user_names_no_process_of_mine(shell: Shell) -> None:
    run = shell.has_run(cluster=False)
    is_held(run, this_process())
    os.chown(run.path, 65534, 65534)
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: asked.append(number))
    try:
        shell.refuses("which is another user's", "cancel gpt-stdlib")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert asked == []


def test_somebody_elses_process_is_not_ours_to_end(shell: Shell) -> None:
    is_held(shell.has_run(cluster=False), this_process())

    def refuse(_pid: int, _number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    shell.patch.setattr(os, "kill", refuse)
    shell.refuses("belongs to another user", "cancel gpt-stdlib")


# Another user cannot import what lies below root's home, so everything is imported before.
AS_NOBODY = """
import os, sys
from slurm_train.verbs import VERBS, run
VERBS["cancel"].load(), VERBS["status"].load(), VERBS["collate"].load()
os.setgroups([]), os.setgid(65534), os.setuid(65534)
print(run(sys.argv[1:]))
"""
CLOSED = [
    ("status", (), "you may not see the runs below {root}: {root}/gpt of root"),
    ("cancel", ("3f9a1c07",), "you may not see the runs below {root}: {root}/gpt of root"),
    ("cancel", ("{root}/gpt/3f9a1c07",), "{root}/gpt/3f9a1c07/sweep.jsonl: you may not read or write it"),
]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming somebody else needs root")
@pytest.mark.parametrize(("verb", "words", "text"), CLOSED)
def test_somebody_elses_runs_are_said_to_be_so(verb: str, words: tuple[str, ...], text: str, open_folder: Path) -> None:
    root = open_folder / "runs"
    for folder in (root, root / "gpt", root / "gpt" / "3f9a1c07"):
        folder.mkdir()
    (root / "gpt" / "3f9a1c07" / "config.yaml").touch()
    (root / "gpt").chmod(0o700)
    typed = [verb, "--root", str(root), *(word.format(root=root) for word in words)]
    done = subprocess.run([sys.executable, "-c", AS_NOBODY, *typed], capture_output=True, text=True, check=False)
    assert done.stdout == "2\n" and done.stderr.startswith(f"error: {text.format(root=root)}"), done
