"""`run.share=group`: the group reads a run, but for what is secret; nobody else does, and by default nobody at all."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_train.code.snapshot import Source
from slurm_train.errors import RunError
from slurm_train.metrics import MetricsWriter
from slurm_train.plan.plan import RunPlan
from slurm_train.rundir.attempts import open_attempt
from slurm_train.rundir.jobs import record_job, take_lock, this_process
from slurm_train.rundir.ledger import Start
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.job_request import JobRequest
from slurm_train.start.write import require_writable, write_run
from tests.support.plans import make_plan

# What root can do is done first, because the modules of a Python in root's home can only be imported as root.
AS_NOBODY = """
import contextlib, io, os, sys
from slurm_train.verbs import run
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    run(sys.argv[1:]), run([*sys.argv[1:], "--root", "missing"])
os.setgroups({groups}), os.setgid(65534), os.setuid(65534)
print(run(sys.argv[1:]))
"""


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Path]:
    """A folder for runs that is set up for its group; the umask of its user is as strict as it gets."""
    folder = tmp_path / "project"
    folder.mkdir()
    folder.chmod(0o2750)
    before = os.umask(0o077)
    yield folder
    os.umask(before)


def written(folder: Path, share: str, **more: object) -> RunPlan:
    for name, mode in (("open.py", 0o640), ("closed.py", 0o600)):
        (folder / name).touch()
        (folder / name).chmod(mode)
    plan = make_plan(folder, run={"share": share} | more)
    require_writable(plan.run, share=plan.config.run.share)
    source = Source({"": folder}, files={name: folder / name for name in ("open.py", "closed.py")})
    write_run(plan, source, request=JobRequest(components=({},), script="#"))
    record_job(plan.run, "12")
    start = Start(job_id="12", restart_count=0, nodes=("node1",), world_size=1)
    open_attempt(plan.run, start)
    MetricsWriter(plan.run.metrics).write({"loss": 1.0})
    take_lock(plan.run.lock, this_process(), is_alive=lambda _: True)
    return plan


def modes(run: RunDirectory) -> dict[str, str]:
    paths = [run.path.parent, run.path, *run.path.rglob("*")]
    return {os.path.relpath(path, run.path): oct(stat.S_IMODE(path.stat().st_mode)) for path in paths}


def test_the_group_reads_all_but_secrets_whatever_the_umask(team: Path) -> None:
    found = modes(written(team, "group").run)
    assert found.pop("epochs/attempt_0") == "0o600", "the secret of the attempt"
    assert found.pop("code/closed.py") == "0o400", "as in the folder of the code"
    assert (found.pop("code/open.py"), found.pop("submit.sh")) == ("0o440", "0o750")
    folders = {"..", ".", "code", "logs", "checkpoints", "jobs", "epochs", "logs/attempt_0"}
    assert {name for name, mode in found.items() if mode == "0o2750"} == folders
    assert {"config.yaml", "plan.json", "attempts.jsonl", "metrics.jsonl", "lock.json", "job.json"} < set(found)
    assert {mode for name, mode in found.items() if name not in folders} == {"0o640"}


def test_by_default_a_run_there_is_its_users_alone(team: Path) -> None:
    assert not [mode for mode in modes(written(team, "private").run).values() if int(mode, 8) & 0o077]


def test_a_private_run_is_shared_from_then_on(team: Path) -> None:
    run = written(team, "private").run
    run.lock.unlink()
    (team / "runs").chmod(0o2750)
    again = modes(written(team, "group").run)
    assert again["."] == again["logs/attempt_1"] == "0o2750" and again["metrics.jsonl"] == "0o640"
    assert again["epochs/attempt_1"] == "0o600"


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o2700, 0o755])
def test_a_folder_that_is_not_set_up_is_refused_with_what_to_type(mode: int, team: Path) -> None:
    team.chmod(mode)
    with pytest.raises(RunError, match="is not set up for a group of yours") as caught:
        written(team, "group")
    assert caught.value.hint == f"chgrp GROUP {team}; chmod g+rxs {team}"
    assert not (team / "runs").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming somebody else needs root")
def test_somebody_of_the_group_sees_the_status_and_nobody_else_does() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder, gid = Path(name), 54321
        os.chown(folder, -1, gid)
        folder.chmod(0o2755)
        run = written(folder, "group").run
        for groups, code in (([gid], 0), ([], 2)):
            typed = [sys.executable, "-c", AS_NOBODY.format(groups=groups), "status", "--root", "runs"]
            done = subprocess.run(typed, cwd=folder, capture_output=True, text=True, check=False)
            assert done.stdout.splitlines()[-1:] == [str(code)], done
            assert (run.run_id in done.stdout) == (code == 0)
