from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_train.code.snapshot import Source
from slurm_train.config.frozen import load_config
from slurm_train.errors import RunError
from slurm_train.request.batch_script import job_request
from slurm_train.rundir.paths import RunDirectory
from slurm_train.start.write import require_writable, write_run
from tests.support.plans import make_plan
from tests.support.refusals import refusal


def test_everything_that_a_job_reads_is_written(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print()")
    plan = make_plan(tmp_path, cluster={"nodes": 2})
    source = Source({"": tmp_path}, {"train.py": tmp_path / "train.py"})
    write_run(plan, source, request=job_request(plan))
    run = plan.run
    assert load_config(run.config) == plan.config
    assert json.loads(run.plan.read_text()) == plan.record.as_json()
    assert (run.code / "train.py").read_text() == "print()"
    assert run.submit_script.read_text() == job_request(plan).text() and os.access(run.submit_script, os.X_OK)
    assert run.logs.is_dir() and run.checkpoints.is_dir()
    assert run.path.stat().st_mode & 0o077 == 0, "nobody else reads it"


def test_writing_again_keeps_what_the_run_has_done_and_drops_the_stop_request(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    source = Source({"": tmp_path})
    write_run(plan, source, request=None)
    plan.run.metrics.write_text("{}\n")
    (plan.run.checkpoints / "checkpoint_0000001_attempt_0000_00000000").mkdir()
    plan.run.stop_file.touch()
    write_run(plan, source, request=None)
    assert plan.run.metrics.read_text() == "{}\n"
    assert (plan.run.checkpoints / "checkpoint_0000001_attempt_0000_00000000").is_dir()
    assert not plan.run.stop_file.exists()
    assert not plan.run.submit_script.exists()


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    plan = make_plan(tmp_path)
    error = refusal(RunError, require_writable, plan.run)
    assert error.message == f"{plan.run.path} cannot be made: {tmp_path}/runs is not a directory"
    assert error.hint == "name another place with run.root=DIR"


AS_NOBODY = """
import os, sys
from pathlib import Path
from slurm_train.errors import RunError
from slurm_train.start.write import require_writable
from slurm_train.rundir.paths import RunDirectory
os.setuid(65534)
try:
    require_writable(RunDirectory(Path(sys.argv[1])))
except RunError as err:
    print(err.message)
"""


def test_a_folder_that_may_not_even_be_entered_is_named(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("becoming somebody else needs root")
    run = RunDirectory(tmp_path / "closed" / "runs" / "gpt" / "3f9a1c07")
    run.path.mkdir(parents=True)
    (tmp_path / "closed").chmod(0o700)
    done = subprocess.run([sys.executable, "-c", AS_NOBODY, str(run.path)], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.startswith(f"{run.path} cannot be made: ") and done.stdout.endswith(" is not writable\n")
