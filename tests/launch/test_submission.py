from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from slurm_train.errors import ClusterError
from slurm_train.launch.submission import submit_script

SCRIPT = "#!/bin/bash\n#SBATCH --nodes=1\necho $HOME\n"


class FakeSlurm:
    """`sbatch` and `srun` as small programs in a folder; what sbatch was given is kept beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told = folder / "told.json"
        self._write("srun", "#!/bin/sh\n")
        self._write("scontrol", "#!/bin/sh\necho 'ClusterName             = big-cluster'\n")
        self._write("scancel", f'#!/bin/sh\necho "$@" >> {folder}/cancelled\n')
        self.answers("4711")

    def answers(self, out: str, *, err: str = "", code: int = 0) -> None:
        said = {"out": out, "err": err, "code": code, "told": str(self.told)}
        self._write(
            "sbatch",
            f"#!{sys.executable}\n"
            "import json, os, sys\n"
            f"said = json.loads({json.dumps(said)!r})\n"
            "facts = {'argv': sys.argv[1:], 'env': dict(os.environ), 'script': open(sys.argv[-1]).read()}\n"
            "open(said['told'], 'w').write(json.dumps(facts))\n"
            "sys.stdout.write(said['out']); sys.stderr.write(said['err']); sys.exit(said['code'])\n",
        )

    def _write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return FakeSlurm(folder)


@pytest.mark.parametrize("out", ["4711", "4711;big-cluster\n", "Welcome to the site, 3 messages\n4711\n"])
def test_sbatch_gets_the_script_as_it_is_and_its_answer_is_read(out: str, slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.answers(out)
    assert submit_script(SCRIPT, folder=tmp_path / "logs" / "submitted", env=os.environ) == "4711"
    told = json.loads(slurm.told.read_text())
    assert told["script"] == SCRIPT and told["argv"][:-1] == ["--parsable"]


def test_a_job_that_went_to_another_cluster_is_cancelled_there(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.answers("4711;gpu2\n")
    with pytest.raises(ClusterError, match="sbatch gave the job to cluster gpu2 as job 4711, which is cancelled"):
        submit_script(SCRIPT, folder=tmp_path / "submitted", env=os.environ)
    assert (slurm.folder / "cancelled").read_text() == "--clusters=gpu2 4711\n"


def test_of_the_environment_only_what_is_given_and_may_travel_reaches_sbatch(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    withheld = ["SLURM_JOB_ID", "SBATCH_PARTITION", "RANK", "WANDB_API_KEY", "LD_PRELOAD", "NOT_NAMED"]
    kept = ["SLURM_CONF", "NCCL_DEBUG", "MY_OWN", "HF_TOKEN", "BASH_FUNC_module%%"]
    monkeypatch.setenv("PYTHONPATH", "of the process")
    monkeypatch.setenv("NCCL_DEBUG", "of the process")
    env = {"PATH": os.environ["PATH"], **dict.fromkeys((*withheld, *kept), "given")}
    submit_script(SCRIPT, folder=tmp_path / "submitted", env=env, export=["MY_*", "HF_TOKEN"])
    seen = json.loads(slurm.told.read_text())["env"]
    assert {name: seen[name] for name in (*withheld, *kept, "PYTHONPATH") if name in seen} == dict.fromkeys(
        kept, "given"
    )


def test_what_submitit_keeps_is_private(slurm: FakeSlurm, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        submit_script(SCRIPT, folder=tmp_path / "submitted", env=os.environ)
    finally:
        os.umask(before)
    # What a link's own mode says counts for nobody.
    kept = [path for path in (tmp_path / "submitted").iterdir() if not path.is_symlink()]
    assert kept
    assert [path.name for path in (tmp_path / "submitted", *kept) if path.stat().st_mode & 0o077] == []


@pytest.mark.parametrize(
    ("err", "line"),
    [
        ("sbatch: error: first\nsbatch: error: Invalid qos\n", "sbatch: error: Invalid qos"),
        ("something else went wrong\n", "something else went wrong"),
        ("", "FailedJobError"),
    ],
)
def test_a_refusal_is_an_error_with_slurms_own_line(err: str, line: str, slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.answers("", err=err, code=1)
    with pytest.raises(ClusterError) as caught:
        submit_script(SCRIPT, folder=tmp_path / "submitted", env=os.environ)
    assert caught.value.message == f"sbatch refused the job: {line}" and caught.value.hint


@pytest.mark.parametrize("out", ["", "Submitted batch job 4711\n"])
def test_an_answer_without_an_id_is_not_taken_for_one(out: str, slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.answers(out)
    with pytest.raises(ClusterError, match="sbatch printed no job id"):
        submit_script(SCRIPT, folder=tmp_path / "submitted", env=os.environ)


def test_without_srun_there_is_no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match="srun"):
        submit_script(SCRIPT, folder=tmp_path / "submitted", env=os.environ)
