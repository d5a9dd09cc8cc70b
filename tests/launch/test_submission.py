from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_train.errors import ClusterError
from slurm_train.launch.submission import submit_script
from tests.fakes.slurm_programs import SlurmPrograms
from tests.support.refusals import refusal

SCRIPT = "#!/bin/bash\n#SBATCH --nodes=1\necho $HOME\n"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmPrograms:
    slurm = SlurmPrograms(tmp_path / "bin")
    monkeypatch.setenv("PATH", slurm.path)
    return slurm


def answers(slurm: SlurmPrograms, out: str) -> None:
    (slurm.folder / "job_id").write_text(out)


@pytest.mark.parametrize("out", ["4711;cluster\n", "Welcome to the site, 3 messages\n4711\n"])
def test_sbatch_gets_the_script_as_it_is_and_its_answer_is_read(out: str, slurm: SlurmPrograms, tmp_path: Path) -> None:
    answers(slurm, out)
    before = os.umask(0)
    try:
        assert submit_script(SCRIPT, folder=tmp_path / "logs" / "submitted", env=os.environ) == "4711"
    finally:
        os.umask(before)
    assert slurm.said("submitted.sh") == SCRIPT
    assert (slurm.said("submitted_words") or "").split()[:-1] == ["--parsable"]
    # What a link's own mode says counts for nobody.
    kept = [path for path in (tmp_path / "logs" / "submitted").iterdir() if not path.is_symlink()]
    assert kept and not [path for path in (kept[0].parent, *kept) if path.stat().st_mode & 0o077], "it is private"


def test_a_job_that_went_to_another_cluster_is_cancelled_there(slurm: SlurmPrograms, tmp_path: Path) -> None:
    answers(slurm, "4711;gpu2\n")
    with pytest.raises(ClusterError, match="sbatch gave the job to cluster gpu2 as job 4711, which is cancelled"):
        submit_script(SCRIPT, folder=tmp_path / "submitted", env=os.environ)
    assert slurm.said("cancelled") == "--clusters=gpu2 4711\n"


def test_of_the_environment_only_what_is_given_and_may_travel_reaches_sbatch(
    slurm: SlurmPrograms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    withheld = ["SLURM_JOB_ID", "SBATCH_PARTITION", "RANK", "WANDB_API_KEY", "LD_PRELOAD", "NOT_NAMED"]
    kept = ["SLURM_CONF", "NCCL_DEBUG", "MY_OWN", "HF_TOKEN"]
    monkeypatch.setenv("PYTHONPATH", "of the process")
    monkeypatch.setenv("NCCL_DEBUG", "of the process")
    env = {"PATH": os.environ["PATH"], **dict.fromkeys((*withheld, *kept), "given")}
    submit_script(SCRIPT, folder=tmp_path / "submitted", env=env, export=["MY_*", "HF_TOKEN"])
    seen = dict(line.split("=", 1) for line in (slurm.said("submitted_env") or "").splitlines() if "=" in line)
    found = {name: seen[name] for name in (*withheld, *kept, "PYTHONPATH") if name in seen}
    assert found == dict.fromkeys(kept, "given")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            "printf 'sbatch: error: first\nsbatch: error: Invalid qos\n' >&2; exit 1",
            "the job: sbatch: error: Invalid qos",
        ),
        ("exit 1", "the job: FailedJobError"),
        ("echo Submitted batch job 4711", "sbatch printed no job id"),
    ],
)
def test_a_refusal_is_an_error_with_slurms_own_line(
    program: str, message: str, slurm: SlurmPrograms, tmp_path: Path
) -> None:
    (slurm.folder / "sbatch").write_text(f"#!/bin/sh\n{program}\n")
    error = refusal(ClusterError, submit_script, SCRIPT, folder=tmp_path / "submitted", env=os.environ)
    assert message in error.message
