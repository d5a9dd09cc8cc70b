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


ANSWERS = [
    ("4711\n", "4711"),
    ("4711;big-cluster\n", "4711"),  # the cluster of this machine
    ("4711", "4711"),
    ("Welcome to the site, 3 messages\n4711\n", "4711"),
]


@pytest.mark.parametrize(("out", "job_id"), ANSWERS)
def test_the_job_id_is_read_from_what_sbatch_prints(out: str, job_id: str, slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.answers(out)
    assert submit_script(SCRIPT, folder=tmp_path / "submitted", env=os.environ) == job_id


def test_a_job_that_went_to_another_cluster_is_cancelled_there(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.answers("4711;gpu2\n")
    with pytest.raises(ClusterError, match="sbatch gave the job to cluster gpu2 as job 4711, which is cancelled"):
        submit_script(SCRIPT, folder=tmp_path / "submitted", env=os.environ)
    assert (slurm.folder / "cancelled").read_text() == "--clusters=gpu2 4711\n"


def test_sbatch_gets_the_script_as_it_is(slurm: FakeSlurm, tmp_path: Path) -> None:
    submit_script(SCRIPT, folder=tmp_path / "logs" / "submitted", env=os.environ)
    told = json.loads(slurm.told.read_text())
    assert told["script"] == SCRIPT
    assert told["argv"][:-1] == ["--parsable"]
    assert len(told["argv"]) == 2


def test_variables_of_an_enclosing_job_do_not_reach_sbatch(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    withheld = ["SLURM_JOB_ID", "SLURM_CPU_BIND", "SBATCH_PARTITION", "SRUN_CPUS_PER_TASK", "RANK", "MASTER_ADDR"]
    withheld += ["WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "LD_PRELOAD", "NOT_NAMED", "MY_TOKEN"]
    kept = ["SLURM_CONF", "NCCL_DEBUG", "MY_OWN", "HF_TOKEN", "BASH_FUNC_module%%", "TOKENIZERS_PARALLELISM"]
    for name in (*withheld, *kept):
        monkeypatch.setenv(name, "value")
    submit_script(SCRIPT, folder=tmp_path / "submitted", env=os.environ, export=["MY_*", "HF_TOKEN"])
    seen = json.loads(slurm.told.read_text())["env"]
    assert {name for name in (*withheld, *kept) if name in seen} == set(kept)


def test_sbatch_gets_the_environment_that_was_given_not_that_of_the_process(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NCCL_DEBUG", "PYTHONPATH"):
        monkeypatch.setenv(name, "of the process")
    env = {"PATH": os.environ["PATH"], "NCCL_DEBUG": "given", "MY_OWN": "given too", "SLURM_JOB_ID": "77"}
    submit_script(SCRIPT, folder=tmp_path / "submitted", env=env, export=["MY_OWN"])
    seen = json.loads(slurm.told.read_text())["env"]
    assert {name: seen.get(name) for name in (*env, "PYTHONPATH")} == {
        **env,
        "SLURM_JOB_ID": None,
        "PYTHONPATH": None,
    }


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


REFUSALS = [
    (
        "sbatch: error: Batch job submission failed: Invalid qos specification\n",
        "sbatch refused the job: sbatch: error: Batch job submission failed: Invalid qos specification",
    ),
    (
        "sbatch: error: first\nsbatch: error: Batch job submission failed: second\n",
        "sbatch refused the job: sbatch: error: Batch job submission failed: second",
    ),
    ("something else went wrong\n", "sbatch refused the job: something else went wrong"),
    ("", "sbatch refused the job: FailedJobError"),
]


@pytest.mark.parametrize(("err", "message"), REFUSALS)
def test_a_refusal_is_an_error_with_slurms_own_line(err: str, message: str, slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.answers("", err=err, code=1)
    with pytest.raises(ClusterError) as caught:
        submit_script(SCRIPT, folder=tmp_path / "submitted", env=os.environ)
    assert caught.value.message == message
    assert caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("out", ["", "Submitted batch job 4711\n", "no id here\n"])
def test_an_answer_without_an_id_is_not_taken_for_one(out: str, slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.answers(out)
    with pytest.raises(ClusterError, match="sbatch printed no job id"):
        submit_script(SCRIPT, folder=tmp_path / "submitted", env=os.environ)


def test_without_srun_there_is_no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match="srun"):
        submit_script(SCRIPT, folder=tmp_path / "submitted", env=os.environ)
